"""What a model is made of, and what it takes to run and to train it, found without its parameters.

print(summary(model, batch=8).memory.training)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer import tree
from xformer.checks import require_sizes
from xformer.initializers import Shapes
from xformer.layers import BlockConfig, BlockParams, StackParams
from xformer.measure import attention_flops, key_values, measured
from xformer.models import GPT, EncoderDecoder, LanguageModel, Transformer
from xformer.shapes import FLOATING

LENGTH = 1024
STACKS = {"stack": "blocks", "encoder": "encoder", "decoder": "decoder"}  # -> configurations
AROUND = {"norm": "final norm", "memory": "keys and values of memory", "relative": "relative bias"}
EXPERTS = ("ffn.gate", "ffn.up", "ffn.down")


class Part(NamedTuple):
    """Parameters that belong together: an embedding, a head, all blocks of one shape."""

    name: str
    paths: tuple[str, ...]  # where in the parameters: one, or one for each block
    leaves: dict[str, tuple[int, ...]]  # shapes of what lies in each of the paths
    each_active: int  # parameters in each of the paths that a token meets

    @property
    def each(self) -> int:
        """Parameters in each of the paths."""
        return sum(map(math.prod, self.leaves.values()))

    @property
    def n_params(self) -> int:
        """Parameters in all of the paths."""
        return len(self.paths) * self.each

    @property
    def n_active(self) -> int:
        """Parameters in all of the paths that a token meets."""
        return len(self.paths) * self.each_active


class Memory(NamedTuple):
    """Bytes. The temporaries of an op while it runs are not counted: they come on top."""

    params: int
    forward: int  # output and cache of a forward
    saved: int  # bytes saved by a loss for backward; by a forward if there is no loss
    kv_token: int | None  # a token's keys and values in all layers; None: no decoder
    kv_cache: int | None  # those of the whole batch

    @property
    def inference(self) -> int:
        """Parameters, and a forward."""
        return self.params + self.forward

    @property
    def training(self) -> int:
        """Parameters, gradients, AdamW's two moments, and the saved set."""
        return 4 * self.params + self.saved


class Flops(NamedTuple):
    """For each token, in matrix products; a multiplication and an addition are two."""

    weights: float  # products with parameters
    attention: float  # scores, and weighted sums of values

    @property
    def forward(self) -> float:
        """Of a forward."""
        return self.weights + self.attention

    @property
    def training(self) -> float:
        """Of a forward and its backward, in which each product has two others."""
        return 3 * self.forward


class Summary(NamedTuple):
    """What `summary` finds."""

    parts: tuple[Part, ...]
    batch: int
    length: int
    dtype: str
    memory: Memory
    flops: Flops

    @property
    def n_params(self) -> int:
        """Parameters; what is tied or shared counts once."""
        return sum(part.n_params for part in self.parts)

    @property
    def n_active(self) -> int:
        """Parameters that a token meets: of experts only those that it is sent to."""
        return sum(part.n_active for part in self.parts)


def summary(
    model: Any, *, batch: int = 1, length: int | None = None, dtype: str = "float32"
) -> Summary:
    """Parameters, memory and FLOPs of a model, at a batch of sequences of one length.

    length: unless given, 1024 or the model's context if that is less. Both sequences of an
    encoder-decoder have it, and its FLOPs are for a token of each.

    Memory is that of NumPy arrays and of what NumPy's kernels keep, to the byte (`measure`): a loss
    with the dropout of its configuration. A mixture of experts keeps as much however its tokens are
    routed, as long as every token has its top_k; on other libraries, which send each token to all
    experts, E / top_k as much.

    FLOPs: every product with parameters that runs in a forward, so shared layers count as often as
    they run, experts for the tokens sent to them. Attention: 2 H (K + M) for each query and key
    that it may attend to. A sequence has T^2 such pairs, T (T + 1) / 2 where causal, less with a
    window; what our ops compute and then mask is not counted.

    ValueError for sizes below 1, a length beyond the model's positions, another dtype; TypeError
    for what is no model.
    """
    if not isinstance(model, LanguageModel | EncoderDecoder | GPT | Transformer):
        raise TypeError(f"summary: model must be one of xformer.models, got {model!r:.60}")
    if dtype not in FLOATING:
        raise ValueError(f"summary: dtype must be {' or '.join(FLOATING)}, got {dtype!r}")
    network = _network(model)
    length = min(LENGTH, context(model) or LENGTH) if length is None else length
    batch, length = require_sizes("summary", 1, batch=batch, length=length)
    limit = _positions(network)
    if limit is not None and length > limit:
        raise ValueError(f"summary: length must be at most {limit}, the model's, got {length}")
    forward, saved, flops = measured(model, batch, length, dtype)
    found, itemsize = tuple(parts(model)), np.dtype(dtype).itemsize
    keys = key_values(network, batch, length) or (None, None)
    kv_token, kv_cache = (None if n is None else n * itemsize for n in keys)
    n_params = sum(part.n_params for part in found)
    memory = Memory(itemsize * n_params, forward, saved, kv_token, kv_cache)
    per_token = Flops(flops / (batch * length), attention_flops(network, length) / length)
    return Summary(found, batch, length, dtype, memory, per_token)


def parts(model: Any) -> Iterator[Part]:
    """The parts of a model; blocks of one shape are one part. Takes no memory."""
    network = _network(model)
    params = network.init_from(Shapes())
    for name, value in zip(params._fields, params, strict=True):
        if name in STACKS:
            yield from _stack_parts(name, value, getattr(network, STACKS[name]))
        elif value is not None:
            yield _part(name, (name,), value)


def context(model: Any) -> int | None:
    """The longest sequence that a model is made for; None where it does not say."""
    network = _network(model)
    limit = _positions(network)
    told = (network.hf_config or {}).get("max_position_embeddings")
    return told if limit is None and isinstance(told, int) else limit


def _network(model: Any) -> Any:
    return getattr(model, "network", model)


def _positions(network: Any) -> int | None:
    """How many tokens the embedding takes."""
    embeds = [getattr(network, name, None) for name in ("embed", "src_embed", "tgt_embed")]
    limits = [e.max_len - e.offset for e in embeds if e is not None and e.max_len is not None]
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
    """Parameters of a block that a token meets."""
    sizes = {name: math.prod(leaf.shape) for name, leaf in tree.flatten(block).items()}
    if config.experts is None:
        return sum(sizes.values())
    of_experts = sum(sizes[name] for name in EXPERTS)
    chosen = of_experts // config.experts.n_experts * config.experts.top_k
    return sum(sizes.values()) - of_experts + chosen


def ranges(numbers: Sequence[int]) -> str:
    """0-11; or 0, 2, 4; or 0, 2, ..., 40."""
    first, last = numbers[0], numbers[-1]
    if last - first == len(numbers) - 1:
        return str(first) if first == last else f"{first}-{last}"
    words = [str(n) for n in numbers]
    return ", ".join(words if len(words) < 5 else [*words[:2], "...", words[-1]])
