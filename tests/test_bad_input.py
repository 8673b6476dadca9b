"""Bad input, tried systematically: a message that names op, argument, wanted and got, or the right
result; never silence, never NaN.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from block_configs import block_config
from libraries import ON_DEVICE

import xformer
from xformer import backends, dispatch, layers, ops, tree
from xformer.backends import Backend
from xformer.layers import (
    AttentionConfig,
    AttentionParams,
    BlockConfig,
    EmbedConfig,
    ExpertsConfig,
    FeedForwardConfig,
    KeyValueParams,
    LinearParams,
)
from xformer.models import EncoderDecoder, LanguageModel, LMHead
from xformer.proofs import catalogue

KEY = xformer.RandomKey(3, 1)


def few(library: Backend, cases: Any, n: int = 1) -> list[Any]:
    """The cases, on JAX only the first: it compiles every op anew for every shape, for seconds."""
    return list(cases)[:n] if library.name == "jax" else list(cases)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=shape)


def raises(error: type[Exception] | tuple[type[Exception], ...], message: str) -> Any:
    """The whole message must be this, up to a `...` at its end."""
    whole = re.escape(message.removesuffix("...")) + ("" if message.endswith("...") else "$")
    return pytest.raises(error, match=f"^{whole}")


def as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


# ---- Every op: arrays of wrong kind, type, rank and size ----


class Call(NamedTuple):
    """Good arguments of an op: positional arrays by name, and options."""

    arrays: dict[str, np.ndarray]
    options: dict[str, Any]

    def on(self, library: Backend) -> tuple[dict[str, Any], dict[str, Any]]:
        def move(x: Any) -> Any:
            return library.asarray(x) if isinstance(x, np.ndarray) else x

        return {k: move(x) for k, x in self.arrays.items()}, {
            k: move(x) for k, x in self.options.items()
        }


IDS = np.array([[1, 0, 4], [4, 4, 2]])
X = numbers(2, 3, 5)
CALLS = {
    "linear": Call({"x": X, "w": numbers(5, 7), "b": numbers(7)}, {}),
    "embedding": Call({"table": numbers(5, 7)}, {"ids": IDS}),
    "layer_norm": Call({"x": X, "w": numbers(5), "b": numbers(5)}, {}),
    "rms_norm": Call({"x": X, "w": numbers(5)}, {}),
    "l2_normalize": Call({"x": X}, {}),
    "scale": Call({"x": X, "alpha": numbers(1)}, {}),
    "softmax": Call({"x": X}, {}),
    "log_softmax": Call({"x": X}, {}),
    "relu": Call({"x": X}, {}),
    "gelu": Call({"x": X}, {}),
    "silu": Call({"x": X}, {}),
    "tanh": Call({"x": X}, {}),
    "sigmoid": Call({"x": X}, {}),
    "erf": Call({"x": X}, {}),
    "relu_squared": Call({"x": X}, {}),
    "quick_gelu": Call({"x": X}, {}),
    "softcap": Call({"x": X}, {"cap": 1.5}),
    "glu": Call({"gate": X, "up": numbers(2, 3, 5)}, {}),
    "clamped_swiglu": Call({"gate": X, "up": numbers(2, 3, 5)}, {}),
    "rope": Call({"x": numbers(2, 4, 3, 5)}, {"cos": numbers(3, 2), "sin": numbers(3, 2)}),
    "dropout": Call({"x": X}, {"rate": 0.5, "key": KEY}),
    "sdpa": Call(
        {
            "q": numbers(2, 4, 3, 5),
            "k": numbers(2, 2, 7, 5),
            "v": numbers(2, 2, 7, 6),
            "bias": numbers(4, 1, 7),
            "sinks": numbers(4),
        },
        {"mask": numbers(2, 1, 3, 7) > 0},
    ),
    "shaw": Call(
        {
            "q": numbers(2, 4, 3, 5),
            "k": numbers(2, 2, 7, 5),
            "v": numbers(2, 2, 7, 6),
            "rel_k": numbers(3, 5),
            "rel_v": numbers(3, 6),
        },
        {"mask": numbers(2, 1, 3, 7) > 0},
    ),
    "lsh_attention": Call(
        {"qk": numbers(2, 4, 6, 5), "v": numbers(2, 4, 6, 7)},
        {"key": KEY, "n_buckets": 4, "chunk_len": 3},
    ),
    "additive_attention": Call(
        {
            "q": numbers(2, 4, 3, 5),
            "k": numbers(2, 2, 7, 5),
            "v": numbers(2, 2, 7, 6),
            "w": numbers(4, 5),
        },
        {"mask": numbers(2, 1, 3, 7) > 0},
    ),
    "xl_attention": Call(
        {
            "q": numbers(2, 4, 3, 5),
            "k": numbers(2, 2, 7, 5),
            "v": numbers(2, 2, 7, 6),
            "r": numbers(2, 9, 5),
            "content_bias": numbers(4, 5),
            "position_bias": numbers(4, 5),
        },
        {"mask": numbers(2, 1, 3, 7) > 0},
    ),
    "causal_conv": Call({"x": X, "w": numbers(4, 5), "before": numbers(2, 3, 5)}, {}),
    "log_decay": Call({"x": X, "log_rate": numbers(5)}, {}),
    "gated_delta_rule": Call(
        {
            "q": numbers(2, 2, 3, 5),
            "k": numbers(2, 2, 3, 5),
            "v": numbers(2, 4, 3, 7),
            "log_decay": -abs(numbers(2, 4, 3)),
            "beta": numbers(2, 4, 3),
            "state": numbers(2, 4, 5, 7),
        },
        {},
    ),
    "cross_entropy": Call({"logits": X}, {"targets": IDS}),
    "linear_cross_entropy": Call({"x": X, "w": numbers(5, 7), "b": numbers(7)}, {"targets": IDS}),
    "mse": Call({"x": X, "y": numbers(2, 3, 5)}, {}),
    "info_nce": Call({"a": numbers(3, 5), "b": numbers(3, 5)}, {}),
    "index_add": Call({"x": numbers(5, 7), "y": numbers(3, 7)}, {"ids": IDS[0]}),
    "experts": Call(
        {
            "x": numbers(2, 3),
            "w_gate": numbers(5, 3, 7),
            "w_up": numbers(5, 3, 7),
            "w_down": numbers(5, 7, 3),
            "weights": numbers(2, 3),
            "b_gate": numbers(5, 7),
            "b_up": numbers(5, 7),
            "b_down": numbers(5, 3),
        },
        {"ids": IDS},
    ),
    "load_balancing": Call(
        {"logits": numbers(2, 5)}, {"ids": IDS, "mask": np.array([True, False])}
    ),
    "router_z_loss": Call({"logits": numbers(2, 5)}, {"mask": np.array([True, False])}),
}

OF_OPTIONS = {"linear_cross_entropy": "cross_entropy"}  # the op that refuses bad ones


def run(name: str, arrays: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any]:
    """The output, and the gradients of all arrays."""
    y, cache = getattr(ops, name)(*arrays.values(), **options)
    grads = as_tuple(cache.backward(*(part + 0 for part in as_tuple(y))))
    return as_tuple(y)[0], grads


def test_every_op_is_tried() -> None:
    checked = {op.__name__ for op in dispatch.ops() if op._check and op.__module__.startswith("xf")}
    assert checked == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_good_arguments_are_good(library: Backend, name: str) -> None:
    arrays, options = CALLS[name].on(library)
    y, grads = run(name, arrays, options)
    assert np.isfinite(library.to_numpy(y)).all()
    for array, grad in zip(arrays.values(), grads, strict=True):
        assert tuple(grad.shape) == tuple(array.shape)
        assert grad.dtype == array.dtype
        assert np.isfinite(library.to_numpy(grad)).all()


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_array(library: Backend, name: str) -> None:
    arrays, options = CALLS[name].on(library)
    for argument in arrays:
        for bad in (CALLS[name].arrays[argument].tolist(), 1.5, "x", object(), (1.0, 2.0)):
            with raises(
                TypeError, f"{name}: {argument} must be an array, got {type(bad).__name__}"
            ):
                run(name, arrays | {argument: bad}, options)
        if inspect.signature(getattr(ops, name)).parameters[argument].default is not None:
            with raises(TypeError, f"{name}: {argument} must be an array, got None"):
                run(name, arrays | {argument: None}, options)


@pytest.mark.parametrize("name", CALLS)
def test_wrong_dtypes(library: Backend, name: str) -> None:
    arrays, options = CALLS[name].on(library)
    first = next(iter(arrays))
    for argument, array in arrays.items():
        for dtype in ("int8", "int64", "uint8", "bool", "complex64", "complex128", "float16"):
            kind = getattr(library.xp, dtype, None)
            if kind is None:
                continue  # array-api-strict has no float16
            bad = library.xp.astype(array, kind)
            wanted = "float32 or float64" if argument == first else f"float64 like {first}"
            is_stored = dtype == "float16" and argument == first  # by some libraries
            more = f", which no kernel of {name} for ..." if is_stored else ""
            with raises(TypeError, f"{name}: {argument} must be {wanted}, got {dtype}{more}"):
                run(name, arrays | {argument: bad}, options)
        if len(arrays) > 1:
            narrow = arrays | {argument: library.xp.astype(array, library.xp.float32)}
            with raises(TypeError, f"{name}: ..."):
                run(name, narrow, options)


@pytest.mark.parametrize("name", CALLS)
def test_mixed_libraries(library: Backend, name: str) -> None:
    other = backends.get("array-api-strict" if "strict" not in library.name else "numpy")
    arrays, options = CALLS[name].on(library)
    foreign_arrays, foreign_options = CALLS[name].on(other)
    both = [(arrays, argument, foreign_arrays) for argument in list(arrays)[1:]]
    both += [(options, k, foreign_options) for k, v in options.items() if hasattr(v, "shape")]
    for here, argument, there in both:
        mixed = here | {argument: there[argument]}
        call = (mixed, options) if here is arrays else (arrays, mixed)
        op = OF_OPTIONS.get(name, name) if here is options else name
        with raises(TypeError, f"{op}: {argument} must be an array of ..."):
            run(name, *call)


@pytest.mark.parametrize("name", CALLS)
def test_mixed_devices(name: str) -> None:
    here, there = (backends.get("array-api-strict", d) for d in ("CPU_DEVICE", "device1"))
    arrays, options = CALLS[name].on(here)
    other_arrays, other_options = CALLS[name].on(there)
    for argument in list(arrays)[1:]:
        with raises(ValueError, f"{name}: {argument} must be on ..."):
            run(name, arrays | {argument: other_arrays[argument]}, options)
    for argument, value in options.items():
        if hasattr(value, "shape"):
            with raises(ValueError, f"{OF_OPTIONS.get(name, name)}: {argument} must be on ..."):
                run(name, arrays, options | {argument: other_options[argument]})


def resized(array: np.ndarray) -> Iterator[np.ndarray]:
    """The array with an axis more, one less, and each size one larger, one smaller, 1, 0."""
    yield array[None]
    if array.ndim:
        yield np.asarray(array[0])
    for axis, size in enumerate(array.shape):
        for other in {size + 1, size - 1, 1, 0} - {size}:
            yield np.resize(array, (*array.shape[:axis], other, *array.shape[axis + 1 :]))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("library_name", ["numpy", "array-api-strict"])
def test_other_shapes_are_refused_or_right(library_name: str, name: str) -> None:
    """Where another shape is accepted, it is a shape of the op: everything fits and is finite."""
    library = backends.get(library_name)
    good = CALLS[name]
    refused = 0
    for place, values in (("arrays", good.arrays), ("options", good.options)):
        for argument, array in values.items():
            if not isinstance(array, np.ndarray):
                continue
            for other in resized(array):
                call = good._replace(**{place: values | {argument: other}})
                arrays, options = call.on(library)
                try:
                    y, grads = run(name, arrays, options)
                except ValueError as error:
                    assert re.match(rf"{name}: \w+( \S+)* must ", str(error)), error
                    refused += 1
                    continue
                assert np.isfinite(library.to_numpy(y)).all()
                for a, grad in zip(arrays.values(), grads, strict=True):
                    assert tuple(grad.shape) == tuple(a.shape)
                    assert np.isfinite(library.to_numpy(grad)).all()
    any_shape = name in ("dropout", "softcap") or len(good.arrays) + len(good.options) == 1
    assert refused or any_shape


def test_options_do_not_widen_float32() -> None:
    """NumPy's float64 scalars, such as 1 / np.sqrt(K), would turn float32 arrays into float64."""
    half = np.float64(0.5)
    options = {
        "layer_norm": {"eps": half},
        "rms_norm": {"eps": half, "offset": half},
        "l2_normalize": {"eps": half},
        "softcap": {"cap": half},
        "clamped_swiglu": {"limit": half},
        "rope": {name: x.astype(np.float32) for name, x in CALLS["rope"].options.items()},
        "dropout": {"rate": half},
        "sdpa": {"scale": half, "softcap": half, "dropout_rate": half, "dropout_key": KEY},
        "shaw": {"scale": half, "dropout_rate": half, "dropout_key": KEY},
        "xl_attention": {"scale": half, "dropout_rate": half, "dropout_key": KEY},
        "gated_delta_rule": {"scale": half},
        "cross_entropy": {"label_smoothing": half, "z_loss": half},
        "linear_cross_entropy": {"label_smoothing": half, "z_loss": half},
        "info_nce": {"scale": half},
    }
    for name, call in CALLS.items():
        arrays = {k: x.astype(np.float32) for k, x in call.arrays.items()}
        y, grads = run(name, arrays, call.options | options.get(name, {}))
        assert {y.dtype, *(g.dtype for g in grads)} == {np.dtype("float32")}, name


