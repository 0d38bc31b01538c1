#!/usr/bin/env python3
# labels: timeout=300
"""Property: over a stand-in for NCCL (stand_in.c), the NCCL shim gives right results and leaves to NCCL what it does not
take. Ranks are processes on the host device.

    test_nccl_shim.py [CASE...]             all cases, or those
    test_nccl_shim.py --rank CASE RANK RANKS FOLDER      one rank; started by the former
"""

import ctypes
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback

BUILD = os.environ["ONEHOP_BUILD_DIR"]
SHIM = f"{BUILD}/nccl/libnccl.so.2"
STAND_IN = f"{BUILD}/tests/nccl_shim/libnccl.so.2"
OLD = f"{BUILD}/tests/nccl_shim/old/libnccl.so.2"
INT8, INT32, HALF, FLOAT, DOUBLE, BF16 = 0, 2, 6, 7, 8, 9
SUM, PROD, MAX, MIN, AVG = range(5)
ARGUMENT, USAGE, SYSTEM, REMOTE = 4, 5, 2, 6
SIZE = {INT8: 1, INT32: 4, HALF: 2, FLOAT: 4, DOUBLE: 8, BF16: 2}


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class Config(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", ctypes.c_int),
                ("rest", ctypes.c_int * 32)]


def pack(values, kind):
    if kind == BF16:
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return struct.pack(f"<{len(values)}{ {INT8: 'b', INT32: 'i', HALF: 'e', FLOAT: 'f', DOUBLE: 'd'}[kind]}", *values)


def unpack(data, kind):
    if kind == BF16:
        return [struct.unpack("<f", b"\0\0" + data[at:at + 2])[0] for at in range(0, len(data), 2)]
    count = len(data) // SIZE[kind]
    return list(struct.unpack(f"<{count}{ {INT8: 'b', INT32: 'i', HALF: 'e', FLOAT: 'f', DOUBLE: 'd'}[kind]}", data))


def check(condition, what):
    if not condition:
        raise AssertionError(what)


def equal(found, expected, what):
    if found != expected:
        raise AssertionError(f"{what}: expected {str(expected)[:300]}, found {str(found)[:300]}")


class Buffer:
    """Aligned to 64 bytes plus `offset`, with guard bytes around."""

    def __init__(self, data, offset=0):
        self.bytes = len(data)
        self.memory = ctypes.create_string_buffer(b"\xa5" * (self.bytes + 256), self.bytes + 256)
        self.at = (ctypes.addressof(self.memory) + 127) // 64 * 64 + offset
        ctypes.memmove(self.at, data, len(data))

    def data(self):
        start = self.at - ctypes.addressof(self.memory)
        raw = self.memory.raw
        check(set(raw[:start] + raw[start + self.bytes:]) <= {0xa5}, "bytes around a buffer were written")
        return raw[start:start + self.bytes]


