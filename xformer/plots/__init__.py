"""Plots of runs and models (extra `plot`), drawn to a file and never to a window."""

from xformer.plots.curves import training_curves
from xformer.plots.log import Log, read_log
from xformer.plots.style import save

__all__ = ["Log", "read_log", "save", "training_curves"]
