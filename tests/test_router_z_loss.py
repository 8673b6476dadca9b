"""The router z-loss against the z-loss of cross-entropy and against transformers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from judges import FLOAT64, require_close

from xformer import backends, ops
from xformer.backends import Backend

NUMPY = backends.get("numpy")
LOGITS = NUMPY.generator(0, "float64").normal((7, 5), std=2.0)


def ran(library: Backend, logits: np.ndarray, **options: Any) -> tuple[Any, np.ndarray]:
    """The loss, and the gradient of the logits for dloss = 3, on the host."""
    options = {k: library.asarray(v) for k, v in options.items()}
    loss, cache = ops.router_z_loss(library.asarray(logits), **options)
    assert tuple(loss.shape) == ()
    return float(loss), library.to_numpy(cache.backward(library.xp.full_like(loss, 3.0)))


def test_is_the_z_loss_of_cross_entropy(library: Backend) -> None:
    targets = np.array([0, -1, 2, 3, -1, 0, 1])
    parts = [
        ops.cross_entropy(LOGITS, targets=targets, ignore_index=-1, z_loss=z) for z in (1.0, 0.0)
    ]
    (with_z, cache), (without, other) = parts
    loss, dlogits = ran(library, LOGITS, mask=targets >= 0)
    assert loss == pytest.approx(float(with_z - without), rel=1e-12)
    wanted = cache.backward(np.array(3.0)) - other.backward(np.array(3.0))
    assert np.allclose(dlogits, wanted, rtol=1e-12, atol=1e-15)


def test_values(library: Backend) -> None:
    assert ran(library, np.zeros((3, 5)))[0] == pytest.approx(np.log(5) ** 2, rel=1e-14)
    shifted, dlogits = ran(library, np.full((3, 5), -np.log(5)))  # probabilities already: no loss
    assert shifted == pytest.approx(0, abs=1e-28) and np.abs(dlogits).max() < 1e-15
    assert ran(library, np.full((3, 1), 1e3))[0] == pytest.approx(1e6, rel=1e-14)


def test_large_equal_logits_are_equally_probable(library: Backend) -> None:
    """exp(logits - lse) would be 1 for each: float32 has no place for log(5) behind 1e8."""
    logits = library.asarray(np.full((3, 5), 1e8), "float32")
    loss, cache = ops.router_z_loss(logits)
    assert float(loss) == pytest.approx(1e16, rel=1e-6)
    dlogits = library.to_numpy(cache.backward(library.xp.full_like(loss, 3.0)))
    np.testing.assert_allclose(dlogits, np.full((3, 5), 2e8 / 5), rtol=1e-6)


def test_rows_that_do_not_count_do_not_matter(library: Backend) -> None:
    kept = np.arange(7) % 3 > 0
    wanted, dwanted = ran(NUMPY, LOGITS[kept])
    loss, dlogits = ran(library, np.where(kept[:, None], LOGITS, np.nan), mask=kept)
    assert loss == pytest.approx(wanted, rel=1e-13)
    assert np.allclose(dlogits[kept], dwanted, rtol=1e-12) and not dlogits[~kept].any()


def test_without_rows_the_loss_is_zero(library: Backend) -> None:
    for shape, options in (((0, 5), {}), ((3, 5), {"mask": np.zeros(3, bool)})):
        loss, dlogits = ran(library, np.ones(shape), **options)
        assert loss == 0 and dlogits.shape == shape and not dlogits.any()


@pytest.mark.parametrize(
    ("shape", "mask", "error", "message"),
    [
        ((3, 5), [True], ValueError, "mask must be (N,) with N = 3 (from logits), got shape (1,)"),
        ((3, 5), [0.0] * 3, TypeError, "mask must be boolean (True = counts), got dtype "),
        ((3, 0), [True] * 3, ValueError, "axis -1 of logits must not be empty, got shape (3, 0)"),
        ((2, 3, 5), [True] * 3, ValueError, "logits must be (N, E), got shape (2, 3, 5)"),
    ],
)
def test_bad_input(
    library: Backend, shape: Any, mask: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^router_z_loss: {re.escape(message)}"):
        ran(library, np.zeros(shape), mask=np.array(mask))


def test_is_transformers() -> None:
    torch = pytest.importorskip("torch")
    switch = pytest.importorskip(
        "transformers.models.switch_transformers.modeling_switch_transformers"
    )
    x = torch.tensor(LOGITS, requires_grad=True)
    wanted = switch.router_z_loss_func(x[None])
    (grad,) = torch.autograd.grad(3 * wanted, x)
    loss, dlogits = ran(NUMPY, LOGITS)
    got = {"loss": np.asarray(loss), "dlogits": dlogits}
    require_close(got, {"loss": wanted.detach().numpy(), "dlogits": grad.numpy()}, FLOAT64)
