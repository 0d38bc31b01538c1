"""One rank of tests/test_torch_backend.py, started by torchrun: torch.distributed's backend "onehop" on the CPU beside gloo.

Arguments: names of checks below; none stands for all but `lost`, which ends the job. Inputs are small integers where
results are compared bit for bit: then their sums are exact in any order.
"""

import contextlib
import faulthandler
import importlib
import logging
import os
import re
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import onehop
import onehop.distributed
from backend_models import Models
from onehop import _collectives

LIMIT_S = 100
OURS = torch.float32, torch.float16, torch.bfloat16
TYPES = *OURS, torch.float64, torch.int32, torch.int64, torch.uint8
COUNTS = 1, 5, 4096, 100_003
Op = dist.ReduceOp


class Rank(Models):
    """One rank: the whole group, the same over gloo, and the checks."""

    def __init__(self):
        self.rank, self.world, self.group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
        self.gloo = dist.new_group(backend="gloo")

    def values(self, count, dtype, rank=None, more=0):
        rank = self.rank if rank is None else rank
        found = (torch.arange(count) * 7 + rank * 5 + more) % 15
        return (found if dtype is torch.uint8 else found - 7).to(dtype)

    def calls(self, group=None):
        engine = (group or self.group)._engines.get(torch.device("cpu"))
        return engine.ar.stats().calls if engine else 0

    def both(self, call, taken, what):
        """`call(group)` returns a tensor: the same bits by either, and whether onehop was asked is as expected."""
        want, found, errors = None, None, []
        try:
            want = call(self.gloo)
        except (RuntimeError, ValueError) as error:
            errors.append(error)
        before = self.calls()
        try:
            found = call(self.group)
        except (RuntimeError, ValueError) as error:
            errors.append(error)
        assert (self.calls() > before) == taken, f"{what}: taken {not taken}"
        if errors and not (taken and want is None):
            assert want is None and found is None, f"{what}: {errors}"
        elif want is not None:
            assert found.dtype == want.dtype and torch.equal(found, want), f"{what}: {found} {want}"

    # ---- collectives ----

    def reductions(self):
        for dtype in TYPES:
            for op in Op.SUM, Op.AVG, Op.MAX, Op.PRODUCT:
                taken = dtype in OURS and (op == Op.SUM or (op == Op.AVG and dtype is not torch.float16))
                for count in COUNTS if op == Op.SUM else COUNTS[1:2]:

                    def all_reduce(group, count=count, dtype=dtype, op=op):
                        given = self.values(count, dtype)
                        dist.all_reduce(given, op=op, group=group)
                        return given

                    def scatter(group, count=count, dtype=dtype, op=op):
                        out = torch.empty(count, dtype=dtype)
                        dist.reduce_scatter_tensor(out, self.values(count * self.world, dtype), op=op, group=group)
                        return out

                    def scatter_list(group, count=count, dtype=dtype, op=op):
                        out = torch.empty(count, dtype=dtype)
                        parts = list(self.values(count * self.world, dtype).chunk(self.world))
                        dist.reduce_scatter(out, parts, op=op, group=group)
                        return out

                    for call in all_reduce, scatter, scatter_list:
                        self.both(call, taken, f"{call.__name__} {dtype} {op} {count}")

    def gathers(self):
        for dtype in (*TYPES, torch.bool, torch.complex64, torch.float8_e4m3fn):
            for count in COUNTS:
                given = self.values(count, torch.float32).to(dtype)
                want = torch.cat([self.values(count, torch.float32, rank).to(dtype) for rank in range(self.world)])
                before, outs = self.calls(), [torch.empty(count, dtype=dtype) for _ in range(self.world)]
                whole = torch.empty((self.world, count), dtype=dtype)
                dist.all_gather_into_tensor(whole, given)
                dist.all_gather(outs, given)
                for found in whole.view(-1), torch.cat(outs):
                    assert torch.equal(found.view(torch.uint8), want.view(torch.uint8)), (dtype, count)
                assert self.calls() == before + 2

    def lies(self):
        """Memory that lies otherwise on some ranks, also as an output; what requires grad; Parameters; zero dimensions."""
        given = self.values(60, torch.float32).view(6, 10)
        want = sum(self.values(60, torch.float32, rank) for rank in range(self.world)).view(6, 10)
        mine = given.clone() if self.rank else given.t().contiguous().t()
        dist.all_reduce(mine)
        assert torch.equal(mine, want)
        leaf = nn.Parameter(given.clone())
        dist.all_reduce(leaf)
        assert torch.equal(leaf.detach(), want)
        one = torch.tensor(1.0)
        dist.all_reduce(one)
        assert one == self.world
        wide = torch.zeros(self.world * 6, 20)
        whole = wide[:, ::2] if self.rank == 0 else torch.zeros(self.world * 6, 10)
        dist.all_gather_into_tensor(whole, given.t().contiguous().t())
        assert torch.equal(whole[6 * self.rank : 6 * self.rank + 6], given)
        part = torch.zeros(10, 6).t() if self.rank == 0 else torch.zeros(6, 10)
        dist.reduce_scatter_tensor(part, torch.cat([given] * self.world))
        assert torch.equal(part, want)
        for empty in torch.zeros(0), torch.zeros(0, dtype=torch.int64):
            dist.all_reduce(empty)

    def uneven(self):
        """Lists of different lengths, and parts that do not add up: gloo's own errors, or its results."""
        sizes = [3 + rank for rank in range(self.world)]

        def gather(group):
            outs = [torch.zeros(size) for size in sizes]
            dist.all_gather(outs, self.values(sizes[self.rank], torch.float32), group=group)
            return torch.cat(outs)

        def scatter(group):
            out = torch.zeros(sizes[self.rank])
            dist.reduce_scatter(out, [self.values(size, torch.float32) for size in sizes], group=group)
            return out

        def wrong(group):
            out = torch.zeros(5)
            dist.reduce_scatter_tensor(out, torch.zeros(5 * self.world + 1), group=group)
            return out

        for call in gather, scatter, wrong:
            self.both(call, False, call.__name__)

    def coalesced(self):
        def given(more):
            return self.values(40 * self.world, torch.float32, more=more)

        def all_reduces(group):
            tensors = [given(more) for more in range(3)]
            with dist._coalescing_manager(group):
                for one in tensors:
                    dist.all_reduce(one, group=group)
            return torch.cat(tensors)

        def gathers(group):
            outs = [torch.empty(40 * self.world * self.world) for _ in range(3)]
            with dist._coalescing_manager(group, async_ops=True) as manager:
                for more, out in enumerate(outs):
                    dist.all_gather_into_tensor(out, given(more), group=group)
            manager.wait()
            return torch.cat(outs)

        def scatters(group):
            outs = [torch.empty(40) for _ in range(3)]
            with dist._coalescing_manager(group):
                for more, out in enumerate(outs):
                    dist.reduce_scatter_tensor(out, given(more), group=group)
            return torch.cat(outs)

        def deprecated(group):
            tensors = [given(more) for more in range(3)]
            dist.all_reduce_coalesced(tensors, group=group)
            return torch.cat(tensors)

        def by_functions(group):
            tensors = [given(more) for more in range(2)]
            found = functional.all_reduce_coalesced(tensors, "sum", group)
            found += functional.all_gather_into_tensor_coalesced(tensors, group)
            found += functional.reduce_scatter_tensor_coalesced(tensors, "sum", [0, 0], group)
            return torch.cat([one + 0 for one in found])

        for call in all_reduces, gathers, scatters, deprecated, by_functions:
            self.both(call, True, call.__name__)

        mixed = [self.values(4, torch.float32), self.values(4, torch.int32)]
        before = self.calls()
        with contextlib.suppress(RuntimeError, ValueError):  # of different types: not ours, and not gloo's
            self.group.allreduce_coalesced(mixed)
        assert self.calls() == before

    def direct(self):
        """The methods of a group, as C++ code and some libraries call them."""
        group, want = self.group, sum(self.values(9, torch.float32, rank) for rank in range(self.world))
        for call in (
            lambda one: group.allreduce(one).wait(),
            lambda one: group.allreduce([one], Op.SUM).wait(),
            lambda one: group.allreduce(one, op=Op.SUM).wait(),
            lambda one: group.allreduce([one], opts=dist.AllreduceOptions()).wait(),
        ):
            given = self.values(9, torch.float32)
            call(given)
            assert torch.equal(given, want)
        group.barrier().wait()
        outs = [torch.empty(9) for _ in range(self.world)]
        group.allgather(outs, self.values(9, torch.float32)).wait()
        assert torch.equal(sum(outs), want)

    def works(self):
        given = self.values(9, torch.float32)
        want = sum(self.values(9, torch.float32, rank) for rank in range(self.world))
        work = dist.all_reduce(given, async_op=True)
        after = work.get_future().then(lambda one: one.value()[0] * 2)
        assert work.wait() and work.is_completed()
        assert torch.equal(given, want) and torch.equal(after.wait(), want * 2)
        assert dist.all_reduce(given) is None
        works = [dist.all_reduce(torch.ones(5, dtype=dtype), async_op=True) for dtype in TYPES]
        works.append(dist.barrier(async_op=True))
        for work in works:
            work.wait()

    def left(self):
        """Whatever has no method here."""
        rank, world = self.rank, self.world
        given = torch.full((3,), float(rank))
        dist.broadcast(given, world - 1)
        assert given[0] == world - 1
        found = [None] * world
        dist.all_gather_object(found, {"rank": rank})
        assert found == [{"rank": one} for one in range(world)]
        out = torch.empty(world)
        dist.all_to_all_single(out, torch.arange(float(world)) + 10 * rank)
        assert torch.equal(out, torch.arange(float(world)) * 10 + rank)
        right, left = (rank + 1) % world, (rank - 1) % world
        got = torch.empty(2)
        for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, torch.full((2,), float(rank)), right), dist.P2POp(dist.irecv, got, left)
        ]):
            work.wait()
        assert got[0] == left
        dist.barrier()
        assert dist.get_backend() == "onehop" and self.group.name() == "onehop"

    def busy(self):
        """Threads of gloo that drop what Python has, beside calls that Python makes."""
        for _ in range(150):
            self.works()
            dist.broadcast(torch.ones(3), 0)

    # ---- groups ----

    def groups(self):
        rank, world = self.rank, self.world
        alone = [dist.new_group([one]) for one in range(world)][rank]
        pairs = [dist.new_group([one, one + 1]) for one in range(0, world, 2)]
        turned = dist.new_group(list(reversed(range(world))))
        for turn in range(3):
            tensors = [torch.full((100,), float(rank + turn)) for _ in range(4)]
            groups = alone, pairs[rank // 2], turned, self.group
            works = [dist.all_reduce(one, group=group, async_op=True) for one, group in zip(tensors, groups, strict=True)]
            for work in works:
                work.wait()
            first = rank // 2 * 2
            sums = rank, first + first + 1, sum(range(world)), sum(range(world))
            sizes = 1, 2, world, world
            for one, total, size in zip(tensors, sums, sizes, strict=True):
                assert one[0] == total + turn * size
        assert self.calls(alone) == 0 and self.calls(pairs[rank // 2]) == 3
        part = self.group.split_group([0, 1])
        assert (part is None) == (rank > 1)
        if part is not None:
            one = torch.ones(3)
            dist.all_reduce(one, group=part) if part in dist.distributed_c10d._world.pg_map else part.allreduce(one)
            assert one[0] == 2
            part.shutdown()
        for group in pairs[rank // 2], alone:
            dist.destroy_process_group(group)
        dist.all_reduce(torch.ones(1))

    def mesh(self):
        mesh = dist.init_device_mesh("cpu", (self.world // 2, 2), mesh_dim_names=("outer", "inner"))
        one = torch.ones(3)
        dist.all_reduce(one, group=mesh["inner"].get_group())
        assert one[0] == 2
        found = functional.all_reduce(torch.ones(3), "sum", mesh["outer"]) + 0
        assert found[0] == self.world // 2

    def elsewhere(self):
        """Ranks on several machines, and a set-up that fails: all by gloo, and one line says so."""
        refused = mock.patch.object(_collectives, "AllReduce", side_effect=onehop.SetupError("no memory"))
        apart = mock.patch.object(_collectives, "machine", lambda: f"machine {self.rank // 2}".encode().ljust(64))
        for patch, text in (apart, f"on {self.world // 2} machines"), (refused, "no memory"):
            if text.startswith("on 1 "):
                continue
            lines = []
            handler = logging.Handler()
            handler.emit = lambda record, lines=lines: lines.append(record.getMessage())
            onehop_log = logging.getLogger("onehop")
            onehop_log.addHandler(handler)
            with patch:
                group, one = dist.new_group(), torch.ones(5)
                for _ in range(3):
                    dist.all_reduce(one, group=group)
                dist.barrier(group)
            onehop_log.removeHandler(handler)
            assert one[0] == self.world**3 and self.calls(group) == 0
            assert len(lines) == (self.rank == 0) and all(text in line for line in lines), lines

    def silent(self):
        """The last rank does not come: the others name it when the group's timeout is over, and other groups go on."""
        group, last = dist.new_group(timeout=timedelta(seconds=2)), self.world - 1
        dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()
        start = time.monotonic()
        if self.rank != last:
            with self.raises(onehop.CommunicatorDead) as found:
                dist.all_reduce(torch.ones(1), group=group)
            assert found[0].failure.peer == last and f"rank {last}" in str(found[0]), found
            assert 1.5 < time.monotonic() - start < 8, time.monotonic() - start
        dist.destroy_process_group(group)
        dist.all_reduce(torch.ones(1))

    def mesh(self):
        mesh = dist.init_device_mesh("cpu", (self.world // 2, 2), mesh_dim_names=("outer", "inner"))
        one = torch.ones(3)
        dist.all_reduce(one, group=mesh["inner"].get_group())
        assert one[0] == 2
        found = functional.all_reduce(torch.ones(3), "sum", mesh["outer"]) + 0
        assert found[0] == self.world // 2

    def elsewhere(self):
        """Ranks on several machines, and a set-up that fails: all by gloo, and one line says so."""
        refused = mock.patch.object(_collectives, "AllReduce", side_effect=onehop.SetupError("no memory"))
        apart = mock.patch.object(_collectives, "machine", lambda: f"machine {self.rank // 2}".encode().ljust(64))
        for patch, text in (apart, f"on {self.world // 2} machines"), (refused, "no memory"):
            if text.startswith("on 1 "):
                continue
            lines = []
            handler = logging.Handler()
            handler.emit = lambda record, lines=lines: lines.append(record.getMessage())
            onehop_log = logging.getLogger("onehop")
            onehop_log.addHandler(handler)
            with patch:
                group, one = dist.new_group(), torch.ones(5)
                for _ in range(3):
                    dist.all_reduce(one, group=group)
                dist.barrier(group)
            onehop_log.removeHandler(handler)
            assert one[0] == self.world**3 and self.calls(group) == 0
            assert len(lines) == (self.rank == 0) and all(text in line for line in lines), lines

    def silent(self):
        """The last rank does not come: the others name it when the group's timeout is over, and other groups go on."""
        group, last = dist.new_group(timeout=timedelta(seconds=2)), self.world - 1
        dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()
        start = time.monotonic()
        if self.rank != last:
            try:
                dist.all_reduce(torch.ones(1), group=group)
            except onehop.CommunicatorDead as error:
                assert error.failure.peer == last and f"rank {last}" in str(error), error
                assert 1.5 < time.monotonic() - start < 8, time.monotonic() - start
            else:
                raise AssertionError("the silent rank was not noticed")
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group(group)

    def aborted(self):
        """Another thread ends a call that waits."""
        group = dist.new_group()
        dist.all_reduce(torch.ones(1), group=group)
        if self.rank == 0:
            threading.Timer(0.3, group.abort).start()
        if self.rank < self.world - 1:
            with self.raises(onehop.CommunicatorDead) as found:
                dist.all_reduce(torch.ones(1), group=group)
            assert found[0].code == onehop.Result.ABORTED, found
        dist.barrier()
        dist.destroy_process_group(group)

    @contextlib.contextmanager
    def raises(self, kind):
        found = []
        try:
            yield found
        except kind as error:
            found.append(error)
        assert found, f"expected {kind.__name__}"

    # ---- the end ----

    def entry_point(self):
        """What the package names for PyTorch 2.14, which looks for backends itself."""
        with open(os.path.join(os.path.dirname(__file__), "..", "..", "pyproject.toml"), encoding="utf-8") as file:
            named = re.search(r'"torch.distributed.backends"\]\nonehop = "([\w.]+):(\w+)"', file.read())
        registrar = getattr(importlib.import_module(named[1]), named[2])
        registrar()
        assert "ONEHOP" in dist.Backend._plugins

    def again(self):
        """A new default group after the end of the first, in the same processes; names of groups come again."""
        store = dist.PrefixStore("again", self.group.get_group_store())  # gloo finds its own old addresses otherwise
        for first in 0, self.world - 2:
            pair = dist.new_group([first, first + 1])
            if first <= self.rank < first + 2:
                dist.all_reduce(torch.ones(1), group=pair)
        dist.destroy_process_group()
        start(store=store, rank=self.rank, world_size=self.world)
        for _ in range(9):
            dist.all_reduce(torch.ones(1), group=dist.new_group())
        one = torch.ones(4)
        dist.all_reduce(one)
        assert one[0] == self.world
        self.__init__()

    def lost(self):
        """Rank 1 is killed: the others name it at once, not at the deadline."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others as soon as one has died
        dist.all_reduce(torch.ones(1))
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        with self.raises(onehop.CommunicatorDead) as found:
            for _ in range(2):
                dist.all_reduce(torch.ones(1000))
        assert found[0].failure.peer == 1 and "rank 1" in str(found[0]), found
        seconds = time.monotonic() - start
        dist.destroy_process_group()
        print(f"rank {self.rank}: rank 1 was lost, noticed after {seconds:.1f} s", flush=True)
        os._exit(0)


CHECKS = ("reductions gathers lies uneven coalesced direct works left busy groups mesh elsewhere silent aborted ddp ddp_hook sparse fsdp tensor_parallel "
          "two_dimensions compiled entry_point again").split()


def start(**more):
    dist.init_process_group("onehop", timeout=timedelta(seconds=30), **more)


def main():
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    faulthandler.register(signal.SIGTERM, chain=True)  # torchrun ends the others when one has failed
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    start()
    member = Rank()
    for name in sys.argv[1:] or CHECKS:
        begin = time.monotonic()
        getattr(member, name)()
        if member.rank == 0:
            print(f"{member.world} ranks, {name}: right, {time.monotonic() - begin:.1f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    print("DONE", flush=True)


if __name__ == "__main__":
    main()
