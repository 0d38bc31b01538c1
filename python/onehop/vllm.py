"""CustomAllreduce: onehop where vLLM has its custom all-reduce.

docs/engines.md says where to plug it in, and what differs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from onehop._dropin import MAX_RANKS, DropIn, Sizes
from onehop._tensors import device_of

__all__ = ["CustomAllreduce"]


class CustomAllreduce(DropIn):
    """Sums over the ranks of a group.

    Attributes: disabled, rank, world_size, device, group, max_size (bytes), obj (the onehop.AllReduce, None if
    disabled).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: int | str | torch.device,
        max_size: int = 8 << 20,
        symm_mem_enabled: bool = False,  # noqa: ARG002
    ) -> None:
        """Collective over `group`, a torch.distributed group for CPU tensors.

        max_size: longest message taken, in bytes. symm_mem_enabled, which tells vLLM's own class to leave long messages
        to symmetric memory, changes nothing here.
        """
        self.max_size = max_size
        usable = 2 <= dist.get_world_size(group) <= MAX_RANKS
        super().__init__(group, device, max_size, Sizes(max_bytes=max_size), usable)

    def all_reduce(
        self,
        inp: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        registered: bool = False,  # noqa: ARG002
    ) -> torch.Tensor:
        """The sum over all ranks, in `out` or a new tensor.

        registered: changes nothing; whether captured memory is read as it lies follows from capture(). Raises
        onehop.Error: see onehop.AllReduce.all_reduce.
        """
        return self._live().all_reduce(inp, out=out)

    def custom_all_reduce(self, inp: torch.Tensor) -> torch.Tensor | None:
        """all_reduce, or None if should_custom_ar says no: the caller then has another way."""
        return self.all_reduce(inp) if self.should_custom_ar(inp) else None

    def register_graph_buffers(self) -> None:
        """Inside capture(), when all graphs are captured: what its exit does otherwise; collective.

        Elsewhere nothing is to be done.
        """
        ar = self.obj
        if ar is not None and ar._capturing:
            ar.capture_end()

    @staticmethod
    def create_shared_buffer(
        size_in_bytes: int,
        group: dist.ProcessGroup | None = None,
        uncached: bool = False,  # noqa: ARG004
    ) -> list[int]:
        """Collective: one buffer of each rank; the addresses in this process, by rank.

        On the GPU that is current, by PyTorch's symmetric memory, where there is one; else in memory that processes
        share. `uncached` is for other GPUs than these.
        """
        device = device_of(None)
        made = on_gpus(size_in_bytes, group, device) if device.type == "cuda" else on_host(size_in_bytes, group)
        _shared[made.pointers[dist.get_rank(group)]] = made
        return made.pointers

    @staticmethod
    def free_shared_buffer(
        pointers: list[int], group: dist.ProcessGroup | None = None, rank: int | None = None
    ) -> None:
        """Local; no rank may use this rank's buffer any more.

        Pointers that create_shared_buffer did not return are left alone.
        """
        made = _shared.pop(pointers[dist.get_rank(group) if rank is None else rank], None)
        for block in made.blocks if made else ():
            block.close()


# ---- shared buffers --------------------------------------------------------------------------------------------------


class Shared(NamedTuple):
    """What create_shared_buffer made: addresses by rank, and what keeps them valid."""

    pointers: list[int]
    tensor: torch.Tensor | None
    blocks: list[mmap.mmap]


_shared: dict[int, Shared] = {}


def on_gpus(size: int, group: dist.ProcessGroup | None, device: torch.device) -> Shared:
    """By PyTorch's symmetric memory."""
    import torch.distributed._symmetric_memory as symmetric

    members: Any = dist.group.WORLD if group is None else group
    tensor = symmetric.empty(size, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(tensor, members.group_name)
    offset = tensor.data_ptr() - handle.buffer_ptrs[handle.rank]
    return Shared([base + offset for base in handle.buffer_ptrs], tensor, [])


def on_host(size: int, group: dist.ProcessGroup | None) -> Shared:
    """In memory without a name, so that nothing can be left behind."""
    mine = os.memfd_create("onehop shared buffer")
    try:
        os.truncate(mine, size)
        places = [(0, 0)] * dist.get_world_size(group)
        dist.all_gather_object(places, (os.getpid(), mine), group)
        blocks = [map_file(f"/proc/{pid}/fd/{number}", size) for pid, number in places]
        dist.barrier(group)
    finally:
        os.close(mine)
    return Shared([ctypes.addressof(ctypes.c_char.from_buffer(block)) for block in blocks], None, blocks)


def map_file(path: str, size: int) -> mmap.mmap:
    """The first `size` bytes of a file."""
    with open(path, "r+b", buffering=0) as file:
        return mmap.mmap(file.fileno(), size)
