"""All-reduces of tensors: what AllReduce and symmetric.SymmetricAllReduce have in common.

The common call is a few attribute reads and one call of the extension; whatever is unusual about a tensor is left to
`_unusual`, which does it right or says what is wrong.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onehop import _onehop
from onehop._errors import ArgumentError
from onehop._types import Algorithm, AlgorithmName, DeviceKind, DType, Result, Source, SourceName

DTYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}

_Tensor = torch.Tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_empty_like = torch.empty_like
_dtype_code = DTYPES.get
_is_grad_enabled = torch.is_grad_enabled
_NAMED: dict[type[enum.IntEnum], dict[str, enum.IntEnum]] = {
    Algorithm: {_onehop.algorithm_name(one): one for one in Algorithm},
    Source: {_onehop.source_name(one): one for one in Source},
}


def named(kind: type[enum.IntEnum], value: Any) -> int:
    """An Algorithm or Source given as itself, its name in the library ("1shot_push"), or None: 0."""
    if value is None:
        return 0
    found: Any = _NAMED[kind].get(value) if isinstance(value, str) else value
    if found not in kind.__members__.values():
        names = ", ".join(_NAMED[kind])
        raise ArgumentError(f"{kind.__name__.lower()}: expected one of {names}, found {value!r}", Result.ALGORITHM)
    return int(found)


def way_of(way: tuple[Any, Any, int, int]) -> tuple[int, int, int, int]:
    """Algorithm, source, blocks and threads, as the library wants them."""
    return named(Algorithm, way[0]), named(Source, way[1]), way[2], way[3]


def dtype_of(dtype: torch.dtype | DType) -> int:
    """The library's number of a data type."""
    code = dtype if isinstance(dtype, DType) else _dtype_code(dtype)
    if code is None:
        raise ArgumentError(f"dtype: expected float32, float16 or bfloat16, found {dtype}", Result.DTYPE)
    return int(code)


def device_of(device: Any) -> torch.device:
    """None is the current GPU, or the CPU where there is none."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found
    if found.type != "cpu":
        raise ArgumentError(f"device: expected a CUDA device or the CPU, found {found}", Result.NO_DEVICE)
    return torch.device("cpu")


def kind_of(device: torch.device) -> DeviceKind:
    """The library's name for it."""
    return DeviceKind.CUDA if device.type == "cuda" else DeviceKind.HOST


def _python_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """A subclass with a memory of its own idea: DTensor, FakeTensor and the like."""
    plain = torch._C._disabled_torch_dispatch_impl
    return getattr(type(tensor), "__torch_dispatch__", plain) is not plain


def refuse_grad(tensor: torch.Tensor) -> None:
    """Raises where autograd would want a gradient."""
    if tensor.requires_grad and _is_grad_enabled():
        raise ArgumentError(
            "expected a tensor that does not require grad, for there is no gradient; use torch.no_grad() or detach()"
        )


def written(tensor: torch.Tensor) -> None:
    """Tells autograd, which sees no write of ours."""
    if _is_grad_enabled() and not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