class Rank:
    def __init__(self, rank, ranks, folder):
        self.rank, self.ranks, self.folder = rank, ranks, folder
        self.made = 0
        by = os.environ.get("TEST_LOAD", SHIM)
        self.nccl = ctypes.CDLL(by)
        for name in ("ncclGetErrorString", "ncclGetLastError"):
            getattr(self.nccl, name).restype = ctypes.c_char_p

    def call(self, name, *arguments, expected=0):
        result = getattr(self.nccl, name)(*arguments)
        equal(result, expected, name)

    def stand_in(self):
        return ctypes.CDLL(os.environ.get("ONEHOP_NCCL_REAL", STAND_IN))

    def count(self, name):
        return self.stand_in().stand_in_count(name.encode())

    def unique_id(self):
        """Of rank 0, for all."""
        self.made += 1
        path = f"{self.folder}/id{self.made}"
        unique = UniqueId()
        if self.rank == 0:
            self.call("ncclGetUniqueId", ctypes.byref(unique))
            with open(path + ".part", "wb") as file:
                file.write(bytes(unique))
            os.rename(path + ".part", path)
        while not os.path.exists(path):
            time.sleep(0.002)
        with open(path, "rb") as file:
            return UniqueId.from_buffer_copy(file.read())

    def meet(self, name):
        """A barrier beside NCCL."""
        with open(f"{self.folder}/{name}.{self.rank}", "w", encoding="utf-8"):
            pass
        while not all(os.path.exists(f"{self.folder}/{name}.{rank}") for rank in range(self.ranks)):
            time.sleep(0.002)

    def init(self):
        comm = ctypes.c_void_p()
        self.call("ncclCommInitRank", ctypes.byref(comm), self.ranks, self.unique_id(), self.rank)
        check(comm.value, "no communicator")
        return comm

    def values(self, kind, count, rank):
        """Small integers, none of them zero: exact sums in all types."""
        return [(7 * i + 3 * rank) % 9 + 1 if kind == INT8 else (7 * i + 5 * rank) % 23 + 1 for i in range(count)]

    def all_reduce(self, comm, kind=FLOAT, count=100, op=SUM, offset=0, in_place=False, ranks=None, rank=None, later=False):
        """Returns what checks the result, if `later`, else checks it."""
        ranks, rank = ranks or self.ranks, self.rank if rank is None else rank
        source = Buffer(pack(self.values(kind, count, rank), kind), offset)
        target = source if in_place else Buffer(b"\x5a" * count * SIZE[kind], offset)
        self.call("ncclAllReduce", ctypes.c_void_p(source.at), ctypes.c_void_p(target.at), ctypes.c_size_t(count), kind, op, comm, None)
        columns = zip(*[self.values(kind, count, r) for r in range(ranks)])
        join = {SUM: sum, MAX: max, MIN: min, AVG: lambda c: sum(c) / ranks,
                PROD: lambda c: __import__("math").prod(c)}[op]
        expected = [join(column) for column in columns]

        def verify(_source=source):  # which must live as long as the call is kept back
            equal(unpack(target.data(), kind), expected, f"all_reduce of {count}, type {kind}, op {op}")
        return verify if later else verify()

    def reduce_scatter(self, comm, kind=FLOAT, count=100, op=SUM, offset=0, in_place=False):
        whole = count * self.ranks
        source = Buffer(pack(self.values(kind, whole, self.rank), kind), offset)
        own = self.rank * count * SIZE[kind]
        target = None if in_place else Buffer(b"\x5a" * count * SIZE[kind], offset)
        at = source.at + own if in_place else target.at
        self.call("ncclReduceScatter", ctypes.c_void_p(source.at), ctypes.c_void_p(at), ctypes.c_size_t(count), kind, op, comm, None)
        sums = [sum(column) for column in zip(*[self.values(kind, whole, r) for r in range(self.ranks)])]
        data = source.data()[own:own + count * SIZE[kind]] if in_place else target.data()
        equal(unpack(data, kind), sums[self.rank * count:(self.rank + 1) * count], f"reduce_scatter of {count}, type {kind}")

    def all_gather(self, comm, kind=FLOAT, count=100, offset=0, in_place=False):
        own = pack(self.values(kind, count, self.rank), kind)
        target = Buffer(b"\x5a" * len(own) * self.ranks, offset)
        source = Buffer(own, offset)
        at = target.at + self.rank * len(own) if in_place else source.at
        if in_place:
            ctypes.memmove(at, own, len(own))
        self.call("ncclAllGather", ctypes.c_void_p(at), ctypes.c_void_p(target.at), ctypes.c_size_t(count), kind, comm, None)
        expected = [value for r in range(self.ranks) for value in self.values(kind, count, r)]
        equal(unpack(target.data(), kind), expected, f"all_gather of {count}, type {kind}")

    def destroy(self, comm):
        self.call("ncclCommDestroy", comm)

    def taken(self, comm, yes, **more):
        """Makes an all-reduce; does the stand-in see it?"""
        before = self.count("ncclAllReduce")
        self.all_reduce(comm, **more)
        equal(self.count("ncclAllReduce") - before, 0 if yes else 1, "all-reduces that NCCL saw")


# ---- cases: each runs on every rank. A list beside says how many ranks, and with which environment -------------------------

CASES = {}


def case(ranks=(2,), expect=(), **environment):
    """`expect`: pieces of text that rank 0's stderr must have."""
    def add(function):
        CASES[function.__name__] = (function, ranks, expect, environment)
        return function
    return add


@case(ranks=(2, 3, 4), expect=("communicators 1 taken, 0 not", "0 to NCCL"), ONEHOP_NCCL_STATS="1")
def every_type_and_size(r):
    comm = r.init()
    for kind in HALF, FLOAT, BF16:
        for count in 1, 3, 8, 1000, 1024, 30001:
            r.all_reduce(comm, kind, count)
            if count < 20000:
                r.reduce_scatter(comm, kind, count)
                r.all_gather(comm, kind, count)
    for kind in INT8, INT32, DOUBLE:  # bits are moved
        r.all_gather(comm, kind, 77)
    equal([r.count(f"nccl{name}") for name in ("AllReduce", "ReduceScatter", "AllGather")], [0, 0, 0], "calls that NCCL saw")
    r.destroy(comm)


