"""The loss in compiled loops: as exact as the reference, whatever is left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from test_kernels import LAYOUTS, require_exact
from test_numpy_kernels import drawn, reference, results

from xformer import backends, explain, inference, kernels, ops
from xformer.base.typing import Array
from xformer.dispatch import Kernel

pytest.importorskip("numba", reason="extra numba is not installed")
from xformer.backends.numba import single_op
from xformer.backends.numba.kernels import linear_cross_entropy as chunks
from xformer.backends.numba.single_op import Eager
from xformer.backends.numpy.linear_cross_entropy import LARGE

NUMPY = backends.get("numpy")
HEAD = Eager(ops.linear_cross_entropy, least=0)
KERNEL = Kernel(HEAD, "numpy", HEAD.unsupported)
LEAD, WIDTH, CLASSES = (7, 39), 67, 101
OF_ALL = {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": 3}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"reduction": "sum", "trainable": False},
    {"label_smoothing": 1.0},
    {**OF_ALL, "reduction": "sum"},
    OF_ALL,
)


@pytest.fixture(autouse=True)
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several, the last of which is shorter, on two threads."""
    monkeypatch.setattr(chunks, "CHUNK", 50 * CLASSES)
    monkeypatch.setattr(single_op, "_programs", {})
    with kernels("numba"), threadpoolctl.threadpool_limits(2, user_api="blas"):
        yield


def head(bias: bool = True, n_classes: int = CLASSES) -> tuple[Any, Array]:
    """x, w and b, and targets of few classes, so that some of them are ignored."""
    shapes = (*LEAD, WIDTH), (WIDTH, n_classes), (n_classes,) if bias else None
    targets = np.random.default_rng(5).integers(0, min(9, n_classes), LEAD)
    return drawn(shapes, "float32"), targets


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "plain")
def test_as_exact_as_the_reference(options: dict[str, Any], bias: bool, layout: Any) -> None:
    args, targets = head(bias)
    args = tuple(x if x is None else layout(x) for x in args)
    options = {**options, "targets": targets}
    assert KERNEL.unsupported(*args, **options) is None
    require_exact(NUMPY, KERNEL, ops.linear_cross_entropy, args, options, layout)


@pytest.mark.parametrize("n_classes", [1, 2, 16, LARGE - 1, LARGE + 5])
def test_any_number_of_classes(n_classes: int) -> None:
    args, targets = head(n_classes=n_classes)
    options = {"targets": targets, "label_smoothing": 0.1}
    require_exact(NUMPY, KERNEL, ops.linear_cross_entropy, args, options, np.asarray)


def test_it_runs_and_its_gradients_lie_as_the_weights() -> None:
    (x, w, b), targets = head()
    for own in (w, np.ascontiguousarray(w.T).T):
        text = explain(ops.linear_cross_entropy, x, own, b, targets=targets)
        assert "backends.numba.kernels.linear_cross_entropy" in text
        loss, cache = ops.linear_cross_entropy(x, own, b, targets=targets)
        assert loss.dtype == np.float32 and loss.shape == ()
        assert cache.dw.flags.c_contiguous == own.flags.c_contiguous
        with inference():
            alone, dropped = ops.linear_cross_entropy(x, own, b, targets=targets)
        assert alone == loss
        with pytest.raises(RuntimeError, match=r"within inference\(\)"):
            dropped.backward(np.ones((), np.float32))


