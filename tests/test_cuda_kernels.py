"""CUDA kernels beyond the cases of the catalogue: sizes, layouts, limits.

The registry's own comparison is in test_kernels.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import cuda_shim
import numpy as np
import pytest
from array_api_compat import array_namespace
from devices import is_stand_in, repeated
from libraries import ON_DEVICE, only

from xformer import (
    RandomKey,
    backends,
    explain,
    inference,
    layers,
    ops,
    optim,
    reference_only,
    tree,
)
from xformer.backends import Backend
from xformer.backends.cupy import (
    column_sums,
    cross_entropy,
    deterministic,
    global_norm,
    layer_norm,
    leaves,
    linear_cross_entropy,
    rms_norm,
)
from xformer.backends.cupy.index_add import is_deterministic
from xformer.backends.cupy.leaves import LEAVES
from xformer.backends.cupy.module import (
    EVERY,
    contiguous,
    empty,
    launch,
    row_threads,
    threads,
    wide,
)
from xformer.base.tree import Frozen
from xformer.dispatch.shapes import STORED, working_dtype
from xformer.layers import NormConfig
from xformer.optim.adam import adam_update
from xformer.optim.clip import clip_leaves

pytestmark = only(*ON_DEVICE)

Host = np.ndarray
RNG = np.random.default_rng()
ADAM: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8}


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """The same numbers for a test, whichever others run."""
    RNG.bit_generator.state = np.random.default_rng(
        zlib.crc32(request.node.name.encode())
    ).bit_generator.state


def normal(*shape: int) -> Host:
    return RNG.normal(size=shape)


def outcome(
    backend: Backend, op: Callable[..., Any], arrays: Any, options: Any, dtype: str
) -> list[Host]:
    """y and the gradients on a backend, from numbers rounded to float32."""

    def given(a: Any) -> Any:
        if not isinstance(a, np.ndarray):
            return a
        return backend.asarray(a.astype(np.float32).astype(dtype) if a.dtype.kind == "f" else a)

    y, cache = op(*map(given, arrays), **{name: given(a) for name, a in options.items()})
    shape = tuple(y.shape)
    dy = np.asarray(0.5 + np.cos(np.arange(np.prod(shape, dtype=int)))).reshape(shape)
    grads = cache.backward(given(dy))
    grads = grads if isinstance(grads, tuple) else (grads,)
    return [backend.to_numpy(a) for a in (y, *grads) if a is not None]


def require_exact(library: Backend, op: Callable[..., Any], *arrays: Any, **options: Any) -> None:
    """In float32 within twice the reference's error, in float64 to rounding."""
    numpy = backends.get()
    with reference_only():
        exact = outcome(numpy, op, arrays, options, "float64")
        plain = outcome(numpy, op, arrays, options, "float32")
    at_repeated_ids = op in (ops.embedding, ops.index_add) and not is_deterministic()
    for dtype in ("float32", "float64"):
        run = partial(outcome, library, op, arrays, options, dtype)
        got = repeated(library, run, in_any_order=at_repeated_ids)
        for i, (a, p, wanted) in enumerate(zip(got, plain, exact, strict=True)):
            assert (a.shape, a.dtype.name) == (wanted.shape, dtype)
            size = np.max(np.abs(wanted), initial=0 if is_stand_in(library) else 1)
            # The error of a few numbers can be nothing by chance: then roundings are counted. A GPU
            # adds products that it has not rounded, so that of equal ones a rounding is left.
            eps = 8 * np.finfo(np.float32).eps if dtype == "float32" else 1e-13
            off_plain = np.max(np.abs(p - wanted), initial=0) if dtype == "float32" else 0
            allowed = eps * size + 2 * off_plain
            off = np.max(np.abs(a - wanted), initial=0)
            assert off <= allowed, f"{'y' if i == 0 else f'gradient {i}'} {dtype}: {off:.1e}"


# ---- Rows: one element, a warp and one more, packs, more than a block has threads ----

WIDTHS = (1, 4, 31, 33, 64, 260, 768, 1028)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 5])
def test_rows(library: Backend, rows: int, width: int) -> None:
    x, w, b = normal(rows, width), normal(width), normal(width)
    require_exact(library, ops.layer_norm, x, w, b, eps=0.1)
    require_exact(library, ops.layer_norm, x, w, eps=0.1, eps_inside=False)
    require_exact(library, ops.rms_norm, x, w, eps=0.1, offset=1.0)
    require_exact(library, ops.rms_norm, x, eps=0.1)
    require_exact(library, ops.softmax, 3 * x)
    require_exact(library, ops.glu, x, b + x)
    require_exact(library, ops.gelu, 3 * x)


NORMS = (
    NormConfig(eps=0.1),
    NormConfig("rms", eps=0.1, offset=1.0),
    NormConfig(eps=0.1, eps_inside=False),
)


class Stacked(NamedTuple):
    """A cache of `add_norm` whose gradients are arrays, and whose dy is that of both results."""

    cache: Any

    def backward(self, dy: Any) -> tuple[Any, ...]:
        dx, dr, dparams = self.cache.backward(dy[0, ...], dy[1, ...])
        return dx, dr, *dparams


def sum_and_norm(x: Any, r: Any, w: Any, b: Any, *, config: NormConfig) -> tuple[Any, Stacked]:
    both, cache = layers.add_norm(x, r, layers.NormParams(w, b), config=config)
    return array_namespace(x).stack(both), Stacked(cache)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("config", NORMS, ids=lambda config: config.kind)
def test_norms_of_sums(library: Backend, config: NormConfig, rows: int, width: int) -> None:
    x, r, w = normal(rows, width), normal(rows, width), normal(width)
    for b in (None, normal(width)) if config.kind == "layer" else (None,):
        require_exact(library, sum_and_norm, x, r, w, b, config=config)