# ---- Ids and targets ----

ID_OPS = {"embedding": "ids", "index_add": "ids", "cross_entropy": "targets"}


@pytest.mark.parametrize("name", ID_OPS)
def test_ids_out_of_range(library: Backend, name: str) -> None:
    if library.name in ON_DEVICE:
        pytest.skip("on CUDA ids give NaN: test_cuda_kernels.py")
    arrays, options = CALLS[name].on(library)
    argument = ID_OPS[name]
    good = CALLS[name].options[argument]
    for bad, span in (
        (-1, "-1 to 4"),
        (5, "0 to 5"),
        (2**40, f"0 to {2**40}"),
        (-(2**63), "-92..."),
    ):
        ids = good.copy().ravel()
        ids[0] = bad
        where = library.asarray(ids.reshape(good.shape))
        with raises(ValueError, f"{name}: {argument} must lie in [0, 5), got ids from {span}"):
            run(name, arrays, options | {argument: where})


@pytest.mark.parametrize("name", ID_OPS)
def test_ids_of_wrong_type(library: Backend, name: str) -> None:
    arrays, options = CALLS[name].on(library)
    argument = ID_OPS[name]
    good = CALLS[name].options[argument]
    for dtype in ("float32", "float64", "bool"):
        bad = library.asarray(good, dtype)
        with raises(TypeError, f"{name}: {argument} must be an integer array, got dtype ..."):
            run(name, arrays, options | {argument: bad})
    for bad in (good.tolist(), 3, None, "1"):
        got = "None" if bad is None else type(bad).__name__
        with raises(TypeError, f"{name}: {argument} must be an integer array, got {got}"):
            run(name, arrays, options | {argument: bad})
    with pytest.raises(TypeError, match=rf"missing .* '{argument}'"):
        run(name, arrays, {})


INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@pytest.mark.parametrize("name", ID_OPS)
def test_every_integer_type_will_do(library: Backend, name: str) -> None:
    """With a size, 300, that some of them cannot hold."""
    argument = ID_OPS[name]
    good = CALLS[name]
    shapes = {
        "embedding": [(300, 2)],
        "index_add": [(300, 2), (3, 2)],
        "cross_entropy": [(2, 3, 300)],
    }
    arrays = dict(zip(good.arrays, (numbers(*s) for s in shapes[name]), strict=True))
    wanted = run(name, arrays, good.options)
    on_library = {k: library.asarray(x) for k, x in arrays.items()}
    for dtype in INTEGERS:
        ids = library.asarray(good.options[argument], dtype)
        y, grads = run(name, on_library, {argument: ids})
        for got, exact in zip((y, *grads), (wanted[0], *wanted[1]), strict=True):
            assert np.allclose(library.to_numpy(got), exact, rtol=1e-12, atol=1e-15), dtype


def test_ignore_index_beyond_the_type_of_the_targets(library: Backend) -> None:
    logits = library.asarray(X)
    wanted, _ = ops.cross_entropy(X, targets=IDS)
    for dtype in INTEGERS:
        targets = library.asarray(IDS, dtype)
        for ignore_index in (-100, 300, -1):
            loss, _ = ops.cross_entropy(logits, targets=targets, ignore_index=ignore_index)
            assert float(loss) == pytest.approx(float(wanted), rel=1e-12), (dtype, ignore_index)
    bytes_ = library.asarray(np.where(IDS == 4, 255, IDS), "uint8")
    loss, _ = ops.cross_entropy(logits, targets=bytes_, ignore_index=255)
    wanted, _ = ops.cross_entropy(X, targets=IDS, ignore_index=4)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-12)


def test_ids_that_no_index_holds(library: Backend) -> None:
    """uint64 from 2^63 on: named as they are, and no negative number that is ignored."""
    table = library.asarray(numbers(5, 3).astype(np.float32))
    large = [2**63, 2**64 - 100, 2**64 - 1] if library.name != "jax" else [2**31, 2**32 - 100]
    kind = np.uint64 if library.name != "jax" else np.uint32
    for ids, span in (
        ([3, large[0]], (3, large[0])),
        (large, (large[0], large[-1])),
        ([large[1], 4], (4, large[1])),
    ):
        given = library.asarray(np.array(ids, kind))
        message = f"got ids from {span[0]} to {span[1]}"
        with raises(ValueError, f"embedding: ids must lie in [0, 5), {message}"):
            ops.embedding(table, ids=given)
        logits = library.asarray(np.ones((len(ids), 5), np.float32))
        for options in ({}, {"ignore_index": -100}):
            with raises(ValueError, f"cross_entropy: targets must lie in [0, 5), {message}"):
                ops.cross_entropy(logits, targets=given, **options)


