"""Arrays that record ONNX graphs: every function, every case of the catalogue, sizes."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from array_api_compat import numpy as standard
from exported import CONSTANTS, Session, distance
from hypothesis import given, settings
from hypothesis import strategies as st

import xformer as xf
from xformer import backends, tree
from xformer.arrays import onnx_functions
from xformer.arrays.onnx import Array, Graph, NotExported, Size
from xformer.export.recording import Input, recorded
from xformer.export.writing import _check, _needed, _proto
from xformer.proofs.catalogue import Case, cases

NUMPY = backends.get("numpy")
EXACT = 1e-10  # of float64; squares of small numbers and sums in another order


def run(
    fn: Callable[..., Any], arrays: dict[str, np.ndarray], shapes: dict[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """fn(arrays) -> outputs in ONNX Runtime, with the shapes of the arrays, or dynamic ones."""
    inputs = {n: Input((shapes or {}).get(n, x.shape), x.dtype) for n, x in arrays.items()}
    names = {size for x in inputs.values() for size in x.shape if isinstance(size, str)}
    graph, outputs = recorded(fn, inputs, dict.fromkeys(names, 1000), None)
    proto = _proto(graph, _needed(graph, outputs), outputs, {})
    _check(proto)
    return Session(proto.SerializeToString())(**arrays)


# ---- Every case of the catalogue, forward and backward ----


def leaves(x: Any) -> dict[str, Any]:
    return {name: tree.value(leaf) for name, leaf in tree.flatten({"": x}).items()}


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_outputs_and_gradients(case: Case) -> None:
    fn, args = case.build(NUMPY)
    rng = np.random.default_rng(1)
    with xf.reference_only():
        y, cache = fn(*args)
        dy = tree.map(
            lambda a: rng.normal(size=a.shape), tuple(y) if isinstance(y, tuple) else (y,)
        )
        wanted = {f"y{n}": x for n, x in leaves(y).items()}
        wanted |= {f"g{n}": x for n, x in leaves(cache.backward(*dy)).items()}
    same, _ = case.build(CONSTANTS)

    def step(arrays: dict[str, Any]) -> dict[str, Any]:
        ys, cache = same(*_named(args, arrays, "a"))
        grads = cache.backward(*_named(dy, arrays, "d"))
        outputs = {f"y{n}": x for n, x in leaves(ys).items()}
        return outputs | {f"g{n}": x for n, x in leaves(grads).items()}

    feeds = {f"a{n}": x for n, x in leaves(args).items()}
    feeds |= {f"d{n}": x for n, x in leaves(dy).items()}
    got = run(step, feeds)
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        assert distance(got[name], np.asarray(x)) < EXACT, name


def _named(like: Any, arrays: dict[str, Any], prefix: str) -> Any:
    names = iter(leaves(like))
    return tree.map(lambda _: arrays[prefix + next(names)], like)


# ---- Every function, with dynamic sizes and on constants ----

X = np.random.default_rng(0).normal(size=(3, 4, 5))
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    **{n: lambda xp, x, n=n: getattr(xp, n)(x) for n in ("exp", "tanh", "sin", "cos")},
    **{n: lambda xp, x, n=n: getattr(xp, n)(x) for n in ("abs", "floor", "negative")},
    **{n: lambda xp, x, n=n: getattr(xp, n)(xp.abs(x)) for n in ("log", "sqrt")},
    "log1p": lambda xp, x: xp.log1p(xp.abs(x)) + xp.log1p(x * 1e-14),
    "isfinite": lambda xp, x: xp.isfinite(xp.log(x)) | xp.isfinite(x),
    "add": lambda xp, x: 1 + x + x,
    "subtract": lambda xp, x: 1 - x - x * 0.5,
    "divide": lambda xp, x: 1 / x / (x + 3.0),
    "pow": lambda xp, x: x**2 + xp.abs(x) ** -0.5,
    "a number to an integer": lambda xp, x: 0.5 ** xp.astype(x * 3, xp.int64),
    "maximum": lambda xp, x: xp.maximum(x, 0.5) - xp.minimum(x, x * x),
    "maximum of integers": lambda xp, x: xp.maximum(xp.astype(x * 9, xp.int64), 2**60 + 1),
    "compare": lambda xp, x: (x < 0.5) & (x >= -1) | ~((x > 1) | (x != x)) ^ (x <= 0),
    "logical_not": lambda xp, x: xp.logical_not(x > 0),
    "floor division": lambda xp, x: xp.astype(x * 9, xp.int64) // 4,
    "remainder": lambda xp, x: xp.astype(x * 9, xp.int64) % 4,
    "floor division of numbers": lambda xp, x: x // 0.3,
    "bits": lambda xp, x: (xp.astype(x * 9, xp.int64) & 12 | 3) ^ 5,
    "inverted bits": lambda xp, x: ~xp.astype(x * 9, xp.int64),
    "shifts": lambda xp, x: (xp.astype(x * 9, xp.int64) << 3) - (xp.astype(x * 99, xp.int64) >> 2),
    "where": lambda xp, x: xp.where(x > 0, x, 7.0) + xp.where(x < 1, -1.0, x),
    "astype": lambda xp, x: xp.astype(x * 3, xp.int32),
    "full": lambda xp, x: xp.full((x.shape[0], 2), 7.0) + xp.zeros(2) + xp.ones((1,)),
    "like": lambda xp, x: xp.zeros_like(x) + xp.ones_like(x) * xp.full_like(x, 3),
    "arange": lambda xp, x: xp.arange(x.shape[1]) + xp.arange(2, x.shape[1] + 2),
    "eye": lambda xp, x: xp.eye(x.shape[1]),
    "asarray": lambda xp, x: x * xp.asarray([1.0, 2, 3, 4, 5]),
    "broadcast_to": lambda xp, x: xp.broadcast_to(x[:, :1, :], x.shape),
    "reshape": lambda xp, x: xp.reshape(x, (x.shape[0] * x.shape[1], 5)),
    "reshape, a size of -1": lambda xp, x: (
        xp.reshape(x, (-1, 5)) + xp.reshape(x, (-1, 5, 1))[:, :, 0]
    ),
    "permute_dims": lambda xp, x: xp.permute_dims(x, (2, 0, 1)),
    "transpose": lambda xp, x: x.mT + xp.matrix_transpose(x) + x[:, :, 0].T[:1, :1],
    "expand_dims": lambda xp, x: xp.squeeze(xp.expand_dims(x, axis=-2), axis=2),
    "stack": lambda xp, x: xp.stack([x, x + 1], axis=1),
    "concat": lambda xp, x: (
        xp.concat([x, x + 1, xp.zeros((3, 0, 5))], axis=1)
        if not isinstance(x.shape[0], Size)
        else xp.concat([x, x + 1], axis=1)
    ),
    "concat without an axis": lambda xp, x: xp.concat([x, x[:1, ...]], axis=None),
    "tile": lambda xp, x: xp.tile(x, (2, 1)),
    "flip": lambda xp, x: xp.flip(x, axis=1) - xp.flip(x),
    "roll": lambda xp, x: xp.roll(x, 2, axis=1) + xp.roll(x, -1, axis=-1) + xp.roll(x, 0, axis=0),
    "getitem": lambda xp, x: x[1:, :-1, ::2][:, None, 0, ..., -1] * x[-1, 1:2, 1:2],
    "take": lambda xp, x: xp.take(x, xp.asarray([1, 0, 1]), axis=1),
    "take_along_axis": lambda xp, x: xp.take_along_axis(x, xp.argsort(x, axis=1), axis=1),
    "descending argsort": lambda xp, x: xp.argsort(x, axis=1, descending=True),
    "stable argsort": lambda xp, x: xp.argsort(xp.astype(x, xp.int64), axis=1, stable=True),
    "argmax": lambda xp, x: xp.argmax(x, axis=1, keepdims=True) + xp.argmax(x),
    "sum": lambda xp, x: xp.sum(x, axis=(0, 2)) + xp.sum(x) + xp.sum(x, axis=-1, keepdims=True),
    "sum of booleans": lambda xp, x: xp.sum(x > 0, axis=1),
    "mean": lambda xp, x: xp.mean(x, axis=1),
    "max": lambda xp, x: xp.max(x, axis=1) - xp.min(x, axis=(1, 2), keepdims=False)[:, None],
    "all": lambda xp, x: xp.all(x > -1, axis=1) | xp.any(x > 2, axis=1),
    "cumulative_sum": lambda xp, x: (
        xp.cumulative_sum(x, axis=1) + xp.cumulative_sum(xp.astype(x > 0, xp.int32), axis=1)
    ),
    "searchsorted": lambda xp, x: xp.searchsorted(
        xp.arange(x.shape[1]), xp.astype(x[0, 0, :] * 3, xp.int64)
    ),
    "searchsorted, right": lambda xp, x: xp.searchsorted(
        xp.arange(x.shape[1]), xp.astype(x[0, 0, :] * 3, xp.int64), side="right"
    ),
    "matmul": lambda xp, x: x @ x.mT @ x[0, ...],
    "matmul of vectors": lambda xp, x: (x[0, 0, :] @ x.mT) @ x[0, :, 0] + x[0, 0, :] @ x[0, 1, :],
    "logarithm of a size": lambda xp, x: x * x.shape[1] + (x.shape[1] * 6 // 4) % 5,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_functions(name: str) -> None:
    fn = FUNCTIONS[name]
    wanted = fn(standard, X)
    for shape in (X.shape, ("n", "m", 5)):
        got = run(lambda arrays: {"y": fn(onnx_functions, arrays["x"])}, {"x": X}, {"x": shape})
        assert distance(got["y"], wanted) < 1e-13, shape
    known = fn(onnx_functions, Array.constant(X))
    assert known.value is not None and distance(known.value, wanted) < 1e-15


def test_every_public_function_is_tested() -> None:
    """A new function of the namespace needs a case above."""
    text = " ".join(map(str, (f.__code__.co_names for f in FUNCTIONS.values()))) + str([*FUNCTIONS])
    named = {
        name
        for name, value in vars(onnx_functions).items()
        if callable(value) and getattr(value, "__module__", "") == onnx_functions.__name__
    }
    operators = {
        *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "multiply"),
        *("remainder", "floor_divide", "bitwise_and", "bitwise_or", "bitwise_xor"),
        *("bitwise_invert", "bitwise_left_shift", "bitwise_right_shift"),
        *("getitem", "index_add", "erf"),  # of kernels, in the catalogue
    }
    missing = {n for n in named - operators if not n.startswith("_") and n not in text}
    assert missing == set()


# ---- Sizes ----

NAMES = ("a", "b")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_sizes_are_what_the_graph_computes(data: Any) -> None:
    """Any arithmetic of sizes, for other values than those while recording."""
    graph = Graph({"a": 7, "b": 5})
    graph.input("x", NAMES, np.float64)
    a, b = (graph.sizes[n] for n in NAMES)
    text = data.draw(expressions)
    size = eval(text, {"a": a, "b": b})
    assert int(size) == eval(text, {"a": 7, "b": 5})
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    outputs = {"y": onnx_functions.asarray(size) + onnx_functions.zeros((1,), dtype=np.int64)}
    if outputs["y"].value is not None:  # a number
        got = outputs["y"].value
    else:
        proto = _proto(graph, _needed(graph, outputs), outputs, {})
        got = Session(proto.SerializeToString())(x=np.zeros(shape))["y"]
    assert int(got[0]) == eval(text, dict(zip(NAMES, shape, strict=True)))


expressions = st.recursive(
    st.sampled_from(["a", "b", "1", "2", "3"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, st.sampled_from(["//", "%"]), st.sampled_from("234")).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        inner.map(lambda t: f"(-{t})"),
    ),
    max_leaves=6,
)


def test_sizes_that_cancel_are_numbers() -> None:
    graph = Graph({"n": 7, "m": 5})
    graph.input("x", ("n", "m"), np.float64)
    n, m = graph.sizes["n"], graph.sizes["m"]
    for size, wanted in ((n - n, 0), (n - (n - 1), 1), ((n * m) // (m * n), 1), (0 * n, 0)):
        assert type(size) is int and size == wanted
    for size, wanted in (
        ((n - 1) + 1, n),
        (n * m * 3 // m, 3 * n),
        (n * 6 // 3, n * 2),
        (0 - (-n), n),
    ):
        assert size.key == wanted.key and size == wanted
    assert type(pickle.loads(pickle.dumps(n))) is int


def test_sizes_do_not_keep_a_graph() -> None:
    """Checks of shapes remember them."""
    graph = Graph({"n": 7})
    x = graph.input("x", ("n", 4), np.float32)
    xf.ops.softmax(x)
    size, gone = x.shape[0], weakref.ref(graph)
    del graph, x
    gc.collect()
    assert gone() is None and size == 7
    with pytest.raises(ValueError, match="a size was used after its graph"):
        size + 1


# ---- Graphs ----


def test_the_same_node_is_recorded_once() -> None:
    graph = Graph({})
    x = graph.input("x", (3,), np.float32)
    assert (x + 1.0).name == (x + 1.0).name != (x + 2.0).name
    assert len(graph.nodes) == 2 and len(graph.constants) == 2


def test_a_table_of_one_number_is_not_stored() -> None:
    graph = Graph({})
    x = graph.input("x", (1000, 1000), np.float32)
    x + onnx_functions.zeros((1000, 1000), dtype=np.float32)
    assert sum(c.nbytes for c in graph.constants.values()) < 100


def test_errors() -> None:
    graph = Graph({"n": 7})
    x = graph.input("x", ("n", 4), np.float32)
    for read in (bool, int, float):
        with pytest.raises(NotExported, match="the value of an array decides"):
            read(x)
    with pytest.raises(NotExported, match="an index that is an array is not exported"):
        x[x > 0]
    with pytest.raises(NotExported, match="prod of the array API is not exported"):
        onnx_functions.prod(x)
    with pytest.raises(AttributeError, match="has no attribute product"):
        onnx_functions.product  # noqa: B018
    for call in (lambda: x @ x, lambda: x + onnx_functions.ones(3), lambda: x[8], lambda: x[:, 4]):
        with pytest.raises((ValueError, IndexError), match="onnx: "):
            call()
    with pytest.raises(ValueError, match="cannot be reshaped"):
        onnx_functions.reshape(x, (3, 4))
    other = Graph({}).input("x", (4,), np.float32)
    with pytest.raises(ValueError, match="an array belongs to another graph"):
        x + other
    with pytest.raises(TypeError, match="linear: w must be an array of onnx, got one of numpy"):
        xf.ops.linear(x, np.ones((4, 2), np.float32))
