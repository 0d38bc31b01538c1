"""A decoder of Qwen3's shape, tensor parallel: one rank's shard of it, its key-value cache, prefill and decode steps.

Each layer has two row-parallel products whose partial sums are all-reduced; the embedding and the greedy pick over the
sharded vocabulary are all-reduced as well, so a token costs 2 * layers + 2 all-reduces, all by one object:

    room(shape, dtype)  a tensor into which the partial sums are computed
    sum(tensor)         the sum over all ranks of what lies there
    sum_norm            None, or what takes the place of sum, addition and norm after each of the products:
                        sum_norm(tensor, residual or None, weight, eps) -> (norm, residual + sum)

A decode step keeps all its state on the device (position, tokens, cache), so that a CUDA graph of one step can be
replayed token by token. Weights are random from a seed, or those of a folder of safetensors with the model's own names.
"""

import math
import os
import zlib
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

SPLIT = 128  # keys that one product of the decode step's attention reduces over


class Config(NamedTuple):
    """Sizes of a model."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    theta: float = 1e6
    eps: float = 1e-6

    def check(self, ranks):
        for what in ("heads", "kv_heads", "intermediate", "vocab"):
            if getattr(self, what) % ranks:
                raise SystemExit(f"{self.name} has {getattr(self, what)} {what}: not to be divided by {ranks} ranks")


QWEN3_0_6B = Config("Qwen3-0.6B", 1024, 28, 16, 8, 128, 3072, 151936)
TINY = Config("tiny", 64, 2, 8, 4, 16, 128, 512)


# ---- weights ---------------------------------------------------------------------------------------------------------


class RandomWeights:
    """Each tensor from a generator of its own, so that a shard has the same values whatever the number of ranks."""

    def __init__(self, seed, device, dtype):
        self.seed, self.device, self.dtype = seed, device, dtype

    def __call__(self, name, shape, take=...):
        """The part `take` (an index) of a tensor."""
        if len(shape) == 1:
            return torch.ones(shape, device=self.device, dtype=self.dtype)[take]
        generator = torch.Generator(self.device).manual_seed(self.seed << 32 | zlib.crc32(name.encode()))
        whole = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
        return (whole[take] * 0.02).to(self.dtype)


class FileWeights:
    """The *.safetensors of a folder."""

    def __init__(self, folder, device, dtype):
        from safetensors import safe_open

        self.device, self.dtype, self.files = device, dtype, {}
        for entry in sorted(os.listdir(folder)):
            if entry.endswith(".safetensors"):
                file = safe_open(os.path.join(folder, entry), "pt")
                self.files.update(dict.fromkeys(file.keys(), file))
        if not self.files:
            raise SystemExit(f"{folder}: no *.safetensors here")

    def __call__(self, name, shape, take=...):
        if name not in self.files:
            raise SystemExit(f"no tensor {name} in the safetensors")
        part = self.files[name].get_slice(name)
        if tuple(part.get_shape()) != tuple(shape):
            raise SystemExit(f"{name} has shape {part.get_shape()}, expected {list(shape)}")
        return part[take].to(self.device, self.dtype)


class Layer(NamedTuple):
    """Products take their weights as [outputs, inputs]; q, k and v are one, gate and up are one."""

    norm: torch.Tensor
    qkv: torch.Tensor
    qk_norm: torch.Tensor
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def load_layer(config, weights, index, rank, ranks):
    prefix = f"model.layers.{index}."
    heads, kv_heads = config.heads // ranks, config.kv_heads // ranks

    def share(width):
        return slice(rank * width // ranks, (rank + 1) * width // ranks)

    def rows(name, height, width):
        return weights(f"{prefix}{name}.weight", (height, width), share(height))

    def columns(name, height, width):
        return weights(f"{prefix}{name}.weight", (height, width), (slice(None), share(width))).contiguous()

    def norm(name, width):
        return weights(f"{prefix}{name}.weight", (width,))

    hidden, q_width, kv_width = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    qkv = [rows(f"self_attn.{part}_proj", q_width if part == "q" else kv_width, hidden) for part in "qkv"]
    gate_up = [rows(f"mlp.{part}_proj", config.intermediate, hidden) for part in ("gate", "up")]
    q_norm, k_norm = norm("self_attn.q_norm", config.head_dim), norm("self_attn.k_norm", config.head_dim)
    return Layer(
        norm("input_layernorm", hidden),
        torch.cat(qkv),
        torch.stack([q_norm] * heads + [k_norm] * kv_heads),
        columns("self_attn.o_proj", hidden, q_width),
        norm("post_attention_layernorm", hidden),
        torch.cat(gate_up),
        columns("mlp.down_proj", hidden, config.intermediate),
    )


# ---- the model -------------------------------------------------------------------------------------------------------


class Model:
    """One rank's share. `reduce` is set to the all-reduce to use."""

    def __init__(self, config, weights, rank, ranks, sequences, length):
        """Room for `sequences` of `length` tokens each."""
        self.config, self.rank, self.ranks = config, rank, ranks
        self.heads, self.kv_heads = config.heads // ranks, config.kv_heads // ranks
        self.vocab_start = rank * config.vocab // ranks
        share = slice(self.vocab_start, self.vocab_start + config.vocab // ranks)
        self.table = weights("model.embed_tokens.weight", (config.vocab, config.hidden), share).contiguous()
        self.norm = weights("model.norm.weight", (config.hidden,))
        self.layers = [load_layer(config, weights, index, rank, ranks) for index in range(config.layers)]
        self.device, self.dtype, self.reduce = self.table.device, self.table.dtype, None
        self.make_state(sequences, -(-length // SPLIT) * SPLIT)

    def make_state(self, sequences, length):
        shape = (self.config.layers, sequences, self.kv_heads, length, self.config.head_dim)
        self.keys = torch.zeros(shape, device=self.device, dtype=self.dtype)
        self.values = torch.zeros_like(self.keys)
        self.tokens = torch.zeros((sequences, length + 1), dtype=torch.int64, device=self.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.places = torch.arange(length, device=self.device)
        frequencies = self.config.theta ** (-torch.arange(0, self.config.head_dim, 2, device=self.device).double()
                                            / self.config.head_dim)  # fmt: skip
        angles = self.places[:, None] * frequencies
        # Second factor of a rotation by halves: x * cos + roll(x) * sin.
        self.cos = torch.cat([angles.cos(), angles.cos()], -1).to(self.dtype)
        self.sin = torch.cat([-angles.sin(), angles.sin()], -1).to(self.dtype)

    # -- what is all-reduced --

    def product(self, x, weight):
        """A partial sum, row parallel: each rank has some of the inputs and the weights that go with them."""
        partial = self.reduce.room((x.shape[0], weight.shape[0]), self.dtype)
        return torch.mm(x, weight.T, out=partial)

    def embed(self, ids):
        """A partial sum: rows of the sharded table, zero on all ranks but one."""
        local = ids - self.vocab_start
        here = (local >= 0) & (local < self.table.shape[0])
        rows = F.embedding(local.clamp(0, self.table.shape[0] - 1), self.table)
        partial = self.reduce.room(tuple(rows.shape), self.dtype)
        return torch.mul(rows, here[:, None], out=partial)

    def add(self, partial, residual, weight):
        """The norm of the residual with the sum over all ranks added, and that itself."""
        if self.reduce.sum_norm:
            return self.reduce.sum_norm(partial, residual, weight, self.config.eps)
        total = self.reduce.sum(partial)
        after = total if residual is None else residual + total
        return F.rms_norm(after, (self.config.hidden,), weight, self.config.eps), after

    def pick(self, h):
        """The likeliest token of each normed row, the lowest of equals.

        Every rank puts its best (value, token) into a place of its own, and the sum with the others' zeros is exact:
        all ranks choose from the same bits.
        """
        values, ids = (h @ self.table.T).max(-1)
        best = self.reduce.room((self.ranks, len(ids), 2), torch.float32)
        best.zero_()
        best[self.rank, :, 0] = values.float()
        best[self.rank, :, 1] = (ids + self.vocab_start).float()  # exact to 2^24
        values, ids = self.reduce.sum(best).unbind(-1)
        return ids.gather(0, values.max(0, keepdim=True).indices)[0].long()

    # -- a layer --

    def layer(self, index, h, x, cos, sin, attend):
        """`h` is the norm of `x`, for this layer; what is returned are those of the next one."""
        config, weights = self.config, self.layers[index]
        after = self.layers[index + 1].norm if index + 1 < config.layers else self.norm
        h = (h @ weights.qkv.T).view(len(h), self.heads + 2 * self.kv_heads, config.head_dim)
        # A norm of each head, which lies on one rank. The values' norms are not used; without them the input would
        # have to be copied first.
        qk = F.rms_norm(h, (config.head_dim,), None, config.eps)[:, : -self.kv_heads] * weights.qk_norm
        qk = torch.addcmul(qk * cos, qk.roll(config.head_dim // 2, -1), sin)
        h = attend(index, qk[:, : self.heads], qk[:, self.heads :], h[:, -self.kv_heads :])
        h, x = self.add(self.product(h, weights.out), x, weights.mlp_norm)
        gate, up = (h @ weights.gate_up.T).chunk(2, -1)
        return self.add(self.product(F.silu(gate) * up, weights.down), x, after)

    def run_layers(self, ids, cos, sin, attend):
        """The normed rows behind the last layer."""
        h, x = self.add(self.embed(ids), None, self.layers[0].norm)
        for index in range(self.config.layers):
            h, x = self.layer(index, h, x, cos[:, None], sin[:, None], attend)
        return h

    # -- prefill --

    def prefill(self, sequence, prompt, chunk):
        """A sequence's cache and its first token; the step goes on at the position behind the prompt."""
        self.tokens[sequence, : len(prompt)] = prompt
        for start in range(0, len(prompt), chunk):
            h = self.prefill_chunk(sequence, start, min(start + chunk, len(prompt)))
        self.tokens[sequence, len(prompt)] = self.pick(h[-1:])[0]

    def prefill_chunk(self, sequence, start, end):
        later = self.places[None, :end] > self.places[start:end, None]
        mask = None if start == 0 else torch.zeros(later.shape, device=self.device, dtype=self.dtype)
        if mask is not None:
            mask.masked_fill_(later, -math.inf)

        def attend(index, q, k, v):
            keys, values = self.keys[index, sequence], self.values[index, sequence]
            keys[:, start:end] = k.transpose(0, 1)
            values[:, start:end] = v.transpose(0, 1)
            group = self.heads // self.kv_heads
            keys, values = (kept[:, :end].repeat_interleave(group, 0)[None] for kept in (keys, values))
            out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, mask, is_causal=mask is None)
            return out[0].transpose(0, 1).reshape(end - start, -1)

        return self.run_layers(self.tokens[sequence, start:end], self.cos[start:end], self.sin[start:end], attend)

    # -- decode --

    def step(self, batch):
        """The next token of the first `batch` sequences, which are all at `position`."""
        mask = torch.zeros(len(self.places), device=self.device, dtype=self.dtype)
        mask.masked_fill_(self.places > self.position, -math.inf)
        mask = mask[None, None]

        def attend(index, q, k, v):
            self.keys[index, :batch].index_copy_(2, self.position, k[:, :, None])
            self.values[index, :batch].index_copy_(2, self.position, v[:, :, None])
            return self.attend_one(q, self.keys[index, :batch], self.values[index, :batch], mask)

        ids = self.tokens[:batch].index_select(1, self.position)[:, 0]
        cos, sin = self.cos.index_select(0, self.position), self.sin.index_select(0, self.position)
        ids = self.pick(self.run_layers(ids, cos, sin, attend))
        self.tokens[:batch].index_copy_(1, self.position + 1, ids[:, None])
        self.position.add_(1)

    def attend_one(self, q, keys, values, mask):
        """One query per head over the whole cache.

        The heads of a group are the rows of a product; the second product is cut along the keys, which there are the
        inputs, to have enough of them to fill a GPU.
        """
        batch, _, length, width = keys.shape
        pairs, group, splits = batch * self.kv_heads, self.heads // self.kv_heads, length // SPLIT
        keys = keys.view(pairs, length, width).transpose(1, 2)
        scores = torch.baddbmm(mask, q.reshape(pairs, group, width), keys, alpha=width**-0.5)
        scores = torch.softmax(scores, -1, dtype=torch.float32).view(pairs, group, splits, SPLIT)
        shares = torch.empty((pairs, splits, group, SPLIT), device=self.device, dtype=self.dtype)
        shares.copy_(scores.transpose(1, 2))
        parts = torch.bmm(shares.view(pairs * splits, group, SPLIT), values.view(pairs * splits, SPLIT, width))
        return parts.view(pairs, splits, group, width).sum(1).view(batch, -1)
