"""The collectives that torch.distributed's backend "onehop" takes, and which calls of them it leaves to others.

A call is taken by what is equal on all ranks: device type, data type, reduction, the tensors' sizes. Never by how a
tensor lies in memory, which may differ between ranks: half of a group would wait in one library, half in the other.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from onehop import _onehop
from onehop._all_reduce import AllReduce
from onehop._engine import Engine, done
from onehop._errors import SetupError
from onehop._group import Rendezvous, _through_store
from onehop._tensors import DTYPES, _is_wrapper

log = logging.getLogger("onehop")

LONGEST_S = (1 << 31) / 1000 - 1
_SUM, _AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
# PyTorch 2.13 has renamed these.
_GATHER = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
_SCATTER = "reduce_scatter_single" if hasattr(dist.ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"
_GATHER_MANY, _SCATTER_MANY = (
    ("all_gather_single_coalesced", "reduce_scatter_single_coalesced")
    if _GATHER == "all_gather_single"
    else ("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")
)


def machine() -> bytes:
    """Equal for processes of one machine that reach each other's sockets, of 64 bytes."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        parts = [file.read()]
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return hashlib.sha256("".join(parts).encode()).hexdigest().encode()


def who(name: str, ranks: Sequence[int], rank: int) -> str:
    """What an error says of a rank of a group that is not the whole job."""
    return f" (rank {rank} of group {name} is rank {ranks[rank]} of the job)" if ranks else ""


def options_of(kind: Any, given: Any, named: dict[str, Any]) -> Any:
    """What a method got for its options: these, or a reduction, or nothing, and a timeout."""
    if isinstance(given, kind):
        return given
    options = kind()
    op = named.get("op", given)
    if op is not None:
        options.reduceOp = op
    if named.get("timeout") is not None:
        options.timeout = named["timeout"]
    return named.get("opts", options)


def plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor with memory of its own that a call is about; None: tracing, or a kind that we do not know."""
    if type(tensor) is torch.Tensor or not _is_wrapper(tensor):
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    waited: Any = tensor
    return waited.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else None


class Collectives:
    """The methods of a process group that are taken; `_inner` is a group that does the rest.

    `_start` comes first.
    """

    _inner: dist.ProcessGroup

    def _start(self, inner: dist.ProcessGroup, store: Any, name: str, ranks: Sequence[int], timeout: timedelta) -> None:
        """Collective: `store` is this group's alone. `ranks`: in the whole job; none: they are the same."""
        self._inner, self._name, self._ranks = inner, name, ranks
        self._me, self._world = inner.rank(), inner.size()
        self._timeout_s = min(timeout.total_seconds(), LONGEST_S)
        # A store may outlive its groups, and their names come again, for other ranks too.
        place = f"{name}/{'.'.join(map(str, ranks))}"
        life = store.add(f"onehop/{place}/{self._me}", 1) if self._world > 1 else 0
        self._meeting = _through_store(store, f"{place}/{life}", self._me, self._world, timeout, {})
        self._engines: dict[torch.device, Engine | None] = {}
        self._whole = self._world > 0 and self._world & (self._world - 1) == 0  # a quotient by it is exact
        self._refusal = self._why_not()
        if self._refusal and self._world > 1 and self._me == 0:
            log.warning("group %s: all by PyTorch's own backends: %s", name, self._refusal)

    def _why_not(self) -> str:
        if not 2 <= self._world <= _onehop.MAX_RANKS:
            return f"expected 2 to {_onehop.MAX_RANKS} ranks, found {self._world}"
        everyone = self._meeting(machine())
        hosts = {everyone[at : at + 64] for at in range(0, len(everyone), 64)}
        return "" if len(hosts) == 1 else f"its ranks are on {len(hosts)} machines"

    # ---- engines ------------------------------------------------------------------------------------------------

    def _engine(self, device: torch.device) -> Engine | None:
        try:
            return self._engines[device]
        except KeyError:
            found = self._engines[device] = self._make(device)
            return found

    def _make(self, device: torch.device) -> Engine | None:
        """Collective: the first call on a device."""
        if self._refusal or device.type not in ("cpu", "cuda"):
            return None
        share = False
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"group {self._name}: expected a first collective on {device} before the capture of a graph"
                )
            gpu = str(torch.cuda.get_device_properties(device).uuid).encode()[:64].ljust(64)
            everyone = self._meeting(gpu)
            share = len({everyone[at : at + 64] for at in range(0, len(everyone), 64)}) < self._world
        meeting = Rendezvous(self._me, self._world, allgather=self._meeting)
        limit = self._timeout_s
        try:
            ar = AllReduce(meeting, device, share_gpu=share, timeout=limit, init_timeout=limit)
            return Engine(ar, functools.partial(who, self._name, self._ranks))
        except SetupError as error:  # the same on all ranks
            if self._me == 0:
                log.warning("group %s: on %s all by PyTorch's own backends: %s", self._name, device.type, error)
            return None

    def _close(self) -> None:
        for engine in self._engines.values():
            if engine is not None:
                engine.ar.close()

    def _abort(self) -> None:
        for engine in self._engines.values():
            if engine is not None:
                engine.ar.abort()

    # ---- what is taken ------------------------------------------------------------------------------------------

    def _divisor(self, op: Any, dtype: torch.dtype) -> int:
        """By what the sum is divided; 0: not ours. An average of float16 must not overflow on its way."""
        if dtype not in DTYPES:
            return 0
        if op == _SUM:
            return 1
        return self._world if op == _AVG and self._whole and dtype is not torch.float16 else 0

    def _taken(self, tensors: Sequence[torch.Tensor]) -> tuple[Engine | None, list[torch.Tensor]]:
        """The engine of tensors of one device and data type, and these as they lie in memory."""
        found = [one for one in (plain(tensor) for tensor in tensors) if one is not None]
        if not found or len(found) < len(tensors):
            return None, found
        first = found[0]
        for one in found:
            if one.device != first.device or one.dtype != first.dtype or one.layout is not torch.strided:
                return None, found
        return self._engine(first.device), found

    def allreduce(self, tensors: Any, opts: Any = None, **named: Any) -> Any:
        given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        return self._reduce(given, options_of(c10d.AllreduceOptions, opts, named), "allreduce", len(given) == 1)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None, **named: Any) -> Any:
        options = options_of(c10d.AllreduceCoalescedOptions, opts, named)
        return self._reduce(tensors, options, "allreduce_coalesced", True)

    def _reduce(self, tensors: Any, opts: Any, method: str, fits: bool) -> Any:
        divisor = self._divisor(opts.reduceOp, tensors[0].dtype) if fits and tensors else 0
        engine, found = self._taken(tensors) if divisor else (None, [])
        if engine is None:
            return getattr(self._inner, method)(tensors, opts)
        reduce = engine.reduce

        def call() -> None:
            for tensor in found:
                reduce(tensor, divisor)

        return engine.run(call, tensors, found, not opts.asyncOp)

    def _gather(self, outs: Any, tensors: Any, opts: Any, method: str, *arguments: Any) -> Any:
        engine, found = self._taken([*outs, *tensors])
        pairs = list(zip(found[: len(outs)], found[len(outs) :], strict=False))
        if (
            engine is None
            or len(outs) != len(tensors)
            or any(out.numel() != self._world * tensor.numel() for out, tensor in pairs)
        ):
            return getattr(self._inner, method)(*arguments, opts)

        def call() -> None:
            for out, tensor in pairs:
                engine.gather(out, tensor)

        return engine.run(call, outs, found, not opts.asyncOp)

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None, **named: Any) -> Any:
        options = options_of(c10d.AllgatherOptions, opts, named)
        return self._gather([output], [tensor], options, _GATHER, output, tensor)

    def all_gather_single_coalesced(self, outputs: Any, tensors: Any, opts: Any = None, **named: Any) -> Any:
        options = options_of(c10d.AllgatherOptions, opts, named)
        return self._gather(outputs, tensors, options, _GATHER_MANY, outputs, tensors)

    def allgather(self, outputs: Any, tensors: Any, opts: Any = None, **named: Any) -> Any:
        if isinstance(tensors, torch.Tensor):
            outputs, tensors = [outputs], [tensors]
        options = options_of(c10d.AllgatherOptions, opts, named)
        parts = outputs[0] if len(outputs) == len(tensors) == 1 else []
        engine, found = self._taken([*parts, tensors[0]]) if len(parts) == self._world else (None, [])
        if engine is None or any(part.numel() != found[-1].numel() for part in found):
            return self._inner.allgather(outputs, tensors, options)
        *outs, given = found
        return engine.run(lambda: engine.gather_list(outs, given), parts, found, not options.asyncOp)

    def _scatter(self, outs: Any, tensors: Any, opts: Any, method: str, *arguments: Any) -> Any:
        divisor = self._divisor(opts.reduceOp, outs[0].dtype) if outs else 0
        engine, found = self._taken([*outs, *tensors]) if divisor else (None, [])
        pairs = list(zip(found[: len(outs)], found[len(outs) :], strict=False))
        if (
            engine is None
            or len(outs) != len(tensors)
            or any(tensor.numel() != self._world * out.numel() for out, tensor in pairs)
        ):
            return getattr(self._inner, method)(*arguments, opts)

        def call() -> None:
            for out, tensor in pairs:
                engine.scatter(out, tensor, divisor)

        return engine.run(call, outs, found, not opts.asyncOp)

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None, **named: Any) -> Any:
        options = options_of(c10d.ReduceScatterOptions, opts, named)
        return self._scatter([output], [tensor], options, _SCATTER, output, tensor)

    def reduce_scatter_single_coalesced(self, outputs: Any, tensors: Any, opts: Any = None, **named: Any) -> Any:
        options = options_of(c10d.ReduceScatterOptions, opts, named)
        return self._scatter(outputs, tensors, options, _SCATTER_MANY, outputs, tensors)

    def reduce_scatter(self, outputs: Any, tensors: Any, opts: Any = None, **named: Any) -> Any:
        if isinstance(outputs, torch.Tensor):
            outputs, tensors = [outputs], [tensors]
        options = options_of(c10d.ReduceScatterOptions, opts, named)
        parts = tensors[0] if len(outputs) == len(tensors) == 1 else []
        divisor = self._divisor(options.reduceOp, outputs[0].dtype) if len(parts) == self._world else 0
        engine, found = self._taken([*parts, outputs[0]]) if divisor else (None, [])
        if engine is None or any(part.numel() != found[-1].numel() for part in found):
            return self._inner.reduce_scatter(outputs, tensors, options)
        *given, out = found
        return engine.run(lambda: engine.scatter_list(out, given, divisor), outputs, found, not options.asyncOp)

    # Earlier names.
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None, **named: Any) -> Any:
        """A barrier with a deadline of its own is not ours."""
        options = options_of(c10d.BarrierOptions, opts, named)
        device = getattr(options, "device", None)
        if device is None:
            device = torch.device("cuda", options.device_ids[0]) if options.device_ids else torch.device("cpu")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        ours = options.timeout == c10d.BarrierOptions().timeout
        engine = self._engine(device) if ours else None
        if engine is None:
            return self._inner.barrier(options)
        engine.run(engine.meet, [], [], True)
        return done([]) if getattr(options, "asyncOp", True) else None
