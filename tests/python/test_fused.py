"""Property: reduce-scatter, all-gather and the fused norms agree with float64 on gloo groups of CPU processes."""

import pytest

torch = pytest.importorskip("torch")

import onehop  # noqa: E402
import ranks  # noqa: E402

TYPES = torch.float32, torch.float16, torch.bfloat16
# One rounding: half a unit in the last place, and beside it what fp32 loses on the way.
BOUND = {torch.float32: 1e-5, torch.float16: 2.0**-11 * 1.001, torch.bfloat16: 2.0**-8 * 1.001}


def values(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(found, want, dtype):
    bound = BOUND[dtype]
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), want, rtol=bound, atol=1e-5 if dtype == torch.float32 else 2e-6)


def norm(x, weight, eps, squares=None):
    mean = (x * x).mean(-1, keepdim=True) if squares is None else squares
    return x * (mean + eps).rsqrt() * weight


def same_everywhere(tensor, world_size):
    raw = tensor.contiguous().view(torch.uint8)
    found = [torch.empty_like(raw) for _ in range(world_size)]
    torch.distributed.all_gather(found, raw)
    assert all(torch.equal(one, raw) for one in found)


def scatter_and_gather(ar, rank, world_size):
    for dtype in TYPES:
        for count in 0, 1, 5, 4000:
            given = values(rank, world_size * count, 3, dtype=dtype)
            mine = ar.reduce_scatter(given)
            assert torch.equal(mine, ar.all_reduce(given)[rank * count : (rank + 1) * count])
            assert mine.shape == (count, 3)
            assert torch.equal(ar.reduce_scatter(given.t().contiguous().t()), mine)
            wide = torch.zeros(count, 6, dtype=dtype)
            assert ar.reduce_scatter(given, out=wide[:, ::2]) is not None
            assert torch.equal(wide[:, ::2], mine) and not wide[:, 1::2].any()
            part = given[rank * count : (rank + 1) * count]
            assert ar.reduce_scatter(given, out=part) is part
            assert torch.equal(part, mine)
    for dtype in torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn:
        everyone = [(values(other, 5, 3) * 9).to(dtype) for other in range(world_size)]
        want = torch.cat([one.view(torch.uint8) for one in everyone])
        mine = everyone[rank] if rank else everyone[rank].t().contiguous().t()
        assert torch.equal(ar.all_gather(mine).view(torch.uint8), want)
        out = torch.empty(5 * world_size, 3, dtype=dtype)
        part = out[5 * rank : 5 * rank + 5]
        part.copy_(mine)
        assert ar.all_gather(part, out=out) is out
        assert torch.equal(out.view(torch.uint8), want)
    turned = torch.complex(values(rank, 4), values(9, 4))
    assert torch.equal(ar.all_gather(turned.conj())[4 * rank : 4 * rank + 4], turned.conj())
    assert ar.all_gather(torch.empty(0, 3)).shape == (0, 3)


def norms(ar, rank, world_size):
    for dtype in TYPES:
        for shape, plus_one in ((3, 77), False), ((2, 3, 64), True), ((0, 8), False), ((33, 1000), False):
            parts = [values(other, *shape, dtype=dtype) for other in range(world_size)]
            before, weight = values(50, *shape, dtype=dtype), values(51, shape[-1], dtype=dtype)
            factors = weight.double() + plus_one
            for residual in before, None:
                total = sum(part.double() for part in parts) + (0 if residual is None else residual.double())
                found = ar.all_reduce_norm(
                    parts[rank], weight, residual=residual, eps=1e-3, weight_plus_one=plus_one, quantise="row"
                )
                near(found.residual, total, dtype)
                want = norm(found.residual.double(), factors, 1e-3)
                near(found.normed, want, dtype)
                assert found.normed.shape == found.quantised.shape == shape
                assert found.scales.shape == (*shape[:-1], 1)
                largest = want.abs().amax(-1, keepdim=True)
                torch.testing.assert_close(found.scales.double() * 448, largest, rtol=1e-5, atol=1e-5)
                error = (found.quantised.double() * found.scales - want).abs()
                assert (error <= want.abs() / 16 + largest / 448 / 512 + 1e-5).all()
                same_everywhere(found.normed, world_size)
                same_everywhere(found.quantised, world_size)
                # However the rows lie, and with one scale for all.
                wide = torch.zeros(*shape[:-1], shape[-1] + 5, dtype=dtype)[..., : shape[-1]]
                wide.copy_(parts[rank])
                again = ar.all_reduce_norm(
                    wide, weight, residual=residual, eps=1e-3, weight_plus_one=plus_one, quantise=0.5
                )
                assert torch.equal(again.normed, found.normed) and torch.equal(again.residual, found.residual)
                assert again.scales is None
                error = (again.quantised.double() * 0.5 - want).abs()
                assert (error <= want.abs() / 16 + 2.0**-10 + 1e-5).all()
    plain = ar.all_reduce_norm(torch.ones(2, 4), torch.ones(4))
    assert plain.quantised is None and plain.scales is None


