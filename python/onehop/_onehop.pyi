"""libonehop as it is: see include/onehop.h, which is the manual. Addresses and streams are ints."""

from collections.abc import Callable, Sequence

MAX_RANKS: int
DEVICE_AUTO: int
DEVICE_CUDA: int
DEVICE_HOST: int
MODE_EAGER: int
MODE_GRAPH: int
FLAG_EARLY_TRIGGER: int
FLAG_SHARE_GPU: int
FLAG_NCCL: int
FLAG_UNCAP: int
FLAG_ORDERED: int
NORM_WEIGHT_PLUS_ONE: int
PREPARE_ALWAYS: int

# result, rank, peer, sequence, site, expected, seen, text
_Failure = tuple[int, int, int, int, int, int, int, str]
# device_kind, world_size, push_bytes, pull_bytes, max_blocks, max_registrations; zero is the default
_LayoutConfig = tuple[int, int, int, int, int, int]

def version() -> int: ...
def results() -> dict[str, tuple[int, str]]: ...
def algorithm_name(number: int, /) -> str: ...
def source_name(number: int, /) -> str: ...
def collective_name(number: int, /) -> str: ...
def dtype_name(number: int, /) -> str: ...
def dtype_bytes(number: int, /) -> int: ...
def layout(
    device_kind: int,
    world_size: int,
    push_bytes: int = 0,
    pull_bytes: int = 0,
    max_blocks: int = 0,
    max_registrations: int = 0,
    /,
) -> tuple[int, int, int, int, int, int, int]: ...
def storage_arm(layout: _LayoutConfig, ordinal: int, symmetric: int, local: int, host: int, /) -> None: ...

class Context:
    def __init__(
        self,
        rank: int = 0,
        world_size: int = 0,
        name: str | None = None,
        allgather: Callable[[bytes], bytes] | None = None,
        *,
        device: int = 0,
        ordinal: int = 0,
        max_bytes: int = 0,
        push_bytes: int = 0,
        pull_bytes: int = 0,
        max_blocks: int = 0,
        max_registrations: int = 0,
        timeout_ms: int = 0,
        flags: int = 0,
        init_timeout_ms: int = 0,
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> tuple[int, int]: ...
    @property
    def closed(self) -> bool: ...
    def all_reduce(self, in_: int, out: int, count: int, dtype: int, stream: int, /) -> None: ...
    def read_tensors(self, type_: type, /) -> bool: ...
    def all_reduce_tensors(self, in_: object, out: object, stream: int, /) -> bool: ...
    def all_reduce_with(
        self,
        in_: int,
        out: int,
        count: int,
        dtype: int,
        stream: int,
        algorithm: int,
        source: int,
        blocks: int,
        threads: int,
        prefetch: int,
        prefetch_bytes: int,
        /,
    ) -> None: ...
    def reduce_scatter(self, in_: int, out: int, count: int, dtype: int, stream: int, /) -> None: ...
    def all_gather(self, in_: int, out: int, bytes_: int, stream: int, /) -> None: ...
    def all_reduce_norm(
        self,
        x: int,
        residual_in: int,
        weight: int,
        normed: int,
        residual_out: int,
        quantised: int,
        row_scales: int,
        rows: int,
        hidden: int,
        x_stride: int,
        residual_in_stride: int,
        dtype: int,
        flags: int,
        eps: float,
        scale: float,
        stream: int,
        /,
    ) -> None: ...
    def tp_qknorm(
        self,
        q: int,
        k: int,
        q_weight: int,
        k_weight: int,
        tokens: int,
        q_width: int,
        k_width: int,
        q_stride: int,
        k_stride: int,
        dtype: int,
        flags: int,
        eps: float,
        stream: int,
        /,
    ) -> None: ...
    def tp_qknorm_max_blocks(self, q_width: int, k_width: int, dtype: int, /) -> int: ...
    def prepare(self, dtypes: int, flags: int, /) -> None: ...
    def op_create(
        self,
        expression: str,
        dtype: int,
        row_length: int,
        scalars: tuple[str, ...],
        arrays: tuple[str, ...],
        array_dtypes: tuple[int, ...],
        /,
    ) -> object: ...
    def all_reduce_op(
        self,
        op: object,
        in_: int,
        out: int,
        count: int,
        scalars: tuple[float, ...],
        arrays: tuple[int, ...],
        algorithm: int,
        source: int,
        blocks: int,
        threads: int,
        stream: int,
        /,
    ) -> None: ...
    def synchronize(self, stream: int, /) -> None: ...
    def would_use(self, bytes_: int, dtype: int, mode: int, in_place: int, /) -> tuple[int, int, int, int, int]: ...
    def would_use_for(
        self, collective: int, bytes_: int, dtype: int, mode: int, /
    ) -> tuple[int, int, int, int, int]: ...
    def capture_begin(self) -> None: ...
    def capture_end(self) -> None: ...
    def capture_inputs(self) -> list[tuple[int, int, int]]: ...
    def capture_end_mapped(self, in_: Sequence[int], out: Sequence[int], count: int, /) -> None: ...
    def status(self) -> _Failure | None: ...
    def abort(self) -> None: ...
    def set_timeout(self, milliseconds: int, /) -> None: ...
    def stats(
        self,
    ) -> tuple[int, int, tuple[int, ...], int, int, int, int, int, int, int, int, int]: ...
    def destroy(self) -> None: ...

class Communicator:
    def __init__(
        self,
        layout: _LayoutConfig,
        ordinal: int,
        rank: int,
        symmetric: Sequence[int],
        local: int,
        host: int,
        ranks_per_device: int = 0,
        timeout_ms: int = 0,
        flags: int = 0,
        capability: int = 0,
    ) -> None: ...
    @property
    def closed(self) -> bool: ...
    def all_reduce(self, in_: int, out: int, count: int, dtype: int, stream: int, /) -> None: ...
    def read_tensors(self, type_: type, /) -> bool: ...
    def all_reduce_tensors(self, in_: object, out: object, stream: int, /) -> bool: ...
    def all_reduce_with(
        self,
        in_: int,
        out: int,
        count: int,
        dtype: int,
        stream: int,
        algorithm: int,
        source: int,
        blocks: int,
        threads: int,
        prefetch: int,
        prefetch_bytes: int,
        row: int = 0,
        /,
    ) -> None: ...
    def registration_take(self) -> int: ...
    def registration_fill(self, row: int, in_: Sequence[int] | None, out: Sequence[int] | None, /) -> None: ...
    def registration_release(self, row: int, /) -> None: ...
    def destroy(self) -> None: ...

class HostStream:
    def __init__(self) -> None: ...
    @property
    def handle(self) -> int: ...
    def synchronize(self) -> None: ...
    def capture_begin(self) -> None: ...
    def capture_end(self) -> HostGraph: ...

class HostGraph:
    def launch(self, stream: int, /) -> None: ...
