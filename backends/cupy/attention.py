"""Arguments of the attention kernels, forward and backward: the host side of attention.cuh."""

from __future__ import annotations

from typing import Any, NamedTuple

from xformer.backends.cupy.module import contiguous, real_size
from xformer.backends.cupy.random_bits import words
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.ops._attention import SdpaOptions

WIDTHS = (32, 64, 128, 256)  # of the heads, rounded up
BLOCK = 128  # threads
MIN_OWN, MAX_OTHER, OTHER_BYTES = 16, 32, 16 << 10  # of `tile`, as in attention_tiles.cuh


class Attention(NamedTuple):
    """The inputs of scores and ctx; the kernels read the arrays by their strides."""

    q: Array  # (B, H, T, K)
    k: Array  # (B, G, S, K)
    v: Array  # (B, G, S, M)
    bias: Array | None
    sinks: Array | None  # (H,), contiguous
    mask: Array | None
    scale: float
    keep: float  # divisor of the probabilities that dropout keeps
    numbers: tuple[Any, ...]  # the ATTENTION_PARAMETERS of attention.cuh after the arrays

    @property
    def width(self) -> int:
        """The head width that the kernels are compiled for."""
        most = max(self.q.shape[3], self.v.shape[3])
        return next(width for width in WIDTHS if width >= most)

    def arguments(self, *others: Array) -> tuple[Any, ...]:
        """Return ATTENTION_PARAMETERS of attention.cuh.

        others: further arrays whose rows the kernel accesses; the kernel accesses rows in packs
        only if all arrays allow it
        """
        return (*self[:6], *self.numbers, packed(*self[:3], *others))


def attention(
    arrays: tuple[Array, Array, Array, Array | None, Array | None, Array | None],
    options: SdpaOptions,
) -> Attention:
    """Return the inputs of the kernels.

    arrays: q, k, v, bias, sinks, mask, already checked
    options: of `sdpa`, already checked
    """
    q, k, v, bias, sinks, mask = arrays
    _, _, softcap, scale, rate, key = options
    left, right = options.band
    q, k, v = rows(q), rows(k), rows(v)
    (_, n_heads, n_queries, width), (_, n_groups, n_keys, value_width) = q.shape, v.shape
    keep = 1.0 - rate if rate < 1 else 1.0
    numbers = (
        *(n_heads, n_groups, n_queries, n_keys, width, value_width),
        *(*strides(q)[:3], *strides(k)[:3], *strides(v)[:3], *strides(bias), *strides(mask)),
        n_keys if left is None else min(left, n_keys),  # n_keys is no bound
        n_queries if right is None else min(right, n_queries),
        scale / (softcap or 1.0),
        softcap or 0.0,
        keep,
        round(rate * 2**32),  # the lowest of the 2^32 random words that keeps a probability
        *((0, 0, 0, 0, None) if key is None or rate == 0 else words(key)),
    )
    sinks = None if sinks is None else contiguous(sinks)
    return Attention(q, k, v, bias, sinks, mask, scale, keep, numbers)


def tile(width: int, size: int, own_bytes: int) -> tuple[int, int]:
    """Return OWN and OTHER of attention_tiles.cuh, for numbers of `size` bytes.

    OWN: rows for which a block computes results   OTHER: rows of a tile that the block loads
    width: of the heads, one of `WIDTHS`   own_bytes: of shared memory for a tile of OWN rows
    """
    n_own = max(MIN_OWN, min(own_bytes // (64 * size), own_bytes // (width * size)))
    return n_own, min(MAX_OTHER, OTHER_BYTES // (width * size))


def shared(width: int, size: int, n_own: int, n_other: int, own_tiles: int) -> int:
    """Return the bytes of shared memory of a block.

    It holds `own_tiles` tiles of `n_own` rows, two tiles of `n_other` rows, and a tile of weights
    (n_own, n_other).
    """
    pack = 16 // size  # padding after every row
    row_elements = (own_tiles * n_own + 2 * n_other) * (width + pack)
    return size * (row_elements + n_own * (n_other + pack))


def rows(x: Array) -> Array:
    """Return x, or a copy if its last axis is not contiguous."""
    return x if x.shape[-1] < 2 or x.strides[-1] == x.dtype.itemsize else contiguous(x)


def strides(x: Array | None) -> tuple[int, ...]:
    """Return the strides, in elements, of the four axes that x broadcasts to; 0 if broadcast."""
    if x is None:
        return (0, 0, 0, 0)
    pairs = zip(x.shape, x.strides, strict=True)
    elements = (0 if n == 1 else stride // x.dtype.itemsize for n, stride in pairs)
    return (*(0,) * (4 - x.ndim), *elements)


def packed(*arrays: Array) -> int:
    """Return 1 if all rows can be accessed in packs, else 0.

    A pack has 16 bytes, or 8 bytes of two-byte numbers.
    """
    pack = 16 // real_size(arrays[0])  # elements
    return int(all(_in_packs(x, pack * x.dtype.itemsize) for x in arrays))


def _in_packs(x: Array, size: int) -> bool:
    steps = x.data.ptr, x.shape[-1] * x.dtype.itemsize, *x.strides[:-1]
    return not any(n % size for n in steps)


def heads_first(x: Array) -> Array:
    """Return x (B, T, H, K) as a view (B, H, T, K); the heads of a token stay adjacent."""
    return array_namespace(x).permute_dims(x, (0, 2, 1, 3))
