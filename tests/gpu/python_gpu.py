#!/usr/bin/env python3
"""Property: the Python package is right on two GPUs, a process for each: eager calls, streams, tensors of every kind,
torch.cuda.graph, the fused operations, expressions, torch.compile, groups of NCCL, and the loss of a rank.

    python_gpu.py BUILD [--share-gpu]

Each check runs on both ranks; the first that fails ends its rank. --share-gpu: both processes on the first GPU, where the
driver gives them turns unless MPS is on: milliseconds a call, so there are fewer. Exit status 77 where this machine cannot.
"""

import contextlib
import faulthandler
import os
import subprocess
import sys
import tempfile
import time

RANKS, SKIPPED = 2, 77
SHARE = "--share-gpu"
SHARED = SHARE in sys.argv
ARGUMENTS = [one for one in sys.argv[1:] if one != SHARE]
REPLAYS = 5 if SHARED else 20
PATIENCE_S = 140  # of the parent
LIMIT_S = 120     # of a rank
# Nothing uses multicast.
SWITCHES = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


# Of the fused operations: q is two heads, k is one; a row has more columns, which belong to neither.
HIDDEN, EPS, Q, K, JOINT = 1000, 1e-3, slice(16), slice(16, 24), 27


def gpu_of(rank):
    return 0 if SHARED else rank


# ---- one rank -----------------------------------------------------------------------------------------------------

