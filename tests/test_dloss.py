"""The gradient of a loss, dloss, is 1 unless it is given, on every library and by every kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from xformer import kernels, ops, tree
from xformer.backends import Backend
from xformer.proofs.catalogue import cases

LOSSES = (
    *("cross_entropy", "linear_cross_entropy", "info_nce", "mse"),
    *("load_balancing", "router_z_loss"),
)
CASES = [case for case in cases() if case.subject in LOSSES]


def results(library: Backend, grads: Any) -> list[np.ndarray]:
    return [library.to_numpy(a) for a in tree.flatten(grads).values()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_one(library: Backend, case: Any) -> None:
    fn, args = case.build(library, "float32")
    loss, cache = fn(*args)
    if loss.shape:
        with pytest.raises(ValueError, match=r"dloss must have shape"):
            cache.backward()
        return
    one = library.xp.ones_like(loss)
    pairs = zip(
        results(library, cache.backward()), results(library, cache.backward(one)), strict=True
    )
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_it_is_one_by_compiled_kernels() -> None:
    pytest.importorskip("numba", reason="extra numba")
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((300, 64), (64, 500)))
    targets = rng.integers(0, 500, 300)
    head = partial(ops.linear_cross_entropy, x, w, None, targets=targets)
    with kernels("numba"):
        _, cache = head()
        got, wanted = cache.backward(), cache.backward(np.ones((), np.float32))
    assert all(np.array_equal(a, b) for a, b in zip(got[:2], wanted[:2], strict=True))
