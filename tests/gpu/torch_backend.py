#!/usr/bin/env python3
"""Property: torch.distributed's backend "onehop" is right on GPUs, among 2 and among 4 processes: calls that wait and calls
that do not, graphs, parts, lists, sub-groups, what is left to NCCL, a step of DDP and one of FSDP2 against float64.
Prints microseconds a call beside backend "nccl", eager and in graphs.

    torch_backend.py BUILD [--share-gpu]

A process per GPU; --share-gpu: all on the first one, under MPS (run.sh starts it). NCCL takes the processes for hosts
then (NCCL_HOSTID) and goes over loopback sockets, so that the ratios say nothing about machines with links between GPUs.
Exit status 77 where this machine cannot.
"""

import copy
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import python_gpu  # noqa: E402

WORLDS, LIMIT_S, SHARED = (2, 4), 55, python_gpu.SHARED
SIZES = (4 << 10, 64 << 10, 1 << 20)


class Member:
    """One rank."""

    def __init__(self, torch, dist, rank, world):
        self.torch, self.dist, self.rank, self.world = torch, dist, rank, world
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.nccl = dist.new_group(backend="nccl")

    def values(self, rank, count, dtype, more=0):
        """Integers whose sum is exact in every type."""
        return ((self.torch.arange(count, device=self.device) * 7 + rank * 5 + more) % 15 - 7).to(dtype)

    def mine(self, count, dtype, more=0):
        return self.values(self.rank, count, dtype, more)

    def sum(self, count, dtype, more=0, ranks=None):
        return sum(self.values(rank, count, dtype, more) for rank in ranks or range(self.world))

    def equal(self, found, want, what):
        if not self.torch.equal(found, want):
            wrong = (found != want).flatten().nonzero().flatten()
            raise SystemExit(f"rank {self.rank}, {what}: {len(wrong)} of {found.numel()} elements are wrong")

    def near(self, found, want, share, what):
        off = float((found.double() - want.double()).norm() / want.double().norm())
        if not off <= share:
            raise SystemExit(f"rank {self.rank}, {what}: off by {off:.2g} of the whole, expected {share:.2g}")

    def calls(self):
        """How many calls onehop has taken."""
        return sum(one.ar.stats().calls for one in self.dist.group.WORLD._engines.values() if one)

    # ---- checks ----

    def eager(self):
        torch, dist, world = self.torch, self.dist, self.world
        for dtype in torch.float32, torch.float16, torch.bfloat16:
            for count in 1, 7, 2048, 100_003, 1_000_000:
                given = self.mine(count, dtype)
                dist.all_reduce(given)
                self.equal(given, self.sum(count, dtype), f"{dtype} {count}")
                whole = torch.empty(world * count, dtype=dtype, device=self.device)
                dist.all_gather_into_tensor(whole, self.mine(count, dtype))
                self.equal(whole, torch.cat([self.values(rank, count, dtype) for rank in range(world)]), "all-gather")
                part = torch.empty(count, dtype=dtype, device=self.device)
                dist.reduce_scatter_tensor(part, self.mine(world * count, dtype))
                self.equal(part, self.sum(world * count, dtype).chunk(world)[self.rank], "reduce-scatter")
        wide = self.mine(60, torch.float32).view(6, 10).t() if self.rank else self.mine(60, torch.float32).view(6, 10).t().contiguous()
        dist.all_reduce(wide)
        self.equal(wide, self.sum(60, torch.float32).view(6, 10).t(), "transposed on some ranks")
        given = self.mine(999, torch.bfloat16)
        dist.all_reduce(given, op=dist.ReduceOp.AVG)
        self.equal(given, self.sum(999, torch.bfloat16) / world, "average")
        assert self.calls() > 40, self.calls()

    def lists(self):
        torch, dist, world = self.torch, self.dist, self.world
        outs = [torch.empty(33, dtype=torch.int64, device=self.device) for _ in range(world)]
        dist.all_gather(outs, self.mine(33, torch.int64))
        for rank, out in enumerate(outs):
            self.equal(out, self.values(rank, 33, torch.int64), "all-gather to a list")
        part = torch.empty(33, device=self.device)
        dist.reduce_scatter(part, list(self.mine(33 * world, torch.float32).chunk(world)))
        self.equal(part, self.sum(33 * world, torch.float32).chunk(world)[self.rank], "reduce-scatter of a list")

    def left(self):
        """What NCCL does."""
        torch, dist, before = self.torch, self.dist, self.calls()
        given = self.mine(50, torch.int32)
        dist.all_reduce(given)
        self.equal(given, self.sum(50, torch.int32), "integers")
        given = self.mine(50, torch.float32)
        dist.all_reduce(given, op=dist.ReduceOp.MAX)
        want = torch.stack([self.values(rank, 50, torch.float32) for rank in range(self.world)]).amax(0)
        self.equal(given, want, "maximum")
        dist.broadcast(given, 0)
        dist.barrier(device_ids=[self.device.index])
        assert self.calls() <= before + 1, "only the barrier is onehop's"

    def parallel(self):
        """Calls that are not waited for, beside a long kernel of the current stream."""
        torch, dist = self.torch, self.dist
        given = [self.mine(4096, torch.float32, more) for more in range(6)]
        torch.cuda._sleep(3_000_000)
        works = [dist.all_reduce(one, async_op=True) for one in given]
        whole = torch.empty(self.world * 64, device=self.device)
        works.append(dist.all_gather_into_tensor(whole, self.mine(64, torch.float32), async_op=True))
        ends = [work.get_future().then(lambda one: one.value()[0] * 1) for work in works[:2]]
        for work in works:
            work.wait()
        for more, one in enumerate(given):
            self.equal(one, self.sum(4096, torch.float32, more), f"not waited for, {more}")
        self.equal(ends[1].wait(), self.sum(4096, torch.float32, 1), "future")
        torch.cuda.synchronize()
        assert all(work.is_completed() and work.is_success() for work in works)

    def groups(self):
        torch, dist = self.torch, self.dist
        halves = [list(range(first, first + 2)) for first in range(0, self.world, 2)]
        made = [dist.new_group(one) for one in halves]
        alone = [dist.new_group([rank]) for rank in range(self.world)][self.rank]
        group, ranks = made[self.rank // 2], halves[self.rank // 2]
        for turn in range(5):
            part, all_, one = (self.mine(500, torch.bfloat16, turn + more) for more in range(3))
            works = [dist.all_reduce(part, group=group, async_op=True), dist.all_reduce(all_, async_op=True)]
            dist.all_reduce(one, group=alone)
            for work in works:
                work.wait()
            self.equal(part, self.sum(500, torch.bfloat16, turn, ranks), "half of the ranks")
            self.equal(all_, self.sum(500, torch.bfloat16, turn + 1), "all ranks beside them")
            self.equal(one, self.mine(500, torch.bfloat16, turn + 2), "one rank")

    def graphs(self):
        torch, dist, world, dtype = self.torch, self.dist, self.world, self.torch.bfloat16
        given = torch.zeros(world * 2048, dtype=dtype, device=self.device)
        total, later = torch.zeros_like(given), torch.zeros_like(given)
        whole, part = torch.zeros_like(given), torch.zeros(2048, dtype=dtype, device=self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread that looks at events
            total.copy_(given)
            dist.all_reduce(total)
            later.copy_(given)
            work = dist.all_reduce(later, async_op=True)
            dist.reduce_scatter_tensor(part, given)
            dist.all_gather_into_tensor(whole, part)
            work.wait()
        for replay in range(8):
            given.copy_(self.mine(world * 2048, dtype, replay))
            graph.replay()
            want = self.sum(world * 2048, dtype, replay)
            for found, what in (total, "all-reduce"), (later, "not waited for"), (whole, "scattered and gathered"):
                self.equal(found, want, f"captured, replay {replay}: {what}")
        torch.cuda.synchronize()
        dist.barrier()
        del graph

    def step(self):
        """Gradients of DDP and FSDP2 are those of all ranks' rows together in float64."""
        torch, dist = self.torch, self.dist
        nn = torch.nn
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(self.device)
        rows = torch.randn(self.world, 16, 64, generator=torch.Generator().manual_seed(2)).to(self.device)
        exact = copy.deepcopy(model).double()
        exact(rows.double()).square().mean().backward()
        wants = [one.grad for one in exact.parameters()]
        for group, name in (dist.group.WORLD, "DDP"), (self.nccl, "DDP over NCCL"):
            mine = nn.parallel.DistributedDataParallel(copy.deepcopy(model), process_group=group)
            mine(rows[self.rank]).square().mean().backward()
            for one, want in zip(mine.parameters(), wants):
                self.near(one.grad, want, 1e-5, name)
        from torch.distributed.fsdp import fully_shard
        mine = copy.deepcopy(model)
        for layer in mine[0], mine[2], mine:
            fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cuda", (self.world,)))
        mine(rows[self.rank]).square().mean().backward()
        for one, want in zip(mine.parameters(), wants):
            self.near(one.grad.full_tensor(), want, 1e-5, "FSDP2")

    def compiled(self):
        torch, dist, group = self.torch, self.dist, self.dist.group.WORLD
        import torch.distributed._functional_collectives as functional

        def layer(x):
            y = functional.all_reduce(x * 2, "sum", group) + 1
            dist.all_reduce(y)
            return y

        given = self.mine(777, torch.float32)
        found = torch.compile(layer, backend="aot_eager")(given)
        self.equal(found, (self.sum(777, torch.float32) * 2 + 1) * self.world, "compiled")

    # ---- times ----

    def eager_us(self, group, given, calls):
        torch, dist = self.torch, self.dist
        for _ in range(5):
            dist.all_reduce(given, group=group)
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(given, group=group)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls * 1e6

    def graph_us(self, group, given, calls):
        torch, dist, per = self.torch, self.dist, 10
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(per):
                dist.all_reduce(given, group=group)
        graph.replay()
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls // per):
            graph.replay()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls * 1e6

    def times(self):
        torch, dist = self.torch, self.dist
        lines = [f"{self.world} ranks, us a call: bytes, eager onehop, nccl, ratio, in graphs onehop, nccl, ratio"]
        for size in SIZES:
            given, found = torch.zeros(size // 2, dtype=torch.bfloat16, device=self.device), []
            for measure in self.eager_us, self.graph_us:
                ours, theirs = measure(dist.group.WORLD, given, 400), measure(self.nccl, given, 40)
                found.append(f"{ours:9.2f} {theirs:9.2f} {theirs / ours:7.1f}")
            lines.append(f"{size:8} {'  '.join(found)}")
        if self.rank == 0:
            print("\n".join(lines), flush=True)


def rank_main(rank, world, store):
    faulthandler.dump_traceback_later(LIMIT_S - 5, exit=True)
    import torch
    import torch.distributed as dist

    import onehop.distributed  # noqa: F401
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.set_device(0 if SHARED else rank)
    dist.init_process_group("onehop", init_method=f"file://{store}", rank=rank, world_size=world,
                            timeout=timedelta(seconds=30))
    member = Member(torch, dist, rank, world)
    for name in "eager", "lists", "left", "parallel", "groups", "graphs", "step", "compiled", "times":
        start = time.monotonic()
        getattr(member, name)()
        if rank == 0:
            print(f"{world} ranks, {name}: right, {time.monotonic() - start:.1f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    print("DONE", flush=True)
    os._exit(0)


def run_world(world):
    """0 if all ranks were done in time."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world):
            more = {"NCCL_HOSTID": f"onehop-test-{rank}", "NCCL_SOCKET_IFNAME": "lo"} if SHARED else {}
            command = [sys.executable, os.path.abspath(__file__), "--rank", str(rank), str(world), f"{folder}/store"]
            children.append(subprocess.Popen([*command, *[python_gpu.SHARE] * SHARED], stdin=subprocess.DEVNULL,
                                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                             env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **more}))
        end, outputs = time.monotonic() + LIMIT_S, []
        while time.monotonic() < end and any(child.poll() is None for child in children):
            if any(child.poll() for child in children):
                end = min(end, time.monotonic() + 5)  # the others say why too
            time.sleep(0.1)
        for child in children:
            if child.poll() is None:
                child.kill()
            outputs.append(child.communicate()[0])
    failed = False
    for rank, (child, output) in enumerate(zip(children, outputs)):
        bad = child.returncode != 0 or "DONE" not in output
        failed |= bad
        lines = [line for line in output.splitlines() if line != "DONE" and "Warning" not in line]
        if bad:
            print(f"  {world} ranks, rank {rank}, exit status {child.returncode}:", *lines[-25:], sep="\n    ")
        elif rank == 0:
            print(*lines, sep="\n")
    return failed


def main(build):
    os.environ.update(python_gpu.SWITCHES, PYTHONPATH=os.path.join(os.path.abspath(build), "python"), OMP_NUM_THREADS="2")
    reason = python_gpu.why_not(build)
    if reason:
        return python_gpu.skip(reason)
    import torch
    found = [world for world in WORLDS if SHARED or world <= torch.cuda.device_count()]
    return int(any([run_world(world) for world in found]))


if __name__ == "__main__":
    if len(python_gpu.ARGUMENTS) == 4 and python_gpu.ARGUMENTS[0] == "--rank":
        rank_main(int(python_gpu.ARGUMENTS[1]), int(python_gpu.ARGUMENTS[2]), python_gpu.ARGUMENTS[3])
    elif len(python_gpu.ARGUMENTS) == 1:
        sys.exit(main(python_gpu.ARGUMENTS[0]))
    else:
        sys.exit(__doc__)
