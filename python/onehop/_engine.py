"""One device of a torch.distributed group: its AllReduce, how collectives of tensors become calls of it, their Work.

onehop.distributed decides what comes here. Whether a tensor is contiguous or aligned is each rank's own affair: what
does not lie as the library wants it is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Work

from onehop._all_reduce import AllReduce
from onehop._errors import CommunicatorDead
from onehop._tensors import DTYPES

Call = Callable[[], None]
_work_of: Callable[[Any], Work] = c10d._create_work_from_future  # type: ignore[attr-defined]


def lies_flat(tensor: torch.Tensor) -> bool:
    """Whether its memory is its elements, in order."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that lies flat."""
    return tensor if lies_flat(tensor) else tensor.contiguous().resolve_conj().resolve_neg()


def done(tensors: Sequence[torch.Tensor]) -> Work:
    """Work that has ended."""
    future: Any = torch.futures.Future()
    future.set_result(list(tensors))
    return _work_of(future)


class StreamWork(Work):
    """Work on a stream of ours, as that of NCCL's backend: `wait` makes the current stream wait, not the caller."""

    def __init__(self, engine: Engine, event: Any, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._engine, self._event, self._tensors = engine, event, list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        """The current stream waits. Raises if the communicator is known to be dead."""
        self.synchronize()
        self._engine.check()
        return True

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._engine.device).wait_event(self._event)

    def block_current_stream(self) -> None:
        self.synchronize()

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def is_success(self) -> bool:
        return self.is_completed() and self._engine.failure() is None

    def exception(self) -> CommunicatorDead | None:
        return self._engine.failure()

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        """Of the tensors; who waits for it or continues it does so on the current stream."""
        future: Any = torch.futures.Future(devices=[self._engine.device])
        with torch.cuda.stream(self._engine.side):
            future.set_result(self._tensors)
        return future


class Engine:
    """The collectives of one device. `who(rank)` says which process a rank of the group is."""

    def __init__(self, ar: AllReduce, who: Callable[[int], str]) -> None:
        self.ar, self.device, self._who = ar, ar.device, who
        on_gpu = ar.device.type == "cuda"
        self.side: Any = torch.cuda.Stream(ar.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()  # autograd calls from threads of its own

    def run(self, call: Call, tensors: Sequence[torch.Tensor], use: Sequence[torch.Tensor], wait: bool) -> Work | None:
        """Makes the call, which uses the tensors `use`; None if it is to be waited for, that is, in stream order.

        Calls on the CPU have ended when they return. On a GPU a call that is not waited for goes on a stream of ours.
        """
        try:
            with self._lock, torch.no_grad():
                if wait or self.side is None:
                    call()
                    return None if wait else done(tensors)
                self.side.wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(self.side):
                    call()
                for tensor in use:
                    tensor.record_stream(self.side)
                return StreamWork(self, self.side.record_event(), tensors)
        except CommunicatorDead as error:
            raise self._named(error) from None

    def _named(self, error: CommunicatorDead) -> CommunicatorDead:
        """The error, with the rank in the whole job if the group is a part of it."""
        peer = error.failure.peer if error.failure else -1
        who = self._who(peer) if peer >= 0 else ""
        return CommunicatorDead(f"{error}{who}", error.code, error.failure)

    def failure(self) -> CommunicatorDead | None:
        """What ended the communicator, if anything has."""
        found = self.ar.status()
        return self._named(CommunicatorDead(found.text, found.result, found)) if found else None

    def check(self) -> None:
        """Raises if the communicator is dead."""
        found = self.failure()
        if found:
            raise found

    # ---- calls, to be made by `run` -----------------------------------------------------------------------------

    def reduce(self, tensor: torch.Tensor, divisor: int = 1) -> None:
        """The sum over all ranks in place, divided."""
        ar = self.ar
        if type(tensor) is not torch.Tensor or tensor.is_neg() or not ar._call_tensors(tensor, tensor, self._stream()):
            ar.all_reduce_(tensor)
        if divisor != 1:
            tensor.div_(divisor)

    def gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """`out`: all ranks' tensors, one behind the other, whatever its shape."""
        given, got = flat(tensor), out if lies_flat(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        size = given.numel() * given.element_size()
        self.ar.context.all_gather(given.data_ptr(), got.data_ptr(), size, self._stream())
        if got is not out:
            out.copy_(got)

    def scatter(self, out: torch.Tensor, tensor: torch.Tensor, divisor: int = 1) -> None:
        """`out`: this rank's part of the sum, divided."""
        given, got = flat(tensor), out if lies_flat(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        place = given.data_ptr(), got.data_ptr(), got.numel(), DTYPES[given.dtype], self._stream()
        self.ar.context.reduce_scatter(*place)
        if divisor != 1:
            got.div_(divisor)
        if got is not out:
            out.copy_(got)

    def gather_list(self, outs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Each rank's tensor in a tensor of its own."""
        whole = torch.empty((len(outs), tensor.numel()), dtype=tensor.dtype, device=tensor.device)
        self.gather(whole, tensor)
        for out, part in zip(outs, whole, strict=True):
            out.copy_(part.view(out.shape))

    def scatter_list(self, out: torch.Tensor, tensors: Sequence[torch.Tensor], divisor: int = 1) -> None:
        """The parts of the sum lie in tensors of their own."""
        self.scatter(out, torch.cat([tensor.reshape(-1) for tensor in tensors]), divisor)

    def meet(self) -> None:
        """All ranks have come here; on a GPU, what lies before it on the current stream has run."""
        self.reduce(torch.zeros(1, device=self.device))
        if self.side is not None:
            self.ar.synchronize()

    def _stream(self) -> int:
        return self.ar._stream(self.ar._index)