def test_repeated_ids_sum_and_no_ids_give_zero(library: Backend) -> None:
    table = library.asarray(numbers(5, 7))
    y, cache = ops.embedding(table, ids=library.asarray(np.full((4,), 2)))
    dtable = library.to_numpy(cache.backward(library.xp.ones_like(y)))
    assert dtable.tolist() == [[0.0] * 7] * 2 + [[4.0] * 7] + [[0.0] * 7] * 2
    y, cache = ops.embedding(table, ids=library.asarray(np.zeros((2, 0), int)))
    assert tuple(y.shape) == (2, 0, 7)
    assert not library.to_numpy(cache.backward(y)).any()


# ---- Masks and biases ----


def test_masks_of_wrong_type(library: Backend) -> None:
    arrays, options = CALLS["sdpa"].on(library)
    mask = CALLS["sdpa"].options["mask"]
    additive = np.where(mask, 0.0, -np.inf)
    for bad in (additive, np.full(mask.shape, np.nan), mask.astype(int), mask.astype("float32")):
        with raises(TypeError, "sdpa: mask must be boolean (True = may attend), got dtype ..."):
            run("sdpa", arrays, {"mask": library.asarray(bad)})
    for bad in (mask.tolist(), True, "causal"):
        with raises(TypeError, f"sdpa: mask must be a boolean array, got {type(bad).__name__}"):
            run("sdpa", arrays, {"mask": bad})
    with raises(TypeError, "sdpa: bias must be float64 like q, got bool"):
        run("sdpa", arrays | {"bias": options["mask"]}, {})


def test_masks_and_biases_of_wrong_shape(library: Backend) -> None:
    arrays, _ = CALLS["sdpa"].on(library)  # B = 2, H = 4, T = 3, S = 7
    for shape in ((7, 3), (2, 3, 7), (3, 1, 3, 7), (1, 2, 4, 3, 7), (2, 2, 3, 7), (6,), (0,)):
        wanted = f"must broadcast to (B, H, T, S) = (2, 4, 3, 7), got shape {shape}"
        with raises(ValueError, f"sdpa: mask {wanted}"):
            run("sdpa", arrays, {"mask": library.asarray(np.ones(shape, bool))})
        with raises(ValueError, f"sdpa: bias {wanted}"):
            run("sdpa", arrays | {"bias": library.asarray(np.ones(shape))}, {})
    for shape in ((), (7,), (1,), (3, 1), (4, 3, 7), (2, 1, 1, 7)):
        y, grads = run("sdpa", arrays, {"mask": library.asarray(np.zeros(shape, bool))})
        assert not library.to_numpy(y).any()  # nothing to attend to: 0, and gradient 0
        for grad in grads:
            assert not library.to_numpy(grad).any()


def test_bias_of_minus_infinity_is_a_mask(library: Backend) -> None:
    arrays, options = CALLS["sdpa"].on(library)
    zero = {"bias": library.asarray(np.zeros((2, 1, 3, 7)))}
    forbid = {"bias": library.asarray(np.where(CALLS["sdpa"].options["mask"], 0.0, -np.inf))}
    masked, biased = run("sdpa", arrays | zero, options), run("sdpa", arrays | forbid, {})
    for a, b in zip((masked[0], *masked[1]), (biased[0], *biased[1]), strict=True):
        assert np.allclose(library.to_numpy(a), library.to_numpy(b), rtol=1e-13, atol=1e-16)
    nothing = {"bias": library.asarray(np.full((1, 7), -np.inf))}
    y, grads = run("sdpa", arrays | nothing, {})
    assert not any(library.to_numpy(a).any() for a in (y, *grads))


def test_heads() -> None:
    q, k, v = numbers(1, 4, 3, 5), numbers(1, 3, 7, 5), numbers(1, 3, 7, 5)
    with raises(ValueError, "sdpa: the 3 heads of k must divide the 4 heads of q"):
        ops.sdpa(q, k, v)
    with raises(ValueError, "sdpa: k must have at least one head, got shape (1, 0, 7, 5)"):
        ops.sdpa(q, k[:, :0], v[:, :0])
    with raises(
        ValueError, "sdpa: v must be (B, G, S, M) with B = 1 (from q), G = 3 (from k), S..."
    ):
        ops.sdpa(q, k, v[:, :1])


# ---- Nothing at all ----

