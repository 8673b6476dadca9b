"""`sdpa`: chooses the kernel of a call. No kernel stores all scores at once.

sdpa_flash.py       many queries; causality, windows, masks of keys
sdpa_general.py     every option
sdpa_one_query.py   one query, as in decoding
sdpa_operands.py    operands and options, which all of them read
sdpa_row_loops.py   loops over a row of scores, for sdpa_general
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.kernels import sdpa_flash, sdpa_general, sdpa_one_query
from xformer.backends.numba.kernels.layout import recorded
from xformer.backends.numba.kernels.sdpa_operands import Attention, Operands, swap_heads
from xformer.backends.numba.matmul import matmul_unsupported
from xformer.backends.numba.program.copies import contiguous
from xformer.backends.numba.program.native import Kernel, Native
from xformer.backends.numba.program.program import Program, program_of
from xformer.backends.numba.program.traced import Traced
from xformer.backends.numba.tuning import HEADS, WORTH
from xformer.backends.numpy.tiles import FEW
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.checks import require_gradient
from xformer.ops._attention import sdpa_options

# Multiplications of one query that are worth several pieces: a mask may hide many of its keys.
ONE_QUERY_WORTH = 8 * WORTH


def _refuses(q: Array, k: Array, v: Array, *more: Any, **options: Any) -> str | None:
    if 0 in (*q.shape, *k.shape, *v.shape):
        return "empty arrays have nothing to compute"
    rate = options.get("dropout_rate")
    if type(rate) is float and round(rate * 2**32) == 2**32:
        return "at a rate of 1 there are no random words"
    step = getattr(options.get("dropout_key"), "step", None)
    if isinstance(step, Traced) and (step.shape or step.dtype.kind not in "iu"):
        return "the step is not a single integer"
    return matmul_unsupported()


@recorded(ops.sdpa, _refuses)
def sdpa(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    sinks: Array | None = None,
    *,
    mask: Array | None = None,
    **options: Any,
) -> tuple[Array, NumbaSdpaCache]:
    """ctx = dropout(softmax(scale * q k^T + bias)) v, over allowed keys."""
    attention = Attention(*sdpa_options(q, k, bias, mask=mask, **options))
    if not attention.dropout_rate:
        attention = attention._replace(dropout_key=None)
    operands = Operands.of(attention, q, k, v, bias, sinks, mask)
    cache = _attend(attention, operands, None if bias is None else bias.shape)
    one_query = _is_one_query(attention, operands)
    ctx = _attend_one_query(attention, operands) if one_query else cache.ctx
    return swap_heads(ctx), cache


def _attend(
    attention: Attention, operands: Operands, bias_shape: tuple[int, ...] | None
) -> NumbaSdpaCache:
    """Record attention by `sdpa_flash` or `sdpa_general`, and return its cache, which holds ctx.

    bias_shape: the shape of the op's bias, None without bias.
    """
    (b, t, h), g, m = operands.q.shape[:3], operands.k.shape[2], operands.v.shape[3]
    program, by_flash = program_of(*operands), _uses_flash(attention, operands)
    ctx = program.fresh((b, t, h, m), np.float32)
    shift, exp_sum = program.fresh((b, h, t), np.float32), program.fresh((b, h, t), np.float32)
    loops = sdpa_flash.forward if by_flash else sdpa_general.forward
    n_units = b * g if by_flash else b * h * -(-t // attention.tile_rows(operands))
    compiled = _as_native(program, loops, attention.numbers(operands), n_units, operands)
    program.emit("sdpa", [ctx, shift, exp_sum], operands, compiled)
    return NumbaSdpaCache(attention, operands, ctx, shift, exp_sum, by_flash, bias_shape)


def _attend_one_query(attention: Attention, operands: Operands) -> Traced:
    """Record attention by `sdpa_one_query`, and return ctx (B, 1, H, M).

    A backward reads ctx and the largest scores of `_attend`, since this kernel rounds scores
    differently. A program without a backward drops the instruction of `_attend`.
    """
    (b, _, h), m, program = operands.q.shape[:3], operands.v.shape[3], program_of(*operands)
    ctx = program.fresh((b, 1, h, m), np.float32)
    numbers = attention.numbers(operands)
    compiled = _as_native(program, sdpa_one_query.forward, numbers, b * h, operands)
    program.emit("sdpa one query", [ctx], operands, compiled)
    return ctx


def _changes_scores(attention: Attention, operands: Operands) -> bool:
    """Return whether the call has a softcap, dropout or a bias, which `sdpa_general` alone has."""
    return attention.softcap is not None or attention.dropout_rate > 0 or operands.has_bias


def _is_one_query(attention: Attention, operands: Operands) -> bool:
    """Return whether `sdpa_one_query` can compute the call."""
    return operands.q.shape[1] == 1 and not _changes_scores(attention, operands)


def _uses_flash(attention: Attention, operands: Operands) -> bool:
    """Return whether `sdpa_flash` has all options of the call, and enough queries to be faster."""
    masks_keys = not operands.has_mask or operands.mask.shape[1:3] == (1, 1)
    has_other_options = _changes_scores(attention, operands) or operands.has_sinks
    return operands.q.shape[1] >= FEW and masks_keys and not has_other_options


def _as_native(
    program: Program, kernel: Kernel, numbers: tuple[int, ...], n_units: int, operands: Operands
) -> Native:
    """Return the native form of an instruction, cut into pieces if the call is worth threads.

    n_units: how many independent units of work (heads, tiles) there are, at most one a piece.
    """
    size, is_one = operands.q.size * operands.k.shape[1], kernel is sdpa_one_query.forward
    worth = ONE_QUERY_WORTH if is_one else WORTH
    pieces = min(n_units, HEADS * program.threads) if size > worth else 1
    return Native(kernel, numbers, pieces, blas=not is_one)


@short
class NumbaSdpaCache(NamedTuple):
    """Saved by `sdpa` for backward, which computes probs again from q, k, shift and exp_sum."""

    attention: Attention
    operands: Operands
    ctx: Traced  # (B, T, H, M)
    shift: Traced  # (B, H, T), the number subtracted from the scores of a row before exp
    exp_sum: Traced  # (B, H, T), the sum of exp(scores - shift) of a row
    by_flash: bool  # whether sdpa_flash computed it: exponentials are then powers of 2
    bias_shape: tuple[int, ...] | None  # before it got four axes

    def backward(self, dctx: Array) -> tuple[Array, Array, Array, Array | None, Array | None]:
        """dscores = probs * (dprobs - sum(dprobs * probs)), dprobs = dctx v^T through dropout.

        dbias and dsinks are separate instructions: a program that does not use them drops them, and
        they are cut into pieces in another way, since they sum over the batch.
        """
        require_gradient("sdpa", "dctx", dctx, swap_heads(self.ctx))
        attention, operands, ins = self.attention, self.operands, self._ins(dctx)
        b, h, g = operands.q.shape[0], operands.q.shape[2], operands.k.shape[2]
        loops = sdpa_flash.backward if self.by_flash else sdpa_general.backward
        dq, dk, dv = self._emit("backward", loops, operands[:3], b * g, ins)
        dbias = dsinks = None
        if operands.has_bias:
            n_units = sdpa_general.bias_units(operands.bias.shape, attention.tile_rows(operands))
            loops = sdpa_general.bias_gradient
            (dbias,) = self._emit("dbias", loops, [operands.bias], n_units, ins)
            dbias = dbias.view(dbias.layout.reshape(self.bias_shape))
        if operands.has_sinks:
            loops = sdpa_general.sink_gradient
            (dsinks,) = self._emit("dsinks", loops, [operands.sinks], h, ins)
        return swap_heads(dq), swap_heads(dk), swap_heads(dv), dbias, dsinks

    def _ins(self, dctx: Traced) -> tuple[Traced, ...]:
        """Return the inputs of all backward instructions: `Operands`, ctx, shift, exp_sum, dctx."""
        return *self.operands, self.ctx, self.shift, self.exp_sum, contiguous(swap_heads(dctx))

    def _emit(self, name: str, loops: Kernel, like: Any, n_units: int, ins: Any) -> list[Traced]:
        """Record an instruction that computes the gradients of some operands, and return them.

        like: these operands. n_units: as of `_as_native`. ins: from `_ins`.
        """
        program = program_of(*ins)
        outs = [program.fresh(x.shape, x.dtype) for x in like]
        numbers = self.attention.numbers(self.operands)
        compiled = _as_native(program, loops, numbers, n_units, self.operands)
        program.emit(f"sdpa {name}", outs, ins, compiled)
        return outs
