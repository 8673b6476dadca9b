"""What a model keeps and computes, found without making its parameters.

A forward runs on a few tokens, with stand-ins for the parameters, which take no memory and whose
products are counted only. What it keeps is a polynomial in the sizes, linear in B and at most
quadratic in T, and so are its products: from 2 batches and 3 lengths they are known for all, to
the byte.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from xformer import tree
from xformer.backends.numpy.stand_in import Tally, is_stand_in, is_unmade, stand_in
from xformer.initializers import Shapes
from xformer.layers import BlockConfig
from xformer.models import Classifier, EncoderDecoder, LanguageModel, Pooler, Transformer
from xformer.ops import RandomKey

BLOCK = re.compile(r"(\w+)\.stack\.layers\.blocks\.(\d+)\.")


class Measured(NamedTuple):
    """Bytes, and FLOPs, of one batch."""

    forward: int  # bytes of what `forward` gives: output and cache
    saved: int  # bytes saved by `loss` for backward; by `forward` if there is no loss
    flops: int  # in products of parameters in a forward


def measured(model: Any, batch: int, length: int, dtype: str) -> Measured:
    """What `model` takes, as NumPy's kernels do it; parameters and inputs are not counted."""

    def measure(b: int, t: int) -> Measured:
        return _run(model, b, t, dtype)

    return Measured(*_extrapolated(measure, batch, length))


def saved_by_part(model: Any, batch: int, length: int, dtype: str) -> dict[str, int]:
    """Bytes saved for the backward of a loss by each layer, and by what surrounds the layers.

    In the order of a forward; together `measured`'s saved. What several keep counts for the first.
    """
    names: list[str] = []

    def measure(b: int, t: int) -> list[int]:
        params, _, examples = _stood_in(model, b, t, dtype, Tally())
        with np.errstate(all="ignore"):
            _, saved = model.loss(params, *examples, dropout_key=RandomKey(0))
        found = _by_part(saved, examples)
        names[:] = found
        return list(found.values())

    sizes = _extrapolated(measure, batch, length)
    order = ("embedding", "encoder", "layer", "decoder", "around", "head", "loss")
    return dict(sorted(zip(names, sizes, strict=True), key=lambda part: _rank(order, part[0])))


def _rank(order: Sequence[str], name: str) -> int:
    return next(i for i, word in enumerate(order) if name.startswith(word))


def _by_part(saved: Any, inputs: Sequence[Any]) -> dict[str, int]:
    """As `_nbytes`, by part of a model."""
    parts: dict[str, list[Any]] = {}
    seen: set[int] = set()
    for name, leaf in tree.flatten(saved).items():
        own = parts.setdefault(_part_of(name), [])
        if id(_owner(leaf)) not in seen:
            own.append(leaf)
            seen.add(id(_owner(leaf)))
    return {part: _nbytes(leaves, inputs) for part, leaves in parts.items()}


def _part_of(name: str) -> str:
    """The part of a model that a leaf of the cache of its loss belongs to."""
    if found := BLOCK.search(name):
        which = {"encode": "encoder ", "decode": "decoder "}.get(found[1], "")
        return f"{which}layer {found[2]}"
    words = name.split(".")
    for word, part in (
        ("embed", "embedding"),
        ("stack", "around the layers"),
        ("loss", "loss"),
        ("head", "head"),
    ):
        if word in words:
            return part
    return "loss"


def _extrapolated(
    measure: Callable[[int, int], Sequence[int]], batch: int, length: int
) -> list[int]:
    by_batch = []
    for b in range(1, min(batch, 2) + 1):
        by_length = [measure(b, t) for t in range(1, min(length, 3) + 1)]
        by_batch.append([_polynomial(values, length) for values in zip(*by_length, strict=True)])
    return [_polynomial(values, batch) for values in zip(*by_batch, strict=True)]


def _polynomial(values: Sequence[int], n: int) -> int:
    """The polynomial through (1, values[0]), (2, values[1]), ... at n, by Newton's differences."""
    total = 0
    for k in range(len(values)):
        total += math.comb(n - 1, k) * values[0]
        values = [b - a for a, b in pairwise(values)]
    return total


def _run(model: Any, batch: int, length: int, dtype: str) -> Measured:
    """A forward and a loss, on zeros."""
    tally = Tally()
    params, inputs, examples = _stood_in(model, batch, length, dtype, tally)
    with np.errstate(all="ignore"):  # zeros over a norm's eps, which may be 0
        given = model.forward(params, *inputs)
        flops, saved = tally.flops, given[1]
        if examples is not None:
            _, saved = model.loss(params, *examples, dropout_key=RandomKey(0))
    return Measured(_nbytes(given, inputs), _nbytes(saved, examples or inputs), flops)


