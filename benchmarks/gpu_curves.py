"""The questions of `benchmarks.gpu` about training as a whole: are the losses those of the CPU,
and does a lower precision learn as well?

The text is the sources of Python's standard library, as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from xformer import GPT, backends, reference_only, tree
from xformer.backends import Backend
from xformer.training import Step, TrainConfig, Windows, loss_of, start, texts, train

BYTES = 1 << 20  # of text
HELD_OUT = 1 << 16  # of them, behind the rest
LR = 1e-3


class Curves(NamedTuple):
    """Models of bytes, and how long they are trained."""

    small: GPT  # on the CPU too, in float64 and by references, which take long
    short: int  # its steps, in float32
    model: GPT
    long: int  # its steps, in bfloat16 and in float32
    batch: int
    held_out: int  # batches


def in_float32(
    place: Backend,
    c: Curves,
    tick: Callable[[], None],
    keep: Callable[[dict[str, Any]], Any] = lambda found: None,
) -> dict[str, Any]:
    """How far losses in float32 get from those in float64 on NumPy: here, and on NumPy itself.

    tick: called before each step. keep: called with what was found, after each training.
    """
    cpu = backends.get("numpy")

    def losses(where: Backend, dtype: str = "float32", reference: bool = False) -> np.ndarray:
        with reference_only() if reference else nullcontext():
            run = trained(where, c, c.small, c.short, tick, dtype=dtype)
            return np.array([step.loss for step in run])

    exact = losses(cpu, "float64")
    found: dict[str, Any] = {"steps": c.short, "first": exact[0], "last": exact[-1], "off": {}}
    runs = {"here": partial(losses, place), "numpy": partial(losses, cpu)}
    runs["reference"] = partial(losses, cpu, reference=True)
    for name, run in runs.items():
        found["off"][name] = float(np.max(np.abs(run() - exact)))
        keep(found)
    return found


def in_bfloat16(
    place: Backend,
    c: Curves,
    tick: Callable[[], None],
    keep: Callable[[dict[str, Any]], Any] = lambda found: None,
) -> dict[str, Any]:
    """The validation loss at the end, in float32 and in bfloat16.

    tick: called before each step. keep: called with what was found, after each training.
    """
    found: dict[str, Any] = {"steps": c.long, "validation": {}}
    for precision in (None, "bfloat16"):
        for step in trained(place, c, c.model, c.long, tick, precision=precision):
            last = step
        found["validation"][precision or "float32"] = last.validation
        keep(found)
    return found


def trained(
    place: Backend,
    c: Curves,
    model: GPT,
    n_steps: int,
    tick: Callable[[], None],
    *,
    dtype: str = "float32",
    precision: str | None = None,
) -> Iterator[Step]:
    """The steps, the same batches each time."""
    data = text()
    windows = Windows(data[:-HELD_OUT], model.max_len, c.batch)
    held_out = Windows(data[-HELD_OUT:], model.max_len, c.batch).held_out(c.held_out)
    options: Any = {"lr": LR, "warmup": n_steps // 10, "eval_every": n_steps}
    config = TrainConfig(n_steps, c.batch, precision=precision, **options)
    params = tree.map(lambda w: place.asarray(np.asarray(w, dtype)), model.init(0))
    given = start(params, config), windows, config, place
    for step in train(loss_of(model), *given, held_out=held_out, donate=True):
        yield step
        tick()


def text() -> np.ndarray:
    """(N,) bytes."""
    found, size = [], 0
    for piece in texts().pieces():
        found.append(piece.encode())
        size += len(found[-1])
        if size >= BYTES:
            break
    return np.frombuffer(b"".join(found)[:BYTES], np.uint8)
