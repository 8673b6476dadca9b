"""Parameters, memory and FLOPs of a model, computed without allocating its parameters.

print(summary(model, batch=8).memory.training)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.base import tree
from xformer.dispatch.checks import require_sizes
from xformer.dispatch.shapes import FLOATING
from xformer.initializers import Shapes
from xformer.inspection.measure import attention_flops, key_values, measured
from xformer.layers import BlockConfig, BlockParams, StackParams
from xformer.models import EncoderDecoder, LanguageModel

LENGTH = 1024
STACKS = {"stack": "blocks", "encoder": "encoder", "decoder": "decoder"}  # -> configurations
AROUND = {
    "norm": "final norm",
    "memory": "keys and values of memory",
    "relative_bias": "relative bias",
}
EXPERTS = tuple(f"ffn.{name}{bias}" for name in ("gate", "up", "down") for bias in ("", "_bias"))


class Part(NamedTuple):
    """A group of parameters: an embedding, a head, or all blocks of the same shape."""

    name: str
    paths: tuple[str, ...]  # dotted names in the parameters: one, or one for each block
    leaves: dict[str, tuple[int, ...]]  # shapes of the leaves under each path
    each_active: int  # parameters under each path that one token uses

    @property
    def each(self) -> int:
        """The number of parameters under each path."""
        return sum(map(math.prod, self.leaves.values()))

    @property
    def n_params(self) -> int:
        """The number of parameters under all paths."""
        return len(self.paths) * self.each

    @property
    def n_active(self) -> int:
        """The number of parameters under all paths that one token uses."""
        return len(self.paths) * self.each_active


class Memory(NamedTuple):
    """The bytes that a model needs. Temporary arrays within an op are not counted."""

    params: int
    forward: int  # output and cache of a forward
    saved: int  # bytes saved by a loss for backward; by a forward if there is no loss
    kv_token: int | None  # the KV cache of one token in all layers; None: not a decoder
    kv_cache: int | None  # the KV cache of the whole batch

    @property
    def inference(self) -> int:
        """Parameters, output and cache of a forward."""
        return self.params + self.forward

    @property
    def training(self) -> int:
        """Parameters, gradients, AdamW's two moments, and the saved set."""
        return 4 * self.params + self.saved


class Flops(NamedTuple):
    """FLOPs of matrix products for each token. A multiplication and an addition count as two."""

    weights: float  # products with parameters
    attention: float  # scores, and weighted sums of values

    @property
    def forward(self) -> float:
        """FLOPs of a forward for one token."""
        return self.weights + self.attention

    @property
    def training(self) -> float:
        """FLOPs of forward and backward for one token; backward has two matmuls for each one."""
        return 3 * self.forward


class Summary(NamedTuple):
    """The result of `summary`."""

    parts: tuple[Part, ...]
    batch: int
    length: int
    dtype: str
    memory: Memory
    flops: Flops

    @property
    def n_params(self) -> int:
        """The number of parameters. Tied and shared parameters count once."""
        return sum(part.n_params for part in self.parts)

    @property
    def n_active(self) -> int:
        """The number of parameters that one token uses, with only `top_k` of the experts."""
        return sum(part.n_active for part in self.parts)


