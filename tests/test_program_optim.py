"""Adam in programs: all leaves in one instruction, with numbers that only a run knows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="needs extra numba")

from programs import THREADS, judged, names, record

from xformer.backends.numba.program.run import Recorded, layout_of
from xformer.optim import AdamState, adam, adamw
from xformer.optim.adam import adam_update

SHAPES = [(), (1,), (33, 65), (7, 5, 3), (4001,), (0, 3), (130, 24)]
COLUMNS = 2, 6  # leaves that lie by columns


def leaves(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    made = [np.asarray(rng.normal(size=shape), np.float32) for shape in SHAPES]
    return [np.asfortranarray(x) if i in COLUMNS else x for i, x in enumerate(made)]


def arrays_of(*, gradients: str = "as the parameters") -> list[np.ndarray]:
    p, g, m, v = (leaves(seed) for seed in range(4))
    if gradients != "as the parameters":
        g = [np.array(x, order="C") for x in g]
    return [*p, *g, *m, *map(np.abs, v)]


def step(optimiser: Any, t: Any, arrays: Any, **options: Any) -> list[Any]:
    n = len(SHAPES)
    p, g, m, v = (tuple(arrays[i : i + n]) for i in range(0, 4 * n, n))
    new, state = optimiser(p, g, AdamState(t, m, v), **options)
    return [*new, *state.m, *state.v]


@pytest.mark.parametrize("gradients", ["as the parameters", "by rows"])
@pytest.mark.parametrize("donate", [False, True])
def test_adamw(donate: bool, gradients: str) -> None:
    def fn(*arrays: Any) -> list[Any]:
        return step(adamw, 2, arrays, lr=3e-4, weight_decay=0.1, donate=donate)

    arrays = arrays_of(gradients=gradients)
    others = () if gradients == "as the parameters" else ("copy",)
    for threads in THREADS:
        run = judged(fn, arrays, threads, others=others)
        assert set(names(run)) - {"copy"} == {"adam"}
    for i in COLUMNS:
        assert run.results[i].strides == arrays[i].strides


def test_adam_with_decay_in_the_gradient() -> None:
    def fn(*arrays: Any) -> list[Any]:
        return step(adam, 0, arrays, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6)

    judged(fn, arrays_of(), others=("multiply", "add", "copy"))


def test_the_step_may_be_known_in_a_run_only() -> None:
    """And so may what follows from it: both corrections, and the rate."""

    def fn(t: Any, lr: Any, *arrays: Any) -> list[Any]:
        n, now = len(SHAPES), t + 1
        own = (list(arrays[i : i + n]) for i in range(0, 4 * n, n))
        rate, root = lr / (1 - 0.9**now), (1 - 0.999**now) ** 0.5
        keep = 1 - lr * 0.1
        made = adam_update(*own, rate=rate, root=root, keep=keep, betas=(0.9, 0.999), eps=1e-8)
        return [x for several in made for x in several]

    arrays = arrays_of()
    for dtype in np.float64, np.float32:
        lr = np.asarray(3e-4, dtype)
        run = record(fn, [np.asarray(0), lr, *arrays])
        assert names(run).count("adam") == 1
        for t in 0, 7:
            wanted = step(adamw, t, arrays, lr=3e-4, weight_decay=0.1)
            for got, own in zip(run(np.asarray(t), lr, *arrays), wanted, strict=True):
                np.testing.assert_allclose(got, own, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("order", ["one", "another"])
def test_donated(order: str) -> None:
    """New leaves are in the places of the old ones, or of others of their shape: never too early.

    Leaves of one shape meet, so that a result may get the place of another leaf.
    """
    rng = np.random.default_rng(0)
    p, g, m, v = ([rng.normal(size=4001).astype(np.float32) for _ in range(3)] for _ in range(4))
    arrays = [*p, *g, *m, *(v := [np.abs(x) for x in v])]

    def fn(*arrays: Any) -> list[Any]:
        own = (list(arrays[i : i + 3]) for i in range(0, 12, 3))
        numbers = {"rate": 1e-3, "root": 0.5, "keep": 0.9, "betas": (0.9, 0.99), "eps": 1e-8}
        several = adam_update(*own, **numbers)
        made = [x for leaves in several for x in leaves]
        return made if order == "one" else made[::-1]

    wanted = fn(*[x.copy() for x in arrays])
    donated = [0, 1, 2, *range(6, 12)]
    run = Recorded(fn, [layout_of(x) for x in arrays], 2, donated)
    found = run(*arrays)
    # In the other order the leaf in the middle keeps its memory, with p and v exchanged.
    assert names(run).count("copy") == (0 if order == "one" else 6)
    for got, own in zip(found, wanted, strict=True):
        assert any(got is x for x in arrays)
        np.testing.assert_allclose(got, own, rtol=2e-5, atol=1e-6)
