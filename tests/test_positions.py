"""Positional encodings without parameters: ALiBi."""

from __future__ import annotations

import numpy as np
import pytest
from libraries import only

from xformer import ops
from xformer.backends import Backend
from xformer.layers import alibi


def slopes(n_heads: int) -> list[float]:
    """Minus the bias of the key one before the query."""
    bias = alibi(n_heads, n_queries=1, n_keys=2, like=np.ones(1))
    return (-bias[0, :, 0, 0]).tolist()


def test_the_papers_slopes() -> None:
    assert slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert slopes(16) == pytest.approx([2 ** (-(h + 1) / 2) for h in range(16)], rel=1e-15)
    assert slopes(1) == [1 / 256]
    assert slopes(12) == [*slopes(8), *slopes(16)[:8:2]]
    assert slopes(3) == [1 / 16, 1 / 256, 1 / 4]


@pytest.mark.parametrize(("t", "s"), [(5, 7), (7, 5), (1, 7), (3, 0)])
def test_bias_by_loops(library: Backend, t: int, s: int) -> None:
    for dtype in ("float32", "float64"):
        like = library.generator(0, dtype).full((1,), 0.0)
        bias = alibi(4, n_queries=t, n_keys=s, like=like)
        assert bias.dtype == like.dtype and tuple(bias.shape) == (1, 4, t, s)
        bias = library.to_numpy(bias)
        for h, slope in enumerate((1 / 4, 1 / 16, 1 / 64, 1 / 256)):
            for i in range(t):
                for j in range(s):
                    assert bias[0, h, i, j] == -slope * (i + s - t - j)


@pytest.mark.parametrize("n_heads", [8, 12])
@only("torch")
def test_bias_is_that_of_bloom(library: Backend, n_heads: int) -> None:
    """Which lacks slope * i, a number for each row: softmax is blind to it."""
    pytest.importorskip("transformers")
    import torch
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    like = library.generator(0).full((1,), 0.0)
    bias = alibi(n_heads, n_queries=6, n_keys=6, like=like)
    theirs = build_alibi_tensor(torch.ones((1, 6)), n_heads, torch.float32)[None]  # (1, H, 1, S)
    row = theirs.transpose(2, 3)  # slope * i
    assert np.allclose(library.to_numpy(bias), library.to_numpy(theirs - row), rtol=0, atol=1e-6)
    x = library.generator(1).normal((1, n_heads, 6, 5))
    ours, other = (ops.sdpa(x, x, x, b, causal=True)[0] for b in (bias, theirs))
    assert np.allclose(library.to_numpy(ours), library.to_numpy(other), rtol=0, atol=1e-6)


def test_bad_sizes() -> None:
    like = np.ones(1)
    with pytest.raises(ValueError, match=r"^alibi: n_heads must be an int of at least 1, got 0$"):
        alibi(0, n_queries=2, n_keys=2, like=like)
    with pytest.raises(ValueError, match=r"^alibi: n_keys must be an int of at least 0, got -1$"):
        alibi(2, n_queries=2, n_keys=-1, like=like)


def test_alibi_of_a_query_in_fixed_columns(library: Backend) -> None:
    """Where it stands is an array: the row of that query, of all columns."""
    like = library.asarray(np.ones(1))
    rows = library.to_numpy(alibi(3, n_queries=7, n_keys=7, like=like))
    for at in (0, 4):
        got = alibi(3, n_queries=1, n_keys=7, like=like, at=library.asarray(np.array(at)))
        assert library.to_numpy(got).tolist() == rows[:, :, at : at + 1].tolist()
