"""Property: what needs no PyTorch works without it: contexts on addresses, errors, and the Python mirror of onehop.h."""

import array
import ast
import os
import pickle
import subprocess
import sys
import threading
import time

import pytest

import onehop
from onehop import _onehop

HOST, FLOAT = onehop.DeviceKind.HOST, onehop.DType.FLOAT32


class Floats:
    """An array of float32 and its address."""

    def __init__(self, values):
        self.values = array.array("f", values)
        self.address, self.count = self.values.buffer_info()


def on_threads(world_size, body):
    """body(rank) on a thread for each rank, under a deadline; results by rank, or the first exception."""
    found, raised = [None] * world_size, []

    def run(rank):
        try:
            found[rank] = body(rank)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    if raised:
        raise raised[0]
    return found


def name():
    return f"test_core {os.getpid()} {time.monotonic_ns()}"


def pair(**options):
    """Two contexts, made on threads."""
    group = name()
    return on_threads(2, lambda rank: onehop.Context(rank, 2, group, device=HOST, **{"timeout_ms": 15000, **options}))


# ---- the mirror of the header ---------------------------------------------------------------------------------------


def test_results_are_those_of_the_library():
    library = {key.removeprefix("ONEHOP_").removeprefix("ERR_"): value for key, (value, _) in _onehop.results().items()}
    assert {one.name: one.value for one in onehop.Result} == library


@pytest.mark.parametrize(
    ("kind", "name_of"),
    [
        (onehop.Algorithm, _onehop.algorithm_name),
        (onehop.Source, _onehop.source_name),
        (onehop.DType, _onehop.dtype_name),
        (onehop.Collective, _onehop.collective_name),
    ],
)
def test_enumerations_are_those_of_the_library(kind, name_of):
    spelt = {"ONESHOT": "1SHOT", "TWOSHOT": "2SHOT"}
    for number in range(32):
        known = number in kind.__members__.values()
        assert (name_of(number) != "unknown") == known, number
        if known:
            words = "_".join(spelt.get(word, word) for word in kind(number).name.split("_"))
            assert name_of(number) == words.lower()


def test_constants():
    assert [onehop.DeviceKind[word] for word in ("AUTO", "CUDA", "HOST")] == [
        _onehop.DEVICE_AUTO,
        _onehop.DEVICE_CUDA,
        _onehop.DEVICE_HOST,
    ]
    assert (onehop.Mode.EAGER, onehop.Mode.GRAPH) == (_onehop.MODE_EAGER, _onehop.MODE_GRAPH)
    assert onehop.__version__.count(".") == 2


def test_stub_names_what_there_is():
    with open(os.path.join(os.path.dirname(onehop.__file__), "_onehop.pyi"), encoding="utf-8") as file:
        stub = ast.parse(file.read()).body

    def names(body):
        said = [one.target.id for one in body if isinstance(one, ast.AnnAssign)]
        said += [one.name for one in body if isinstance(one, (ast.FunctionDef, ast.ClassDef))]
        return {name for name in said if not name.startswith("_")}

    def public(thing):
        return {name for name in vars(thing) if not name.startswith("_")}

    assert names(stub) == public(_onehop)
    for one in stub:
        if isinstance(one, ast.ClassDef):
            assert names(one.body) == public(getattr(_onehop, one.name)), one.name


def test_no_torch_is_imported():
    code = "import sys, onehop; onehop.Context; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0
    with pytest.raises(AttributeError, match="nonsense"):
        _ = onehop.nonsense


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [code for code in onehop.Result if code])
def test_each_result_has_its_exception(code):
    from onehop._errors import make_error

    classes = {
        1: onehop.ArgumentError,
        2: onehop.SetupError,
        3: onehop.CommunicatorDead,
        4: onehop.InternalError,
    }
    error = make_error(code, f"ONEHOP_ERR_{code.name}", "a sentence")
    assert type(error) is classes[-code // 100]
    assert isinstance(error, onehop.Error)
    assert isinstance(error, RuntimeError)
    assert isinstance(error, ValueError) == (code > -200)
    assert (error.code, error.name, str(error)) == (code, f"ONEHOP_ERR_{code.name}", "a sentence")
    assert code.name in _onehop.results().__str__()
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.code, str(again)) == (type(error), error.code, str(error))