def _stood_in(model: Any, batch: int, length: int, dtype: str, tally: Tally) -> tuple[Any, ...]:
    """Parameters without memory, and arguments of `forward` and of `loss`."""
    shapes = model.init_from(Shapes())
    params = tree.map(lambda leaf: stand_in(leaf.shape, dtype, tally), shapes)
    return params, *arguments(model, batch, length, dtype)


def arguments(model: Any, batch: int, length: int, dtype: str) -> tuple[Any, Any]:
    """Arguments of `forward`; of `loss`, or None where there is none."""
    network = getattr(model, "network", model)
    tokens = np.zeros((batch, length), np.int64)
    if isinstance(model, Transformer):
        targets = np.full((batch, length + 1), int(model.pad_id == 0))  # which count in the loss
        return (tokens, tokens), (tokens, targets)
    width = blocks_of(network)[0].d_model
    vectors = np.zeros((batch, length, width), dtype)
    if isinstance(network, EncoderDecoder):
        src = vectors if network.src_embed is None else tokens
        tgt = vectors if network.target_embed is None else tokens
        return (src, tgt), None if network.head is None else (src, tgt, tokens)
    x = vectors if network.embed is None else tokens
    if network.head is None or isinstance(network.head, Pooler):
        return (x,), None
    return (x,), (x, tokens[:, 0] if isinstance(network.head, Classifier) else tokens)


def _nbytes(kept: Any, inputs: Sequence[Any]) -> int:
    """Bytes of the arrays in a tree, those once that several are views of, without inputs' own."""
    arrays = [a for a in tree.flatten(kept).values() if isinstance(a, np.ndarray | np.generic)]
    new = [a for a in arrays if not is_stand_in(a)]
    return tree.nbytes(
        [_owner(a) for a in new if not any(np.may_share_memory(a, x) for x in inputs)]
    )


def _owner(array: Any) -> Any:
    """The array whose memory it is that this one views."""
    if is_unmade(array):
        return array
    while isinstance(getattr(array, "base", None), np.ndarray):
        array = array.base
    return array


def blocks_of(network: Any) -> tuple[BlockConfig, ...]:
    """The configurations of all layers."""
    if isinstance(network, LanguageModel):
        return network.blocks
    return (*network.encoder, *network.decoder)


def attention_flops(network: Any, length: int) -> int:
    """FLOPs of all layers' attention in one sequence: 2 H (K + M) a pair of query and key."""
    return sum(
        2 * config.n_heads * (config.head_width + config.value_width) * pairs(length, *how)
        for config, *how in _attentions(network)
    )


def _attentions(network: Any) -> Iterator[tuple[BlockConfig, Any, bool]]:
    """Of each attention its configuration, its window, and whether it is causal."""
    if isinstance(network, LanguageModel):
        yield from ((config, config.window, network.causal) for config in network.blocks)
    else:
        yield from ((config, config.window, False) for config in network.encoder)
        yield from ((config, config.window, True) for config in network.decoder)
        yield from ((config, None, False) for config in network.decoder)


def pairs(length: int, window: tuple[int | None, int | None] | None, causal: bool) -> int:
    """Pairs of a query and a key that it may attend to."""
    left, right = (None, None) if window is None else window
    behind, ahead = (
        length - 1 if n is None else min(n, length - 1) for n in (left, 0 if causal else right)
    )
    # T of the same place, T - d of places d apart.
    return length + sum(n * length - n * (n + 1) // 2 for n in (behind, ahead))


def key_values(network: Any, batch: int, length: int) -> tuple[int, int] | None:
    """How many numbers a cache of keys and values holds: for one token, and for all.

    A layer with a window need not keep more than that. Of an encoder-decoder, the decoder's own
    and those of the memory. None for an encoder, which generates nothing.
    """
    crossed: tuple[BlockConfig, ...] = ()
    if isinstance(network, LanguageModel):
        if not network.causal:
            return None
        own = network.blocks
    else:
        own = network.decoder
        crossed = own[:1] if network.shared_memory else own

    def width(config: BlockConfig) -> int:
        return config.kv_heads * (config.head_width + config.value_width)

    def kept(config: BlockConfig) -> int:
        left = None if config.window is None else config.window[0]
        return length if left is None else min(left + 1, length)

    memory = sum(map(width, crossed))
    total = sum(width(config) * kept(config) for config in own) + length * memory
    return sum(map(width, own)) + memory, batch * total