def qknorms(ar, rank, world_size):
    for dtype in TYPES:
        for tokens, heads, plus_one in (0, 2, False), (1, 2, True), (130, 3, False):
            joint = [values(other, tokens, (heads + 1) * 8 + 3, dtype=dtype) for other in range(world_size)]
            weights = values(60 + rank, heads * 8, dtype=dtype), values(80 + rank, 8, dtype=dtype)
            # q as heads and k as columns: views of one matrix whose rows lie apart.
            columns = slice(heads * 8), slice(heads * 8, heads * 8 + 8)
            mine = joint[rank].clone()
            q, k = mine[:, columns[0]].unflatten(1, (heads, 8)), mine[:, columns[1]]
            assert ar.qknorm_(q, k, *weights, eps=1e-3, weight_plus_one=plus_one) is None
            for part, weight in zip(columns, weights, strict=True):
                everyone = [one[:, part].double() for one in joint]
                squares = sum((one * one).sum(-1, keepdim=True) for one in everyone) / (world_size * weight.numel())
                near(mine[:, part], norm(everyone[rank], weight.double() + plus_one, 1e-3, squares), dtype)
            assert torch.equal(mine[:, heads * 8 + 8 :], joint[rank][:, heads * 8 + 8 :])


def compiled(ar, rank, world_size):
    """In one graph each, with the results of eager calls."""
    ops, weight, targets = onehop.ops, values(70, 16), []

    def layer(x, residual):
        normed, after, quantised, scales = ops.all_reduce_norm(x * 2, weight, ar, residual=residual, quantise="row")
        other = ops.all_reduce_norm(normed + 1, weight, ar, quantise=0.5)
        gathered = ops.all_gather(ops.reduce_scatter(other.normed, ar) * 2, ar)
        q, k = gathered.clone().view(-1, 2, 8), after + 1
        ops.qknorm_(q, k, weight, weight, ar)
        return q * 2, k, quantised.float() * scales, other.quantised.float(), ops.all_reduce_norm(k, weight, ar).normed

    def backend(graph, _):
        targets.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    for how in backend, "aot_eager":
        run = torch.compile(layer, backend=how, fullgraph=True, dynamic=True)
        for rows in 4, 8:
            given = values(rank, rows, 16), values(71, rows, 16)
            for found, want in zip(run(*given), layer(*given), strict=True):
                assert torch.equal(found, want)
    for name in "reduce_scatter", "all_gather", "all_reduce_norm", "all_reduce_norm_quantised", "qknorm_":
        assert getattr(torch.ops.onehop, name).default in targets, name


def asked(ar, rank, world_size):
    """What a call uses is what was said."""
    given = torch.zeros(world_size * 10)
    for collective, call, one in (
        (onehop.Collective.REDUCE_SCATTER, ar.reduce_scatter, given[:10]),
        (onehop.Collective.ALL_GATHER, ar.all_gather, given.long()),
    ):
        said = ar.would_use(one, collective=collective).algorithm
        before = ar.stats().calls_by.get(said, 0)
        call(given if one.is_floating_point() else one)
        assert ar.stats().calls_by[said] == before + 1
    ar.prepare()
    ar.prepare(torch.float32, always=True)
    assert ar.qknorm_max_blocks(64, 8, torch.bfloat16) > 0


