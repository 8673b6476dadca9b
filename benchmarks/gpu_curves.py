"""Sections of `benchmarks.gpu` that train a small GPT and compare losses.

- `in_float32`: losses on the GPU and on the CPU, compared with float64
- `in_bfloat16`: the validation loss in bfloat16, compared with float32

The text is the sources of Python's standard library, as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from xformer import backends, reference_only
from xformer.backends import Backend
from xformer.base import tree
from xformer.models import LanguageModel
from xformer.training import Step, TrainConfig, Windows, loss_of, start, texts, train

BYTES = 1 << 20  # of text
HELD_OUT = 1 << 16  # the last bytes, for validation
LR = 1e-3


class Curves(NamedTuple):
    """The models, which read bytes, and the number of steps of their trainings."""

    small: (
        LanguageModel  # trained on the CPU too: in float64, and in float32 with and without kernels
    )
    short: int  # steps of `small`
    model: LanguageModel
    long: int  # steps of `model`, in bfloat16 and in float32
    batch: int
    held_out: int  # batches for validation


def in_float32(
    backend: Backend,
    c: Curves,
    tick: Callable[[], None],
    keep: Callable[[dict[str, Any]], Any] = lambda result: None,
) -> dict[str, Any]:
    """Return how far losses in float32 are from losses in float64 on NumPy.

    "off" of the result holds the largest difference of a step's loss: on `backend` ("here"), on
    NumPy ("numpy"), and on NumPy without kernels ("reference").

    tick: called after each step. keep: called with the result so far, after each training.
    """
    cpu = backends.get("numpy")

    def losses(on: Backend, dtype: str = "float32", reference: bool = False) -> np.ndarray:
        with reference_only() if reference else nullcontext():
            run = trained(on, c, c.small, c.short, tick, dtype=dtype)
            return np.array([step.loss for step in run])

    exact = losses(cpu, "float64")
    result: dict[str, Any] = {"steps": c.short, "first": exact[0], "last": exact[-1], "off": {}}
    runs = {"here": partial(losses, backend), "numpy": partial(losses, cpu)}
    runs["reference"] = partial(losses, cpu, reference=True)
    for name, run in runs.items():
        result["off"][name] = float(np.max(np.abs(run() - exact)))
        keep(result)
    return result


def in_bfloat16(
    backend: Backend,
    c: Curves,
    tick: Callable[[], None],
    keep: Callable[[dict[str, Any]], Any] = lambda result: None,
) -> dict[str, Any]:
    """Return the validation loss after training in float32 and in bfloat16.

    tick: called after each step. keep: called with the result so far, after each training.
    """
    result: dict[str, Any] = {"steps": c.long, "validation": {}}
    for precision in (None, "bfloat16"):
        for step in trained(backend, c, c.model, c.long, tick, precision=precision):
            last = step
        result["validation"][precision or "float32"] = last.validation
        keep(result)
    return result


def trained(
    backend: Backend,
    c: Curves,
    model: LanguageModel,
    n_steps: int,
    tick: Callable[[], None],
    *,
    dtype: str = "float32",
    precision: str | None = None,
) -> Iterator[Step]:
    """Train `model` on `backend` for `n_steps` steps, and yield each; all runs use equal batches.

    tick: called after each step. dtype: of the weights. precision: of `TrainConfig`.
    """
    data = text()
    windows = Windows(data[:-HELD_OUT], model.context, c.batch)
    held_out = Windows(data[-HELD_OUT:], model.context, c.batch).held_out(c.held_out)
    options: Any = {"lr": LR, "warmup": n_steps // 10, "eval_every": n_steps}
    config = TrainConfig(n_steps, c.batch, precision=precision, **options)
    params = tree.map(lambda w: backend.asarray(np.asarray(w, dtype)), model.init(0))
    arguments = start(params, config), windows, config, backend
    for step in train(loss_of(model), *arguments, held_out=held_out, donate=True):
        yield step
        tick()


def text() -> np.ndarray:
    """Return the first BYTES bytes of the text, (BYTES,) uint8."""
    chunks, size = [], 0
    for piece in texts().pieces():
        chunks.append(piece.encode())
        size += len(chunks[-1])
        if size >= BYTES:
            break
    return np.frombuffer(b"".join(chunks)[:BYTES], np.uint8)
