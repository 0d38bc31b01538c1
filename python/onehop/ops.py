"""All-reduces as operators of PyTorch, which torch.compile keeps in its graphs.

`torch.ops.onehop.all_reduce(Tensor x, int handle) -> Tensor` and `all_reduce_(Tensor(a!) x, int handle) -> ()`, where
the handle is `AllReduce.handle`. The dispatcher costs a few microseconds a call: in eager code, use the methods.
"""

from typing import Any

import torch

from onehop._all_reduce import AllReduce, member
from onehop._tensors import refuse_grad

_library: Any = torch.library.Library("onehop", "DEF")  # type: ignore[no-untyped-call]
_library.define("all_reduce(Tensor x, int handle) -> Tensor")
_library.define("all_reduce_(Tensor(a!) x, int handle) -> ()")


def _all_reduce(x: torch.Tensor, handle: int) -> torch.Tensor:
    return member(handle).all_reduce(x)


def _all_reduce_(x: torch.Tensor, handle: int) -> None:
    member(handle).all_reduce_(x)


for _key in "CPU", "CUDA":
    _library.impl("all_reduce", _all_reduce, _key)
    _library.impl("all_reduce_", _all_reduce_, _key)


def _fake(x: torch.Tensor, handle: int) -> torch.Tensor:  # noqa: ARG001
    refuse_grad(x)
    return x.new_empty(x.shape)


def _fake_(x: torch.Tensor, handle: int) -> None:  # noqa: ARG001
    refuse_grad(x)


torch.library.register_fake("onehop::all_reduce", _fake, lib=_library)
torch.library.register_fake("onehop::all_reduce_", _fake_, lib=_library)


def all_reduce(x: torch.Tensor, ar: AllReduce | int) -> torch.Tensor:
    """`ar.all_reduce(x)` as an operator; `ar` may be its handle."""
    result: torch.Tensor = torch.ops.onehop.all_reduce.default(x, ar if isinstance(ar, int) else ar.handle)
    return result


def all_reduce_(x: torch.Tensor, ar: AllReduce | int) -> torch.Tensor:
    """`ar.all_reduce_(x)` as an operator; returns `x`."""
    torch.ops.onehop.all_reduce_.default(x, ar if isinstance(ar, int) else ar.handle)
    return x