@pytest.mark.parametrize("config", NORMS, ids=lambda config: config.kind)
def test_norms_of_sums_launch_once(
    library: Backend, launched: list[Any], config: NormConfig
) -> None:
    """Of views too; where nothing else reads the sum, its gradient is that of the norm."""
    x, r, dy, w = (library.asarray(normal(*shape)) for shape in ((4, 6), (8, 6), (6, 4), (6,)))
    r, dy = r[::2, :], dy.T
    params = layers.NormParams(w, None)
    launched.clear()
    (s, y), cache = layers.add_norm(x, r, params, config=config)
    assert [name for name, _, _ in launched] == [f"{config.kind}_norm_forward"]
    launched.clear()
    grads = cache.backward(None, dy)
    names = [name for name, _, _ in launched]
    assert names == [f"{config.kind}_norm_backward", "column_sums"]
    with reference_only():
        (wanted_s, wanted_y), wanted_cache = layers.add_norm(x, r, params, config=config)
        wanted = wanted_cache.backward(None, dy)
    for got, exact in zip((s, y, *grads), (wanted_s, wanted_y, *wanted), strict=True):
        got, exact = (a.w if isinstance(a, layers.NormParams) else a for a in (got, exact))
        assert np.allclose(library.to_numpy(got), library.to_numpy(exact), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("moved", ["x", "r", "w", "ds", "dy"])
@pytest.mark.parametrize("config", NORMS, ids=lambda config: config.kind)
def test_norms_of_sums_that_are_not_aligned(
    library: Backend, config: NormConfig, moved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are multiples of 16 bytes, and one array begins beside one: who reads it, reads less."""
    chosen: list[int] = []

    def noted(width: int, *arrays: Any) -> int:
        chosen.append(wide(width, *arrays))
        return chosen[-1]

    for module in (layer_norm, rms_norm):
        monkeypatch.setattr(module, "wide", noted)
    shapes = {"x": (4, 8), "r": (4, 8), "w": (8,), "ds": (4, 8), "dy": (4, 8)}
    host = {name: normal(*shape).astype(np.float32) for name, shape in shapes.items()}

    def gradients(moved: str) -> list[Host]:
        given = {}
        for name, values in host.items():
            at = int(name == moved)
            flat = library.asarray(np.pad(values.ravel(), (at, 0)))[at:]
            given[name] = library.xp.reshape(flat, values.shape)
            assert wide(8, given[name]) == 1 - at
        x, r, w, ds, dy = given.values()
        (s, y), cache = layers.add_norm(x, r, layers.NormParams(w, None), config=config)
        dx, _, dparams = cache.backward(ds, dy)
        return [library.to_numpy(a) for a in (s, y, dx, dparams.w)]

    for got, exact in zip(gradients(moved), gradients(""), strict=True):
        assert np.allclose(got, exact, rtol=1e-5, atol=1e-6)
    assert chosen == [int(moved not in "xrw"), int(moved not in ("w", "ds", "dy")), 1, 1]


@pytest.mark.parametrize("module", [layer_norm, rms_norm], ids=lambda module: module.SOURCE.name)
def test_norms_have_a_thread_for_each_access(
    library: Backend, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, of rows that are read 16 bytes at a time and of others."""
    blocks: list[tuple[int, ...]] = []

    def noted(*args: Any, block: tuple[int, ...], **options: Any) -> None:
        blocks.append(block)

    monkeypatch.setattr(module, "launch", noted)
    op = getattr(ops, module.SOURCE.name)
    for width, wanted in ((384, 96), (386, 224), (2048, 256)):
        x, w = (library.asarray(a.astype(np.float32)) for a in (normal(2, width), normal(width)))
        _, cache = op(x, w)
        cache.backward(x)
        assert blocks == [(wanted,)] * 2
        blocks.clear()


def test_norms_of_sums_say_what_is_wrong(library: Backend) -> None:
    x, w = library.asarray(normal(4, 6)), library.asarray(normal(6))
    both = layers.NormParams(w, w)
    said = explain(layers.add_norm, x, x, both, config=NORMS[1])
    assert "the reference" in said and 'kind "rms" has no bias' in said
    with pytest.raises(ValueError, match=r'^norm: kind "rms" has no bias'):
        layers.add_norm(x, x, both, config=NORMS[1])
    for r, params, message in (
        (x[:3, :], both, r"^add_norm: r must have shape \(4, 6\), got \(3, 6\)$"),
        (x, layers.NormParams(w[:5], None), r"^layer_norm: w must be \(D,\) with D = 6"),
    ):
        with pytest.raises(ValueError, match=message):
            layers.add_norm(x, r, params, config=NORMS[0])
    _, cache = layers.add_norm(x, x, both, config=NORMS[0])
    for dys, name in (((x[:3, :], x), "ds"), ((None, x[:3, :]), "dy")):
        with pytest.raises(ValueError, match=rf"^add_norm: {name} must have shape"):
            cache.backward(*dys)


def test_frozen_norms_of_sums(library: Backend) -> None:
    x, w, b = library.asarray(normal(4, 6)), library.asarray(normal(6)), library.asarray(normal(6))
    params = layers.NormParams(Frozen(w), b)
    _, cache = layers.add_norm(x, x, params, config=NORMS[0])
    dparams = cache.backward(x, x)[2]
    assert dparams.w is None and dparams.b is not None


def test_more_rows_than_parts(library: Backend) -> None:
    """The blocks of the backward pass walk over several rows each, and sum what they see."""
    x, w, b = normal(4100, 3), normal(3), normal(3)
    require_exact(library, ops.layer_norm, x, w, b)
    require_exact(library, ops.rms_norm, x, w)
    require_exact(library, sum_and_norm, x, 2 * x, w, b, config=NORMS[0])


def test_sums_that_do_not_fit_in_shared_memory(library: Backend) -> None:
    x, w, b = normal(3, 6200), normal(6200), normal(6200)
    require_exact(library, ops.layer_norm, x, w, b)
    require_exact(library, ops.rms_norm, normal(3, 12400), normal(12400))


def test_no_rows(library: Backend) -> None:
    x, w = np.zeros((0, 5)), normal(5)
    for op, arrays in ((ops.layer_norm, (x, w, w)), (ops.rms_norm, (x, w)), (ops.glu, (x, x))):
        with reference_only():
            wanted = outcome(backends.get(), op, arrays, {}, "float32")
        got = outcome(library, op, arrays, {}, "float32")
        for a, b in zip(got, wanted, strict=True):
            assert np.array_equal(a, b)


def test_softmax_along_every_axis(library: Backend) -> None:
    for axis in (0, 1, 2, -2):
        require_exact(library, ops.softmax, normal(5, 40, 4), axis=axis)


def test_large_and_forbidden_scores(library: Backend) -> None:
    x = np.array([[1e4, 1e4 - 1, -1e4], [-np.inf, 0.0, 1.0], [-np.inf, -np.inf, 3.0]])
    require_exact(library, ops.softmax, x)


@pytest.mark.parametrize("name", ["relu", "silu", "tanh", "sigmoid", "erf", "relu_squared"])
def test_limits_of_activations(library: Backend, name: str) -> None:
    require_limits(library, getattr(ops, name))


def test_limits_of_gelu(library: Backend) -> None:
    require_limits(library, ops.quick_gelu)
    require_limits(library, ops.gelu)
    require_limits(library, ops.gelu, approximate="tanh")


def require_limits(library: Backend, op: Any, **options: Any) -> None:
    x = np.array([-np.inf, np.inf, np.nan, -1e30, 1e30, -0.0, 0.0, 1e-30, 90.0, -90.0], np.float32)
    y, cache = op(library.asarray(x), **options)
    dx = cache.backward(library.asarray(np.ones_like(x)))
    with reference_only(), np.errstate(invalid="ignore", over="ignore"):
        wanted, cache = op(x, **options)
        wanted_dx = cache.backward(np.ones_like(x))
    for got, exact in ((y, wanted), (dx, wanted_dx)):
        got = library.to_numpy(got)
        assert np.array_equal(np.isnan(got), np.isnan(exact)), (got, exact)
        assert np.allclose(got, exact, rtol=1e-6, atol=1e-37, equal_nan=True), (got, exact)


# ---- How arrays lie ----


def test_views_that_are_not_aligned(library: Backend) -> None:
    """16-byte accesses need addresses and rows that are multiples of it."""
    x = library.asarray(normal(65).astype(np.float32))
    assert wide(64, x[:64]) == 1
    assert wide(64, x[1:]) == 0
    assert wide(62, x[:62]) == 0
    y, _ = ops.silu(x[1:])
    whole, _ = ops.silu(x)
    assert np.array_equal(library.to_numpy(y), library.to_numpy(whole)[1:])


def test_threads_of_a_block(library: Backend) -> None:
    assert [threads(n) for n in (1, 32, 33, 200, 256, 5000)] == [32, 32, 64, 256, 256, 256]
    half, single = np.empty(0, np.float16), np.empty(0, np.float32)
    assert [row_threads(n, 0, single) for n in (1, 33, 257, 600)] == [32, 64, 160, 224]
    assert [row_threads(n, 1, half) for n in (8, 768, 1600, 4096)] == [32, 96, 224, 256]
    assert row_threads(768, 1, single) == 192


def test_rope_reads_by_strides(library: Backend, launched: list[Any]) -> None:
    """Heads of a packed product, (B, T, 3, H, K), are turned without a copy of them."""
    packed = library.asarray(normal(2, 5, 3, 4, 8).astype(np.float32))
    q = packed[:, :, 1, ...]
    q = library.xp.permute_dims(q, (0, 2, 1, 3))
    angles = normal(5, 4)
    cos, sin = (library.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
    for interleaved in (False, True):
        y, _ = ops.rope(q, cos=cos, sin=sin, interleaved=interleaved)
        copied, _ = ops.rope(contiguous(q), cos=cos, sin=sin, interleaved=interleaved)
        assert np.array_equal(library.to_numpy(y), library.to_numpy(copied))
    assert [args[0].data.ptr for _, _, args in launched[::2]] == [q.data.ptr] * 2


def by_token(x: Any) -> Any:
    """The same (B, H, T, K), whose heads of a token lie side by side in memory."""
    xp = array_namespace(x)
    return xp.permute_dims(contiguous(xp.permute_dims(x, (0, 2, 1, 3))), (0, 2, 1, 3))


class ByToken(NamedTuple):
    """A cache whose backward is given dy by token."""

    cache: Any

    def backward(self, dy: Any) -> Any:
        return self.cache.backward(by_token(dy))


def rope_by_token(x: Any, **options: Any) -> tuple[Any, ByToken]:
    y, cache = ops.rope(by_token(x), **options)
    return y, ByToken(cache)


def test_rope_lays_out_as_it_reads(library: Backend) -> None:
    """What lies by token merges without a copy, forward and backward; what lies by head stays."""
    x = library.asarray(normal(2, 3, 5, 8).astype(np.float32))
    tables = {name: library.asarray(normal(5, 4).astype(np.float32)) for name in ("cos", "sin")}
    for given in (x, by_token(x)):
        y, cache = ops.rope(given, **tables)
        dx = cache.backward(given)
        for result in (y, dx):
            assert tuple(result.shape) == (2, 3, 5, 8)
            assert result.strides == given.strides
            merged = library.xp.permute_dims(result, (0, 2, 1, 3))
            assert merged.flags.c_contiguous == (given is not x)


@pytest.mark.parametrize("width", [2, 7, 64, 70])
def test_rope_widths(library: Backend, width: int) -> None:
    half = width // 2 if width != 70 else 32
    for lead in ((), (2,)):
        tables = {"cos": normal(*lead, 3, half), "sin": normal(*lead, 3, half)}
        for interleaved in (False, True):
            options = {**tables, "interleaved": interleaved}
            require_exact(library, ops.rope, normal(2, 5, 3, width), **options)
            require_exact(library, rope_by_token, normal(2, 5, 3, width), **options)


# ---- Dropout: the bits are those of the reference ----


@pytest.mark.parametrize("shape", [(1,), (5,), (64,), (33, 31)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dropout_is_the_same_to_the_bit(library: Backend, shape: Any, dtype: str) -> None:
    x = normal(*shape).astype(dtype)
    for key in (RandomKey(0), RandomKey(2**64 - 1, 2**32 - 1, 2**32 - 1), RandomKey(5, 6, 7)):
        for rate in (0.3, 1 - 2.0**-32, 2.0**-33):
            with reference_only():
                wanted, _ = ops.dropout(x, rate=rate, key=key)
            y, cache = ops.dropout(library.asarray(x), rate=rate, key=key)
            assert np.array_equal(library.to_numpy(y), wanted)
            assert np.array_equal(library.to_numpy(cache.backward(library.asarray(x))), wanted)


def test_key_whose_step_is_on_the_device(library: Backend) -> None:
    key = RandomKey(3, library.asarray(np.array(4)), 5)
    x = library.asarray(np.ones(9, np.float32))
    y, _ = ops.dropout(x, rate=0.5, key=key)
    wanted, _ = ops.dropout(x, rate=0.5, key=RandomKey(3, 4, 5))
    assert np.array_equal(library.to_numpy(y), library.to_numpy(wanted))


# ---- Cross-entropy ----


@pytest.mark.parametrize("width", [1, 33, 5003, 8192])
def test_many_classes(library: Backend, width: int) -> None:
    logits = 5 * normal(3, width)
    targets = np.array([0, width - 1, width // 2])
    options: dict[str, Any] = {"targets": targets, "label_smoothing": 0.1, "z_loss": 0.01}
    for reduction in ("mean", "none"):
        require_exact(library, ops.cross_entropy, logits, reduction=reduction, **options)


def test_many_tokens(library: Backend) -> None:
    targets = RNG.integers(-1, 3, 2100)
    require_exact(library, ops.cross_entropy, normal(2100, 3), targets=targets, ignore_index=-1)


def test_ignored_tokens_may_hold_anything(library: Backend) -> None:
    logits = normal(3, 4).astype(np.float32)
    logits[1] = [np.nan, np.inf, -np.inf, 0]
    targets = np.array([1, -100, 2])
    loss, cache = ops.cross_entropy(
        library.asarray(logits), targets=library.asarray(targets), ignore_index=-100
    )
    dlogits = library.to_numpy(cache.backward(library.asarray(np.float32(1))))
    wanted, _ = ops.cross_entropy(logits[::2], targets=targets[::2])
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
    assert np.array_equal(dlogits[1], np.zeros(4))
    assert np.isfinite(dlogits).all()


def test_forbidden_classes(library: Backend) -> None:
    """A logit of -inf has probability 0; smoothing 1 looks at no target."""
    logits = np.array([[1.0, -np.inf, 2.0]], np.float32)
    loss, cache = ops.cross_entropy(library.asarray(logits), targets=library.asarray([0]))
    assert np.isfinite(float(loss))
    assert library.to_numpy(cache.backward(library.asarray(np.float32(1))))[0, 1] == 0


def test_gradient_in_place_of_the_logits(library: Backend) -> None:
    logits, targets = normal(5, 130).astype(np.float32), RNG.integers(0, 130, 5)
    one = library.asarray(np.float32(1))
    for reduction in ("mean", "sum"):
        own = library.asarray(logits)
        _, cache = ops.cross_entropy(
            own, targets=library.asarray(targets), reduction=reduction, z_loss=0.1
        )
        wanted = library.to_numpy(cache.backward(one))
        assert np.array_equal(library.to_numpy(own), logits)  # not written to
        assert cross_entropy.dlogits(cache, one, own) is own
        assert np.array_equal(library.to_numpy(own), wanted)


def in_dtype(library: Backend, x: Host, dtype: str) -> Any:
    """On the device, rounded to two bytes if that is the dtype."""
    if dtype not in STORED:
        return library.asarray(x, dtype)
    return library.cast_params([library.asarray(x, "float32")], dtype)[0]


def float64(library: Backend, x: Any) -> Host:
    return library.to_numpy(x).astype(np.float64)


@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize(
    ("n_classes", "step"), [(1, 8), (7, 7), (9, 16), (70, 72), (511, 511), (512, 576), (1030, 1088)]
)
def test_columns_behind_the_classes(
    library: Backend, dtype: str, n_classes: int, step: int
) -> None:
    """They are never read, and dlogits are 0 there, which are written over the logits."""
    require_dtype(dtype)
    held = 5 * normal(5, step)
    held[:, n_classes:] = [[np.nan], [np.inf], [-np.inf], [np.nan], [6e4]]
    logits = in_dtype(library, held, dtype)
    exact = float64(library, logits)[:, :n_classes]
    targets = np.array([0, n_classes - 1, -1, n_classes, n_classes // 2])
    loss, top, total = (empty(logits, (5,), working_dtype(logits)) for _ in range(3))
    before = library.asarray(targets), loss, (top, total), -1, 0.1, 0.01
    cross_entropy.token_losses(logits, *before, n_classes=n_classes, dlogits=logits)
    found, slopes = float64(library, loss), float64(library, logits)
    assert np.array_equal(slopes[:, n_classes:], np.zeros((5, step - n_classes)))
    assert found[2] == 0 and not slopes[2].any()
    assert np.isnan(found[3]) and np.isnan(slopes[3, :n_classes]).all()
    good = [0, 1, 4]
    options: Any = {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 0.01}
    with reference_only():
        wanted, cache = ops.cross_entropy(exact[good], targets=targets[good], **options)
    wanted_slopes = cache.backward(np.array(1.0))
    bound = {"float64": 1e-12, "float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    assert np.sum(found[good]) == pytest.approx(float(wanted), rel=max(1e-12, min(bound, 1e-5)))
    assert np.allclose(slopes[good, :n_classes], wanted_slopes, rtol=bound, atol=bound / 1000)
    assert np.allclose(float64(library, top)[good], exact[good].max(axis=1))
    assert np.isfinite(float64(library, total)[good]).all()


def require_dtype(dtype: str) -> None:
    if dtype in STORED:
        pytest.importorskip("ml_dtypes", reason="there is no bfloat16: ml_dtypes is missing")


@pytest.mark.parametrize(
    ("dtype", "step", "packs"),
    [("bfloat16", 72, 1), ("bfloat16", 68, 0), ("float32", 68, 1), ("float32", 67, 0)],
)
def test_rows_of_packs(
    library: Backend, monkeypatch: pytest.MonkeyPatch, dtype: str, step: int, packs: int
) -> None:
    """The distance of rows decides whether they are read 16 bytes at a time, not the classes."""
    require_dtype(dtype)
    seen: list[tuple[int, int]] = []

    def noted(*args: Any, **options: Any) -> None:
        seen.append((options["WIDE"], options["block"][0]))
        launch(*args, **options)

    monkeypatch.setattr(cross_entropy, "launch", noted)
    logits = in_dtype(library, normal(2, step), dtype)
    loss, targets = empty(logits, (2,), working_dtype(logits)), library.asarray([0, 60])
    cross_entropy.token_losses(logits, targets, loss, (None, None), None, 0.0, 0.0, n_classes=61)
    assert seen == [(packs, 32 if packs else 128)]
    assert np.isfinite(library.to_numpy(loss)).all()


@pytest.mark.parametrize("n_classes", [0, 9])
def test_classes_that_do_not_fit(library: Backend, n_classes: int) -> None:
    logits, targets = library.asarray(normal(2, 8)), library.asarray([0, 1])
    given: Any = targets, empty(logits, (2,)), (None, None), None, 0.0, 0.0
    with pytest.raises(ValueError, match=f"{n_classes} classes do not fit into"):
        cross_entropy.token_losses(logits, *given, n_classes=n_classes)
    with pytest.raises(ValueError, match="8 classes do not fit into logits"):
        cross_entropy.token_losses(logits, *given, dlogits=logits[:1, :])


@pytest.mark.parametrize("width", [40, 4100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_rows_that_try_a_running_maximum(library: Backend, width: int, smoothing: float) -> None:
    """It rises with each pack, never, late; it is huge; it is no number; there is none."""
    rows = normal(9, width)
    rows[0] = np.arange(width)
    rows[1] = -np.arange(width)
    rows[2] = 1e30
    rows[3] += 1e6
    rows[4, : width - 3] = -np.inf
    rows[5] = -np.inf
    rows[6, width // 2] = np.inf
    rows[7, width - 1] = np.nan
    targets = np.full(9, width - 2)
    rows = rows.astype(np.float32)
    options: Any = {"reduction": "none", "label_smoothing": smoothing, "z_loss": 0.0}
    with np.errstate(all="ignore"), reference_only():
        wanted, exact = ops.cross_entropy(rows.astype(np.float64), targets=targets, **options)
        slopes = exact.backward(np.ones(9))
    loss, cache = ops.cross_entropy(
        library.asarray(rows), targets=library.asarray(targets), **options
    )
    found = float64(library, loss)
    assert np.allclose(found, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
    got = float64(library, cache.backward(library.asarray(np.ones(9, np.float32))))
    assert np.allclose(got, slopes, rtol=1e-4, atol=1e-7, equal_nan=True)


def test_bad_options(library: Backend) -> None:
    logits = library.asarray(normal(2, 3))
    with pytest.raises(ValueError, match=r"^cross_entropy: reduction must be"):
        ops.cross_entropy(logits, targets=library.asarray([0, 2]), reduction="max")


# ---- Ids out of range: nobody waits to see them, and they show ----

FAR = (-1, 3, 2**40, -(2**63))


@pytest.mark.parametrize("bad", FAR)
def test_a_target_out_of_range_gives_nan(library: Backend, bad: int) -> None:
    logits = normal(3, 3).astype(np.float32)
    targets = library.asarray([0, bad, 2])
    options: dict[str, Any] = {"targets": targets, "reduction": "none"}
    loss, cache = ops.cross_entropy(library.asarray(logits), **options)
    dlogits = cache.backward(library.asarray(np.ones(3, np.float32)))
    for rows in map(library.to_numpy, (loss, dlogits)):
        assert np.isnan(rows[1]).all() and np.isfinite(rows[::2]).all()
    mean, _ = ops.cross_entropy(library.asarray(logits), targets=targets)
    assert np.isnan(float(mean))
    kept, _ = ops.cross_entropy(library.asarray(logits), targets=targets, ignore_index=bad)
    assert np.isfinite(float(kept))


@pytest.mark.parametrize("bad", FAR)
@pytest.mark.parametrize("width", [5, 8])
def test_an_id_out_of_range_gives_nan(library: Backend, bad: int, width: int) -> None:
    """And no gradient, in either form of the sum."""
    table, ids = normal(3, width).astype(np.float32), [2, bad, 0, 2]
    dy = np.ones((4, width), np.float32)
    y, cache = ops.embedding(library.asarray(table), ids=library.asarray(ids))
    assert np.array_equal(library.to_numpy(y)[[0, 2, 3]], table[[2, 0, 2]])
    assert np.isnan(library.to_numpy(y)[1]).all()
    wanted = np.array([[1.0], [0.0], [2.0]]) + np.zeros(width)
    for context in (nullcontext(), deterministic()):
        with context:
            dtable = cache.backward(library.asarray(dy))
            out, _ = ops.index_add(
                library.asarray(table), library.asarray(dy), ids=library.asarray(ids)
            )
        assert np.array_equal(library.to_numpy(dtable), wanted)
        assert np.allclose(library.to_numpy(out), table + wanted, rtol=1e-6)


# ---- Linear maps, and the head with its loss ----


@pytest.mark.parametrize("rows", [0, 1, 65, 200])
def test_linear(library: Backend, rows: int) -> None:
    """Rows beyond the parts of their sum; weights that lie sideways, as a tied head's do."""
    x, w, b = normal(rows, 5), normal(5, 33), normal(33)
    require_exact(library, ops.linear, x, w, b)
    require_exact(library, ops.linear, x, w, b, trainable=False)
    y, cache = ops.linear(library.asarray(x), library.asarray(w.T.copy()).T)
    dx, dw, db = cache.backward(y)
    assert dw.T.flags.c_contiguous and db is None
    assert np.allclose(library.to_numpy(dw), x.T @ x @ w, rtol=1e-12)
    assert np.allclose(library.to_numpy(dx), x @ w @ w.T, rtol=1e-12)


def test_linear_maps_of_views(library: Backend) -> None:
    """Products whose factors CuPy would copy, which the stand-in refuses: copied before, once."""
    x, w = normal(6, 4, 10), normal(10, 14)
    views = library.asarray(x)[::2, :, ::2], library.asarray(w)[::2, ::2]
    y, cache = ops.linear(*views)
    assert np.allclose(library.to_numpy(y), x[::2, :, ::2] @ w[::2, ::2], rtol=1e-12)
    dx, dw, _ = cache.backward(library.asarray(normal(7, 4, 3)).T)
    assert (dx.shape, dw.shape) == ((3, 4, 5), (5, 7))


def test_products_that_the_stand_in_refuses(stand_in: Backend) -> None:
    """Factors that CuPy would copy, and sums over a factor."""
    x = stand_in.asarray(normal(4, 6))
    with pytest.raises(cuda_shim.Fault, match="a factor must be a matrix that lies as cuBLAS"):
        x[:, ::2].dot(x[:3, :])
    square, other = (stand_in.asarray(normal(4, 4)) for _ in range(2))
    for factors in ((square, other), (other, square)):
        with pytest.raises(cuda_shim.Fault, match="out must be contiguous, and no factor"):
            factors[0].dot(factors[1], square)


@pytest.fixture(params=[256, 2], ids=["as they are", "padded"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of float64 in each chunk but the last, of vocabularies that are small.

    Rows of logits are as wide as there are classes, or padded.
    """
    monkeypatch.setattr(linear_cross_entropy, "LARGE", 2)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK", 3 * 70 * 8)
    monkeypatch.setattr(linear_cross_entropy, "ROWS", request.param)


@pytest.mark.parametrize("rows", [0, 1, 3, 7, 8])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_head_in_chunks(library: Backend, chunks: None, rows: int, reduction: str) -> None:
    x, w, b = normal(rows, 5), normal(5, 70), normal(70)
    targets = RNG.integers(-1, 70, rows)
    options: dict[str, Any] = {"targets": targets, "ignore_index": -1, "reduction": reduction}
    require_exact(library, ops.linear_cross_entropy, x, w, b, **options)
    options |= {"label_smoothing": 0.1, "z_loss": 0.01}
    require_exact(library, ops.linear_cross_entropy, x, w, **options)
    require_exact(library, ops.linear_cross_entropy, x, w, b, trainable=False, **options)


def test_head_that_is_tied(library: Backend, chunks: None) -> None:
    """The gradient of the transposed table lies as the table does."""
    x, table, targets = normal(2, 4, 5), normal(70, 5), RNG.integers(0, 70, (2, 4))
    wanted, wanted_cache = ops.linear_cross_entropy(x, table.T, targets=targets)
    loss, cache = ops.linear_cross_entropy(
        library.asarray(x), library.asarray(table).T, targets=library.asarray(targets)
    )
    assert type(cache).__module__ == linear_cross_entropy.__name__
    dx, dw, _ = cache.backward(library.asarray(np.array(2.0)))
    assert float(loss) == pytest.approx(float(wanted), rel=1e-12)
    assert dw.T.flags.c_contiguous
    for got, exact in zip((dx, dw), wanted_cache.backward(np.array(2.0)), strict=False):
        assert np.allclose(library.to_numpy(got), exact, rtol=1e-10)


def test_a_head_holds_one_chunk_of_logits(
    library: Backend, chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And within `inference()` no gradient."""
    made: list[tuple[int, ...]] = []

    def noted(like: Any, shape: Any = None, dtype: Any = None) -> Any:
        made.append(tuple(like.shape if shape is None else shape))
        return empty(like, shape, dtype)

    monkeypatch.setattr(linear_cross_entropy, "empty", noted)
    x, w, targets = (library.asarray(a) for a in (normal(9, 5), normal(5, 70), np.arange(9)))
    held = [(4, 72), (5, 72)] if linear_cross_entropy.ROWS == 2 else [(3, 70)]
    ops.linear_cross_entropy(x, w, targets=targets)
    assert sorted(made) == [*held, (9,), (9, 5)]
    made.clear()
    with inference():
        ops.linear_cross_entropy(x, w, targets=targets)
    assert sorted(made) == [*held, (9,)]


def test_a_chunk_takes_one_launch(library: Backend, chunks: None, launched: list[Any]) -> None:
    """Losses and their gradient; within `inference()` no gradient."""
    x, w, targets = (library.asarray(a) for a in (normal(9, 5), normal(5, 70), np.arange(9)))
    for gradient in (True, False):
        launched.clear()
        with nullcontext() if gradient else inference():
            ops.linear_cross_entropy(x, w, targets=targets)
        names = [name for name, _, _ in launched]
        assert names == ["cross_entropy_forward"] * 3 + ["token_total"]
        assert all((args[5] is not None) == gradient for _, _, args in launched[:-1])


@pytest.mark.parametrize("n_classes", [513, 576])
@pytest.mark.parametrize("tied", [False, True])
def test_padded_rows_of_a_head(
    library: Backend, monkeypatch: pytest.MonkeyPatch, n_classes: int, tied: bool
) -> None:
    """Up to tiles of 64 columns; gradients have the layout of w, and numbers that are none stay."""
    monkeypatch.setattr(linear_cross_entropy, "LARGE", 2)
    x, w, b = normal(7, 6), normal(6, n_classes), normal(n_classes)
    x[5, 2], x[6, 3] = np.inf, np.nan  # of tokens that are ignored, and of one that is not
    targets = np.array([0, n_classes - 1, 5, -1, 3, -1, 1])
    found = []
    for rows in (8, 2):
        monkeypatch.setattr(linear_cross_entropy, "ROWS", rows)
        weight = library.asarray(w.T.copy()).T if tied else library.asarray(w)
        with np.errstate(all="ignore"):  # of the stand-in's products
            loss, cache = ops.linear_cross_entropy(
                library.asarray(x),
                weight,
                library.asarray(b),
                targets=library.asarray(targets),
                ignore_index=-1,
                reduction="sum",
            )
            grads = cache.backward(library.asarray(np.array(1.0)))
        assert (grads[1].T if tied else grads[1]).flags.c_contiguous
        found.append([library.to_numpy(a) for a in (loss, *grads)])
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape
        assert np.allclose(one, other, rtol=1e-10, equal_nan=True)
    assert np.isfinite(found[1][1][:6]).all()  # dx of ignored tokens is 0, of others what it was


def test_a_target_out_of_range_of_a_head(library: Backend, chunks: None) -> None:
    x, w, targets = (library.asarray(a) for a in (normal(4, 5), normal(5, 70), [1, 70, 2, 3]))
    loss, cache = ops.linear_cross_entropy(x, w, targets=targets)
    dx, _, _ = cache.backward(library.asarray(np.array(1.0)))
    assert np.isnan(float(loss))
    assert np.isnan(library.to_numpy(dx)).all(axis=1).tolist() == [False, True, False, False]


# ---- Sums over repeated ids ----


@pytest.mark.parametrize("width", [1, 5, 300])
def test_repeated_ids(library: Backend, width: int) -> None:
    ids = RNG.integers(0, 7, 60)
    x, y = normal(7, width), normal(60, width)
    require_exact(library, ops.index_add, x, y, ids=ids)
    with deterministic():
        require_exact(library, ops.index_add, x, y, ids=ids)
        require_exact(library, ops.index_add, x, y[:0], ids=ids[:0])
        require_exact(library, ops.embedding, x, ids=ids.reshape(5, 12))


def test_only_the_sorted_form_repeats_itself(stand_in: Backend) -> None:
    """Atomic additions come in another order each time: the stand-in shuffles them."""
    library = stand_in
    ids = library.asarray(np.zeros(300, np.int64))
    dy = library.asarray(
        (normal(300, 3) * 10.0 ** RNG.integers(-4, 4, (300, 1))).astype(np.float32)
    )
    _, cache = ops.embedding(library.asarray(np.zeros((2, 3), np.float32)), ids=ids)

    def outcomes() -> set[bytes]:
        return {library.to_numpy(cache.backward(dy)).tobytes() for _ in range(8)}

    assert len(outcomes()) > 1
    with deterministic():
        assert len(outcomes()) == 1


def test_rows_are_read_by_their_stride(library: Backend) -> None:
    every, numbers = normal(6, 2, 5).astype(np.float32), np.array([1, 0, 1, 1, 2, 0])
    dy, ids = library.asarray(every)[:, 1, :], library.asarray(numbers)
    _, cache = ops.embedding(library.asarray(np.zeros((3, 5), np.float32)), ids=ids)
    wanted = np.zeros((3, 5), np.float32)
    np.add.at(wanted, numbers, every[:, 1, :])
    for context in (deterministic(), reference_only()):
        assert np.allclose(library.to_numpy(cache.backward(dy)), wanted, rtol=1e-6)
        with context:
            assert np.allclose(library.to_numpy(cache.backward(dy)), wanted, rtol=1e-6)


def test_very_many_sums(library: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks stand in x: in y there is place for 65,535."""
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(column_sums, "launch", lambda *_, grid, **__: grids.append(grid))
    column_sums.column_sums(library.asarray(np.ones((70_000, 2, 40), np.float32)))
    assert grids == [(140_000,)]
    monkeypatch.undo()
    parts = normal(3, 5, 40)
    sums = column_sums.column_sums(library.asarray(parts))
    assert np.allclose(library.to_numpy(sums), parts.sum(axis=1), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("rows", "width"), [(0, 5), (1, 1), (3, 700), (32, 40), (256, 33), (257, 33), (17_000, 3)]
)
def test_sums_over_rows(library: Backend, rows: int, width: int) -> None:
    """Few rows are summed at once, more in parts."""
    x = normal(rows, width)
    sums = column_sums.row_sums(library.asarray(x))
    assert sums.shape == (width,)
    assert np.allclose(library.to_numpy(sums), x.sum(axis=0), rtol=1e-12, atol=1e-12)


# ---- The optimiser's ----


@pytest.mark.parametrize("size", [1, 5, 64, 1000])
@pytest.mark.parametrize("donate", [False, True])
def test_adamw(library: Backend, size: int, donate: bool) -> None:
    p = normal(size)
    state = optim.adamw_init(p)
    own, own_state = library.asarray(p), tree.map(library.asarray, state)._replace(step=0)
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.3}
    for _ in range(3):
        g, old = normal(size), own
        with reference_only():
            p, state = optim.adamw(p, g, state, **options)
        own, own_state = optim.adamw(own, library.asarray(g), own_state, donate=donate, **options)
        assert (own is old) == donate
        for got, wanted in ((own, p), (own_state.m, state.m), (own_state.v, state.v)):
            assert np.allclose(library.to_numpy(got), wanted, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_rate_on_the_device_is_not_waited_for(library: Backend, dtype: str) -> None:
    """The kernel reads it where it lies: the same bits as of a number of the host."""
    given = [[library.asarray(np.abs(normal(n)).astype(dtype)) for n in (5, 64)] for _ in range(4)]
    numbers = {"rate": 0.1, "root": 0.7, "keep": 0.9}
    wanted = adam_update(*given, **numbers, **ADAM)
    for moved in ({"rate"}, set(numbers)):
        on_device = {
            k: library.asarray(np.array(x)) if k in moved else x for k, x in numbers.items()
        }
        assert (
            "adamw.adam_update" in explain(adam_update, *given, **on_device, **ADAM).split("\n")[0]
        )
        for got, exact in zip(adam_update(*given, **on_device, **ADAM), wanted, strict=True):
            for x, y in zip(got, exact, strict=True):
                assert np.array_equal(library.to_numpy(x), library.to_numpy(y))
    w = given[0][0]
    said = explain(adam_update, [w], [w], [w], [w], rate=w[:1], root=1.0, keep=1.0, **ADAM)
    assert "the reference" in said and "rate, root and keep must be numbers, or arrays ()" in said


# Nothing, a number, rows that are packs and rows that are not, more than a block has.
LEAF_SIZES = (0, 1, 3, 64, 257, 1000, 4096, 4099, 20_000)


def leaves_of(library: Backend, n: int, dtype: str, scale: float = 1.0) -> list[Any]:
    """n leaves in turn of these sizes, of which every fourth begins beside a multiple of 16."""
    sizes = [LEAF_SIZES[i % len(LEAF_SIZES)] if i < 12 else i % 9 for i in range(n)]
    made = [library.asarray((scale * normal(size + 1)).astype(dtype)) for size in sizes]
    return [x[1:] if i % 4 == 1 else x[:-1] for i, x in enumerate(made)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("n", [LEAVES, 2 * LEAVES + 3])
def test_adamw_of_many_leaves(
    library: Backend, launched: list[Any], n: int, donate: bool, dtype: str
) -> None:
    """Few launches, which change no bit; what is not a number stays where it was."""
    options: dict[str, Any] = ADAM | {"rate": 0.02, "root": 0.3, "keep": 0.9}
    p, g, m, v = (leaves_of(library, n, dtype) for _ in range(4))
    v = [library.xp.abs(x) for x in v]
    g[5][3] = np.nan
    host = [[library.to_numpy(x).copy() for x in leaves] for leaves in (p, g, m, v)]
    alone = [adam_update(*([x] for x in leaf), **options) for leaf in zip(p, g, m, v, strict=True)]
    launched.clear()
    got = adam_update(p, g, m, v, **options, donate=donate)
    kinds = [wide(leaf[0].size, *leaf) for leaf in zip(p, g, m, v, strict=True) if leaf[0].size]
    assert len(launched) == sum(-(-kinds.count(kind) // LEAVES) for kind in (0, 1)) < n / 10
    exact = adam_update.reference(*([x.astype(np.longdouble) for x in t] for t in host), **options)
    plain = adam_update.reference(*host, **options)
    for i in range(n):
        for k, old in enumerate((p, m, v)):
            new = library.to_numpy(got[k][i])
            assert (got[k][i] is old[i]) == donate
            assert np.array_equal(new, library.to_numpy(alone[i][k][0]), equal_nan=True)
            wrong = np.isnan(exact[k][i])
            assert np.array_equal(np.isnan(new), wrong)
            assert np.count_nonzero(wrong) == (i == 5)
            off, off_plain = (
                np.nanmax(np.abs(x - exact[k][i]), initial=0) for x in (new, plain[k][i])
            )
            size = np.nanmax(np.abs(exact[k][i]), initial=0)
            assert off <= 2 * off_plain + 2 * np.finfo(dtype).eps * size
    unwritten = (1,) if donate else range(4)
    for k in unwritten:
        for before, leaf in zip(host[k], (p, g, m, v)[k], strict=True):
            assert np.array_equal(before, library.to_numpy(leaf), equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
@pytest.mark.parametrize("n", [1, LEAVES, 2 * LEAVES + 3])
def test_clipping_many_leaves(
    library: Backend, launched: list[Any], n: int, max_norm: float, dtype: str
) -> None:
    grads = leaves_of(library, n, dtype) if n > 1 else [library.asarray(normal(5).astype(dtype))]
    host = [library.to_numpy(g).copy() for g in grads]
    launched.clear()
    clipped, norm = clip_leaves(grads, max_norm=max_norm, donate=True)
    names = [name for name, _, _ in launched]
    n_launches = len(names)
    assert names.count("norm_of_parts") == 1
    assert names.count("squares") == names.count("scaled") == n_launches // 2 <= 2 + n // LEAVES
    wide_leaves = [x.astype(np.longdouble) for x in host]
    exact, exact_norm = clip_leaves.reference(wide_leaves, max_norm=max_norm)
    eps = np.finfo(dtype).eps
    assert norm.shape == () and abs(float(norm) - float(exact_norm)) <= 4 * eps * float(exact_norm)
    for a, wanted, before, g in zip(clipped, exact, host, grads, strict=True):
        size = np.max(np.abs(wanted), initial=0)
        assert np.max(np.abs(library.to_numpy(a) - wanted), initial=0) <= 8 * eps * size
        assert a is not g and np.array_equal(library.to_numpy(g), before)  # never in place


def test_sums_do_not_depend_on_launches(library: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts lie in the order of the leaves, however these are shared out."""
    grads = leaves_of(library, 2 * LEAVES, "float32")
    norm = clip_leaves(grads, max_norm=1.0)[1]
    taken: list[int] = []

    def fewer(share: int, *trees: Any) -> Iterator[Any]:
        for args, _ in leaves.launches(share, *trees):
            lists, rest = args[: len(trees)], args[len(trees) :]
            sizes = [size for size in rest[0] if size]
            for kept in range(0, len(sizes), 7):
                part = tuple([x for x in own if x is not None][kept : kept + 7] for own in lists)
                taken.append(len(part[0]))
                yield from leaves.launches(share, *part)

    monkeypatch.setattr(global_norm, "launches", fewer)
    assert float(clip_leaves(grads, max_norm=1.0)[1]) == float(norm)
    assert len(taken) > 10


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_norm_that_is_not_finite(library: Backend, bad: float) -> None:
    grads = leaves_of(library, 20, "float32")
    grads[5][3] = bad
    host = [library.to_numpy(g).copy() for g in grads]
    clipped, norm = clip_leaves(grads, max_norm=1.0, donate=True)
    with np.errstate(invalid="ignore"):
        wanted, wanted_norm = clip_leaves.reference(host, max_norm=1.0)
    assert np.array_equal(library.to_numpy(norm), wanted_norm, equal_nan=True)
    for a, b, g, before in zip(clipped, wanted, grads, host, strict=True):
        assert np.array_equal(np.isnan(library.to_numpy(a)), np.isnan(b))
        assert np.array_equal(library.to_numpy(g), before, equal_nan=True)


def test_leaves_of_several_dtypes_run_the_reference(library: Backend) -> None:
    grads = [library.asarray(normal(3).astype(dtype)) for dtype in ("float32", "float64")]
    said = explain(clip_leaves, grads, max_norm=1.0)
    assert "the reference" in said and "all float32 or all float64" in said
    params = dict(enumerate(grads))
    clipped, _ = optim.clip_by_global_norm(params, max_norm=1.0)
    new, _ = optim.adamw(params, clipped, optim.adamw_init(params), lr=0.1, donate=True)
    assert [x.dtype.name for x in new.values()] == ["float32", "float64"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_global_norm(library: Backend, dtype: str) -> None:
    arrays = [normal(*shape).astype(dtype) for shape in ((5,), (), (0, 3), (64, 33), (1024,))]
    norm, scale = global_norm.norm_and_scale([library.asarray(a) for a in arrays], 2.0)
    wanted = np.sqrt(sum((a.astype(np.float64) ** 2).sum() for a in arrays))
    assert norm.shape == scale.shape == ()
    assert float(norm) == pytest.approx(wanted, rel=4 * float(np.finfo(dtype).eps))
    assert float(scale) == pytest.approx(2 / wanted, rel=1e-6)
    many = library.asarray(np.ones(50_000, dtype))  # of several blocks
    norm, _ = global_norm.norm_and_scale([many], 1.0)
    assert float(norm) == pytest.approx(50_000**0.5, rel=1e-6)
    norm, scale = global_norm.norm_and_scale([many[:0]], 1.0)
    assert (float(norm), float(scale)) == (0, 1)