EMPTY = {
    "linear": [[(0, 3), (3, 4), (4,)], [(2, 0), (0, 4), (4,)], [(2, 3), (3, 0), (0,)]],
    "layer_norm": [[(0, 3), (3,), (3,)], [(2, 0, 3), (3,), (3,)], [(2, 1), (1,), (1,)]],
    "rms_norm": [[(0, 3), (3,)], [(2, 0, 3), (3,)], [(2, 1), (1,)]],
    "l2_normalize": [[(0, 3)], [(2, 0, 3)], [(3, 1)]],
    "scale": [[(0,), (1,)], [(2, 0, 3), (1,)], [(), (1,)]],
    "softmax": [[(0, 3)], [(2, 0, 3)], [(3, 1)]],
    "log_softmax": [[(0, 3)], [(2, 0, 3)], [(3, 1)]],
    **{name: [[(0,)], [(2, 0, 3)], [()]] for name in ("relu", "gelu", "silu", "tanh", "sigmoid")},
    "erf": [[(0,)], [(2, 0, 3)], [()]],
    **{name: [[(0,)], [(2, 0, 3)], [()]] for name in ("relu_squared", "quick_gelu", "softcap")},
    **{
        name: [[(0,), (0,)], [(2, 0, 3), (2, 0, 3)], [(1,), (1,)]]
        for name in ("glu", "clamped_swiglu")
    },
    "dropout": [[(0,)], [(2, 0, 3)], [()]],
    "mse": [[(0,), (0,)], [(2, 0), (2, 0)], [(), ()]],
    "embedding": [[(0, 7)], [(5, 0)], [(5, 7)]],
    "index_add": [[(5, 7), (0, 7)], [(5, 0), (0, 0)], [(0, 7), (0, 7)]],
    "sdpa": [
        [(b, h, t, k), (b, g, s, k), (b, g, s, m)]
        for b, h, g, t, s, k, m in (
            *((0, 4, 2, 3, 5, 6, 7), (2, 0, 1, 3, 5, 6, 7), (2, 4, 2, 0, 5, 6, 7)),
            *((2, 4, 2, 3, 0, 6, 7), (2, 4, 2, 3, 5, 0, 7), (2, 4, 2, 3, 5, 6, 0)),
            *((2, 4, 4, 0, 0, 6, 7), (2, 4, 1, 1, 5, 6, 7), (2, 4, 1, 5, 1, 6, 7)),
        )
    ],
    "shaw": [
        [(b, h, t, 6), (b, g, s, 6), (b, g, s, 7), (3, 6), (3, 7)]
        for b, h, g, t, s in (
            *((0, 4, 2, 3, 5), (2, 4, 2, 0, 5), (2, 4, 2, 3, 0)),
            *((2, 0, 1, 3, 5), (2, 4, 4, 0, 0), (2, 4, 1, 1, 5)),
        )
    ],
    "lsh_attention": [
        [(b, h, t, 5), (b, h, t, m)]
        for b, h, t, m in ((0, 4, 6, 7), (2, 0, 6, 7), (2, 4, 0, 7), (2, 4, 6, 0), (2, 4, 3, 7))
    ],
    "additive_attention": [
        [(b, h, t, a), (b, g, s, a), (b, g, s, m), (h, a)]
        for b, h, g, t, s, a, m in (
            *((0, 4, 2, 3, 5, 6, 7), (2, 0, 1, 3, 5, 6, 7), (2, 4, 2, 0, 5, 6, 7)),
            *((2, 4, 2, 3, 0, 6, 7), (2, 4, 2, 3, 5, 0, 7), (2, 4, 2, 3, 5, 6, 0)),
            *((2, 4, 4, 0, 0, 6, 7), (2, 4, 1, 1, 5, 6, 7), (2, 4, 1, 5, 1, 6, 7)),
        )
    ],
    "xl_attention": [
        [(b, h, t, k), (b, g, s, k), (b, g, s, m), (g, s, k), (h, k), (h, k)]
        for b, h, g, t, s, k, m in (
            *((0, 4, 2, 3, 5, 6, 7), (2, 0, 1, 3, 5, 6, 7), (2, 4, 2, 0, 5, 6, 7)),
            *((2, 4, 2, 3, 0, 6, 7), (2, 4, 2, 3, 5, 0, 7), (2, 4, 2, 3, 5, 6, 0)),
            *((2, 4, 4, 0, 0, 6, 7), (2, 4, 1, 1, 5, 6, 7), (2, 4, 1, 5, 1, 6, 7)),
        )
    ],
    "causal_conv": [
        [(b, t, c), (n, c), (b, n - 1, c)]
        for b, t, c, n in ((0, 3, 5, 4), (2, 0, 5, 4), (2, 3, 0, 4), (2, 3, 5, 1))
    ],
    "log_decay": [[(2, 0, 3), (3,)], [(2, 0), (0,)]],
    "gated_delta_rule": [
        [(b, g, t, k), (b, g, t, k), (b, h, t, m), (b, h, t), (b, h, t), (b, h, k, m)]
        for b, h, g, t, k, m in (
            *((0, 4, 2, 3, 5, 7), (2, 0, 1, 3, 5, 7), (2, 4, 2, 0, 5, 7)),
            *((2, 4, 2, 3, 0, 7), (2, 4, 2, 3, 5, 0)),
        )
    ],
    "cross_entropy": [[(0, 5)], [(2, 0, 5)]],
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty_arrays(library: Backend, name: str) -> None:
    """Right results and zero gradients: every sum over nothing is 0."""
    for shapes in few(library, EMPTY[name], 2):
        arrays = [library.asarray(numbers(*shape)) for shape in shapes]
        for options in few(library, _empty_options(library, name, shapes)):
            parts, cache = getattr(ops, name)(*arrays, **options)
            y = as_tuple(parts)[0]
            assert np.isfinite(library.to_numpy(y)).all()
            grads = as_tuple(cache.backward(library.xp.ones_like(y)))[: len(arrays)]
            empty = 0 in y.shape or (name == "cross_entropy" and not library.to_numpy(y).any())
            for array, grad in zip(arrays, grads, strict=True):
                assert tuple(grad.shape) == tuple(array.shape)
                values = library.to_numpy(grad)
                assert np.isfinite(values).all()
                assert not empty or not values.any()


def _empty_options(library: Backend, name: str, shapes: Any) -> list[dict[str, Any]]:
    if name in ("sdpa", "shaw"):
        return [{"causal": True}, {}, {"dropout_rate": 0.5, "dropout_key": KEY}]
    if name == "additive_attention":
        return [{"causal": True}, {}]
    if name == "xl_attention":
        return [{"causal": True}, {"causal": True, "dropout_rate": 0.5, "dropout_key": KEY}]
    if name == "cross_entropy":
        targets = library.asarray(np.zeros(shapes[0][:-1], int))
        extra = {"targets": targets, "label_smoothing": 0.1, "z_loss": 0.1, "ignore_index": 0}
        return [extra | {"reduction": r} for r in ("mean", "sum", "none")]
    if name in ("embedding", "index_add"):
        return [{"ids": library.asarray(np.zeros(0, int))}]
    return [CALLS[name].options]


def test_empty_results() -> None:
    y, _ = ops.linear(np.ones((2, 0)), np.ones((0, 3)), np.array([1.0, 2.0, 3.0]))
    assert y.tolist() == [[1.0, 2.0, 3.0]] * 2  # an empty sum, plus b
    assert float(ops.mse(np.ones((0, 2)), np.ones((0, 2)))[0]) == 0.0
    ctx, cache = ops.sdpa(numbers(1, 1, 3, 4), np.ones((1, 1, 0, 4)), np.ones((1, 1, 0, 2)))
    assert ctx.tolist() == [[[[0.0, 0.0]] * 3]]  # nothing to attend to
    assert not cache.backward(ctx + 1)[0].any()
    one, cache = ops.sdpa(numbers(1, 2, 3, 4), numbers(1, 1, 1, 4), np.full((1, 1, 1, 2), 5.0))
    assert np.allclose(one, 5.0)  # one key gets all
    assert not cache.backward(one)[0].any()
    v = numbers(1, 1, 5, 2)
    mean, _ = ops.sdpa(np.ones((1, 1, 3, 0)), np.ones((1, 1, 5, 0)), v)
    assert np.allclose(mean, v.mean(axis=2, keepdims=True))  # heads of no width cannot choose


def test_what_nothing_has_no_answer_for(library: Backend) -> None:
    def empty(*shape: int) -> Any:
        return library.asarray(np.ones(shape))

    for name in ("softmax", "log_softmax"):
        with raises(ValueError, f"{name}: axis -1 of x must not be empty, got shape (3, 0)"):
            getattr(ops, name)(empty(3, 0))
        with raises(ValueError, f"{name}: axis must be one of the 0 axes of x, got -1"):
            getattr(ops, name)(empty())
    with raises(ValueError, "layer_norm: axis -1 of x must not be empty, got shape (2, 0)"):
        ops.layer_norm(empty(2, 0), empty(0))
    targets = library.asarray(np.zeros(2, int))
    with raises(ValueError, "cross_entropy: axis -1 of logits must not be empty, got shape (2, 0)"):
        ops.cross_entropy(empty(2, 0), targets=targets)
    if library.name not in ON_DEVICE:
        with raises(ValueError, "embedding: ids must lie in [0, 0), got ids from 0 to 0"):
            ops.embedding(empty(0, 3), ids=targets)


# ---- Options ----

NAN = float("nan")
BAD_OPTIONS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("softmax", {"axis": 3}, ValueError, "axis must be one of the 3 axes of x, got 3"),
    ("softmax", {"axis": -4}, ValueError, "axis must be one of the 3 axes of x, got -4"),
    ("softmax", {"axis": 1.0}, TypeError, "axis must be an integer, got 1.0"),
    ("softmax", {"axis": None}, TypeError, "axis must be an integer, got None"),
    ("log_softmax", {"axis": (0, 1)}, TypeError, "axis must be an integer, got (0, 1)"),
    ("log_softmax", {"axis": 3}, ValueError, "axis must be one of the 3 axes of x, got 3"),
    (
        "gelu",
        {"approximate": "exact"},
        ValueError,
        'approximate must be "none" or "tanh", got \'e...',
    ),
    ("gelu", {"approximate": True}, ValueError, 'approximate must be "none" or "tanh", got True'),
    ("gelu", {"approximate": None}, ValueError, 'approximate must be "none" or "tanh", got None'),
    ("layer_norm", {"eps": -1e-5}, ValueError, "eps must lie in [0, inf], got -1e-05"),
    ("layer_norm", {"eps": NAN}, ValueError, "eps must lie in [0, inf], got nan"),
    ("layer_norm", {"eps": "0"}, TypeError, "eps must be a number, got str"),
    ("dropout", {"rate": -0.1}, ValueError, "rate must lie in [0, 1], got -0.1"),
    ("dropout", {"rate": 1.1}, ValueError, "rate must lie in [0, 1], got 1.1"),
    ("dropout", {"rate": NAN}, ValueError, "rate must lie in [0, 1], got nan"),
    ("dropout", {"rate": None}, TypeError, "rate must be a number, got NoneType"),
    ("dropout", {"key": None}, TypeError, "key must be an xformer.RandomKey, got None"),
    ("dropout", {"key": 7}, TypeError, "key must be an xformer.RandomKey, got int"),
    (
        "dropout",
        {"key": xformer.RandomKey(-1)},
        ValueError,
        "key.seed must lie in [0, 2^64), got -1",
    ),
    ("sdpa", {"dropout_rate": 2}, ValueError, "dropout_rate must lie in [0, 1], got 2"),
    (
        "sdpa",
        {"dropout_rate": 0.1},
        TypeError,
        "dropout_key must be an xformer.RandomKey, got None",
    ),
    ("sdpa", {"scale": "1"}, TypeError, "scale must be a number, got str"),
    ("sdpa", {"scale": NAN}, ValueError, "scale must be finite, got nan"),
    ("sdpa", {"scale": np.inf}, ValueError, "scale must be finite, got inf"),
    ("info_nce", {"scale": -np.inf}, ValueError, "scale must be finite, got -inf"),
    (
        "cross_entropy",
        {"reduction": "avg"},
        ValueError,
        'reduction must be "mean", "sum" or "non...',
    ),
    (
        "cross_entropy",
        {"reduction": None},
        ValueError,
        'reduction must be "mean", "sum" or "none...',
    ),
    (
        "cross_entropy",
        {"label_smoothing": 1.5},
        ValueError,
        "label_smoothing must lie in [0, 1]...",
    ),
    (
        "cross_entropy",
        {"label_smoothing": -0.1},
        ValueError,
        "label_smoothing must lie in [0, 1...",
    ),
    (
        "cross_entropy",
        {"label_smoothing": NAN},
        ValueError,
        "label_smoothing must lie in [0, 1]...",
    ),
    (
        "cross_entropy",
        {"label_smoothing": None},
        TypeError,
        "label_smoothing must be a number, ...",
    ),
    ("cross_entropy", {"z_loss": NAN}, ValueError, "z_loss must be finite, got nan"),
    ("cross_entropy", {"z_loss": np.inf}, ValueError, "z_loss must be finite, got inf"),
    ("cross_entropy", {"ignore_index": 1.0}, TypeError, "ignore_index must be an int, got 1.0"),
    ("cross_entropy", {"ignore_index": "pad"}, TypeError, "ignore_index must be an int, got 'pad'"),
]


