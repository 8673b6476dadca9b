"""One contestant of `benchmarks.gpu_decoding`: `gpu_decoder.py FOLDER NAME`.

FOLDER holds the files of `shapes.store`. Requests and answers:

- {"write": {"firsts": ids, "n": n}}: n greedy ids after each first id, and the seconds for all
- {"gap": {"ids": ids, "pair": [a, b]}}: the difference of the logits of ids a and b after the
  prompt `ids` (of this library only)

NAME is one of

- "cupy kernel": this library's `generate`
- "cupy graph": `generate` with compiled=True
- "torch eager": a loop over a model with a preallocated KV cache
- "torch compile": "torch eager" as one CUDA graph

Each contestant copies each id to the host at once, as a program that stops at an end-of-text id.
"cupy graph" copies the ids of up to 64 tokens together, and drops those after an end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks import harness, shapes
from benchmarks.contestants import COMPILED, GRAPH, backend_of, capturing
from benchmarks.shapes import Shape

Write = Callable[[list[int], int], list[list[int]]]
Gap = Callable[[list[int], list[int]], float]


def ours(
    shape: Shape, weights: Any, library: str, compiled: bool, peaks: list[Any]
) -> tuple[Write, Gap]:
    """Return decoding by this library, and the difference of two logits.

    compiled: as `generate`'s. peaks: the peak bytes of each call of `write` are appended.
    """
    from xformer.base import tree
    from xformer.generation import prefill, stream

    backend = backend_of(library, shape.device)
    params = tree.map(backend.asarray, weights)

    def write(firsts: list[int], n: int) -> list[list[int]]:
        steps, prompts = list[list[Any]](), [[first] for first in firsts]
        with capturing(shape.device) if compiled else nullcontext():
            for step in stream(shape.model, params, prompts, max_new_tokens=n, compiled=compiled):
                steps.append(step)
                if len(steps) == n:  # before the graph and its memory are freed
                    peaks.append(backend.memory().peak)
        return [list(text) for text in zip(*steps, strict=True)]

    def gap(ids: list[int], pair: list[int]) -> float:
        (logits,) = backend.to_numpy(prefill(shape.model, params, [ids]).logits)
        return abs(float(logits[pair[0]] - logits[pair[1]]))

    return write, gap


def theirs(shape: Shape, weights: Any, compiled: bool) -> tuple[Write, Any]:
    """Return decoding by torch, and torch's backend.

    compiled: run each token as one CUDA graph (`torch.compile`, mode "reduce-overhead").
    """
    import torch

    from benchmarks.eager import Eager
    from benchmarks.eager_decoding import Cached

    eager = Eager(shape, weights)
    model = Cached(eager.model, shape.batch, shape.length).to(eager.backend.device)
    run = torch.compile(model, mode="reduce-overhead") if compiled else model

    @torch.inference_mode()
    def write(firsts: list[int], n: int) -> list[list[int]]:
        token = torch.tensor(firsts, device=eager.backend.device)[:, None]
        new = list[list[int]]()
        position = torch.tensor([0], device=eager.backend.device)
        for _ in range(n):
            token = run(token, position).clone()  # the graph's next run overwrites its output
            position += 1  # on the device
            new.append(token[:, 0].tolist())
        return [list(text) for text in zip(*new, strict=True)]

    return write, eager.backend


def answers(folder: Path, name: str) -> dict[str, Callable[..., Any]]:
    """Return the functions that answer a contestant's requests, by the request's name."""
    shape, weights = shapes.load(folder)
    library, gaps, peaks = name.partition(" ")[0], dict[str, Any](), list[Any]()
    if library == "torch":
        write, backend = theirs(shape, weights, name == COMPILED)
    else:
        write, gap = ours(shape, weights, library, name == GRAPH, peaks)
        gaps["gap"] = lambda ids, pair: {"gap": gap(ids, pair)}

    def answer(firsts: list[int], n: int) -> dict[str, Any]:
        start = time.perf_counter()
        ids = write(firsts, n)
        return {"ids": ids, "seconds": time.perf_counter() - start}

    def about() -> dict[str, Any]:
        return {"peak_bytes": backend.memory().peak if library == "torch" else max(peaks)}

    return harness.noted({"write": answer, "about": about} | gaps, list[str]())


if __name__ == "__main__":
    harness.serve(answers(Path(sys.argv[1]), sys.argv[2]))
