"""The memory and the FLOPs of a model, computed without allocating its parameters.

A forward runs on a few tokens with stand-ins for the parameters. The stand-ins take no memory, and
their products are only counted. The saved bytes and the FLOPs are polynomials in the sizes, linear
in B and at most quadratic in T. So runs with 2 batch sizes and 3 lengths determine them exactly.
(With a gated DeltaNet they are polynomials in the number of its chunks.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from xformer.backends.numpy.stand_in import Tally, is_stand_in, is_unmade, stand_in
from xformer.base import tree
from xformer.initializers import Shapes
from xformer.layers import BlockConfig
from xformer.layers.recurrent_state import is_recurrent
from xformer.models import Classifier, EncoderDecoder, LanguageModel, Pooler
from xformer.ops import RandomKey
from xformer.ops.gated_delta_rule import CHUNK_LEN

# Word in the name of a leaf of a cache -> the part of the model.
AROUND = {"embed": "embedding", "stack": "around the layers", "loss": "loss", "head": "head"}
BLOCK = re.compile(r"(\w+)\.stack\.layers\.blocks\.(\d+)\.")


class Measured(NamedTuple):
    """Bytes and FLOPs of one batch."""

    forward: int  # bytes of the output and the cache of `forward`
    saved: int  # bytes saved by `step_loss` for backward; by `forward` if there is no loss
    flops: int  # of the products with parameters in a forward


def measured(model: Any, batch: int, length: int, dtype: str) -> Measured:
    """Bytes and FLOPs of `model` with NumPy's kernels, without parameters and inputs."""
    run = partial(_run, model, dtype=dtype)
    return Measured(*_extrapolated(run, batch, length, _step(model)))


def saved_by_part(model: Any, batch: int, length: int, dtype: str) -> dict[str, int]:
    """Bytes saved for the backward of a loss by each part: layers, embedding, head, loss.

    In the order of a forward. The sum is `Measured.saved`. An array that several parts save counts
    for the first.
    """
    names: list[str] = []

    def measure(b: int, t: int) -> list[int]:
        _, examples = arguments(model, b, t, dtype)
        with np.errstate(all="ignore"):
            _, saved = step_loss(model, stood_in(model, dtype, Tally()), examples)
        by_part = _by_part(saved, examples)
        names[:] = by_part
        return list(by_part.values())

    sizes = _extrapolated(measure, batch, length, _step(model))
    order = ("embedding", "encoder", "layer", "decoder", "around", "head", "loss")

    def place(part: tuple[str, int]) -> int:
        return next(i for i, word in enumerate(order) if part[0].startswith(word))

    return dict(sorted(zip(names, sizes, strict=True), key=place))


def _by_part(saved: Any, inputs: Sequence[Any]) -> dict[str, int]:
    """Part of a model -> the bytes that it saves, counted as `_nbytes` does."""
    parts: dict[str, list[Any]] = {}
    seen: set[int] = set()
    for name, leaf in tree.flatten(saved).items():
        part_leaves = parts.setdefault(_part_of(name), [])
        if id(_owner(leaf)) not in seen:
            part_leaves.append(leaf)
            seen.add(id(_owner(leaf)))
    return {part: _nbytes(leaves, inputs) for part, leaves in parts.items()}


def _part_of(name: str) -> str:
    """The part of a model to which the leaf `name` of the cache of its loss belongs."""
    if match := BLOCK.search(name):
        which = {"encode": "encoder ", "decode": "decoder "}.get(match[1], "")
        return f"{which}layer {match[2]}"
    words = name.split(".")
    return next((part for word, part in AROUND.items() if word in words), "loss")


def _extrapolated(
    measure: Callable[[int, int], Sequence[int]], batch: int, length: int, step: int
) -> list[int]:
    by_batch = []
    for b in range(1, min(batch, 2) + 1):
        lengths = _lengths(length, step)
        by_length = [measure(b, t) for t in lengths]
        n = 1 + (length - lengths[0]) // step
        by_batch.append([_polynomial(values, n) for values in zip(*by_length, strict=True)])
    return [_polynomial(values, batch) for values in zip(*by_batch, strict=True)]


def _lengths(length: int, step: int) -> list[int]:
    """Up to three lengths to measure at, `step` apart, whose polynomial also gives `length`.

    Above `step`, unless `length` is not: shorter chunks have other sizes.
    """
    if length <= step > 1:
        return [length]
    first = step + length % step if step > 1 else 1
    return list(range(first, min(length, first + 2 * step) + 1, step))


def _step(model: Any) -> int:
    """The lengths at which memory is a polynomial are so far apart: the steps of a chunk."""
    return CHUNK_LEN if any(map(is_recurrent, model.blocks)) else 1


def _polynomial(values: Sequence[int], n: int) -> int:
    """The polynomial through (1, values[0]), (2, values[1]), ... at n, by Newton's differences."""
    total = 0
    for k in range(len(values)):
        total += math.comb(n - 1, k) * values[0]
        values = [b - a for a, b in pairwise(values)]
    return total


def _run(model: Any, batch: int, length: int, dtype: str) -> Measured:
    """The bytes and FLOPs of a forward and a loss on zeros."""
    tally = Tally()
    params = stood_in(model, dtype, tally)
    inputs, examples = arguments(model, batch, length, dtype)
    with np.errstate(all="ignore"):  # norms divide zeros by eps, which may be 0
        result = model.forward(params, *inputs)
        flops, saved = tally.flops, result[1]
        if examples is not None:
            _, saved = step_loss(model, params, examples)
    return Measured(_nbytes(result, inputs), _nbytes(saved, examples or inputs), flops)


