"""xformer: the transformer, forward and backward, written once against the Python array API.

Sizes, as capitals in every shape: B batch, T queries (tokens), S keys, D model width, H heads,
G key/value heads, K head width, M value width of a head, F hidden width, V vocabulary, E experts,
C experts chosen for a token, I/O in/out, L maximal length, N rows. Arrays are lower case; `d`
before a name is the gradient of the loss with respect to it.
"""

from typing import TYPE_CHECKING

from xformer.later import later

if TYPE_CHECKING:
    from xformer import (
        backends,
        export,
        finetune,
        generation,
        initializers,
        layers,
        models,
        ops,
        optim,
        parallel,
        plots,
        pretrained,
        sentences,
        training,
        tree,
    )
    from xformer.backward import edit, per_example, per_example_rule, stepped, watch
    from xformer.compiling import compile
    from xformer.derivatives import gauss_newton, hvp, jvp
    from xformer.dispatch import (
        explain,
        inference,
        kernel,
        kernels,
        overridable,
        reference_only,
        unfused,
    )
    from xformer.models import GPT, Transformer
    from xformer.ops import RandomKey
    from xformer.proofs.gradcheck import GradientError, gradcheck
    from xformer.rounding import rounded
    from xformer.trace import trace
    from xformer.world import world

__version__ = "0.1.0"

__all__ = [
    "GPT",
    "GradientError",
    "RandomKey",
    "Transformer",
    "__version__",
    "backends",
    "compile",
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
    "parallel",
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
    backends="backends",
    backward="edit per_example per_example_rule stepped watch",
    compiling="compile",
    derivatives="gauss_newton hvp jvp",
    dispatch="explain inference kernel kernels overridable reference_only unfused",
    export="export",
    finetune="finetune",
    generation="generation",
    initializers="initializers",
    layers="layers",
    models="GPT Transformer models",
    ops="RandomKey ops",
    optim="optim",
    parallel="parallel",
    plots="plots",
    pretrained="pretrained",
    proofs="GradientError gradcheck",
    rounding="rounded",
    sentences="sentences",
    trace="trace",
    training="training",
    tree="tree",
    world="world",
)
