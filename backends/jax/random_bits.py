"""`random_bits` in uint32, because JAX has int64 only if a program enables it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.dispatch.checks import require_sizes
from xformer.ops.random_bits import MASK, MULTIPLIERS, ROUNDS, WEYL, RandomKey, require_key
from xformer.ops.random_bits import random_bits as reference


@kernel(reference, "jax")
def random_bits(like: Array, *, key: RandomKey, size: int) -> Array:
    """Return `size` words of Philox4x32-10, computed in uint32; block counters have 32 bits."""
    require_key("random_bits", key)
    require_sizes("random_bits", 0, size=size)
    seed = jnp.uint32(key.seed & MASK), jnp.uint32(key.seed >> 32)
    return _words(*seed, jnp.uint32(key.step), jnp.uint32(key.site), size=size)


@partial(jax.jit, static_argnames="size")  # else about 200 small operations
def _words(k0: Array, k1: Array, step: Array, site: Array, *, size: int) -> Array:
    block = jnp.arange(-(-size // 4), dtype=jnp.uint32)
    zero = jnp.zeros_like(block)
    c0, c1, c2, c3 = block, zero, zero + site, zero + step
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(WEYL[0]), k1 + jnp.uint32(WEYL[1])
    return jnp.stack((c0, c1, c2, c3), axis=-1).reshape(-1)[:size]


def _multiply(m: int, x: Array) -> tuple[Array, Array]:
    """Return the high and the low word of m * x, computed from 16-bit halves."""
    m_high, m_low = jnp.uint32(m >> 16), jnp.uint32(m & 0xFFFF)
    x_high, x_low = x >> 16, x & 0xFFFF
    cross = m_high * x_low + (m_low * x_low >> 16)  # < 2^32
    middle = (cross & 0xFFFF) + m_low * x_high  # < 2^32
    return m_high * x_high + (cross >> 16) + (middle >> 16), jnp.uint32(m) * x
