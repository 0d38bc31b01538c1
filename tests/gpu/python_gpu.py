#!/usr/bin/env python3
"""python_gpu.py BUILD: the Python package on two GPUs, a process per GPU: eager calls, streams, tensors of every kind,
torch.cuda.graph, torch.compile, groups of NCCL, own storage over PyTorch's symmetric memory, and the loss of a rank.

Each check runs on both ranks; the first that fails ends its rank. Exit status 77 where this machine cannot.
"""

import contextlib
import faulthandler
import os
import subprocess
import sys
import tempfile
import time

RANKS, SKIPPED = 2, 77
PATIENCE_S = 140  # of the parent
LIMIT_S = 120     # of a rank
# Nothing uses multicast.
SWITCHES = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


# ---- one rank -----------------------------------------------------------------------------------------------------

class Rank:
    def __init__(self, torch, onehop, rank):
        self.torch, self.onehop, self.rank = torch, onehop, rank
        self.types = (torch.bfloat16, torch.float16, torch.float32)

    def values(self, rank, count, dtype, more=0):
        """Integers whose sum is exact in every type."""
        return ((self.torch.arange(count, device="cuda") * 7 + rank * 5 + more) % 15 - 7).to(dtype)

    def sum(self, count, dtype, more=0):
        return sum(self.values(rank, count, dtype, more) for rank in range(RANKS))

    def equal(self, found, want, what):
        if not self.torch.equal(found, want):
            wrong = (found != want).flatten().nonzero().flatten()
            raise SystemExit(f"rank {self.rank}, {what}: {len(wrong)} of {found.numel()} elements are wrong, first "
                             f"{int(wrong[0]) if len(wrong) else 'none'}")

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
        self.equal(ar.all_reduce(torch.tensor(1.5, device="cuda")), torch.tensor(3.0, device="cuda"), "0-dim")
        kind = type("Plain", (torch.Tensor,), {})
        got = ar.all_reduce(self.values(self.rank, 9, torch.float16).as_subclass(kind))
        assert type(got) is kind
        here = torch.ones(4, device="cuda")
        self.refused(f"on cuda:{self.rank}, found one on cpu", lambda: ar.all_reduce(here.cpu()))
        self.refused(f"on cuda:{self.rank}, found one on cuda:{1 - self.rank}",
                     lambda: ar.all_reduce(here.to(f"cuda:{1 - self.rank}")))
        self.refused("found torch.float64", lambda: ar.all_reduce(here.double()))
        self.refused("layout", lambda: ar.all_reduce(here.to_sparse()))
        self.refused("found torch.float16", lambda: ar.all_reduce(here, out=here.half()))
        self.refused("require grad", lambda: ar.all_reduce(here.clone().requires_grad_()))
        assert torch.cuda.current_device() == self.rank

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

    def captured(self, ar, body, count, what):
        """Replays `body(given)` captured over inputs that change."""
        torch = self.torch
        given = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with ar.capture(), torch.cuda.graph(graph):
            got = body(given)
        for replay in range(20):
            given.copy_(self.values(self.rank, count, torch.bfloat16, replay))
            graph.replay()
            ar.synchronize()
            self.equal(got, self.sum(count, torch.bfloat16, replay), f"{what}, {count} elements, replay {replay}")
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
        assert stats.rows_direct > 0, stats

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
        with self.onehop.AllReduce(group, self.rank, timeout=20, init_timeout=30) as ar:
            self.equal(ar.all_reduce(self.values(self.rank, 99, torch.float32)), self.sum(99, torch.float32), "NCCL's group")
            ar.synchronize()
            torch.distributed.barrier()

    def loss(self, ar):
        """The last check: rank 1 leaves without a word."""
        one = self.torch.ones(64, device="cuda")
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
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    import onehop
    member = Rank(torch, onehop, rank)
    ar = onehop.AllReduce(None, None, timeout=20, init_timeout=30)
    assert (ar.rank, ar.world_size, ar.device) == (rank, RANKS, torch.device("cuda", rank)), ar
    for name in "eager", "kinds", "streams", "graphs", "compiled", "by_nccl", "loss":
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
    if int(probe.stdout.split()[-1]) < RANKS:
        return f"needs {RANKS} GPUs, PyTorch finds {probe.stdout.split()[-1]}"
    probe = subprocess.run([sys.executable, "-c", "import onehop"], capture_output=True, text=True, timeout=60)
    if probe.returncode:
        return f"no package in {build}/python: {(probe.stderr.splitlines() or ['?'])[-1]}"
    return None


def run_ranks(script, limit_s):
    """`script --rank R STORE` on two ranks; 0 if all were done in time."""
    with tempfile.TemporaryDirectory() as folder:
        children = [subprocess.Popen([sys.executable, script, "--rank", str(rank), f"{folder}/store"],
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


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "--rank":
        rank_main(int(sys.argv[2]), sys.argv[3])
    elif len(sys.argv) == 2:
        sys.exit(main(sys.argv[1], os.path.abspath(__file__), PATIENCE_S))
    else:
        sys.exit(__doc__)
