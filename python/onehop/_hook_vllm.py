"""onehop in vLLM: its class stands where CudaCommunicator looks for the engine's own, and beside the CPU kernels."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from typing import Any

from onehop import _fit

log = logging.getLogger("vllm.onehop")  # a child of the engine's, which has the handlers

COMMUNICATORS = "vllm.distributed.device_communicators"
CLASS = "CustomAllreduce"
USERS = (f"{COMMUNICATORS}.cuda_communicator", "vllm.distributed.parallel_state")
CPU_CALLS = {"all_reduce", "all_gather_into_tensor"}


def misfits() -> list[str]:
    """What vLLM asks of the class that ours has not."""
    from onehop.vllm import CustomAllreduce

    sources = [_fit.source_of(module) for module in USERS]
    wrong = []
    if not _fit.imports_when_called(sources[0], CLASS):
        wrong.append(f"{USERS[0]} does not import {CLASS} when it makes one")
    theirs = _fit.parameters(_fit.source_of(f"{COMMUNICATORS}.custom_all_reduce"), "__init__", CLASS)
    if theirs is None:
        wrong.append(f"there is no {CLASS}")
    ours = _fit.signature(CustomAllreduce)
    for source in sources:
        wrong += _fit.misfits(CustomAllreduce, ours, theirs, _fit.uses(source, "ca_comm", [CLASS]))
    return list(dict.fromkeys(wrong))


def cpu_misfits() -> list[str]:
    """What vLLM's communicator for CPUs has not that ours needs."""
    source = _fit.source_of(f"{COMMUNICATORS}.cpu_communicator")
    made = _fit.parameters(source, "__init__", "CpuCommunicator")
    wrong = [] if made else ["there is no CpuCommunicator"]
    missing = CPU_CALLS - _fit.uses(source, "dist_module").attributes
    return wrong + [f"CpuCommunicator does not call dist_module.{name}" for name in sorted(missing)]


def rivals() -> list[str]:
    """Who is asked before the custom all-reduce, and the switch that changes it."""
    from vllm import envs

    found = []
    invariant = getattr(envs, "VLLM_BATCH_INVARIANT", False)
    if not invariant and importlib.util.find_spec("flashinfer") is not None:
        if getattr(envs, "VLLM_ALLREDUCE_USE_FLASHINFER", False):
            found.append("FlashInfer's all-reduce (VLLM_ALLREDUCE_USE_FLASHINFER=0 turns it off)")
        if getattr(envs, "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC", False):
            found.append("FlashInfer's PCIe all-reduce (VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC=0 turns it off)")
    if not invariant and getattr(envs, "VLLM_USE_NCCL_SYMM_MEM", False):
        found.append("NCCL's symmetric memory (VLLM_USE_NCCL_SYMM_MEM=0 turns it off)")
    ask = getattr(importlib.import_module("vllm.config"), "get_current_vllm_config_or_none", None)
    passes = getattr(getattr(ask() if ask else None, "compilation_config", None), "pass_config", None)
    if getattr(passes, "fuse_allreduce_rms", False):
        found.append(
            "the fusion fuse_allreduce_rms (--compilation-config "
            '\'{"pass_config": {"fuse_allreduce_rms": false}}\' turns it off)'
        )
    return found


def tell(ours: Any) -> None:
    """At start, from one rank: that it is in use, and what it will not see."""
    if ours.rank == 0:
        log.info("onehop is vLLM's custom all-reduce: %d ranks, on %s", ours.world_size, ours.device)
        try:
            for one in rivals():
                log.info("onehop: before it is asked %s", one)
        except Exception as error:
            log.info("onehop: who is asked before it is not known: %s", error)


def class_over(theirs: Any) -> Any:
    """Makes onehop's object, or one of `theirs` where onehop cannot serve the group."""
    from onehop.vllm import CustomAllreduce

    class Chosen(CustomAllreduce):
        def __new__(cls, *arguments: Any, **named: Any) -> Any:
            ours = super().__new__(cls)
            try:
                CustomAllreduce.__init__(ours, *arguments, **named)
            except Exception as error:
                ours.disabled = True
                log.warning("onehop is not used in this group: %s", error)
            if ours.disabled:  # on all ranks alike
                return theirs(*arguments, **named)
            tell(ours)
            return ours

        def __init__(self, *arguments: Any, **named: Any) -> None:
            """All is done."""

    Chosen.__name__ = Chosen.__qualname__ = CLASS
    return Chosen


def install_gpu() -> list[str]:
    """In place of the class of the same name."""
    wrong = misfits()
    if wrong:
        return wrong
    module = importlib.import_module(f"{COMMUNICATORS}.custom_all_reduce")
    theirs = getattr(module, CLASS)
    if not hasattr(theirs, "_onehop"):
        chosen = class_over(theirs)
        chosen._onehop = theirs
        setattr(module, CLASS, chosen)
    return []


def install_cpu() -> list[str]:
    """Behind the constructor of the communicator for CPUs."""
    wrong = cpu_misfits()
    if wrong:
        return wrong
    module: Any = importlib.import_module(f"{COMMUNICATORS}.cpu_communicator")
    begin = module.CpuCommunicator.__init__
    if hasattr(begin, "_onehop"):
        return []

    @functools.wraps(begin)
    def begin_with_ours(self: Any, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        name = str(getattr(self, "unique_name", ""))
        if name.split(":")[0] == "tp":
            from onehop._cpu_engine import Beside, made

            ar = made(self.device_group, name, log)
            if ar is not None:
                self.dist_module = Beside(self.dist_module, ar, self.device_group)

    begin_with_ours._onehop = begin  # type: ignore[attr-defined]
    module.CpuCommunicator.__init__ = begin_with_ours
    return []


def install() -> list[str]:
    """What does not fit; nothing is done then."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        return install_gpu()
    if current_platform.is_cpu():
        return install_cpu()
    return ["it runs neither on GPUs of NVIDIA nor on CPUs"]
