"""The load-balancing loss against plain formulas and against transformers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from judges import FLOAT64, require_close

from xformer import backends, ops
from xformer.backends import Backend

NUMPY = backends.get("numpy")


def top(logits: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-logits, axis=1, kind="stable")[:, :k]


@pytest.mark.parametrize("k", [1, 2, 5])
def test_an_even_load_costs_k_and_one_expert_for_all_costs_most(library: Backend, k: int) -> None:
    def loss(logits: np.ndarray) -> float:
        ids = library.asarray(top(logits, k))
        return float(ops.load_balancing(library.asarray(logits), ids=ids)[0])

    peaks = 50 * np.eye(5)
    turns = sum(np.roll(peaks, i, axis=1) * 0.9**i for i in range(k))  # each is chosen k times
    assert loss(np.zeros((5, 5))) == pytest.approx(k, rel=1e-12)
    assert loss(turns) == pytest.approx(k, rel=1e-12)
    assert loss(np.tile(peaks[:1], (5, 1))) == pytest.approx(5, rel=1e-12)


def test_ids_are_constants(library: Backend) -> None:
    """Any choice will do, not only the top k; f stays, and the softmax takes the gradient."""
    logits, ids = NUMPY.generator(0, "float64").normal((7, 5)), np.array([[0, 4]] * 6 + [[1, 4]])
    loss, cache = ops.load_balancing(library.asarray(logits), ids=library.asarray(ids))
    e = np.exp(logits)
    probs, f = e / e.sum(axis=1, keepdims=True), np.array([6, 1, 0, 0, 7]) / 7
    assert float(loss) == pytest.approx(5 * f @ probs.mean(axis=0), rel=1e-13)
    dlogits = library.to_numpy(cache.backward(library.xp.ones_like(loss)))
    wanted = 5 / 7 * probs * (f - probs @ f[:, None])
    assert np.allclose(dlogits, wanted, rtol=1e-12, atol=1e-16)


def test_rows_that_do_not_count_do_not_matter(library: Backend) -> None:
    logits, kept = NUMPY.generator(0, "float64").normal((7, 5)), np.arange(7) % 3 > 0
    few = logits[kept]
    wanted, few_cache = ops.load_balancing(few, ids=top(few, 2))
    logits[~kept] = np.nan
    ids = library.asarray(np.where(kept[:, None], top(logits, 2), 3))
    options = {"ids": ids, "mask": library.asarray(kept)}
    loss, cache = ops.load_balancing(library.asarray(logits), **options)
    dlogits = library.to_numpy(cache.backward(library.xp.ones_like(loss)))
    assert float(loss) == pytest.approx(float(wanted), rel=1e-13)
    assert np.allclose(dlogits[kept], few_cache.backward(np.ones(())), rtol=1e-12)
    assert not dlogits[~kept].any()


@pytest.mark.parametrize("rows", [0, 3])
def test_without_rows_the_loss_is_zero(library: Backend, rows: int) -> None:
    logits = library.asarray(np.ones((rows, 5)))
    ids, none = library.asarray(np.zeros((rows, 2), int)), library.asarray(np.zeros(rows, bool))
    for mask in (none, None) if rows == 0 else (none,):
        loss, cache = ops.load_balancing(logits, ids=ids, mask=mask)
        dlogits = cache.backward(library.xp.ones_like(loss))
        assert float(loss) == 0 and not library.to_numpy(dlogits).any()
        assert tuple(dlogits.shape) == (rows, 5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ids": [[5, 0]] * 3}, ValueError, "ids must lie in [0, 5), got ids from 0 to 5"),
        ({"ids": [[0.5, 0.0]] * 3}, TypeError, "ids must be an integer array, got dtype "),
        ({"ids": [[1, 0]] * 4}, ValueError, "ids must be (N, C) with N = 3 (from logits), "),
        ({"mask": [True, False]}, ValueError, "mask must be (N,) with N = 3 (from logits), "),
        ({"mask": [1, 0, 1]}, TypeError, "mask must be boolean (True = counts), got dtype "),
    ],
)
def test_bad_input(library: Backend, change: Any, error: type[Exception], message: str) -> None:
    logits = library.asarray(np.zeros((3, 5)))
    options = {k: library.asarray(v) for k, v in ({"ids": [[0, 1]] * 3} | change).items()}
    with pytest.raises(error, match=f"^load_balancing: {re.escape(message)}"):
        ops.load_balancing(logits, **options)


def test_no_experts_and_a_mask_that_is_no_array(library: Backend) -> None:
    none, ids = library.asarray(np.zeros((3, 0))), library.asarray(np.zeros((3, 0), int))
    with pytest.raises(ValueError, match=r"^load_balancing: axis -1 of logits must not be empty"):
        ops.load_balancing(none, ids=ids)
    logits = library.asarray(np.zeros((3, 5)))
    with pytest.raises(TypeError, match=r"^load_balancing: mask must be a boolean array, got list"):
        ops.load_balancing(logits, ids=ids, mask=[True] * 3)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_is_transformers(monkeypatch: pytest.MonkeyPatch, k: int, masked: bool) -> None:
    """Mixtral's, of two layers at once: B = 2, T = 7, E = 5, padding on the left."""
    torch = pytest.importorskip("torch")
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    # It counts and sums in float32 by name: let the names be float64.
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    logits = NUMPY.generator(0, "float64").normal((2, 14, 5), std=2.0)
    mask = np.arange(7) >= np.array([[3], [0]]) if masked else None
    layers = tuple(torch.tensor(part, requires_grad=True) for part in logits)
    attention = torch.tensor(mask.astype(int)) if mask is not None else None
    wanted = mixtral.load_balancing_loss_func(layers, 5, k, attention)
    grads = torch.autograd.grad(wanted, layers)

    rows = logits.reshape(28, 5)
    every = None if mask is None else np.tile(mask.ravel(), 2)
    loss, cache = ops.load_balancing(rows, ids=top(rows, k), mask=every)
    got = {"loss": np.asarray(loss), "dlogits": cache.backward(np.ones(()))}
    dlogits = torch.cat(grads).numpy()
    require_close(got, {"loss": wanted.detach().numpy(), "dlogits": dlogits}, FLOAT64)
