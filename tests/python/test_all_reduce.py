"""Property: AllReduce is right on gloo groups of CPU processes."""

import os
import threading
import time

import pytest

torch = pytest.importorskip("torch")

import onehop  # noqa: E402
import ranks  # noqa: E402


def exact(rank, count, dtype):
    """Small integers: sums are exact in every type."""
    return ((torch.arange(count) * 7 + rank * 5) % 15 - 7).to(dtype)


def exact_sum(world_size, count, dtype):
    return sum(exact(other, count, dtype) for other in range(world_size))


def sums(rank, world_size):
    with onehop.AllReduce(None, "cpu", timeout=20) as ar:
        assert (ar.rank, ar.world_size, ar.device) == (rank, world_size, torch.device("cpu"))
        for dtype in torch.float32, torch.float16, torch.bfloat16:
            for count in 0, 7, 2048, 50_003:
                given, want = exact(rank, count, dtype), exact_sum(world_size, count, dtype)
                assert torch.equal(ar.all_reduce(given), want)
                out = torch.full_like(given, -1)
                assert torch.equal(ar.all_reduce(given, out=out), want)
                assert torch.equal(given, exact(rank, count, dtype))
                assert torch.equal(ar.all_reduce_(given), want)
        return ar.stats().calls


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums(world_size):
    assert ranks.run(world_size, sums) == [3 * 3 * 3] * world_size


def without_numpy(rank, world_size):
    """PyTorch does not require it."""

    def refused(*_):
        raise RuntimeError("Numpy is not available")

    torch.Tensor.numpy = refused
    return sums(rank, world_size)


def test_without_numpy():
    assert ranks.run(2, without_numpy) == [3 * 3 * 3] * 2


def kinds(rank, world_size):
    """Ranks need not agree on how a tensor lies, nor on what else they do with it."""
    with onehop.AllReduce(None, "cpu", timeout=20) as ar:
        want = exact_sum(world_size, 12, torch.float32).reshape(3, 4)
        given = exact(rank, 12, torch.float32).reshape(3, 4)
        lies = given if rank == 0 else given.t().contiguous().t()
        assert torch.equal(ar.all_reduce(lies), want)
        assert torch.equal(ar.all_reduce_(lies), want)
        scalar = torch.tensor(float(rank))
        assert ar.all_reduce(scalar).item() == sum(range(world_size))

        for name in "1shot_push", "2shot_push", "1shot_pull", "2shot_pull", "host_1shot":
            assert torch.equal(
                ar.all_reduce(exact(rank, 5000, torch.bfloat16), algorithm=name),
                exact_sum(world_size, 5000, torch.bfloat16),
            )
        weights = torch.ones(1000 * (1 + rank))  # each rank its own, or none
        given = exact(rank, 12, torch.float32).reshape(3, 4)
        assert torch.equal(ar.all_reduce(given, prefetch=weights if rank else None), want)
        asked = ar.would_use(torch.empty(5000, dtype=torch.bfloat16))
        before = ar.stats().calls_by.get(asked.algorithm, 0)
        ar.all_reduce(torch.zeros(5000, dtype=torch.bfloat16))
        assert ar.stats().calls_by[asked.algorithm] == before + 1

        given = exact(rank, 12, torch.float32).reshape(3, 4)
        assert torch.equal(onehop.ops.all_reduce(given, ar), want)
        assert torch.equal(onehop.ops.all_reduce_(given, ar), want)
        return True


def test_kinds():
    assert ranks.run(2, kinds) == [True, True]


