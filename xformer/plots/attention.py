"""Plots of attention maps: all heads of a layer, with tokens on the axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.plots.style import SHADES, panels, readable, styled

MOST = 64  # tokens on an axis; more labels are not readable
WIDEST = 24.0  # inches of all panels together
LABEL = 0.15  # inches that a token's label needs
LETTERS = 12  # characters of a label
LABELS = ("token that attends", "token attended to")
TICKS = (0.0, 0.05, 0.25, 0.5, 1.0)


@styled()
def attention_picture(
    probs: np.ndarray,
    queries: Sequence[str],
    keys: Sequence[str],
    *,
    title: str = "",
    labels: tuple[str, str] = LABELS,
) -> Any:
    """A figure of one layer: a panel for each head, a row for each query, a column for each key.

    The shade is the square root of a probability, so that small ones are visible.

    probs: (H, T, S), from `attention_maps` for one sequence.
    queries, keys: names of the T and S tokens.
    labels: of the two axes.

    ValueError if the number of names does not fit, and for more than 64 tokens.
    """
    from matplotlib.colors import PowerNorm

    if probs.ndim != 3 or probs.shape[1:] != (len(queries), len(keys)):
        raise ValueError(
            f"attention_picture: probs must be (H, {len(queries)}, {len(keys)}) by the tokens, "
            f"got shape {probs.shape}"
        )
    if not all(0 < len(names) <= MOST for names in (queries, keys)) or not len(probs):
        raise ValueError(
            f"attention_picture: 1 to {MOST} tokens fit a picture, got {len(queries)} and "
            f"{len(keys)}"
        )
    n_heads = len(probs)
    rows, columns, size, scale = _grid(n_heads, len(queries), len(keys))
    figure, axes = panels(rows, columns, size)
    for panel in axes.flat[n_heads:]:
        panel.set_visible(False)
    for head, panel in enumerate(axes.flat[:n_heads]):
        norm = PowerNorm(0.5, 0, 1)
        image = panel.imshow(probs[head], cmap=SHADES, norm=norm, aspect="auto")
        panel.set_title(f"head {head}", fontsize=9)
        panel.grid(False)
        panel.set(xticks=[], yticks=[])
        panel.tick_params(length=0)
        panel.spines[["top", "right"]].set_visible(True)
    named: dict[str, Any] = {"parse_math": False, "fontsize": 7 * scale}
    for panel in axes[:, 0]:
        panel.set_yticks(range(len(queries)), map(_short, queries), **named)
    for column in range(columns):  # labels below the last head of each column
        lowest = axes[(n_heads - 1 - column) // columns, column]
        lowest.set_xticks(range(len(keys)), map(_short, keys), rotation=90, **named)
    bar = figure.colorbar(image, ax=axes, shrink=0.5 if rows > 1 else 0.9, aspect=30, ticks=TICKS)
    bar.ax.tick_params(length=0)
    bar.set_label("share of attention")
    figure.supylabel(labels[0], fontsize=9.5)
    figure.supxlabel(labels[1], fontsize=9.5)
    figure.suptitle(title, fontsize=11)
    return figure


def _grid(n_heads: int, n_queries: int, n_keys: int) -> tuple[int, int, tuple[float, float], float]:
    """(rows, columns, size of the figure in inches, scale of the labels) of the panels."""
    columns = _columns(n_heads, n_keys / n_queries)
    rows = -(-n_heads // columns)
    width, height = (max(LABEL * n, 1.1) for n in (n_keys, n_queries))
    scale = min(1.0, WIDEST / (columns * width))
    size = (scale * columns * (width + 0.15) + 1.9, scale * rows * (height + 0.3) + 1.3)
    return rows, columns, size, scale


def _columns(n_heads: int, ratio: float) -> int:
    """The number of columns for which the figure is about 4 by 3.

    ratio: width of a panel divided by its height.
    """
    wanted = math.sqrt(4 / 3 * n_heads / ratio)
    divisors = [n for n in range(1, n_heads + 1) if n_heads % n == 0]
    best = min(divisors, key=lambda n: abs(math.log(n / wanted)))
    return best if 0.5 < best / wanted < 2 else min(max(round(wanted), 1), n_heads)


def _short(token: str) -> str:
    """The name of a token, with visible spaces and line ends, shortened to `LETTERS`."""
    text = readable(token.strip() or token.replace(" ", "\N{OPEN BOX}"))
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}\N{HORIZONTAL ELLIPSIS}"
