"""xformer: the transformer, forward and backward, written once against the Python array API.

Sizes, as capitals in every shape: B batch, T queries (tokens), S keys, D model width, H heads,
G key/value heads, K head width, M value width of a head, F hidden width, V vocabulary,
I/O in/out, L maximal length, N rows. Arrays are lower case; `d` before a name is the gradient of
the loss with respect to it.
"""

from xformer import backends, initial, layers, models, ops, optim, tree
from xformer.dispatch import explain, kernel, overridable, reference_only
from xformer.gradcheck import GradientError, gradcheck
from xformer.models import GPT, Transformer
from xformer.ops import Key

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
    "initial",
    "kernel",
    "layers",
    "models",
    "ops",
    "optim",
    "overridable",
    "reference_only",
    "tree",
]