@pytest.mark.parametrize(("name", "options", "error", "message"), BAD_OPTIONS)
def test_bad_options(name: str, options: dict[str, Any], error: Any, message: str) -> None:
    with raises(error, f"{name}: {message}"):
        run(name, CALLS[name].arrays, CALLS[name].options | options)


# ---- Values that are not finite ----


def test_ignored_tokens_may_hold_anything(library: Backend) -> None:
    logits = numbers(4, 5)
    targets = np.array([1, 9, 9, 3])
    spoiled = logits.copy()
    spoiled[1] = np.nan
    spoiled[2] = [np.inf, -np.inf, np.nan, 1e300, 0.0]
    for reduction, smoothing, z in itertools.product(("mean", "sum", "none"), (0, 0.1), (0, 0.2)):
        options = {
            "reduction": reduction,
            "label_smoothing": smoothing,
            "z_loss": z,
            "ignore_index": 9,
            "targets": library.asarray(targets),
        }
        good = run("cross_entropy", {"logits": library.asarray(logits)}, options)
        bad = run("cross_entropy", {"logits": library.asarray(spoiled)}, options)
        for a, b in ((good[0], bad[0]), (good[1][0], bad[1][0])):
            assert np.array_equal(library.to_numpy(a), library.to_numpy(b))
        assert not library.to_numpy(bad[1][0])[1:3].any()


def test_nothing_kept(library: Backend) -> None:
    logits, targets = library.asarray(numbers(4, 5)), library.asarray(np.full(4, 9))
    for reduction in ("mean", "sum", "none"):
        y, (dlogits,) = run(
            "cross_entropy",
            {"logits": logits},
            {"targets": targets, "ignore_index": 9, "reduction": reduction},
        )
        assert not library.to_numpy(y).any()
        assert not library.to_numpy(dlogits).any()


LIMITS: dict[str, tuple[Callable[..., Any], list[float], list[float]]] = {
    # op, values at -inf, -big, big, inf, slopes there; big is 1e30 in float32 and 1e300 in float64
    "relu": (ops.relu, [0, 0, 1, np.inf], [0, 0, 1, 1]),
    "gelu": (ops.gelu, [0, 0, 1, np.inf], [0, 0, 1, 1]),
    "gelu tanh": (
        lambda x: ops.gelu(x, approximate="tanh"),
        [0, 0, 1, np.inf],
        [0, 0, 1, 1],
    ),
    "silu": (ops.silu, [0, 0, 1, np.inf], [0, 0, 1, 1]),
    "tanh": (ops.tanh, [-1, -1, 1, 1], [0, 0, 0, 0]),
    "sigmoid": (ops.sigmoid, [0, 0, 1, 1], [0, 0, 0, 0]),
    "quick_gelu": (ops.quick_gelu, [0, 0, 1, np.inf], [0, 0, 1, 1]),
    "softcap": (partial(ops.softcap, cap=30.0), [-30, -30, 30, 30], [0, 0, 0, 0]),
    "erf": (ops.erf, [-1, -1, 1, 1], [0, 0, 0, 0]),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", LIMITS)
def test_limits_of_activations(library: Backend, case: str, dtype: str) -> None:
    op, values, slopes = LIMITS[case]
    big = 1e30 if dtype == "float32" else 1e300
    x = np.array([-np.inf, -big, big, np.inf], dtype)
    y, cache = op(library.asarray(x))
    wanted = np.array(values)
    if values[3] == np.inf:
        wanted[2] = x[2]
    assert np.array_equal(library.to_numpy(y), wanted)
    dy = library.asarray(np.full(4, 3.0, dtype))
    assert np.array_equal(library.to_numpy(cache.backward(dy)), 3 * np.array(slopes))


@pytest.mark.parametrize("case", LIMITS)
def test_nan_stays_nan(library: Backend, case: str) -> None:
    y, _ = LIMITS[case][0](library.asarray([NAN, 0.5]))
    assert np.isnan(library.to_numpy(y)).tolist() == [True, False]


@pytest.mark.parametrize("case", ["gelu", "gelu tanh", "silu", "quick_gelu"])
def test_clipping_changes_no_digit(case: str) -> None:
    """Where the formulas are clipped, they have reached their limits."""
    op = LIMITS[case][0]
    for dtype in (np.float32, np.float64):
        far = np.array([39.0, 99.0, 101.0, 745.0, 999.0, 1001.0, 1e4], dtype)
        y, cache = op(far)
        assert np.array_equal(y, far)
        assert np.array_equal(cache.backward(np.ones_like(far)), np.ones_like(far))
        y, cache = op(-far[1:])
        assert np.abs(y).max() < 1e-40
        assert np.abs(cache.backward(np.ones_like(y))).max() < 1e-40


# ---- Layers ----

D, H, W = 6, 2, 3
LINEAR = LinearParams(numbers(D, D), numbers(D))
ATTENTION = AttentionParams(LINEAR, KeyValueParams(LINEAR, LINEAR), LINEAR)
SEQUENCE = numbers(2, 5, D)


def attend(
    x: Any = SEQUENCE, params: Any = ATTENTION, *side: Any, config: Any = None, **context: Any
) -> Any:
    attn = layers.AttentionConfig(D, H) if config is None else config
    called = layers.Context(**context)
    return layers.attention(x, params, layers.SideInputs(*side), config=attn, context=called)


def heads(n_heads: Any, n_kv_heads: Any = None, **options: Any) -> Any:
    return layers.AttentionConfig(D, n_heads, n_kv_heads, d_head=3, **options)


ATTENTION_ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "heads do not divide": (
        lambda: attend(config=heads(4)),
        ValueError,
        "attention: the 6 columns of q.w must split into 4 heads",
    ),
    "key heads do not divide": (
        lambda: attend(config=heads(6, 4)),
        ValueError,
        "attention: n_kv_heads = 4 must divide 6 heads",
    ),
    "key heads do not divide heads": (
        lambda: attend(config=heads(2, 1)),
        ValueError,
        "sdpa: k must be (B, G, S, K) with B = 2 (from q), K = 3 (from q), got shape (2, 1, 5, 6)",
    ),
    "no heads": (
        lambda: attend(config=heads(0)),
        ValueError,
        "attention: n_heads must be an int of at least 1, got 0",
    ),
    "float heads": (
        lambda: attend(config=heads(2.0)),
        ValueError,
        "attention: n_heads must be an int of at least 1, got 2.0",
    ),
    "one axis": (
        lambda: attend(SEQUENCE[0, 0]),
        ValueError,
        "attention: sequences must be (B, T, D) or (T, D), got shape (6,)",
    ),
    "four axes": (
        lambda: attend(SEQUENCE[None]),
        ValueError,
        "attention: sequences must be (B, T, D) or (T, D), got shape (1, 2, 5, 6)",
    ),
    "a batch and the memory of one sequence": (
        lambda: attend(SEQUENCE, ATTENTION, SEQUENCE[0]),
        ValueError,
        "attention: memory must have as many axes as x, 3, got shape (5, 6)",
    ),
    "one sequence and a batch of memories": (
        lambda: attend(SEQUENCE[0], ATTENTION, SEQUENCE[:1]),
        ValueError,
        "attention: memory must have as many axes as x, 2, got shape (1, 5, 6)",
    ),
    "memory in a list": (
        lambda: attend(SEQUENCE, ATTENTION, SEQUENCE.tolist()),
        TypeError,
        "attention: memory must be an array, got list",
    ),
    "wrong width": (
        lambda: attend(numbers(2, 5, 7)),
        ValueError,
        "linear: w must be (I, O) with I = 7 (from x), got shape (6, 6)",
    ),
    "list": (lambda: attend(SEQUENCE.tolist()), TypeError, "linear: x must be an array, got list"),
    "batch of the memory": (
        lambda: attend(SEQUENCE, ATTENTION, numbers(3, 4, D)),
        ValueError,
        "sdpa: k must be (B, G, S, K) with B = 2 (from q), K = 3 (from q), got shape (3, 2, 4, 3)",
    ),
    "width of a bias alone": (
        lambda: attend(SEQUENCE, ATTENTION._replace(o=layers.BiasParams(numbers(4)))),
        ValueError,
        "linear: b must have shape (6,), got (4,)",
    ),
    "dtype of a bias alone": (
        lambda: attend(SEQUENCE, ATTENTION._replace(o=layers.BiasParams(numbers(6).astype("f4")))),
        TypeError,
        "linear: b must be float64, got float32",
    ),
    "gradient of a bias alone": (
        lambda: layers.linear(SEQUENCE, layers.BiasParams(numbers(6)))[1].backward(numbers(5, 6)),
        ValueError,
        "linear: dy must have shape (2, 5, 6), got (5, 6)",
    ),
    "no key projection": (
        lambda: attend(SEQUENCE, ATTENTION._replace(kv=None)),
        ValueError,
        "attention: memory must be a KeyValue if and only if params.kv is None",
    ),
    "positions of wrong length": (
        lambda: attend(SEQUENCE, ATTENTION, None, None, numbers(4, 3)),
        ValueError,
        "attention: positions for q must be (5, 3), got shape (4, 3)",
    ),
    "positions that would broadcast": (
        lambda: attend(SEQUENCE, ATTENTION, None, None, numbers(1, 3)),
        ValueError,
        "attention: positions for q must be (5, 3), got shape (1, 3)",
    ),
    "positions of another dtype": (
        lambda: attend(SEQUENCE, ATTENTION, None, None, numbers(5, 3).astype("f4")),
        TypeError,
        "attention: positions for q must be float64, got float32",
    ),
    "positions in a list": (
        lambda: attend(SEQUENCE, ATTENTION, None, None, [[1.0] * 3] * 5),
        TypeError,
        "attention: positions for q must be an array, got list",
    ),
    "float mask": (
        lambda: attend(mask=np.zeros((5, 5))),
        TypeError,
        "sdpa: mask must be boolean (True = may attend), got dtype float64; an ad...",
    ),
    "mask of one axis too few": (
        lambda: attend(mask=np.ones((2, 5), bool)),
        ValueError,
        "sdpa: mask must broadcast to (B, H, T, S) = (2, 2, 5, 5), got shape (2, 5)",
    ),
    "dropout without a key": (
        lambda: attend(config=heads(2, dropout=0.5), dropout_key=3),
        TypeError,
        "sdpa: dropout_key must be an xformer.RandomKey, got int",
    ),
    "unknown activation": (
        lambda: layers.feed_forward(
            SEQUENCE, layers.FeedForwardParams(LINEAR, LINEAR), activation="swiglu"
        ),
        ValueError,
        "feed_forward: activation must be one of relu, gelu, gelu_tanh, silu, tanh, sigm...",
    ),
    "unknown norm placement": (
        lambda: layers.residual(SEQUENCE, None, ops.tanh, norm_placement="middle"),
        ValueError,
        "residual: norm_placement must be one of pre, post, got 'middle'",
    ),
    "residual without a key": (
        lambda: layers.residual(SEQUENCE, None, ops.tanh, dropout_rate=0.5),
        TypeError,
        "dropout: key must be an xformer.RandomKey, got None",
    ),
    "negative length": (
        lambda: layers.sinusoidal(-1, 4, like=SEQUENCE),
        ValueError,
        "sinusoidal: sizes must not be negative, got (-1, 4)",
    ),
    "sinusoidal like integers": (
        lambda: layers.sinusoidal(3, 4, like=np.arange(3)),
        TypeError,
        "sinusoidal: like must be a floating-point array, got dtype int64",
    ),
    "sinusoidal like a number": (
        lambda: layers.sinusoidal(3, 4, like=1.0),
        TypeError,
        "sinusoidal: like must be a floating-point array, got float",
    ),
    "ALiBi like integers": (
        lambda: layers.alibi(2, n_queries=3, n_keys=3, like=np.arange(3)),
        TypeError,
        "alibi: like must be a floating-point array, got dtype int64",
    ),
}


