"""What compiled functions take and return beside arrays: caches, numbers, states, other objects."""

from __future__ import annotations

import dataclasses
import enum
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from causal_models import causal
from libraries import LIBRARIES, ON_DEVICE, STAND_IN, only

import xformer as xf
from xformer import GPT, backends, ops, tree
from xformer.backends import Backend

MODEL = GPT(19, n_layers=1, d_model=8, n_heads=2, max_len=12)
BOTH = (*LIBRARIES, STAND_IN)
IDS = np.random.default_rng(1).integers(0, 19, (2, 9))
X = np.arange(6, dtype=np.float32)


def on(library: Backend, values: Any) -> Any:
    return tree.map(lambda x: library.asarray(np.array(x)), values)


def alike(library: Backend, got: Any, wanted: Any, **options: Any) -> None:
    a, b = tree.flatten({"": got}), tree.flatten({"": wanted})
    assert list(a) == list(b)
    for name, x in a.items():
        x, y = (library.to_numpy(tree.value(leaf)) for leaf in (x, b[name]))
        np.testing.assert_allclose(x, y, err_msg=name, **{"rtol": 1e-5, "atol": 1e-6} | options)


def compiles(library: Backend) -> bool:
    """Whether calls are compiled for arrays of the library."""
    return backends.backend_of(library.asarray(X)).compiled(lambda: None, ()) is not None


