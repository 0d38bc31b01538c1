#!/usr/bin/env python3
"""Greedy decoding with a tensor-parallel model, its all-reduces by onehop, NCCL, PyTorch's symmetric memory or gloo.

    tp_decode.py [--tp 2] [--batch 1,8,32] [--all-reduce nccl,symm_mem,onehop] [--fused] [--check] [-J FILE]  two GPUs
    tp_decode.py --share-gpu --tiny --prompt 200 --tokens 16 --check                                   one GPU
    tp_decode.py --device cpu --tiny --all-reduce gloo,onehop --prompt 200 --tokens 16 --check         no GPU
    torchrun --nproc-per-node 2 tp_decode.py ...

A decoder of Qwen3-0.6B's configuration (tp_model.py), random weights unless --safetensors names a folder. All sequences
have a prompt of random tokens, prefilled in chunks. Then each all-reduce decodes the same tokens from the same state,
in turn, in one process group and one run: on GPUs every batch size has a CUDA graph of a step, replayed token by token.
Shown is the median over the steps, the largest of all ranks; ratio is the time over that of onehop (or of the first).

--share-gpu: all ranks on the first GPU, to try the code: no link is crossed. Start the driver's MPS daemon
(nvidia-cuda-mps-control -d) before; without it the GPU serves one process after the other, milliseconds an all-reduce.
NCCL refuses two ranks on one GPU of one host, so each rank names a host of its own, and NCCL goes through sockets.
--fused: one more, "onehop, fused", whose all-reduces add the residual and take the norm in the same launch.
--check: the sum of a row has the same bytes in all batch sizes; tokens are equal on all ranks, in all rounds, and after
prefilling anew. Exit status: 1 a check failed or a rank did, 2 usage.
"""

import argparse
import contextlib
import faulthandler
import functools
import itertools
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time

# Before CUDA or NCCL is loaded: no NVLink multicast, by anybody.
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
os.environ.update(MULTICAST_OFF)

KINDS = {"cuda": ("nccl", "symm_mem", "onehop"), "cpu": ("gloo", "onehop")}
SHARED_KINDS = ("nccl", "onehop")  # PyTorch's symmetric memory wants a GPU for each rank
FUSED = "onehop, fused"
DTYPES = ("bfloat16", "float16", "float32")
WARM_UP, ROUNDS = 3, 5


# ---- all-reduces -----------------------------------------------------------------------------------------------------


class Reducer:
    """What the model asks for. `capture` is a context around the capture of a graph."""

    capture = contextlib.nullcontext
    sum_norm = None

    def __init__(self, device):
        self.device = device

    def room(self, shape, dtype):
        return torch.empty(shape, device=self.device, dtype=dtype)

    def close(self):
        pass


class Distributed(Reducer):
    """torch.distributed's own: NCCL for GPUs, gloo for CPUs."""

    def sum(self, tensor):
        torch.distributed.all_reduce(tensor)
        return tensor


class Onehop(Reducer):
    """By a group for CPU tensors."""

    def __init__(self, device, group, share_gpu):
        super().__init__(device)
        import onehop

        self.ar = onehop.AllReduce(group, device, share_gpu=share_gpu)
        self.capture, self.sum, self.close = self.ar.capture, self.ar.all_reduce, self.ar.close


class Fused(Onehop):
    """Sum, addition and norm in one."""

    def sum_norm(self, partial, residual, weight, eps):
        return self.ar.all_reduce_norm(partial, weight, residual=residual, eps=eps)[:2]