def test_arguments_are_refused():
    with pytest.raises(onehop.ArgumentError, match="world size") as found:
        onehop.Context(0, 99, "x", device=HOST)
    assert found.value.code == onehop.Result.WORLD_SIZE
    context = onehop.Context(0, 1, "alone", device=HOST)
    data = Floats([1, 2, 3])
    with pytest.raises(onehop.ArgumentError, match="data type 9"):
        context.all_reduce(data.address, data.address, 3, 9, 0)
    with pytest.raises(onehop.ArgumentError, match="in is NULL"):
        context.all_reduce(0, data.address, 3, FLOAT, 0)
    with pytest.raises(TypeError, match="takes 5 arguments, found 2"):
        context.all_reduce(1, 2)
    with pytest.raises(TypeError):
        context.all_reduce("here", data.address, 3, FLOAT, 0)
    with pytest.raises(OverflowError):
        context.all_reduce(data.address, data.address, -1, FLOAT, 0)
    with pytest.raises(OverflowError):
        context.all_reduce_with(data.address, data.address, 3, FLOAT, 0, 0, 0, 1 << 40, 0, 0, 0)
    context.destroy()
    context.destroy()
    assert context.closed
    with pytest.raises(onehop.ArgumentError, match="it is closed"):
        context.all_reduce(data.address, data.address, 3, FLOAT, 0)


# ---- calls ----------------------------------------------------------------------------------------------------------


def test_ranks_on_threads():
    """Each call waits for the other thread: it must not hold the GIL."""
    contexts = pair()

    def body(rank):
        given, got = Floats([rank + 1, 10 * rank]), Floats([-1, -1])
        for _ in range(50):
            contexts[rank].all_reduce(given.address, got.address, 2, FLOAT, 0)
        contexts[rank].synchronize(0)
        return got.values.tolist()

    assert on_threads(2, body) == [[3, 10]] * 2
    stats = contexts[0].stats()
    assert (stats[0], stats[1]) == (50, 400)
    choice = contexts[0].would_use(8, onehop.Collective.ALL_REDUCE, FLOAT, onehop.Mode.EAGER, 0)
    assert stats[2][choice[0]] == 50
    for context in contexts:
        context.destroy()


def test_allgather_of_the_caller():
    """Rendezvous through a function; what it raises is the cause of the error."""
    barrier, blobs = threading.Barrier(2, timeout=20), {}

    def body(rank):
        def allgather(sent):
            blobs[rank] = sent
            barrier.wait()
            everyone = blobs[0] + blobs[1]
            barrier.wait()
            return everyone

        context = onehop.Context(rank, 2, None, allgather, device=HOST)
        assert (context.rank, context.world_size, context.device) == (rank, 2, (HOST, 0))
        data = Floats([1.5])
        context.all_reduce(data.address, data.address, 1, FLOAT, 0)
        context.destroy()
        return data.values[0]

    assert on_threads(2, body) == [3.0, 3.0]


def raises(sent):
    raise ZeroDivisionError("mine")


@pytest.mark.parametrize(
    ("allgather", "cause", "text"),
    [(raises, ZeroDivisionError, "mine"), (lambda _: b"short", ValueError, "found 5"), (lambda _: 7, TypeError, "")],
)
def test_allgather_that_fails(allgather, cause, text):
    with pytest.raises(onehop.SetupError, match="all-gather") as found:
        onehop.Context(0, 2, None, allgather, device=HOST)
    assert isinstance(found.value.__cause__, cause)
    assert text in str(found.value.__cause__)


def test_one_thread_at_a_time():
    """A second thread is refused; status, timeout and abort are not, and abort ends the call."""
    contexts = pair()
    data, raised = Floats([1.0]), []

    def wait():
        with pytest.raises(onehop.CommunicatorDead) as found:
            contexts[0].all_reduce(data.address, data.address, 1, FLOAT, 0)
        raised.append(found.value)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            contexts[0].stats()
        except onehop.ArgumentError as error:
            assert "one thread at a time" in str(error)
            break
        time.sleep(0.001)
    else:
        pytest.fail("the call never began")
    with pytest.raises(onehop.ArgumentError, match="abort"):
        contexts[0].destroy()
    assert contexts[0].status() is None
    contexts[0].set_timeout(20000)
    contexts[0].abort()
    thread.join(10)
    assert raised[0].code == onehop.Result.ABORTED
    assert raised[0].failure.result == onehop.Result.ABORTED
    assert contexts[0].status()[0] == onehop.Result.ABORTED
    for context in contexts:
        context.destroy()