def said_once(library: Backend, fn: Callable[..., Any], match: str, *arguments: Any) -> list[Any]:
    """The results of two calls; the first says that the function itself is called."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        results = [fn(*arguments) for _ in range(2)]
    texts = {str(each.message) for each in said}
    assert len(texts) == compiles(library)
    assert all(match in text for text in texts)
    return results


# ---- Caches ----


@only(*BOTH)
def test_the_backward_of_a_loss(library: Backend) -> None:
    """A cache does not leave a compiled call: the function itself is called."""
    params = on(library, MODEL.init(dtype="float32"))
    data = library.asarray(IDS[:, :-1]), library.asarray(IDS[:, 1:])
    loss, cache = MODEL.loss(params, *data)
    wanted = cache.backward()
    compiled = xf.compile(MODEL.loss)
    for got, saved in said_once(library, compiled, "holds a cache (LossCache)", params, *data):
        alike(library, got, loss)
        alike(library, saved.backward(), wanted)


@only(*BOTH)
def test_the_backward_of_ops(library: Backend) -> None:
    w = library.asarray(np.linspace(-1, 1, 36, dtype=np.float32).reshape(6, 6))
    x, scale = library.asarray(X.reshape(1, 6)), library.asarray(np.ones(6, np.float32))

    def fn(x: Any, w: Any, scale: Any) -> Any:
        y, first = ops.linear(x, w)
        y, second = ops.rms_norm(y, scale)
        return {"y": y, "caches": [first, second]}

    wanted = fn(x, w, scale)
    for got in said_once(library, xf.compile(fn), "holds a cache (", x, w, scale):
        alike(library, got["y"], wanted["y"])
        for saved, other in zip(got["caches"], wanted["caches"], strict=True):
            alike(library, saved.backward(got["y"]), other.backward(wanted["y"]))


@only(*BOTH)
def test_gradients_leave(library: Backend) -> None:
    """Also where the cache saves nothing."""
    x = library.asarray(X)

    def fn(x: Any) -> Any:
        with xf.inference():
            y, none = ops.gelu(x)
        return y, none

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, none = xf.compile(fn)(x)
    alike(library, y, fn(x)[0])
    with pytest.raises(RuntimeError, match=r"within inference\(\)"):
        none.backward(y)


# ---- States ----


@only(*(name for name in LIBRARIES if name not in ON_DEVICE))  # the host would wait for the device
@pytest.mark.parametrize("name", ["gpt2", "llama", "relative bias", "padded"])
def test_a_growing_state(library: Backend, name: str) -> None:
    """Its length is a number: what the model reads from it is never the number of another call."""
    model, params = causal("llama" if name == "padded" else name)
    params = on(library, tree.map(lambda p: p.astype(np.float32), params))
    compiled = xf.compile(lambda p, t, s: model.decode(p, t, s))
    mask = {"mask": library.asarray(np.arange(3) > [[0], [1]])} if name == "padded" else {}
    _, state = model.decode(params, library.asarray(IDS[:, :3]), model.init_state(), **mask)
    ours = state
    for t in range(3, 9):
        tokens = library.asarray(IDS[:, t : t + 1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got, ours = compiled(params, tokens, ours)
        wanted, state = model.decode(params, tokens, state)
        alike(library, got, wanted)
        assert int(ours.length) == state.length and not ours.is_static


# ---- Numbers ----


@only("numpy")
def test_numbers_stay_numbers(library: Backend) -> None:
    pytest.importorskip("numba", reason="numba is not installed")

    def fn(x: Any, rate: float, n: int) -> Any:
        later = {"rate": rate * 0.5, "n": n + 1, "ratio": n / 4, "same": rate, "more": n > 2}
        return x * rate, later, [n // 2, n % 3, -n, abs(n), n**2, rate**n, 2.0**-n, rate - n]

    compiled = xf.compile(fn)
    x, y, ours, numbers = X, X, (0.1, 2), (0.1, 2)
    for _ in range(4):
        (x, later, many), (y, wanted, more) = compiled(x, *ours), fn(y, *numbers)
        assert [*map(type, later.values())] == [float, int, float, float, bool]
        assert later == wanted and [*map(type, many)] == [*map(type, more)]
        np.testing.assert_allclose(many, more, rtol=1e-15)
        np.testing.assert_allclose(x, y, rtol=1e-6)
        assert x.dtype == y.dtype == np.float32
        ours, numbers = (later["rate"], later["n"]), (wanted["rate"], wanted["n"])
    assert "instructions" in compiled.explain() and "not recorded" not in compiled.explain()


@only("numpy")
@pytest.mark.parametrize("n", [np.float64(0.3), np.float32(0.3), np.int32(2), np.int64(2)])
def test_scalars_of_numpy_keep_their_dtype(library: Backend, n: Any) -> None:
    x = library.xp.asarray([1, 2, 3], dtype="float32")
    got, wanted = (fn(x, n) for fn in (xf.compile(lambda x, n: x * n), lambda x, n: x * n))
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)


class Kind(enum.IntEnum):
    ONE = 1
    TWO = 2


def promoted(xp: Any, x: Any, n: Any) -> Any:
    return xp.astype(x, xp.result_type(x, n))


@only("numpy")
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, n: x * (2.0 if isinstance(n, float) else 3.0),
        lambda x, n: x * (2.0 if isinstance(n, int) else 3.0),
        lambda x, n: x * (2.0 if hasattr(n, "dtype") else len(getattr(n, "shape", "abc"))),
        lambda x, n: x * {0: 2.0, 1: 3.0, 2.0: 5.0}.get(n, 7.0),
        lambda x, n: (x, f"step {n}", str(n), f"{n:.3f}"),
        lambda x, n: x * (n % 5) ** (n % 3),
        lambda x, n: x + (n > 1) + (n > 0) + ((n > 1) + (n > 0)),
        lambda x, n: x.__array_namespace__().asarray(n) * x,
        lambda x, n: promoted(x.__array_namespace__(), x, n),
        lambda x, n: x.__array_namespace__().sqrt(x.__array_namespace__().asarray(n)) * x,
    ],
    ids=[
        "float",
        "int",
        "attributes",
        "dict",
        "text",
        "power",
        "bools",
        "asarray",
        "result_type",
        "sqrt",
    ],
)
@pytest.mark.parametrize("n", [1, 2, 2.0, 0.5, 2**40, 2**63])
def test_what_is_read_from_a_number(library: Backend, fn: Callable[..., Any], n: Any) -> None:
    """The same values and dtypes, or the function itself."""
    X = library.xp.asarray([1, 2, 3], dtype="float32")
    compiled = xf.compile(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in (n, type(n)(1)):
            got, wanted = compiled(X, number), fn(X, number)
            if isinstance(wanted, tuple):
                assert got[1:] == wanted[1:]
                got, wanted = got[0], wanted[0]
            assert got.dtype == wanted.dtype
            np.testing.assert_array_equal(got, wanted)


@only(*BOTH)
def test_names_and_members_select(library: Backend) -> None:
    """A member of an enum is no number, though it is an int."""
    x = library.asarray(X)
    compiled = xf.compile(lambda x, kind: x * 2 if kind is Kind.TWO else x)
    for kind in (Kind.TWO, Kind.ONE, Kind.TWO):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy has one graph, and says so
            alike(library, compiled(x, kind), x * int(kind))


# ---- Other results ----


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Output:
    logits: Any
    name: str = "logits"


@only(*BOTH)
def test_plain_values(library: Backend) -> None:
    def fn(x: Any, config: Any) -> Any:
        return {"x": x * 2, "none": None, "s": "text", "b": [True, 3, 2.5], "pair": Pair(x, config)}

    config, x = frozenset({"a"}), library.asarray(X)
    compiled = xf.compile(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            got = compiled(x, config)
            alike(library, got.pop("x"), x * 2)
            pair = got.pop("pair")
            alike(library, pair.first, x)
            assert pair.second is config
            assert got == {"none": None, "s": "text", "b": [True, 3, 2.5]}
            assert [*map(type, got["b"])] == [bool, int, float]
    assert compiled(x, config) is not compiled(x, config)


@only(*BOTH)
@pytest.mark.parametrize(
    "wrap",
    [
        Output,
        lambda x: {"all": [Output(x)]},
        lambda x: {1: x}.items(),
        lambda x: lambda: x,
        lambda x: iter([x]),
        lambda x: {id(x)},
    ],
    ids=["dataclass", "within", "items", "function", "iterator", "set"],
)
def test_objects_that_are_no_trees(library: Backend, wrap: Callable[[Any], Any]) -> None:
    x = library.asarray(X)
    compiled = xf.compile(lambda x: wrap(x * 2))
    for got in said_once(library, compiled, "which is no tree", x):
        got = got["all"][0] if isinstance(got, dict) else got
        if isinstance(got, Output):
            assert got.name == "logits"
            alike(library, got.logits, x * 2)
        else:
            assert type(got) is type(wrap(x))


@only(*BOTH)
def test_frozen_leaves_are_results(library: Backend) -> None:
    params = tree.freeze(on(library, {"a": X, "b": X}), "a")
    compiled = xf.compile(lambda p: (p, tree.map(lambda x: x * 2, p)), donate=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same, double = compiled(params)
    for got, factor in ((same, 1), (double, 2)):
        assert isinstance(got["a"], tree.Frozen)
        np.testing.assert_array_equal(library.to_numpy(got["a"].value), factor * X)
        np.testing.assert_array_equal(library.to_numpy(got["b"]), factor * X)


@only("numpy")
def test_arrays_that_a_function_makes_or_holds(library: Backend) -> None:
    """A caller may write over them."""
    held = np.ones(3)
    compiled = xf.compile(lambda x: (x * 2, held, np.arange(3), np.float32(2)))
    for _, same, new, two in said_once(library, compiled, "array of NumPy", X):
        assert same is held and new.tolist() == [0, 1, 2] and type(two) is np.float32
        new += 1


# ---- Empty arrays ----


@only("numpy", "torch", "jax")
def test_empty_slices_are_donated(library: Backend) -> None:
    def fn(parts: Any, y: Any) -> Any:
        return [x * 2 for x in parts], y + 1

    x, y = on(library, X), on(library, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (first, second, third), more = xf.compile(fn, donate=0)([x[2:2], x[6:], x + 0], y)
    assert tuple(first.shape) == tuple(second.shape) == (0,)
    np.testing.assert_array_equal(library.to_numpy(third), 2 * X)
    np.testing.assert_array_equal(library.to_numpy(more), X + 1)


@only("numpy")
def test_an_empty_slice_within_a_donated_array(library: Backend) -> None:
    x = X.copy()
    first, second = xf.compile(lambda a, b: (a + 1, b * 2), donate=(0, 1))(x, x[2:2])
    np.testing.assert_array_equal(first, X + 1)
    assert second.shape == (0,)
    if "numba" in backends.available():
        assert first is x


@only("numpy", "torch", "jax")
def test_an_empty_batch_of_a_model_with_relative_bias(library: Backend) -> None:
    model, params = causal("relative bias")
    params = on(library, tree.map(lambda p: p.astype(np.float32), params))
    ids = library.asarray(np.zeros((0, 5), np.int64))

    def fn(params: Any, ids: Any) -> Any:
        y, cache = model.forward(params, ids)
        return y, cache.backward(y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = xf.compile(fn)(params, ids)
    alike(library, got, fn(params, ids))
