"""The backend "onehop" of torch.distributed, for CPU and CUDA: `import onehop.distributed`, and name it.

    import torch.distributed as dist
    import onehop.distributed

    dist.init_process_group("onehop")

All-reduce, all-gather, reduce-scatter and barrier go through onehop where it can serve them, all else by
gloo (CPU) and NCCL (CUDA). docs/torch.md has what is taken, and how it goes with DDP, FSDP2, DTensor and torch.compile.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from onehop._collectives import Collectives

__all__ = ["ProcessGroup", "register"]

NAME = "onehop"
_Types = dist.ProcessGroup.BackendType


def _inner(group: dist.ProcessGroup, backends: list[tuple[str, Any, Any]]) -> None:
    """Registers PyTorch's own backends."""
    for device, kind, backend in backends:
        group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(backends[-1][1])


def _number(backend: Any) -> None:
    """As PyTorch does; from 2.14 there is nothing to do."""
    if not hasattr(dist.ProcessGroup, "reconfigure"):
        backend._set_sequence_number_for_group()


def _name(group: Any, name: str) -> None:
    group._set_group_name(name)


def _own_backends(options: Any) -> list[tuple[str, Any, Any]]:
    """Of the CPU gloo, of CUDA NCCL or else gloo: device, type, backend."""
    store, rank, size = options.store, options.group_rank, options.group_size
    gloo = c10d.ProcessGroupGloo(c10d.PrefixStore("cpu/", store), rank, size, timeout=options.timeout)
    _number(gloo)
    found: list[tuple[str, Any, Any]] = [("cpu", _Types.GLOO, gloo)]
    if not torch.cuda.is_available():
        return found
    if not dist.is_nccl_available():
        return [*found, ("cuda", _Types.GLOO, gloo)]
    own = c10d.ProcessGroupNCCL.Options()
    own._timeout = options.timeout
    own.global_ranks_in_group = options.global_ranks_in_group
    own.group_name = options.group_id
    nccl = c10d.ProcessGroupNCCL(c10d.PrefixStore("cuda/", store), rank, size, own)
    _number(nccl)
    return [*found, ("cuda", _Types.NCCL, nccl)]


class ProcessGroup(Collectives, dist.ProcessGroup):  # type: ignore[misc]
    """A group whose collectives are onehop's where it can serve them. torch.distributed makes it."""

    def __init__(self, options: Any) -> None:
        make: Any = dist.ProcessGroup.__init__  # the form with a store makes no object of a subclass
        make(self, options.group_rank, options.group_size)
        inner = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
        backends = _own_backends(options)
        _inner(self, backends)  # for those who ask for them
        _inner(inner, backends)
        _name(inner, options.group_id)
        self._options = options
        self._children: list[ProcessGroup] = []  # the other side holds only half of each
        self._start(inner, options.store, options.group_id, options.global_ranks_in_group, options.timeout)

    def get_group_store(self) -> Any:  # noqa: D102
        return self._options.store

    def getBackendName(self) -> str:  # noqa: D102, N802
        return NAME

    def splitGroup(  # noqa: D102, N802
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,  # noqa: ARG002
        name: str | None = None,
        desc: str | None = None,
        *_: Any,
    ) -> ProcessGroup | None:
        if self.rank() not in ranks:
            return None
        mine, options = self._options, c10d._DistributedBackendOptions()
        options.group_id = name or f"{mine.group_id}:split:{'.'.join(map(str, ranks))}"
        options.store = c10d.PrefixStore(f"{options.group_id}/", mine.store)
        options.group_rank, options.group_size = ranks.index(self.rank()), len(ranks)
        options.timeout = timeout or mine.timeout
        everyone = mine.global_ranks_in_group
        options.global_ranks_in_group = [everyone[rank] for rank in ranks] if everyone else ranks
        made = ProcessGroup(options)
        _name(made, options.group_id)
        made._set_group_desc(desc or "undefined")
        self._children.append(made)
        return made

    def shutdown(self) -> None:  # noqa: D102
        self._close()
        dist.ProcessGroup.shutdown(self)

    def abort(self) -> None:  # noqa: D102
        self._abort()
        self._inner.abort()


# PyTorch makes calls of a method that a subclass lacks with Python's lock held. A thread of gloo may wait for that lock
# while it holds the one that the call needs. So no such method is lacking.
_LEFT = (
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "recv_anysource",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "allgather_coalesced",
    "_start_coalescing",
    "_end_coalescing",
)


def _leave(method: str) -> Any:
    def call(self: ProcessGroup, *arguments: Any, **named: Any) -> Any:
        return getattr(self._inner, method)(*arguments, **named)

    return call


for _method in _LEFT:
    if hasattr(dist.ProcessGroup, _method):
        setattr(ProcessGroup, _method, _leave(_method))


def _create(options: Any, _: Any) -> ProcessGroup:
    return ProcessGroup(options)


def register() -> None:
    """Makes torch.distributed know the name; importing the module does it, twice is once."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


register()
