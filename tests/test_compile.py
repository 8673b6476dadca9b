"""`xformer.compile` on every library: what a function computes, in as few arrays as it is told."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from libraries import LIBRARIES, ON_DEVICE, STAND_IN, only
from nvidia import counted_graphs

import xformer as xf
from xformer import GPT, backends, optim, tree
from xformer.backends import Backend

MODEL = GPT(19, n_layers=1, d_model=8, n_heads=2, max_len=6)
BOTH = (*LIBRARIES, STAND_IN)
IDS = np.random.default_rng(1).integers(0, 19, (5, 2, 7))


@pytest.fixture
def graphs(library: Backend) -> Iterator[list[Any]]:
    if library.name not in ON_DEVICE:
        yield []
        return
    with counted_graphs(library) as made:
        yield made


def on(library: Backend, values: Any) -> Any:
    return tree.map(lambda x: library.asarray(np.array(x)), values)


def host(library: Backend, values: Any) -> Any:
    leaves = tree.flatten({"": values}).items()
    return {name: library.to_numpy(tree.value(leaf)) for name, leaf in leaves}


def training(params: Any, state: Any, tokens: Any, targets: Any, rate: Any) -> Any:
    loss, cache = MODEL.loss(params, tokens, targets)
    trained, state = optim.sgd(tree.trained(params), cache.backward(), state, lr=rate)
    return trained, state, loss


@only(*BOTH)
def test_a_training_step(library: Backend, graphs: list[Any]) -> None:
    """Five of them, with frozen parameters, arrays of the host and the device, and a number."""
    start = tree.freeze(MODEL.init(dtype="float32"), "embed.*")
    ours, other = on(library, start), on(library, start)
    state = own = optim.sgd_init(tree.trained(ours))
    step = xf.compile(training, donate=(0, 1))
    for i, ids in enumerate(IDS):
        data = library.asarray(ids[:, :-1]), library.asarray(ids[:, 1:])
        new, own, loss = step(ours, own, *data, 0.1 / (1 + i))
        ours = tree.join(ours, new)
        new, state, wanted = training(other, state, *data, 0.1 / (1 + i))
        other = tree.join(other, new)
        np.testing.assert_allclose(float(loss), float(wanted), rtol=1e-5)
    got, wanted = host(library, ours), host(library, other)
    for name, x in got.items():
        np.testing.assert_allclose(x, wanted[name], atol=2e-5, err_msg=name)
    for name, leaf in tree.flatten(start).items():
        if isinstance(leaf, tree.Frozen):
            np.testing.assert_array_equal(got[name], leaf.value)
    assert step.explain() and "nothing is compiled" not in step.explain()
    if library.name in ON_DEVICE:  # batches are other arrays each time: from the third one on
        assert [graph.launches for graph in graphs] == [0, 3]


@only(*BOTH)
def test_results_stay(library: Backend) -> None:
    """Of calls before: none is written over but by what was donated."""
    double = xf.compile(lambda x, y: {"y": x * 2 + y})
    x = library.asarray(np.arange(6.0, dtype=np.float32))
    kept = [double(x, float(i))["y"] for i in range(5)]
    for i, y in enumerate(kept):
        np.testing.assert_array_equal(library.to_numpy(y), np.arange(6) * 2.0 + i)
    other = library.asarray(np.ones(6, np.float32))
    np.testing.assert_array_equal(library.to_numpy(double(other, 1.0)["y"]), np.full(6, 3.0))
    np.testing.assert_array_equal(library.to_numpy(x), np.arange(6))
    np.testing.assert_array_equal(library.to_numpy(double(x, 1.0)["y"]), np.arange(6) * 2.0 + 1)


@only(*BOTH)
def test_donated_arrays_that_change_places(library: Backend) -> None:
    """Each becomes the next one's value, and none is lost."""
    turn = xf.compile(lambda s, y: ((s[1], s[2], s[0]), s[0] + y), donate=0)
    state = tuple(on(library, [np.full(3, float(i)) for i in range(3)]))
    for i in range(5):
        state, total = turn(state, 1.0)
        got = [library.to_numpy(x).tolist() for x in (*state, total)]
        assert got == [[float(n)] * 3 for n in ((i + 1) % 3, (i + 2) % 3, i % 3, i % 3 + 1)]


@only(*BOTH)
def test_other_trees_and_shapes(library: Backend) -> None:
    def fn(arrays: Any, doubled: bool, power: Any) -> Any:
        return [x * (2 if doubled else 1) for x in arrays.values()], power

    call = xf.compile(fn)
    for n in (2, 3):
        arrays = {name: np.full((n,), i, np.float32) for i, name in enumerate("abc"[:n])}
        for doubled in (True, False):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # CuPy has one graph, and says so
                got, none = call(on(library, arrays), doubled, None)
            assert none is None
            wanted = [np.full((n,), i * (1 + doubled)) for i in range(n)]
            np.testing.assert_array_equal([library.to_numpy(x) for x in got], wanted)


@only(*BOTH)
def test_a_function_that_looks_at_values(library: Backend) -> None:
    """It is called as it is; where something else was to be expected, that is said."""

    def fn(x: Any) -> Any:
        return x if float(x[0]) > 0 else -x

    call = xf.compile(fn)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for value in (1.0, -2.0, 3.0):
            x = library.asarray(np.asarray([value, 1], np.float32))
            got = library.to_numpy(call(x))
            np.testing.assert_array_equal(got, [abs(value), value / abs(value)])
    numba = library.xp is backends.get().xp and importlib.util.find_spec("numba")
    assert len({str(each.message) for each in said}) == bool(
        numba or library.name in ("jax", "cupy", "cuda_shim")
    )


class Scaled:
    """A class with compiled methods."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    @xf.compile
    def times(self, x: Any) -> Any:
        return x * self.scale

    @staticmethod
    @xf.compile
    def twice(x: Any) -> Any:
        return x * 2


@only(*BOTH)
def test_methods(library: Backend) -> None:
    x, scaled = library.asarray(np.ones(3, np.float32)), Scaled(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy has one graph, and says so
        for scale in (3.0, 5.0):
            scaled.scale = scale
            for got, want in ((scaled.times(x), scale), (Scaled.times(Scaled(7.0), x), 7.0)):
                np.testing.assert_array_equal(library.to_numpy(got), np.full(3, want))
        np.testing.assert_array_equal(library.to_numpy(scaled.twice(x)), np.full(3, 2.0))


@only("numpy")
def test_copies(library: Backend) -> None:
    """A copy compiles again, with the same donated arguments."""
    compiled = xf.compile(np.negative, donate=0)
    for copied in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        assert copied.fn is np.negative and copied.donate == (0,)


@only("numpy")
def test_what_is_refused(library: Backend) -> None:
    x = np.ones(2)
    with pytest.raises(TypeError, match="compile: fn must be a function, got 3"):
        xf.compile(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"compile: donate\[1\] must be an int of at least 0"):
        xf.compile(np.negative, donate=(0, -1))
    with pytest.raises(ValueError, match=r"donate must be below the 1 arguments, got \(1,\)"):
        xf.compile(lambda x: x, donate=1)(x)
    with pytest.raises(ValueError, match="an argument must hold an array, got none"):
        xf.compile(lambda x: x)(3.0)
    assert "nothing is compiled yet" in xf.compile(lambda x: x).explain()