def summary(
    model: Any, *, batch: int = 1, length: int | None = None, dtype: str = "float32"
) -> Summary:
    """Parameters, memory and FLOPs of a model, for a batch of sequences of the same length.

    batch: the number of sequences.
    length: tokens of each sequence. By default 1024, or the model's context if that is less. For an
        encoder-decoder both sequences have this length, and FLOPs are for one token of each.

    Memory counts NumPy arrays and what NumPy's kernels save, to the byte (`measure`), for a loss
    with dropout as configured. For a mixture of experts it does not depend on the routing, as long
    as every token has top_k experts. Other libraries run each token through all experts, and save
    E / top_k times as much for them.

    FLOPs count every product with parameters in a forward. Shared layers count each time they run;
    experts count for the tokens routed to them. Attention counts 2 H (K + M) for each pair of a
    query and a key that it may attend to: T^2 pairs in a sequence, T (T + 1) / 2 if it is causal,
    fewer with a window. Masked pairs are not counted, although our ops compute them.

    ValueError for sizes below 1, a length beyond the model's positions, and another dtype.
    TypeError if `model` is not a model.
    """
    if not isinstance(model, LanguageModel | EncoderDecoder):
        raise TypeError(f"summary: model must be one of xformer.models, got {model!r:.60}")
    if dtype not in FLOATING:
        raise ValueError(f"summary: dtype must be {' or '.join(FLOATING)}, got {dtype!r}")
    length = min(LENGTH, context(model) or LENGTH) if length is None else length
    batch, length = require_sizes("summary", 1, batch=batch, length=length)
    limit = max_positions(model)
    if limit is not None and length > limit:
        raise ValueError(f"summary: length must be at most {limit}, the model's, got {length}")
    forward, saved, flops = measured(model, batch, length, dtype)
    all_parts, itemsize = tuple(parts(model)), np.dtype(dtype).itemsize
    keys = key_values(model, batch, length) or (None, None)
    kv_token, kv_cache = (None if n is None else n * itemsize for n in keys)
    n_params = sum(part.n_params for part in all_parts)
    memory = Memory(itemsize * n_params, forward, saved, kv_token, kv_cache)
    per_token = Flops(flops / (batch * length), attention_flops(model, length) / length)
    return Summary(all_parts, batch, length, dtype, memory, per_token)


def parts(model: Any) -> Iterator[Part]:
    """The parts of a model, without allocating parameters. Blocks of equal shape are one part."""
    params = model.init_from(Shapes())
    for name, value in zip(params._fields, params, strict=True):
        if name in STACKS:
            yield from _stack_parts(name, value, getattr(model, STACKS[name]))
        elif value is not None:
            yield _part(name, (name,), value)


def context(model: Any) -> int | None:
    """The longest sequence that a model supports; None if its configuration does not say."""
    limit = max_positions(model)
    configured = (model.hf_config or {}).get("max_position_embeddings")
    return configured if limit is None and isinstance(configured, int) else limit


def max_positions(model: Any) -> int | None:
    """The longest sequence that the position embeddings support; None: only memory limits it."""
    embeds = [getattr(model, name, None) for name in ("embed", "src_embed", "tgt_embed")]
    limits = [e.context for e in embeds if e is not None and e.context is not None]
    return min(limits, default=None)


def _stack_parts(stack: str, params: StackParams, configs: Sequence[BlockConfig]) -> Iterator[Part]:
    prefix = "" if stack == "stack" else f"{stack} "
    run = len(configs) // len(params.blocks)  # layers that share a block
    kinds: dict[tuple[BlockParams, int], list[int]] = {}
    for i, block in enumerate(params.blocks):
        kinds.setdefault((block, _active(block, configs[i * run])), []).append(i)
    for (block, active), numbers in kinds.items():
        paths = tuple(f"{stack}.blocks.{i}" for i in numbers)
        several = len(numbers) > 1
        name = f"{prefix}block{'s' * several} {ranges(numbers)}"
        if run > 1:
            name += f", in {run} layers{' each' * several}"
        yield _part(name, paths, block, active)
    for field, name in AROUND.items():
        if getattr(params, field) is not None:
            yield _part(prefix + name, (f"{stack}.{field}",), getattr(params, field))


def _part(name: str, paths: tuple[str, ...], params: Any, active: int | None = None) -> Part:
    leaves = {leaf: shape.shape for leaf, shape in tree.flatten(params).items()}
    part = Part(name, paths, leaves, 0)
    return part._replace(each_active=part.each if active is None else active)


def _active(block: BlockParams, config: BlockConfig) -> int:
    """The number of parameters of a block that one token uses."""
    sizes = {name: math.prod(leaf.shape) for name, leaf in tree.flatten(block).items()}
    if config.experts is None:
        return sum(sizes.values())
    of_experts = sum(sizes.get(name, 0) for name in EXPERTS)
    chosen = of_experts // config.experts.n_experts * config.experts.top_k
    return sum(sizes.values()) - of_experts + chosen


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as text: 0-11; or 0, 2, 4; or 0, 2, ..., 40."""
    first, last = numbers[0], numbers[-1]
    if last - first == len(numbers) - 1:
        return str(first) if first == last else f"{first}-{last}"
    words = [str(n) for n in numbers]
    return ", ".join(words if len(words) < 5 else [*words[:2], "...", words[-1]])
