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

from onehop._dropin import MAX_RANKS, DropIn, Sizes, on
from onehop._tensors import DTYPES, device_of

__all__ = ["CustomAllreduce"]


class CustomAllreduce(DropIn):
    """Sums over the ranks of a group, and what else vLLM asks of its own class.

    Attributes: disabled, rank, world_size, device, group, max_size (bytes), fully_connected, batch_invariant, obj (the
    onehop.AllReduce, None if disabled).
    """

    max_size: int
    batch_invariant = False
    # There are no kernels of ours that store by NVLink multicast.
    mnnvl_only = False
    mnnvl_multicast_ptr = mnnvl_lamport_ag_multicast_ptr = mnnvl_multimem_rs_multicast_ptr = 0

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: int | str | torch.device,
        max_size: int = 8 << 20,
        max_all_gather_size: int = 2 << 20,
        max_mnnvl_all_gather_size: int | None = None,  # noqa: ARG002
        max_reduce_scatter_size: int = 16 << 20,
        max_mnnvl_reduce_scatter_size: int = 16 << 20,  # noqa: ARG002
        max_mnnvl_multimem_reduce_scatter_size: int = 64 << 20,  # noqa: ARG002
        symm_mem_enabled: bool = False,  # noqa: ARG002
        *,
        register_graph_buffers: bool = True,
    ) -> None:
        """Collective over `group`, a torch.distributed group for CPU tensors.

        max_size: longest message taken, in bytes; of any length where VLLM_BATCH_INVARIANT is on. max_all_gather_size,
        max_reduce_scatter_size: the same for inputs of these. register_graph_buffers: False: capture() has no memory
        mapped. The others are for kernels that are not there: they change nothing.
        """
        self.batch_invariant = on("VLLM_BATCH_INVARIANT")
        self.registers = register_graph_buffers
        self.max_size = max_size
        self.max_all_gather_size, self.max_reduce_scatter_size = max_all_gather_size, max_reduce_scatter_size
        usable = 2 <= dist.get_world_size(group) <= MAX_RANKS
        super().__init__(
            group, device, None if self.batch_invariant else max_size, Sizes(max_bytes=max_size), usable
        )

    @property
    def fully_connected(self) -> bool:
        """Whether each rank reaches the memory of all others: else it is disabled."""
        return not self.disabled

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
        return self._sum(inp, out)

    def should_custom_all_gather(self, inp: torch.Tensor) -> bool:
        """Whether custom_all_gather takes the tensor: of this device, of one dimension or more, not too long."""
        return (
            not self.disabled
            and inp.device == self.device
            and inp.dim() > 0
            and self._fits(inp, None if self.batch_invariant else self.max_all_gather_size)
        )

    def custom_all_gather(self, inp: torch.Tensor) -> torch.Tensor | None:
        """The tensors of all ranks one behind the other, or None: the caller then has another way."""
        return self._live().all_gather(inp) if self.should_custom_all_gather(inp) else None

    def should_custom_reduce_scatter(self, inp: torch.Tensor) -> bool:
        """Whether custom_reduce_scatter takes the tensor, whose first dimension the ranks divide."""
        return (
            not self.disabled
            and inp.dtype in DTYPES
            and inp.device == self.device
            and inp.dim() > 0
            and inp.shape[0] % self.world_size == 0
            and self._fits(inp, None if self.batch_invariant else self.max_reduce_scatter_size)
        )

    def should_mnnvl_multimem_reduce_scatter(self, inp: torch.Tensor) -> bool:  # noqa: ARG002
        """False: see mnnvl_multicast_ptr."""
        return False

    def custom_reduce_scatter(self, inp: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of the sum, or None, also where it is disabled: the caller then has another way."""
        return self._live().reduce_scatter(inp) if self.should_custom_reduce_scatter(inp) else None

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
