"""What AllReduce does beside plain all-reduces: reduce-scatter, all-gather, fused norms, and a caller's expression."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from onehop import _onehop
from onehop._custom_op import CustomOp
from onehop._errors import ArgumentError
from onehop._tensors import TensorCalls, dtype_of, way_of, written
from onehop._types import Algorithm, AlgorithmName, DType, Result, Source, SourceName


class Normed(NamedTuple):
    """What all_reduce_norm returns."""

    normed: torch.Tensor
    """Shape and type of `x`."""
    residual: torch.Tensor
    """Sum and residual, not normed: the next residual; shape and type of `x`."""
    quantised: torch.Tensor | None
    """float8_e4m3fn of the shape of `x`; None if not asked for."""
    scales: torch.Tensor | None
    """float32 [..., 1], with quantise="row" only."""


def check_quantise(quantise: float | str | None) -> None:
    """Raises unless it is None, "row" or a scale."""
    if isinstance(quantise, str) and quantise != "row":
        raise ArgumentError(f"quantise: expected None, a scale or 'row', found {quantise!r}")
    if isinstance(quantise, (int, float)) and not 0 < quantise < math.inf:
        raise ArgumentError(f"quantise: expected a positive scale, found {quantise}")


def _stride(rows: torch.Tensor) -> int:
    """From row to row of a matrix in elements; 0, which stands for the width, if there is no next row."""
    return rows.stride(0) if rows.shape[0] > 1 else 0


def _lies_in_rows(rows: torch.Tensor) -> bool:
    width = rows.shape[1]
    return not rows.is_neg() and (width == 1 or rows.stride(1) == 1) and (len(rows) <= 1 or rows.stride(0) >= width)


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, last dimension] with inner stride 1; a copy only where it must be."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if _lies_in_rows(rows) else rows.contiguous().resolve_neg()


class FusedCalls(TensorCalls):
    """Calls of a context beside its all-reduces. Every rank makes the same ones in the same order."""

    context: _onehop.Context
    rank: int
    world_size: int

    def _write(
        self,
        out: torch.Tensor | None,
        dtype: torch.dtype,
        shape: Sequence[int],
        call: Callable[[torch.Tensor], None],
    ) -> torch.Tensor:
        """`call` writes a contiguous tensor: `out`, if it lies so."""
        if out is not None:
            self._check_out(out, dtype, shape)
            if out.is_contiguous() and not out.is_neg() and not out.is_conj():
                call(out)
                written(out)
                return out
        got = torch.empty(shape, dtype=dtype, device=self.device)
        if out is not None:
            self._check_queued(got, out, "out")
        call(got)
        return got if out is None else out.copy_(got)

    def reduce_scatter(self, tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The own part of the sum over all ranks: [W * n, ...] -> [n, ...], cut along the first dimension.

            out = all_reduce(tensor)[rank * n : (rank + 1) * n], bit for bit

        `tensor` is float32, float16 or bfloat16 on this rank's device, its shape equal on all ranks; what is not
        contiguous is copied. `out`: a new tensor, or one of that shape and type, disjoint from `tensor` or its own
        part of it. Streams and errors as `all_reduce`.
        """
        code = self._check(tensor, "tensor")
        if tensor.dim() == 0 or tensor.shape[0] % self.world_size:
            raise ArgumentError(
                f"tensor: expected a first dimension that {self.world_size} ranks divide, found shape "
                f"{tuple(tensor.shape)}"
            )
        given = tensor.contiguous().resolve_neg()
        self._check_queued(given, tensor, "tensor")
        shape = (tensor.shape[0] // self.world_size, *tensor.shape[1:])

        def call(got: torch.Tensor) -> None:
            place = given.data_ptr(), got.data_ptr(), got.numel(), code, self._stream(self._index)
            self.context.reduce_scatter(*place)

        return self._write(out, tensor.dtype, shape, call)

    def all_gather(self, tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """The tensors of all ranks, one behind the other: [n, ...] -> [W * n, ...] along the first dimension.

            out[r * n : (r + 1) * n] = tensor of rank r, bit for bit

        `tensor` is of any data type, its size in bytes equal on all ranks; what is not contiguous is copied. `out`: a
        new tensor, or one of that shape and type; `tensor` is disjoint from it or this rank's own part of it. Streams
        and errors as `all_reduce`.
        """
        self._check_place(tensor, "tensor")
        if tensor.dim() == 0:
            raise ArgumentError("tensor: expected one dimension or more, found shape ()")
        given = tensor.contiguous().resolve_conj().resolve_neg()
        self._check_queued(given, tensor, "tensor")
        shape = (tensor.shape[0] * self.world_size, *tensor.shape[1:])

        def call(got: torch.Tensor) -> None:
            size = given.numel() * given.element_size()
            self.context.all_gather(given.data_ptr(), got.data_ptr(), size, self._stream(self._index))

        return self._write(out, tensor.dtype, shape, call)

    def all_reduce_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        eps: float = 1e-6,
        weight_plus_one: bool = False,
        quantise: float | str | None = None,
    ) -> Normed:
        """All-reduce, residual add and RMSNorm of rows [..., hidden], in one launch.

            r = round(sum over ranks of x + residual)                          -> residual
            y = r / sqrt(mean(r^2) + eps) * w,  w = weight or weight + 1       -> normed, rounded
            e4m3(y / scale), above 448 to 448                                  -> quantised

        `x` and `residual` (equal on all ranks) are [..., hidden], `weight` is [hidden], all of one type: float32,
        float16 or bfloat16. hidden is 1 to 16384, of float32 to 8192. `quantise`: None; a scale, for all; or "row": a
        scale for each row, max|y| / 448. The sum is rounded once, with the residual: the result may differ from that
        of `all_reduce` followed by an addition in the last bit. All ranks get the same bits.

        Raises ArgumentError for what this cannot serve, a group of one rank included; else as `all_reduce`.
        """
        code = self._check(x, "x")
        check_quantise(quantise)
        if x.dim() == 0 or not x.shape[-1]:
            raise ArgumentError(f"x: expected rows [..., hidden], found shape {tuple(x.shape)}")
        hidden = x.shape[-1]
        self._check_is(weight, "weight", x.dtype, (hidden,))
        if residual is not None:
            self._check_is(residual, "residual", x.dtype, x.shape)
        given, factors = _as_rows(x), weight.contiguous().resolve_neg()
        before = None if residual is None else _as_rows(residual)
        for used, tensor, what in (given, x, "x"), (factors, weight, "weight"), (before, residual, "residual"):
            if used is not None and tensor is not None:
                self._check_queued(used, tensor, what)
        normed, after = (torch.empty(x.shape, dtype=x.dtype, device=self.device) for _ in range(2))
        quantised = scales = None
        if quantise is not None:
            quantised = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=self.device)
        if quantise == "row":
            scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=self.device)
        self.context.all_reduce_norm(
            given.data_ptr(),
            0 if before is None else before.data_ptr(),
            factors.data_ptr(),
            normed.data_ptr(),
            after.data_ptr(),
            0 if quantised is None else quantised.data_ptr(),
            0 if scales is None else scales.data_ptr(),
            len(given),
            hidden,
            _stride(given),
            0 if before is None else _stride(before),
            code,
            weight_plus_one * _onehop.NORM_WEIGHT_PLUS_ONE,
            eps,
            quantise if isinstance(quantise, (int, float)) else 0.0,
            self._stream(self._index),
        )
        return Normed(normed, after, quantised, scales)

    def _rows_in_place(self, tensor: torch.Tensor, what: str, dtype: torch.dtype, tokens: int) -> torch.Tensor:
        self._check_place(tensor, what)
        if tensor.dim() < 2:
            raise ArgumentError(f"{what}: expected shape (tokens, width), found {tuple(tensor.shape)}")
        self._check_is(tensor, what, dtype, (tokens, *tensor.shape[1:]))
        try:
            rows = tensor.view(tokens, math.prod(tensor.shape[1:]))
        except RuntimeError:
            rows = None
        if rows is None or not _lies_in_rows(rows):
            raise ArgumentError(
                f"{what}: expected each token's elements one behind the other, found strides {tuple(tensor.stride())} "
                f"for shape {tuple(tensor.shape)}"
            )
        return rows

    def qknorm_(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        *,
        eps: float = 1e-6,
        weight_plus_one: bool = False,
    ) -> None:
        """RMSNorm over all ranks' columns, of q and of k, in place.

            q = round(q / sqrt(sum over all ranks of q^2 / (W * width) + eps) * w),  w = q_weight or q_weight + 1

        and k likewise. `q` and `k` are this rank's columns, [tokens, width] or [tokens, heads, head_dim], each with a
        width of its own; rows may lie apart, as in a view of a joint projection. `q_weight` and `k_weight` are this
        rank's slices, of `width` elements. All are of one type. Both widths together take 32 KiB at most.

        Raises ArgumentError for what this cannot serve, a group of one rank included; else as `all_reduce`.
        """
        code = self._check(q, "q")
        tokens = len(q) if q.dim() else 0
        rows = [self._rows_in_place(one, what, q.dtype, tokens) for one, what in ((q, "q"), (k, "k"))]
        for weight, what, matrix in (q_weight, "q_weight", rows[0]), (k_weight, "k_weight", rows[1]):
            self._check_is(weight, what, q.dtype, (matrix.shape[1],))
        factors = [weight.contiguous().resolve_neg() for weight in (q_weight, k_weight)]
        self._check_queued(factors[0], q_weight, "q_weight")
        self._check_queued(factors[1], k_weight, "k_weight")
        self.context.tp_qknorm(
            rows[0].data_ptr(),
            rows[1].data_ptr(),
            factors[0].data_ptr(),
            factors[1].data_ptr(),
            tokens,
            rows[0].shape[1],
            rows[1].shape[1],
            _stride(rows[0]),
            _stride(rows[1]),
            code,
            weight_plus_one * _onehop.NORM_WEIGHT_PLUS_ONE,
            eps,
            self._stream(self._index),
        )
        written(q)
        written(k)

    def qknorm_max_blocks(self, q_width: int, k_width: int, dtype: torch.dtype | DType) -> int:
        """What max_blocks `qknorm_` of such widths could use on this rank's device."""
        return self.context.tp_qknorm_max_blocks(q_width, k_width, dtype_of(dtype))

    def prepare(self, *dtypes: torch.dtype | DType, always: bool = False) -> None:
        """Collective: compiles kernels for this GPU, or loads them from the cache; see onehop_prepare.

        `dtypes`: of the calls to come; none stands for all. `always`: also where the kernels that are loaded were
        compiled for exactly this GPU. On the CPU there is nothing to do.
        """
        bits = sum(1 << code for code in {dtype_of(dtype) for dtype in dtypes})
        self.context.prepare(bits, always * _onehop.PREPARE_ALWAYS)

    # ---- expressions --------------------------------------------------------------------------------------------

    def create_op(
        self,
        expression: str,
        dtype: torch.dtype,
        *,
        row_length: int = 0,
        scalars: Sequence[str] = (),
        arrays: Mapping[str, torch.dtype] | None = None,
    ) -> CustomOp:
        """Collective: compiles an expression into the all-reduce, for `all_reduce_op`.

            out[i] = round(expression),  x = sum over all ranks, in fp32

        `expression` is CUDA C of type float, to 4096 characters, over several lines if wanted: "x * scale + bias[col]".
        It knows `x`; `i`, the element's index in the tensor; `row` and `col`, i // row_length and i % row_length
        (`row_length` 0: the tensor is one row); the `scalars`, numbers; the `arrays` with their types, float32 or
        `dtype`, elements of which read as float; and the device functions of CUDA. Constants want their f: 0.5f. At
        most 8 names of either kind. It is code and runs as such: take it only from whom you trust.

        `dtype`, of the tensors, is float32, float16 or bfloat16. All ranks give the same. Blocks: seconds for what is
        not in the cache of compiled kernels.

        Raises ArgumentError for what is no such expression, with the compiler's message, where "expression(2)" is its
        second line; SetupError with code UNSUPPORTED on the CPU and in a group of one rank, which have no compiler, and
        where NVRTC is not there; SetupError with code DISAGREEMENT if ranks differ.
        """
        if row_length < 0:
            raise ArgumentError(f"row_length: expected 0 or more, found {row_length}")
        names, types = tuple(scalars), dict(arrays or {})
        code, codes = dtype_of(dtype), tuple(dtype_of(one) for one in types.values())
        compiled = self.context.op_create(expression, code, row_length, names, tuple(types), codes)
        return CustomOp(self, compiled, expression, dtype, row_length, names, types)

    def all_reduce_op(
        self,
        tensor: torch.Tensor,
        op: CustomOp,
        values: Mapping[str, float | torch.Tensor] | None = None,
        *,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | AlgorithmName | None = None,
        source: Source | SourceName | None = None,
        blocks: int = 0,
        threads: int = 0,
    ) -> torch.Tensor:
        """The sum over all ranks with the expression of `op`, which `create_op` of this object made, applied.

            out[i] = round(expression),  x = sum over all ranks of tensor[i], in fp32

        `tensor` is of the type of `op`. `values` has what its names stand for: numbers, rounded to float32 and equal on
        all ranks, and tensors on this rank's device, of their types, with equal content on all ranks, since each rank
        may compute a part for all. Indices into them are not checked; what is not contiguous is copied, and `out` may
        not overlap them. In a graph numbers and addresses are those of the capture. All ranks get the same bits.

        Else as `all_reduce`; NCCL and multicast do not apply expressions.
        """
        return self._all_reduce_op(tensor, op, *op.sort(values), out, (algorithm, source, blocks, threads))

    def _all_reduce_op(
        self,
        tensor: torch.Tensor,
        op: CustomOp,
        scalars: Sequence[float],
        arrays: Sequence[torch.Tensor],
        out: torch.Tensor | None = None,
        way: tuple[Any, Any, int, int] = (None, None, 0, 0),
    ) -> torch.Tensor:
        if op.ar is not self:
            raise ArgumentError("op: expected one that create_op of this object made")
        self._check(tensor, "tensor")
        if tensor.dtype != op.dtype:
            raise ArgumentError(f"tensor: expected {op.dtype}, that of the op, found {tensor.dtype}", Result.DTYPE)
        kept = []
        for (name, dtype), array in zip(op.arrays.items(), arrays, strict=True):
            self._check_is(array, name, dtype, array.shape)
            kept.append(array.contiguous().resolve_neg())
            self._check_queued(kept[-1], array, name)
        addresses = tuple(array.data_ptr() for array in kept)

        def call(given: torch.Tensor, got: torch.Tensor) -> None:
            place = given.data_ptr(), got.data_ptr(), given.numel(), tuple(scalars), addresses
            self.context.all_reduce_op(op.compiled, *place, *way_of(way), self._stream(self._index))

        return self._sum(tensor, out, call)