def test_one_thread_gives_nearly_the_same() -> None:
    args, targets = head()
    several = results(ops.linear_cross_entropy, args, {"targets": targets})
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        alone = results(ops.linear_cross_entropy, args, {"targets": targets})
    for one, other in zip(alone, several, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_ignored_rows_are_left_out() -> None:
    """Whatever they hold, and however many they are: also all, and where there are no rows."""
    (x, w, b), targets = head()
    options = {"targets": targets, "ignore_index": 3}
    wanted = results(ops.linear_cross_entropy, (x, w, b), options)
    spoiled = x.copy()
    spoiled[targets == 3] = np.nan
    got = results(HEAD, (spoiled, w, b), options)
    exact = results(HEAD, (x, w, b), options)
    for one, other in zip(got, exact, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not wanted[1][targets == 3].any() and wanted[1][targets != 3].any()
    options["targets"] = np.full_like(targets, 3)
    for given in ((x, options), (x[:0], {"targets": targets[:0]})):
        for zero in results(ops.linear_cross_entropy, (given[0], w, b), given[1]):
            assert not zero.any()


def test_classes_that_cannot_be() -> None:
    """A bias of -inf: no probability, and nothing that is not a number elsewhere."""
    (x, w, b), targets = head()
    b[50] = -np.inf
    options = {"targets": targets}
    pairs = [f(ops.linear_cross_entropy, (x, w, b), options) for f in (results, reference)]
    for got, wanted in zip(*pairs, strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    b[targets[0, 0]] = -np.inf  # whose own logit then counts for nothing, but the mean for all
    loss, _ = ops.linear_cross_entropy(x, w, b, targets=targets, label_smoothing=1.0)
    assert loss == np.inf


def test_nan_stays_in_its_row() -> None:
    (x, w, _), targets = head()
    x[2, 3, 4] = np.nan
    loss, cache = ops.linear_cross_entropy(x, w, targets=targets)
    dx, _, _ = cache.backward(np.ones((), np.float32))
    assert np.isnan(loss) and np.isnan(dx[2, 3]).all() and np.isnan(dx).sum() == WIDTH


def test_far_from_zero() -> None:
    """Logits whose powers alone would be infinite."""
    (x, w, b), targets = head()
    args, options = (x, 300 * w, b), {"targets": targets}
    require_exact(NUMPY, KERNEL, ops.linear_cross_entropy, args, options, np.asarray)
    assert all(np.isfinite(got).all() for got in results(ops.linear_cross_entropy, args, options))
    far = np.float32(1e19) * x, w, b  # whose squares are infinite, and without z_loss nobody's
    pairs = [run(ops.linear_cross_entropy, far, options) for run in (results, reference)]
    for got, wanted in zip(*pairs, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6 * np.abs(wanted).max())


def test_a_constant_of_all_logits_is_taken_off() -> None:
    """Multiples of 8, which float32 has around 1e8 too, though not lse; all of them finfo.min."""
    targets = np.random.default_rng(5).integers(0, CLASSES, LEAD)
    rng, n = np.random.default_rng(0), targets.size
    x = np.eye(n, dtype=np.float32).reshape(*LEAD, n)
    w = 8 * rng.integers(-2, 1, (n, CLASSES)).astype(np.float32)
    for options in ({}, {"label_smoothing": 0.25}):
        near = results(ops.linear_cross_entropy, (x, w, None), {"targets": targets, **options})
        for shift in (1e4, 1e8):
            b = np.full(CLASSES, shift, np.float32)
            far = results(ops.linear_cross_entropy, (x, w, b), {"targets": targets, **options})
            np.testing.assert_allclose(far[0], near[0], rtol=1e-6)
            np.testing.assert_allclose(far[2], near[2], rtol=1e-6, atol=1e-6)
    lowest = np.full(CLASSES, np.finfo(np.float32).min)
    got = results(ops.linear_cross_entropy, (x, 0 * w, lowest), {"targets": targets})
    np.testing.assert_allclose(got[0], np.log(CLASSES), rtol=1e-6)


def test_what_it_leaves_to_others() -> None:
    (x, w, b), targets = head()
    run = KERNEL.unsupported
    assert run is not None
    assert "float32" in str(run(*(a.astype(float) for a in (x, w, b)), targets=targets))
    assert run(x, w, b, targets=targets) is None
    assert run(x, w[:, ::2], targets=targets) is None
    assert run(x[:1], w, targets=targets[:1]) is None
