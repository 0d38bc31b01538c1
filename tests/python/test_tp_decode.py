"""Property: the example tp_decode.py passes all its checks on CPUs: two processes, gloo, onehop and its fused form in a run.

And its model is right beside a plain one: the same choices for a whole sequence at once as for chunks and single steps,
from safetensors too.
"""

import concurrent.futures
import functools
import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
torch.set_num_threads(1)  # all is small

import tp_model  # noqa: E402

CONFIG = tp_model.TINY
TINY = ["--device", "cpu", "--tiny", "--prompt", "12", "--tokens", "3", "--rounds", "2", "--batch", "1,2"]


def decode(*args):
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "tp_decode.py"), *map(str, args)],
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_all_kinds_in_one_run(tmp_path):
    path = tmp_path / "decode.json"
    done = decode(*TINY, "--all-reduce", "gloo,onehop", "--fused", "--chunk", "8", "--check", "-J", path)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(path.read_text())
    assert {(row["batch"], row["all_reduce"]) for row in data["results"]} == {
        (batch, kind) for batch in (1, 2) for kind in ("gloo", "onehop", "onehop, fused")
    }
    for row in data["results"]:
        assert row["us_per_step"] > 0
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * 1e6 / row["us_per_step"])
        assert row["all_reduce"] != "onehop" or row["ratio"] == 1
    assert len(data["checks"]) == 11 and all(data["checks"].values()), data["checks"]
    assert done.stdout.count("# ok ") == 11


@pytest.mark.parametrize(
    "args",
    [
        ["--all-reduce", "nccl"],
        ["--all-reduce", "gloo,gloo"],
        ["--batch", "0"],
        ["--fused", "--tp", "1"],
        ["--share-gpu"],
    ],
)
def test_usage(args):
    done = decode(*TINY, *args)
    assert done.returncode == 2, done.stderr


# ---- the model -------------------------------------------------------------------------------------------------------


class Alone:
    """The all-reduce of one rank."""

    room = staticmethod(lambda shape, dtype: torch.empty(shape, dtype=dtype))
    sum = staticmethod(lambda tensor: tensor)
    sum_norm = None


class InOne(Alone):
    """That takes the norm too."""

    @staticmethod
    def sum_norm(tensor, residual, weight, eps):
        after = tensor if residual is None else residual + tensor
        return after * (after.square().mean(-1, keepdim=True) + eps).rsqrt() * weight, after


def weights_of(seed=3):
    """Wide enough apart that greedy choices are no accidents."""
    random = tp_model.RandomWeights(seed, "cpu", torch.float32)

    def weights(name, shape, take=...):
        if len(shape) == 1:  # norms that are no ones
            return 1 + random(name, (1, *shape))[0][take] * 10
        return random(name, shape, take) * 5

    return weights


@functools.cache
def whole(name, *shape):
    return weights_of()(name, shape)