@pytest.mark.parametrize("case", ATTENTION_ERRORS)
def test_layers(case: str) -> None:
    call, error, message = ATTENTION_ERRORS[case]
    with raises(error, message):
        call()


def test_blocks_and_their_memory() -> None:
    config = block_config(d_model=D, n_heads=H, d_ff=7)
    rng = backends.get().generator(0, "float64")
    encoder, decoder = config.init(rng), config.init(rng, cross=True)
    message = "block: memory and params.cross need each other, got ..."
    with raises(ValueError, message):
        layers.block(SEQUENCE, decoder, config=config)
    with raises(ValueError, message):
        layers.block(SEQUENCE, encoder, layers.SideInputs(SEQUENCE), config=config)
    with raises(ValueError, "block: memory_pos and memory_mask need a memory, ..."):
        layers.block(
            SEQUENCE,
            encoder,
            config=config,
            context=layers.Context(memory_mask=np.ones((5, 5), bool)),
        )
    with raises(ValueError, "blocks: params must hold a block for each of 2 layers, ..."):
        layers.stack(SEQUENCE, layers.StackParams((), None, None), configs=(config,) * 2)
    experts = block_config(D, H, 7, experts=ExpertsConfig(3, 2, 5))
    with raises(
        ValueError, "block: params.ffn must be ExpertsParams by config, got FeedForward..."
    ):
        layers.block(SEQUENCE, encoder, config=experts)
    with raises(ValueError, "block: params.ffn must be FeedForwardParams by config, got ..."):
        layers.block(SEQUENCE, experts.init(rng), config=config)
    shared = layers.StackParams.init(rng, (config,), cross=True, shared_memory=True)
    with raises(ValueError, "stack: params.memory needs a memory, got None"):
        layers.stack(SEQUENCE, shared, configs=(config,) * 2)


def test_sinusoidal_of_no_positions(library: Backend) -> None:
    like = library.asarray([0.0])
    for length, width in ((0, 4), (3, 0), (0, 0), (1, 1)):
        assert tuple(layers.sinusoidal(length, width, like=like).shape) == (length, width)


def test_attention_to_nothing(library: Backend) -> None:
    params = tree.map(library.asarray, ATTENTION)
    sizes = [(2, 5, 0), (2, 0, 4), (0, 5, 4), (2, 1, 1), (0, 0, 0)]
    for (b, t, s), causal in few(library, itertools.product(sizes, (True, False)), 3):
        x, memory = library.asarray(numbers(b, t, D)), library.asarray(numbers(b, s, D))
        y, cache = layers.attention(
            x,
            params,
            layers.SideInputs(memory),
            config=layers.AttentionConfig(x.shape[-1], H),
            context=layers.Context(causal=causal),
        )
        assert tuple(y.shape) == (b, t, D)
        dx, dparams, dside = cache.backward(library.xp.ones_like(y))
        assert tuple(dx.shape) == (b, t, D)
        assert tuple(dside.memory.shape) == (b, s, D)
        for leaf in tree.flatten(dparams).values():
            values = library.to_numpy(leaf)
            assert np.isfinite(values).all()
            assert b * t or not values.any()
        if b * t and not s:  # nothing to attend to: the output's bias alone
            assert np.allclose(library.to_numpy(y), ATTENTION.o.b)


# ---- Configurations ----

