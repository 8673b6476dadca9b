"""Plots of training runs: loss, learning rate, gradient norm and speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.base.choices import require_one_of
from xformer.plots.log import Log
from xformer.plots.style import line_of, orders_of_magnitude, panels, readable, styled

AXES = ("step", "tokens", "seconds")
HALF = 100  # a smoothed value is the mean of itself and of N / 100 values on each side
PIECES = 200  # the number of points of the speed of a run
LETTERS = 110  # characters of names that fit in the width of the figure
POINTS: dict[str, Any] = {"marker": "o", "markersize": 4, "markerfacecolor": "white", "lw": 0.8}


@styled()
def training_curves(logs: Sequence[Log], *, x: str = "step") -> Any:
    """A figure of one run or several, over `x`: "step", "tokens" or "seconds".

    It has four panels:
    - the loss in nats per token: the training loss smoothed, the validation loss as points
    - the learning rate
    - the norm of the gradient before clipping
    - tokens per second

    ValueError if there are no runs, and for another x.
    """
    if not logs:
        raise ValueError("training_curves: there are no runs")
    require_one_of("training_curves: x", x, AXES)
    figure, ((loss, lr), (norm, speed)) = panels(2, 2, (9, 5.4), sharex=True)
    alone = len(logs) == 1
    for i, log in enumerate(logs):
        line = line_of(i) | ({} if len(log.step) > 1 else {"marker": "o", "markersize": 4})
        at = getattr(log, x)
        _smooth(loss, at, log.loss, line, alone)
        if (measured := np.isfinite(log.validation)).any():
            points = (line_of(1) if alone else line) | POINTS
            best = f"validation, {log.validation[measured].min():.3f} at best"
            loss.plot(at[measured], log.validation[measured], **points, label=best)
        lr.plot(at, log.lr, **line)
        _smooth(norm, at, log.norm, line, alone)
        speed.plot(*rates(at, log), **line)
    for axes, title in (
        (loss, "loss, nats per token"),
        (lr, "learning rate"),
        (norm, "norm of the gradient, before clipping"),
        (speed, "tokens per second, without validation"),
    ):
        axes.set_title(title)
        axes.margins(x=0.02)
    top = _from_zero(lr)
    lr.yaxis.set_major_formatter(lambda value, _: small(value, top))
    _from_zero(speed)
    speed.yaxis.set_major_formatter("{x:,.0f}")
    if any(np.any(log.norm > 0) for log in logs):
        orders_of_magnitude(norm)
    for axes in (norm, speed):
        axes.set_xlabel(x)
        axes.xaxis.set_major_formatter(lambda value, _: large(value))
    if alone:
        figure.suptitle(_name(logs[0]), fontsize=11, parse_math=False)
        loss.legend()
    else:
        _names(figure, loss, logs)
    return figure


def smoothed(values: np.ndarray) -> np.ndarray:
    """The mean of each value and of N / 100 values on each side.

    Near the start there are fewer values on each side: the number before the value. NaN stays NaN,
    and is not counted in other means.
    """
    n = len(values)
    index = np.arange(n)
    half = np.minimum(index, n // HALF)  # equal sides, or the steep start would be shifted
    finite = np.isfinite(values)
    sums, counts = (
        np.concatenate([[0.0], np.cumsum(column)])
        for column in (np.where(finite, values, 0), finite)
    )
    start, stop = index - half, np.minimum(index + half + 1, n)
    means = (sums[stop] - sums[start]) / np.maximum(counts[stop] - counts[start], 1)
    return np.where(finite, means, np.nan)


def rates(at: np.ndarray, log: Log) -> tuple[np.ndarray, np.ndarray]:
    """(x, tokens per second) of each piece of a run, both as medians over its steps.

    at: the x of each step.

    The median excludes what runs between some steps only, such as validation and checkpoints.
    """
    tokens, seconds = (np.diff(column, prepend=0.0) for column in (log.tokens, log.seconds))
    speeds = np.where(seconds > 0, tokens / np.where(seconds > 0, seconds, 1.0), np.nan)
    known = np.isfinite(speeds)
    at, speeds = at[known], speeds[known]
    pieces = max(min(PIECES, len(speeds) // 10), 1)
    places, medians = (
        [np.median(p) for p in np.array_split(a, pieces) if len(p)] for a in (at, speeds)
    )
    return np.array(places), np.array(medians)


def _smooth(axes: Any, at: np.ndarray, values: np.ndarray, line: Any, alone: bool) -> None:
    """Draw a line of smoothed values. If there is only one run, draw the values behind it."""
    smooth = len(values) >= HALF
    if alone and smooth:
        axes.plot(at, values, color=line["color"], alpha=0.3, lw=0.7)
    axes.plot(at, smoothed(values), **line, label="training" + ", smoothed" * smooth)


def _from_zero(axes: Any) -> float:
    """Set the y axis from 0 to slightly above the lines. Returns the largest y of the lines."""
    top = max(float(np.nanmax(line.get_ydata(), initial=0)) for line in axes.lines)
    axes.set_ylim(0, 1.08 * top if top > 0 else 1)
    return top


def small(value: float, top: float) -> str:
    """A small number as text: 0.0006. If `top` is below 0.001, it has top's exponent: 0.5e-4.

    top: the largest number of the axis.
    """
    exponent = 0 if top <= 0 else math.floor(math.log10(top))
    if exponent >= -3 or value == 0:
        return f"{value:g}"
    return f"{value / 10.0**exponent:g}e{exponent}"


def large(value: float) -> str:
    """A large number as text: 1,500, or from a million on 2.5M."""
    return f"{value / 1e6:,g}M" if abs(value) >= 1e6 else f"{value:,g}"


def _names(figure: Any, loss: Any, logs: Sequence[Log]) -> None:
    """Draw the legends: runs below the panels, lines and points in the panel of the loss."""
    from matplotlib.lines import Line2D

    names = [_name(log) for log in logs]
    runs = [Line2D([], [], **line_of(i)) for i in range(len(logs))]
    columns = LETTERS // (max(map(len, names)) + 8)  # 8 characters for the line
    ncols = min(len(logs), max(columns, 1), 4)
    legend = figure.legend(runs, names, loc="outside lower center", ncols=ncols)
    for text in legend.get_texts():
        text.set_parse_math(False)
    grey: dict[str, Any] = {"color": "#666666"}
    smooth = any(len(log.step) >= HALF for log in logs)
    handles = [Line2D([], [], **grey, label="training" + ", smoothed" * smooth)]
    if any(np.isfinite(log.validation).any() for log in logs):
        handles.append(Line2D([], [], **grey | POINTS, label="validation"))
    loss.legend(handles=handles)


def _name(log: Log) -> str:
    """The name of a run. The middle of a long name, such as a path, is omitted."""
    name = readable(log.name)
    half = LETTERS // 2 - 1
    return name if len(name) <= LETTERS else f"{name[:half]}\N{HORIZONTAL ELLIPSIS}{name[-half:]}"