@case(ranks=(3,))
def in_place_and_unaligned(r):
    comm = r.init()
    for kind in HALF, FLOAT, BF16:
        for offset in 0, SIZE[kind]:
            for in_place in False, True:
                # One rank alone has another address: what decides must not look at it.
                mine = offset if r.rank == 1 else 0
                r.all_reduce(comm, kind, 999, offset=mine, in_place=in_place and r.rank != 2)
                r.reduce_scatter(comm, kind, 999, offset=mine, in_place=in_place and r.rank != 2)
                r.all_gather(comm, kind, 999, offset=mine, in_place=in_place and r.rank != 2)
    equal(r.count("ncclAllReduce"), 0, "all-reduces that NCCL saw")
    r.destroy(comm)


@case(expect=("type 2", "reduction 4", "other functions 3", "longer than ONEHOP_NCCL_MAX_BYTES 1"), ONEHOP_NCCL_STATS="1",
      ONEHOP_NCCL_MAX_BYTES="4096")
def what_goes_to_nccl(r):
    comm = r.init()
    for kind in INT32, DOUBLE:
        r.taken(comm, False, kind=kind)
    for op in PROD, MAX, MIN, AVG:
        r.taken(comm, False, op=op)
    r.taken(comm, True, count=1024)
    r.taken(comm, False, count=1025)
    data = Buffer(pack([5.0, 7.0] if r.rank == 0 else [1.0, 1.0], FLOAT))
    r.call("ncclBroadcast", ctypes.c_void_p(data.at), ctypes.c_void_p(data.at), ctypes.c_size_t(2), FLOAT, 0, comm, None)
    equal(unpack(data.data(), FLOAT), [5.0, 7.0], "broadcast")
    r.call("ncclSend", ctypes.c_void_p(data.at), ctypes.c_size_t(2), FLOAT, 1 - r.rank, comm, None)
    r.call("ncclRecv", ctypes.c_void_p(data.at), ctypes.c_size_t(2), FLOAT, 1 - r.rank, comm, None)
    version = ctypes.c_int()
    r.call("ncclGetVersion", ctypes.byref(version))
    equal(version.value, 23007, "version")
    r.call("pncclGetVersion", ctypes.byref(version))
    equal(r.nccl.ncclGetErrorString(4), b"the stand-in's error", "ncclGetErrorString")
    equal(r.nccl.ncclGetLastError(comm), b"the stand-in's last error", "ncclGetLastError")
    r.destroy(comm)


@case()
def arguments_of_stubs(r):
    """Stubs know no signature: integers, doubles and what lies on the stack arrive, at the first call and later."""
    arguments = list(range(1, 7)) + [ctypes.c_double(i) for i in range(7, 15)] + [15, ctypes.c_double(16)]
    for name in "ncclParamGet", "ncclPutSignal", "pncclParamGet":
        for _ in range(3):
            r.call(name, *arguments, expected=1616)


@case()
def no_elements(r):
    comm = r.init()
    for _ in range(2):
        r.all_reduce(comm, count=0)
        r.reduce_scatter(comm, count=0)
        r.all_gather(comm, count=0)
        r.call("ncclAllReduce", None, None, ctypes.c_size_t(0), FLOAT, SUM, comm, None)
    equal(r.count("ncclAllReduce"), 0, "all-reduces that NCCL saw")
    r.taken(comm, True)
    r.destroy(comm)


@case(ranks=(2, 3), expect=("group 10",), ONEHOP_NCCL_STATS="1")
def groups(r):
    comm = r.init()
    start, end = (lambda: r.call("ncclGroupStart")), (lambda: r.call("ncclGroupEnd"))

    def grouped(yes, *calls, depth=1):
        before = r.count("ncclAllReduce")
        for _ in range(depth):
            start()
        verify = [one() for one in calls]
        for _ in range(depth):
            end()
        for one in verify:
            if one:
                one()
        equal(r.count("ncclAllReduce") - before, 0 if yes else len([v for v in verify if v]), "grouped all-reduces that NCCL saw")
        equal(r.stand_in().stand_in_depth(), 0, "open groups of NCCL")

    def one(**more):
        return lambda: r.all_reduce(comm, later=True, **more)

    data = Buffer(pack([float(r.rank + 1)], FLOAT))

    def cast():
        r.call("ncclBroadcast", ctypes.c_void_p(data.at), ctypes.c_void_p(data.at), ctypes.c_size_t(1), FLOAT, 1, comm, None)

    for _ in range(2):
        grouped(True, one())
        grouped(True, one(count=0))
        grouped(True, one(), depth=3)
        grouped(False, one(), one(count=7))  # 2 for the group
        grouped(False, one(), cast)
        grouped(False, cast, one())
        equal(unpack(data.data(), FLOAT), [2.0], "broadcast in a group")
        grouped(False, one(kind=INT32), one(kind=HALF))  # the second: for the group, the first for its type
        grouped(True)
        r.taken(comm, True)
    r.call("ncclGroupEnd", expected=USAGE)
    r.destroy(comm)


