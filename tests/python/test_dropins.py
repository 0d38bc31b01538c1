"""Property: onehop.sglang.CustomAllReduceV2 and onehop.vllm.CustomAllreduce stand in for the engines' classes, on the host.

Between 2 and 4 processes of a gloo group; then what needs no peer.
"""

import contextlib
import ctypes
import inspect
import os
import pathlib
import subprocess
import sys
import traceback
import types

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import onehop  # noqa: E402
import onehop.sglang  # noqa: E402
import onehop.vllm  # noqa: E402
import ranks  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT = 64 << 10
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# ---- checks between processes ----------------------------------------------------------------------------------------


def given(rank, count, dtype, call=0):
    """Integers whose sum over the ranks is exact in every type."""
    return ((torch.arange(count) * 7 + rank * 5 + call * 3) % 16).to(dtype)


def expect_sum(out, world, count, dtype, call=0):
    wanted = sum(given(rank, count, torch.float32, call) for rank in range(world)).to(dtype)
    assert out.dtype == dtype and torch.equal(out.flatten(), wanted), (count, dtype)


def make_sglang(group):
    comm = onehop.sglang.CustomAllReduceV2(group, "cpu", LIMIT, max_push_size=20000, max_pull_size=LIMIT)
    assert not comm.disabled
    return comm


def check_sglang_attributes(group, rank, world):
    comm = make_sglang(group)
    assert (comm.rank, comm.world_size, comm.max_size) == (rank, world, LIMIT)
    assert isinstance(comm.obj, onehop.AllReduce)
    assert (comm.max_push_size, comm.max_pull_size) == (20480, LIMIT), "rounded up to 4096"
    for rows, graph in ((comm.config.eager, False), (comm.config.graph, True)):
        assert [row.max_bytes for row in rows] == sorted({row.max_bytes for row in rows})
        assert rows[-1].max_bytes == LIMIT
        for row in rows:
            choice = comm.obj.would_use(row.max_bytes, torch.bfloat16, graph=graph)
            assert (choice.algorithm, choice.source, choice.blocks) == row[1:]
    comm.close()