def refused(ar, rank, world_size):
    one, matrix = torch.ones(8), torch.ones(4, 8)
    wide = torch.ones(4, 16)
    for call, text in (
        (lambda: ar.reduce_scatter(torch.ones(world_size + 1)), f"that {world_size} ranks divide, found shape"),
        (lambda: ar.reduce_scatter(torch.tensor(1.0)), r"found shape \(\)"),
        (lambda: ar.reduce_scatter(torch.ones(world_size).long()), "found torch.int64"),
        (lambda: ar.reduce_scatter(torch.ones(world_size), out=torch.ones(2)), r"shape \(1,\), found"),
        (lambda: ar.all_gather(torch.tensor(1.0)), r"found shape \(\)"),
        (lambda: ar.all_gather(one, out=one), "out: expected torch.float32 of shape"),
        (lambda: ar.all_gather(one.clone().requires_grad_()), "does not require grad"),
        (lambda: ar.all_gather([1.0]), "found list"),
        (lambda: ar.all_reduce_norm(matrix, one[:7]), r"weight: expected torch.float32 of shape \(8,\)"),
        (lambda: ar.all_reduce_norm(matrix, one.half()), "weight: .* found torch.float16"),
        (lambda: ar.all_reduce_norm(matrix, one, residual=one), r"residual: .* of shape \(4, 8\)"),
        (lambda: ar.all_reduce_norm(torch.tensor(1.0), one), "rows"),
        (lambda: ar.all_reduce_norm(matrix, one, quantise="column"), "'column'"),
        (lambda: ar.all_reduce_norm(matrix, one, quantise=0.0), "positive scale, found 0.0"),
        (lambda: ar.all_reduce_norm(matrix, one, eps=-1.0), "eps"),
        (lambda: ar.qknorm_(wide[:, ::2], matrix, one, one), r"q: .* strides \(16, 2\)"),
        (lambda: ar.qknorm_(matrix, one[:1].expand(4, 8), one, one), "k: .* strides"),
        (lambda: ar.qknorm_(matrix, matrix[:3], one, one), r"k: expected torch.float32 of shape \(4, 8\)"),
        (lambda: ar.qknorm_(matrix, one, one, one), r"k: expected shape \(tokens, width\)"),
        (lambda: ar.qknorm_(matrix, matrix.clone(), one, one[:7]), r"k_weight: .* \(8,\)"),
        (lambda: ar.qknorm_(matrix, matrix, one, one), "overlap"),
        (lambda: onehop.ops.all_reduce_norm(matrix, one, ar, quantise=-1), "positive scale"),
    ):
        before = ar.stats().calls
        with pytest.raises(onehop.ArgumentError, match=text):
            call()
        assert ar.stats().calls == before, text


def everything(rank, world_size):
    with onehop.AllReduce(None, "cpu", timeout=20) as ar:
        for part in scatter_and_gather, norms, qknorms, asked, refused:
            part(ar, rank, world_size)
        if world_size == 2:
            compiled(ar, rank, world_size)
        torch.distributed.barrier()
        return True


@pytest.mark.parametrize("world_size", [2, 4])
def test_everything(world_size):
    assert ranks.run(world_size, everything) == [True] * world_size


def test_alone():
    with onehop.AllReduce(onehop.Rendezvous(0, 1, "alone"), "cpu") as ar:
        given = values(1, 3, 4)
        assert torch.equal(ar.reduce_scatter(given), given)
        assert torch.equal(ar.all_gather(given), given)
        with pytest.raises(onehop.ArgumentError) as found:
            ar.all_reduce_norm(given, given[0])
        assert found.value.code == onehop.Result.WORLD_SIZE


def test_operators_pass_opcheck():
    assert onehop.ops  # importing them registers them
    with onehop.AllReduce(onehop.Rendezvous(0, 1, "alone"), "cpu") as ar:
        for operator in torch.ops.onehop.reduce_scatter.default, torch.ops.onehop.all_gather.default:
            torch.library.opcheck(
                operator, (values(1, 3, 4), 1, ar.handle), test_utils=("test_schema", "test_faketensor")
            )
