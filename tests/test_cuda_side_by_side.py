"""Products of queries, keys and values together: where arrays lie, what is asked for, results.

On a GPU, and on the stand-ins of cuBLASLt and cuDNN, beside NumPy in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import cuda_shim
import numpy as np
import nvidia
import pytest
from cuda_shim import CublasLt, calling
from cuda_shim.cublaslt_parts import Epilogue
from devices import is_stand_in, placed
from libraries import ON_DEVICE, STAND_IN, only
from nvidia import calling_cublaslt, calling_cudnn, require_algorithm, without_cudnn
from stored import DTYPES, Host, in_both, normal, on, rounded

from xformer import layers, ops, reference_only, tree
from xformer.backends import Backend
from xformer.backends.cupy import side_by_side
from xformer.layers import (
    AttentionParams,
    FeedForwardParams,
    KeyValueParams,
    LinearParams,
    LoRAParams,
)
from xformer.layers.attention import merge_heads

on_gpu_too, on_stand_in = only(*ON_DEVICE), only(STAND_IN)

EVERY = ("float32", "float64", *DTYPES)


@pytest.fixture
def lt(library: Backend) -> Iterator[Any]:
    with calling_cublaslt(library) as found:
        yield found


def asked(lt: Any) -> list[str]:
    """Epilogues; + of a product that is added, x3 of three in one launch."""
    counts = nvidia.several(lt)
    names = zip(nvidia.asked(lt), counts, strict=True)
    return [name + (f" x{n}" if n > 1 else "") for name, n in names]


def attention_by(cudnn: bool, library: Backend) -> Any:
    return (calling_cudnn if cudnn else without_cudnn)(library)


# ---- Copies side by side ----


@on_gpu_too
@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize(
    "widths", [(16, 16, 16), (32, 8, 8), (5, 3), (7,), (8, 2, 24, 8), (128, 64)], ids=str
)
def test_beside(library: Backend, dtype: str, widths: tuple[int, ...]) -> None:
    """By rows, by columns, and with gaps between rows; in packs and not."""
    kind, n_rows = np.dtype(DTYPES.get(dtype, dtype)), 24 if is_stand_in(library) else 3001
    hosts = [normal(i, n_rows, n).astype(kind) for i, n in enumerate(widths)]
    wanted = np.concatenate(hosts, axis=1)
    spread = [np.pad(x, ((0, 0), (0, 8)))[:, : x.shape[1]] for x in hosts]
    for made in (hosts, [np.asfortranarray(x) for x in hosts], spread):
        y = side_by_side.beside([placed(library, x) for x in made])
        assert y is not None and y.dtype == kind
        assert np.array_equal(library.to_numpy(y), wanted)
        assert y.flags.f_contiguous if made is not hosts and made is not spread else True


@on_stand_in
def test_beside_is_not(library: Backend) -> None:
    """Of matrices that lie this way and that, with gaps between columns, and of too many."""
    x = normal(1, 8, 6).astype("f4")
    turned = np.asfortranarray(x)
    gaps = np.pad(x, ((0, 8), (0, 0))).T[:, :8].T
    assert gaps.shape == x.shape
    for several in (
        [x, turned],
        [turned, np.pad(turned, ((0, 8), (0, 0)))[:8]],
        [np.repeat(x, 2, axis=1)[:, ::2], x],
        [x] * 5,
    ):
        several = [np.asfortranarray(a) if a is turned else a for a in several]
        columns = [cuda_shim.Array(a) for a in several]
        if several[0] is turned:
            wide = np.asfortranarray(np.pad(x, ((0, 8), (0, 0))))
            columns[1] = cuda_shim.Array(wide[:8])
        assert side_by_side.beside(columns) is None


# ---- Slices of one array ----


SHAPES = (2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 16)


def matrices(*heads: Any) -> list[Any]:
    """(B, T, H, K) as the products read them."""
    return [x.host.reshape(-1, x.shape[2] * x.shape[3]) for x in heads]


def flat(x: Any) -> Any:
    xp = x.__array_namespace__()
    return xp.reshape(x, (x.shape[0] * x.shape[1], x.shape[2] * x.shape[3]))


@on_stand_in
def test_heads_beside(library: Backend, lt: Any) -> None:
    """All three where there are as many keys as queries; keys and values where there are not."""
    like = on(library, normal(1, 3), DTYPES["bfloat16"])
    dq, dk, dv = side_by_side.heads_beside(like, SHAPES)
    assert [side_by_side.step_of(x) for x in (dq, dk, dv)] == [80] * 3
    found = side_by_side.whole([flat(x) for x in (dq, dk, dv)])
    assert found is not None and found.shape == (12, 80)
    for i, x in enumerate((dq, dk, dv)):
        x.host[...] = i
    assert np.array_equal(found.host[3].astype(int), np.repeat([0, 1, 2], [32, 16, 32]))
    pair = side_by_side.whole([flat(dk), flat(dv)])
    assert pair is not None and np.array_equal(pair.host, found.host[:, 32:])
    cross = SHAPES[0], (2, 2, 5, 8), (2, 2, 5, 16)
    dq, dk, dv = side_by_side.heads_beside(like, cross)
    assert [side_by_side.step_of(x) for x in (dq, dk, dv)] == [32, 48, 48]
    assert dq.flags.c_contiguous and side_by_side.whole([flat(dk), flat(dv)]) is not None
    odd = (2, 3, 6, 5), (2, 3, 6, 5), (2, 3, 6, 5)  # slices would begin anywhere
    assert all(x.flags.c_contiguous for x in side_by_side.heads_beside(like, odd))
    assert all(x.flags.c_contiguous for x in side_by_side.heads_beside(like, SHAPES, beside=False))


@on_stand_in
def test_without_products_that_read_slices(library: Backend) -> None:
    like = on(library, normal(1, 3), DTYPES["bfloat16"])
    assert all(x.flags.c_contiguous for x in side_by_side.heads_beside(like, SHAPES))
    with calling(CublasLt()):
        wide = library.asarray(normal(1, 3))  # float64, whose products are cuBLAS's
        assert all(x.flags.c_contiguous for x in side_by_side.heads_beside(wide, SHAPES))


@on_stand_in
def test_what_is_no_whole(library: Backend) -> None:
    """Other arrays, another order, gaps, a row, views of another dtype or of a part."""
    held = cuda_shim.Array(np.zeros((10, 48), "f4"))
    a, b, c = (held[:, i : i + 16] for i in (0, 16, 32))
    assert side_by_side.whole([a, b, c]) is not None
    alone = cuda_shim.Array(np.zeros((10, 16), "f4"))
    for parts in ([a, c], [b, a], [a, a], [a, alone], [alone, a], [a[:1, :], b[:1, :]]):
        assert side_by_side.whole(parts) is None
    assert side_by_side.whole([a[:8, :], b[:8, :]]) is None
    assert side_by_side.whole([a, cuda_shim.Array(b.host.view("i4"))]) is None
    turned = cuda_shim.Array(np.zeros((48, 10), "f4")).T
    assert side_by_side.whole([turned[:, :16], turned[:, 16:32]]) is None


# ---- Layers ----


def params_of(d: int, heads: tuple[int, int], width: int, *, bias: bool) -> AttentionParams:
    def linear(seed: int, o: int, i: int = d) -> LinearParams:
        return LinearParams(normal(seed, i, o) / np.sqrt(i), normal(-seed % 9, o) if bias else None)

    h, g = (n * width for n in heads)
    return AttentionParams(
        linear(1, h), KeyValueParams(linear(2, g), linear(3, g)), linear(4, d, h)
    )


def step(place: Any, params: Any, x: Any, dy: Any, config: Any, memory: Any = None) -> Any:
    how = {"causal": False, "rotary": None, **config}
    context = layers.Context(causal=how.pop("causal"), rotary=how.pop("rotary"))
    heads, groups = how["n_heads"], how.get("n_kv_heads")
    w_q = tree.value(getattr(params.q, "base", params.q).w)
    attn = layers.AttentionConfig(x.shape[-1], heads, groups, d_head=w_q.shape[1] // heads)
    side = layers.SideInputs(memory)
    y, cache = layers.attention(x, params, side, config=attn, context=context)
    grads = cache.backward(dy)
    return tree.flatten({"y": y, "dx": grads[0], "params": grads[1], "memory": grads[2].memory})


def require(
    library: Backend,
    precision: str,
    params: Any,
    sizes: tuple[int, int, int],
    config: Any,
    memory: Host | None = None,
) -> None:
    """A few roundings of the largest number off float64, of y, dx and every parameter."""
    b, t, d = sizes
    x, dy = normal(7, b, t, d), normal(8, b, t, d)
    near = (lambda a: rounded(a, precision)) if precision in DTYPES else (lambda a: a)
    args = near(x), near(dy)
    shared = None if memory is None else near(memory)
    with reference_only():
        exact = step(None, tree.map(near, params), *args, config, shared)
    kind = DTYPES.get(precision, np.dtype("f4"))
    own = tree.map(lambda p: library.asarray(p, "float32"), params)
    own = library.cast_params(own, precision) if precision in DTYPES else own
    config = {**config, "rotary": on_device(library, config.get("rotary"))}
    given = [on(library, a, kind) if a is not None else None for a in (*args, shared)]
    got = step(library, own, *given[:2], config, given[2])
    share = {"bfloat16": 2.0**-5, "float16": 2.0**-8}.get(precision, 2.0**-17)
    if not is_stand_in(library):  # whose tensor cores cut sums off, as those of `devices.SLACK`
        share *= 2
    assert got.keys() == exact.keys()
    for name, wanted in exact.items():
        values = library.to_numpy(got[name]).astype("f8")
        # A bias of all keys moves no softmax: its gradient is what rounding leaves of the weights'.
        size = np.max(np.abs(exact["params.kv.k.w" if name == "params.kv.k.b" else name]))
        assert np.max(np.abs(values - wanted)) <= share * size, name


def on_device(library: Backend, rotary: Any) -> Any:
    if rotary is None:
        return None
    return rotary._replace(
        cos=library.asarray(rotary.cos.astype("f4")), sin=library.asarray(rotary.sin.astype("f4"))
    )


def rotary_of(t: int, width: int) -> Any:
    angles = normal(5, t, width // 2)
    return layers.RopeTables(np.cos(angles), np.sin(angles), False)


GPT = (4, 4)
GROUPED = (4, 2)
# What is asked for: forward, o both ways, dx and three dw with their sums.
THREE = ["BIAS x3", "BIAS", "DEFAULT", "BGRADA", "DEFAULT", "BGRADA", "BGRADA", "BGRADA"]


class Sizes(NamedTuple):
    """Of GPT-2 and of a model with grouped heads on a GPU, or small on the stand-in."""

    heads: tuple[int, int]
    width: int
    length: int

    @property
    def d(self) -> int:
        return self.heads[0] * self.width


def sizes_of(library: Backend, heads: tuple[int, int], real: Sizes) -> Sizes:
    return Sizes(heads, 8, 64) if is_stand_in(library) else real


@pytest.mark.parametrize("cudnn", [False, True])
@on_gpu_too
@in_both
def test_as_gpt2(library: Backend, lt: Any, precision: str, cudnn: bool) -> None:
    """One product forward, one for dx; before it was three of each."""
    n = sizes_of(library, GPT, Sizes((12, 12), 64, 1024))
    with attention_by(cudnn, library) as called:
        params = params_of(n.d, n.heads, n.width, bias=True)
        config = {"n_heads": n.heads[0], "causal": True}
        require(library, precision, params, (2, n.length, n.d), config)
        if cudnn:
            assert [call.name for call in called.calls] == ["sdpa", "sdpa_backward"]
    require_algorithm(lt)
    assert asked(lt) == THREE


@pytest.mark.parametrize("cudnn", [False, True])
@on_gpu_too
@in_both
def test_grouped_heads(library: Backend, lt: Any, precision: str, cudnn: bool) -> None:
    """Keys and values together forward; all three in dx, of weights of two widths."""
    n = sizes_of(library, GROUPED, Sizes((16, 4), 64, 512))
    with attention_by(cudnn, library):
        params = params_of(n.d, n.heads, n.width, bias=False)
        config = {"n_heads": n.heads[0], "n_kv_heads": n.heads[1], "causal": True}
        require(library, precision, params, (2, n.length, n.d), config)
    require_algorithm(lt)
    assert asked(lt) == ["DEFAULT x2", *["DEFAULT"] * 8]


@on_stand_in
@pytest.mark.parametrize("cudnn", [False, True])
@in_both
def test_as_llama(library: Backend, lt: Any, precision: str, cudnn: bool) -> None:
    """What is rotated is not kept as it was made; its gradient is apart from that of values."""
    with attention_by(cudnn, library):
        params = params_of(32, GROUPED, 8, bias=False)
        config = {"n_heads": 4, "n_kv_heads": 2, "causal": True, "rotary": rotary_of(64, 8)}
        require(library, precision, params, (2, 64, 32), config)
    assert asked(lt).count("DEFAULT+") == 2


@on_stand_in
@pytest.mark.parametrize("cudnn", [False, True])
@pytest.mark.parametrize("length", [64, 128])
@in_both
def test_cross_attention(
    library: Backend, lt: Any, precision: str, length: int, cudnn: bool
) -> None:
    """Keys and values of the memory together, whether it is as long as x or not."""
    with attention_by(cudnn, library):
        params = params_of(32, GPT, 8, bias=True)
        memory = normal(9, 2, length, 32)
        require(library, precision, params, (2, 64, 32), {"n_heads": 4}, memory)
    found = asked(lt)
    assert "BIAS x2" in found and "DEFAULT+" not in found


@on_stand_in
def test_in_float32(library: Backend, lt: Any) -> None:
    """Weights are not packed, so that forward has a product of each; dx is one."""
    params = params_of(32, GPT, 8, bias=True)
    require(library, "float32", params, (2, 64, 32), {"n_heads": 4, "causal": True})
    assert asked(lt) == ["BIAS"] * 3 + THREE[1:]


@on_stand_in
@pytest.mark.parametrize("precision", ["float32", *DTYPES])
def test_by_cublas(library: Backend, precision: str) -> None:
    """Which reads no slices: each gradient is an array of its own."""
    params = params_of(32, GPT, 8, bias=True)
    require(library, precision, params, (2, 64, 32), {"n_heads": 4, "causal": True})


@on_stand_in
@in_both
def test_options_of_the_tiles(library: Backend, lt: Any, precision: str) -> None:
    """Windows, and what attention by tensor cores leaves to the other kernel: wide heads."""
    for heads, width, options in (
        ((2, 1), 136, {"causal": True}),
        ((4, 2), 8, {"window": (5, 3), "softcap": 2.0}),
    ):
        params = params_of(32, heads, width, bias=True)
        config = {"n_heads": heads[0], "n_kv_heads": heads[1], **options}
        require(library, precision, params, (2, 40, 32), config)


@on_stand_in
def test_columns(library: Backend, lt: Any) -> None:
    """Weights as `torch` has them."""
    params = params_of(32, GPT, 8, bias=True)
    kv = params.kv
    assert kv is not None
    turned = [p._replace(w=np.asfortranarray(p.w)) for p in (params.q, kv.k, kv.v)]
    params = params._replace(q=turned[0], kv=kv._replace(k=turned[1], v=turned[2]))
    require(library, "bfloat16", params, (2, 64, 32), {"n_heads": 4, "causal": True})
    assert asked(lt)[4] == "DEFAULT"


@on_stand_in
def test_few_rows(library: Backend, lt: Any) -> None:
    """Copies of the weights would be more than what is saved."""
    params = params_of(64, (2, 2), 32, bias=True)
    require(library, "bfloat16", params, (1, 20, 64), {"n_heads": 2, "causal": True})
    assert asked(lt).count("DEFAULT+") == 2


@on_stand_in
def test_adapters_and_frozen_parts(library: Backend, lt: Any) -> None:
    """By the reference's `linear_many`, whose maps read slices of dq, dk and dv."""
    plain = params_of(32, GPT, 8, bias=True)
    kv = plain.kv
    assert kv is not None
    lora = LoRAParams(
        LinearParams(*map(tree.Frozen, plain.q)),
        normal(11, 32, 4),
        normal(12, 4, 32),
        tree.Constant(0.5),
    )
    for precision, params in (
        ("float32", plain._replace(q=lora)),
        ("bfloat16", plain._replace(q=LinearParams(*map(tree.Frozen, plain.q)))),
        ("bfloat16", plain._replace(kv=kv._replace(v=LinearParams(tree.Frozen(kv.v.w), kv.v.b)))),
    ):
        require(library, precision, params, (2, 64, 32), {"n_heads": 4, "causal": True})


