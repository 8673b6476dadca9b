"""The question of `benchmarks.gpu`: is attention by itself as fast as torch's, at any length?

Causal, in bfloat16, forward, and forward with backward. "flash" is this library's own kernel,
"cudnn" NVIDIA's as this library calls it (extra `cudnn`), "torch" its scaled_dot_product_attention
with the backend that it chooses. All are compared with torch's in float32 first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from xformer.backends import Backend
from xformer.backends.cupy import flash, sdpa_cudnn

from benchmarks import harness
from benchmarks.gpu_kernels import measured
from benchmarks.harness import Disagreement

DTYPE = "bfloat16"
TOLERANCE = 2e-2  # relative, in the norm of each result: probabilities and results are rounded


class Lengths(NamedTuple):
    """Of the texts of one batch; as many tokens in all, whatever their length."""

    tokens: int
    heads: int
    width: int
    lengths: tuple[int, ...]


class Attention(NamedTuple):
    """A contestant: forward, and a whole pass, which gives ctx, dq, dk, dv; both on the host."""

    forward: Callable[[], Any]
    whole: Callable[[], Any]
    host: Callable[[Any], list[np.ndarray]]


def attention(
    place: Backend, s: Lengths, rounds: int, device: str | None, tick: Callable[[], None]
) -> list[dict[str, Any]]:
    """Of each length and direction a row: seconds of each contestant. Disagreement where wrong.

    tick: called before each length.
    """
    rows = list[dict[str, Any]]()
    for length in s.lengths:
        tick()
        shape = s.tokens // length, s.heads, length, s.width
        rng = np.random.default_rng(length)
        hosts = [rng.standard_normal(shape, dtype=np.float32) for _ in range(4)]
        peer = of_torch(hosts, device, DTYPE)
        found = {"flash": ours(place, hosts, flash.sdpa), "torch": peer}
        q, k, v = place.weights([place.asarray(x) for x in hosts[:3]], DTYPE)
        refusal = sdpa_cudnn.not_by_cudnn(q, k, v, causal=True)
        if refusal is None:
            found["cudnn"] = ours(place, hosts, sdpa_cudnn.sdpa)
        truth = of_torch(hosts, device, "float32")
        wanted = truth.host(truth.whole())
        errors = {name: error(one.host(one.whole()), wanted) for name, one in found.items()}
        del truth, wanted
        if wrong := [f"{n} by {e:.1e}" for n, e in errors.items() if not e <= TOLERANCE]:
            raise Disagreement(f"attention of {length} tokens is wrong: {', '.join(wrong)}")
        for direction in ("forward", "whole"):
            turns = {name: getattr(one, direction) for name, one in found.items()}
            seconds = measured(place, turns, 1 if length == s.lengths[-1] else 5, rounds)
            times = {n: harness.summary(own, seconds["torch"]) for n, own in seconds.items()}
            rows.append({"length": length, "direction": direction, "times": times})
            rows[-1] |= {"errors": errors, "no_cudnn": refusal}
    return rows


def ours(place: Backend, hosts: list[np.ndarray], sdpa: Callable[..., Any]) -> Attention:
    """A kernel of this library."""
    q, k, v, dctx = place.weights([place.asarray(x) for x in hosts], DTYPE)

    def whole() -> Any:
        ctx, cache = sdpa(q, k, v, causal=True)
        return ctx, *cache.backward(dctx)[:3]

    return Attention(
        lambda: sdpa(q, k, v, causal=True),
        whole,
        lambda found: [place.to_numpy(place.widened(x)) for x in found],
    )


def of_torch(hosts: list[np.ndarray], device: str | None, dtype: str) -> Attention:
    """torch's own, on its stream, which is that of CuPy."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    where: dict[str, Any] = {"device": device, "dtype": getattr(torch, dtype)}
    *qkv, dctx = (torch.tensor(x, **where) for x in hosts)
    for x in qkv:
        x.requires_grad_()

    def forward() -> Any:
        with torch.no_grad():
            return scaled_dot_product_attention(*qkv, is_causal=True)

    def whole() -> Any:
        ctx = scaled_dot_product_attention(*qkv, is_causal=True)
        return ctx.detach(), *torch.autograd.grad(ctx, qkv, dctx)

    return Attention(forward, whole, lambda found: [x.float().cpu().numpy() for x in found])


def error(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The largest relative error of the results."""
    pairs = zip(found, wanted, strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)