def groups(rank, world_size):
    """A part of the world; two at once; and one without a backend for CPU tensors, through its store."""
    from onehop import _group

    pairs = [torch.distributed.new_group([0, 2]), torch.distributed.new_group([1, 3])]
    with (
        onehop.AllReduce(pairs[rank % 2], "cpu", timeout=20) as pair,
        onehop.AllReduce(None, "cpu", timeout=20) as all4,
    ):
        assert (pair.rank, pair.world_size) == (rank // 2, 2)
        one = torch.tensor([float(rank)])
        assert pair.all_reduce(one).item() == 2 + 2 * (rank % 2)
        assert all4.all_reduce(one).item() == 6
    with pytest.raises(onehop.ArgumentError, match="member"):
        onehop.AllReduce(pairs[1 - rank % 2], "cpu")
    _group._has_cpu_backend = lambda _: False
    for _ in range(2):
        with onehop.AllReduce(None, "cpu", timeout=20, init_timeout=20) as stored:
            assert stored.all_reduce(one).item() == 6
    _group._store_of = lambda _: None
    with pytest.raises(onehop.ArgumentError, match="backend='gloo'"):
        onehop.AllReduce(None, "cpu")
    return True


def test_groups():
    assert ranks.run(4, groups) == [True] * 4


def disagree(rank, _):
    with pytest.raises(onehop.SetupError) as found:
        onehop.AllReduce(None, "cpu", max_bytes=4096 * (1 + rank))
    with pytest.raises(onehop.SetupError, match="flags is 2 on rank 1 and 0 on rank 0"):
        onehop.AllReduce(None, "cpu", share_gpu=rank == 1)
    return found.value.code.name, str(found.value)


def test_ranks_that_disagree_hear_the_same():
    first, second = ranks.run(2, disagree)
    assert first[0] == second[0] == "DISAGREEMENT"
    assert "max_bytes is 8192 on rank 1 and 4096 on rank 0" in first[1]
    assert first[1].removeprefix("rank 0: ") == second[1].removeprefix("rank 0: ")


def different(rank, _):
    ar = onehop.AllReduce(None, "cpu", timeout=20)
    with pytest.raises(onehop.CommunicatorDead) as found:
        ar.all_reduce(torch.ones(100 + rank))
    with pytest.raises(onehop.CommunicatorDead):
        ar.all_reduce(torch.ones(100))
    return found.value.code.name, found.value.failure.peer, ar.status() == found.value.failure


def test_calls_that_differ():
    assert ranks.run(2, different) == [("MISMATCH", 1, True)] * 2


def one_dies(rank, _):
    ar = onehop.AllReduce(None, "cpu", timeout=30)
    ar.all_reduce(torch.ones(10))
    if rank == 1:
        os._exit(1)
    start = time.monotonic()
    with pytest.raises(onehop.CommunicatorDead) as found:
        ar.all_reduce(torch.ones(10))
    return found.value.code.name, found.value.failure.peer, time.monotonic() - start < 15


def test_a_lost_rank_is_named():
    assert ranks.run(2, one_dies, missing={1})[0] == ("PEER_LOST", 1, True)


def others_run(rank, _):
    """While a call waits for its peer, other Python threads run; one of them ends the wait."""
    ar = onehop.AllReduce(None, "cpu", timeout=30)
    if rank == 1:
        torch.distributed.barrier()  # never calls
        return "absent"
    turns, stop = 0, time.monotonic() + 0.2

    def count():
        nonlocal turns
        while time.monotonic() < stop:
            turns += 1
        ar.abort()

    thread = threading.Thread(target=count)
    thread.start()
    with pytest.raises(onehop.CommunicatorDead) as found:
        ar.all_reduce(torch.ones(10))
    thread.join(10)
    torch.distributed.barrier()
    return found.value.code.name, turns > 10


def test_other_threads_run():
    assert ranks.run(2, others_run) == [("ABORTED", True), "absent"]


def captured(rank, world_size):
    ar = onehop.AllReduce(None, "cpu", timeout=20)
    stream = ar.host_stream = onehop.HostStream()
    given = torch.zeros(5000)
    with ar.capture() as same:
        assert same is ar
        stream.capture_begin()
        got = ar.all_reduce(given)
        pulled = ar.all_reduce(given, algorithm="1shot_pull", source="graph")
        graph = stream.capture_end()
        inputs = ar.capture_inputs()
    assert inputs == [(given.data_ptr(), pulled.data_ptr(), 4 * 5000)]
    assert inputs[0].bytes == 20000
    for replay in range(3):
        given.copy_(exact(rank, 5000, torch.float32) + replay)
        graph.launch(stream.handle)
        ar.synchronize()
        want = exact_sum(world_size, 5000, torch.float32) + world_size * replay
        assert torch.equal(got, want)
        assert torch.equal(pulled, want)

    # An exception inside goes on, and leaves all ranks able to go on.
    with pytest.raises(ZeroDivisionError), ar.capture():
        raise ZeroDivisionError
    with ar.capture():
        pass
    with pytest.raises(onehop.ArgumentError, match="already"), ar.capture():
        ar.capture_begin()
    with pytest.raises(onehop.ArgumentError, match="2 addresses"):
        ar.capture_end_mapped([[1, 2, 3]], [[1, 2]])
    with ar.capture():
        ar.capture_end_mapped([], [])
    ar.host_stream = None
    assert ar.all_reduce(torch.ones(3)).sum().item() == 3 * world_size
    return ar.stats().registrations_direct + ar.stats().registrations_staged


def test_capture():
    assert ranks.run(2, captured) == [1, 1]