class TensorCalls:
    """All-reduces of tensors on `device`, a rank's. Every rank makes the same calls in the same order."""

    device: torch.device

    def _prepare(self, device: torch.device, calls: _onehop.Context | _onehop.Communicator) -> None:
        self.device = device
        self._index = device.index if device.type == "cuda" else -1
        self._calls = calls
        # Without it (PyTorch before 2.10) all tensors are unusual: right, and slower by a microsecond or two.
        self._call_tensors = calls.all_reduce_tensors
        calls.read_tensors(_Tensor)
        self._host_stream: _onehop.HostStream | None = None
        self._stream: Callable[[int], int] = (
            getattr(torch._C, "_cuda_getCurrentRawStream", _python_stream) if self._index >= 0 else self._host_handle
        )

    def _host_handle(self, _: int) -> int:
        return self._host_stream.handle if self._host_stream else 0

    @property
    def host_stream(self) -> _onehop.HostStream | None:
        """CPU only: where calls are queued; None, the default, runs each to its end.

        Memory of queued calls, outputs too, must be kept until they have run.
        """
        return self._host_stream

    @host_stream.setter
    def host_stream(self, stream: _onehop.HostStream | None) -> None:
        if self._index >= 0:
            raise ArgumentError(f"host_stream: expected the CPU, found {self.device}", Result.STREAM)
        self._host_stream = stream

    def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | AlgorithmName | None = None,
        source: Source | SourceName | None = None,
        blocks: int = 0,
        threads: int = 0,
        prefetch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The sum of `tensor` over all ranks, in a new contiguous tensor of its shape, or in `out`.

        `tensor` is float32, float16 or bfloat16, on this rank's device, of any shape and length; the number of
        elements and the type are equal on all ranks. It may be strided: that costs a copy. `out` has its shape, type
        and device, and is the tensor itself or disjoint. On a GPU the call runs on PyTorch's current stream and does
        not wait; a CPU call has ended when it returns. `algorithm`, `source`, `blocks` and `threads` overrule the
        tuning table; they are equal on all ranks. `prefetch` is a contiguous tensor on the same GPU, of any type, each
        rank's own affair: processors that the call leaves idle bring its first 8 MiB into the L2 meanwhile, so that a
        product with these weights that comes next begins warm; on a CPU it has no effect.

        Raises ArgumentError for what this cannot serve, and CommunicatorDead when a peer is lost, silent until the
        deadline, or made another call; on a GPU that comes from a later call or `synchronize`.
        """
        if (
            type(tensor) is _Tensor
            and algorithm is None
            and source is None
            and not blocks
            and not threads
            and prefetch is None
            and not tensor.requires_grad
            and not tensor.is_neg()
        ):
            if out is None:
                made = _empty_like(tensor)
                if self._call_tensors(tensor, made, self._stream(self._index)):
                    return made
            elif (
                type(out) is _Tensor
                and not _is_grad_enabled()
                and not out.is_neg()
                and self._call_tensors(tensor, out, self._stream(self._index))
            ):
                return out
        return self._unusual(tensor, out, (algorithm, source, blocks, threads), prefetch)

    def all_reduce_(
        self,
        tensor: torch.Tensor,
        *,
        algorithm: Algorithm | AlgorithmName | None = None,
        source: Source | SourceName | None = None,
        blocks: int = 0,
        threads: int = 0,
        prefetch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The sum over all ranks in place of `tensor`, which is returned. Else as `all_reduce`."""
        if (
            type(tensor) is _Tensor
            and algorithm is None
            and source is None
            and not blocks
            and not threads
            and prefetch is None
            and not _is_grad_enabled()
            and not tensor.is_neg()
            and self._call_tensors(tensor, tensor, self._stream(self._index))
        ):
            return tensor
        return self._unusual(tensor, tensor, (algorithm, source, blocks, threads), prefetch)

    # ---- whatever is unusual ------------------------------------------------------------------------------------

    def _check_place(self, tensor: Any, what: str) -> None:
        """Raises for what no copy makes good, whatever its data type."""
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{what}: expected a torch.Tensor, found {type(tensor).__name__}")
        if _is_wrapper(tensor):
            raise ArgumentError(
                f"{what}: expected a tensor with memory of its own, found {type(tensor).__name__}; give its local part"
            )
        if tensor.layout is not torch.strided:
            raise ArgumentError(f"{what}: expected a strided tensor, found layout {tensor.layout}")
        if tensor.device != self.device:
            raise ArgumentError(f"{what}: expected a tensor on {self.device}, found one on {tensor.device}")
        refuse_grad(tensor)

    def _check(self, tensor: Any, what: str) -> int:
        """The number of its data type; raises for what no copy makes good."""
        self._check_place(tensor, what)
        code = _dtype_code(tensor.dtype)
        if code is None:
            raise ArgumentError(f"{what}: expected float32, float16 or bfloat16, found {tensor.dtype}", Result.DTYPE)
        return code

    def _check_is(self, tensor: Any, what: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        self._check_place(tensor, what)
        if tensor.dtype != dtype or tensor.shape != torch.Size(shape):
            raise ArgumentError(
                f"{what}: expected {dtype} of shape {tuple(shape)}, found {tensor.dtype} of shape {tuple(tensor.shape)}"
            )

    def _check_out(self, out: Any, dtype: torch.dtype, shape: Sequence[int]) -> None:
        self._check_is(out, "out", dtype, shape)
        if _overlaps_itself(out):
            raise ArgumentError(
                f"out: expected elements with memory of their own, found strides {tuple(out.stride())} for shape "
                f"{tuple(out.shape)}",
                Result.OVERLAP,
            )

    def _check_queued(self, used: torch.Tensor, tensor: torch.Tensor, what: str) -> None:
        """A call queued on a host stream uses the caller's own tensors, for no copy of ours would last so long."""
        if self._host_stream is not None and used.data_ptr() != tensor.data_ptr():
            raise ArgumentError(
                f"{what}: expected a contiguous tensor, since calls are queued on host_stream; found strides "
                f"{tuple(tensor.stride())} for shape {tuple(tensor.shape)}",
                Result.STREAM,
            )

    def _ahead(self, prefetch: torch.Tensor | None) -> tuple[int, int]:
        """Address and bytes of what is to be prefetched."""
        if prefetch is None:
            return 0, 0
        self._check_place(prefetch.detach() if isinstance(prefetch, torch.Tensor) else prefetch, "prefetch")
        if not prefetch.is_contiguous():
            raise ArgumentError(f"prefetch: expected a contiguous tensor, found strides {tuple(prefetch.stride())}")
        return prefetch.data_ptr(), prefetch.numel() * prefetch.element_size()

    def _unusual(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor | None,
        way: tuple[Any, Any, int, int],
        prefetch: torch.Tensor | None,
    ) -> torch.Tensor:
        code = self._check(tensor, "tensor")
        ahead = self._ahead(prefetch)

        def call(given: torch.Tensor, got: torch.Tensor) -> None:
            place = (given.data_ptr(), got.data_ptr(), given.numel(), code, self._stream(self._index))
            chosen = way_of(way)
            if any(chosen) or ahead[1]:
                self._calls.all_reduce_with(*place, *chosen, *ahead)
            else:
                self._calls.all_reduce(*place)

        return self._sum(tensor, out, call)

    def _sum(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor | None,
        call: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> torch.Tensor:
        """`call` sums contiguous tensors: those that were given, if they lie so."""
        if out is not None:
            self._check_out(out, tensor.dtype, tensor.shape)
        with torch._C.DisableTorchFunctionSubclass():
            given = tensor.contiguous().resolve_neg()
            self._check_queued(given, tensor, "tensor")
            if out is None:
                got = torch.empty_like(given)
                call(given, got)
                kind = type(tensor)
                return got if kind in _PLAIN else got.as_subclass(kind)
            direct = out.is_contiguous() and not out.is_neg()
            got = out if direct else (given if given is not tensor else torch.empty_like(given))
            self._check_queued(got, out, "out")
            call(given, got)
            if not direct:
                out.copy_(got)
            else:
                written(out)
        return out
