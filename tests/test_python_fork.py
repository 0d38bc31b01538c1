# labels: asan-off tsan-off timeout=60
"""Property: objects of the Python package in forked children (os.fork, multiprocessing) raise STATE at every use, dropping
them is harmless, and the parent's contexts go on. Needs neither PyTorch nor pytest."""

import array
import glob
import multiprocessing
import os
import sys
import threading

ROOT = os.path.abspath(os.environ.get("ONEHOP_SOURCE_DIR", os.path.join(os.path.dirname(__file__), "..")))
PACKAGE = os.path.join(os.environ.get("ONEHOP_BUILD_DIR", os.path.join(ROOT, "build", "release")), "python")
if not glob.glob(os.path.join(PACKAGE, "onehop", "_onehop*.so")):
    print("SKIPPED: the package was not built")
    sys.exit(77)
sys.path.insert(0, PACKAGE)

import onehop  # noqa: E402
from onehop import _onehop  # noqa: E402

HOST, FLOAT = onehop.DeviceKind.HOST, onehop.DType.FLOAT32


def on_threads(body):
    found = [None, None]

    def run(rank):
        found[rank] = body(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return found


def all_reduce(contexts):
    def body(rank):
        data = array.array("f", [1.0 + rank])
        at = data.buffer_info()[0]
        contexts[rank].all_reduce(at, at, 1, FLOAT, 0)
        return data[0]

    assert on_threads(body) == [3.0, 3.0]


def refused(call, *arguments):
    try:
        call(*arguments)
    except onehop.Error as error:
        assert error.code == onehop.Result.STATE and "forked" in str(error), error
    else:
        raise AssertionError(f"{call} was accepted")


def use(context, stream):
    data = array.array("f", [50.0])
    at = data.buffer_info()[0]
    refused(context.all_reduce, at, at, 1, FLOAT, 0)
    refused(context.all_reduce, at, at, 1, FLOAT, stream.handle)
    refused(context.abort)
    refused(context.status)
    refused(context.set_timeout, 1)
    refused(context.capture_begin)
    refused(stream.synchronize)
    refused(stream.capture_begin)


def end_well(child):
    assert os.waitpid(child, 0)[1] == 0


def wait_inside(context):
    """A call that waits for a peer which comes late."""
    data = array.array("f", [1.0])
    at = data.buffer_info()[0]
    context.all_reduce(at, at, 1, FLOAT, 0)


def main():
    group = f"test_python_fork {os.getpid()}"
    contexts = on_threads(lambda rank: onehop.Context(rank, 2, group, device=HOST, timeout_ms=15000))
    stream = _onehop.HostStream()

    child = os.fork()
    if child == 0:
        use(contexts[0], stream)
        contexts[0].destroy()
        del contexts, stream  # the last references: rank 1 and the stream are dropped
        os._exit(0)
    end_well(child)
    all_reduce(contexts)

    child = multiprocessing.get_context("fork").Process(target=use, args=(contexts[1], stream))
    child.start()  # ends through the interpreter's own clean-up
    child.join(30)
    assert child.exitcode == 0, child.exitcode
    all_reduce(contexts)

    inside = threading.Thread(target=wait_inside, args=(contexts[0],), daemon=True)
    inside.start()
    while True:  # until the thread is in the call
        try:
            contexts[0].would_use(4, 0, FLOAT, onehop.Mode.EAGER, 0)
        except onehop.Error:
            break
    child = os.fork()
    if child == 0:
        contexts[0].destroy()  # whoever is inside is in the parent
        os._exit(0)
    end_well(child)
    wait_inside(contexts[1])
    inside.join(30)
    assert not inside.is_alive()
    stream.synchronize()
    for context in contexts:
        context.destroy()
    print("ok")


main()
