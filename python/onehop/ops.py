"""Calls of AllReduce as operators of PyTorch, which torch.compile keeps in its graphs.

They are `torch.ops.onehop.all_reduce` and so on, where the handle is `AllReduce.handle`; the functions here call them.
The dispatcher costs a few microseconds a call: in eager code, use the methods.
"""

from collections.abc import Mapping
from typing import Any

import torch

from onehop._all_reduce import AllReduce, members
from onehop._custom_op import CustomOp, custom_ops
from onehop._fused import Normed, check_quantise
from onehop._tensors import refuse_grad

_library: Any = torch.library.Library("onehop", "DEF")  # type: ignore[no-untyped-call]
_library.define("all_reduce(Tensor x, int handle) -> Tensor")
_library.define("all_reduce_(Tensor(a!) x, int handle) -> ()")
_library.define("reduce_scatter(Tensor x, int world_size, int handle) -> Tensor")
_library.define("all_gather(Tensor x, int world_size, int handle) -> Tensor")
_NORM = "Tensor x, Tensor weight, Tensor? residual, float eps, bool weight_plus_one"
_library.define(f"all_reduce_norm({_NORM}, int handle) -> (Tensor, Tensor)")
# With scale None one for each row; else the last result is empty.
_library.define(f"all_reduce_norm_quantised({_NORM}, float? scale, int handle) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    "qknorm_(Tensor(a!) q, Tensor(b!) k, Tensor q_weight, Tensor k_weight, float eps, bool weight_plus_one, int handle)"
    " -> ()"
)
# The op's number; its scalars and arrays in its order.
_library.define("all_reduce_op(Tensor x, int op, float[] scalars, Tensor[] arrays) -> Tensor")


def _all_reduce(x: torch.Tensor, handle: int) -> torch.Tensor:
    return members.find(handle).all_reduce(x)


def _all_reduce_(x: torch.Tensor, handle: int) -> None:
    members.find(handle).all_reduce_(x)


def _reduce_scatter(x: torch.Tensor, world_size: int, handle: int) -> torch.Tensor:  # noqa: ARG001
    return members.find(handle).reduce_scatter(x)


def _all_gather(x: torch.Tensor, world_size: int, handle: int) -> torch.Tensor:  # noqa: ARG001
    return members.find(handle).all_gather(x)


def _all_reduce_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float, plus_one: bool, handle: int
) -> tuple[torch.Tensor, torch.Tensor]:
    found = members.find(handle).all_reduce_norm(x, weight, residual=residual, eps=eps, weight_plus_one=plus_one)
    return found.normed, found.residual


