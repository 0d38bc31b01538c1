"""How ranks find each other: PyTorch's process groups, a name, or a function of the caller's."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from onehop._errors import ArgumentError
from onehop._types import Result

DEFAULT_TIMEOUT_S = 300.0


class Rendezvous(NamedTuple):
    """A group without torch.distributed.

    With `allgather` (the bytes of every rank, joined in rank order) ranks meet through it; else through `name`, which
    is equal on all ranks and on no other group. Ranks may be processes, or threads of one process.
    """

    rank: int
    world_size: int
    name: str | None = None
    allgather: Callable[[bytes], bytes] | None = None


def milliseconds(seconds: float | None, what: str) -> int:
    """0 for None, which the library takes as its default."""
    if seconds is None:
        return 0
    if not 0.001 <= seconds <= (1 << 31) / 1000:
        raise ArgumentError(f"{what}: expected seconds from 0.001 to {(1 << 31) // 1000}, found {seconds!r}")
    return int(seconds * 1000)


def _through_collective(group: Any, timeout: timedelta) -> Callable[[bytes], bytes]:
    def allgather(sent: bytes) -> bytes:
        mine = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        work = dist.all_gather(everyone, mine, group=group, async_op=True)
        if work is not None:
            work.wait(timeout)
        return b"".join(bytes(one.tolist()) for one in everyone)  # without numpy, which PyTorch does not need

    return allgather


_rounds: dict[str, int] = {}


def _through_store(
    store: Any,
    prefix: str,
    rank: int,
    world_size: int,
    timeout: timedelta,
    rounds: dict[str, int] = _rounds,  # shared on purpose
) -> Callable[[bytes], bytes]:
    store = torch._C._distributed_c10d.PrefixStore(f"onehop/{prefix}", store)

    def allgather(sent: bytes) -> bytes:
        # Keys are used once, also by a second context on the same group.
        number = rounds[prefix] = rounds.get(prefix, -1) + 1
        store.set(f"{number}/{rank}", sent)
        names = [f"{number}/{other}" for other in range(world_size)]
        store.wait(names, timeout)
        return b"".join(bytes(store.get(name)) for name in names)

    return allgather


def _has_cpu_backend(group: Any) -> bool:
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True


def _store_of(group: Any) -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._world.pg_map.get(group, (None, None))[1]


def rendezvous(group: Any, init_timeout: float | None) -> Rendezvous:
    """What a group, or None, means."""
    if isinstance(group, Rendezvous):
        return group
    distributed = dist.is_available() and dist.is_initialized()
    if group is None and not distributed:
        return Rendezvous(0, 0)  # the library reads the environment
    if distributed and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("group: expected one that this process is a member of", Result.RANK)
    if not distributed or (group is not None and not isinstance(group, dist.ProcessGroup)):
        raise ArgumentError(
            f"group: expected a torch.distributed.ProcessGroup, an onehop.Rendezvous or None, found "
            f"{type(group).__name__}"
        )
    group = dist.group.WORLD if group is None else group
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ArgumentError("group: expected one that this process is a member of", Result.RANK)
    timeout = timedelta(seconds=init_timeout or DEFAULT_TIMEOUT_S)
    if _has_cpu_backend(group):
        return Rendezvous(rank, world_size, allgather=_through_collective(group, timeout))
    store = _store_of(group)
    if store is None:
        raise ArgumentError(
            f"group: expected one with a backend for CPU tensors (gloo) or a store, found only "
            f"{dist.get_backend(group)}; make one with torch.distributed.new_group(backend='gloo')"
        )
    return Rendezvous(rank, world_size, allgather=_through_store(store, group.group_name, rank, world_size, timeout))
