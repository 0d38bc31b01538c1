"""onehop: the fastest all-reduce between the processors of one machine.

`AllReduce` is the easy way, for tensors of PyTorch. Without PyTorch, `Context` works on addresses.
"""

from typing import TYPE_CHECKING, Any

from onehop._errors import ArgumentError, CommunicatorDead, Error, InternalError, SetupError
from onehop._onehop import Communicator, Context, HostGraph, HostStream
from onehop._onehop import version as _version
from onehop._types import (
    Algorithm,
    CapturedInput,
    Choice,
    Collective,
    DeviceKind,
    DType,
    Failure,
    Layout,
    Mode,
    Result,
    Source,
    Stats,
)

if TYPE_CHECKING:
    from onehop import distributed, ops, symmetric
    from onehop._all_reduce import AllReduce
    from onehop._custom_op import CustomOp
    from onehop._fused import Normed
    from onehop._group import Rendezvous

__all__ = [
    "Algorithm",
    "AllReduce",
    "ArgumentError",
    "CapturedInput",
    "Choice",
    "Collective",
    "Communicator",
    "CommunicatorDead",
    "Context",
    "CustomOp",
    "DType",
    "DeviceKind",
    "Error",
    "Failure",
    "HostGraph",
    "HostStream",
    "InternalError",
    "Layout",
    "Mode",
    "Normed",
    "Rendezvous",
    "Result",
    "SetupError",
    "Source",
    "Stats",
    "__version__",
    "distributed",
    "ops",
    "symmetric",
]

__version__ = f"{_version() // 10000}.{_version() // 100 % 100}.{_version() % 100}"

# What needs PyTorch is imported when it is asked for.
_TORCH = {
    "AllReduce": "onehop._all_reduce",
    "CustomOp": "onehop._custom_op",
    "Normed": "onehop._fused",
    "Rendezvous": "onehop._group",
    "distributed": "",
    "ops": "",
    "symmetric": "",
}

if not TYPE_CHECKING:  # for a checker of types any other name is a typo

    def __getattr__(name: str) -> Any:
        if name not in _TORCH:
            raise AttributeError(f"module 'onehop' has no attribute '{name}'")
        import importlib

        module = importlib.import_module(_TORCH[name] or f"onehop.{name}")
        value = getattr(module, name) if _TORCH[name] else module
        globals()[name] = value
        return value
