"""xformer: the transformer, forward and backward, written once against the Python array API.

Sizes, as capitals in every shape: B batch, T queries (tokens), S keys, D model width, H heads,
G key/value heads, K head width, M value width of a head, F hidden width, V vocabulary, E experts,
C experts chosen for a token, I/O in/out, L maximal length, N rows. Arrays are lower case; `d`
before a name is the gradient of the loss with respect to it.
"""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer import (
        backends,
        distributed,
        export,
        finetune,
        generation,
        initializers,
        layers,
        models,
        ops,
        optim,
        plots,
        pretrained,
        sentences,
        training,
    )
    from xformer.arrays.derivatives import gauss_newton, hvp, jvp
    from xformer.arrays.rounded import rounded
    from xformer.base import tree
    from xformer.compiling import compile
    from xformer.dispatch import (
        explain,
        inference,
        kernel,
        kernels,
        overridable,
        reference_only,
        unfused,
    )
    from xformer.distributed.world import world
    from xformer.hooks import edit, per_example_rule, stepped, watch
    from xformer.hooks.per_example import per_example
    from xformer.inspection.trace import trace
    from xformer.models import GPT, Transformer
    from xformer.ops import RandomKey
    from xformer.proofs.gradcheck import GradientError, gradcheck

__version__ = "0.1.0"

__all__ = [
    "GPT",
    "GradientError",
    "RandomKey",
    "Transformer",
    "__version__",
    "backends",
    "compile",
    "distributed",
    "edit",
    "explain",
    "export",
    "finetune",
    "gauss_newton",
    "generation",
    "gradcheck",
    "hvp",
    "inference",
    "initializers",
    "jvp",
    "kernel",
    "kernels",
    "layers",
    "models",
    "ops",
    "optim",
    "overridable",
    "per_example",
    "per_example_rule",
    "plots",
    "pretrained",
    "reference_only",
    "rounded",
    "sentences",
    "stepped",
    "trace",
    "training",
    "tree",
    "unfused",
    "watch",
    "world",
]

later(
    __name__,
    arrays="gauss_newton hvp jvp rounded",
    base="tree",
    backends="backends",
    compiling="compile",
    dispatch="explain inference kernel kernels overridable reference_only unfused",
    distributed="distributed world",
    export="export",
    finetune="finetune",
    generation="generation",
    hooks="edit per_example per_example_rule stepped watch",
    initializers="initializers",
    inspection="trace",
    layers="layers",
    models="GPT Transformer models",
    ops="RandomKey ops",
    optim="optim",
    plots="plots",
    pretrained="pretrained",
    proofs="GradientError gradcheck",
    sentences="sentences",
    training="training",
)
