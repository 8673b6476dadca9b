"""xformer: the transformer, forward and backward, written once against the Python array API.

Sizes, as capitals in every shape: B batch, T queries (tokens), S keys, D model width, H heads,
G key/value heads, K head width, M value width of a head, F hidden width, V vocabulary, E experts,
C experts chosen for a token, I/O in/out, L maximal length, N rows. Arrays are lower case; `d`
before a name is the gradient of the loss with respect to it.
"""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer import backends as backends
    from xformer import distributed as distributed
    from xformer import export as export
    from xformer import finetune as finetune
    from xformer import generation as generation
    from xformer import initializers as initializers
    from xformer import layers as layers
    from xformer import models as models
    from xformer import ops as ops
    from xformer import optim as optim
    from xformer import plots as plots
    from xformer import pretrained as pretrained
    from xformer import sentences as sentences
    from xformer import training as training
    from xformer.arrays.derivatives import gauss_newton as gauss_newton
    from xformer.arrays.derivatives import hvp as hvp
    from xformer.arrays.derivatives import jvp as jvp
    from xformer.arrays.rounded import rounded as rounded
    from xformer.base import tree as tree
    from xformer.compiling import compile as compile
    from xformer.dispatch import explain as explain
    from xformer.dispatch import inference as inference
    from xformer.dispatch import kernel as kernel
    from xformer.dispatch import kernels as kernels
    from xformer.dispatch import overridable as overridable
    from xformer.dispatch import reference_only as reference_only
    from xformer.dispatch import unfused as unfused
    from xformer.distributed.world import world as world
    from xformer.hooks import edit as edit
    from xformer.hooks import per_example_rule as per_example_rule
    from xformer.hooks import stepped as stepped
    from xformer.hooks import watch as watch
    from xformer.hooks.per_example import per_example as per_example
    from xformer.inspection.trace import trace as trace
    from xformer.models import GPT as GPT
    from xformer.models import Transformer as Transformer
    from xformer.ops import RandomKey as RandomKey
    from xformer.proofs.gradcheck import GradientError as GradientError
    from xformer.proofs.gradcheck import gradcheck as gradcheck

__version__ = "0.1.0"

later(__name__)