@case(ONEHOP_NCCL_GROUPS="0")
def groups_left_to_nccl(r):
    comm = r.init()
    r.call("ncclGroupStart")
    verify = r.all_reduce(comm, later=True)
    r.call("ncclGroupEnd")
    verify()
    equal(r.count("ncclAllReduce"), 1, "all-reduces that NCCL saw")
    r.taken(comm, True)
    r.destroy(comm)


@case(ranks=(4,))
def split_and_shrink(r):
    comm, child, other, none = r.init(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    r.call("ncclCommSplit", comm, r.rank % 2, -r.rank, ctypes.byref(child), None)
    check(child.value, "no child")
    members = [rank for rank in (3, 2, 1, 0) if rank % 2 == r.rank % 2]
    for _ in range(3):
        r.taken(child, True, ranks=2, rank=members.index(r.rank))
        r.taken(comm, True)
    r.call("ncclCommSplit", comm, 0 if r.rank < 3 else -1, r.rank, ctypes.byref(none), None)
    equal(bool(none.value), r.rank < 3, "a child of those that have a color")
    if r.rank < 3:
        r.taken(none, True, ranks=3)
        r.destroy(none)
    if r.rank != 1:
        exclude = (ctypes.c_int * 1)(1)
        r.call("ncclCommShrink", comm, exclude, 1, ctypes.byref(other), None, 0)
        r.taken(other, True, ranks=3, rank=r.rank - (r.rank > 1))
        r.destroy(other)
    r.destroy(child)
    r.taken(comm, True)
    r.destroy(comm)


@case(ranks=(2, 3))
def several_communicators(r):
    comms = [r.init() for _ in range(3)]
    for i in range(20):
        r.taken(comms[i % 3], True, count=50 + i)
    r.destroy(comms.pop(0))
    comms.append(r.init())
    for comm in comms:
        r.taken(comm, True)
        r.destroy(comm)


@case(ranks=(2, 3))
def threads(r):
    """Threads with a communicator each: calls and groups of one are nothing to the others."""
    comms = [r.init() for _ in range(3)]
    failed = []

    def work(index):
        try:
            for i in range(60):
                if i % 3:
                    r.all_reduce(comms[index], count=20 + index)
                    continue
                r.call("ncclGroupStart")
                verify = [r.all_reduce(comms[index], count=40 + k, later=True) for k in range(1 + (i % 2 and index == 0))]
                r.call("ncclGroupEnd")
                for one in verify:
                    one()
        except AssertionError as error:
            failed.append(error)

    running = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    check(not failed, failed)
    equal(r.count("ncclAllReduce"), 20, "all-reduces that NCCL saw, of two in a group")
    for comm in comms:
        r.destroy(comm)


@case(ONEHOP_NCCL="0")
def many_one_after_another(r):
    """Communicators come and go in another order than they were made."""
    kept, rng = [r.init() for _ in range(2)], random.Random(3)
    for _ in range(150):
        comm = ctypes.c_void_p()
        r.call("ncclCommSplit", kept[0], 0, 0, ctypes.byref(comm), None)
        kept.append(comm)
        if len(kept) > 40:
            r.destroy(kept.pop(2 + rng.randrange(30)))
    for comm in kept:
        r.taken(comm, False, count=3)
        r.destroy(comm)


@case()
def made_in_other_ways(r):
    comm, scalable, grouped = (ctypes.c_void_p() for _ in range(3))
    config = Config(ctypes.sizeof(Config), 0xcafebeef, 22700, -2**31)
    r.call("ncclCommInitRankConfig", ctypes.byref(comm), r.ranks, r.unique_id(), r.rank, ctypes.byref(config))
    r.taken(comm, True)
    unique = r.unique_id()
    r.call("ncclCommInitRankScalable", ctypes.byref(scalable), r.ranks, r.rank, 1, ctypes.byref(unique), None)
    r.taken(scalable, True)
    r.call("ncclGroupStart")
    r.call("ncclCommInitRank", ctypes.byref(grouped), r.ranks, r.unique_id(), r.rank)
    check(not grouped.value, "made before the group ended")
    r.call("ncclGroupEnd")
    r.taken(grouped, True)
    for one in comm, scalable, grouped:
        r.destroy(one)
    config.blocking = 0
    r.call("ncclCommInitRankConfig", ctypes.byref(comm), r.ranks, r.unique_id(), r.rank, ctypes.byref(config))
    r.taken(comm, False)
    child = ctypes.c_void_p()
    r.call("ncclCommSplit", comm, 0, 0, ctypes.byref(child), None)
    r.taken(child, False)
    r.destroy(child)
    r.destroy(comm)


@case()
def several_made_in_one_group(r):
    """As one thread that drives several GPUs does: all is NCCL's, on all ranks."""
    pair = [ctypes.c_void_p(), ctypes.c_void_p()]
    r.call("ncclGroupStart")
    for comm in pair:
        r.call("ncclCommInitRank", ctypes.byref(comm), r.ranks, r.unique_id(), r.rank)
    r.call("ncclGroupEnd")
    for comm in pair:
        r.taken(comm, False)
        r.destroy(comm)


@case()
def more_than_a_table_in_one_group(r):
    """One rank makes 65 communicators of its own before the one that both share."""
    comms = [ctypes.c_void_p() for _ in range(66)]
    shared = r.unique_id()
    r.call("ncclGroupStart")
    for comm in comms[:65] if r.rank == 0 else ():
        own = UniqueId()
        r.call("ncclGetUniqueId", ctypes.byref(own))
        r.call("ncclCommInitRank", ctypes.byref(comm), 1, own, 0)
    r.call("ncclCommInitRank", ctypes.byref(comms[65]), r.ranks, shared, r.rank)
    r.call("ncclGroupEnd")
    r.all_reduce(comms[65])


@case()
def without_the_shim_on_one(r):
    """One rank has no shim: all goes to NCCL, and is right from the first call on."""
    if r.rank == 1:
        r.nccl = ctypes.CDLL(STAND_IN)
    comm = r.init()
    for count in (100, 101, 102):
        if r.rank == 0:
            r.taken(comm, False, count=count)
        else:
            r.all_reduce(comm, count=count)
    r.destroy(comm)


@case()
def blocking_on_one(r):
    """`blocking` is one rank's own: where they differ all goes to NCCL, and is right."""
    comm = ctypes.c_void_p()
    config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 22700, 0 if r.rank else -2**31)
    r.call("ncclCommInitRankConfig", ctypes.byref(comm), r.ranks, r.unique_id(), r.rank, ctypes.byref(config))
    for count in (100, 101, 102):
        r.taken(comm, False, count=count)
    r.destroy(comm)


