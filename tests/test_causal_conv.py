"""`causal_conv` against torch's depthwise convolution."""

from __future__ import annotations

import re

import numpy as np
import pytest
from judges import AUTOGRAD, require_close

from xformer import ops


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("n_steps", [1, 3, 9])
@pytest.mark.parametrize("has_before", [False, True])
def test_torch(length: int, n_steps: int, has_before: bool) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=s) for s in ((2, n_steps, 5), (length, 5), (2, length - 1, 5))]
    leaves = [torch.tensor(a, requires_grad=True) for a in arrays]
    x, w, before = leaves
    z = torch.cat([before if has_before else 0 * before, x], 1)
    wanted = torch.nn.functional.conv1d(z.mT, w.T[:, None], groups=5).mT
    dy = rng.normal(size=arrays[0].shape)
    judged = [wanted, *torch.autograd.grad(wanted, leaves, torch.tensor(dy))]
    y, cache = ops.causal_conv(*(arrays if has_before else arrays[:2]))
    *grads, dbefore = cache.backward(dy)
    assert (dbefore is None) != has_before
    names = ("y", "x", "w", "before")
    got = (y, *grads, dbefore if has_before else np.zeros(arrays[2].shape))
    by_torch = (a.detach().numpy() for a in judged)
    require_close(
        dict(zip(names, got, strict=True)), dict(zip(names, by_torch, strict=True)), AUTOGRAD
    )


def test_the_wrong_length_of_before() -> None:
    message = "causal_conv: before must be (B, L-1, C) with L - 1 = 3 (from w), got shape (2, 4, 5)"
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.causal_conv(np.ones((2, 3, 5)), np.ones((4, 5)), np.ones((2, 4, 5)))
    message = "causal_conv: w must be (L, C) with L >= 1, got shape (0, 5)"
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.causal_conv(np.ones((2, 3, 5)), np.ones((0, 5)))
