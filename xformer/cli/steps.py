"""Training steps: their progress, and how Ctrl-C ends them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing

from tqdm import tqdm

from xformer.cli.progress import EVERY, Bar
from xformer.training import Run, State, Step, TrainConfig, interruptible
from xformer.training.loop import is_stale

STOPPING = "\nstopping after this step; press Ctrl-C again to stop at once\n"


def shown(
    steps: Iterator[Step],
    run: Run,
    n_steps: int,
    begun: tuple[int, float],
    measures: Callable[[Step], list[str]],
) -> Iterator[Step]:
    """Yield the steps of a run, which records them. Ctrl-C ends them early.

    A terminal shows a bar, a file gets lines: at each validation, and every `EVERY` seconds.

    n_steps: of the whole run
    begun: the steps and seconds of the run so far; its state would stay in memory
    measures: what is shown of a validation, beside its loss
    """
    in_lines = not sys.stderr.isatty()
    done, printed_at = begun
    validated: list[str] = []  # the last validation loss
    measured: list[str] = []  # with it
    with (
        closing(Bar(n_steps, done, f"{done}/{n_steps}", disable=in_lines)) as bar,
        interruptible(STOPPING if run.world.rank == 0 else "") as stopping,
    ):
        for step in run.record(steps, stopping):
            if step.validation is not None:
                validated, measured = [f"validation {step.validation:.3f}"], measures(step)
            count, loss = f"{step.step}/{n_steps}", f"loss {step.loss:.3f}"
            rate = f"{step.tokens / step.seconds:,.0f} tokens/s"
            left = step.seconds / step.step * (n_steps - step.step)
            if in_lines and (step.validation is not None or step.seconds - printed_at >= EVERY):
                parts = [f"step {count}", loss, *(validated or ["validation -"]), *measured, rate]
                print("  ".join([*parts, f"{left:.0f} s left"]), flush=True)
                printed_at = step.seconds
            # The most important first: a narrow terminal shows no more.
            parts = [loss, f"{tqdm.format_interval(left)} left", *validated, rate, *measured]
            bar.show(step.step, count, parts)
            yield step


def say_why(state: State, config: TrainConfig) -> None:
    """Print why training ended before its last step, if it did."""
    if state.step < config.steps:
        why = "validation has not improved" if is_stale(state, config) else "stopped early"
        print(f"{why}, after step {state.step}", file=sys.stderr)
