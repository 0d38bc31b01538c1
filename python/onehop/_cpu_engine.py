"""onehop in engines on CPUs: in place of their shared-memory kernels, for what it takes.

A call is taken by what is equal on all ranks, data type and number of elements, never by how a tensor lies.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

import onehop
from onehop._dropin import MAX_RANKS
from onehop._tensors import DTYPES


def made(group: Any, name: str, log: logging.Logger) -> onehop.AllReduce | None:
    """Collective: None, on all ranks alike, if onehop cannot serve the group."""
    world = dist.get_world_size(group)
    if not 2 <= world <= MAX_RANKS:
        return None
    try:
        ar = onehop.AllReduce(group, "cpu")
    except Exception as error:  # the engine goes on without us
        log.warning("onehop is not used in group %s: %s", name, error)
        return None
    log.info("onehop sums in group %s: rank %d of %d, on CPUs", name, ar.rank, world)
    return ar


def takes(tensor: torch.Tensor) -> bool:
    """Whether onehop sums it."""
    return tensor.is_cpu and tensor.dtype in DTYPES and tensor.numel() > 0


def gathered(ar: onehop.AllReduce, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensors of all ranks, one behind the other along `dim`."""
    dim %= tensor.dim()
    out = ar.all_gather(tensor.contiguous()).reshape(ar.world_size, *tensor.shape).movedim(0, dim)
    return out.reshape(*tensor.shape[:dim], ar.world_size * tensor.shape[dim], *tensor.shape[dim + 1 :])


class Beside:
    """What vLLM's CPU communicator calls for its collectives: some are ours, the rest goes on to `inner`."""

    def __init__(self, inner: Any, ar: onehop.AllReduce, group: Any) -> None:
        self._inner, self._ar, self._group = inner, ar, group

    def _ours(self, group: Any, more: dict[str, Any]) -> bool:
        return not more and (group is None or group is self._group)

    def all_reduce(self, tensor: torch.Tensor, *, group: Any = None, **more: Any) -> Any:
        """In place."""
        if self._ours(group, more) and takes(tensor):
            self._ar.all_reduce_(tensor)
            return None
        return self._inner.all_reduce(tensor, group=group, **more)

    def all_gather_into_tensor(
        self, output: torch.Tensor, tensor: torch.Tensor, *, group: Any = None, **more: Any
    ) -> Any:
        """One behind the other along the first dimension."""
        if self._ours(group, more) and tensor.is_cpu and tensor.dim() and tensor.numel():
            self._ar.all_gather(tensor, out=output)
            return None
        return self._inner.all_gather_into_tensor(output, tensor, group=group, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