def test_deadline_names_the_peer():
    contexts = pair(timeout_ms=200)
    data = Floats([1.0])
    with pytest.raises(onehop.CommunicatorDead, match="rank 1") as found:
        contexts[0].all_reduce(data.address, data.address, 1, FLOAT, 0)
    assert found.value.code == onehop.Result.TIMEOUT
    assert (found.value.failure.rank, found.value.failure.peer) == (0, 1)
    assert found.value.failure.text in str(found.value)
    for context in contexts:
        context.destroy()


def test_a_forked_child_leaves_it_alone():
    contexts = pair()
    child = os.fork()
    if child == 0:
        contexts[0].destroy()
        del contexts
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

    def body(rank):
        data = Floats([1.0])
        contexts[rank].all_reduce(data.address, data.address, 1, FLOAT, 0)
        return data.values[0]

    assert on_threads(2, body) == [2.0, 2.0]


# ---- capture --------------------------------------------------------------------------------------------------------


def test_capture_and_replay():
    contexts = pair()

    def body(rank):
        context, stream = contexts[rank], onehop.HostStream()
        given, got = Floats([0.0] * 4096), Floats([-1.0] * 4096)
        call = (given.address, got.address, 4096, FLOAT, stream.handle)
        context.capture_begin()
        stream.capture_begin()
        context.all_reduce_with(*call, onehop.Algorithm.ONESHOT_PULL, onehop.Source.GRAPH, 0, 0, 0, 0)
        context.all_reduce(*call)
        graph = stream.capture_end()
        inputs = context.capture_inputs()
        context.capture_end()
        assert inputs == [(given.address, got.address, 4 * 4096)]
        for replay in range(3):
            given.values[5] = rank + replay
            graph.launch(stream.handle)
            context.synchronize(stream.handle)
            assert got.values[5] == 1 + 2 * replay
        return context.stats()[0]

    assert on_threads(2, body) == [2, 2]


def test_capture_over_addresses_of_the_caller():
    """Threads reach each other's memory as it is: no registration is needed."""
    contexts = pair()
    places, barrier = {}, threading.Barrier(2, timeout=20)

    def body(rank):
        context, stream = contexts[rank], onehop.HostStream()
        area = Floats([0.0] * 4096)
        skip = -area.address % 16 // 4  # rows want addresses aligned to 16
        given, got = area.address + 4 * skip, area.address + 4 * (skip + 2048)
        context.capture_begin()
        stream.capture_begin()
        way = onehop.Algorithm.ONESHOT_PULL, onehop.Source.GRAPH, 0, 0, 0, 0
        context.all_reduce_with(given, got, 1024, FLOAT, stream.handle, *way)
        graph = stream.capture_end()
        places[rank] = context.capture_inputs()[0]
        barrier.wait()
        if rank == 0:
            with pytest.raises(ValueError, match="expected 2 addresses, found 1"):
                context.capture_end_mapped([given], [got], 1)
        context.capture_end_mapped([places[0][0], places[1][0]], [places[0][1], places[1][1]], 1)
        area.values[skip] = 2.0 + rank
        graph.launch(stream.handle)
        context.synchronize(stream.handle)
        return area.values[skip + 2048]

    assert on_threads(2, body) == [5.0, 5.0]


def test_captures_that_differ():
    contexts = pair()

    def body(rank):
        context, stream = contexts[rank], onehop.HostStream()
        data = Floats([1.0] * 64)
        context.capture_begin()
        stream.capture_begin()
        context.all_reduce(data.address, data.address, 32 + rank, FLOAT, stream.handle)
        graph = stream.capture_end()
        with pytest.raises(onehop.CommunicatorDead, match="32 x float32") as found:
            context.capture_end()
        del graph
        return found.value.code

    assert on_threads(2, body) == [onehop.Result.MISMATCH] * 2


def test_a_graph_comes_from_a_stream():
    with pytest.raises(TypeError, match="capture_end"):
        onehop.HostGraph()
    with pytest.raises(onehop.ArgumentError, match="stream"):
        onehop.HostStream().capture_end()