BLOCK = {"d_model": 8, "n_heads": 4, "d_ff": 16}
EMBED = {"vocab_size": 11, "width": 8, "d_model": 8, "max_len": 6}
GPT = {"vocab_size": 11, "n_layers": 1, "d_model": 8, "n_heads": 2, "max_len": 6}
TRANSFORMER = {
    "src_vocab_size": 11,
    "tgt_vocab_size": 13,
    "d_model": 8,
    "n_heads": 2,
    "n_encoder_layers": 1,
    "n_decoder_layers": 1,
    "max_len": 6,
}
ACTIVATIONS = (
    "feed_forward: activation must be one of relu, gelu, gelu_tanh, silu, tanh, sigmoid, "
    "relu_squared, quick_gelu, got 'x'; ops.activation.register adds one of your own"
)
BAD_CONFIGS: list[tuple[Any, dict[str, Any], str]] = [
    *(
        (block_config, {name: bad}, f"attention: {name} must be an int of at least 1, got {bad!r}")
        for name in ("d_model", "n_heads", "n_kv_heads", "d_head", "d_value")
        for bad in (0, -1, 2.0, "8")
    ),
    *(
        (
            block_config,
            {"d_ff": bad},
            f"feed_forward: d_ff must be an int of at least 1, got {bad!r}",
        )
        for bad in (0, -1, 2.0, "8")
    ),
    (
        block_config,
        {"n_heads": 3},
        "attention: n_heads = 3 must divide d_model = 8, or d_head must be given",
    ),
    (block_config, {"n_kv_heads": 3}, "attention: n_kv_heads = 3 must divide 4 heads"),
    (
        block_config,
        {"norm_placement": "both"},
        "block: norm_placement must be one of pre, post, sandwich, output, none, got 'both'",
    ),
    (
        block_config,
        {"parallel": True, "norm_placement": "post"},
        'block: parallel needs norm_placement "pre" or "none", got \'post\'',
    ),
    (
        block_config,
        {"parallel": True, "shared_norm": True, "norm_placement": "none"},
        'block: shared_norm needs parallel, with norm_placement "pre"',
    ),
    (block_config, {"shared_norm": True}, "block: shared_norm needs parallel, with norm_pl..."),
    *(
        (block_config, {"residual_scale": bad}, f"block: residual_scale must be finite, got {bad}")
        for bad in (np.inf, -np.inf)
    ),
    (
        block_config,
        {"residual_multiplier": np.inf},
        "block: residual_multiplier must be finite, got inf",
    ),
    (
        block_config,
        {"residual_scale": np.nan},
        "block: residual_scale must be finite, got nan",
    ),
    (block_config, {"down": False}, "block: ffn without down needs d_ff = d_model = 8, got 16"),
    (block_config, {"attn_norm": False, "parallel": True}, "block: parallel needs attn_norm"),
    (block_config, {"activation": "x"}, ACTIVATIONS),
    (
        block_config,
        {"dropout": 1.5, "attn_dropout": 0.0},
        "block: dropout must lie in [0, 1], got 1.5",
    ),
    (block_config, {"eps": -1.0}, "norm: eps must lie in [0, inf], got -1.0"),
    (
        block_config,
        {"eps_inside": False, "norm": "rms", "bias": False},
        'norm: eps_inside False needs kind "layer"',
    ),
    (block_config, {"softcap": 0.0}, "attention: softcap must be positive and finite, got 0.0"),
    (
        block_config,
        {"window": 5},
        "attention: window must be (left, right), each an int of at least 0 or None, got 5",
    ),
    *(
        (
            block_config,
            {"shaw_max_distance": 2, **other},
            "attention: shaw_max_distance excludes sinks, window and softcap",
        )
        for other in ({"sinks": True}, {"window": (1, 0)}, {"softcap": 2.0})
    ),
    (
        block_config,
        {"output": None},
        'attention: output must be "linear", "bias" or "none", got None',
    ),
    *(
        (block_config, {"output": output, **other}, f"attention: {message}")
        for output in ("bias", "none")
        for other, message in (
            ({"o_bias": True}, f'o_bias needs output "linear", got {output!r}'),
            (
                {"d_value": 3},
                f"output {output!r} needs heads of d_model = 8 together, "
                "got n_heads * d_value = 12",
            ),
        )
    ),
    (block_config, {"attn_dropout": -0.5}, "attention: dropout must lie in [0, 1], got -0.5"),
    (block_config, {"hidden_dropout": 2}, "feed_forward: dropout must lie in [0, 1], got 2"),
    (LMHead, {"softcap": 0.0}, "LMHead: softcap must be positive and finite, got 0.0"),
    (LanguageModel, {"out_dropout": 1.5}, "LanguageModel: out_dropout must lie in [0, 1], got 1.5"),
    (
        LanguageModel,
        {"alibi": True, "causal": False},
        "LanguageModel: alibi needs causal attention: it favours later keys",
    ),
    (
        LanguageModel,
        {
            "blocks": (block_config(8, 2, 5, experts=ExpertsConfig(3, 2, 5, score="sigmoid")),),
            "load_balancing_weight": 0.1,
        },
        'LanguageModel: load_balancing_weight needs experts with score "softmax"',
    ),
    *(
        (
            LanguageModel,
            {
                "blocks": tuple(block_config(8, 2, 5, experts=own) for own in experts),
                "load_balancing_weight": 0.1,
            },
            "LanguageModel: load_balancing_weight and router_z_weight need layers with experts, "
            f"all with one n_experts and one top_k, got {got}",
        )
        for experts, got in (
            ((None,), "no experts"),
            ((ExpertsConfig(3, 1, 5), ExpertsConfig(3, 2, 5)), "[(3, 1), (3, 2)]"),
        )
    ),
    *(
        (EmbedConfig, {name: bad}, f"embed: {name} must be an int of at least 1, got {bad!r}")
        for name in ("vocab_size", "width", "d_model", "max_len")
        for bad in (0, -1, 2.0)
    ),
    (
        EmbedConfig,
        {"positions": "rotary"},
        'embed: positions must be "sinusoidal", "learned" or...',
    ),
    (EmbedConfig, {"mode": "mul"}, 'embed: mode must be "add", "concat" or "qkv", got \'mul\''),
    (EmbedConfig, {"dropout": -0.5}, "embed: dropout must lie in [0, 1], got -0.5"),
    (
        EmbedConfig,
        {"mode": "concat"},
        "embed: positions in mode 'concat' need d_positions, with width = 8 and d_model = 8",
    ),
    (
        EmbedConfig,
        {"mode": "qkv"},
        "embed: positions in mode 'qkv' need d_positions, with width = 8 and d_model = 8",
    ),
    (xformer.GPT, {"n_layers": -1}, "GPT: n_layers must be an int of at least 1, got -1"),
    (xformer.GPT, {"n_layers": 1.5}, "GPT: n_layers must be an int of at least 1, got 1.5"),
    (
        xformer.GPT,
        {"n_heads": 3},
        "attention: n_heads = 3 must divide d_model = 8, or d_head must be given",
    ),
    (xformer.GPT, {"n_heads": 0}, "attention: n_heads must be an int of at least 1, got 0"),
    (
        xformer.GPT,
        {"n_heads": 0, "position_mode": "qkv"},
        "attention: n_heads must be an int of at l...",
    ),
    (xformer.GPT, {"n_kv_heads": 3}, "attention: n_kv_heads = 3 must divide 2 heads"),
    (xformer.GPT, {"vocab_size": 0}, "embed: vocab_size must be an int of at least 1, got 0"),
    (xformer.GPT, {"max_len": 0}, "embed: max_len must be an int of at least 1, got 0"),
    (
        xformer.GPT,
        {"max_len": 0, "tied": False},
        "embed: max_len must be an int of at least 1, g...",
    ),
    (xformer.GPT, {"d_ff": 0}, "feed_forward: d_ff must be an int of at least 1, got 0"),
    (xformer.GPT, {"activation": "x"}, ACTIVATIONS),
    (
        xformer.GPT,
        {"norm_placement": None},
        "block: norm_placement must be one of pre, post, sandwich, output, none, got None",
    ),
    (
        xformer.GPT,
        {"positions": "x"},
        'embed: positions must be "sinusoidal", "learned" or "none...',
    ),
    (
        xformer.GPT,
        {"position_mode": "x"},
        'embed: mode must be "add", "concat" or "qkv", got \'x\'',
    ),
    (
        xformer.GPT,
        {"d_positions": 4, "position_mode": "qkv"},
        "GPT: d_positions needs position_mode \"concat\", got 'qkv'",
    ),
    (
        xformer.GPT,
        {"d_positions": 0, "position_mode": "concat"},
        "embed: positions in mode 'concat' need d_positions, with width = 8 and d_model = 8",
    ),
    (xformer.GPT, {"dropout": 2}, "attention: dropout must lie in [0, 1], got 2"),
    (
        xformer.Transformer,
        {"n_encoder_layers": -1},
        "Transformer: n_encoder_layers must be an int of at least 1, got -1",
    ),
    (
        xformer.Transformer,
        {"n_decoder_layers": -1},
        "Transformer: n_decoder_layers must be an int of at least 1, got -1",
    ),
    (
        xformer.Transformer,
        {"tied": True, "tgt_width": 6},
        "EncoderDecoder: a tied head needs the target's embedding of width d_model = 8, any head "
        "needs its vocabulary, got 6",
    ),
    (
        xformer.Transformer,
        {"src_vocab_size": 0},
        "embed: vocab_size must be an int of at least ...",
    ),
    (
        xformer.Transformer,
        {"tgt_vocab_size": 0},
        "embed: vocab_size must be an int of at least ...",
    ),
    (xformer.Transformer, {"src_width": 0}, "embed: width must be an int of at least 1, got 0"),
    (xformer.Transformer, {"tgt_width": -1}, "embed: width must be an int of at least 1, got -1"),
    (
        xformer.Transformer,
        {"n_heads": 3},
        "attention: n_heads = 3 must divide d_model = 8, or d_head...",
    ),
    (xformer.Transformer, {"d_head": 0}, "attention: d_head must be an int of at least 1, got 0"),
    (
        xformer.Transformer,
        {"norm_placement": "x"},
        "block: norm_placement must be one of pre, post, sandwich, output, none, got 'x'",
    ),
    (xformer.Transformer, {"activation": "x"}, ACTIVATIONS),
    (xformer.Transformer, {"pad_id": -1}, "EncoderDecoder: pad_id must lie in [0, 11), got -1"),
    (xformer.Transformer, {"pad_id": 11}, "EncoderDecoder: pad_id must lie in [0, 11), got 11"),
    (
        xformer.Transformer,
        {"position_mode": "qkv", "d_value": 3},
        "Transformer: position_mode 'qkv' needs d_value = d_head = 4, got 3",
    ),
]


@pytest.mark.parametrize(("config", "options", "message"), BAD_CONFIGS)
def test_bad_configurations(config: Any, options: dict[str, Any], message: str) -> None:
    good = {
        block_config: BLOCK,
        EmbedConfig: EMBED,
        LMHead: {},
        LanguageModel: {"embed": None, "blocks": (block_config(**BLOCK),), "head": None},
        xformer.GPT: GPT,
        xformer.Transformer: TRANSFORMER,
    }[config]
    config(**good)
    with raises(ValueError, message):
        config(**(good | options))


@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        ("attn", "an AttentionConfig or a layers.LayerConfig"),
        ("ffn", "a FeedForwardConfig or a layers.LayerConfig"),
        ("norm", "a NormConfig"),
    ],
)
def test_parts_of_a_block_that_are_none(part: str, wanted: str) -> None:
    good: dict[str, Any] = {"attn": AttentionConfig(8, 2), "ffn": FeedForwardConfig(16)}
    with raises(TypeError, f"block: {part} must be {wanted}, got ..."):
        BlockConfig(**good | {part: {"d_ff": 16}})


