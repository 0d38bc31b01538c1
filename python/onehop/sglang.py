"""CustomAllReduceV2: onehop where SGLang has its custom all-reduce.

docs/engines.md says where to plug it in, and what differs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from onehop._dropin import MAX_RANKS, DropIn, Sizes, page_up
from onehop._tensors import device_of, named
from onehop._types import Algorithm, Source

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
    return os.environ.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "").lower() in ("1", "true", "yes", "on")


class CustomAllReduceV2(DropIn):
    """Sums over the ranks of a group.

    Attributes: disabled, rank, world_size, device, group, max_size, max_push_size, max_pull_size (bytes; the storage in
    force), config, override_algo, obj (the onehop.AllReduce, None if disabled).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: int | str | torch.device,
        max_size: int = 16 << 20,
        *,
        max_pull_size: int | None = None,
        max_push_size: int | None = None,
        max_pull_blocks: int | None = None,
        max_push_blocks: int | None = None,
    ) -> None:
        """Collective over `group`, a torch.distributed group for CPU tensors.

        max_size: longest message taken, in bytes, and up to where storage follows the tuning table. max_push_size,
        max_pull_size: that much storage instead, rounded up to 4096; longer messages go in pieces. max_push_blocks,
        max_pull_blocks: the larger one bounds the grid of all calls, if both are given.
        """
        self._override: Algorithm | None = None
        self.max_size = max(max_size, max_push_size or 0, max_pull_size or 0)
        sizes = Sizes(
            max_bytes=max_size,
            push_bytes=page_up(max_push_size),
            pull_bytes=page_up(max_pull_size),
            max_blocks=max(max_push_blocks, max_pull_blocks) if max_push_blocks and max_pull_blocks else 0,
        )
        super().__init__(group, device, self.max_size, sizes, can_use_custom_all_reduce_v2(group, device))
        stats = self.obj.stats() if self.obj else None
        self.max_push_size = stats.push_bytes if stats else 0
        self.max_pull_size = stats.pull_bytes if stats else 0

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
        if not (ar._capturing and being_captured(inp)):
            return ar.all_reduce(inp, algorithm=self._override)
        algorithm, source = self._override, None
        if algorithm is None:
            choice = ar.would_use(inp, graph=True)
            algorithm, source = choice.algorithm, choice.source
        if algorithm != Algorithm.TWOSHOT_PULL:
            return ar.all_reduce(inp, algorithm=self._override)
        ar.all_reduce_(inp, algorithm=algorithm, source=source)
        return inp

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
