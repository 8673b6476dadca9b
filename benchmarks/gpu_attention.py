"""A section of `benchmarks.gpu`: time of causal attention alone, in bfloat16, at several lengths.

Two rows per length: forward, and forward with backward. The contestants are first compared with
torch in float32:

- "flash": this library's flash attention kernel
- "cudnn": cuDNN's attention, called by this library (extra `cudnn`)
- "torch": `scaled_dot_product_attention` with the backend that torch chooses
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
TOLERANCE = 2e-2  # relative, in the norm of each output: probabilities and outputs are rounded


class Lengths(NamedTuple):
    """The sizes of the measured batches; each batch has the same number of tokens."""

    tokens: int  # of a batch
    heads: int
    width: int  # of a head
    lengths: tuple[int, ...]  # of the sequences of each batch, in tokens


class Attention(NamedTuple):
    """A contestant: functions of fixed inputs."""

    forward: Callable[[], Any]  # returns ctx
    whole: Callable[[], Any]  # forward and backward; returns ctx, dq, dk, dv
    host: Callable[[Any], list[np.ndarray]]  # converts the arrays of `whole` to NumPy


def attention(
    backend: Backend,
    s: Lengths,
    rounds: int,
    device: str | None,
    tick: Callable[[], None],
    keep: Callable[[list[dict[str, Any]]], Any] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Time attention at every length. Returns a row per length and direction ("forward", "whole").

    A contestant that runs out of memory is timed again without the others. If it runs out of
    memory again, it is named in "left_out" of the row.

    backend: CuPy's   device: of torch   tick: called before each length
    keep: called with all rows so far, after each length.
    Raises Disagreement if a contestant's outputs or gradients are wrong.
    """
    rows = list[dict[str, Any]]()
    for length in s.lengths:
        tick()
        contestants = OfLength(backend, s, length, device)
        rows += contestants.rows
        repeats = 1 if length == s.lengths[-1] else 5
        out_of_memory = contestants.measure(list(contestants.makers), repeats, rounds)
        keep(rows)
        for name in out_of_memory:
            if contestants.measure([name], repeats, rounds, alone=True):
                for row in contestants.rows:
                    row["left_out"].append(f"{name}: out of memory, alone too")
            keep(rows)
    return rows


class OfLength:
    """The contestants on sequences of one length, and the rows with their times.

    length: of the sequences   device: of torch
    """

    def __init__(self, backend: Backend, s: Lengths, length: int, device: str | None) -> None:
        self.backend, self.length = backend, length
        shape = s.tokens // length, s.heads, length, s.width
        rng = np.random.default_rng(length)
        hosts = [rng.standard_normal(shape, dtype=np.float32) for _ in range(4)]
        truth = of_torch(hosts, device, "float32")
        self.wanted = truth.host(truth.whole())
        q, k, v = backend.cast_params([backend.asarray(x) for x in hosts[:3]], DTYPE)
        refusal = sdpa_cudnn.unsupported(q, k, v, causal=True)
        self.makers: dict[str, Callable[[], Attention]] = {
            "flash": partial(ours, backend, hosts, flash.sdpa),
            "torch": partial(of_torch, hosts, device, DTYPE),
        }
        if refusal is None:
            self.makers["cudnn"] = partial(ours, backend, hosts, sdpa_cudnn.sdpa)
        self.rows: list[dict[str, Any]] = [
            {"length": length, "direction": direction, "times": {}, "errors": {}}
            | {"no_cudnn": refusal, "left_out": []}
            for direction in ("forward", "whole")
        ]

    def measure(
        self, names: Sequence[str], repeats: int, rounds: int, *, alone: bool = False
    ) -> list[str]:
        """Compare and time the contestants `names`, and write their times into the rows.

        alone: whether to mark the times as measured without the other contestants.
        Returns the names of the contestants that ran out of memory.
        """
        machine.give_back()
        running, out_of_memory = dict[str, Attention](), list[str]()
        for name in names:
            try:
                one = self.makers[name]()
                off = error(one.host(one.whole()), self.wanted)
            except Exception as failure:
                if not harness.is_out_of_memory(failure):
                    raise
                out_of_memory.append(name)
                continue
            if not off <= TOLERANCE:
                raise Disagreement(
                    f"attention of {self.length} tokens is wrong: {name} by {off:.1e}"
                )
            running[name] = one
            for row in self.rows:
                row["errors"][name] = off
        for row in self.rows if running else []:
            calls = {name: getattr(one, row["direction"]) for name, one in running.items()}
            try:
                seconds = measured(self.backend, calls, repeats, rounds)
            except Exception as failure:
                if not harness.is_out_of_memory(failure):
                    raise
                return [*out_of_memory, *running]
            peer = seconds.get("torch")
            for name, times in seconds.items():
                mark = {"alone": True} if alone else {}
                row["times"][name] = harness.summary(times, peer) | mark
        return out_of_memory


def ours(backend: Backend, hosts: list[np.ndarray], sdpa: Callable[..., Any]) -> Attention:
    """Return this library's kernel `sdpa` as a contestant; hosts: q, k, v and dctx, in float32."""
    q, k, v, dctx = backend.cast_params([backend.asarray(x) for x in hosts], DTYPE)

    def whole() -> Any:
        ctx, cache = sdpa(q, k, v, causal=True)
        return ctx, *cache.backward(dctx)[:3]

    return Attention(
        lambda: sdpa(q, k, v, causal=True),
        whole,
        lambda outputs: [backend.to_numpy(backend.upcast(x)) for x in outputs],
    )


def of_torch(hosts: list[np.ndarray], device: str | None, dtype: str) -> Attention:
    """Return torch's attention as a contestant; hosts: q, k, v and dctx, in float32.

    It runs on torch's current stream, which is also CuPy's.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    options: dict[str, Any] = {"device": device, "dtype": getattr(torch, dtype)}
    *qkv, dctx = (torch.tensor(x, **options) for x in hosts)
    for x in qkv:
        x.requires_grad_()

    def forward() -> Any:
        with torch.no_grad():
            return scaled_dot_product_attention(*qkv, is_causal=True)

    def whole() -> Any:
        ctx = scaled_dot_product_attention(*qkv, is_causal=True)
        return ctx.detach(), *torch.autograd.grad(ctx, qkv, dctx)

    return Attention(forward, whole, lambda outputs: [x.float().cpu().numpy() for x in outputs])


def error(outputs: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """Return the largest relative error of an array of `outputs`, in its norm."""
    pairs = zip(outputs, wanted, strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)