class Rank:
    def __init__(self, torch, onehop, rank, device):
        self.torch, self.onehop, self.rank, self.device = torch, onehop, rank, device
        self.types = (torch.bfloat16, torch.float16, torch.float32)
        # One rounding: half a unit in the last place; and what fp32 loses on the way.
        self.bounds = {torch.bfloat16: (2.0**-8 * 1.001, 2e-6), torch.float16: (2.0**-11 * 1.001, 2e-6),
                       torch.float32: (1e-5, 1e-5)}

    def values(self, rank, count, dtype, more=0):
        """Integers whose sum is exact in every type."""
        return ((self.torch.arange(count, device=self.device) * 7 + rank * 5 + more) % 15 - 7).to(dtype)

    def sum(self, count, dtype, more=0):
        return sum(self.values(rank, count, dtype, more) for rank in range(RANKS))

    def equal(self, found, want, what):
        if not self.torch.equal(found, want):
            wrong = (found != want).flatten().nonzero().flatten()
            raise SystemExit(f"rank {self.rank}, {what}: {len(wrong)} of {found.numel()} elements are wrong, first "
                             f"{int(wrong[0]) if len(wrong) else 'none'}")

    def near(self, found, want, dtype, what):
        """Within one rounding of what float64 gives."""
        share, floor = self.bounds[dtype]
        off = (found.double() - want).abs() - (share * want.abs() + floor)
        if found.dtype != dtype or not bool((off <= 0).all()):
            raise SystemExit(f"rank {self.rank}, {what}: off by {float(off.max())} more than one rounding")

    def bits(self, tensor):
        return tensor.contiguous().view(self.torch.uint8)

    def same_everywhere(self, tensor, what):
        mine = self.bits(tensor).cpu()
        found = [self.torch.empty_like(mine) for _ in range(RANKS)]
        self.torch.distributed.all_gather(found, mine)
        for one in found:
            self.equal(one, mine, f"{what}, on all ranks")

    def refused(self, text, call):
        try:
            call()
        except self.onehop.ArgumentError as error:
            if text not in str(error):
                raise SystemExit(f"rank {self.rank}: expected '{text}' in: {error}") from error
            return
        raise SystemExit(f"rank {self.rank}: expected an error with '{text}'")

    # ---- checks ----

    def eager(self, ar):
        for dtype in self.types:
            for count in 0, 1, 7, 2048, 100_003, 3_000_000:
                given, want = self.values(self.rank, count, dtype), self.sum(count, dtype)
                self.equal(ar.all_reduce(given), want, f"eager {dtype} {count}")
                out = self.torch.full_like(given, -1)
                with self.torch.inference_mode():
                    self.equal(ar.all_reduce(given, out=out), want, f"into out {dtype} {count}")
                self.equal(ar.all_reduce_(given), want, f"in place {dtype} {count}")
        for name in "1shot_push", "2shot_push", "1shot_pull", "2shot_pull":
            given = self.values(self.rank, 5000, self.torch.bfloat16)
            self.equal(ar.all_reduce(given, algorithm=name), self.sum(5000, self.torch.bfloat16), name)
            self.equal(ar.all_reduce(given, algorithm=name, prefetch=given), self.sum(5000, self.torch.bfloat16), name)
        ar.synchronize()
        choice = ar.would_use(given)
        before = ar.stats().calls_by.get(choice.algorithm, 0)
        ar.all_reduce(given)
        assert ar.stats().calls_by[choice.algorithm] == before + 1

    def kinds(self, ar):
        torch = self.torch
        given, want = self.values(self.rank, 60, torch.float32).view(3, 20), self.sum(60, torch.float32).view(3, 20)
        lies = given if self.rank == 0 else given.t().contiguous().t()
        self.equal(ar.all_reduce(lies), want, "transposed on one rank")
        self.equal(ar.all_reduce_(lies), want, "transposed in place on one rank")
        wide = self.values(self.rank, 60, torch.float32).view(3, 20)[:, ::2]
        self.equal(ar.all_reduce(wide), want[:, ::2], "strided")
        self.equal(ar.all_reduce(torch.tensor(1.5, device=self.device)), torch.tensor(3.0, device=self.device), "0-dim")
        kind = type("Plain", (torch.Tensor,), {})
        got = ar.all_reduce(self.values(self.rank, 9, torch.float16).as_subclass(kind))
        assert type(got) is kind
        here = torch.ones(4, device=self.device)
        self.refused(f"on {self.device}, found one on cpu", lambda: ar.all_reduce(here.cpu()))
        if not SHARED:
            self.refused(f"on {self.device}, found one on cuda:{1 - self.rank}",
                         lambda: ar.all_reduce(here.to(f"cuda:{1 - self.rank}")))
        self.refused("found torch.float64", lambda: ar.all_reduce(here.double()))
        self.refused("layout", lambda: ar.all_reduce(here.to_sparse()))
        self.refused("found torch.float16", lambda: ar.all_reduce(here, out=here.half()))
        self.refused("require grad", lambda: ar.all_reduce(here.clone().requires_grad_()))
        assert torch.cuda.current_device() == self.device.index

    def streams(self, ar):
        """The current stream is taken; calls of two streams run in the order they were made."""
        torch = self.torch
        side = torch.cuda.Stream()
        given = self.values(self.rank, 4096, torch.float32)
        side.wait_stream(torch.cuda.current_stream())
        first = ar.all_reduce(given)
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
            later = given + 1
            second = ar.all_reduce(later)
            ar.synchronize()
        third = ar.all_reduce(given)
        torch.cuda.synchronize()
        want = self.sum(4096, torch.float32)
        for found, more, what in (first, 0, "first"), (second, RANKS, "on a side stream"), (third, 0, "third"):
            self.equal(found, want + more, what)

    def captured(self, ar, body, count, what, want=None):
        """Replays `body(given)` captured over inputs that change; `want(replay)` if it is not their sum."""
        torch = self.torch
        given = torch.zeros(count, dtype=torch.bfloat16, device=self.device)
        graph = torch.cuda.CUDAGraph()
        with ar.capture(), torch.cuda.graph(graph):
            got = body(given)
        for replay in range(REPLAYS):
            given.copy_(self.values(self.rank, count, torch.bfloat16, replay))
            graph.replay()
            ar.synchronize()
            total = want(replay) if want else self.sum(count, torch.bfloat16, replay)
            self.equal(got, total, f"{what}, {count} elements, replay {replay}")
            if replay % 5 == 0:
                self.equal(ar.all_reduce(given.clone()) if got is not given else got,
                           self.sum(count, torch.bfloat16, replay), f"{what}, eager between replays")
        torch.distributed.barrier()  # the peer may still read this rank's memory
        del graph, given, got

    def graphs(self, ar):
        ops = self.onehop.ops
        for count in 2048, 300_000:
            self.captured(ar, ar.all_reduce, count, "captured")
            self.captured(ar, ar.all_reduce_, count, "captured in place")
            self.captured(ar, lambda x: ops.all_reduce(x, ar), count, "captured operator")
            self.captured(ar, lambda x: ar.all_reduce(x, algorithm="1shot_pull", source="graph"), count, "1shot_pull")
            self.captured(ar, lambda x: ar.all_reduce_(x, algorithm="2shot_pull", source="graph"), count, "2shot_pull")
        stats = ar.stats()
        assert stats.registrations_direct > 0, stats

    def made(self, seed, *shape):
        return self.torch.randn(shape, generator=self.torch.Generator().manual_seed(seed)).to(self.device)

    def fused_given(self, turn, rows, dtype):
        """Every rank's inputs: a part of a sum, q and k in one matrix, integers to scatter."""
        return [(self.made(10 * turn + rank, rows, HIDDEN).to(dtype),
                 self.made(10 * turn + RANKS + rank, rows, JOINT).to(dtype),
                 self.values(rank, RANKS * 60, dtype, turn)) for rank in range(RANKS)]

    def fused_weights(self, rows, dtype):
        """A residual and its norm's weight, and this rank's slices of q's and k's."""
        given = (self.made(1001, rows, HIDDEN), self.made(1002, HIDDEN),
                 self.made(1003 + self.rank, 16), self.made(1013 + self.rank, 8))
        return [one.to(dtype) for one in given]

    def fused_calls(self, ar, given, weights):
        x, joint, parts = given
        residual, weight, *qk_weights = weights
        normed = ar.all_reduce_norm(x, weight, residual=residual, eps=EPS, quantise="row")
        joint = joint.clone()
        ar.qknorm_(joint[:, Q].unflatten(1, (2, 8)), joint[:, K], *qk_weights, eps=EPS)
        mine = ar.reduce_scatter(parts)
        return [*normed, joint, mine, ar.all_gather(mine)]

    def fused_check(self, everyone, weights, found, dtype, what):
        residual, weight, *qk_weights = weights
        normed, after, quantised, scales, joint, mine, whole = found
        self.near(after, sum(x.double() for x, _, _ in everyone) + residual.double(), dtype, f"{what}: sum and residual")
        r = after.double()
        y = r * ((r * r).mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
        largest = y.abs().amax(-1, keepdim=True)
        self.near(normed, y, dtype, f"{what}: norm")
        self.near(scales, largest / 448, self.torch.float32, f"{what}: scales")
        off = (quantised.float().double() * scales - y).abs() - (y.abs() / 16 + largest / 448 / 512 + 1e-5)
        if not bool((off <= 0).all()):
            raise SystemExit(f"rank {self.rank}, {what}: float8 is off by {float(off.max())}")
        for columns, factors in zip((Q, K), qk_weights):
            squares = sum(one[:, columns].double().square().mean(-1, keepdim=True) for _, one, _ in everyone) / RANKS
            y = everyone[self.rank][1][:, columns].double() * (squares + EPS).rsqrt() * factors.double()
            self.near(joint[:, columns], y, dtype, f"{what}: q and k")
        self.equal(joint[:, K.stop:], everyone[self.rank][1][:, K.stop:], f"{what}: beside q and k")
        total = sum(parts for _, _, parts in everyone)
        self.equal(mine, total.chunk(RANKS)[self.rank], f"{what}: reduce-scatter")
        self.equal(whole, total, f"{what}: all-gather")
        for one in normed, after, quantised, scales:
            self.same_everywhere(one, what)

    def fused(self, ar):
        for turn, dtype in enumerate(self.types):
            for rows in 1, 6, 300:
                everyone, weights = self.fused_given(turn, rows, dtype), self.fused_weights(rows, dtype)
                found = self.fused_calls(ar, everyone[self.rank], weights)
                self.fused_check(everyone, weights, found, dtype, f"{rows} rows of {dtype}")
        assert ar.qknorm_max_blocks(16, 8, self.types[0]) > 0
        ar.prepare(self.types[0])

    def fused_graph(self, ar):
        """Replays, beside eager calls of the same inputs: the same bits."""
        torch, dtype, rows = self.torch, self.torch.bfloat16, 6
        weights = self.fused_weights(rows, dtype)
        given = [torch.zeros_like(one) for one in self.fused_given(0, rows, dtype)[self.rank]]
        graph = torch.cuda.CUDAGraph()
        with ar.capture(), torch.cuda.graph(graph):
            found = self.fused_calls(ar, given, weights)
        for replay in range(REPLAYS):
            everyone = self.fused_given(replay, rows, dtype)
            for one, new in zip(given, everyone[self.rank]):
                one.copy_(new)
            graph.replay()
            ar.synchronize()
            self.fused_check(everyone, weights, found, dtype, f"captured, replay {replay}")
            for one, other in zip(found, self.fused_calls(ar, given, weights)):
                self.equal(self.bits(one), self.bits(other), f"captured beside eager, replay {replay}")
        torch.distributed.barrier()
        del graph, found

    def expressions(self, ar):
        """Exact: halves of small integers."""
        torch, dtype, count, width = self.torch, self.torch.bfloat16, 4000, 40
        op = ar.create_op("x * scale\n + bias[col]", dtype, row_length=width, scalars=["scale"],
                          arrays={"bias": torch.float32})
        bias = self.values(RANKS, width, torch.float32)
        named = {"scale": 0.5, "bias": bias}

        def want(more):
            return (self.sum(count, torch.float32, more) * 0.5 + bias.repeat(count // width)).to(dtype)

        given = self.values(self.rank, count, dtype)
        for name in None, "1shot_push", "2shot_push", "1shot_pull", "2shot_pull":
            self.equal(ar.all_reduce_op(given, op, named, algorithm=name), want(0), f"expression, {name}")
        place = given.clone()
        self.equal(ar.all_reduce_op(place, op, named, out=place), want(0), "expression in place")
        self.refused("expression(2)", lambda: ar.create_op("x *\n factor", dtype))
        self.refused("a bracket", lambda: ar.create_op("(x", dtype))
        return lambda x: self.onehop.ops.all_reduce_op(x, op, named), count, want

    def expressions_graph(self, ar):
        body, count, want = self.expressions(ar)
        self.captured(ar, body, count, "captured expression", want)

    def compiled(self, ar):
        torch, ops = self.torch, self.onehop.ops

        def layer(x):
            return ops.all_reduce(x * 2, ar) + 1

        modes = {"aot_eager": {"backend": "aot_eager"}}
        with contextlib.suppress(ImportError):
            import triton  # noqa: F401
            modes.update(inductor={}, reduce_overhead={"mode": "reduce-overhead"})
        for name, how in modes.items():
            torch._dynamo.reset()
            run = torch.compile(layer, fullgraph=True, **how)
            with torch.inference_mode():
                for repeat in range(4):
                    given = self.values(self.rank, 2048, torch.bfloat16, repeat)
                    self.equal(run(given), self.sum(2048, torch.bfloat16, repeat) * 2 + 1, f"compiled by {name}")

    def by_nccl(self, _):
        """A group that has no backend for CPU tensors: through its store."""
        torch = self.torch
        group = torch.distributed.new_group(backend="nccl")
        with self.onehop.AllReduce(group, self.device, share_gpu=SHARED, timeout=20, init_timeout=30) as ar:
            self.equal(ar.all_reduce(self.values(self.rank, 99, torch.float32)), self.sum(99, torch.float32), "NCCL's group")
            ar.synchronize()
            torch.distributed.barrier()

    def loss(self, ar):
        """The last check: rank 1 leaves without a word."""
        one = self.torch.ones(64, device=self.device)
        ar.all_reduce(one)
        ar.synchronize()
        if self.rank == 1:
            print("DONE", flush=True)
            os._exit(0)
        start = time.monotonic()
        try:
            ar.all_reduce(one)
            ar.synchronize()
        except self.onehop.CommunicatorDead as error:
            assert error.code == self.onehop.Result.PEER_LOST, error
            assert error.failure.peer == 1, error.failure
            assert time.monotonic() - start < 15
            return
        raise SystemExit("rank 0: the loss of rank 1 was not noticed")


def rank_main(rank, store):
    import torch
    import torch.distributed as dist
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.cuda.set_device(gpu_of(rank))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    import onehop
    member = Rank(torch, onehop, rank, torch.device("cuda", gpu_of(rank)))
    ar = onehop.AllReduce(None, None, share_gpu=SHARED, timeout=20, init_timeout=30)
    assert (ar.rank, ar.world_size, ar.device) == (rank, RANKS, member.device), ar
    for name in ("eager", "kinds", "streams", "graphs", "fused", "fused_graph", "expressions_graph", "compiled", "by_nccl",
                 "loss"):
        start = time.monotonic()
        getattr(member, name)(ar)
        if rank == 0:
            print(f"{name}: right, {time.monotonic() - start:.1f} s", flush=True)
    print("DONE", flush=True)
    os._exit(0)  # NCCL's group would wait for the rank that left


# ---- the parent ---------------------------------------------------------------------------------------------------

def skip(reason):
    print(f"SKIPPED: {reason}")
    return SKIPPED


def why_not(build):
    probe = subprocess.run([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
                           capture_output=True, text=True, timeout=60)
    if probe.returncode:
        return f"{sys.executable} cannot import torch: {(probe.stderr.splitlines() or ['?'])[-1]}"
    needed = 1 if SHARED else RANKS
    if int(probe.stdout.split()[-1]) < needed:
        return f"needs {needed} GPUs, PyTorch finds {probe.stdout.split()[-1]}"
    probe = subprocess.run([sys.executable, "-c", "import onehop"], capture_output=True, text=True, timeout=60)
    if probe.returncode:
        return f"no package in {build}/python: {(probe.stderr.splitlines() or ['?'])[-1]}"
    return None


def run_ranks(script, limit_s):
    """`script --rank R STORE` on two ranks; 0 if all were done in time."""
    with tempfile.TemporaryDirectory() as folder:
        mode = [SHARE] * SHARED
        children = [subprocess.Popen([sys.executable, script, "--rank", str(rank), f"{folder}/store", *mode],
                                     stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                    for rank in range(RANKS)]
        end, outputs = time.monotonic() + limit_s, []
        while time.monotonic() < end and any(child.poll() is None for child in children):
            if any(child.poll() for child in children):
                end = min(end, time.monotonic() + 25)  # the other says why too
            time.sleep(0.1)
        for child in children:
            if child.poll() is None:
                child.kill()
            outputs.append(child.communicate()[0])
    failed = [rank for rank, child in enumerate(children) if child.returncode or "DONE" not in outputs[rank]]
    for rank, output in enumerate(outputs):
        lines = [line for line in output.splitlines() if line != "DONE"]
        if rank in failed:
            print(f"  rank {rank}, exit status {children[rank].returncode}:")
        print("".join(f"{'    ' if rank in failed else ''}{line}\n" for line in (lines[-30:] if failed else lines)), end="")
    return int(bool(failed))


def main(build, script, limit_s):
    os.environ.update(SWITCHES, PYTHONPATH=os.path.join(os.path.abspath(build), "python"))
    reason = why_not(build)
    return skip(reason) if reason else run_ranks(script, limit_s)


def run(rank_main, script, limit_s, usage):
    """As the command line says."""
    if len(ARGUMENTS) == 3 and ARGUMENTS[0] == "--rank":
        rank_main(int(ARGUMENTS[1]), ARGUMENTS[2])
    elif len(ARGUMENTS) == 1:
        sys.exit(main(ARGUMENTS[0], os.path.abspath(script), limit_s))
    else:
        sys.exit(usage)


if __name__ == "__main__":
    run(rank_main, __file__, PATIENCE_S, __doc__)
