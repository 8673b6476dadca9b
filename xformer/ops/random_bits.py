"""Counter-based random bits, the same on every array library."""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple

from array_api_compat import device, is_array_api_obj

from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.dispatch import overridable
from xformer.dispatch.checks import require_in_range, require_integers, require_sizes
from xformer.dispatch.shapes import require_array

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key after each round
MASK = 0xFFFFFFFF


class _Parts(NamedTuple):
    seed: int  # 64 bits
    step: Any = 0  # 32 bits; an integer array () if it is traced (`jax.jit`)
    site: int = 0  # 32 bits


class RandomKey(_Parts):
    """The name of one stream of random bits: a seed, a training step, and a site in the model."""

    __slots__ = ()

    def __new__(cls, seed: int, step: Any = 0, site: int = 0) -> RandomKey:
        """NumPy's integers become int, because they would overflow when 64 bits are split."""
        return super().__new__(cls, _plain(seed), _plain(step), _plain(site))

    def at(self, site: int) -> RandomKey:
        """The key of another site: `site` is added to the site of this key."""
        return self._replace(site=self.site + site)


def _plain(part: Any) -> Any:
    """NumPy's integers as int. Arrays stay arrays: reading one would wait for the device."""
    if isinstance(part, bool) or not issubclass(type(part), Integral):
        return part  # a traced number is only an instance
    return int(part)


@overridable(backward=False)
def random_bits(like: Array, *, key: RandomKey, size: int) -> Array:
    """`size` random words in [0, 2^32) by Philox4x32-10 (Salmon et al., SC 2011), on like's device.

    Element i is word i mod 4 of block i // 4. The counter of a block is (block low, block high,
    site, step), its key is (seed low, seed high). The result is (size,), int64, or uint32 if the
    library has no int64. There is no gradient.

    TypeError if `key` is not a `RandomKey`; ValueError if a part of it or `size` is out of range.
    Explanation: docs/derivations/random_bits.md
    """
    require_key("random_bits", key)
    require_sizes("random_bits", 0, size=size)
    require_array("random_bits", "like", like)
    xp = array_namespace(like)
    n_blocks = -(-size // 4)
    block = xp.arange(n_blocks, dtype=xp.int64, device=device(like))
    counter = (block & MASK, block >> 32, block * 0 + key.site, block * 0 + key.step)
    words = philox(counter, (key.seed & MASK, key.seed >> 32))
    return xp.reshape(xp.stack(words, axis=-1), (4 * n_blocks,))[:size]


def require_key(op: str, key: Any, name: str = "key") -> None:
    """TypeError unless `key` is a `RandomKey` of ints, ValueError unless they are in range."""
    if not isinstance(key, RandomKey):
        got = "None" if key is None else type(key).__name__
        raise TypeError(f"{op}: {name} must be an xformer.RandomKey, got {got}")
    for part, value, bits in zip(RandomKey._fields, key, (64, 32, 32), strict=True):
        if part == "step" and is_array_api_obj(value):
            ids = require_integers(op, f"{name}.step", value, value)
            require_in_range(op, f"{name}.step", ids, 1 << bits, ids=value)
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{op}: {name}.{part} must be an int, got {value!r}")
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{op}: {name}.{part} must lie in [0, 2^{bits}), got {value}")


def philox(counter: tuple[Array, ...], key: tuple[int, int]) -> tuple[Array, ...]:
    """Philox4x32-10 on four int64 arrays of 32-bit words; returns four arrays of the same kind."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def _multiply(m: int, x: Array) -> tuple[Array, Array]:
    """High and low word of m * x. It multiplies by halves of m, as m * x would overflow int64."""
    low = x * (m & 0xFFFF)  # < 2^48
    high = x * (m >> 16)  # < 2^48
    low = low + ((high & 0xFFFF) << 16)
    return (high >> 16) + (low >> 32), low & MASK
