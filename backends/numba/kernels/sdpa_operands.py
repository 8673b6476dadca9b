"""Operands and options of `sdpa`: how they are recorded, and how compiled loops read them.

`Operands` and `Attention.numbers` write them as addresses and integers of an instruction;
`read_call` reads both in a kernel and returns an `SdpaCall`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numba import tile
from xformer.backends.numba.atomic import strided_floats
from xformer.backends.numba.flash import FAR, tile_of
from xformer.backends.numba.jit import rowwise
from xformer.backends.numba.program.copies import astype, copied
from xformer.backends.numba.program.native import (
    SCRATCH,
    SGEMM,
    TILES,
    bits,
    float32s,
    real,
    words,
)
from xformer.backends.numba.program.traced import Traced, constant
from xformer.base.typing import Array
from xformer.ops._attention import SdpaOptions
from xformer.ops.random_bits import MASK, RandomKey

SCORES = 1 << 14  # scores of a tile of whole rows: two tiles and their keys fit in an L2 cache
ROWS = 16, 128  # rows of a tile of whole rows, at least and at most
N_INS, N_NUMBERS = 7, 43  # fields of `Operands`; length of `Attention.numbers`
ABSENT = np.zeros((0, 0, 0, 0), np.float32)  # the value of an absent operand


class Operands(NamedTuple):
    """The inputs of all instructions of `sdpa`. An absent bias, sinks or mask is `ABSENT`."""

    q: Any  # (B, T, H, K)
    k: Any  # (B, S, G, K)
    v: Any  # (B, S, G, M)
    bias: Any  # four axes, which broadcast to (B, H, T, S)
    sinks: Any  # (H,)
    mask: Any  # bool, four axes, which broadcast to (B, H, T, S)
    step: Any  # int64 (), the step of the dropout key; 0 without dropout

    @classmethod
    def of(
        cls, attention: Attention, q: Array, k: Array, v: Array, bias: Any, sinks: Any, mask: Any
    ) -> Operands:
        """Return the operands of an `sdpa` call, for the instructions of forward and backward.

        If the compiled loops cannot read the layout of an array, a copy of it is recorded.

        attention: the options; only the step of the dropout key is used
        q: (B, H, T, K)   k: (B, G, S, K)   v: (B, G, S, M)
        bias, sinks, mask: of `ops.sdpa`, or None
        """
        step = 0 if attention.dropout_key is None else attention.dropout_key.step
        step = step if isinstance(step, Traced) else constant(np.array(step, np.int64))
        return cls(
            _rows(swap_heads(q)),
            _rows(swap_heads(k)),
            _rows(swap_heads(v)),
            _four_axes(bias),
            _absent() if sinks is None else _dense(sinks),
            _four_axes(mask),
            astype(step, np.int64),
        )

    @property
    def has_bias(self) -> bool:
        return not is_absent(self.bias)

    @property
    def has_sinks(self) -> bool:
        return not is_absent(self.sinks)

    @property
    def has_mask(self) -> bool:
        return not is_absent(self.mask)


def _absent() -> Traced:
    return constant(ABSENT)


def is_absent(x: Any) -> bool:
    """Return whether an operand is absent."""
    return bool(x.size == 0)


def swap_heads(x: Any) -> Any:
    """Return a view of x with its axes 1 and 2 exchanged: (B, H, T, K) <-> (B, T, H, K)."""
    order = 0, 2, 1, 3
    return x.view(x.layout.transpose(order)) if isinstance(x, Traced) else x.transpose(order)


def _rows(x: Traced) -> Traced:
    """Return x (B, T, H, K), or a copy if the loops cannot read its layout.

    They need aligned, contiguous elements along K, and rows along T that do not overlap.
    """
    (_, t, _, width), strides = x.shape, x.strides
    fits = (width == 1 or strides[3] == 4) and (t == 1 or strides[1] >= 4 * width)
    aligned = x.layout.flags.aligned and not any(step % 4 for step in strides)
    return x if fits and aligned else copied(x)


def _dense(x: Traced) -> Traced:
    """Return x, or a copy if the elements of its last axis are not contiguous and aligned."""
    itemsize = x.dtype.itemsize
    fits = x.shape[-1] == 1 or x.strides[-1] == itemsize
    aligned = x.layout.flags.aligned and not any(step % itemsize for step in x.strides)
    return x if fits and aligned else copied(x)


def _four_axes(x: Any) -> Traced:
    """Return a bias or mask with four axes; `ABSENT` if x is None."""
    if x is None:
        return _absent()
    x = x if isinstance(x, Traced) else constant(x)
    return _dense(x[(None,) * (4 - x.ndim)] if x.ndim < 4 else x)


class Attention(SdpaOptions):
    """The options of one call of `sdpa`, after their checks. dropout_key: None without dropout."""

    __slots__ = ()

    def numbers(self, operands: Operands) -> tuple[int, ...]:
        """Return sizes, strides and options as the integers that `read_call` reads."""
        q, k, v, bias, _, mask, _ = operands
        (b, t, h, width), (s, g), m = q.shape, k.shape[1:3], v.shape[3]
        left, right = self.offsets(t, s)
        drawn = round(self.dropout_rate * 2**32), bits(1 / (1 - self.dropout_rate))
        key = self.dropout_key or RandomKey(0)
        return (
            *(b, t, h, width, s, g, m, left, right, bits(self.scale), bits(self.softcap or 0)),
            *(*q.strides[:3], *k.strides[:3], *v.strides[:3]),
            *(operands.has_bias, *_strides(bias), operands.has_mask, *_strides(mask)),
            operands.has_sinks,
            *bias.shape,
            *(*drawn, key.seed & MASK, key.seed >> 32, key.site),
            self.tile_rows(operands),
            *tile_of(t, s, right),
        )

    def offsets(self, t: int, s: int) -> tuple[int, int]:
        """Return (left, right): query i of t may see the keys i - left to i + right of s.

        They follow from window and causality; the last query is aligned with the last key, so that
        left may be negative. `FAR` stands for no limit.
        """
        left, right = self.window
        right, ahead = 0 if self.causal else right, s - t
        return (
            FAR if left is None else min(left, FAR) - ahead,
            FAR if right is None or t == 1 else min(right, FAR) + ahead,
        )

    def tile_rows(self, operands: Operands) -> int:
        """Return the number of query rows whose scores `sdpa_general` computes at a time."""
        t, s = operands.q.shape[1], operands.k.shape[1]
        return min(t, max(ROWS[0], min(ROWS[1], SCORES // s)))


def _strides(x: Traced) -> list[int]:
    """Return the strides of x in bytes, 0 for an axis of length 1, which is broadcast."""
    return [0 if n == 1 else step for n, step in zip(x.shape, x.strides, strict=True)]


class SdpaCall(NamedTuple):
    """Operands and options of one call of `sdpa`, as compiled loops read them."""

    thread: Any  # (sgemm, tile's matmul, scratch): the first argument of `add_product`
    q: Any  # (B, T, H, K), strided
    k: Any  # (B, S, G, K)
    v: Any  # (B, S, G, M)
    bias: Any  # address
    sinks: Any  # address
    mask: Any  # address
    step: Any  # address
    left: Any  # `Attention.offsets`
    right: Any
    scale: Any
    cap: Any  # of softcap; 0: none
    has_bias: Any
    bias_strides: Any  # in bytes, 0 along an axis of length 1
    has_mask: Any
    mask_strides: Any  # like bias_strides
    has_sinks: Any
    bias_shape: Any
    lowest_kept: Any  # dropout keeps an element if its random word is at least this; 0: no dropout
    keep_scale: Any  # 1 / (1 - dropout rate)
    seed_low: Any  # of the dropout key
    seed_high: Any
    site: Any
    tile_rows: Any  # `Attention.tile_rows`
    flash_tile: Any  # (rows, columns) of a tile of `flash`


@rowwise
def read_call(ins: int, numbers: int, memory: int) -> Any:
    """Return the call that an instruction describes.

    ins: address of the addresses of `Operands`. numbers: address of `Attention.numbers`.
    memory: the argument of the calling kernel.
    """
    a, n, thread = words(ins, N_INS), words(numbers, N_NUMBERS), words(memory, 3)
    b, t, h, width, s, g, m = n[0], n[1], n[2], n[3], n[4], n[5], n[6]
    return SdpaCall(
        (thread[SGEMM], thread[TILES], float32s(thread[SCRATCH], (tile.SIZE,))),
        strided_floats(a[0], (b, t, h, width), (n[11], n[12], n[13], 4)),
        strided_floats(a[1], (b, s, g, width), (n[14], n[15], n[16], 4)),
        strided_floats(a[2], (b, s, g, m), (n[17], n[18], n[19], 4)),
        a[3],
        a[4],
        a[5],
        a[6],
        n[7],
        n[8],
        np.float32(real(n[9])),
        np.float32(real(n[10])),
        n[20],
        (n[21], n[22], n[23], n[24]),
        n[25],
        (n[26], n[27], n[28], n[29]),
        n[30],
        (n[31], n[32], n[33], n[34]),
        n[35],
        np.float32(real(n[36])),
        n[37],
        n[38],
        n[39],
        n[40],
        (n[41], n[42]),
    )