def _all_reduce_norm_quantised(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    plus_one: bool,
    scale: float | None,
    handle: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    normed, after, quantised, scales = members.find(handle).all_reduce_norm(
        x, weight, residual=residual, eps=eps, weight_plus_one=plus_one, quantise="row" if scale is None else scale
    )
    assert quantised is not None
    return normed, after, quantised, x.new_empty(0, dtype=torch.float32) if scales is None else scales


def _qknorm_(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    plus_one: bool,
    handle: int,
) -> None:
    members.find(handle).qknorm_(q, k, q_weight, k_weight, eps=eps, weight_plus_one=plus_one)


def _all_reduce_op(x: torch.Tensor, op: int, scalars: list[float], arrays: list[torch.Tensor]) -> torch.Tensor:
    found = custom_ops.find(op)
    return found.ar._all_reduce_op(x, found, scalars, arrays)


for _key in "CPU", "CUDA":
    _library.impl("all_reduce", _all_reduce, _key)
    _library.impl("all_reduce_", _all_reduce_, _key)
    _library.impl("reduce_scatter", _reduce_scatter, _key)
    _library.impl("all_gather", _all_gather, _key)
    _library.impl("all_reduce_norm", _all_reduce_norm, _key)
    _library.impl("all_reduce_norm_quantised", _all_reduce_norm_quantised, _key)
    _library.impl("qknorm_", _qknorm_, _key)
    _library.impl("all_reduce_op", _all_reduce_op, _key)


def _fake(x: torch.Tensor, handle: int) -> torch.Tensor:  # noqa: ARG001
    refuse_grad(x)
    return x.new_empty(x.shape)


def _fake_(x: torch.Tensor, handle: int) -> None:  # noqa: ARG001
    refuse_grad(x)


def _fake_reduce_scatter(x: torch.Tensor, world_size: int, handle: int) -> torch.Tensor:  # noqa: ARG001
    refuse_grad(x)
    return x.new_empty((x.shape[0] // world_size, *x.shape[1:]))


def _fake_all_gather(x: torch.Tensor, world_size: int, handle: int) -> torch.Tensor:  # noqa: ARG001
    refuse_grad(x)
    return x.new_empty((x.shape[0] * world_size, *x.shape[1:]))


def _fake_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    for tensor in x, weight, residual:
        if tensor is not None:
            refuse_grad(tensor)
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _fake_norm_quantised(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    plus_one: bool,
    scale: float | None,
    handle: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    scales = (0,) if scale is not None else (*x.shape[:-1], 1)
    return (
        *_fake_norm(x, weight, residual, eps, plus_one, handle),
        x.new_empty(x.shape, dtype=torch.float8_e4m3fn),
        x.new_empty(scales, dtype=torch.float32),
    )


def _fake_qknorm_(q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, *_: Any) -> None:
    for tensor in q, k, q_weight, k_weight:
        refuse_grad(tensor)


def _fake_op(x: torch.Tensor, op: int, scalars: list[float], arrays: list[torch.Tensor]) -> torch.Tensor:  # noqa: ARG001
    for tensor in x, *arrays:
        refuse_grad(tensor)
    return x.new_empty(x.shape)


torch.library.register_fake("onehop::all_reduce", _fake, lib=_library)
torch.library.register_fake("onehop::all_reduce_", _fake_, lib=_library)
torch.library.register_fake("onehop::reduce_scatter", _fake_reduce_scatter, lib=_library)
torch.library.register_fake("onehop::all_gather", _fake_all_gather, lib=_library)
torch.library.register_fake("onehop::all_reduce_norm", _fake_norm, lib=_library)
torch.library.register_fake("onehop::all_reduce_norm_quantised", _fake_norm_quantised, lib=_library)
torch.library.register_fake("onehop::qknorm_", _fake_qknorm_, lib=_library)
torch.library.register_fake("onehop::all_reduce_op", _fake_op, lib=_library)


def all_reduce(x: torch.Tensor, ar: AllReduce | int) -> torch.Tensor:
    """`ar.all_reduce(x)` as an operator; `ar` may be its handle."""
    result: torch.Tensor = torch.ops.onehop.all_reduce.default(x, ar if isinstance(ar, int) else ar.handle)
    return result


def all_reduce_(x: torch.Tensor, ar: AllReduce | int) -> torch.Tensor:
    """`ar.all_reduce_(x)` as an operator; returns `x`."""
    torch.ops.onehop.all_reduce_.default(x, ar if isinstance(ar, int) else ar.handle)
    return x


def reduce_scatter(x: torch.Tensor, ar: AllReduce) -> torch.Tensor:
    """`ar.reduce_scatter(x)` as an operator."""
    result: torch.Tensor = torch.ops.onehop.reduce_scatter.default(x, ar.world_size, ar.handle)
    return result


def all_gather(x: torch.Tensor, ar: AllReduce) -> torch.Tensor:
    """`ar.all_gather(x)` as an operator."""
    result: torch.Tensor = torch.ops.onehop.all_gather.default(x, ar.world_size, ar.handle)
    return result


def all_reduce_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    ar: AllReduce,
    *,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_plus_one: bool = False,
    quantise: float | str | None = None,
) -> Normed:
    """`ar.all_reduce_norm(x, weight, ...)` as an operator."""
    check_quantise(quantise)
    given = x, weight, residual, eps, weight_plus_one
    if quantise is None:
        normed, after = torch.ops.onehop.all_reduce_norm.default(*given, ar.handle)
        return Normed(normed, after, None, None)
    scale = None if isinstance(quantise, str) else quantise
    normed, after, quantised, scales = torch.ops.onehop.all_reduce_norm_quantised.default(*given, scale, ar.handle)
    return Normed(normed, after, quantised, scales if scale is None else None)


def qknorm_(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    ar: AllReduce,
    *,
    eps: float = 1e-6,
    weight_plus_one: bool = False,
) -> None:
    """`ar.qknorm_(q, k, q_weight, k_weight, ...)` as an operator."""
    torch.ops.onehop.qknorm_.default(q, k, q_weight, k_weight, eps, weight_plus_one, ar.handle)


def all_reduce_op(
    x: torch.Tensor, op: CustomOp, values: Mapping[str, float | torch.Tensor] | None = None
) -> torch.Tensor:
    """`ar.all_reduce_op(x, op, values)` as an operator, with the `ar` that made `op`."""
    result: torch.Tensor = torch.ops.onehop.all_reduce_op.default(x, op.handle, *op.sort(values))
    return result
