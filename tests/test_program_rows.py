"""Kernels of programs that go by rows or elements: norms, activations, rope and dropout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("numba", reason="needs extra numba")

from array_api_compat import array_namespace
from programs import THREADS, judged, names, record

from xformer import RandomKey, ops, reference_only, tree
from xformer.base.tree import Frozen
from xformer.layers.attention import merge_heads, split_heads
from xformer.layers.norm import NormConfig, NormParams, add_norm
from xformer.ops.activation import ACTIVATIONS

KEY = RandomKey(2**63 + 2**40 + 3, 5, 7)
X = (3, 41, 101)  # 12,423 elements: worth several threads, and no multiple of anything
W = X[-1:]
HEADS = (3, 5, 37, 26)  # (B, H, T, K)
TABLE, TABLES = (37, 9), (3, 37, 9)
Shape = tuple[int, ...]


class RowCase(NamedTuple):
    """fn(*arrays of these shapes) -> results and cache, whose backward takes dys like results."""

    name: str
    fn: Callable[..., tuple[tuple[Any, ...], Any]]
    shapes: tuple[Shape, ...]
    n_results: int = 1


def single(op: Any, **options: Any) -> Callable[..., tuple[tuple[Any, ...], Any]]:
    def fn(*arrays: Any) -> tuple[tuple[Any, ...], Any]:
        y, cache = op(*arrays, **options)
        return (y,), cache

    return fn


def turned(interleaved: bool) -> Callable[..., tuple[tuple[Any, ...], Any]]:
    def fn(x: Any, cos: Any, sin: Any) -> tuple[tuple[Any, ...], Any]:
        y, cache = ops.rope(x, cos=cos, sin=sin, interleaved=interleaved)
        return (y,), cache

    return fn


def with_sum(config: NormConfig, has_r: bool = True) -> Callable[..., tuple[tuple[Any, ...], Any]]:
    def fn(*arrays: Any) -> tuple[tuple[Any, ...], Any]:
        x, *rest = arrays
        r = rest.pop(0) if has_r else None
        w, b = (*rest, None)[:2]
        return add_norm(x, r, NormParams(w, b), config=config)

    return fn


RMS = NormConfig("rms", eps=1e-3, offset=1.0)
CASES = (
    RowCase("layer_norm", single(ops.layer_norm), (X, W, W)),
    RowCase("layer_norm without b", single(ops.layer_norm, eps=0.1), (X, W)),
    RowCase("layer_norm of one row", single(ops.layer_norm), ((5003,), (5003,), (5003,))),
    RowCase("rms_norm", single(ops.rms_norm), (X, W)),
    RowCase("rms_norm with an offset", single(ops.rms_norm, offset=1.0), (X, W)),
    RowCase("rms_norm without w", single(ops.rms_norm), (X,)),
    RowCase("add_norm", with_sum(NormConfig()), (X, X, W, W), 2),
    RowCase("add_norm without b", with_sum(NormConfig()), (X, X, W), 2),
    RowCase("add_norm without r", with_sum(NormConfig(), False), (X, W, W), 2),
    RowCase("add_norm by rms", with_sum(RMS), (X, X, W), 2),
    RowCase("add_norm by rms without r", with_sum(RMS, False), (X, W), 2),
    RowCase("l2_normalize", single(ops.l2_normalize), (X,)),
    RowCase("l2_normalize of short rows", single(ops.l2_normalize, eps=9.5), (X,)),
    *(RowCase(name, single(ACTIVATIONS[name]), (X,)) for name in ACTIVATIONS),
    RowCase("softcap", single(ops.softcap, cap=3.0), (X,)),
    *(RowCase(f"glu {name}", single(ops.glu, activation=name), (X, X)) for name in ACTIVATIONS),
    RowCase("rope", turned(False), (HEADS, TABLE, TABLE)),
    RowCase("rope interleaved", turned(True), (HEADS, TABLE, TABLE)),
    RowCase("rope of own positions", turned(False), (HEADS, TABLES, TABLES)),
    RowCase("rope of all channels", turned(True), ((3, 5, 37, 18), TABLE, TABLE)),
    RowCase("dropout", single(ops.dropout, rate=0.3, key=KEY), (X,)),
    RowCase("dropout of few", single(ops.dropout, rate=0.3, key=KEY), ((7,),)),
)


def swapped(x: Any, first: int, last: int) -> Any:
    """x with two axes in each other's place: a view."""
    axes = list(range(x.ndim))
    axes[first], axes[last] = axes[last], axes[first]
    return array_namespace(x).permute_dims(x, tuple(axes))


def wide(shape: Shape) -> Shape:
    return (*shape[:-1], 2 * shape[-1])


