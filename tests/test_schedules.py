"""Schedules: the figures of transformers, nanoGPT and llm.c; what holds for all of them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xformer.optim import Schedule
from xformer.optim.schedules import (
    FALLS,
    RISES,
    constant,
    cosine,
    inverse_sqrt,
    linear,
    noam,
    then,
    warmup,
    wsd,
)

# ---- Published figures ----

HUGGINGFACE: dict[str, tuple[Schedule, list[float]]] = {
    "constant": (warmup(constant(10), 4, "from_zero"), [0, 2.5, 5, 7.5, 10, 10, 10, 10, 10, 10]),
    "linear": (
        warmup(linear(10, 8), 2, "from_zero"),
        [0, 5, 10, 8.75, 7.5, 6.25, 5, 3.75, 2.5, 1.25],
    ),
    "cosine": (
        warmup(cosine(10, 8), 2, "from_zero"),
        [0, 5, 10, 9.61, 8.53, 6.91, 5, 3.08, 1.46, 0.38],
    ),
}


def rates(schedule: Schedule, n: int) -> list[float]:
    return [schedule(step) for step in range(1, n + 1)]


@pytest.mark.parametrize("name", HUGGINGFACE)
def test_the_published_rows_of_transformers(name: str) -> None:
    schedule, wanted = HUGGINGFACE[name]
    # Figures are cut off, not rounded.
    assert [math.floor(100 * lr + 1e-9) / 100 for lr in rates(schedule, 10)] == wanted


def test_equals_transformers() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    theirs = pytest.importorskip("transformers", reason="transformers is not installed")
    cases: list[tuple[Schedule, str, dict[str, Any]]] = [
        (warmup(constant(3.0), 7, "from_zero"), "constant_schedule_with_warmup", {}),
        (warmup(linear(3.0, 23), 7, "from_zero"), "linear_schedule_with_warmup", {"all": 30}),
        (warmup(cosine(3.0, 23), 7, "from_zero"), "cosine_schedule_with_warmup", {"all": 30}),
        (warmup(inverse_sqrt(3.0, 7), 7, "from_zero"), "inverse_sqrt_schedule", {}),
        (
            warmup(wsd(3.0, 23, 9, "cosine"), 7, "from_zero"),
            "wsd_schedule",
            {"num_decay_steps": 9, "num_stable_steps": 14},
        ),
    ]
    for schedule, name, options in cases:
        if "all" in options:
            options = {"num_training_steps": options["all"]}
        optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3.0)
        scheduler = getattr(theirs, f"get_{name}")(optimiser, num_warmup_steps=7, **options)
        for step in range(1, 32):  # after which their cosine rises again
            assert schedule(step) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12), name
            optimiser.step()
            scheduler.step()


def nanogpt(it: int, lr: float, least: float, warmup_iters: int, decay_iters: int) -> float:
    """The rate that nanoGPT documents for iteration `it`, counted from 0."""
    if it < warmup_iters:
        return lr * (it + 1) / (warmup_iters + 1)
    if it > decay_iters:
        return least
    share = (it - warmup_iters) / (decay_iters - warmup_iters)
    return least + 0.5 * (1 + math.cos(math.pi * share)) * (lr - least)


def test_the_rates_of_nanogpt() -> None:
    schedule = warmup(cosine(1e-3, 1_900, final=0.1), 100, "nanogpt")
    for step in range(1, 2_100):
        assert schedule(step) == pytest.approx(nanogpt(step - 1, 1e-3, 1e-4, 100, 2_000), rel=1e-12)


def llmc(step: int, lr: float, warmup_steps: int, total: int, final: float, kind: str) -> float:
    """The rates of llm.c for a step counted from 0."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    least = lr * final
    if kind == "wsd":
        begin = int(0.8 * total)
        if step < begin:
            return lr
        return least + (1 - math.sqrt((step - begin) / (total - begin))) * (lr - least)
    share = (step - warmup_steps) / (total - warmup_steps)
    left = 0.5 * (1 + math.cos(math.pi * share)) if kind == "cosine" else 1 - share
    return least + left * (lr - least)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_the_rates_of_llmc(kind: str) -> None:
    total, rise = 103, 11
    falls = {
        "cosine": cosine(3.0, total - rise, 0.2),
        "linear": linear(3.0, total - rise, 0.2),
        "wsd": wsd(3.0, total - rise, total - int(0.8 * total), final=0.2),
    }
    schedule = warmup(falls[kind], rise, "llm.c")
    for step in range(total):
        wanted = llmc(step, 3.0, rise, total, 0.2, kind)
        assert schedule(step + 1) == pytest.approx(wanted, rel=1e-12), step


def test_the_peak_of_noam() -> None:
    """7.0e-4 for the base model of arXiv:1706.03762, at step 4000."""
    schedule = noam(512, 4_000)
    found = rates(schedule, 10_000)
    assert max(found) == schedule(4_000) == pytest.approx((512 * 4_000) ** -0.5)
    assert schedule(4_000) == pytest.approx(7.0e-4, abs=2e-6)
    assert schedule(1) == pytest.approx(512**-0.5 * 4_000**-1.5)
    assert noam(512, 4_000, factor=2.0)(9) == 2 * schedule(9)
    rise = warmup(inverse_sqrt(schedule(4_000), 4_000), 4_000)  # the same one step later
    assert rise(100) == pytest.approx(schedule(100))
    assert rise(5_001) == pytest.approx(schedule(5_000))


# ---- Properties ----

