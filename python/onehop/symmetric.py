"""Bring your own storage: all-reduces over memory that somebody else allocated and mapped.

`SymmetricAllReduce.from_torch` takes PyTorch's symmetric memory. Anything else that every rank can reach serves too:
write a function that makes it. onehop allocates no device memory here and exchanges no handles; without its own
rendezvous, a lost peer shows at the deadline.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from onehop import _onehop
from onehop._errors import ArgumentError
from onehop._group import milliseconds, rendezvous
from onehop._tensors import TensorCalls, device_of, kind_of
from onehop._types import Layout

_LOCAL_ALIGNMENT = 256


class Storage(NamedTuple):
    """One rank's view of the memory: addresses in this process, and what keeps them alive."""

    symmetric: Sequence[int]
    """Address here of each rank's Layout.symmetric_bytes, aligned to 4096; own included."""
    owner: object = None


class SymmetricAllReduce(TensorCalls):
    """All-reduces over the caller's memory, with the calls of AllReduce.

    Making one is collective: `allocate(layout)` is called on every rank, and the group is used for two barriers.
    `group`, `device`, sizes and `timeout` as for AllReduce, but the group must have been set up by other means than
    a name. Captured calls go by push, or over the workspace.
    """

    def __init__(
        self,
        allocate: Callable[[Layout], Storage],
        group: Any = None,
        device: torch.device | str | int | None = None,
        *,
        push_bytes: int = 0,
        pull_bytes: int = 0,
        max_blocks: int = 0,
        max_registrations: int = 1,
        timeout: float | None = None,
        init_timeout: float | None = None,
        early_trigger: bool = False,
        ordered: bool = False,
    ) -> None:
        place = device_of(device)
        meeting = rendezvous(group, init_timeout)
        if meeting.allgather is None:
            raise ArgumentError("group: expected a process group or an onehop.Rendezvous with an allgather")
        self.rank, self.world_size, self._allgather = meeting.rank, meeting.world_size, meeting.allgather
        ordinal, config = (
            place.index or 0,
            (kind_of(place), self.world_size, push_bytes, pull_bytes, max_blocks, max_registrations),
        )
        self.layout = Layout(*_onehop.layout(*config))
        self._storage = allocate(self.layout)
        self._local, local = _aligned(self.layout.local_bytes, place, pinned=False)
        self._host, host = _aligned(self.layout.host_bytes, torch.device("cpu"), pinned=place.type == "cuda")
        if place.type == "cuda":
            torch.cuda.synchronize(place)  # their zeros
        _onehop.storage_arm(config, ordinal, self._storage.symmetric[self.rank], local, host)
        self.communicator = _onehop.Communicator(
            config,
            ordinal,
            self.rank,
            self._storage.symmetric,
            local,
            host,
            timeout_ms=milliseconds(timeout, "timeout"),
            flags=early_trigger * _onehop.FLAG_EARLY_TRIGGER | ordered * _onehop.FLAG_ORDERED,
            capability=self._lowest_capability(place),
        )
        self._prepare(place, self.communicator)
        self.barrier()  # all memory is armed

    @classmethod
    def from_torch(
        cls, group: Any = None, device: torch.device | str | int | None = None, **options: Any
    ) -> "SymmetricAllReduce":
        """Over torch.distributed._symmetric_memory: CUDA devices, the group's own mapping between them."""
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric_memory

        place = device_of(device)
        if place.type != "cuda":
            raise ArgumentError(f"device: PyTorch's symmetric memory is of CUDA devices, found {place}")
        members: Any = dist.group.WORLD if group is None else group

        def allocate(layout: Layout) -> Storage:
            slab = symmetric_memory.empty(layout.symmetric_bytes, dtype=torch.uint8, device=place)
            handle = symmetric_memory.rendezvous(slab, members.group_name)
            offset = slab.data_ptr() - handle.buffer_ptrs[handle.rank]
            return Storage([base + offset for base in handle.buffer_ptrs], (slab, handle))

        return cls(allocate, members, place, **options)

    def _lowest_capability(self, place: torch.device) -> int:
        if place.type != "cuda":
            return 0
        major, minor = torch.cuda.get_device_capability(place)
        everyone = self._allgather((10 * major + minor).to_bytes(4, "little"))
        return min(int.from_bytes(everyone[at : at + 4], "little") for at in range(0, len(everyone), 4))

    def __repr__(self) -> str:
        return f"SymmetricAllReduce(rank {self.rank} of {self.world_size} on {self.device})"

    def barrier(self) -> None:
        """Waits for all ranks' calls of it; not for the GPU."""
        self._allgather(b"\0")

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.communicator.closed

    def close(self) -> None:
        """Local; waits for this rank's GPU. The storage must stay until all ranks have come here: see `barrier`."""
        if not self.closed and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.communicator.destroy()

    def __enter__(self) -> "SymmetricAllReduce":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.barrier()
        self.close()


def _aligned(size: int, device: torch.device, *, pinned: bool) -> tuple[torch.Tensor, int]:
    memory = torch.zeros(size + _LOCAL_ALIGNMENT, dtype=torch.uint8, device=device, pin_memory=pinned)
    return memory, -(-memory.data_ptr() // _LOCAL_ALIGNMENT) * _LOCAL_ALIGNMENT