@case(ranks=(1,))
def nothing_destroyed(r):
    r.call("ncclCommDestroy", None)
    r.call("ncclCommAbort", None)


@case()
def group_simulated(r):
    """One rank asks for NCCL's estimate, which ends its group and launches nothing; then all goes on as before."""
    comm = r.init()
    r.taken(comm, True)
    if r.rank == 0:
        r.call("ncclGroupStart")
        r.call("ncclGroupStart")
        r.all_reduce(comm, later=True)
        r.call("ncclGroupEnd")
        r.call("ncclGroupSimulateEnd", None)
    r.meet("simulated")
    r.taken(comm, True)
    r.destroy(comm)


@case()
def window_in_a_group(r):
    """What NCCL puts off to the end of a group is in that group."""
    comm = r.init()
    window = ctypes.c_void_p()
    r.call("ncclGroupStart")
    r.call("ncclCommWindowRegister", comm, None, ctypes.c_size_t(0), ctypes.byref(window), 0)
    r.call("ncclGroupEnd")
    equal(window.value, comm.value, "the window's group")
    r.taken(comm, True)
    r.destroy(comm)


@case(ranks=(3,), ONEHOP_TIMEOUT_MS="20000")
def shrink_that_aborts(r):
    """Two ranks wait in a call for the third, and shrink without it, aborting: the call ends at once."""
    comm = r.init()
    r.all_reduce(comm)
    if r.rank == 2:
        r.meet("shrunk")
        return
    data = Buffer(pack([1.0], FLOAT))
    results = []

    def wait():
        results.append(r.nccl.ncclAllReduce(ctypes.c_void_p(data.at), ctypes.c_void_p(data.at), ctypes.c_size_t(1), FLOAT, SUM,
                                            comm, None))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    begun = time.monotonic()
    child = ctypes.c_void_p()
    r.call("ncclCommShrink", comm, (ctypes.c_int * 1)(2), 1, ctypes.byref(child), None, 1)
    thread.join()
    check(time.monotonic() - begun < 5, "the call on the parent went on")
    check(results != [0], "the call on the parent succeeded")
    r.meet("shrunk")


@case(NCCL_COMM_BLOCKING="0")
def non_blocking_by_variable(r):
    comm = r.init()
    r.taken(comm, False)
    r.destroy(comm)


@case(expect=("communicators 0 taken, 1 not", "communicator not taken 1"), ONEHOP_NCCL="0", ONEHOP_NCCL_STATS="1")
def switched_off(r):
    comm = r.init()
    r.taken(comm, False)
    r.destroy(comm)