class SymmMem(Reducer):
    """Partial sums are computed into symmetric memory. One for all of them: each call ends with a barrier."""

    ONE_SHOT_BYTES = 128 << 10  # as torch.compile chooses

    def __init__(self, device, max_bytes):
        super().__init__(device)
        import torch.distributed._symmetric_memory as symmetric

        self.group = torch.distributed.group.WORLD.group_name
        self.memory = symmetric.empty(max_bytes, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self.memory, self.group)

    def room(self, shape, dtype):
        return self.memory[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def sum(self, tensor):
        if tensor.numel() * tensor.itemsize <= self.ONE_SHOT_BYTES:
            return torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", self.group)
        return torch.ops.symm_mem.two_shot_all_reduce_(tensor, "sum", self.group).clone()


class Recorder(Reducer):
    """Another one, keeping what it is given: a list of (rows, what is called with as many as there are)."""

    def __init__(self, inner):
        self.room, self.inner, self.seen = inner.room, inner, []
        self.sum_norm = inner.sum_norm and self.keep_norm

    def sum(self, partial):
        self.seen.append(([partial.clone()], lambda partial: [self.inner.sum(partial)]))
        return self.inner.sum(partial)

    def keep_norm(self, partial, residual, weight, eps):
        rows = [partial.clone()] if residual is None else [partial.clone(), residual]
        self.seen.append((rows, lambda partial, residual=None: self.inner.sum_norm(partial, residual, weight, eps)))
        return self.inner.sum_norm(partial, residual, weight, eps)


def make_reducer(kind, device, group, max_bytes, share_gpu):
    if kind in ("onehop", FUSED):
        return (Fused if kind == FUSED else Onehop)(device, group, share_gpu)
    return SymmMem(device, max_bytes) if kind == "symm_mem" else Distributed(device)


# ---- one rank --------------------------------------------------------------------------------------------------------


class Rank:
    """One process: model, prompts and all-reduces."""

    def __init__(self, options, rank, ranks):
        self.options, self.rank, self.ranks = options, rank, ranks
        self.group = torch.distributed.new_group(backend="gloo")  # for all but the model's sums
        self.cuda = options.device == "cuda"
        self.device = torch.device("cuda", gpu_of(options)) if self.cuda else torch.device("cpu")
        dtype = getattr(torch, options.dtype)
        self.config = tp_model.TINY if options.tiny else tp_model.QWEN3_0_6B
        self.config.check(ranks)
        self.most = max(options.batches)
        rows = max(min(options.chunk, options.prompt), self.most)
        max_bytes = max(rows * self.config.hidden * dtype.itemsize, ranks * self.most * 2 * 4)
        self.reducers = {
            kind: make_reducer(kind, self.device, self.group, max_bytes, options.share_gpu) for kind in options.kinds
        }
        if options.safetensors:
            weights = tp_model.FileWeights(options.safetensors, self.device, dtype)
        else:
            weights = tp_model.RandomWeights(options.seed, self.device, dtype)
        room = options.prompt + options.tokens + WARM_UP
        self.model = tp_model.Model(self.config, weights, rank, ranks, self.most, room)
        generator = torch.Generator().manual_seed(options.seed)
        prompts = torch.randint(self.config.vocab, (self.most, options.prompt), generator=generator)
        self.prompts = prompts.to(self.device)

    def close(self):
        self.barrier()
        for reducer in self.reducers.values():
            reducer.close()
        self.barrier()

    # -- together --

    def barrier(self):
        if self.cuda:
            torch.cuda.synchronize()
        torch.distributed.barrier(self.group)

    def gather(self, value):
        values = [None] * self.ranks
        torch.distributed.all_gather_object(values, value, self.group)
        return values

    def say(self, text):
        if self.rank == 0:
            print(text, flush=True)

    # -- prefill --

    def prefill(self, kind, sequence):
        self.model.reduce = self.reducers[kind]
        self.model.prefill(sequence, self.prompts[sequence], self.options.chunk)

    def time_prefill(self, kind):
        """Tokens per second of one sequence, the second time; the slowest rank's."""
        for _ in range(2):
            self.barrier()
            begin = time.perf_counter()
            self.prefill(kind, 0)
            if self.cuda:
                torch.cuda.synchronize()
            taken = time.perf_counter() - begin
        return self.options.prompt / max(self.gather(taken))

    # -- decode --

    def rewind(self):
        self.model.position.fill_(self.options.prompt)

    def make_step(self, kind, batch):
        """A function that decodes a token: a graph's replay, or the step itself."""
        self.model.reduce = self.reducers[kind]
        step = functools.partial(self.model.step, batch)
        if not self.cuda:
            return functools.partial(self.step_with, self.reducers[kind], step)
        self.rewind()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Not "global": a thread of torch may look at events meanwhile.
        with self.reducers[kind].capture(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        return graph.replay

    def step_with(self, reducer, step):
        self.model.reduce = reducer
        step()

    def decode(self, step, batch):
        """The times of the steps in us, and the tokens."""
        self.rewind()
        self.barrier()
        if self.cuda:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(self.options.tokens + 1)]
            events[0].record()
            for event in events[1:]:
                step()
                event.record()
            torch.cuda.synchronize()
            times = [one.elapsed_time(other) * 1000 for one, other in itertools.pairwise(events)]
        else:
            clock = [time.perf_counter()]
            for _ in range(self.options.tokens):
                step()
                clock.append(time.perf_counter())
            times = [(other - one) * 1e6 for one, other in itertools.pairwise(clock)]
        first = self.options.prompt
        return times, self.model.tokens[:batch, first : first + self.options.tokens + 1].tolist()

    def run_batch(self, batch):
        """Kind -> (times of all steps, tokens of each round); the kinds take turns."""
        steps = {kind: self.make_step(kind, batch) for kind in self.options.kinds}
        found = {kind: ([], []) for kind in self.options.kinds}
        for _ in range(self.options.rounds):
            for kind, step in steps.items():
                times, tokens = self.decode(step, batch)
                found[kind][0].extend(times)
                found[kind][1].append(tokens)
        self.barrier()  # graphs go when no rank replays one any more
        del steps, step
        self.barrier()
        return found

    # -- checks --

    def rows_are_invariant(self, kind):
        """Partial sums of a real step: a row's sum does not depend on the rows beside it."""
        reducer = self.reducers[kind]
        self.model.reduce = recorder = Recorder(reducer)
        self.rewind()
        self.model.step(self.most)
        same = True
        for rows, call in recorder.seen[:-1]:  # the last is not of rows but of the pick
            whole = self.bytes_of(reducer, rows, call)
            for batch in sorted({1, 2, *self.options.batches} & set(range(self.most))):
                part = self.bytes_of(reducer, [one[:batch] for one in rows], call)
                same &= all(torch.equal(one, of[:batch]) for one, of in zip(part, whole, strict=True))
        return all(self.gather(same))

    def bytes_of(self, reducer, rows, call):
        room = reducer.room(tuple(rows[0].shape), rows[0].dtype)
        room.copy_(rows[0])
        return [one.clone().view(torch.uint8) for one in call(room, *rows[1:])]

    def repeats(self, kind, tokens):
        """Prefill and decoding once more, without a graph. `tokens` are those of the first sequence alone."""
        self.prefill(kind, 0)
        _, again = self.decode(functools.partial(self.model.step, 1), 1)
        return all(self.gather(again == tokens))


# ---- results ---------------------------------------------------------------------------------------------------------


def measure(me):
    options = me.options
    base = "onehop" if "onehop" in options.kinds else options.kinds[0]
    prefill = {kind: me.time_prefill(kind) for kind in options.kinds}
    for sequence in range(me.most):
        me.prefill(base, sequence)
    for kind, rate in prefill.items():
        me.say(f"# prefill, {kind}: {rate:.0f} tokens/s")
    me.say(f"#\n# {'batch':>6} {'all-reduce':>13} {'us/step':>10} {'p99':>10} {'tokens/s':>10} {'ratio':>6}")
    rows, tokens = [], {}
    for batch in options.batches:
        found = me.run_batch(batch)
        figures = {kind: summary(me, times) for kind, (times, _) in found.items()}
        for kind, (us, p99) in figures.items():
            row = {"batch": batch, "all_reduce": kind, "us_per_step": us, "p99": p99,
                   "tokens_per_s": batch * 1e6 / us, "ratio": us / figures[base][0]}  # fmt: skip
            rows.append(row)
            tokens[batch, kind] = found[kind][1]
            me.say(f"  {batch:>6} {kind:>13} {us:10.1f} {p99:10.1f} {row['tokens_per_s']:10.1f} {row['ratio']:6.3f}")
    return prefill, rows, tokens


def summary(me, times):
    ordered = sorted(times)
    mine = statistics.median(ordered), ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return [max(values) for values in zip(*me.gather(mine), strict=True)]


def check(me, tokens):
    """What was looked at -> whether it holds."""
    found = {}
    for kind in me.options.kinds:
        rounds = [of for (_, by), of in tokens.items() if by == kind]
        everyone = me.gather(rounds)
        found[f"{kind}: tokens equal in all rounds"] = all(one == of[0] for of in rounds for one in of)
        found[f"{kind}: tokens equal on all ranks"] = all(one == everyone[0] for one in everyone)
        if me.most > 1:
            found[f"{kind}: a row has the same sum in all batch sizes"] = me.rows_are_invariant(kind)
    base = "onehop" if "onehop" in me.options.kinds else me.options.kinds[0]
    for kind in [base, FUSED] if me.options.fused else [base]:
        me.prefill(kind, 0)
        _, first = me.decode(functools.partial(me.model.step, 1), 1)
        found[f"{kind}: the same tokens after prefilling anew"] = me.repeats(kind, first)
    return found


def header(me):
    options = me.options
    about = {
        "schema": "onehop-decode/1", "model": me.config.name, "ranks": me.ranks, "dtype": options.dtype,
        "device": options.device, "gpu": torch.cuda.get_device_name() if me.cuda else "", "cpu": cpu_name(),
        "torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version())) if me.cuda else "",
        "weights": options.safetensors or f"random, seed {options.seed}", "prompt": options.prompt,
        "tokens": options.tokens, "rounds": options.rounds, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "args": sys.argv, "notes": [f"{name}={value}" for name, value in MULTICAST_OFF.items()],
    }  # fmt: skip
    if options.share_gpu:
        about["notes"].append("ranks share a GPU: no link is crossed; NCCL goes through sockets")
    me.say(f"# {me.config.name}'s shape, weights: {about['weights']}; {me.ranks} ranks, {options.dtype}, prompt of "
           f"{options.prompt}, {options.tokens} tokens, {options.rounds} rounds")  # fmt: skip
    me.say(f"# {about['gpu'] or about['cpu']}; PyTorch {about['torch']}{about['nccl'] and ', NCCL ' + about['nccl']}; "
           f"{'CUDA graphs' if me.cuda else 'no graphs'}; {', '.join(about['notes'])}")  # fmt: skip
    return about


def cpu_name():
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def gpu_of(options):
    return 0 if options.share_gpu else int(os.environ["LOCAL_RANK"])


def rank_main(options):
    faulthandler.dump_traceback_later(options.limit, exit=True)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.share_gpu:
        os.environ.update(NCCL_HOSTID=f"onehop-host-{rank}", NCCL_SOCKET_IFNAME="lo")
    if options.device == "cuda":
        torch.cuda.set_device(gpu_of(options))
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, rank=rank, world_size=ranks)
    with torch.inference_mode():
        me = Rank(options, rank, ranks)
        about = header(me)
        prefill, rows, tokens = measure(me)
        checks = check(me, tokens) if options.check else {}
        for what, holds in checks.items():
            me.say(f"# {'ok    ' if holds else 'FAILED'} {what}")
        if rank == 0 and options.json:
            found = {**about, "prefill_tokens_per_s": prefill, "results": rows, "checks": checks}
            options.json.write(json.dumps(found, indent=1))
        me.close()
    torch.distributed.destroy_process_group()
    return 0 if all(checks.values()) else 1


