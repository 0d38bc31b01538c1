"""What the stand-ins for classes of inference engines share: see onehop.sglang and onehop.vllm.

Thin over onehop.AllReduce. An engine asks whether its fast path takes a tensor and has another one otherwise, so a
group that cannot be served makes the object `disabled`, on all ranks alike, instead of raising.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any, TypedDict

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


def on(name: str) -> bool:
    """Whether a variable of the environment is set to something that means yes."""
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "y", "on", "t")


def dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one block of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class DropIn:
    """`disabled`: no tensor is taken. `obj`: the AllReduce in use, None if disabled or closed."""

    disabled: bool
    obj: onehop.AllReduce | None
    group: dist.ProcessGroup
    device: torch.device
    rank: int
    world_size: int
    registers = True  # whether capture() has captured memory mapped

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: int | str | torch.device,
        limit: int | None,
        sizes: Sizes,
        usable: bool,
    ) -> None:
        """limit: bytes of the longest message taken; None: of any length."""
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

        It does if it is of this device, of one block of memory without gaps, float32, float16 or bfloat16, not empty
        and not longer than the limit. Any number of elements at any address of an element will do.
        """
        return not self.disabled and inp.dtype in DTYPES and inp.device == self.device and self._fits(inp, self._limit)

    @staticmethod
    def _fits(inp: torch.Tensor, limit: int | None) -> bool:
        size = inp.numel() * inp.element_size()
        return 0 < size and (limit is None or size <= limit) and (inp.is_contiguous() or dense(inp))

    def _sum(self, inp: torch.Tensor, out: torch.Tensor | None = None, **way: Any) -> torch.Tensor:
        """The sum, laid out in memory as `inp` is: a transposed tensor needs no copy."""
        ar = self.obj if self.obj is not None else self._live()
        if inp.is_contiguous():
            return ar.all_reduce(inp, **way) if out is None else ar.all_reduce(inp, out=out, **way)
        made = torch.empty_like(inp) if out is None else out
        if dense(inp) and made.stride() == inp.stride():
            ar.all_reduce(in_order(inp), out=in_order(made), **way)
            return made
        return ar.all_reduce(inp, out=made, **way)

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Around the capture of CUDA graphs; not to be nested.

        Calls whose stream is being captured are noted, and the exit, which is collective, has their memory mapped by
        all ranks. Other calls run as they do elsewhere. Where `registers` is False nothing is noted, and captured calls
        are as eager ones. Raises onehop.Error: see onehop.AllReduce.capture.
        """
        if self.disabled or not self.registers:
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
