"""`barrier` under tracing, for activation checkpointing: XLA must not reuse the forward's work.

Values depend on a condition that is never true, which XLA cannot know. `jax.checkpoint` uses
`jax.lax.optimization_barrier` instead. On the CPU, XLA removes the barrier before it merges equal
computations, and no memory is saved.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xformer.base import tree
from xformer.base.typing import Array
from xformer.dispatch import kernel
from xformer.ops.barrier import barrier as reference
from xformer.ops.random_bits import RandomKey


@kernel(reference, "jax")
def barrier(x: Array, *, memory: Any, key: RandomKey | None, dy: Array) -> tuple[Any, ...]:
    """Return x, memory and key unchanged, but dependent on dy: on whether dy[0] is NaN and 0."""
    if not isinstance(dy, jax.core.Tracer):
        return x, memory, key
    first = jnp.reshape(dy, (-1,))[:1]
    never = jnp.any(jnp.isnan(first) & (first == 0))
    x, memory = tree.map(lambda a: jnp.where(never, jnp.zeros_like(a), a), (x, memory))
    if key is not None:  # so that dropout's random bits are drawn again, not saved
        key = key._replace(step=jnp.uint32(key.step) + never.astype(jnp.uint32))
    return x, memory, key