@case(expect=("all goes to NCCL: a rank is switched off",), only={1: {"ONEHOP_NCCL": "0"}}, ONEHOP_LOG="info")
def switched_off_on_one(r):
    comm = r.init()
    r.taken(comm, False)
    r.destroy(comm)


@case(expect=("ranks are set differently",), only={1: {"ONEHOP_NCCL_MAX_BYTES": "64"}}, ONEHOP_LOG="info")
def set_differently(r):
    comm = r.init()
    r.taken(comm, False)
    r.destroy(comm)


@case(ranks=(3,), expect=("no context could be made",), only={2: {"ONEHOP_ISA": "neither"}}, ONEHOP_LOG="info")
def one_cannot(r):
    comm = r.init()
    r.taken(comm, False)
    r.destroy(comm)


@case(expect=("is \"yes\": expected an integer",), ONEHOP_NCCL_GROUPS="yes")
def setting_not_understood(r):
    comm = r.init()
    r.taken(comm, False)
    r.destroy(comm)


@case(ranks=(3,))
def ends(r):
    error = ctypes.c_int(9)
    comm = r.init()
    r.taken(comm, True)
    r.call("ncclCommFinalize", comm)
    r.destroy(comm)
    comm = r.init()
    r.taken(comm, True)
    if r.rank == 0:  # the others look, and see no error in that
        r.destroy(comm)
    r.meet("destroyed")
    for _ in range(20):
        if r.rank:
            r.call("ncclCommGetAsyncError", comm, ctypes.byref(error))
            equal(error.value, 0, "error after a peer has left")
            time.sleep(0.02)
    if r.rank:
        r.destroy(comm)
    comm = r.init()
    r.taken(comm, True)
    r.call("ncclCommSuspend", comm, 0)
    r.taken(comm, False)
    r.call("ncclCommRevoke", comm, 0)
    r.call("ncclCommAbort", comm)
    comm = r.init()
    r.taken(comm, True)
    r.call("ncclCommAbort", comm)


@case(ranks=(3,))
def errors(r):
    """A peer that is gone: the call says so, and so do ncclCommGetAsyncError and ncclGetLastError. NCCL's own error too."""
    error = ctypes.c_int()
    comm = r.init()
    r.taken(comm, True)
    r.stand_in().stand_in_async(comm, 3)
    r.call("ncclCommGetAsyncError", comm, ctypes.byref(error))
    equal(error.value, 3, "NCCL's own error")
    r.stand_in().stand_in_async(comm, 0)
    if r.rank == 1:
        os._exit(0)
    data = Buffer(pack([1.0], FLOAT))
    result = r.nccl.ncclAllReduce(ctypes.c_void_p(data.at), ctypes.c_void_p(data.at), ctypes.c_size_t(1), FLOAT, SUM, comm, None)
    equal(result, REMOTE, "all-reduce without a peer")
    said = []
    thread = threading.Thread(target=lambda: said.append(r.nccl.ncclGetLastError(comm)))
    thread.start()
    thread.join()
    said.append(r.nccl.ncclGetLastError(comm))
    check(all(b"rank 1" in one for one in said), said)
    r.call("ncclCommGetAsyncError", comm, ctypes.byref(error))
    equal(error.value, REMOTE, "ncclCommGetAsyncError")
    r.call("ncclCommAbort", comm)
    result = r.nccl.ncclAllReduce(None, ctypes.c_void_p(data.at), ctypes.c_size_t(1), FLOAT, SUM, None, None)
    equal(result, ARGUMENT, "all-reduce without a communicator")
    equal(r.nccl.ncclGetLastError(None), b"the stand-in's last error", "last error")


@case()
def abort_beside_a_call(r):
    """A call that waits for a peer ends when another thread aborts the communicator; the peer's own call fails too."""
    comm = r.init()
    r.taken(comm, True)
    data = Buffer(pack([1.0], FLOAT))
    results = []

    def wait():
        results.append(r.nccl.ncclAllReduce(ctypes.c_void_p(data.at), ctypes.c_void_p(data.at), ctypes.c_size_t(1), FLOAT, SUM, comm, None))

    if r.rank == 0:
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.3)
        begun = time.monotonic()
        r.call("ncclCommAbort", comm)
        thread.join()
        check(time.monotonic() - begun < 2, "the abort took too long")
        r.meet("aborted")
    else:
        r.meet("aborted")
        error = ctypes.c_int(9)
        r.call("ncclCommGetAsyncError", comm, ctypes.byref(error))
        equal(error.value, 0, "error before a call meets it")
        wait()
        r.call("ncclCommAbort", comm)
    equal(results, [REMOTE], "the call's result")


@case(STAND_IN_FAIL="ncclCommInitRank:3")
def init_fails(r):
    comm = ctypes.c_void_p()
    r.call("ncclCommInitRank", ctypes.byref(comm), r.ranks, r.unique_id(), r.rank, expected=3)


