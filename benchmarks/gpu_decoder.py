"""One contestant of `benchmarks.gpu_decoding`: `gpu_decoder.py FOLDER NAME`.

{"write": {"firsts": ids, "n": n}} is answered with the n likeliest ids after each, and the seconds
that they took together; of this library {"gap": {"ids": ids, "pair": [a, b]}} with how far apart
the logits of two ids are behind a text. FOLDER holds what `shapes.store` wrote. "cupy kernel" is
this library's `generate`, "cupy graph" with compiled=True; "torch eager" and "torch compile" a loop
over a model with keys and values in buffers of the whole length, the latter as one CUDA graph. All
read each id as it comes, since it could end the text.
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
    """As this library's page has it; peaks: bytes at the end of each text."""
    from xformer import tree
    from xformer.generation import prefill, stream

    place = backend_of(library, shape.device)
    params = tree.map(place.asarray, weights)

    def write(firsts: list[int], n: int) -> list[list[int]]:
        steps, prompts = list[list[Any]](), [[first] for first in firsts]
        with capturing(shape.device) if compiled else nullcontext():
            for step in stream(shape.model, params, prompts, max_new_tokens=n, compiled=compiled):
                steps.append(step)
                if len(steps) == n:  # a graph's memory goes with it
                    peaks.append(place.memory().peak)
        return [list(text) for text in zip(*steps, strict=True)]

    def gap(ids: list[int], pair: list[int]) -> float:
        (logits,) = place.to_numpy(prefill(shape.model, params, [ids]).logits)
        return abs(float(logits[pair[0]] - logits[pair[1]]))

    return write, gap


def theirs(shape: Shape, weights: Any, compiled: bool) -> tuple[Write, Any]:
    """As a user of torch writes it who knows of CUDA graphs."""
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
        place = torch.tensor([0], device=eager.backend.device)
        for _ in range(n):
            token = run(token, place).clone()  # a graph writes its next result over it
            place += 1  # on the device
            new.append(token[:, 0].tolist())
        return [list(text) for text in zip(*new, strict=True)]

    return write, eager.backend


def answers(folder: Path, name: str) -> dict[str, Callable[..., Any]]:
    """What a contestant can be asked."""
    shape, weights = shapes.load(folder)
    library, more, peaks = name.partition(" ")[0], dict[str, Any](), list[Any]()
    if library == "torch":
        write, place = theirs(shape, weights, name == COMPILED)
    else:
        write, gap = ours(shape, weights, library, name == GRAPH, peaks)
        more["gap"] = lambda ids, pair: {"gap": gap(ids, pair)}

    def answer(firsts: list[int], n: int) -> dict[str, Any]:
        start = time.perf_counter()
        ids = write(firsts, n)
        return {"ids": ids, "seconds": time.perf_counter() - start}

    def about() -> dict[str, Any]:
        return {"peak_bytes": place.memory().peak if library == "torch" else max(peaks)}

    return harness.noted({"write": answer, "about": about} | more, list[str]())


if __name__ == "__main__":
    harness.serve(answers(Path(sys.argv[1]), sys.argv[2]))
