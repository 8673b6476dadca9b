"""The question of `benchmarks.gpu`: is attention by itself as fast as torch's, at any length?

Causal, in bfloat16, forward, and forward with backward. "flash" is this library's own kernel,
"cudnn" NVIDIA's as this library calls it (extra `cudnn`), "torch" its scaled_dot_product_attention
with the backend that it chooses. All are compared with torch's in float32 first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness, machine
from benchmarks.gpu_kernels import measured
from benchmarks.harness import Disagreement
from xformer.backends import Backend
from xformer.backends.cupy import flash, sdpa_cudnn

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
    place: Backend,
    s: Lengths,
    rounds: int,
    device: str | None,
    tick: Callable[[], None],
    keep: Callable[[list[dict[str, Any]]], Any] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Of each length and direction a row: seconds of each contestant. Disagreement where wrong.

    Who has too little memory has turns alone, after the others; the row says who has too little
    then too. tick: called before each length. keep: called with all rows so far, after each.
    """
    rows = list[dict[str, Any]]()
    for length in s.lengths:
        tick()
        one = OfLength(place, s, length, device)
        rows += one.rows
        repeats = 1 if length == s.lengths[-1] else 5
        left = one.turns(list(one.makers), repeats, rounds)
        keep(rows)
        for name in left:
            if one.turns([name], repeats, rounds, alone=True):
                for row in one.rows:
                    row["left_out"].append(f"{name}: out of memory, alone too")
            keep(rows)
    return rows


class OfLength:
    """The contestants with texts of one length, and what was found of them, forward and whole."""

    def __init__(self, place: Backend, s: Lengths, length: int, device: str | None) -> None:
        self.place, self.length = place, length
        shape = s.tokens // length, s.heads, length, s.width
        rng = np.random.default_rng(length)
        hosts = [rng.standard_normal(shape, dtype=np.float32) for _ in range(4)]
        truth = of_torch(hosts, device, "float32")
        self.wanted = truth.host(truth.whole())
        q, k, v = place.cast_params([place.asarray(x) for x in hosts[:3]], DTYPE)
        refusal = sdpa_cudnn.unsupported(q, k, v, causal=True)
        self.makers: dict[str, Callable[[], Attention]] = {
            "flash": partial(ours, place, hosts, flash.sdpa),
            "torch": partial(of_torch, hosts, device, DTYPE),
        }
        if refusal is None:
            self.makers["cudnn"] = partial(ours, place, hosts, sdpa_cudnn.sdpa)
        self.rows: list[dict[str, Any]] = [
            {"length": length, "direction": direction, "times": {}, "errors": {}}
            | {"no_cudnn": refusal, "left_out": []}
            for direction in ("forward", "whole")
        ]

    def turns(
        self, names: Sequence[str], repeats: int, rounds: int, *, alone: bool = False
    ) -> list[str]:
        """Compare and measure them; the names of those that want more memory."""
        machine.give_back()
        found, left = dict[str, Attention](), list[str]()
        for name in names:
            try:
                one = self.makers[name]()
                off = error(one.host(one.whole()), self.wanted)
            except Exception as failure:
                if not harness.is_out_of_memory(failure):
                    raise
                left.append(name)
                continue
            if not off <= TOLERANCE:
                raise Disagreement(
                    f"attention of {self.length} tokens is wrong: {name} by {off:.1e}"
                )
            found[name] = one
            for row in self.rows:
                row["errors"][name] = off
        for row in self.rows if found else []:
            calls = {name: getattr(one, row["direction"]) for name, one in found.items()}
            try:
                seconds = measured(self.place, calls, repeats, rounds)
            except Exception as failure:
                if not harness.is_out_of_memory(failure):
                    raise
                return [*left, *found]
            peer = seconds.get("torch")
            for name, own in seconds.items():
                more = {"alone": True} if alone else {}
                row["times"][name] = harness.summary(own, peer) | more
        return left


def ours(place: Backend, hosts: list[np.ndarray], sdpa: Callable[..., Any]) -> Attention:
    """A kernel of this library."""
    q, k, v, dctx = place.cast_params([place.asarray(x) for x in hosts], DTYPE)

    def whole() -> Any:
        ctx, cache = sdpa(q, k, v, causal=True)
        return ctx, *cache.backward(dctx)[:3]

    return Attention(
        lambda: sdpa(q, k, v, causal=True),
        whole,
        lambda found: [place.to_numpy(place.upcast(x)) for x in found],
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
