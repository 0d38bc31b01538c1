"""Property: handlers of signals run while a rank waits for its peers, and end the wait by raising."""

import _thread
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

import onehop
from test_core import FLOAT, HOST, Floats, name

DELAY_S = 0.3  # from the beginning of a wait to the signal
HEARD_S = 0.6  # 0.2 on a machine that has nothing else to do
LATE_S = 1.3  # of the peer


class Enough(Exception):
    """Raised by a handler."""


@contextlib.contextmanager
def alarm(raises):
    """A signal after DELAY_S; yields the list of times at which its handler ran."""
    heard = []

    def handler(*_):
        heard.append(time.monotonic())
        if raises:
            raise Enough

    before = signal.signal(signal.SIGALRM, handler)
    sent = time.monotonic() + DELAY_S
    signal.setitimer(signal.ITIMER_REAL, DELAY_S)
    try:
        if raises:
            with pytest.raises(Enough):
                yield heard
            assert time.monotonic() - sent < HEARD_S, "the exception came late"
        else:
            yield heard
            assert time.monotonic() - sent > HEARD_S, "the wait was too short for this test"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard, "the handler has not run"
    assert heard[0] - sent < HEARD_S, f"the handler ran {heard[0] - sent:.3f} s late"


def context(rank, group, **options):
    return onehop.Context(rank, 2, group, device=HOST, **{"timeout_ms": 20000, "init_timeout_ms": 20000, **options})


class Peer:
    """Rank 1, on a thread of its own: begins at once, and does `late` after LATE_S, or when told."""

    def __init__(self, late=None, group=None, begins=True):
        self.group = group or name()
        self.context = None
        self.go, self.late, self.raised, self.stays_away = threading.Event(), late, None, False
        self.thread = threading.Thread(target=self.run, args=(begins,), daemon=True)
        self.thread.start()
        self.mine = context(0, self.group) if begins else None

    def run(self, begins):
        if begins:
            self.context = context(1, self.group)
        self.go.wait(LATE_S)
        if self.stays_away:
            return
        try:
            self.context = self.context or context(1, self.group)
            if self.late:
                self.late(self.context)
        except onehop.Error as error:
            self.raised = error

    def join(self):
        self.go.set()
        self.thread.join(30)
        assert not self.thread.is_alive()
        for one in self.context, self.mine:
            if one:
                one.destroy()
        return self.raised


def reduce(one, stream=0):
    data = Floats([1.0] * 100)
    one.all_reduce(data.address, data.address, data.count, FLOAT, stream)
    return data


def capture_end(one):
    one.capture_begin()
    one.capture_end()


WAITS = {"all_reduce": reduce, "capture_end": capture_end, "prepare": lambda one: one.prepare(0, 0)}


@pytest.mark.parametrize("raises", [False, True])
def test_create(raises):
    peer = Peer(begins=False)
    with alarm(raises):
        peer.mine = context(0, peer.group)
    peer.stays_away = raises
    assert peer.join() is None


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("what", WAITS)
def test_call(what, raises):
    peer = Peer(late=WAITS[what])
    with alarm(raises):
        WAITS[what](peer.mine)
    raised = peer.join()
    assert raises or raised is None


def test_aborted_by_a_handler_that_raised():
    peer = Peer(late=lambda one: (reduce(one), reduce(one)))
    with alarm(True):
        reduce(peer.mine)
    with pytest.raises(onehop.CommunicatorDead) as caught:
        reduce(peer.mine)
    assert caught.value.code == onehop.Result.ABORTED
    assert peer.join().code == onehop.Result.ABORTED


@pytest.mark.parametrize("which", ["context", "stream"])
def test_synchronize(which):
    """What was queued goes on."""
    peer = Peer(late=reduce)
    stream = onehop.HostStream()
    data = reduce(peer.mine, stream.handle)
    wait = stream.synchronize if which == "stream" else lambda: peer.mine.synchronize(stream.handle)
    with alarm(True):
        wait()
    with alarm(False):
        wait()
    assert data.values[0] == 2
    assert peer.join() is None