LR = st.floats(0, 10, allow_subnormal=False)
STEPS = st.integers(1, 1_000)
FINAL = st.floats(0, 1, allow_subnormal=False)
FALLING: dict[str, Callable[[float, int, float], Schedule]] = {
    "linear": linear,
    "cosine": cosine,
    **{f"wsd {shape}": lambda a, n, f, s=shape: wsd(a, n, 1.0, s, f) for shape in FALLS},
}


@pytest.mark.parametrize("name", FALLING)
@given(lr=LR, steps=STEPS, final=FINAL)
def test_a_fall_goes_from_the_full_rate_to_the_final_one(
    name: str, lr: float, steps: int, final: float
) -> None:
    schedule = FALLING[name](lr, steps, final)
    found = rates(schedule, steps + 3)
    assert found[0] == pytest.approx(lr)
    assert found[steps:] == [pytest.approx(lr * final, abs=1e-12)] * 3
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(found))
    assert {type(lr) for lr in found} == {float}


@pytest.mark.parametrize("how", RISES)
@given(lr=LR, steps=st.integers(0, 200))
def test_a_rise_is_even_and_then_the_schedule_begins(how: str, lr: float, steps: int) -> None:
    after = cosine(lr, 10)
    found = rates(warmup(after, steps, how), steps + 12)
    assert found[steps:] == rates(after, 12)
    rise = found[: steps + (how != "llm.c")]
    assert np.allclose(np.diff(rise, 2), 0, atol=1e-9)
    assert all(a <= b for a, b in itertools.pairwise(rise))
    first = {"from_zero": 0.0, "nanogpt": lr / (steps + 1), "llm.c": lr / max(steps, 1)}
    if steps:
        assert found[0] == pytest.approx(first[how])


@given(lr=LR, steps=STEPS, share=st.floats(0, 1))
def test_wsd_is_stable_and_then_falls(lr: float, steps: int, share: float) -> None:
    schedule = wsd(lr, steps, share)
    n_decay = max(steps - int((1 - share) * steps), 1)
    assert rates(schedule, steps - n_decay + 1) == [pytest.approx(lr)] * (steps - n_decay + 1)
    assert schedule(steps + 1) == pytest.approx(0, abs=1e-12)
    assert rates(wsd(lr, steps, n_decay), steps) == rates(schedule, steps)


@given(timescale=STEPS, step=STEPS)
def test_inverse_sqrt_halves_in_four_times_the_time(timescale: int, step: int) -> None:
    schedule = inverse_sqrt(1.0, timescale)
    shift = timescale - 1
    assert schedule(1) == 1.0
    assert schedule(4 * (step + shift) - shift) == pytest.approx(schedule(step) / 2)


@given(n=st.integers(0, 20), m=st.integers(0, 20))
def test_composition_is_associative(n: int, m: int) -> None:
    a, b, c = constant(1.0), linear(2.0, 5), cosine(3.0, 7)
    left, right = then(then(a, n, b), n + m, c), then(a, n, then(b, m, c))
    assert rates(left, 50) == rates(right, 50)


def test_a_share_of_the_decay_and_a_number_of_steps() -> None:
    assert rates(wsd(1.0, 10, 1), 10) == [1.0] * 10  # one step: what follows is at 0
    assert rates(wsd(1.0, 10, 1.0, "linear"), 10) == pytest.approx(np.arange(10, 0, -1) / 10)


# ---- Bad arguments ----

BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "lr": (lambda: constant(-1), "constant: lr must lie in [0, inf], got -1"),
    "steps": (lambda: linear(1, 0), "linear: steps must be an int of at least 1, got 0"),
    "final": (lambda: cosine(1, 5, 1.5), "cosine: final must lie in [0, 1], got 1.5"),
    "timescale": (
        lambda: inverse_sqrt(1, 0),
        "inverse_sqrt: timescale must be an int of at least 1, got 0",
    ),
    "noam": (lambda: noam(0, 5), "noam: d_model must be an int of at least 1, got 0"),
    "factor": (lambda: noam(4, 5, -1), "noam: factor must lie in [0, inf], got -1"),
    "shape": (
        lambda: wsd(1, 5, shape="sqrt"),
        "wsd: shape must be one of 1-sqrt, linear, cosine, got 'sqrt'; did you mean 1-sqrt?",
    ),
    "decay share": (lambda: wsd(1, 5, 1.5), "wsd: decay must lie in [0, 1], got 1.5"),
    "decay steps": (lambda: wsd(1, 5, 6), "wsd: decay must lie in [1, 5], got 6"),
    "how": (
        lambda: warmup(constant(1), 5, "fast"),
        "warmup: how must be one of from_zero, nanogpt, llm.c, got 'fast'",
    ),
    "warm-up steps": (
        lambda: warmup(constant(1), -1),
        "warmup: steps must be an int of at least 0, got -1",
    ),
    "then": (
        lambda: then(constant(1), 0.5, constant(1)),  # type: ignore[arg-type]
        "then: steps must be an int of at least 0, got 0.5",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str) -> None:
    make, message = BAD[case]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()


def test_steps_are_counted_from_1() -> None:
    for schedule in (
        constant(1.0),
        linear(1.0, 5),
        cosine(1.0, 5),
        inverse_sqrt(1.0, 5),
        noam(4, 5),
        wsd(1.0, 5),
        warmup(constant(1.0), 3),
    ):
        for step in (0, -1, 1.0):
            with pytest.raises(ValueError, match=r": step must be an int of at least 1, got"):
                schedule(step)  # type: ignore[arg-type]
