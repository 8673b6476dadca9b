"""info_nce against torch's cross-entropy, and where pairs are few, far or misshapen."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from xformer import backends, ops
from xformer.backends import Backend

NUMPY = backends.get("numpy")


def pairs(n: int, width: int = 5, dtype: str = "float64") -> tuple[Any, Any]:
    rng = NUMPY.generator(0, dtype)
    return rng.normal((n, width)), rng.normal((n, width))


def test_it_is_torchs_cross_entropy_of_similarities() -> None:
    """As sentence-transformers computes its MultipleNegativesRankingLoss: scale 20, cosines."""
    torch = pytest.importorskip("torch")
    arrays = pairs(7)
    a, b = (torch.asarray(x).requires_grad_() for x in arrays)
    unit = [torch.nn.functional.normalize(x, dim=-1) for x in (a, b)]
    wanted = torch.nn.functional.cross_entropy(20.0 * unit[0] @ unit[1].T, torch.arange(7))
    wanted.backward()
    (x, da), (y, db) = (ops.l2_normalize(x) for x in arrays)
    loss, cache = ops.info_nce(x, y)
    np.testing.assert_allclose(loss, wanted.item(), rtol=1e-14)
    for back, dy, t in zip((da, db), cache.backward(np.ones(())), (a, b), strict=True):
        np.testing.assert_allclose(back.backward(dy), t.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("shift", [0.0, 1e8])
def test_a_constant_of_all_logits_is_taken_off(shift: float, library: Backend) -> None:
    """Three equal pairs, whose logits are all as large: each of them as probable."""
    a = library.asarray([[shift, 1.0]] * 3, "float32")
    b = library.asarray([[1.0, 8.0], [1.0, 8.0], [1.0, 16.0]], "float32")
    loss, cache = ops.info_nce(a, b, scale=1.0)
    row = np.exp([-8.0, -8.0, 0.0])
    probs = row / row.sum()
    wanted = -np.log(probs).mean()
    np.testing.assert_allclose(library.to_numpy(loss), wanted, rtol=1e-6)
    da, _ = cache.backward(library.xp.full_like(loss, 3.0))
    dlogits = probs - np.eye(3)
    np.testing.assert_allclose(
        library.to_numpy(da)[:, 1], dlogits @ [8.0, 8.0, 16.0], rtol=1e-5, atol=1e-5
    )


def test_one_pair_is_found_without_doubt(library: Backend) -> None:
    """There is nothing to mistake it for: loss and gradients 0."""
    a, b = (library.asarray(x) for x in pairs(1))
    loss, cache = ops.info_nce(a, b)
    assert float(loss) == 0
    for grad in cache.backward(library.asarray(np.ones(()))):
        assert not library.to_numpy(grad).any()


def test_equal_vectors_give_the_logarithm_of_their_number() -> None:
    ones = np.ones((5, 3))
    assert float(ops.info_nce(ones, ones)[0]) == pytest.approx(math.log(5), rel=1e-15)


def test_large_scales_do_not_overflow() -> None:
    a, b = pairs(3, dtype="float32")
    loss, cache = ops.info_nce(a, b, scale=1e4)
    assert math.isfinite(loss)
    assert all(np.isfinite(g).all() for g in cache.backward(np.ones((), np.float32)))


def test_bad_input() -> None:
    a, b = pairs(3)
    with pytest.raises(ValueError, match=r"info_nce: b must be \(B, D\) with B = 3"):
        ops.info_nce(a, b[:2])
    with pytest.raises(ValueError, match="info_nce: axis 0 of a must not be empty"):
        ops.info_nce(a[:0], b[:0])
    with pytest.raises(TypeError, match="info_nce: scale must be a number"):
        ops.info_nce(a, b, scale="20")
    _, cache = ops.info_nce(a, b)
    with pytest.raises(ValueError, match="dloss must have shape"):
        cache.backward(np.ones(3))
