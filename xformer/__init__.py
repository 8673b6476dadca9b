"""xformer: the transformer, forward and backward, written once against the Python array API.

Sizes, as capitals in every shape: B batch, T queries (tokens), S keys, D model width, H heads,
G key/value heads, K head width, M value width of a head, F hidden width, V vocabulary, E experts,
C experts chosen for a token, I/O in/out, L maximal length, N rows. Arrays are lower case; `d`
before a name is the gradient of the loss with respect to it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from xformer import ops, tree
from xformer.dispatch import explain, inference, kernel, overridable, reference_only
from xformer.gradcheck import GradientError, gradcheck
from xformer.ops import Key

if TYPE_CHECKING:
    from xformer import backends, initial, layers, models, optim, pretrained
    from xformer.models import GPT, Transformer

__version__ = "0.1.0"

__all__ = [
    "GPT",
    "GradientError",
    "Key",
    "Transformer",
    "__version__",
    "backends",
    "explain",
    "gradcheck",
    "inference",
    "initial",
    "kernel",
    "layers",
    "models",
    "ops",
    "optim",
    "overridable",
    "pretrained",
    "reference_only",
    "tree",
]

# Imported when first asked for: together they would take as long as NumPy.
_LATER = ("backends", "initial", "layers", "models", "optim", "pretrained")


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return importlib.import_module(f"xformer.{name}")
    if name in ("GPT", "Transformer"):
        return getattr(importlib.import_module("xformer.models"), name)
    raise AttributeError(f"module 'xformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