def plain_logits(ids):
    """Of every position, by the formulas of the model, without a cache and without shards."""
    c = CONFIG
    length, group = len(ids), c.heads // c.kv_heads

    def norm(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + c.eps) * whole(name, x.shape[-1])

    def rotate(x):
        angles = torch.arange(length)[:, None] / c.theta ** (torch.arange(0, c.head_dim, 2) / c.head_dim)
        cos, sin = angles.cos(), angles.sin()
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    table = whole("model.embed_tokens.weight", c.vocab, c.hidden)
    x = table[ids]
    for index in range(c.layers):
        at = f"model.layers.{index}."
        h = norm(x, f"{at}input_layernorm.weight")
        q, k, v = (
            (h @ whole(f"{at}self_attn.{part}_proj.weight", heads * c.head_dim, c.hidden).T)
            .view(length, heads, c.head_dim)
            .transpose(0, 1)
            for part, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads))
        )
        q, k = (rotate(norm(one, f"{at}self_attn.{part}_norm.weight")) for part, one in (("q", q), ("k", k)))
        out = torch.empty(c.heads, length, c.head_dim)
        for head in range(c.heads):
            scores = q[head] @ k[head // group].T / c.head_dim**0.5
            scores += torch.full((length, length), -torch.inf).triu(1)
            out[head] = scores.softmax(-1) @ v[head // group]
        width = c.heads * c.head_dim
        x = x + out.transpose(0, 1).reshape(length, width) @ whole(f"{at}self_attn.o_proj.weight", c.hidden, width).T
        h = norm(x, f"{at}post_attention_layernorm.weight")
        gate, up = (h @ whole(f"{at}mlp.{part}_proj.weight", c.intermediate, c.hidden).T for part in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ whole(f"{at}mlp.down_proj.weight", c.hidden, c.intermediate).T
    return norm(x, "model.norm.weight") @ table.T


class Between(Alone):
    """The all-reduce of ranks that are threads of this process."""

    def __init__(self, rank, places, barrier):
        self.rank, self.places, self.barrier = rank, places, barrier

    def sum(self, tensor):
        self.places[self.rank] = tensor
        self.barrier.wait(60)
        total = sum(self.places[1:], self.places[0])
        self.barrier.wait(60)
        return total


def generate(weights, prompts, tokens, chunk, rank=0, ranks=1, reduce=Alone):
    model = tp_model.Model(CONFIG, weights, rank, ranks, len(prompts), prompts.shape[1] + tokens)
    model.reduce = reduce
    for sequence, prompt in enumerate(prompts):
        model.prefill(sequence, prompt, chunk)
    model.position.fill_(prompts.shape[1])
    for _ in range(tokens):
        model.step(len(prompts))
    return model.tokens[:, : prompts.shape[1] + tokens + 1]


PROMPTS = torch.randint(CONFIG.vocab, (2, 21), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("chunk", "reduce"), [(100, Alone), (8, Alone), (8, InOne)])
def test_generates_what_the_plain_model_does(chunk, reduce):
    found = generate(weights_of(), PROMPTS, 12, chunk, reduce=reduce)
    assert torch.equal(found[:, :21], PROMPTS)
    for sequence in found:
        logits = plain_logits(sequence[:-1])[20:]
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-3, "a choice between equals shows nothing"
        assert sequence[21:].tolist() == logits.argmax(-1).tolist()
    assert len(set(found[0, 21:].tolist())) > 4, "always the same token"


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_generate_what_one_does(ranks):
    places, barrier = [None] * ranks, threading.Barrier(ranks)
    with concurrent.futures.ThreadPoolExecutor(ranks) as pool:
        runs = [
            pool.submit(generate, weights_of(), PROMPTS, 12, 8, rank, ranks, Between(rank, places, barrier))
            for rank in range(ranks)
        ]
        found = [run.result() for run in runs]
    expected = generate(weights_of(), PROMPTS, 12, 8)
    assert all(torch.equal(one, expected) for one in found)
    half = CONFIG.vocab // 2
    picked = expected[:, 21:]
    assert (picked < half).any() and (picked >= half).any(), "one rank alone would do"


def test_shards_make_the_whole():
    """The sums of two ranks' partial products and rows are those of one."""
    both = [tp_model.Model(CONFIG, weights_of(), rank, 2, 1, 30) for rank in range(2)]
    one = tp_model.Model(CONFIG, weights_of(), 0, 1, 1, 30)
    for model in (one, *both):
        model.reduce = Alone
    ids = torch.tensor([0, 255, 256, 511])
    assert torch.equal(both[0].embed(ids) + both[1].embed(ids), one.embed(ids))
    for index in range(CONFIG.layers):
        layers = [model.layers[index] for model in both]
        for name in ("out", "down"):
            halves = [getattr(layer, name) for layer in layers]
            assert torch.equal(torch.cat(halves, 1), getattr(one.layers[index], name))
        q, k, v = one.layers[index].qkv.split([128, 64, 64])
        for rank, layer in enumerate(layers):
            mine = [part.chunk(2)[rank] for part in (q, k, v)]
            assert torch.equal(layer.qkv, torch.cat(mine))
            gate, up = one.layers[index].gate_up.chunk(2)
            assert torch.equal(layer.gate_up, torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]))


def test_safetensors(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    names = {"model.embed_tokens": (512, 64), "model.norm": (64,)}
    shapes = {"self_attn.q_proj": (128, 64), "self_attn.k_proj": (64, 64), "self_attn.v_proj": (64, 64),
              "self_attn.o_proj": (64, 128), "self_attn.q_norm": (16,), "self_attn.k_norm": (16,),
              "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128),
              "input_layernorm": (64,), "post_attention_layernorm": (64,)}  # fmt: skip
    for index in range(CONFIG.layers):
        names.update({f"model.layers.{index}.{name}": shape for name, shape in shapes.items()})
    tensors = {f"{name}.weight": whole(f"{name}.weight", *shape) for name, shape in names.items()}
    first = dict(list(tensors.items())[:5])
    save_file(first, tmp_path / "model-1.safetensors")
    save_file({name: one for name, one in tensors.items() if name not in first}, tmp_path / "model-2.safetensors")
    files = tp_model.FileWeights(tmp_path, "cpu", torch.float32)
    assert torch.equal(generate(files, PROMPTS, 4, 100), generate(weights_of(), PROMPTS, 4, 100))
    with pytest.raises(SystemExit, match="no tensor nothing"):
        files("nothing", (1,))
    with pytest.raises(SystemExit, match="expected"):
        files("model.norm.weight", (65,))