# ---- the command -----------------------------------------------------------------------------------------------------


def positive(text):
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}': expected a positive integer")
    return int(text)


def output(path):
    """Refused before the work if it cannot be written."""
    from onehop._output import Output

    return Output(path)


def flags():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=tuple(KINDS), help="default: cuda if there is a GPU for each rank")
    parser.add_argument("--share-gpu", action="store_true", help="all ranks on the first GPU, by nccl and onehop")
    parser.add_argument("--tp", type=positive, default=2, metavar="N", help="ranks, without torchrun; default 2")
    parser.add_argument("--all-reduce", metavar="LIST", help="of nccl, symm_mem, onehop; on CPUs of gloo, onehop")
    parser.add_argument("--batch", metavar="LIST", help="sequences at a time; default 1,8,32, on CPUs 1,2,8")
    parser.add_argument("--prompt", type=positive, default=6000, metavar="N", help="tokens to prefill; default 6000")
    parser.add_argument("--tokens", type=positive, default=128, metavar="N", help="tokens to decode; default 128")
    parser.add_argument("--chunk", type=positive, default=2048, metavar="N", help="of a prefill; default 2048")
    parser.add_argument("--rounds", type=positive, default=ROUNDS, metavar="N", help="default %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="default %(default)s")
    parser.add_argument("--tiny", action="store_true", help="a model of 2 small layers")
    parser.add_argument("--safetensors", metavar="DIR", help="weights; default: random ones")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--fused", action="store_true", help="by onehop's fused all-reduce and norm too")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--limit", type=positive, default=500, metavar="S", help="most seconds; default %(default)s")
    parser.add_argument("-J", "--json", type=output, metavar="FILE")
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", options.tp))
    if not options.device:
        import torch

        options.device = "cuda" if torch.cuda.device_count() >= (1 if options.share_gpu else ranks) else "cpu"
    if options.share_gpu and options.device != "cuda":
        parser.error("--share-gpu: there is no GPU to share")
    known = SHARED_KINDS if options.share_gpu else KINDS[options.device]
    options.kinds = (options.all_reduce or ",".join(known)).split(",")
    if not set(options.kinds) <= set(known) or len(set(options.kinds)) < len(options.kinds):
        parser.error(f"--all-reduce {options.all_reduce}: on this device some of {', '.join(known)}, each once")
    if "symm_mem" in options.kinds and options.dtype == "float16":
        parser.error("symm_mem has no float16")
    if options.fused and ranks < 2:
        parser.error("--fused needs two ranks or more")
    options.kinds += [FUSED] * options.fused
    words = (options.batch or ("1,8,32" if options.device == "cuda" else "1,2,8")).split(",")
    if not all(word.isdigit() and int(word) for word in words):
        parser.error(f"--batch {options.batch}: expected positive integers")
    options.batches = [int(word) for word in words]
    return options


def launch(options):
    """The ranks as children. The first failure ends them all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {"WORLD_SIZE": options.tp, "LOCAL_WORLD_SIZE": options.tp, "MASTER_ADDR": "127.0.0.1",
                  "MASTER_PORT": free.getsockname()[1]}  # fmt: skip
    children = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not without them
    deadline = time.monotonic() + options.limit + 20
    try:
        for rank in range(options.tp):
            numbers = {**common, "RANK": rank, "LOCAL_RANK": rank}
            environment = {**os.environ, **{name: str(value) for name, value in numbers.items()}}
            command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
            children.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
        while any(child.poll() is None for child in children) and time.monotonic() < deadline:
            if any(child.poll() for child in children):
                deadline = min(deadline, time.monotonic() + 5)  # for the others to say what they see
            time.sleep(0.05)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
    return int(any(child.returncode for child in children))


if __name__ == "__main__":
    options = flags()
    if "RANK" not in os.environ:
        sys.exit(launch(options))
    import torch  # takes seconds
    import torch.distributed
    import tp_model

    sys.exit(rank_main(options))
