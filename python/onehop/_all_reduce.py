"""AllReduce: a context, for tensors."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from onehop import _onehop
from onehop._errors import ArgumentError, failure_of
from onehop._fused import FusedCalls
from onehop._group import milliseconds, rendezvous
from onehop._handles import Handles
from onehop._tensors import device_of, dtype_of, kind_of
from onehop._types import Algorithm, CapturedInput, Choice, Collective, DType, Failure, Mode, Source, Stats

members: "Handles[AllReduce]" = Handles("that of an AllReduce that is open")


class AllReduce(FusedCalls):
    """All-reduces between the ranks of a group: sums of tensors, with the same bits on every rank.

    Making one is collective, and succeeds on all ranks or fails on all.

    group: a torch.distributed.ProcessGroup whose ranks are processes of this machine; through a backend for CPU tensors
        (gloo) if it has one, else through its store. None: the default group, or without torch.distributed RANK and
        WORLD_SIZE of the environment. An onehop.Rendezvous: without torch.distributed.
    device: this rank's GPU (None: PyTorch's current one), or "cpu".
    max_bytes, push_bytes, pull_bytes, max_blocks, max_registrations: sizes, equal on all ranks; 0 is the default. Messages of
        any length work; see onehop_config.
    timeout: seconds until a call whose peer does not come fails; None: ONEHOP_TIMEOUT_MS or 300.
    init_timeout: the same for collective calls, this one included.
    early_trigger, share_gpu, nccl, uncap, ordered: see ONEHOP_FLAG_EARLY_TRIGGER, _SHARE_GPU, _NCCL, _UNCAP and _ORDERED.

    One thread at a time may use an object, except for `abort`, `status` and `set_timeout`. While a call waits on the
    CPU, and while one of the blocking methods runs, other Python threads run.

    Raises SetupError if the group cannot be served, for the same reason on all ranks, and ArgumentError for arguments.
    """

    def __init__(
        self,
        group: Any = None,
        device: torch.device | str | int | None = None,
        *,
        max_bytes: int = 0,
        push_bytes: int = 0,
        pull_bytes: int = 0,
        max_blocks: int = 0,
        max_registrations: int = 0,
        timeout: float | None = None,
        init_timeout: float | None = None,
        early_trigger: bool = False,
        share_gpu: bool = False,
        nccl: bool = False,
        uncap: bool = False,
        ordered: bool = False,
    ) -> None:
        place = device_of(device)
        flags = (
            early_trigger * _onehop.FLAG_EARLY_TRIGGER
            | share_gpu * _onehop.FLAG_SHARE_GPU
            | nccl * _onehop.FLAG_NCCL
            | uncap * _onehop.FLAG_UNCAP
            | ordered * _onehop.FLAG_ORDERED
        )
        timeout_ms, init_timeout_ms = milliseconds(timeout, "timeout"), milliseconds(init_timeout, "init_timeout")
        meeting = rendezvous(group, init_timeout)
        self.context = _onehop.Context(
            *meeting,
            device=kind_of(place),
            ordinal=place.index or 0,
            max_bytes=max_bytes,
            push_bytes=push_bytes,
            pull_bytes=pull_bytes,
            max_blocks=max_blocks,
            max_registrations=max_registrations,
            timeout_ms=timeout_ms,
            flags=flags,
            init_timeout_ms=init_timeout_ms,
        )
        self._prepare(place, self.context)
        self._capturing = False
        self.rank = self.context.rank
        self.world_size = self.context.world_size
        self.handle = members.add(self)
        """The number that torch.ops.onehop takes for this object."""

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"AllReduce(rank {self.rank} of {self.world_size} on {self.device}{state})"

    # ---- capture ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capture(self) -> Iterator["AllReduce"]:
        """Around the capture of graphs: `with ar.capture(), torch.cuda.graph(graph): ...`.

        Captured pull calls then read the ranks' tensors as they lie. Leaving it is collective and compares what the
        ranks have captured; CommunicatorDead with code MISMATCH says which call differs. Graphs may run afterwards.
        Tensors that captured calls use must stay until the graphs of all ranks are gone. After an exception inside it
        ends too, with the other ranks, and the exception goes on.
        """
        self.capture_begin()
        try:
            yield self
        except BaseException:
            with contextlib.suppress(Exception):  # the exception that goes on says more
                self.capture_end()
            raise
        if self._capturing:  # not if capture_end_mapped was called inside
            self.capture_end()

    def capture_begin(self) -> None:
        """Begin of `capture()`, for callers who end it by other means."""
        self.context.capture_begin()
        self._capturing = True

    def capture_end(self) -> None:
        """End of `capture()`: collective."""
        self._capturing = False
        self.context.capture_end()

    def capture_inputs(self) -> list[CapturedInput]:
        """Calls captured so far that take addresses, in order: pull calls over the captured memory."""
        return [CapturedInput(*one) for one in self.context.capture_inputs()]

    def capture_end_mapped(self, in_rows: Sequence[Sequence[int]], out_rows: Sequence[Sequence[int]]) -> None:
        """End of a capture where the caller can already reach the peers' memory: collective.

        `in_rows[i][r]` and `out_rows[i][r]` are the addresses, on this rank's device, of rank r's input and output of
        the i-th of `capture_inputs()`; aligned to 16 bytes, valid as long as the graph. Wrong arguments of one rank
        raise on all, which are then still capturing.
        """
        for rows, what in (in_rows, "in_rows"), (out_rows, "out_rows"):
            for row in rows:
                if len(row) != self.world_size:
                    raise ArgumentError(f"{what}: expected {self.world_size} addresses a row, found {len(row)}")
        if len(in_rows) != len(out_rows):
            raise ArgumentError(f"expected as many out_rows as in_rows, found {len(out_rows)} and {len(in_rows)}")
        self.context.capture_end_mapped(
            [address for row in in_rows for address in row],
            [address for row in out_rows for address in row],
            len(in_rows),
        )
        self._capturing = False

    # ---- asking -------------------------------------------------------------------------------------------------

    def would_use(
        self,
        tensor_or_bytes: torch.Tensor | int,
        dtype: torch.dtype | DType | None = None,
        *,
        graph: bool = False,
        in_place: bool = False,
        collective: Collective = Collective.ALL_REDUCE,
    ) -> Choice:
        """What `all_reduce` does with such a message: exactly. `graph`: inside `capture()`.

        `dtype` None is the tensor's, and bfloat16 for a number of bytes. With another collective what that does;
        tensor or bytes are then one rank's part: `out` of `reduce_scatter`, `tensor` of `all_gather`.
        """
        if isinstance(tensor_or_bytes, torch.Tensor):
            size = tensor_or_bytes.numel() * tensor_or_bytes.element_size()
            gathers = collective == Collective.ALL_GATHER  # of any type, which is not looked at
            code = DType.FLOAT32 if gathers else dtype_of(dtype or tensor_or_bytes.dtype)
        else:
            size, code = tensor_or_bytes, dtype_of(dtype or torch.bfloat16)
        mode = Mode.GRAPH if graph else Mode.EAGER
        if collective == Collective.ALL_REDUCE:
            found = self.context.would_use(size, code, mode, in_place)
        else:
            found = self.context.would_use_for(collective, size, code, mode)
        return Choice(Algorithm(found[0]), Source(found[1]), *found[2:])

    def status(self) -> Failure | None:
        """None, or what ended this communicator. Does not wait; may run beside any call."""
        record = self.context.status()
        return failure_of(record) if record else None

    def stats(self) -> Stats:
        """Counters and sizes of this rank."""
        calls, size, calls_by, *more = self.context.stats()
        used = {Algorithm(number): count for number, count in enumerate(calls_by) if count}
        return Stats(calls, size, used, *more)

    # ---- waiting and ending -------------------------------------------------------------------------------------

    def synchronize(self, stream: Any = None) -> None:
        """Waits for a stream (None: the current one) and watches the peers: a lost one is seen at once.

        Raises CommunicatorDead if the object is dead.
        """
        if stream is None:
            handle = self._stream(self._index)
        elif isinstance(stream, int):
            handle = stream
        else:
            handle = stream.handle if isinstance(stream, _onehop.HostStream) else stream.cuda_stream
        self.context.synchronize(handle)

    def abort(self) -> None:
        """Ends calls in flight on all ranks; the object is dead afterwards. From any thread, beside any call."""
        self.context.abort()

    def set_timeout(self, seconds: float) -> None:
        """New deadline of calls, also of graphs captured before."""
        self.context.set_timeout(milliseconds(seconds, "seconds"))

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.context.closed

    def close(self) -> None:
        """Local; waits for this rank's own eager calls at most. Twice is once. Peers that still call fail."""
        self.context.destroy()
        members.drop(self.handle)

    def __enter__(self) -> "AllReduce":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
