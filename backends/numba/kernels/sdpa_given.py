"""The operands of `sdpa`, as its kernels read them: strides, options and numbers as words."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from xformer import ops
from xformer.backends.numba import tile
from xformer.backends.numba.compiled import rowwise
from xformer.backends.numba.flash import FAR, tile_of
from xformer.backends.numba.program.namespace import astype, copied
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
from xformer.ops._attention import SdpaOptions, fold, forbid, unfold
from xformer.ops.random_bits import MASK, RandomKey
from xformer.typing import Array

SCORES = 1 << 14  # of a tile of whole rows: two tiles and their keys fit in a core's L2 cache
ROWS = 16, 128  # of such a tile, at least and at most
N_INS, N_NUMBERS = 7, 43  # q k v bias sinks mask step; `Attention.numbers`
ABSENT = np.zeros((0, 0, 0, 0), np.float32)  # stands for an operand that is not given


class Operands(NamedTuple):
    """What all instructions of `sdpa` read. Absent ones are of no meaning (`has_bias` ...)."""

    q: Any  # (B, T, H, K)
    k: Any  # (B, S, G, K)
    v: Any  # (B, S, G, M)
    bias: Any  # four axes, which broadcast to (B, H, T, S)
    sinks: Any  # (H,)
    mask: Any  # as bias
    step: Any  # int64 (), of dropout's key

    @classmethod
    def of(
        cls, attention: Attention, q: Array, k: Array, v: Array, bias: Any, sinks: Any, mask: Any
    ) -> Operands:
        """Those of the op; what no loop can read is copied."""
        step = 0 if attention.dropout_key is None else attention.dropout_key.step
        step = step if isinstance(step, Traced) else constant(np.array(step, np.int64))
        return cls(
            _rows(tokens(q)),
            _rows(tokens(k)),
            _rows(tokens(v)),
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
    """Whether an operand is not given."""
    return bool(x.size == 0)


def tokens(x: Any) -> Any:
    """(B, T, H, K) of (B, H, T, K), and the other way round."""
    order = 0, 2, 1, 3
    return x.view(x.layout.transpose(order)) if isinstance(x, Traced) else x.transpose(order)


def _rows(x: Traced) -> Traced:
    """x (B, T, H, K) where the elements of a row are side by side, and its rows apart."""
    (_, t, _, width), strides = x.shape, x.strides
    fits = (width == 1 or strides[3] == 4) and (t == 1 or strides[1] >= 4 * width)
    whole = x.layout.flags.aligned and not any(step % 4 for step in strides)
    return x if fits and whole else copied(x)


def _dense(x: Traced) -> Traced:
    """x where the elements of its last axis are side by side."""
    itemsize = x.dtype.itemsize
    fits = x.shape[-1] == 1 or x.strides[-1] == itemsize
    whole = x.layout.flags.aligned and not any(step % itemsize for step in x.strides)
    return x if fits and whole else copied(x)


def _four_axes(x: Any) -> Traced:
    if x is None:
        return _absent()
    x = x if isinstance(x, Traced) else constant(x)
    return _dense(x[(None,) * (4 - x.ndim)] if x.ndim < 4 else x)


class Attention(SdpaOptions):
    """The options of one call of `sdpa`. dropout_key is None without dropout."""

    __slots__ = ()

    def numbers(self, given: Operands) -> tuple[int, ...]:
        """Of an instruction, as `read` reads them."""
        q, k, v, bias, _, mask, _ = given
        (b, t, h, width), (s, g), m = q.shape, k.shape[1:3], v.shape[3]
        left, right = self.reach(t, s)
        drawn = round(self.dropout_rate * 2**32), bits(1 / (1 - self.dropout_rate))
        key = self.dropout_key or RandomKey(0)
        return (
            *(b, t, h, width, s, g, m, left, right, bits(self.scale), bits(self.softcap or 0)),
            *(*q.strides[:3], *k.strides[:3], *v.strides[:3]),
            *(given.has_bias, *_steps(bias), given.has_mask, *_steps(mask), given.has_sinks),
            *bias.shape,
            *(*drawn, key.seed & MASK, key.seed >> 32, key.site),
            self.rows(given),
            *tile_of(t, s, right),
        )

    def reach(self, t: int, s: int) -> tuple[int, int]:
        """Query i sees the keys i - left to i + right."""
        left, right = self.window
        right, ahead = 0 if self.causal else right, s - t
        return (
            FAR if left is None else min(left, FAR) - ahead,
            FAR if right is None or t == 1 else min(right, FAR) + ahead,
        )

    def rows(self, given: Operands) -> int:
        """How many whole rows of scores are made at once."""
        t, s = given.q.shape[1], given.k.shape[1]
        return min(t, max(ROWS[0], min(ROWS[1], SCORES // s)))

    def reference(self, q: Any, k: Any, v: Any, bias: Any, sinks: Any, mask: Any, step: Any) -> Any:
        """(ctx, cache) of the op's reference, of arrays of NumPy."""
        return ops.sdpa.reference(
            *(tokens(x) for x in (q, k, v)),
            *(None if is_absent(x) else x for x in (bias, sinks)),
            mask=None if is_absent(mask) else mask,
            causal=self.causal,
            window=self.window,
            softcap=self.softcap,
            scale=self.scale,
            dropout_rate=self.dropout_rate,
            dropout_key=self.dropout_key and self.dropout_key._replace(step=int(step)),
        )

    def statistics(
        self, top: Any, total: Any, q: Any, k: Any, v: Any, bias: Any, sinks: Any, mask: Any, _: Any
    ) -> None:
        """The largest score of each row, and the sum of powers of e: of what the backward reads."""
        q, k = tokens(q), tokens(k)
        scores = unfold(fold(q, k) @ k.mT, q) * np.float32(self.scale)
        if self.softcap is not None:
            scores = self.softcap * np.tanh(scores / self.softcap)
        scores = scores if is_absent(bias) else scores + bias
        scores = forbid(scores, None if is_absent(mask) else mask, self.causal, self.window)
        if not is_absent(sinks):
            sink = np.broadcast_to(sinks[:, None, None], (*q.shape[:3], 1))
            scores = np.concat([scores, sink], axis=3)
        highest = scores.max(axis=3)
        np.copyto(top, np.where(highest == -np.inf, 0, highest))
        sums = np.exp(scores - top[..., None]).sum(axis=3)
        np.copyto(total, np.where(sums == 0, 1, sums))


