"""Enumerations and records. Values are those of onehop.h, which a test holds them against."""

import enum
from typing import Literal, NamedTuple


class Result(enum.IntEnum):
    """What a call of the library returned; groups as in onehop.h."""

    OK = 0
    NULL = -101
    ARGUMENT = -102
    STRUCT_SIZE = -103
    DTYPE = -104
    OP = -105
    RANK = -106
    WORLD_SIZE = -107
    ALIGNMENT = -108
    OVERLAP = -109
    TOO_LARGE = -110
    ALGORITHM = -111
    STREAM = -112
    STATE = -113
    ENVIRONMENT = -114
    NO_DEVICE = -201
    UNSUPPORTED = -202
    MEMORY = -203
    SYSTEM = -204
    DRIVER = -205
    DUPLICATE_RANK = -206
    MISSING_PEER = -207
    DISAGREEMENT = -208
    SEVERAL_HOSTS = -209
    PEER_FAILED = -210
    INTERRUPTED = -211
    TIMEOUT = -301
    PEER_LOST = -302
    MISMATCH = -303
    ABORTED = -304
    CALLS_OVERLAP = -305
    REGISTRATION = -306
    INTERNAL = -401


class DType(enum.IntEnum):
    """Data types of the elements."""

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3


class Algorithm(enum.IntEnum):
    """Ways to do an all-reduce, a reduce-scatter or an all-gather; AUTO leaves the choice to the tuning table."""

    AUTO = 0
    ONESHOT_PUSH = 1
    TWOSHOT_PUSH = 2
    ONESHOT_PULL = 3
    TWOSHOT_PULL = 4
    NCCL = 5
    HOST_ONESHOT = 6
    HOST_TWOSHOT = 7
    LOCAL_COPY = 8
    SCATTER_PUSH = 9
    GATHER_LL = 10
    GATHER_PUSH = 11
    HOST_SCATTER = 12
    HOST_GATHER = 13


class Source(enum.IntEnum):
    """Where a pull algorithm reads; NONE leaves it open."""

    NONE = 0
    WORKSPACE = 1
    GRAPH = 2
    MULTICAST = 3


AlgorithmName = Literal[
    "auto",
    "1shot_push",
    "2shot_push",
    "1shot_pull",
    "2shot_pull",
    "nccl",
    "host_1shot",
    "host_2shot",
    "local_copy",
    "scatter_push",
    "gather_ll",
    "gather_push",
    "host_scatter",
    "host_gather",
]
"""The library's names of them; a test holds them against it."""
SourceName = Literal["none", "workspace", "graph", "multicast"]


class Collective(enum.IntEnum):
    """What ranks do together."""

    ALL_REDUCE = 0
    REDUCE_SCATTER = 1
    ALL_GATHER = 2


class Mode(enum.IntEnum):
    """Whether a call is launched directly or captured."""

    EAGER = 0
    GRAPH = 1


class DeviceKind(enum.IntEnum):
    """Kinds of devices; AUTO is CUDA if a GPU can be used, else the host."""

    AUTO = 0
    CUDA = 1
    HOST = 2


class Choice(NamedTuple):
    """What a call would use: see onehop_would_use."""

    algorithm: Algorithm
    source: Source
    blocks: int
    threads: int
    chunks: int
    table: str | None = None
    """Name of the tuning table whose rule chose; None for none."""
    line: int = 0
    instead_of: Algorithm = Algorithm.AUTO
    """The algorithm that was named, where another runs in its place."""


class Failure(NamedTuple):
    """What ended a communicator: the record of onehop_status."""

    result: Result
    rank: int
    """The rank that recorded it."""
    peer: int
    """The culprit, the same on all ranks; -1 for none."""
    sequence: int
    site: int
    expected: int
    seen: int
    text: str


class Stats(NamedTuple):
    """Counters and sizes of one rank: see onehop_get_stats."""

    calls: int
    bytes: int
    calls_by: dict[Algorithm, int]
    """Algorithms that were used."""
    symmetric_bytes: int
    local_bytes: int
    host_bytes: int
    registrations_used: int
    registrations_total: int
    push_bytes: int
    pull_bytes: int
    registrations_direct: int
    registrations_staged: int


class CapturedInput(NamedTuple):
    """Memory that a captured call reads and writes on this rank."""

    in_ptr: int
    out_ptr: int
    bytes: int


class Layout(NamedTuple):
    """Sizes of a communicator's memory: see onehop_layout_get."""

    symmetric_bytes: int
    local_bytes: int
    host_bytes: int
    push_bytes: int
    pull_bytes: int
    max_blocks: int
    max_registrations: int