@case(ONEHOP_NCCL_REAL=OLD, expect=("has no ncclParamGet",))
def older_library(r):
    comm = r.init()
    r.taken(comm, True)
    r.call("ncclParamGet", expected=USAGE)
    r.call("ncclParamGet", expected=USAGE)
    r.call("ncclCommShrink", comm, None, 0, None, None, 0, expected=USAGE)
    check(r.nccl.ncclGetErrorString(5) == b"invalid usage", "ncclGetErrorString of ours")
    equal(r.nccl.ncclGetLastError(comm), b"", "ncclGetLastError of ours")
    r.destroy(comm)


@case(ranks=(1,), ONEHOP_NCCL_REAL="/nowhere/libnccl.so.2", expect=("set ONEHOP_NCCL_REAL",))
def no_library(r):
    comm = ctypes.c_void_p()
    r.call("ncclCommInitRank", ctypes.byref(comm), 1, UniqueId(), 0, expected=SYSTEM)
    r.call("ncclGetVersion", ctypes.byref(ctypes.c_int()), expected=SYSTEM)
    r.call("ncclAllReduce", None, None, ctypes.c_size_t(0), FLOAT, SUM, None, None, expected=SYSTEM)
    check(r.nccl.ncclGetErrorString(2) == b"unhandled system error", "ncclGetErrorString of ours")


@case(ranks=(1,), ONEHOP_NCCL_REAL=SHIM, expect=("own shim",))
def real_is_the_shim(r):
    r.call("ncclGetVersion", ctypes.byref(ctypes.c_int()), expected=SYSTEM)


def reenter(r):
    comm, alone = r.init(), ctypes.c_void_p()
    r.taken(comm, True)
    r.call("ncclCommInitAll", ctypes.byref(alone), 1, None)
    check(alone.value, "no communicator")
    for grouped in False, True:
        data = Buffer(pack([float(r.rank + 1)], FLOAT))
        if grouped:
            r.call("ncclGroupStart")
        r.call("ncclBcast", ctypes.c_void_p(data.at), ctypes.c_size_t(1), FLOAT, 1, comm, None)
        if grouped:
            r.call("ncclGroupEnd")
        equal(unpack(data.data(), FLOAT), [2.0], "ncclBcast")
    before = r.count("ncclAllReduce")
    target = Buffer(b"\0" * 4)
    source = Buffer(pack([3.0, 4.0], FLOAT))
    # The average is NCCL's, which calls all-reduce for a sum by the exported name: not the program's call.
    r.call("ncclReduceScatter", ctypes.c_void_p(source.at), ctypes.c_void_p(target.at), ctypes.c_size_t(1), FLOAT, AVG, comm, None)
    equal(unpack(target.data(), FLOAT), [3.0 + r.rank], "reduce_scatter by all_reduce")
    equal(r.count("ncclAllReduce"), before + 1, "all-reduces of NCCL")
    equal(r.stand_in().stand_in_depth(), 0, "open groups of NCCL")
    r.destroy(alone)
    r.destroy(comm)


@case(STAND_IN_REENTER="1")
def real_calls_itself(r):
    reenter(r)


@case(LD_PRELOAD=SHIM, TEST_LOAD="libnccl.so.2", TEST_BEFORE=STAND_IN, ONEHOP_NCCL_REAL="", STAND_IN_REENTER="1")
def real_calls_itself_through_the_shim(r):
    """The real one is mapped before, so that its calls of its own names reach the shim; nobody names its path."""
    reenter(r)


@case(LD_PRELOAD=SHIM, TEST_LOAD="libnccl.so.2")
def preloaded(r):
    check(hasattr(ctypes.CDLL(None), "ncclOnehopShim"), "the shim is not preloaded")
    comm = r.init()
    r.taken(comm, True)
    r.destroy(comm)


@case(TEST_LOAD=f"{BUILD}/nccl/libonehop-nccl.so")
def by_its_other_name(r):
    comm = r.init()
    r.taken(comm, True)
    r.destroy(comm)


@case(TEST_BEFORE="wheel", ONEHOP_NCCL_REAL="")
def beside_pytorch(r):
    """site-packages/torch/lib/libtorch_x.so is mapped: the wheel of NCCL lies beside torch."""
    comm = r.init()
    r.all_reduce(comm)
    r.destroy(comm)
    with open("/proc/self/maps", encoding="utf-8") as file:
        check(f"{r.folder}/site-packages/nvidia/nccl/lib/libnccl.so.2" in file.read(), "another library than the wheel's")