# The shape of an array of which the operand of a shape is a view, and the view.
LAYOUTS: dict[str, tuple[Callable[[Shape], Shape], Callable[[Any], Any]]] = {
    "sliced": (wide, lambda x: x[..., ::2]),
    "part of a row": (wide, lambda x: x[..., : x.shape[-1] // 2]),
    "transposed": (lambda shape: shape[::-1], lambda x: x.T),
    "heads": (
        lambda shape: (*shape[-2:-1], *shape[1:-2], *shape[:-2][:1], *shape[-1:]),
        lambda x: swapped(x, 0, -2) if x.ndim > 2 else x,
    ),
    "reversed": (lambda shape: shape, lambda x: x[::-1, ...]),
}


def drawn(*shapes: Shape) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def shapes_of(case: RowCase) -> tuple[Shape, ...]:
    """Of operands, then of gradients of results."""
    return (*case.shapes, *(case.shapes[:1] * case.n_results))


def both_ways(case: RowCase, *arrays: Any) -> list[Any]:
    """Results and gradients; the last arrays are those of the results."""
    n = len(case.shapes)
    results, cache = case.fn(*arrays[:n])
    grads = cache.backward(*arrays[n:])
    return [*results, *tree.flatten({"": grads}).values()]


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_exact_as_the_reference(case: RowCase, threads: int) -> None:
    arrays = drawn(*shapes_of(case))
    judged(lambda *given: both_ways(case, *given), arrays, threads)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layouts(case: RowCase, layout: str) -> None:
    """Of operands and of dy."""
    shape_of, view = LAYOUTS[layout]
    arrays = drawn(*map(shape_of, shapes_of(case)))
    judged(lambda *given: both_ways(case, *map(view, given)), arrays)


# ---- No copies, and nothing that nobody needs ----


def test_heads_are_turned_where_they_lie() -> None:
    """Split from rows, normalised, turned and merged again: no copy, forward and backward."""
    x, w, cos, sin, dy = drawn((3, 37, 5 * 26), (26,), TABLE, TABLE, (3, 37, 5 * 26))

    def fn(x: Any, w: Any, cos: Any, sin: Any, dy: Any) -> list[Any]:
        y, norm = ops.rms_norm(split_heads(x, 5), w)
        y, rope = ops.rope(y, cos=cos, sin=sin)
        dx, dw = norm.backward(rope.backward(split_heads(dy, 5)))
        return [merge_heads(y), merge_heads(dx), dw]

    run = judged(fn, [x, w, cos, sin, dy])
    assert names(run) == ["rms_norm", "rope", "rope backward", "rms_norm backward", "sum axis=0"]


def test_tables_that_are_constant() -> None:
    (x,) = drawn(HEADS)

    def fn(x: Any) -> list[Any]:
        angles = array_namespace(x).reshape(array_namespace(x).arange(9, dtype=x.dtype), (1, 9))
        cos = array_namespace(x).broadcast_to(angles, TABLE)
        y, cache = ops.rope(x, cos=cos, sin=cos)
        return [y, cache.backward(y)]

    judged(fn, [x])


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_what_is_frozen_has_no_sums(kind: str) -> None:
    """Nor has a bias that is not there."""
    x, r, w, ds, dy = drawn(X, X, W, X, X)

    def fn(x: Any, r: Any, w: Any, ds: Any, dy: Any) -> list[Any]:
        params = NormParams(Frozen(w), None)
        (s, y), cache = add_norm(x, r, params, config=NormConfig(kind))
        dx, dr, dparams = cache.backward(ds, dy)
        assert dx is dr and dparams == NormParams(None, None)
        return [s, y, dx]

    assert names(judged(fn, [x, r, w, ds, dy])) == [f"add {kind}_norm", f"{kind}_norm backward"]


def test_a_sum_that_nothing_else_reads() -> None:
    """ds None, as after a norm behind its sum."""
    x, r, w, b, dy = drawn(X, X, W, W, X)

    def fn(x: Any, r: Any, w: Any, b: Any, dy: Any) -> list[Any]:
        (_, y), cache = add_norm(x, r, NormParams(w, b), config=NormConfig())
        dx, _, dparams = cache.backward(None, dy)
        return [y, dx, *dparams]

    judged(fn, [x, r, w, b, dy])


# ---- Ends of the number line ----


@pytest.mark.parametrize("name", [*ACTIVATIONS, "softcap"])
def test_activations_of_any_number(name: str) -> None:
    """NaN stays, infinity gives the limit, and far out nothing overflows."""
    some = [0.0, -0.0, 1e-30, 0.3, -0.3, 0.55, 5.0, -5.0, 90.0, -90.0, 1e4, -1e4, 1e38, -1e38]
    x = np.array([*some, np.inf, -np.inf, np.nan], np.float32)
    dy = np.full_like(x, 0.5)
    op = partial(ops.softcap, cap=3.0) if name == "softcap" else ACTIVATIONS[name]

    def fn(x: Any, dy: Any) -> list[Any]:
        y, cache = op(x)
        up = 0.5 + dy  # 1
        z, gated = ops.glu(x, up, activation=name) if name != "softcap" else (y, None)
        return [y, cache.backward(dy), z, *(gated.backward(dy) if gated else ())]

    with reference_only(), np.errstate(all="ignore"):
        wanted = [exact.astype(np.float32) for exact in fn(x.astype(float), dy.astype(float))]
    for got, same in zip(record(fn, [x, dy])(x, dy), wanted, strict=True):
        np.testing.assert_allclose(got, same, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("add", [False, True])
def test_rows_far_from_zero(add: bool) -> None:
    """Equal numbers have no variance, and what the mean loses by rounding is found again."""
    x = np.stack([np.full(101, 1234.5), 1e4 + np.arange(101), np.zeros(101)]).astype(np.float32)
    r, w, b = np.zeros_like(x), *drawn(W, W)

    def fn(x: Any, r: Any, w: Any, b: Any) -> list[Any]:
        if add:
            return [add_norm(x, r, NormParams(w, b), config=NormConfig())[0][1]]
        return [ops.layer_norm(x, w, b)[0]]

    judged(fn, [x, r, w, b])


def test_rows_without_length() -> None:
    """They stay 0, and are divided by eps on the way back; of NaN nothing is made up."""
    x, dy = np.zeros((3, 5), np.float32), np.ones((3, 5), np.float32)
    x[1, 2] = np.nan

    def fn(x: Any, dy: Any) -> list[Any]:
        y, cache = ops.l2_normalize(x, eps=1e-3)
        return [y, cache.backward(dy)]

    with reference_only():
        wanted = fn(x, dy)
    for got, same in zip(record(fn, [x, dy])(x, dy), wanted, strict=True):
        np.testing.assert_allclose(got, same, rtol=1e-6)


def test_no_rows() -> None:
    """Sums of nothing are 0."""
    x, w = np.zeros((0, 4), np.float32), np.ones(4, np.float32)

    def fn(x: Any, w: Any) -> list[Any]:
        y, cache = ops.layer_norm(x, w, w)
        return [y, *cache.backward(y), ops.silu(x)[0], ops.dropout(x, rate=0.5, key=KEY)[0]]

    _, _, dw, db, *_ = record(fn, [x, w])(x, w)
    assert not dw.any() and not db.any() and dw.shape == db.shape == (4,)


# ---- Dropout ----


@pytest.mark.parametrize("shape", [(1,), (7,), (64,), (257,), X])
@pytest.mark.parametrize("threads", THREADS)
def test_dropout_has_the_bits_of_the_reference(shape: Shape, threads: int) -> None:
    x, dy = drawn(shape, shape)

    def fn(x: Any, dy: Any) -> list[Any]:
        y, cache = ops.dropout(x, rate=0.37, key=KEY)
        return [y, cache.backward(dy)]

    with reference_only():
        wanted = fn(x, dy)
    for got, same in zip(record(fn, [x, dy], threads)(x, dy), wanted, strict=True):
        np.testing.assert_array_equal(got, same)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint32"])
def test_a_step_that_differs_from_run_to_run(dtype: str) -> None:
    (x,) = drawn(X)

    def fn(x: Any, step: Any) -> list[Any]:
        return [ops.dropout(x, rate=0.1, key=RandomKey(2, step, 9))[0]]

    run = record(fn, [x, np.array(0, dtype)])
    for step in (0, 1, 2**31 - 1):
        (got,) = run(x, np.array(step, dtype))
        wanted, _ = ops.dropout.reference(x, rate=0.1, key=RandomKey(2, step, 9))
        np.testing.assert_array_equal(got, wanted)


def test_a_step_for_each_row_is_left_to_the_reference() -> None:
    """Words are read from an address: no kernel takes a step of another shape."""
    x, steps = np.ones((2, 4), np.float32), np.array([3])

    def fn(x: Any, steps: Any) -> list[Any]:
        return [ops.dropout(x, rate=0.5, key=RandomKey(1, steps))[0]]

    run = record(fn, [x, steps])
    assert "dropout" not in names(run)
    np.testing.assert_array_equal(run(x, steps)[0], fn(x, 3)[0])


# ---- Bad input ----


def test_bad_input_is_refused_when_recorded() -> None:
    x, w, r = drawn(X, (7,), (3, 41, 100))

    def with_params(x: Any, w: Any, r: Any) -> list[Any]:
        return [add_norm(x, None, NormParams(w, None), config=NormConfig())[0][1]]

    def with_residual(x: Any, w: Any, r: Any) -> list[Any]:
        return [add_norm(x, r, NormParams(x[0, 0, :], None), config=NormConfig())[0][1]]

    def with_gradient(x: Any, w: Any, r: Any) -> list[Any]:
        return [ops.silu(x)[1].backward(r)]

    for fn, said in (
        (with_params, r"w must be \(D,\)"),
        (with_residual, r"add_norm: r must have shape"),
        (with_gradient, r"silu: dy must have shape"),
    ):
        with pytest.raises(ValueError, match=said):
            record(fn, [x, w, r])
