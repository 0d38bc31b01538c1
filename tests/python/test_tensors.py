"""Property: tensors of every kind give the right sum or a clear error.

A group of one copies, which shows what is handed over."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

import onehop  # noqa: E402
from onehop import _tensors  # noqa: E402

BF16 = torch.bfloat16


@pytest.fixture(params=["read", "asked"])
def ar(request):
    """Tensors read through DLPack's table, and attribute by attribute as with an older PyTorch."""
    with onehop.AllReduce(onehop.Rendezvous(0, 1, "alone"), "cpu") as alone:
        if request.param == "asked":
            alone.context.read_tensors(int)
        elif not alone.context.read_tensors(torch.Tensor):
            pytest.skip(f"PyTorch {torch.__version__} has no such table")
        yield alone


def plain(*shape, dtype=BF16):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


KINDS = {
    "plain": lambda: plain(6),
    "float32": lambda: plain(3, 4, dtype=torch.float32),
    "float16": lambda: plain(5, dtype=torch.float16),
    "0-dim": lambda: plain(),
    "empty": lambda: plain(0),
    "empty matrix": lambda: plain(3, 0),
    "one row": lambda: plain(4, 6)[1:2],
    "offset": lambda: plain(9)[1:],
    "size one": lambda: plain(4, 1).as_strided((4, 1), (1, 7)),
    "transposed": lambda: plain(3, 4).t(),
    "strided": lambda: plain(4, 6)[:, ::2],
    "channels last": lambda: plain(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: plain(1, 4).expand(3, 4),
    "negated view": lambda: torch._neg_view(plain(5)),
    "conjugate's part": lambda: torch.complex(plain(4, dtype=torch.float32), torch.ones(4)).conj().imag,
    "parameter": lambda: torch.nn.Parameter(plain(4), requires_grad=False),
    "subclass": lambda: plain(4).as_subclass(Plain),
    "inference": lambda: inference(),
}
UNIQUE = [kind for kind in KINDS if kind != "expanded"]


class Plain(torch.Tensor):
    """A subclass without a dispatch of its own."""


def inference():
    with torch.inference_mode():
        return plain(4)


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_place(ar, kind):
    given = KINDS[kind]()
    got = ar.all_reduce(given)
    assert torch.equal(got, given.clone())
    assert got.is_contiguous()
    assert (got.shape, got.dtype, got.device) == (given.shape, given.dtype, given.device)
    assert type(got) is (Plain if kind == "subclass" else torch.Tensor)
    assert got.numel() == 0 or got.data_ptr() != given.data_ptr()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", UNIQUE)
def test_into_out(ar, kind, grad):
    given, out = KINDS[kind](), KINDS[kind]()
    with torch.set_grad_enabled(grad), torch.inference_mode(kind == "inference"):
        want = given.clone()
        out.fill_(-1)
        assert ar.all_reduce(given, out=out) is out
        assert torch.equal(out, want)
        assert torch.equal(given, want)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", UNIQUE)
def test_in_place(ar, kind, grad):
    given = KINDS[kind]()
    want = given.clone()
    with torch.set_grad_enabled(grad), torch.inference_mode(kind == "inference"):
        assert ar.all_reduce_(given) is given
        assert ar.all_reduce(given, out=given) is given
    assert torch.equal(given, want)


class Wrapper(torch.Tensor):
    """A subclass that keeps its values elsewhere."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return "Wrapper"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} ran")


REFUSED = {
    "float64": (lambda: plain(3, dtype=torch.float64), "found torch.float64"),
    "int32": (lambda: plain(3, dtype=torch.int32), "found torch.int32"),
    "meta": (lambda: plain(3).to("meta"), "on cpu, found one on meta"),
    "sparse": (lambda: plain(3, dtype=torch.float32).to_sparse(), "strided tensor, found layout torch.sparse_coo"),
    "requires grad": (lambda: plain(3).requires_grad_(), "does not require grad"),
    "grad of a graph": (lambda: plain(3).requires_grad_() * 2, "does not require grad"),
    "wrapper": (lambda: Wrapper(plain(3)), "memory of its own, found Wrapper"),
    "list": (lambda: [1.0, 2.0], "expected a torch.Tensor, found list"),
    "None": (lambda: None, "expected a torch.Tensor, found NoneType"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(ar, kind):
    make, text = REFUSED[kind]
    with pytest.raises(onehop.ArgumentError, match=text):
        ar.all_reduce(make())
    with pytest.raises(onehop.ArgumentError, match=text):
        ar.all_reduce_(make())
    if make() is not None:
        for grad in True, False:
            if grad or "grad" not in kind:
                with pytest.raises(onehop.ArgumentError, match=r"out: |grad"), torch.set_grad_enabled(grad):
                    ar.all_reduce(plain(3), out=make())
    assert ar.stats().calls == 0


@pytest.mark.parametrize("grad", [True, False])
def test_out_must_fit(ar, grad):
    given = plain(3, 4)
    with torch.set_grad_enabled(grad):
        for wrong, text in (
            (plain(3, 4, dtype=torch.float16), "found torch.float16"),
            (plain(4, 3), r"shape \(3, 4\), found torch.bfloat16 of shape \(4, 3\)"),
            (plain(12), r"found torch.bfloat16 of shape \(12,\)"),
            (plain(1, 4).expand(3, 4), r"found strides \(0, 1\)"),
        ):
            with pytest.raises(onehop.ArgumentError, match=text):
                ar.all_reduce(given, out=wrong)
        area = plain(20)
        with pytest.raises(onehop.ArgumentError, match="overlap") as found:
            ar.all_reduce(area[:12], out=area[4:16])
        assert found.value.code == onehop.Result.OVERLAP
        with pytest.raises(onehop.ArgumentError, match="strides"):
            ar.all_reduce_(plain(1, 4).expand(3, 4))


def test_grad_is_refused_only_where_it_is_wanted(ar):
    given = plain(3).requires_grad_()
    with torch.no_grad():
        got = ar.all_reduce(given)
        assert not got.requires_grad
        ar.all_reduce_(given)


def test_autograd_sees_what_is_written(ar):
    """A tensor saved for backward and then overwritten: an error, not a wrong gradient."""
    weight, given = torch.ones(3, requires_grad=True), torch.ones(3)
    product = weight * given
    ar.all_reduce_(given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_way_by_name(ar):
    given = plain(5)
    for way in "local_copy", onehop.Algorithm.LOCAL_COPY, onehop.Algorithm.AUTO:
        assert torch.equal(ar.all_reduce(given, algorithm=way), given)
    for wrong in "three_shot", 99, 1.5:
        with pytest.raises(onehop.ArgumentError, match="1shot_push"):
            ar.all_reduce(given, algorithm=wrong)
    with pytest.raises(onehop.ArgumentError) as found:
        ar.all_reduce(given, source="elsewhere")
    assert found.value.code == onehop.Result.ALGORITHM


def test_prefetch(ar):
    given, weights = plain(5), torch.ones(100, 3, requires_grad=True)
    assert torch.equal(ar.all_reduce(given, prefetch=weights), given)
    assert ar.all_reduce_(given, prefetch=weights[10:20]) is given
    assert torch.equal(ar.all_reduce(given, prefetch=weights[:0]), given)
    with pytest.raises(onehop.ArgumentError, match="contiguous"):
        ar.all_reduce(given, prefetch=weights.t())
    with pytest.raises(onehop.ArgumentError, match="prefetch: expected a torch.Tensor"):
        ar.all_reduce_(given, prefetch=[1.0])


def test_would_use(ar):
    given = plain(5)
    choice = ar.would_use(given)
    assert choice == ar.would_use(10, BF16) == ar.would_use(10, onehop.DType.BFLOAT16)
    assert (choice.algorithm, choice.chunks) == (onehop.Algorithm.LOCAL_COPY, 1)
    ar.all_reduce(given)
    assert ar.stats().calls_by == {choice.algorithm: 1}
    with pytest.raises(onehop.ArgumentError, match="float64"):
        ar.would_use(8, torch.float64)
    with pytest.raises(onehop.ArgumentError, match="positive"):
        ar.would_use(0, BF16)


# ---- the object -----------------------------------------------------------------------------------------------------


def alone(**options):
    return onehop.AllReduce(onehop.Rendezvous(0, 1, "alone"), "cpu", **options)


def test_arguments():
    with pytest.raises(onehop.ArgumentError, match="expected seconds"):
        alone(timeout=0)
    with pytest.raises(onehop.ArgumentError, match="found meta"):
        onehop.AllReduce(onehop.Rendezvous(0, 1, "alone"), "meta")
    with pytest.raises(onehop.ArgumentError, match="found str"):
        onehop.AllReduce("group", "cpu")
    with pytest.raises(onehop.ArgumentError, match="RANK and WORLD_SIZE"):
        onehop.AllReduce(None, "cpu")


def test_the_environment_tells_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with onehop.AllReduce(device="cpu") as one:
        assert (one.rank, one.world_size) == (0, 1)


def test_close():
    with alone() as one:
        assert not one.closed
        assert repr(one) == "AllReduce(rank 0 of 1 on cpu)"
    assert one.closed
    one.close()
    with pytest.raises(onehop.ArgumentError, match="closed"):
        one.all_reduce(plain(3))
    with pytest.raises(onehop.ArgumentError, match="open"):
        onehop.ops.all_reduce(plain(3), one)


def test_it_is_not_kept_alive():
    one = alone()
    handle, gone = one.handle, weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None
    with pytest.raises(onehop.ArgumentError, match=f"found {handle}"):
        onehop.ops.all_reduce(plain(3), handle)


def test_host_stream():
    with alone() as one:
        assert one.host_stream is None
        one.host_stream = onehop.HostStream()
        given = plain(3)
        got = one.all_reduce(given)
        one.synchronize()
        one.synchronize(one.host_stream)
        assert torch.equal(got, plain(3))
        assert one.status() is None
        one.set_timeout(1.5)
        # A copy would be gone, or copied back too early, when the queued call runs.
        turned, whole = plain(3, 4).t(), plain(4, 3)
        for call, what in (
            (lambda: one.all_reduce(turned), "tensor"),
            (lambda: one.all_reduce_(turned), "tensor"),
            (lambda: one.all_reduce(whole, out=turned), "out"),
            (lambda: one.reduce_scatter(turned), "tensor"),
            (lambda: one.reduce_scatter(whole, out=turned), "out"),
            (lambda: one.all_gather(turned), "tensor"),
            (lambda: one.all_reduce_norm(plain(3, 8)[:, ::2], plain(4)), "x"),
        ):
            with pytest.raises(onehop.ArgumentError, match=f"^{what}: expected a contiguous tensor, since calls"):
                call()
        assert one.stats().calls == 1


# ---- operators ------------------------------------------------------------------------------------------------------


def test_operators(ar):
    given = plain(3, 4)
    assert torch.equal(onehop.ops.all_reduce(given, ar), given)
    assert onehop.ops.all_reduce_(given, ar.handle) is given
    for kind in "float64", "requires grad":
        make, text = REFUSED[kind]
        with pytest.raises(onehop.ArgumentError, match=text):
            onehop.ops.all_reduce(make(), ar)
        with pytest.raises(onehop.ArgumentError, match=text):
            onehop.ops.all_reduce_(make(), ar)


@pytest.mark.parametrize("kind", ["plain", "transposed", "empty"])
def test_operators_pass_opcheck(ar, kind):
    if not ar.context.read_tensors(torch.Tensor):
        pytest.skip("once is enough")
    for operator in torch.ops.onehop.all_reduce.default, torch.ops.onehop.all_reduce_.default:
        torch.library.opcheck(
            operator,
            (KINDS[kind](), ar.handle),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
        )


def test_compile_keeps_the_operators(ar):
    """In one graph, in place on an intermediate too; with each length a graph of its own or dynamic."""
    graphs = []

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    def layer(x):
        y = onehop.ops.all_reduce(x * 2, ar) + 1
        return onehop.ops.all_reduce_(y * 3, ar)

    for how in backend, "aot_eager":
        compiled = torch.compile(layer, backend=how, fullgraph=True, dynamic=True)
        for count in 4, 7:
            assert torch.equal(compiled(plain(count)), (plain(count) * 2 + 1) * 3)
    assert torch.ops.onehop.all_reduce.default in graphs[0]
    assert torch.ops.onehop.all_reduce_.default in graphs[0]
    with pytest.raises(Exception, match="does not require grad"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(plain(4).requires_grad_())


def test_without_a_stream_of_pytorchs(ar, monkeypatch):
    """Old PyTorch: the stream is asked of torch.cuda."""
    stream = type("Stream", (), {"cuda_stream": 77})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream if index == 3 else None)
    assert _tensors._python_stream(3) == 77