def test_parameters_of_another_configuration() -> None:
    rng = backends.get().generator(0, "float64")
    config = EmbedConfig(**EMBED, positions="learned")
    params = config.init(rng)
    ids = np.array([[1, 2]])

    def check(params: Any, config: EmbedConfig, message: str) -> None:
        with raises((TypeError, ValueError), f"embed: params.{message}"):
            layers.embed(params, ids=ids, config=config)

    fixed = dataclasses.replace(config, positions="sinusoidal")
    check(params, fixed, "positions must be None by config, got (6, 8)")
    check(fixed.init(rng), config, "positions must be (6, 8) by config, got None")
    longer = dataclasses.replace(config, max_len=7)
    check(params, longer, "positions must be (7, 8) by config, got (6, 8)")
    larger = dataclasses.replace(config, vocab_size=12)
    check(params, larger, "table must be (12, 8) by config, got (11, 8)")
    check(params._replace(table=None), config, "table must be (11, 8) by config, got None")
    check(params._replace(table=[[1.0]]), config, "table must be an array, got list")


# ---- Models ----


def gpt() -> tuple[LanguageModel, Any]:
    model = xformer.GPT(**GPT)
    return model, model.init(dtype="float64")


def transformer(**options: Any) -> tuple[EncoderDecoder, Any]:
    model = xformer.Transformer(**(TRANSFORMER | options))
    return model, model.init(dtype="float64")


TOKENS = np.array([[1, 2, 3, 4], [5, 6, 7, 10]])
GPT_TOKENS: list[tuple[Any, type[Exception], str]] = [
    (TOKENS.tolist(), TypeError, "LanguageModel: tokens must be an array, got list"),
    (None, TypeError, "LanguageModel: tokens must be an array, got None"),
    (TOKENS[0], ValueError, "LanguageModel: tokens must be (B, T), got shape (4,)"),
    (TOKENS[None], ValueError, "LanguageModel: tokens must be (B, T), got shape (1, 2, 4)"),
    (TOKENS.astype(float), TypeError, "embedding: ids must be an integer array, got dtype float64"),
    (TOKENS > 2, TypeError, "embedding: ids must be an integer array, got dtype bool"),
    (TOKENS + 1, ValueError, "embedding: ids must lie in [0, 11), got ids from 2 to 11"),
    (TOKENS - 2, ValueError, "embedding: ids must lie in [0, 11), got ids from -1 to 8"),
    (np.ones((2, 7), int), ValueError, "embed: at most max_len = 6 tokens fit, got 7"),
]


@pytest.mark.parametrize(("tokens", "error", "message"), GPT_TOKENS)
def test_tokens(tokens: Any, error: Any, message: str) -> None:
    model, params = gpt()
    with raises(error, message):
        model.forward(params, tokens)
    with raises(error, message):
        model.loss(params, tokens, tokens)
    network, params = transformer(tgt_vocab_size=11)
    message = message.replace("LanguageModel: tokens must be", "EncoderDecoder: src must be")
    message = message.replace("be an array", "be an integer array")
    with raises(error, message):
        network.encode(params, tokens)
    with raises(error, message.replace("src", "tgt")):
        memory = network.encode(params, TOKENS)[0]
        network.decode_target(params, *memory, tokens, src_mask=TOKENS != 0)


def test_targets() -> None:
    model, params = gpt()
    for targets, error, message in (
        (TOKENS.tolist(), TypeError, "targets must be an integer array, got list"),
        (TOKENS + 1, ValueError, "targets must lie in [0, 11), got ids from 2 to 11"),
        (TOKENS - 2, ValueError, "targets must lie in [0, 11), got ids from -1 to 8"),
        (TOKENS * 1.0, TypeError, "targets must be an integer array, got dtype float64"),
    ):
        with raises(error, f"cross_entropy: {message}"):
            model.loss(params, TOKENS, targets)
    message = "linear_cross_entropy: targets must be (...,) with ... = (2, 4) (from x), got ..."
    with raises(ValueError, message):
        model.loss(params, TOKENS, TOKENS[:, :3])
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'smoothing'"):
        model.loss(params, TOKENS, TOKENS, smoothing=0.1)


def test_sources_and_targets() -> None:
    model, params = transformer()
    with raises(
        ValueError,
        "EncoderDecoder: src and tgt must have one batch size, got shapes (2, 4) and (1, 4)",
    ):
        model.forward(params, TOKENS, TOKENS[:1])


def test_parameters_of_another_library(library: Backend) -> None:
    other = backends.get("array-api-strict" if "strict" not in library.name else "numpy")
    tokens = library.asarray(TOKENS)
    model, params = gpt()
    params = tree.map(other.asarray, params)
    with raises(TypeError, "embedding: ids must be an array of ..."):
        model.forward(params, tokens)
    network, params = transformer()
    params = tree.map(other.asarray, params)
    with raises(TypeError, "embedding: ids must be an array of ..."):
        network.forward(params, tokens, tokens)


def test_models_of_nothing(library: Backend) -> None:
    """No rows or no tokens: loss 0, all gradients 0; one token is enough."""
    sizes = [(2, 0), (0, 3), (0, 0), (2, 1)]
    for (b, t), positions in few(
        library, itertools.product(sizes, ("sinusoidal", "learned", "none"))
    ):
        tokens = library.asarray(np.ones((b, t), int))
        model = xformer.GPT(**GPT, positions=positions)
        params = tree.map(library.asarray, model.init(dtype="float64"))
        logits, _ = model.forward(params, tokens)
        assert tuple(logits.shape) == (b, t, 11)
        check_loss(library, model.loss(params, tokens, tokens), params, empty=b * t == 0)

        network, params = transformer(positions=positions)
        params = tree.map(library.asarray, params)
        longer = library.asarray(np.ones((b, t + 1), int))
        if t:
            loss = network.loss(params, tokens, longer[:, :-1], longer[:, 1:])
            check_loss(library, loss, params, empty=b == 0)
        logits, cache = network.forward(params, tokens, longer)  # t = 0: an empty source
        assert np.isfinite(library.to_numpy(logits)).all()
        check_gradients(library, cache.backward(logits), params, empty=b == 0)


def check_loss(library: Backend, result: tuple[Any, Any], params: Any, empty: bool) -> None:
    loss, cache = result
    value = float(library.to_numpy(loss))
    assert value == 0.0 if empty else 0.0 < value < 10.0
    check_gradients(library, cache.backward(), params, empty)


def check_gradients(library: Backend, grads: Any, params: Any, empty: bool) -> None:
    grads, params = tree.flatten(grads), tree.flatten(params)
    assert grads.keys() == params.keys()
    for name, grad in grads.items():
        assert tuple(grad.shape) == tuple(params[name].shape), name
        values = library.to_numpy(grad)
        assert np.isfinite(values).all(), name
        assert not empty or not values.any(), name


def test_padding_alone_gives_zero() -> None:
    model, params = transformer()
    padding = np.zeros((2, 4), int)
    result = model.loss(params, padding, padding, padding)
    check_loss(backends.get(), result, params, empty=True)


# ---- Upstream gradients ----

OP_CASES = [case for case in catalogue.cases() if case.group == "ops"]


@pytest.mark.parametrize("case", OP_CASES, ids=lambda case: case.name)
def test_upstream_gradients_of_another_form(case: catalogue.Case) -> None:
    fn, args = case.build(backends.get())
    y, cache = fn(*args)
    dys = [np.ones_like(part) for part in as_tuple(y)]
    cache.backward(*dys)
    for i, dy in enumerate(dys):
        before, after = dys[:i], dys[i + 1 :]
        for wrong in (dy[None], np.ones((*dy.shape, 2)), np.ones((3, *dy.shape))):
            with pytest.raises(ValueError, match=r"^\w+: d\w+ must have shape \("):
                cache.backward(*before, wrong, *after)
        with pytest.raises(TypeError, match=r"^\w+: d\w+ must be an array, got float"):
            cache.backward(*before, 1.0, *after)


def test_upstream_gradients_of_another_dtype() -> None:
    y, cache = ops.layer_norm(numbers(5, 3), numbers(3))
    with raises(TypeError, "layer_norm: dy must be float64, got float32"):
        cache.backward(y.astype(np.float32))


# ---- Parameters of another configuration ----


def test_parameters_of_another_model() -> None:
    one, two = (xformer.GPT(11, n, 6, 2, 7) for n in (1, 2))
    untied = xformer.GPT(11, 1, 6, 2, 7, tied=False)
    post = xformer.GPT(11, 1, 6, 2, 7, norm_placement="post")
    ids = np.zeros((2, 3), dtype=np.int64)
    for model, params, message in (
        (two, one.init(), "LanguageModel: params must have blocks: 2 by config, got 1"),
        (untied, one.init(), "LMHead: params.head must be parameters by config, got None"),
        (one, untied.init(), "LMHead: params.head must be None by config, got parameters"),
        (
            post,
            one.init(),
            "LanguageModel: params must have a final norm: False by config, got True",
        ),
    ):
        with raises(ValueError, message):
            model.forward(params, ids)