def step_loss(model: Any, params: Any, examples: Sequence[Any]) -> tuple[Any, Any]:
    """The loss of a training step and its cache, with dropout as configured.

    With memory_len it is the loss of a segment after a full memory.
    """
    memory_len = getattr(model, "memory_len", None)
    if memory_len is None:
        loss, cache = model.loss(params, *examples, dropout_key=RandomKey(0))
        return loss, cache
    memory = model.init_memory(params, len(examples[0]))._replace(length=memory_len)
    segment_loss = model.segment_loss
    loss, cache, _ = segment_loss(params, *examples, memory, dropout_key=RandomKey(0))
    return loss, cache


def stood_in(model: Any, dtype: str, tally: Tally) -> Any:
    """Stand-ins for the parameters, whose products `tally` counts."""
    return tree.map(lambda leaf: stand_in(leaf.shape, dtype, tally), model.init_from(Shapes()))


def arguments(model: Any, batch: int, length: int, dtype: str) -> tuple[Any, Any]:
    """The arguments of `forward`, and the arrays for `step_loss` (None if there is no loss)."""
    tokens = np.zeros((batch, length), np.int64)
    width = model.blocks[0].d_model
    vectors = np.zeros((batch, length, width), dtype)
    if isinstance(model, EncoderDecoder):
        tokens += model.pad_id == 0  # no padding: all count
        src = vectors if model.src_embed is None else tokens
        tgt = vectors if model.target_embed is None else tokens
        return (src, tgt), None if model.head is None else (src, tgt, tokens)
    x = vectors if model.embed is None else tokens
    if model.head is None or isinstance(model.head, Pooler):
        return (x,), None
    return (x,), (x, tokens[:, 0] if isinstance(model.head, Classifier) else tokens)


def _nbytes(node: Any, inputs: Sequence[Any]) -> int:
    """Bytes of the arrays in a tree, without inputs. Views of the same array count once."""
    arrays = [a for a in tree.flatten(node).values() if isinstance(a, np.ndarray | np.generic)]
    new = [a for a in arrays if not is_stand_in(a)]
    return tree.nbytes(
        [_owner(a) for a in new if not any(np.may_share_memory(a, x) for x in inputs)]
    )


def _owner(array: Any) -> Any:
    """The array that owns the memory of `array`."""
    if is_unmade(array):
        return array
    while isinstance(getattr(array, "base", None), np.ndarray):
        array = array.base
    return array


def attention_flops(model: Any, length: int) -> int:
    """FLOPs of attention in all layers for one sequence: 2 H (K + M) for each query-key pair.

    With attn.xl 2 H (2 K + M): a query meets each key, and each distance. A gated DeltaNet has
    6 H K M for each token: it reads its state by a key, writes to it, and reads it by a query.
    """

    def width(config: BlockConfig) -> int:
        attn = config.attn
        if is_recurrent(config):
            return 0
        return attn.n_heads * ((1 + attn.xl) * attn.head_width + attn.value_width)

    flops = sum(2 * width(config) * pairs(length, *how) for config, *how in _attentions(model))
    recurrent = (config.attn for config in model.blocks if is_recurrent(config))
    return flops + sum(6 * a.n_heads * a.head_width * a.value_width * length for a in recurrent)


def _attentions(model: Any) -> Iterator[tuple[BlockConfig, Any, bool]]:
    """(configuration, window, whether it is causal) of each attention."""
    if isinstance(model, LanguageModel):
        yield from ((config, config.attn.window, model.causal) for config in model.blocks)
    else:
        yield from ((config, config.attn.window, False) for config in model.encoder)
        yield from ((config, config.attn.window, True) for config in model.decoder)
        yield from ((config, None, False) for config in model.decoder)


def pairs(length: int, window: tuple[int | None, int | None] | None, causal: bool) -> int:
    """The number of pairs of a query and a key that it may attend to."""
    left, right = (None, None) if window is None else window
    behind, ahead = (
        length - 1 if n is None else min(n, length - 1) for n in (left, 0 if causal else right)
    )
    # T pairs of the same position, T - d pairs of positions at a distance of d.
    return length + sum(n * length - n * (n + 1) // 2 for n in (behind, ahead))


def key_values(model: Any, batch: int, length: int) -> tuple[int, int] | None:
    """The size of the KV cache in numbers: (of one token, of the whole batch).

    A layer with a window counts only the tokens in its window, and a model with memory_len only
    those in its memory and the next one. For an encoder-decoder, the keys and
    values of the memory are included. None for an encoder, which does not decode.
    """
    crossed: tuple[BlockConfig, ...] = ()
    if isinstance(model, LanguageModel):
        if not model.causal:
            return None
        blocks = model.blocks
    else:
        blocks = model.decoder
        crossed = blocks[:1] if model.shared_memory else blocks

    def width(config: BlockConfig) -> int:
        return config.attn.cached_width

    def n_cached(config: BlockConfig) -> int:
        left = None if config.attn.window is None else config.attn.window[0]
        if (memory_len := getattr(model, "memory_len", None)) is not None:
            left = memory_len
        return length if left is None else min(left + 1, length)

    memory = sum(map(width, crossed))
    total = sum(width(config) * n_cached(config) for config in blocks) + length * memory
    return sum(map(width, blocks)) + memory, batch * total
