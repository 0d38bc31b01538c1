"""Property: a caller's expression becomes part of the all-reduce, or the error is the library's own.

On CPUs nothing compiles it: the errors are the library's own, and what Python does around a call is seen with a
stand-in that computes the expression itself.
"""

import ctypes
import gc
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import onehop  # noqa: E402
import ranks  # noqa: E402
from onehop import _onehop  # noqa: E402

TYPES = {1: (torch.float32, 4), 2: (torch.float16, 2), 3: (torch.bfloat16, 2)}
INCLUDE = pathlib.Path(__file__).resolve().parents[2] / "include"
SCALED = "x * scale + bias[col] * gain[row]"


def values(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def memory(address, count, code):
    dtype, size = TYPES[code]
    return torch.frombuffer((ctypes.c_char * (count * size)).from_address(address), dtype=dtype)


class Compiler:
    """A context that has a compiler, of one for each type."""

    def __init__(self, context):
        self.context, self.way = context, None

    def __getattr__(self, name):
        return getattr(self.context, name)

    def op_create(self, *config):
        return config

    def all_reduce_op(self, op, in_, out, count, scalars, arrays, *way):
        expression, dtype, row_length, names, tensors, codes = op
        self.way = way
        self.context.all_reduce(in_, out, count, dtype, way[-1])
        index = torch.arange(count)
        row_length = row_length or max(count, 1)
        room = 7  # of each array
        known = {
            "x": memory(out, count, dtype).float(),
            "col": index % row_length,
            "row": index // row_length,
            **dict(zip(names, scalars, strict=True)),
            **{
                name: memory(address, room, code).float()
                for name, address, code in zip(tensors, arrays, codes, strict=True)
            },
        }
        memory(out, count, dtype).copy_(eval(expression, known))


# ---- with a compiler ------------------------------------------------------------------------------------------------


def calls(ar, rank, world_size):
    for dtype in TYPES.values():
        dtype = dtype[0]
        op = ar.create_op(SCALED, dtype, row_length=7, scalars=["scale"], arrays={"bias": torch.float32, "gain": dtype})
        assert "SCALED" not in repr(op) and SCALED in repr(op) and op.dtype == dtype
        bias, gain = values(3, 7), values(4, 7, dtype=dtype)
        given = [values(other, 5, 7, dtype=dtype) for other in range(world_size)]
        total = sum((one.float() for one in given[1:]), given[0].float()).to(dtype).float()
        want = (total * 0.5 + bias * gain[:5, None].float()).to(dtype)
        mine = given[rank]
        named = {"gain": gain, "bias": bias, "scale": 0.5}  # in any order
        assert torch.equal(ar.all_reduce_op(mine, op, named), want)
        # However the tensors lie; integers are numbers too.
        apart = torch.zeros(7, 2)
        apart[:, 0] = bias
        lies = mine.t().contiguous().t()
        assert torch.equal(ar.all_reduce_op(lies, op, {**named, "bias": apart[:, 0]}), want)
        wide = torch.zeros(5, 14, dtype=dtype)
        assert ar.all_reduce_op(mine, op, named, out=wide[:, ::2]) is not None
        assert torch.equal(wide[:, ::2], want) and not wide[:, 1::2].any()
        place = mine.clone()
        assert ar.all_reduce_op(place, op, named, out=place, algorithm="1shot_push", blocks=2) is place
        assert torch.equal(place, want)
        assert ar.context.way == (onehop.Algorithm.ONESHOT_PUSH, 0, 2, 0, 0)
        assert torch.equal(onehop.ops.all_reduce_op(mine, op, named), want)
    plain = ar.create_op("-x", torch.float32)
    for found in ar.all_reduce_op(torch.ones(3), plain), onehop.ops.all_reduce_op(torch.ones(3), plain):
        assert found.tolist() == [-world_size] * 3
    gone = plain.handle
    del plain
    gc.collect()
    with pytest.raises(onehop.ArgumentError, match=f"CustomOp that is there, found {gone}"):
        torch.ops.onehop.all_reduce_op(torch.ones(3), gone, [], [])


def refused(ar, rank, world_size):
    op = ar.create_op("x * scale + bias[col]", torch.float32, scalars=["scale"], arrays={"bias": torch.float32})
    x, good = torch.ones(7), {"scale": 1, "bias": torch.ones(7)}
    for call, text in (
        (lambda: ar.all_reduce_op(x, op), "values: expected scale, bias, found none"),
        (lambda: ar.all_reduce_op(x, op, {**good, "gain": 1}), "found scale, bias, gain"),
        (lambda: ar.all_reduce_op(x, op, {**good, "bias": 1.0}), "expected a tensor for bias, found float"),
        (lambda: ar.all_reduce_op(x, op, {**good, "scale": x}), "expected a number for scale, found Tensor"),
        (lambda: ar.all_reduce_op(x, op, {**good, "bias": x.half()}), "bias: expected torch.float32 .* torch.float16"),
        (lambda: ar.all_reduce_op(x, op, {**good, "bias": x.clone().requires_grad_()}), "does not require grad"),
        (lambda: ar.all_reduce_op(x.half(), op, good), "tensor: expected torch.float32, that of the op, found"),
        (lambda: ar.all_reduce_op(x, op, good, out=x[:3]), "out: expected"),
        (lambda: ar.all_reduce_op(x, op, good, algorithm="fastest"), "algorithm: expected"),
        (lambda: ar.create_op("x", torch.int32), "dtype: .* found torch.int32"),
        (lambda: ar.create_op("x", torch.float32, arrays={"bias": torch.int64}), "dtype: .* found torch.int64"),
        (lambda: ar.create_op("x", torch.float32, row_length=-1), "row_length: expected 0 or more, found -1"),
    ):
        before = ar.stats().calls
        with pytest.raises(onehop.ArgumentError, match=text):
            call()
        assert ar.stats().calls == before, text
    with (
        onehop.AllReduce(None, "cpu", timeout=20) as other,
        pytest.raises(onehop.ArgumentError, match="that create_op of this object made"),
    ):
        other.all_reduce_op(x, op, good)


def with_compiler(rank, world_size):
    with onehop.AllReduce(None, "cpu", timeout=20) as ar:
        ar.context = Compiler(ar.context)
        for part in calls, refused:
            part(ar, rank, world_size)
        torch.distributed.barrier()
        return True


def test_what_python_does():
    assert ranks.run(2, with_compiler) == [True] * 2


def test_operator_stays_in_a_graph():
    targets = []

    def backend(graph, _):
        targets.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    with onehop.AllReduce(onehop.Rendezvous(0, 1, "alone"), "cpu") as ar:
        ar.context = Compiler(ar.context)
        named = {"scale": 0.5, "bias": values(3, 7), "gain": values(4, 7)}
        types = dict.fromkeys(["bias", "gain"], torch.float32)
        op = ar.create_op(SCALED, torch.float32, row_length=7, scalars=["scale"], arrays=types)

        def layer(x):
            return onehop.ops.all_reduce_op(x * 2, op, named) + 1

        given = values(1, 4, 7)
        assert torch.equal(torch.compile(layer, backend=backend, fullgraph=True)(given), layer(given))
        operator = torch.ops.onehop.all_reduce_op.default
        assert operator in targets
        arguments = given, op.handle, [0.5], [named["bias"], named["gain"]]
        torch.library.opcheck(operator, arguments, test_utils="test_faketensor")


# ---- the library's own words ----------------------------------------------------------------------------------------


def library(rank, world_size):
    with onehop.AllReduce(None, "cpu", timeout=20, init_timeout=20) as ar:
        kind, bf16 = torch.float32, torch.bfloat16
        for config, error, code, text in (
            (
                ("x * 2.0f", kind),
                onehop.SetupError,
                "UNSUPPORTED",
                "host device has no compiler.*expressions need GPUs",
            ),
            (("x;", kind), onehop.ArgumentError, "ARGUMENT", r"expression\(1\)"),
            (("x +\n\n 2)", kind), onehop.ArgumentError, "ARGUMENT", r"expression\(3\): a bracket"),
            (("x", kind, ["row"]), onehop.ArgumentError, "ARGUMENT", "the name row is taken"),
            (("x", bf16, [], {"bias": torch.float16}), onehop.ArgumentError, "DTYPE", "array bias"),
            (("x" * 4097, kind), onehop.ArgumentError, "TOO_LARGE", "at most 4096"),
            ((f"x * {rank}", kind), onehop.SetupError, "DISAGREEMENT", "rank 1"),
        ):
            more = dict(zip(("scalars", "arrays"), config[2:], strict=False))
            with pytest.raises(error, match=f"(?s){text}") as found:
                ar.create_op(*config[:2], **more)
            assert found.value.code == onehop.Result[code], found.value
        # Code for a GPU that is not there: the compiler's words, where there is one.
        os.environ["ONEHOP_JIT_ARCH"] = "90"
        with pytest.raises(onehop.Error) as found:
            ar.create_op("x * scale\n + biass[col]", kind, scalars=["scale"], arrays={"bias": kind})
        if found.value.code == onehop.Result.ARGUMENT:
            assert "expression(2)" in str(found.value) and "biass" in str(found.value), found.value
        else:
            assert found.value.code == onehop.Result.UNSUPPORTED, found.value
        del os.environ["ONEHOP_JIT_ARCH"]
        assert ar.all_reduce(torch.ones(3)).tolist() == [world_size] * 3
        torch.distributed.barrier()
        return True


def test_errors_of_the_library():
    assert ranks.run(2, library) == [True] * 2


def test_alone():
    with (
        onehop.AllReduce(onehop.Rendezvous(0, 1, "alone"), "cpu") as ar,
        pytest.raises(onehop.SetupError, match="group of one rank") as found,
    ):
        ar.create_op("x", torch.float32)
    assert found.value.code == onehop.Result.UNSUPPORTED


def test_arguments_of_the_extension():
    context = _onehop.Context(0, 1, "alone", device=_onehop.DEVICE_HOST)
    nine = tuple(f"n{i}" for i in range(9))
    for config, text in (
        (("x", 1, 0, nine, (), ()), "scalars: expected at most 8, found 9"),
        (("x", 1, 0, (), nine, (1,) * 9), "arrays: expected at most 8, found 9"),
        (("x", 1, 0, ("a\0b",), (), ()), "character 0"),
        (("x\0", 1, 0, (), (), ()), "null character"),
        (("x", 1, 0, (), ("a",), ()), "takes 1 arguments, found 0"),
        (("x", 1, 0, (1,), (), ()), "."),
        (("x", 1, 0, ["a"], (), ()), "tuple"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            context.op_create(*config)
    # An op made from another context: nothing but zeros.
    zeros = ctypes.create_string_buffer(4096)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    stranger, other = make(ctypes.addressof(zeros), b"onehop_expression", None), make(ctypes.addressof(zeros), b"other", None)
    data = torch.ones(4)
    place = data.data_ptr(), data.data_ptr(), 4
    with pytest.raises(onehop.ArgumentError, match="from another context"):
        context.all_reduce_op(stranger, *place, (1.0,), (data.data_ptr(),), 0, 0, 0, 0, 0)
    for args, text in (
        ((other, *place, (), (), 0, 0, 0, 0, 0), "PyCapsule"),
        ((stranger, *place, (1.0,) * 9, (), 0, 0, 0, 0, 0), "scalars: expected at most 8, found 9"),
        ((stranger, *place, (), (0,) * 9, 0, 0, 0, 0, 0), "arrays: expected at most 8, found 9"),
        ((stranger, *place, ("a",), (), 0, 0, 0, 0, 0), "."),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            context.all_reduce_op(*args)


# In the library's place: says what it was given.
LISTENER = r"""
#include <onehop.h>
#include <stdio.h>
static int made;
onehop_result onehop_expression_create(onehop_context *context, const onehop_expression_config *c, onehop_expression **op_out) {
    printf("%d|%s|%d|%zu|%u", c->struct_size == sizeof *c, c->expression, c->dtype, c->row_length, c->reserved);
    for (int i = 0; i < ONEHOP_OP_NAMES; i++)
        printf("|%s %s %d", c->scalars[i] ? c->scalars[i] : "-", c->arrays[i] ? c->arrays[i] : "-", c->array_dtypes[i]);
    puts("");
    *op_out = (onehop_expression *)&made;
    return context ? ONEHOP_OK : ONEHOP_ERR_NULL;
}
onehop_result onehop_all_reduce_expression(onehop_context *context, const void *in, void *out, size_t count, const onehop_expression *op,
                                   const onehop_expression_values *v, const onehop_call *w, onehop_stream stream) {
    printf("%d %d %d|%zu %zu %zu|%d %d %u %u|%zu", op == (void *)&made, v->struct_size == sizeof *v,
           w->struct_size == sizeof *w, (size_t)in, (size_t)out, count, w->algorithm, w->source, w->blocks, w->threads,
           (size_t)stream);
    for (int i = 0; i < ONEHOP_OP_NAMES; i++) printf("|%g %zu", v->scalars[i], (size_t)v->arrays[i]);
    puts("");
    return context ? ONEHOP_OK : ONEHOP_ERR_NULL;
}
void onehop_expression_destroy(onehop_expression *op) { printf("gone %d\n", op == (void *)&made); }
"""
SPEAKER = """
from onehop import _onehop
context = _onehop.Context(0, 1, "alone", device=_onehop.DEVICE_HOST)
op = context.op_create("x * s", 3, 7, ("s", "t"), ("b",), (1,))
context.all_reduce_op(op, 2**63 + 1, 2, 3, (0.5, -2), (2**63 + 4,), 4, 1, 5, 64, 0)
del op
"""


def test_what_the_library_is_given(tmp_path):
    (tmp_path / "listener.c").write_text(LISTENER)
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", f"-I{INCLUDE}", "listener.c", "-o", "listener.so"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=30)
    environment = {**os.environ, "LD_PRELOAD": str(tmp_path / "listener.so")}
    command = [sys.executable, "-c", SPEAKER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.splitlines() == [
        "1|x * s|3|7|0|s b 1|t - 0" + "|- - 0" * 6,
        f"1 1 1|{2**63 + 1} 2 3|4 1 5 64|0|0.5 {2**63 + 4}|-2 0" + "|0 0" * 6,
        "gone 1",
    ], done.stderr
