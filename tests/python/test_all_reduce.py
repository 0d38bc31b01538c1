"""AllReduce on gloo groups of CPU processes."""

import pytest

torch = pytest.importorskip("torch")

import onehop  # noqa: E402
import ranks  # noqa: E402


def exact(rank, count, dtype):
    """Small integers: sums are exact in every type."""
    return ((torch.arange(count) * 7 + rank * 5) % 15 - 7).to(dtype)


def sums(rank, world_size):
    with onehop.AllReduce(None, "cpu", timeout=20) as ar:
        assert (ar.rank, ar.world_size, ar.device) == (rank, world_size, torch.device("cpu"))
        for dtype in torch.float32, torch.float16, torch.bfloat16:
            for count in 0, 1, 7, 2048, 100_003:
                given = exact(rank, count, dtype)
                want = sum(exact(other, count, dtype) for other in range(world_size))
                assert torch.equal(ar.all_reduce(given), want)
                out = torch.full_like(given, -1)
                assert ar.all_reduce(given, out=out) is out
                assert torch.equal(out, want)
                assert torch.equal(given, exact(rank, count, dtype))
                assert ar.all_reduce_(given) is given
                assert torch.equal(given, want)
        return ar.stats().calls


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums(world_size):
    assert ranks.run(world_size, sums) == [3 * 4 * 3] * world_size