@on_stand_in
@pytest.mark.parametrize("lacks", [(Epilogue.BIAS,), (Epilogue.BGRADA,)], ids=str)
def test_without_an_algorithm(library: Backend, lacks: Any) -> None:
    with calling(CublasLt(lacks)):
        params = params_of(32, GPT, 8, bias=True)
        require(library, "bfloat16", params, (2, 64, 32), {"n_heads": 4, "causal": True})


@on_stand_in
@in_both
def test_gate_and_up(library: Backend, lt: Any, precision: str) -> None:
    """One product forward of both: the activation keeps them."""
    up, gate, down = (
        LinearParams(normal(i, *s) / 4, None) for i, s in enumerate(((16, 24), (16, 24), (24, 16)))
    )
    params = FeedForwardParams(up, down, gate)
    own = tree.map(lambda p: library.asarray(p, "float32"), params)
    x = on(library, normal(7, 2, 40, 16), DTYPES[precision])
    _, cache = layers.feed_forward(x, library.cast_params(own, precision), activation="silu")
    assert asked(lt) == ["DEFAULT x2", "DEFAULT"]
    cache.backward(x)


# ---- What the stand-in finds ----


@on_stand_in
def test_dx_is_rounded_once(library: Backend, lt: Any) -> None:
    """Three products that are added to each other round three times."""
    d, kind = 32, DTYPES["bfloat16"]
    params = params_of(d, GPT, 8, bias=True)
    assert params.kv is not None
    three = tuple(
        LinearParams(*(on(library, a, kind) for a in p))
        for p in (params.q, params.kv.k, params.kv.v)
    )
    x = on(library, normal(7, 2, 64, d), kind)
    _, cache = layers.linear_many(x, three)
    held = on(library, normal(8, 2, 64, 3 * d), kind)
    slices = [held[:, :, i * d : (i + 1) * d] for i in range(3)]
    apart = [cuda_shim.Array(s.host.copy()) for s in slices]
    exact = held.host.astype("f8") @ np.concatenate([p.w.host for p in three], 1).astype("f8").T
    off = [
        np.mean(np.abs(cache.backward(*dys)[0].host.astype("f8") - exact))
        for dys in (slices, apart)
    ]
    assert off[0] < 0.8 * off[1]


@on_stand_in
def test_planted_columns(library: Backend, lt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in another order than their gradients show."""
    right = side_by_side.beside
    monkeypatch.setattr(
        "xformer.backends.cupy.linear_many_lt.beside", lambda ws: right([*ws[1:], ws[0]])
    )
    params = params_of(32, GPT, 8, bias=True)
    with pytest.raises(AssertionError, match="dx"):
        require(library, "bfloat16", params, (2, 64, 32), {"n_heads": 4, "causal": True})


@on_stand_in
def test_gradients_of_sdpa_are_slices(library: Backend, lt: Any) -> None:
    """Merged heads are no copies, so that the product finds them."""
    q, k, v = (on(library, normal(i, 2, 2, 20, 8), DTYPES["bfloat16"]) for i in range(3))
    ctx, cache = ops.sdpa(q, k, v)
    merged = [merge_heads(x) for x in cache.backward(ctx)[:3]]
    xp = merged[0].__array_namespace__()
    rows = [xp.reshape(x, (40, 16)) for x in merged]
    assert side_by_side.whole(rows) is not None
