"""CustomAllReduceV2: onehop where SGLang has its custom all-reduce.

docs/engines.md says where to plug it in, and what differs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import onehop
from onehop._dropin import MAX_RANKS, PAGE, DropIn, Sizes, in_order, log, on, page_up
from onehop._tensors import device_of, named
from onehop._types import Algorithm, Source

PULLS = (Algorithm.ONESHOT_PULL, Algorithm.TWOSHOT_PULL)

__all__ = ["Config", "CustomAllReduceV2", "can_use_custom_all_reduce_v2"]


class Row(NamedTuple):
    """How calls of up to `max_bytes` are done."""

    max_bytes: int
    algorithm: Algorithm
    source: Source
    blocks: int


class Config(NamedTuple):
    """What is done by message size, as asked at powers of two: eager calls, and calls captured inside capture()."""

    eager: list[Row]
    graph: list[Row]


def can_use_custom_all_reduce_v2(group: dist.ProcessGroup, device: int | str | torch.device) -> bool:
    """Whether an object for this group is worth making: 2 to 16 ranks, a group for CPU tensors, a device that is there.

    Local. What needs all ranks (one machine, memory that all can map) is found by making it: then it is disabled.
    """
    there = device_of(device).type == "cpu" or torch.cuda.is_available()
    return there and 2 <= dist.get_world_size(group) <= MAX_RANKS and dist.get_backend(group) != "nccl"


def algorithm_of(given: object) -> Algorithm | None:
    """None, an Algorithm, its name as "1shot_push", or a member of another enumeration that is called alike."""
    if given is None or isinstance(given, Algorithm):
        return given
    name = str(getattr(given, "name", given)).lower().replace("one_shot", "1shot").replace("two_shot", "2shot")
    return Algorithm(named(Algorithm, name))


def memory_saver() -> bool:
    """Whether SGLang may take memory away from captured graphs: then none of it may be read by peers."""
    return on("SGLANG_MEMORY_SAVER_CUDA_GRAPH")


def kilobytes(name: str) -> int | None:
    """The size that a variable of the environment sets, in bytes; None: it sets none."""
    given = os.environ.get(name, "").strip()
    if not given:
        return None
    try:
        return int(given) * 1024
    except ValueError:
        log.warning("%s: expected a number of kilobytes, found %r: not heeded", name, given)
        return None


def in_piecewise_graph() -> bool:
    """Whether SGLang captures a model in pieces: the memory of these captures is not kept, no peer may read it."""
    module = sys.modules.get("sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph")
    asked = getattr(module, "is_in_tc_piecewise_cuda_graph", None)
    return asked is not None and bool(asked())


class CustomAllReduceV2(DropIn):
    """Sums over the ranks of a group.

    Attributes: disabled, rank, world_size, device, group, max_size, max_push_size, max_pull_size (bytes; the storage in
    force), pull_enabled, has_multicast (False: SGLang's own kernels cannot use our storage), config, override_algo, obj
    (the onehop.AllReduce, None if disabled).
    """

    max_size: int
    max_push_size: int
    max_pull_size: int
    pull_enabled = True
    has_multicast = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: int | str | torch.device,
        max_size: int | None = None,
        *,
        max_pull_size: int | None = None,
        max_push_size: int | None = None,
        max_pull_blocks: int | None = None,
        max_push_blocks: int | None = None,
    ) -> None:
        """Collective over `group`, a torch.distributed group for CPU tensors.

        max_size: longest message taken, in bytes, and up to where storage follows the tuning table; None:
        SGLANG_CUSTOM_ALL_REDUCE_V2_MAX_SIZE_KB or 16 MiB. max_push_size, max_pull_size: that much storage instead,
        rounded up to 4096; longer messages go in pieces; SGLANG_FORCE_CUSTOM_ALL_REDUCE_V2_PUSH_SIZE_KB and
        ..._PULL_SIZE_KB overrule both. max_pull_size or max_pull_blocks 0: only push algorithms are used.
        max_push_blocks, max_pull_blocks: the larger one bounds the grid of all calls, if both are given.
        """
        self._override: Algorithm | None = None
        if max_size is None:
            max_size = kilobytes("SGLANG_CUSTOM_ALL_REDUCE_V2_MAX_SIZE_KB") or 16 << 20
        forced_push = kilobytes("SGLANG_FORCE_CUSTOM_ALL_REDUCE_V2_PUSH_SIZE_KB")
        forced_pull = kilobytes("SGLANG_FORCE_CUSTOM_ALL_REDUCE_V2_PULL_SIZE_KB")
        push = max_push_size if forced_push is None else forced_push
        pull = max_pull_size if forced_pull is None else forced_pull
        self.pull_enabled = pull != 0 and max_pull_blocks != 0
        self.max_size = max(max_size, push or 0, pull or 0)
        blocks = max_push_blocks if not self.pull_enabled else max_pull_blocks
        sizes = Sizes(
            max_bytes=max_size,
            push_bytes=page_up(push),
            pull_bytes=page_up(pull) if self.pull_enabled else PAGE,  # the library's smallest
            max_blocks=max(max_push_blocks, blocks) if max_push_blocks and blocks else 0,
        )
        super().__init__(group, device, self.max_size, sizes, can_use_custom_all_reduce_v2(group, device))
        stats = self.obj.stats() if self.obj else None
        self.max_push_size = stats.push_bytes if stats else 0
        self.max_pull_size = stats.pull_bytes if stats and self.pull_enabled else 0

    # ---- what is done -----------------------------------------------------------------------------------------------

    @property
    def override_algo(self) -> Algorithm | None:
        """The algorithm of all calls, the same on all ranks; None: the tuning table chooses. Names will do."""
        return self._override

    @override_algo.setter
    def override_algo(self, given: object) -> None:
        self._override = algorithm_of(given)

    @property
    def config(self) -> Config:
        """Without override_algo."""
        return Config(self._rows(graph=False), self._rows(graph=True))

    def _rows(self, graph: bool) -> list[Row]:
        rows: list[Row] = []
        size = 16
        while size < 2 * self.max_size:
            size = min(size, self.max_size)
            choice = self._live().would_use(size, torch.bfloat16, graph=graph)
            row = Row(size, choice.algorithm, choice.source, choice.blocks)
            if rows and rows[-1][1:] == row[1:]:
                rows.pop()
            rows.append(row)
            size *= 2
        return rows

    def uncap_pull_thresholds(self) -> None:
        """Does nothing: all messages up to max_size are taken anyway, none is left to NCCL by a threshold."""

    # ---- calls ------------------------------------------------------------------------------------------------------

    def custom_all_reduce(self, inp: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, shaped as `inp`. All ranks make the same calls in the same order.

        A new tensor; but `inp` itself where the call is captured inside capture() and done by 2shot_pull. Raises
        onehop.Error: see onehop.AllReduce.all_reduce.
        """
        ar = self.obj if self.obj is not None else self._live()
        captured = ar._capturing and being_captured(inp)
        if captured and not in_piecewise_graph():
            return self._captured(ar, inp)
        if self._override is None and (captured or not self.pull_enabled):
            return self._sum(inp, **self._eager(ar, inp))
        if captured and self._override in PULLS:
            return self._sum(inp, algorithm=self._override, source=Source.WORKSPACE)
        return self._sum(inp, algorithm=self._override)

    def _captured(self, ar: onehop.AllReduce, inp: torch.Tensor) -> torch.Tensor:
        """A call whose memory the exit of capture() has mapped."""
        algorithm, source = self._override, None
        if algorithm is None:
            choice = ar.would_use(inp, graph=True)
            algorithm, source = choice.algorithm, choice.source
            if algorithm in PULLS and not self.pull_enabled:
                return self._sum(inp, algorithm=Algorithm.TWOSHOT_PUSH)
        if algorithm != Algorithm.TWOSHOT_PULL:
            return self._sum(inp, algorithm=self._override)
        ar.all_reduce_(inp if inp.is_contiguous() else in_order(inp), algorithm=algorithm, source=source)
        return inp

    def _eager(self, ar: onehop.AllReduce, inp: torch.Tensor) -> dict[str, Any]:
        """What the table says of a call that is not captured; by name, so that it holds in a capture too."""
        choice = ar.would_use(inp)
        if choice.algorithm not in PULLS:
            return {"algorithm": choice.algorithm}
        if not self.pull_enabled:
            return {"algorithm": Algorithm.TWOSHOT_PUSH}
        return {"algorithm": choice.algorithm, "source": choice.source}

    # ---- captured memory ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """As of DropIn. Where SGLang's memory saver is on, nothing is noted, and captured calls are as eager ones."""
        if memory_saver():
            yield
            return
        with super().capture():
            yield

    def get_graph_capture_bases(self) -> tuple[list[tuple[int, int]], list[list[int]], list[int]]:
        """Inside capture(): the memory of the captured calls that take addresses.

        (allocations as (address, bytes); for each call the allocations its input lies in, as indices; for each call
        the offset of its input in the first of them)
        """
        bases: dict[tuple[int, int], int] = {}
        chunks, offsets = [], []
        for captured in self._live().capture_inputs():
            at, end, found = captured.in_ptr, captured.in_ptr + captured.bytes, list[tuple[int, int]]()
            while at < end:
                found.append(allocation_of(at, end - at, self.device))
                at = found[-1][0] + found[-1][1]
            chunks.append([bases.setdefault(base, len(bases)) for base in found])
            offsets.append(captured.in_ptr - found[0][0])
        return list(bases), chunks, offsets

    def register_peer_mapped_inputs(self, peer_ptrs: Sequence[Sequence[int]]) -> None:
        """Inside capture(), when all graphs are captured, instead of what its exit does; collective.

        peer_ptrs[i][r]: where this rank's device reaches rank r's input of the i-th call that get_graph_capture_bases
        told of, aligned to 16 bytes, valid as long as the graphs.
        """
        # 2shot_pull is captured in place and 1shot_pull stores to no peer: inputs are all that is needed.
        self._live().capture_end_mapped(peer_ptrs, peer_ptrs)


def being_captured(inp: torch.Tensor) -> bool:
    """Whether a call with this tensor would become part of a graph."""
    return inp.is_cuda and torch.cuda.is_current_stream_capturing()


def allocation_of(address: int, size: int, device: torch.device) -> tuple[int, int]:
    """Start and bytes of the allocation that an address lies in; on the host, where memory has no owner, itself."""
    if device.type != "cuda":
        return address, size
    base, length = ctypes.c_uint64(), ctypes.c_size_t()
    driver = ctypes.CDLL("libcuda.so.1")
    result = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(length), ctypes.c_uint64(address))
    if result:
        raise RuntimeError(f"cuMemGetAddressRange of {address:#x}: error {result}")
    return base.value, length.value