@case(ranks=(1,))
def nothing_at_load(r):
    """Loading opens nothing: no driver, no real library."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        maps = file.read()
    check("libcuda" not in maps and STAND_IN not in maps, "loaded with the shim")


@case(ranks=(2,))
def fork_after_use(r):
    comm = r.init()
    r.taken(comm, True)
    child = os.fork()
    if child == 0:
        os._exit(0 if r.nccl.ncclGetVersion(ctypes.byref(ctypes.c_int())) == 0 else 1)
    equal(os.waitpid(child, 0)[1], 0, "a forked child's status")
    r.taken(comm, True)
    r.destroy(comm)


@case(ranks=(2, 4))
def random_calls(r):
    comm, rng = r.init(), random.Random(7)
    for _ in range(150):
        kind, count, op = rng.choice((HALF, FLOAT, BF16, INT32)), rng.choice((0, 1, 5, 64, 500)), rng.choice((SUM, SUM, SUM, MAX))
        what, grouped = rng.randrange(3), rng.random() < 0.3
        if grouped and what == 0:
            r.call("ncclGroupStart")
            verify = [r.all_reduce(comm, kind, count, op, later=True) for _ in range(rng.randrange(1, 3))]
            r.call("ncclGroupEnd")
            for one in verify:
                one()
        elif what == 0:
            r.all_reduce(comm, kind, count, op)
        elif what == 1:
            r.reduce_scatter(comm, kind, count)
        else:
            r.all_gather(comm, kind, count)
    r.destroy(comm)


# ---- running them -------------------------------------------------------------------------------------------------------

def run_rank(name, rank, ranks, folder):
    before = os.environ.get("TEST_BEFORE")
    if before == "wheel":
        before = f"{folder}/site-packages/torch/lib/libtorch_x.so"
    mapped = ctypes.CDLL(before, mode=ctypes.RTLD_GLOBAL) if before else None
    try:
        CASES[name][0](Rank(rank, ranks, folder))
    except Exception:  # noqa: BLE001: whatever it is, the parent prints it
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    del mapped


def lay_out_wheel(folder):
    for part in "site-packages/torch/lib", "site-packages/nvidia/nccl/lib":
        os.makedirs(f"{folder}/{part}")
    shutil.copy(STAND_IN, f"{folder}/site-packages/nvidia/nccl/lib/libnccl.so.2")
    shutil.copy(f"{BUILD}/libonehop.so", f"{folder}/site-packages/torch/lib/libtorch_x.so")


def run_case(name, ranks):
    """The complaint, or ""."""
    _, _, expect, environment = CASES[name]
    only = environment.get("only", {})
    with tempfile.TemporaryDirectory(prefix="onehop-shim-") as folder:
        if environment.get("TEST_BEFORE") == "wheel":
            lay_out_wheel(folder)
        processes = []
        for rank in range(ranks):
            variables = {key: value for key, value in os.environ.items() if not key.startswith(("ONEHOP_NCCL", "NCCL_"))}
            variables |= {"ONEHOP_DEVICE": "host", "ONEHOP_NCCL_REAL": STAND_IN, "ONEHOP_INIT_TIMEOUT_MS": "20000",
                          "ONEHOP_TIMEOUT_MS": "20000"}
            variables |= {key: value for key, value in environment.items() if key != "only"}
            variables |= only.get(rank, {})
            processes.append(subprocess.Popen([sys.executable, __file__, "--rank", name, str(rank), str(ranks), folder], env=variables,
                                              stderr=subprocess.PIPE, text=True))
        outputs, complaint, limit = [], "", time.monotonic() + 60
        for rank, process in enumerate(processes):
            try:
                outputs.append(process.communicate(timeout=max(1, limit - time.monotonic()))[1])
            except subprocess.TimeoutExpired:
                process.kill()
                outputs.append(process.communicate()[1] + "no end within 60 s")
            if process.returncode and not complaint:
                complaint = f"rank {rank} ended with {process.returncode}: {outputs[-1]}"
        missing = [text for text in expect if text not in outputs[0]]
        if missing and not complaint:
            complaint = f"rank 0 did not say {missing}, but: {outputs[0]}"
        return complaint


def main():
    if sys.argv[1:2] == ["--rank"]:
        return run_rank(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    if not os.path.exists(SHIM):
        print("SKIPPED: no shim was built")
        return 77
    failed = 0
    for name in sys.argv[1:] or CASES:
        for ranks in CASES[name][1]:
            begun = time.monotonic()
            complaint = run_case(name, ranks)
            print(f"{'FAIL' if complaint else 'ok  '}  {name}, {ranks} ranks ({time.monotonic() - begun:.1f} s)", flush=True)
            if complaint:
                failed += 1
                print("      " + complaint.strip().replace("\n", "\n      "), flush=True)
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
