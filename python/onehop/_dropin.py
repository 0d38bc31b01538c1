"""What the stand-ins for classes of inference engines share: see onehop.sglang and onehop.vllm.

Thin over onehop.AllReduce. An engine asks whether its fast path takes a tensor and has another one otherwise, so a
group that cannot be served makes the object `disabled`, on all ranks alike, instead of raising.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TypedDict

import torch
import torch.distributed as dist

import onehop
from onehop._tensors import DTYPES, device_of

log = logging.getLogger("onehop")

MAX_RANKS = 16
PAGE = 4096


class Sizes(TypedDict, total=False):
    """Arguments of onehop.AllReduce."""

    max_bytes: int
    push_bytes: int
    pull_bytes: int
    max_blocks: int


def page_up(size: int | None) -> int:
    """A multiple of what storage comes in; None is 0, the default."""
    return -(-(size or 0) // PAGE) * PAGE


class DropIn:
    """`disabled`: no tensor is taken. `obj`: the AllReduce in use, None if disabled or closed."""

    disabled: bool
    obj: onehop.AllReduce | None

    def __init__(
        self, group: dist.ProcessGroup, device: int | str | torch.device, limit: int, sizes: Sizes, usable: bool
    ) -> None:
        self.disabled, self.obj = True, None
        self._limit = limit
        self.group, self.device = group, device_of(device)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if not usable:
            log.info("%s: disabled: it cannot serve %d ranks on %s", self._name(), self.world_size, self.device)
            return
        try:
            self.obj = onehop.AllReduce(group, self.device, **sizes)
        except onehop.SetupError as error:  # the same on all ranks
            log.warning("%s: disabled: %s", self._name(), error)
            return
        self.disabled = False
        log.info("%s: in use by rank %d of %d on %s", self._name(), self.rank, self.world_size, self.device)

    def _name(self) -> str:
        return f"{type(self).__module__}.{type(self).__name__}"

    def _live(self) -> onehop.AllReduce:
        if self.obj is None:
            raise RuntimeError(f"{self._name()} is disabled or closed")
        return self.obj

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        """Whether custom_all_reduce takes the tensor.

        It does if it is of this device, contiguous, float32, float16 or bfloat16, not empty and not longer than the
        limit. Any number of elements at any address of an element will do.
        """
        return (
            not self.disabled
            and inp.dtype in DTYPES
            and inp.device == self.device
            and inp.is_contiguous()
            and 0 < inp.numel() * inp.element_size() <= self._limit
        )

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Around the capture of CUDA graphs; not to be nested.

        Calls whose stream is being captured are noted, and the exit, which is collective, has their memory mapped by
        all ranks. Other calls run as they do elsewhere. Raises onehop.Error: see onehop.AllReduce.capture.
        """
        if self.disabled:
            yield
            return
        with self._live().capture():
            yield

    def close(self) -> None:
        """Local; calls in flight must have ended. Twice is once."""
        self.disabled = True
        if self.obj is not None:
            self.obj.close()
            self.obj = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # half made, or while the interpreter ends
            self.close()
