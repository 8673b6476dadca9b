"""`linear_many`: several linear maps of one x. One instruction computes dx, the sum over maps."""

from __future__ import annotations

from xformer.backends.numba.kernels.gemm import emit_sums
from xformer.backends.numba.kernels.layout import unrecordable
from xformer.backends.numba.kernels.linear import emit_linear, input_gradient
from xformer.backends.numba.matmul import matmul_unsupported
from xformer.backends.numba.program.traced import Traced
from xformer.base.tree import Frozen, value
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.layers.linear import LinearCache, LinearParams, LinearsCache, LoRAParams
from xformer.layers.linear import linear_many as op


def unsupported(
    x: Array, params: tuple[LinearParams | LoRAParams, ...], *, all_kept: bool = False
) -> str | None:
    """Return why the numba kernel of `linear_many` cannot run, or None if it can.

    It needs at least one map, maps without LoRA, recorded arrays whose shapes fit, and for each
    map what the kernel of `linear` needs.
    """
    for linear in params:
        if not isinstance(linear, LinearParams):
            return "only maps without LoRA"
        w, b = value(linear.w), value(linear.b)
        arrays = [x, w] if b is None else [x, w, b]
        if not all(isinstance(array, Traced) for array in arrays) or not _fit(x, w, b):
            return "types or shapes do not fit"
        if why := unrecordable(*arrays) or matmul_unsupported():
            return why
    return None if params else "there are no maps"


def _fit(x: Array, w: Array, b: Array | None) -> bool:
    """Return whether x (..., I), w (I, O) and b (O,) have these shapes."""
    w_fits = x.ndim > 0 and w.ndim == 2 and w.shape[0] == x.shape[-1]
    return w_fits and (b is None or b.shape == w.shape[1:])


@kernel(op, "numba.kernels", unsupported=unsupported)
def linear_many(
    x: Array, params: tuple[LinearParams, ...], *, all_kept: bool = False
) -> tuple[tuple[Array, ...], LinearManyCache]:
    """Return y = x w + b of each map."""
    ys, sums, caches = zip(
        *(
            emit_linear(x, value(p.w), value(p.b), trainable=not isinstance(p.w, Frozen))
            for p in params
        ),
        strict=True,
    )
    emit_sums("linear", [pending for one_map in sums for pending in one_map])
    frozen = (isinstance(p.b, Frozen) for p in params)
    return ys, LinearManyCache(tuple(map(LinearCache, caches, frozen)))


class LinearManyCache(LinearsCache):
    """Saved by `linear_many` for backward: the cache of each map."""

    def backward(self, *dys: Array) -> tuple[Array, tuple[LinearParams | LoRAParams, ...]]:
        """Return the gradients of x (the sum over maps) and of params. dys: one for each map."""
        maps = [linear.op for linear in self.maps]  # type: ignore[union-attr]
        rows = [cache.checked_rows(dy) for cache, dy in zip(maps, dys, strict=True)]
        dx, dparams = input_gradient(maps, rows), []
        for linear, dy in zip(self.maps, rows, strict=True):
            dw, db = linear.op.parameter_gradients(dy)  # type: ignore[union-attr]
            dparams.append(LinearParams(dw, None if linear.frozen_b else db))  # type: ignore[union-attr]
        return dx, tuple(dparams)