def check_sglang_which_tensors(group, rank, world):
    comm = make_sglang(group)
    for count in (1, 3, 16, LIMIT // 4):
        assert comm.should_custom_ar(torch.empty(count))
    assert comm.should_custom_ar(torch.empty(LIMIT // 2, dtype=torch.bfloat16))
    assert comm.should_custom_ar(torch.empty(4, 8)[2])
    assert not comm.should_custom_ar(torch.empty(0))
    assert not comm.should_custom_ar(torch.empty(LIMIT // 4 + 1))
    assert not comm.should_custom_ar(torch.empty(16, dtype=torch.float64))
    assert not comm.should_custom_ar(torch.empty(16, dtype=torch.int32))
    assert comm.should_custom_ar(torch.empty(4, 8).T), "one block, if in another order"
    assert not comm.should_custom_ar(torch.empty(4, 8)[:, :4])
    assert not comm.should_custom_ar(torch.empty(1).expand(4))
    assert not comm.should_custom_ar(torch.empty(16, device="meta"))
    comm.close()
    comm = onehop.sglang.CustomAllReduceV2(group, "cpu", 4096, max_pull_size=8192)
    assert comm.should_custom_ar(torch.empty(2048)), "storage asked for is there to be used"
    comm.uncap_pull_thresholds()
    assert comm.should_custom_ar(torch.empty(2048)) and not comm.should_custom_ar(torch.empty(2049))
    comm.close()
    comm = onehop.sglang.CustomAllReduceV2(group, "cpu", 4096)
    assert comm.max_pull_size > 4096
    comm.uncap_pull_thresholds()
    assert not comm.should_custom_ar(torch.empty(1025)), "storage that nobody asked for raises no limit"
    comm.close()


def check_sglang_sums(group, rank, world):
    comm = make_sglang(group)
    for call, (dtype, count) in enumerate((d, n) for d in DTYPES for n in (1, 16, 1003, LIMIT // 4)):
        inp = given(rank, count, dtype, call)
        out = comm.custom_all_reduce(inp)
        assert out is not inp and out.data_ptr() != inp.data_ptr()
        expect_sum(out, world, count, dtype, call)
        expect_sum(given(rank, count, dtype, call) * 0 + out, world, count, dtype, call)
        assert torch.equal(inp, given(rank, count, dtype, call)), "the input has changed"
    shaped = comm.custom_all_reduce(given(rank, 24, torch.float32).view(2, 3, 4))
    assert shaped.shape == (2, 3, 4)
    comm.close()


def check_sglang_override(group, rank, world):
    comm = make_sglang(group)
    for call, name in enumerate(("1shot_push", "1shot_pull", "2shot_pull", "2shot_push")):
        comm.override_algo = name
        algorithm = comm.override_algo
        assert algorithm == onehop.Algorithm(("", "1shot_push", "2shot_push", "1shot_pull", "2shot_pull").index(name))
        before = comm.obj.stats().calls_by.get(algorithm, 0)
        expect_sum(comm.custom_all_reduce(given(rank, 1040, torch.bfloat16, call)), world, 1040, torch.bfloat16, call)
        assert comm.obj.stats().calls_by[algorithm] == before + 1
    comm.override_algo = None
    expect_sum(comm.custom_all_reduce(given(rank, 1040, torch.float32)), world, 1040, torch.float32)
    comm.close()


def record(comm):
    """A host stream takes the place of a GPU's: calls between its begin and end are captured."""
    stream = comm.obj.host_stream = comm.obj.host_stream or onehop.HostStream()
    onehop.sglang.being_captured = lambda inp: True
    stream.capture_begin()
    return stream


def replay(stream, graph):
    graph.launch(stream.handle)
    stream.synchronize()


def check_sglang_captured(group, rank, world):
    comm = make_sglang(group)
    names = ("1shot_push", "1shot_pull", "2shot_pull")
    with comm.capture():
        # Warm-up: nothing is captured.
        expect_sum(comm.custom_all_reduce(given(rank, 1040, torch.float32)), world, 1040, torch.float32)
        assert comm.get_graph_capture_bases() == ([], [], [])
        stream = record(comm)
        inputs, outputs = [torch.empty(1040) for _ in names], []
        for name, inp in zip(names, inputs, strict=True):
            comm.override_algo = name
            outputs.append(comm.custom_all_reduce(inp))
        graph = stream.capture_end()
    for name, inp, out in zip(names, inputs, outputs, strict=True):
        assert (out is inp) == (name == "2shot_pull"), name
    for call in range(3):
        for inp in inputs:
            inp.copy_(given(rank, 1040, torch.float32, call))
        replay(stream, graph)
        for out in outputs:
            expect_sum(out, world, 1040, torch.float32, call)
    # Outside capture() a captured call is as an eager one.
    stream = record(comm)
    inp = given(rank, 1040, torch.float32)
    out = comm.custom_all_reduce(inp)
    graph = stream.capture_end()
    replay(stream, graph)
    assert out is not inp
    expect_sum(out, world, 1040, torch.float32)
    comm.close()


def check_sglang_mapped_by_the_caller(group, rank, world):
    comm = make_sglang(group)
    pointers = onehop.vllm.CustomAllreduce.create_shared_buffer(16384, group=group)
    memory = torch.frombuffer((ctypes.c_char * 16384).from_address(pointers[rank]), dtype=torch.float32)
    inputs = memory[16:1056], memory[2048:3088]
    with comm.capture():
        stream = record(comm)
        outputs = []
        for name, inp in zip(("1shot_pull", "2shot_pull"), inputs, strict=True):
            comm.override_algo = name
            outputs.append(comm.custom_all_reduce(inp))
        graph = stream.capture_end()
        bases, chunks, offsets = comm.get_graph_capture_bases()
        assert bases == [(pointers[rank] + 64, 4160), (pointers[rank] + 8192, 4160)]
        assert (chunks, offsets) == ([[0], [1]], [0, 0])
        comm.obj.capture_end = None  # which would map them too
        comm.register_peer_mapped_inputs([[pointer + at for pointer in pointers] for at in (64, 8192)])
    stats = comm.obj.stats()
    assert (stats.registrations_direct, stats.registrations_staged) == (2, 0)
    for call in range(2):
        for inp in inputs:
            inp.copy_(given(rank, 1040, torch.float32, call))
        replay(stream, graph)
        for out in outputs:
            expect_sum(out, world, 1040, torch.float32, call)
    assert outputs[1] is inputs[1]
    del graph
    dist.barrier(group)
    comm.close()
    del inputs, outputs, inp, out, memory
    onehop.vllm.CustomAllreduce.free_shared_buffer(pointers, group=group)


def check_sglang_capture_that_fails(group, rank, world):
    comm = make_sglang(group)
    try:
        with comm.capture():
            raise KeyError("of the caller")
    except KeyError:
        pass
    with comm.capture():
        pass
    expect_sum(comm.custom_all_reduce(given(rank, 33, torch.float32)), world, 33, torch.float32)
    comm.close()


def check_sglang_memory_saver(group, rank, world):
    comm = make_sglang(group)
    os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
    with comm.capture(), comm.obj.capture():  # the outer one has begun nothing
        pass
    del os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"]
    comm.close()


def check_sglang_closed(group, rank, world):
    comm = make_sglang(group)
    comm.close()
    comm.close()
    assert comm.disabled and comm.obj is None and not comm.should_custom_ar(torch.empty(16))
    try:
        comm.custom_all_reduce(torch.empty(16))
    except RuntimeError as error:
        assert "disabled or closed" in str(error)
    else:
        raise AssertionError("a closed one sums")


def check_one_rank_is_disabled(group, rank, world):
    alone = [dist.new_group([one], backend="gloo") for one in range(world)][rank]
    for comm in (onehop.sglang.CustomAllReduceV2(alone, "cpu"), onehop.vllm.CustomAllreduce(alone, "cpu")):
        assert comm.disabled and not comm.should_custom_ar(torch.empty(16))
        with comm.capture():
            pass
        comm.close()
    assert onehop.sglang.can_use_custom_all_reduce_v2(group, "cpu")
    assert not onehop.sglang.can_use_custom_all_reduce_v2(alone, "cpu")


def check_vllm(group, rank, world):
    comm = onehop.vllm.CustomAllreduce(group, "cpu", LIMIT)
    assert not comm.disabled and isinstance(comm.obj, onehop.AllReduce)
    for call, dtype in enumerate(DTYPES):
        inp = given(rank, 1003, dtype, call)
        out = comm.custom_all_reduce(inp)
        assert out is not inp and torch.equal(inp, given(rank, 1003, dtype, call))
        expect_sum(out, world, 1003, dtype, call)
    out = torch.empty(64)
    assert comm.all_reduce(given(rank, 64, torch.float32), out=out, registered=True) is out
    expect_sum(out, world, 64, torch.float32)
    assert comm.custom_all_reduce(torch.empty(LIMIT)) is None
    assert comm.custom_all_reduce(torch.empty(4, 8)[:, :4]) is None
    inp = given(rank, 96, torch.float32).view(4, 3, 8).permute(2, 0, 1)
    out = comm.custom_all_reduce(inp)
    assert (out.shape, out.stride()) == (inp.shape, inp.stride())
    expect_sum(out.permute(1, 2, 0), world, 96, torch.float32)
    with comm.capture():
        expect_sum(comm.custom_all_reduce(given(rank, 16, torch.float32)), world, 16, torch.float32)
        comm.register_graph_buffers()
    comm.register_graph_buffers()
    expect_sum(comm.custom_all_reduce(given(rank, 16, torch.float32)), world, 16, torch.float32)
    comm.close()
    assert comm.custom_all_reduce(torch.empty(16)) is None


def check_vllm_gathers_and_scatters(group, rank, world):
    comm = onehop.vllm.CustomAllreduce(group, "cpu", LIMIT, 4096, None, 8192)
    assert comm.fully_connected and not comm.mnnvl_lamport_ag_multicast_ptr
    for dtype in DTYPES:
        out = comm.custom_all_gather(given(rank, 24, dtype).view(6, 4))
        assert out.shape == (6 * world, 4)
        for peer in range(world):
            assert torch.equal(out[6 * peer : 6 * peer + 6].flatten(), given(peer, 24, dtype))
        out = comm.custom_reduce_scatter(given(rank, 12 * world, dtype).view(3 * world, 4))
        assert out.shape == (3, 4)
        wanted = sum(given(peer, 12 * world, torch.float32) for peer in range(world)).to(dtype)
        assert torch.equal(out.flatten(), wanted[12 * rank : 12 * rank + 12])
    assert comm.custom_all_gather(torch.empty(1025)) is None, "longer than max_all_gather_size"
    assert comm.custom_reduce_scatter(torch.empty(world + 1)) is None
    assert comm.custom_reduce_scatter(torch.empty(4096)) is None
    assert not comm.should_mnnvl_multimem_reduce_scatter(torch.empty(world))
    comm.close()
    assert not comm.fully_connected
    assert comm.custom_reduce_scatter(torch.empty(world)) is comm.custom_all_gather(torch.empty(world)) is None


def check_vllm_batch_invariant(group, rank, world):
    """Any length, and a row's bits do not depend on the rows beside it."""
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    comm = onehop.vllm.CustomAllreduce(group, "cpu", 4096)
    del os.environ["VLLM_BATCH_INVARIANT"]
    assert comm.batch_invariant
    torch.manual_seed(rank)
    long = torch.randn(64, 1024)
    assert comm.should_custom_ar(long)
    out = comm.custom_all_reduce(long)
    for rows in (1, 3, 17):
        assert torch.equal(comm.custom_all_reduce(long[:rows]), out[:rows])
    assert not onehop.vllm.CustomAllreduce.batch_invariant
    comm.close()


def check_vllm_registers_nothing(group, rank, world):
    comm = onehop.vllm.CustomAllreduce(group, "cpu", LIMIT, register_graph_buffers=False)
    with comm.capture(), comm.obj.capture():  # the outer one has begun nothing
        pass
    with comm.capture():
        comm.register_graph_buffers()
        expect_sum(comm.custom_all_reduce(given(rank, 16, torch.float32)), world, 16, torch.float32)
    comm.close()


def check_sglang_push_only(group, rank, world):
    for zero in ({"max_pull_size": 0}, {"max_pull_blocks": 0}):
        comm = onehop.sglang.CustomAllReduceV2(group, "cpu", LIMIT, **zero)
        assert not (comm.disabled or comm.pull_enabled or comm.max_pull_size or comm.has_multicast)
        for call, count in enumerate((16, 1040, LIMIT // 4)):
            expect_sum(comm.custom_all_reduce(given(rank, count, torch.float32, call)), world, count, torch.float32, call)
        assert not [one for one in comm.obj.stats().calls_by if one in onehop.sglang.PULLS]
        comm.close()


def check_sglang_sizes_of_the_environment(group, rank, world):
    names = {"_MAX_SIZE_KB": "8", "_PUSH_SIZE_KB": "16", "_PULL_SIZE_KB": "0"}
    names = {
        f"SGLANG_{'' if name == '_MAX_SIZE_KB' else 'FORCE_'}CUSTOM_ALL_REDUCE_V2{name}": value
        for name, value in names.items()
    }
    os.environ.update(names)
    comm = onehop.sglang.CustomAllReduceV2(group, "cpu", max_pull_size=LIMIT)
    for name in names:
        del os.environ[name]
    assert (comm.max_size, comm.max_push_size, comm.max_pull_size) == (16 << 10, 16 << 10, 0)
    comm.close()


def check_sglang_piecewise(group, rank, world):
    """Nothing of a piecewise capture is noted, and its calls are as eager ones."""
    comm = make_sglang(group)
    name = "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph"
    sys.modules[name] = types.SimpleNamespace(is_in_tc_piecewise_cuda_graph=lambda: True)
    inp = torch.empty(1040)
    with comm.capture():
        stream = record(comm)
        outs = []
        for algorithm in (None, "1shot_pull", "2shot_pull"):
            comm.override_algo = algorithm
            outs.append(comm.custom_all_reduce(inp))
        graph = stream.capture_end()
        assert comm.get_graph_capture_bases() == ([], [], [])
    del sys.modules[name]
    inp.copy_(given(rank, 1040, torch.float32))
    replay(stream, graph)
    for out in outs:
        assert out is not inp
        expect_sum(out, world, 1040, torch.float32)
    comm.close()


def check_vllm_shared_buffers(group, rank, world):
    pointers = onehop.vllm.CustomAllreduce.create_shared_buffer(4096, group=group)
    ctypes.memset(pointers[rank], rank + 1, 4096)
    dist.barrier(group)
    for peer, pointer in enumerate(pointers):
        assert ctypes.string_at(pointer, 4096) == bytes([peer + 1]) * 4096
    dist.barrier(group)
    onehop.vllm.CustomAllreduce.free_shared_buffer(pointers, group=group)
    onehop.vllm.CustomAllreduce.free_shared_buffer([0] * world, group=group)


CHECKS = {name: value for name, value in list(globals().items()) if name.startswith("check_")}


def every_check(rank, world):
    """What each said; what comes after a failure is not reached, for the ranks may have parted."""
    group = dist.new_group(backend="gloo")
    said, being_captured = {}, onehop.sglang.being_captured
    for name, check in CHECKS.items():
        try:
            check(group, rank, world)
            onehop.sglang.being_captured = being_captured
            dist.barrier(group)
        except BaseException:
            said[name] = traceback.format_exc()
            break
        said[name] = ""
    return said


@pytest.fixture(scope="module", params=(2, 4))
def found(request):
    """What each rank said of each check."""
    everyone = ranks.run(request.param, every_check)
    return {name: [one.get(name, "not reached") for one in everyone] for name in CHECKS}


@pytest.mark.parametrize("name", CHECKS)
def test_between_processes(found, name):
    assert not any(found[name]), "\n".join(found[name])


def test_matrix_of_the_reference():
    """The program that runs it on GPUs, on the host device."""
    program = ROOT / "tests" / "gpu" / "python_reference.py"
    done = subprocess.run([sys.executable, program, "--cpu"], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0 and "18/18 at W=2 against gloo" in done.stdout, done.stdout + done.stderr


# ---- what needs no peer ----------------------------------------------------------------------------------------------


class Recorded:
    """An AllReduce that only notes how it is called."""

    def __init__(self, choice=None, inputs=()):
        self.calls, self.choice, self.inputs, self._capturing = [], choice, list(inputs), False

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))

    @contextlib.contextmanager
    def capture(self):
        self._capturing = True
        yield
        self._capturing = False

    def would_use(self, inp, *, graph):
        assert graph
        return self.choice

    def capture_inputs(self):
        return self.inputs


def bare(kind, obj):
    comm = kind.__new__(kind)
    comm.disabled, comm.obj, comm.device, comm._override = False, obj, torch.device("cpu"), None
    return comm


@pytest.mark.parametrize("algorithm", [onehop.Algorithm.ONESHOT_PUSH, onehop.Algorithm.TWOSHOT_PULL])
def test_a_captured_call_does_what_the_table_says(monkeypatch, algorithm):
    obj = Recorded(types.SimpleNamespace(algorithm=algorithm, source=onehop.Source.GRAPH))
    comm = bare(onehop.sglang.CustomAllReduceV2, obj)
    monkeypatch.setattr(onehop.sglang, "being_captured", lambda inp: True)
    inp = torch.empty(16)
    with comm.capture():
        out = comm.custom_all_reduce(inp)
    if algorithm == onehop.Algorithm.TWOSHOT_PULL:
        assert out is inp
        assert obj.calls == [("all_reduce_", (inp,), {"algorithm": algorithm, "source": onehop.Source.GRAPH})]
    else:
        assert out is None  # what Recorded returned
        assert obj.calls == [("all_reduce", (inp,), {"algorithm": None})]


def test_inputs_over_several_allocations(monkeypatch):
    """A tensor over chunks of 0x1000 that starts in the middle of one."""
    comm = bare(onehop.sglang.CustomAllReduceV2, Recorded(inputs=[onehop.CapturedInput(0x1800, 0, 0x2000)]))
    monkeypatch.setattr(onehop.sglang, "allocation_of", lambda at, size, device: (at // 0x1000 * 0x1000, 0x1000))
    with comm.capture():
        bases, chunks, offsets = comm.get_graph_capture_bases()
    assert (bases, chunks, offsets) == ([(0x1000, 0x1000), (0x2000, 0x1000), (0x3000, 0x1000)], [[0, 1, 2]], [0x800])


def test_register_graph_buffers_ends_the_capture():
    obj = Recorded()
    comm = bare(onehop.vllm.CustomAllreduce, obj)
    comm.register_graph_buffers()
    assert obj.calls == []
    with comm.capture():
        comm.register_graph_buffers()
        assert obj.calls == [("capture_end", (), {})]


@pytest.mark.parametrize("kind", [onehop.sglang.CustomAllReduceV2, onehop.vllm.CustomAllreduce])
def test_what_cannot_be_set_up_is_disabled(monkeypatch, kind):
    def refuse(group, device, **sizes):
        raise onehop.SetupError("ranks 0 and 1 are on several hosts", onehop.Result.SEVERAL_HOSTS)

    monkeypatch.setattr(onehop, "AllReduce", refuse)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    comm = kind(object(), "cpu")
    assert comm.disabled and comm.obj is None and not comm.should_custom_ar(torch.empty(16))


def test_names_of_algorithms():
    of = onehop.sglang.algorithm_of
    assert of(None) is None
    assert of("2shot_push") is of(onehop.Algorithm.TWOSHOT_PUSH) is onehop.Algorithm.TWOSHOT_PUSH
    assert of(types.SimpleNamespace(name="ONE_SHOT_PULL")) is onehop.Algorithm.ONESHOT_PULL
    for wrong in ("3shot_push", "multicast", 1):
        with pytest.raises(ValueError, match="1shot_push"):
            of(wrong)


def test_names_and_arguments():
    """Those that engines use."""
    v2, v1 = onehop.sglang.CustomAllReduceV2, onehop.vllm.CustomAllreduce
    assert list(inspect.signature(v2).parameters) == [
        "group", "device", "max_size", "max_pull_size", "max_push_size", "max_pull_blocks", "max_push_blocks",
    ]  # fmt: skip
    assert list(inspect.signature(v1).parameters) == [
        "group", "device", "max_size", "max_all_gather_size", "max_mnnvl_all_gather_size", "max_reduce_scatter_size",
        "max_mnnvl_reduce_scatter_size", "max_mnnvl_multimem_reduce_scatter_size", "symm_mem_enabled",
        "register_graph_buffers",
    ]  # fmt: skip
    assert inspect.signature(v1).parameters["max_size"].default == 8 << 20
    both = ("should_custom_ar", "custom_all_reduce", "capture", "close")
    for kind, names in (
        (v2, ("uncap_pull_thresholds", "get_graph_capture_bases", "register_peer_mapped_inputs")),
        (v1, ("all_reduce", "register_graph_buffers", "create_shared_buffer", "free_shared_buffer")),
    ):
        assert all(callable(getattr(kind, name)) for name in both + names)
