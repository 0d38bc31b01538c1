"""onehop in SGLang: a hook on the function that picks the class of the custom all-reduce, and on CPU groups.

The engine's own class stays what it is: code that asks for it with isinstance finds that our object is none.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from onehop import _fit

log = logging.getLogger("onehop")

DISPATCH = "sglang.srt.distributed.device_communicators.custom_all_reduce"
STATE = "sglang.srt.distributed.parallel_state"
NAME = "dispatch_custom_allreduce"
CPU_CALLS = {"all_reduce": ["input_"], "all_gather": ["input_", "dim"]}


def misfits() -> list[str]:
    """What SGLang asks of the object that ours has not."""
    from onehop.sglang import CustomAllReduceV2

    wrong = []
    found = _fit.parameters(_fit.source_of(DISPATCH), NAME)
    if found is None or {*found.positional, *found.named} != {"group", "device"}:
        wrong.append(f"{NAME} is not a function of group and device")
    state = _fit.source_of(STATE)
    if not _fit.imports_when_called(state, NAME):
        wrong.append(f"{STATE} does not import {NAME} when it makes a group")
    use = _fit.uses(state, "ca_comm", [NAME])
    return wrong + _fit.misfits(CustomAllReduceV2, _fit.signature(CustomAllReduceV2), None, use)


def cpu_misfits() -> list[str]:
    """What groups have not that ours needs."""
    state = _fit.source_of(STATE)
    wrong = []
    for name, wanted in CPU_CALLS.items():
        found = _fit.parameters(state, name, "GroupCoordinator")
        if found is None or found.positional[: len(wanted)] != wanted:
            wrong.append(f"GroupCoordinator.{name} does not begin with {', '.join(wanted)}")
    return wrong


def rivals() -> list[str]:
    """Who is asked before the custom all-reduce, and the switch that changes it."""
    ask = getattr(importlib.import_module("sglang.srt.runtime_context"), "get_exec", None)
    comm = getattr(ask() if ask else None, "comm", None)
    found = []
    if getattr(comm, "flashinfer_allreduce_fusion_backend", None):
        found.append("FlashInfer's all-reduce (--enforce-disable-flashinfer-allreduce-fusion turns it off)")
    if getattr(comm, "enable_mscclpp", False):
        found.append("MSCCL++ (start without --enable-mscclpp)")
    return found


def tell(ours: Any) -> None:
    """At start, from one rank: that it is in use, and what it will not see."""
    if ours.rank == 0:
        log.info("onehop is SGLang's custom all-reduce: %d ranks, on %s", ours.world_size, ours.device)
        try:
            for one in rivals():
                log.info("onehop: before it is asked %s", one)
        except Exception as error:  # what is set may not be known yet
            log.info("onehop: who is asked before it is not known: %s", error)


def dispatch(original: Any, *arguments: Any, **named: Any) -> Any:
    """Around the engine's function: what makes onehop's object, or one of the engine's where onehop cannot serve."""

    def make(*given: Any, **by_name: Any) -> Any:
        from onehop.sglang import CustomAllReduceV2

        try:
            ours = CustomAllReduceV2(*given, **by_name)
            if not ours.disabled:  # on all ranks alike
                tell(ours)
                return ours
        except Exception as error:
            log.warning("onehop is not used in this group: %s", error)
        return original(*arguments, **named)(*given, **by_name)

    return make


# ---- CPUs ------------------------------------------------------------------------------------------------------------


def of(group: Any) -> Any:
    """The AllReduce of a group of SGLang's, or None; made by the first call, which is collective."""
    found = vars(group).get("_onehop", group)
    if found is group:
        from onehop._cpu_engine import made

        name = str(getattr(group, "unique_name", ""))
        found = group._onehop = made(group.device_group, name, log)
    return found


def ours(group: Any, tensor: Any) -> Any:
    """The AllReduce for a call with this tensor. A compiler sees the engine's own way."""
    import torch

    from onehop._cpu_engine import takes

    if torch.compiler.is_compiling() or not takes(tensor) or group.world_size < 2:
        return None
    return of(group)


def all_reduce(original: Any, group: Any, input_: Any, *arguments: Any, **named: Any) -> Any:
    """Around GroupCoordinator.all_reduce: in place, as there."""
    ar = ours(group, input_) if not (arguments or named) else None
    return original(group, input_, *arguments, **named) if ar is None else ar.all_reduce_(input_)


def all_gather(original: Any, group: Any, input_: Any, dim: int = -1, *arguments: Any, **named: Any) -> Any:
    """Around GroupCoordinator.all_gather, where it returns a tensor of its own."""
    from onehop._cpu_engine import gathered

    ar = ours(group, input_) if not (arguments or named) and input_.dim() else None
    return original(group, input_, dim, *arguments, **named) if ar is None else gathered(ar, input_, dim)


def install() -> list[str]:
    """What does not fit; nothing is done then."""
    import torch

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if torch.cuda.is_available():
        wrong = misfits()
        hooks: dict[str, Any] = {f"{DISPATCH}.{NAME}": dispatch}
    else:
        wrong = cpu_misfits()
        hooks = {f"{STATE}.GroupCoordinator.{one.__name__}": one for one in (all_reduce, all_gather)}
    if not wrong:
        for target, hook in hooks.items():
            HookRegistry.register(target, hook, HookType.AROUND)
    return wrong
