"""numba's kernels of single ops alone, without its loops over whole layers and whole models.

For the contestant "numba ops". The library has no switch for that: here the registered kernels are
taken out of the registry, and put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from xformer.dispatch import Overridable
from xformer.layers.advance import advance
from xformer.layers.blocks import blocks
from xformer.models.ahead import ahead
from xformer.models.language_model import language_model_extend

WHOLE: tuple[Overridable, ...] = (
    advance,
    blocks,
    ahead,
    language_model_extend,
)


@contextmanager
def without_loops() -> Iterator[None]:
    """Within this context WHOLE have no kernel by numba, in all threads of the process.

    NumPy's own kernels of `advance` and `blocks` stay, as without numba.
    """
    before = {op: op.import_kernels("numba") for op in WHOLE}
    for op in before:
        op.kernels["numba"] = []
    try:
        yield
    finally:
        for op, kernels in before.items():
            op.kernels["numba"] = kernels
