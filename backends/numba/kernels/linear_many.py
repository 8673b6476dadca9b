"""`linear_many`: several linear maps of one x, and the sum of their gradients for x."""

from __future__ import annotations

from xformer.backends.numba.kernels.gemm import emit_sums
from xformer.backends.numba.kernels.linear import begun, input_gradient
from xformer.backends.numba.kernels.linear import unsupported as linear_unsupported
from xformer.backends.numba.program.traced import Traced
from xformer.dispatch import kernel
from xformer.layers.linear import LinearCache, LinearParams, LinearsCache, LoRAParams
from xformer.layers.linear import linear_many as op
from xformer.tree import Frozen, value
from xformer.typing import Array


def unsupported(
    x: Array, params: tuple[LinearParams | LoRAParams, ...], *, all_kept: bool = False
) -> str | None:
    """Why the kernel cannot run."""
    for own in params:
        if not isinstance(own, LinearParams):
            return "only plain maps"
        w, b = value(own.w), value(own.b)
        arrays = [x, w] if b is None else [x, w, b]
        if not all(isinstance(array, Traced) for array in arrays) or not _fit(x, w, b):
            return "the reference says what is wrong"
        if why := linear_unsupported(x, w, b):
            return why
    return None if params else "there is no map"


def _fit(x: Array, w: Array, b: Array | None) -> bool:
    own = x.ndim > 0 and w.ndim == 2 and w.shape[0] == x.shape[-1]
    return own and (b is None or b.shape == w.shape[1:])


@kernel(op, "numba.kernels", unsupported=unsupported)
def linear_many(
    x: Array, params: tuple[LinearParams, ...], *, all_kept: bool = False
) -> tuple[tuple[Array, ...], JoinedCache]:
    """Each y = x w + b."""
    ys, sums, caches = zip(
        *(begun(x, value(p.w), value(p.b), trainable=not isinstance(p.w, Frozen)) for p in params),
        strict=True,
    )
    emit_sums("linear", [one for several in sums for one in several])
    frozen = (isinstance(p.b, Frozen) for p in params)
    return ys, JoinedCache(tuple(map(LinearCache, caches, frozen)))


class JoinedCache(LinearsCache):
    """Saved by `linear_many` for backward."""

    def backward(self, *dys: Array) -> tuple[Array, tuple[LinearParams | LoRAParams, ...]]:
        """Gradients of x, to which all maps add, and of params."""
        maps = [own.op for own in self.maps]  # type: ignore[union-attr]
        rows = [own.checked(dy) for own, dy in zip(maps, dys, strict=True)]
        dx, dparams = input_gradient(maps, rows), []
        for own, dy in zip(self.maps, rows, strict=True):
            dw, db = own.op.gradients(dy)  # type: ignore[union-attr]
            dparams.append(LinearParams(dw, None if own.frozen_b else db))  # type: ignore[union-attr]
        return dx, tuple(dparams)
