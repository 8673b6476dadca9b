"""`gated_delta_rule` against its recurrence under torch's autograd, and `log_decay` with it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from judges import AUTOGRAD, require_close

from xformer import ops

NAMES = "q", "k", "v", "log_decay", "beta", "state"


def inputs(t: int = 13, heads: tuple[int, int] = (2, 4)) -> list[np.ndarray]:
    """q, k, v, log_decay, beta, state: B = 2, K = 5, M = 7, keys of length 1."""
    (g, h), rng = heads, np.random.default_rng(0)
    shapes = (2, g, t, 5), (2, g, t, 5), (2, h, t, 7), (2, h, t), (2, h, t), (2, h, 5, 7)
    q, k, v, log_decay, beta, state = (rng.normal(size=shape) for shape in shapes)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    return [q, k, v, -abs(log_decay), 1 / (1 + np.exp(-beta)), state]


def recurrent(q: Any, k: Any, v: Any, log_decay: Any, beta: Any, state: Any) -> tuple[Any, Any]:
    """y and the last state on torch tensors, one step at a time."""
    import torch

    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    rows = []
    for t in range(v.shape[2]):
        state = log_decay[:, :, t, None, None].exp() * state
        held = torch.einsum("bhkm,bhk->bhm", state, k[:, :, t])
        u = beta[:, :, t, None] * (v[:, :, t] - held)
        state = state + torch.einsum("bhk,bhm->bhkm", k[:, :, t], u)
        rows.append(torch.einsum("bhkm,bhk->bhm", state, 0.6 * q[:, :, t]))
    return torch.stack(rows, 2), state


@pytest.mark.parametrize("chunk_len", [1, 2, 4, 64])
@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (1, 3)])
def test_the_recurrence_and_its_gradients_by_autograd(
    chunk_len: int, heads: tuple[int, int]
) -> None:
    torch = pytest.importorskip("torch")
    arrays = inputs(heads=heads)
    leaves = [torch.tensor(a, requires_grad=True) for a in arrays]
    wanted, last = recurrent(*leaves)
    rng = np.random.default_rng(1)
    douts = [rng.normal(size=tuple(a.shape)) for a in (wanted, last)]
    grads = torch.autograd.grad((wanted, last), leaves, tuple(map(torch.tensor, douts)))
    judged = [wanted, last, *grads]
    (y, state), cache = ops.gated_delta_rule(*arrays, scale=0.6, chunk_len=chunk_len)
    names = ("y", "last", *NAMES)
    got = dict(zip(names, (y, state, *cache.backward(*douts)), strict=True))
    by_torch = (a.detach().numpy() for a in judged)
    require_close(got, dict(zip(names, by_torch, strict=True)), AUTOGRAD)


def test_two_parts_are_the_whole() -> None:
    """The state after the first part and the second part's gradients connect both."""
    arrays, dy = inputs(), np.random.default_rng(1).normal(size=(2, 4, 13, 7))
    (y, last), cache = ops.gated_delta_rule(*arrays)
    first, second = ([a[:, :, part] for a in arrays[:5]] for part in (slice(6), slice(6, None)))
    (one, state), one_cache = ops.gated_delta_rule(*first, arrays[5])
    (two, state), two_cache = ops.gated_delta_rule(*second, state)
    *_, dstate = grads = two_cache.backward(dy[:, :, 6:])
    both = zip(one_cache.backward(dy[:, :, :6], dstate)[:5], grads, strict=False)
    joined = [np.concatenate(pair, axis=2) for pair in both]
    got = {"y": np.concatenate([one, two], axis=2), "state": state}
    got |= dict(zip(NAMES, joined, strict=False))
    wanted = {"y": y, "state": last} | dict(zip(NAMES, cache.backward(dy)[:5], strict=False))
    require_close(got, wanted, AUTOGRAD)


def test_without_a_state_it_begins_with_zeros() -> None:
    *arrays, state = inputs()
    (y, _), cache = ops.gated_delta_rule(*arrays)
    (wanted, _), other = ops.gated_delta_rule(*arrays, 0 * state)
    assert np.array_equal(y, wanted)
    *grads, dstate = cache.backward(y)
    assert dstate is None
    assert all(map(np.array_equal, grads, other.backward(y)))


def test_equal_keys_do_not_cancel() -> None:
    """Without decay and with beta 1, equal keys hold the last value exactly."""
    _, k, v, log_decay, beta, _ = inputs(t=64)
    k = np.broadcast_to(k[:, :, :1], k.shape)
    args = (k, k, v, 0 * log_decay, 0 * beta + 1)
    (y, _), _ = ops.gated_delta_rule(*args, scale=1.0)
    assert np.allclose(y, v, rtol=0, atol=1e-13)
    (single, _), _ = ops.gated_delta_rule(*(a.astype(np.float32) for a in args), scale=1.0)
    assert np.allclose(single, v, rtol=0, atol=1e-5)


def test_a_strong_decay_does_not_overflow() -> None:
    q, k, v, log_decay, beta, state = (a.astype(np.float32) for a in inputs(t=64))
    outputs, cache = ops.gated_delta_rule(q, k, v, 400 * log_decay, beta, state)
    assert all(np.isfinite(a).all() for a in (*outputs, *cache.backward(*outputs)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_len": 3}, "gated_delta_rule: chunk_len must be a power of 2, got 3"),
        ({"chunk_len": 0}, "gated_delta_rule: chunk_len must be an int of at least 1, got 0"),
        ({"scale": "x"}, "gated_delta_rule: scale must be a number, got str"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        ops.gated_delta_rule(*inputs(), **options)


def test_heads_that_do_not_divide() -> None:
    message = "gated_delta_rule: the 2 heads of k must divide the 3 heads of v"
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.gated_delta_rule(*inputs(heads=(2, 3)))


def test_log_decay() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    arrays = 30 * rng.normal(size=(2, 5, 3)), rng.normal(size=3)
    leaves = [torch.tensor(a, requires_grad=True) for a in arrays]
    x, log_rate = leaves
    wanted = -log_rate.exp() * torch.nn.functional.softplus(x, threshold=700)
    dy = rng.normal(size=(2, 5, 3))
    judged = [wanted, *torch.autograd.grad(wanted, leaves, torch.tensor(dy))]
    y, cache = ops.log_decay(*arrays)
    names = "y", "x", "log_rate"
    got = dict(zip(names, (y, *cache.backward(dy)), strict=True))
    by_torch = (a.detach().numpy() for a in judged)
    require_close(got, dict(zip(names, by_torch, strict=True)), AUTOGRAD)