def test_destroy():
    peer = Peer(late=lambda one: (reduce(one), reduce(one)))
    stream = onehop.HostStream()
    data = [reduce(peer.mine, stream.handle) for _ in range(2)]
    with alarm(True):
        peer.mine.destroy()
    assert peer.mine.closed
    assert peer.join().code == onehop.Result.ABORTED
    del data


def test_interrupt_key():
    peer = Peer(late=reduce)
    threading.Timer(DELAY_S, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        reduce(peer.mine)
    assert time.monotonic() - begun < DELAY_S + HEARD_S
    peer.join()


def test_handler_may_abort_and_create():
    """A handler that calls the library, on the same object and on another, does not disturb the wait."""
    peer = Peer(late=reduce)

    def handler(*_):
        with alarm(True):
            context(0, name())
        peer.mine.abort()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        threading.Timer(DELAY_S, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(onehop.CommunicatorDead):
            reduce(peer.mine)
    finally:
        signal.signal(signal.SIGUSR1, before)
    peer.join()


def test_interrupted_all_gather():
    """KeyboardInterrupt of the caller's all-gather comes out as it is."""

    def allgather(_):
        _thread.interrupt_main()
        time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        onehop.Context(0, 2, allgather=allgather, device=HOST)


SLOW_COMPILER = """
#include <string.h>
#include <unistd.h>
int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 0; return 0; }
int nvrtcCreateProgram(void **p, const char *s, const char *n, int c, const char *const *t, const char *const *i) {
    (void)s, (void)n, (void)c, (void)t, (void)i; *p = (void *)1; return 0;
}
int nvrtcDestroyProgram(void **p) { (void)p; return 0; }
int nvrtcCompileProgram(void *p, int c, const char *const *o) { (void)p, (void)c, (void)o; usleep(700000); return 0; }
int nvrtcGetCUBINSize(void *p, size_t *size) { (void)p; *size = 4; return 0; }
int nvrtcGetCUBIN(void *p, char *to) { (void)p; memcpy(to, "code", 4); return 0; }
int nvrtcGetProgramLogSize(void *p, size_t *size) { (void)p; *size = 0; return 0; }
int nvrtcGetProgramLog(void *p, char *to) { (void)p, (void)to; return 0; }
"""

PREPARE = """
import signal, sys, time, onehop
from test_signals import HOST, Peer
heard = []
def handler(*_):
    heard.append(time.monotonic())
    if len(heard) == 4:
        raise KeyboardInterrupt
peer = Peer(late=lambda one: one.prepare(0, 0))
peer.go.set()
signal.signal(signal.SIGALRM, handler)
begun = time.monotonic()
signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)
try:
    peer.mine.prepare(0, 0)
    print("prepared")
except KeyboardInterrupt:
    print("interrupted")
late = max(at - begun - 0.3 * (1 + i) for i, at in enumerate(heard))
print(f"{late:.3f} {time.monotonic() - heard[3]:.3f}")
sys.stdout.flush()
signal.setitimer(signal.ITIMER_REAL, 0)
peer.mine.abort()
import os
import shutil
os._exit(0)
"""


def test_prepare_that_compiles(tmp_path):
    """Handlers run while other threads compile; the exception comes once the kernels in work are done."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler")
    (tmp_path / "nvrtc.c").write_text(SLOW_COMPILER)
    library = str(tmp_path / "libnvrtc.so")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, str(tmp_path / "nvrtc.c")], check=True, timeout=30)
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), os.path.dirname(__file__)])
    environment = {"ONEHOP_NVRTC": library, "ONEHOP_JIT_ARCH": "90", "ONEHOP_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", PREPARE],
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    outcome, times = done.stdout.splitlines()
    assert outcome == "interrupted", done.stdout
    late, end = map(float, times.split())
    assert late < HEARD_S, done.stdout
    assert end < 0.7 + HEARD_S, done.stdout