def _steps(x: Traced) -> list[int]:
    """Strides in bytes, 0 of an axis that is broadcast."""
    return [0 if n == 1 else step for n, step in zip(x.shape, x.strides, strict=True)]


class Given(NamedTuple):
    """What a kernel reads: arrays, addresses, strides in bytes and options."""

    by: Any  # of `add_product`
    q: Any  # (B, T, H, K), strided
    k: Any  # (B, S, G, K)
    v: Any  # (B, S, G, M)
    bias: Any
    sinks: Any
    mask: Any
    step: Any
    left: Any
    right: Any
    scale: Any
    cap: Any  # 0: none
    has_bias: Any
    bias_steps: Any
    has_mask: Any
    mask_steps: Any
    has_sinks: Any
    bias_shape: Any
    lowest: Any  # of 2^32 words the lowest that dropout keeps; 0: no dropout
    over: Any  # 1 / (1 - rate)
    seed_low: Any
    seed_high: Any
    site: Any
    rows: Any
    tile: Any


@rowwise
def read(ins: int, numbers: int, memory: int) -> Any:
    """The operands whose addresses are at `ins`, by the words at `numbers`."""
    a, n, own = words(ins, N_INS), words(numbers, N_NUMBERS), words(memory, 3)
    b, t, h, width, s, g, m = n[0], n[1], n[2], n[3], n[4], n[5], n[6]
    first = (1, 1, 1, 1)
    return Given(
        (own[SGEMM], own[TILES], float32s(own[SCRATCH], (tile.SIZE,))),
        as_strided(float32s(a[0], first), (b, t, h, width), (n[11], n[12], n[13], 4)),
        as_strided(float32s(a[1], first), (b, s, g, width), (n[14], n[15], n[16], 4)),
        as_strided(float32s(a[2], first), (b, s, g, m), (n[17], n[18], n[19], 4)),
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
