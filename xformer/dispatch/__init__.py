"""Dispatch: an op is a reference implementation, and kernels that backends register for it.

- `op`: the class of all ops; `@overridable` makes one, `@kernel` registers a kernel for it
- `contexts`: what decides in a call: `reference_only`, `unfused`, `inference`, `kernels`
- `libraries`: which library an array belongs to
- `backend`: the class of all backends, and generators of random arrays
- `registry`: the backends by name

The last two import NumPy; this package does not import them.
"""

from xformer.dispatch.contexts import (
    NoCache,
    again,
    chosen_kernels,
    current_contexts,
    inference,
    is_inference,
    is_reference_only,
    kernels,
    observed,
    observer,
    saved,
    unfused,
)
from xformer.dispatch.libraries import Refused, library_of, package_of, plugins, refusal
from xformer.dispatch.op import (
    Kernel,
    Overridable,
    explain,
    kernel,
    ops,
    overridable,
    reference_only,
)

__all__ = [
    "Kernel",
    "NoCache",
    "Overridable",
    "Refused",
    "again",
    "chosen_kernels",
    "current_contexts",
    "explain",
    "inference",
    "is_inference",
    "is_reference_only",
    "kernel",
    "kernels",
    "library_of",
    "observed",
    "observer",
    "ops",
    "overridable",
    "package_of",
    "plugins",
    "reference_only",
    "refusal",
    "saved",
    "unfused",
]
