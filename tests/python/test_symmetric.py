"""Property: SymmetricAllReduce is right over memory of the test's own: a file in memory that each rank maps."""

import ctypes
import mmap

import pytest

torch = pytest.importorskip("torch")

import onehop  # noqa: E402
import ranks  # noqa: E402
from test_all_reduce import exact  # noqa: E402


def mapped(rank, world_size, path):
    """Each rank's slab of one file, mapped here; no memory of onehop's."""

    def allocate(layout):
        size = layout.symmetric_bytes
        with open(path, "r+b") as file:
            if rank == 0:
                file.truncate(world_size * size)
            torch.distributed.barrier()
            area = mmap.mmap(file.fileno(), world_size * size)
        base = ctypes.addressof(ctypes.c_char.from_buffer(area))
        return onehop.symmetric.Storage([base + other * size for other in range(world_size)], area)

    return allocate


def over_a_file(rank, world_size, path):
    with onehop.symmetric.SymmetricAllReduce(
        mapped(rank, world_size, path), None, "cpu", push_bytes=8192, pull_bytes=8192, timeout=20
    ) as ar:
        for count in 1, 2048, 50_001:
            given = exact(rank, count, torch.bfloat16)
            want = sum(exact(other, count, torch.bfloat16) for other in range(world_size))
            assert torch.equal(ar.all_reduce(given), want)
            assert torch.equal(ar.all_reduce(given, algorithm="1shot_push"), want)
            assert torch.equal(ar.all_reduce_(given), want)
        return repr(ar)


@pytest.mark.parametrize("world_size", [2, 4])
def test_over_a_file(world_size, tmp_path):
    path = tmp_path / "buffers"
    path.touch()
    found = ranks.run(world_size, over_a_file, str(path))
    assert found == [f"SymmetricAllReduce(rank {rank} of {world_size} on cpu)" for rank in range(world_size)]


def test_needs_a_group():
    with pytest.raises(onehop.ArgumentError, match="allgather"):
        onehop.symmetric.SymmetricAllReduce(lambda _: None, onehop.Rendezvous(0, 2, "x"), "cpu")
    with pytest.raises(onehop.ArgumentError, match="found cpu"):
        onehop.symmetric.SymmetricAllReduce.from_torch(None, "cpu")
