"""`sdpa`: which loops attend, and what they are given. Scores are never in memory as a whole.

sdpa_plain.py    `flash`: causal, windows, masks of keys, grouped heads
sdpa_any.py      every option, whole rows of scores
sdpa_one.py      one query, as in decoding
sdpa_given.py    the operands that all of them read
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends.numba.gemm import no_products
from xformer.backends.numba.kernels import sdpa_any, sdpa_one, sdpa_plain
from xformer.backends.numba.kernels.sdpa_given import Attention, Operands, tokens
from xformer.backends.numba.program.namespace import contiguous
from xformer.backends.numba.program.native import Kernel, Native
from xformer.backends.numba.program.program import Program, of
from xformer.backends.numba.program.traced import Traced
from xformer.backends.numba.tuning import HEADS, WORTH
from xformer.backends.numpy.tiles import FEW
from xformer.checks import require_gradient
from xformer.dispatch import kernel
from xformer.ops._attention import sdpa_options
from xformer.showing import short
from xformer.typing import Array

ONE = 8 * WORTH  # multiplications of one query, few of whose columns may be seen


def unsupported(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    sinks: Array | None = None,
    *,
    mask: Array | None = None,
    **options: Any,
) -> str | None:
    """Why the kernel cannot run."""
    arrays = [x for x in (q, k, v, bias, sinks) if x is not None]
    if any(x.dtype != np.float32 for x in arrays):
        return "only float32"
    if 0 in (*q.shape, *k.shape, *v.shape):
        return "empty arrays have nothing to compute"
    if of([*arrays, mask]) is None:
        return "all of it is constant"
    rate = options.get("dropout_rate")
    if isinstance(rate, float) and round(rate * 2**32) == 2**32:
        return "nothing is drawn at a rate of 1"
    step = getattr(options.get("dropout_key"), "step", None)
    if isinstance(step, Traced) and (step.shape or step.dtype.kind not in "iu"):
        return "the step is no single integer"
    return no_products()


@kernel(ops.sdpa, "numba.kernels", unsupported=unsupported)
def sdpa(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    sinks: Array | None = None,
    *,
    mask: Array | None = None,
    **options: Any,
) -> tuple[Array, SdpaCache]:
    """ctx = dropout(softmax(scale * q k^T + bias)) v, over allowed keys."""
    attention = Attention(*sdpa_options(q, k, bias, mask=mask, **options))
    if not attention.dropout_rate:
        attention = attention._replace(dropout_key=None)
    given = Operands.of(attention, q, k, v, bias, sinks, mask)
    cache = _attend(attention, given, None if bias is None else bias.shape)
    ctx = _attend_one(attention, given) if _is_one(attention, given) else cache.ctx
    return tokens(ctx), cache


def _attend(attention: Attention, given: Operands, bias_shape: tuple[int, ...] | None) -> SdpaCache:
    """ctx, and what a backward reads, by `flash` where it can attend."""
    (b, t, h), g, m = given.q.shape[:3], given.k.shape[2], given.v.shape[3]
    program, plain = program_of(given), _is_plain(attention, given)
    ctx = program.fresh((b, t, h, m), np.float32)
    top, total = program.fresh((b, h, t), np.float32), program.fresh((b, h, t), np.float32)

    def run(ctx: Any, top: Any, total: Any, *ins: Any) -> None:
        np.copyto(ctx, tokens(attention.reference(*ins)[0]))
        attention.statistics(top, total, *ins)
        if plain:  # whose scores are powers of 2
            np.multiply(top, math.log2(math.e), out=top)

    loops = sdpa_plain.forward if plain else sdpa_any.forward
    units = b * g if plain else b * h * -(-t // attention.rows(given))
    own = _native(program, loops, attention.numbers(given), units, given)
    program.emit("sdpa", run, [ctx, top, total], given, own)
    return SdpaCache(attention, given, ctx, top, total, plain, bias_shape)


def _attend_one(attention: Attention, given: Operands) -> Traced:
    """ctx if each head has one query, as in decoding.

    It does not save `top`, the largest score of a row: a backward rounds its scores differently and
    reads the `top` of `_attend`. A program without a backward drops the instruction of `_attend`.
    """
    (b, _, h), m, program = given.q.shape[:3], given.v.shape[3], program_of(given)
    ctx = program.fresh((b, 1, h, m), np.float32)

    def run(ctx: Any, *ins: Any) -> None:
        np.copyto(ctx, tokens(attention.reference(*ins)[0]))

    own = _native(program, sdpa_one.forward, attention.numbers(given), b * h, given)
    program.emit("sdpa of one", run, [ctx], given, own)
    return ctx


def _has_cap_or_dropout(attention: Attention) -> bool:
    return attention.softcap is not None or attention.dropout_rate > 0


def _is_one(attention: Attention, given: Operands) -> bool:
    others = _has_cap_or_dropout(attention) or given.has_bias
    return given.q.shape[1] == 1 and not others


def _is_plain(attention: Attention, given: Operands) -> bool:
    """Whether `flash` has all that is asked for, and rows enough to pay for its copies."""
    others = _has_cap_or_dropout(attention) or given.has_bias or given.has_sinks
    of_keys = not given.has_mask or given.mask.shape[1:3] == (1, 1)
    return given.q.shape[1] >= FEW and of_keys and not others


def program_of(operands: Sequence[Any]) -> Program:
    """The program of operands of which one at least is not constant."""
    program = of(operands)
    assert program is not None
    return program


def _native(
    program: Program, kernel: Kernel, numbers: tuple[int, ...], units: int, given: Operands
) -> Native:
    """In pieces, where there is work for threads."""
    size, is_one = given.q.size * given.k.shape[1], kernel is sdpa_one.forward
    pieces = min(units, HEADS * program.threads) if size > (ONE if is_one else WORTH) else 1
    return Native(kernel, numbers, pieces, blas=not is_one)


@short
class SdpaCache(NamedTuple):
    """Saved by `sdpa` for backward: probs are made again of q, k, top and total."""

    attention: Attention
    given: Operands
    ctx: Traced  # (B, T, H, M)
    top: Traced  # (B, H, T), what was taken off the scores of a row
    total: Traced  # (B, H, T), the sum of their powers
    plain: bool
    bias_shape: tuple[int, ...] | None

    def backward(self, dctx: Array) -> tuple[Array, Array, Array, Array | None, Array | None]:
        """dscores = probs * (dprobs - sum(dprobs * probs)), dprobs = dctx v^T through dropout.

        dbias and dsinks are instructions of their own: a program without them need not compute
        them, and the sums over a batch that they are can be cut otherwise.
        """
        require_gradient("sdpa", "dctx", dctx, tokens(self.ctx))
        given, ins = self.given, self._ins(dctx)
        b, h, g = given.q.shape[0], given.q.shape[2], given.k.shape[2]
        loops = sdpa_plain.backward if self.plain else sdpa_any.backward
        dq, dk, dv = self._emit("backward", loops, (0, 1, 2), given[:3], b * g, ins)
        dbias = dsinks = None
        if given.has_bias:
            units = sdpa_any.bias_units(given.bias.shape, self.attention.rows(given))
            (dbias,) = self._emit("dbias", sdpa_any.bias_gradient, (3,), [given.bias], units, ins)
            dbias = dbias.view(dbias.layout.reshape(self.bias_shape))
        if given.has_sinks:
            (dsinks,) = self._emit("dsinks", sdpa_any.sink_gradient, (4,), [given.sinks], h, ins)
        return tokens(dq), tokens(dk), tokens(dv), dbias, dsinks

    def _ins(self, dctx: Traced) -> tuple[Traced, ...]:
        return *self.given, self.ctx, self.top, self.total, contiguous(tokens(dctx))

    def _emit(
        self, name: str, loops: Kernel, which: Any, like: Any, units: int, ins: Any
    ) -> list[Traced]:
        """New arrays like some operands, and the instruction that computes these gradients."""
        program, attention = program_of(ins), self.attention
        outs = [program.fresh(x.shape, x.dtype) for x in like]

        def run(*arrays: Any) -> None:
            *own, dctx = arrays[len(outs) :]
            grads = attention.reference(*own[:7])[1].backward(tokens(dctx))
            for i, out in zip(which, arrays, strict=False):
                grad = tokens(grads[i]) if i < 3 else grads[i].reshape(out.shape)
                np.copyto(out, grad)

        own = _native(program, loops, attention.numbers(self.given), units, self.given)
        program.emit(f"sdpa {name}", run, outs, ins, own)
        return outs
