"""The style of all plots: a palette for all kinds of colour vision, light axes, no windows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from xformer.base.files import replacing

# Okabe and Ito's palette, for all kinds of colour vision (jfly.uni-koeln.de/color), dark first.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":")  # the next one is used when all colours are used
SHADES = "Blues"  # one hue; darker means more
FORMATS = (".png", ".svg")
STYLE = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 9.5,
    "axes.labelcolor": "#333333",
    "axes.edgecolor": "#888888",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "xtick.color": "#888888",
    "ytick.color": "#888888",
    "xtick.labelcolor": "#333333",
    "ytick.labelcolor": "#333333",
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.hashsalt": "xformer",  # the same plot gives the same file
}


@contextmanager
def styled() -> Iterator[None]:
    """A context in which plots have the style `STYLE`. ImportError without matplotlib."""
    require_matplotlib()
    from matplotlib import rc_context

    with rc_context(STYLE):  # type: ignore[arg-type, unused-ignore]
        yield


def require_matplotlib() -> None:
    """ImportError, which names the extra, if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "matplotlib is not installed: pip install 'xformer-array[plot]'"
        ) from error


def panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """(figure, axes) without a window. size: in inches; axes: an array (rows, columns)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def line_of(index: int) -> dict[str, Any]:
    """The colour and the dashes of line `index`."""
    dashes = DASHES[index // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": dashes}


def orders_of_magnitude(axes: Any) -> None:
    """Make the y axis logarithmic, with plain numbers. For many decades it labels only 10^n."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = math.log10(high / low)
    steps = (1.0,) if decades > 2 else (1.0, 2.0, 5.0) if decades > 0.5 else tuple(range(1, 10))
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def readable(text: str) -> str:
    """A name in which characters that the font lacks are Python escapes: \\u732b."""
    drawn = _drawn()
    return "".join(c if ord(c) in drawn else c.encode("unicode_escape").decode() for c in text)


@cache
def _drawn() -> frozenset[int]:
    """The characters of the font. It comes with matplotlib, so it is the same on every machine."""
    from matplotlib import font_manager

    font = font_manager.get_font(font_manager.findfont("DejaVu Sans"))
    return frozenset(i for i in font.get_charmap() if chr(i).isprintable())


def require_drawable(path: str | os.PathLike[str]) -> None:
    """ValueError unless `path` ends in .png or .svg, ImportError without matplotlib."""
    if Path(path).suffix.lower() not in FORMATS:
        raise ValueError(f"a picture must end in {' or '.join(FORMATS)}, got {path}")
    require_matplotlib()


def save(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Write a figure to a file, in the format of its suffix, and return the path.

    An interrupted write leaves the old file.

    ValueError for another format. OSError, which names the file, if it cannot be written.
    """
    require_drawable(path)
    target = Path(path)
    kind = target.suffix.lower()[1:]
    # No date and no versions, so that the same plot gives the same file.
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with styled(), replacing(target) as (part,):
            figure.savefig(part, format=kind, dpi=200, metadata=metadata)
    except OSError as error:
        raise OSError(f"{target} cannot be written: {error.strerror or error}") from error
    return target
