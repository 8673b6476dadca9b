"""Tensor-parallel models: each process has a part of the heads, hidden units and vocabulary."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from xformer import ops
from xformer.backends import Generator
from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.printing import short
from xformer.base.typing import Array, Tree
from xformer.dispatch import reference_only, saved
from xformer.dispatch.checks import number
from xformer.dispatch.grad_callback import Ready
from xformer.distributed.blocks import parallel_block, require_attention, require_no_inner_dropout
from xformer.distributed.collectives import join, part
from xformer.distributed.partition import bounds, own_size, part_of, reduced
from xformer.distributed.sharded_vocabulary import embedding, parallel_head
from xformer.distributed.sharding import (
    CUTS,
    LABELS,
    ONE_KEY_HEAD,
    WHOLE,
    Cut,
    cut_of,
    shard,
    whole,
)
from xformer.distributed.world import World
from xformer.layers.advance import advance
from xformer.layers.blocks import blocks
from xformer.layers.embed import EmbedConfig
from xformer.layers.relative import RelativeConfig
from xformer.models.encoder_decoder import EncoderDecoder
from xformer.models.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class _TensorParallel:
    """What both models have in common: their parameters, and how the layers are called."""

    original: Any = dataclasses.field(repr=False)  # the whole model
    world: World

    @property
    def cuts(self) -> Mapping[str, Cut]:
        """How the parameters are cut: for patterns of their names, an axis or a word.

        Patterns are globs (`fnmatch`) for a dotted name with a dot before it. The first pattern
        that matches a name counts. The module `xformer.distributed.sharding` explains the words.
        """
        has_labels = not getattr(self.original.head, "of_tokens", False)
        model: Any = self  # which has blocks
        one_key_head = model.blocks[0].one_key_head
        return (LABELS if has_labels else {}) | (ONE_KEY_HEAD if one_key_head else {}) | CUTS

    def init_from(self, rng: Generator) -> Any:
        """This process's part of the initial parameters of the whole model."""
        return self.shard(self.original.init_from(rng))

    def shard(self, params: Tree) -> Tree:
        """This process's part of the parameters, or of an optimiser state, of the whole model."""
        return shard(params, self.world, self.cuts)

    def whole(self, params: Tree) -> Tree:
        """The inverse of `shard`. All processes must call it, and all get the result."""
        return whole(params, self.world, self.cuts)

    def clip_by_global_norm(self, grads: Tree, *, max_norm: float) -> tuple[Tree, float]:
        """This process's part of `optim.clip_by_global_norm` of the gradients of all processes.

        The norm is that of all parts, with what every process has counted once.

        ValueError if no process has gradients.
        """
        max_norm = number("clip_by_global_norm", "max_norm", max_norm)
        leaves = tree.flatten(grads)  # a process may have none, if few parameters are trained
        counted = {
            name: dp
            for name, dp in leaves.items()
            if self.world.rank == 0 or isinstance(cut_of(name, self.cuts), int)
        }
        squares = [float(array_namespace(dp).sum(dp**2)) for dp in counted.values()]
        everywhere = self.world.gather((len(leaves), sum(squares)))
        if not any(n for n, _ in everywhere):
            raise ValueError("clip_by_global_norm: there are no gradients")
        norm = math.sqrt(sum(square for _, square in everywhere))
        scale = min(max_norm / (norm + 1e-6), 1.0)
        return tree.map(lambda dp: dp * scale, grads), norm


# Kernels of these could run collectives in several threads, or leave them out.
_as_layers = partial(reference_only, blocks, advance)


@dataclass(frozen=True)
class ParallelEmbed(EmbedConfig):
    """An embedding of which each process has the rows of a part of the vocabulary."""

    world: World = dataclasses.field(kw_only=True)

    @property
    def table_rows(self) -> int:
        """The rows of this process."""
        return own_size(self.vocab_size, self.world)

    def lookup(self, table: Array, ids: Array) -> tuple[Array, Any]:
        """The rows `ids` of the tables of all processes, and their cache."""
        return embedding(table, ids=ids, vocab_size=self.vocab_size, world=self.world)


@dataclass(frozen=True)
class ParallelLanguageModel(_TensorParallel, LanguageModel):
    """The part of a `LanguageModel` that this process has (`tensor_parallel`)."""

    sequence: bool = dataclasses.field(default=False, kw_only=True)  # of `ParallelBlock`

    def hidden(
        self,
        params: Any,
        tokens: Array,
        *,
        dropout_key: ops.RandomKey | None = None,
        **options: Any,
    ) -> tuple[Array, Any]:
        """The hidden states (B, T, D), on every process (`LanguageModel.hidden`)."""
        if dropout_key is not None and self.world.size > 1:
            require_no_inner_dropout(self.blocks)
            if self.sequence:
                self._require_no_outer_dropout()
        with _as_layers():
            x, cache = super().hidden(params, tokens, dropout_key=dropout_key, **options)
        if not self.sequence:
            return x, cache
        x, then = join(x, world=self.world, axis=1)
        return x, saved(SequenceCache(cache, then, self.world, self.cuts))

    def _require_no_outer_dropout(self) -> None:
        rates = {f"blocks[{i}].dropout": b.dropout for i, b in enumerate(self.blocks)}
        for name, rate in (rates | {"out_dropout": self.out_dropout}).items():
            if rate:
                raise ValueError(
                    f"parallel: {name} must be 0 with sequence = True, got {rate}: its mask "
                    "depends on the index in the whole sequence"
                )

    def _embedded(self, *args: Any, **options: Any) -> tuple[tuple[Array, Array | None], Any]:
        (x, pos), cache = super()._embedded(*args, **options)
        if not self.sequence:
            return (x, pos), cache
        if x.shape[1] % self.world.size:
            raise ValueError(
                f"parallel: {self.world.size} processes must divide the {x.shape[1]} tokens of a "
                "sequence"
            )
        x, own = part(x, world=self.world, axis=1)
        return (x, pos), saved(PartEmbedCache(cache, own))

    def decode(self, params: Any, tokens: Array, state: Any, **options: Any) -> tuple[Array, Any]:
        """Logits and state after `tokens`, on every process (`LanguageModel.decode`).

        The state has the keys and values of this process's heads.
        """
        if self.sequence:  # a token has no parts
            model = tensor_parallel(self.original, self.world)
            result: tuple[Array, Any] = model.decode(params, tokens, state, **options)
            return result
        with _as_layers():
            return super().decode(params, tokens, state, **options)

    def _alibi(self, *args: Any) -> Array | None:
        bias = self.original._alibi(*args)
        first, last = bounds(self.original.blocks[0].attn.n_heads, self.world)
        return None if bias is None else part_of(bias, 1, first, last)


@short
class PartEmbedCache(NamedTuple):
    """Saved for the backward of an embedding: its cache, and that of the part of its output."""

    embed: Any
    own: Any  # of `part`

    def backward(self, dx: Array, dpos: Array | None = None) -> Any:
        """Gradients of the embedding's parameters."""
        return self.embed.backward(self.own.backward(dx), dpos)


@short
class SequenceCache(NamedTuple):
    """Saved by `hidden` of parts of the sequence for backward: its cache, and that of the join.

    Other attributes are those of the cache of `hidden`.
    """

    hidden: Any
    then: Any  # of `join`
    world: World
    cuts: Mapping[str, Cut]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.hidden, name)

    def backward(self, dx: Array, drouter_logits: Any = None) -> Any:
        """Gradients of params, without the head."""
        return self.backward_all(dx, drouter_logits)[0]

    def backward_all(
        self, dx: Array, drouter_logits: Any = None, *, ready: Ready | None = None
    ) -> tuple[Any, None]:
        """Gradients of params, without the head, and None for the tokens.

        Norms and scales of the stack were used for a part of the sequence: their gradients are sums
        over all processes. ValueError for `ready`, since the sums are added at the end.
        """
        if ready is not None:
            raise ValueError(
                "parallel: ready excludes sequence = True: the gradients of norms are added over "
                "the processes at the end of the backward"
            )
        grads, _ = self.hidden.backward_all(self.then.backward(dx), drouter_logits)
        leaves = tree.flatten(grads.stack)
        names = [name for name in leaves if cut_of(name, self.cuts) == WHOLE]
        sums = reduced([leaves[name] for name in names], self.world)
        leaves |= dict(zip(names, sums, strict=True))
        return grads._replace(stack=tree.unflatten(grads.stack, leaves)), None


@dataclass(frozen=True)
class ParallelEncoderDecoder(_TensorParallel, EncoderDecoder):
    """The part of an `EncoderDecoder` that this process has (`tensor_parallel`)."""

    def encode(
        self, params: Any, src: Array, *, dropout_key: ops.RandomKey | None = None, **options: Any
    ) -> tuple[tuple[Array, Array | None], Any]:
        """((memory, pos), cache): whole arrays on every process (`EncoderDecoder.encode`).

        ValueError for a dropout_key if dropout within sublayers is on and there are several
        processes.
        """
        if dropout_key is not None and self.world.size > 1:
            require_no_inner_dropout((*self.encoder, *self.decoder))
        with _as_layers():
            return super().encode(params, src, dropout_key=dropout_key, **options)

    @_as_layers()
    def _decode_target(self, *args: Any, **options: Any) -> tuple[Array, Any]:
        return super()._decode_target(*args, **options)

    def decode(self, params: Any, tokens: Array, state: Any, **options: Any) -> tuple[Array, Any]:
        """Logits and state after `tokens`, on every process (`EncoderDecoder.decode`)."""
        with _as_layers():
            return super().decode(params, tokens, state, **options)


def tensor_parallel(model: Any, world: World, *, sequence: bool = False) -> Any:
    """The part of a model that this process has: of its heads, hidden units and vocabulary.

    The result has the methods of a LanguageModel or EncoderDecoder, and `shard` and `whole` for
    parameters. All processes call the same methods with the same data, and get the same loss,
    logits and hidden states; gradients are those of their own parameters.

        part = distributed.tensor_parallel(model, world)
        params = part.shard(params)
        loss, cache = part.loss(params, tokens, targets)
        grads = cache.backward()

    sequence: between sublayers, each process has a part of each sequence, which saves memory
        (sequence parallelism, arXiv:2205.05198); of a LanguageModel only

    The results are those of the whole model up to rounding.

    ValueError, which names the option, for a model that cannot be cut: heads that the processes do
    not divide, a norm of all heads together, heads without an output projection, feed-forward
    networks of one linear layer, one projection of the memory for all layers. Dropout within a
    sublayer is refused when it is used.
    """
    options = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
    kind: type[Any] = ParallelLanguageModel
    if isinstance(model, EncoderDecoder):
        kind = ParallelEncoderDecoder
        if model.shared_memory:
            raise ValueError("parallel: shared_memory must be False: it is outside the sublayers")
        if sequence:
            raise ValueError("parallel: sequence = True needs a LanguageModel, got EncoderDecoder")
    elif sequence and (model.embed is None or model.relative_bias is not None):
        what = "an embedding" if model.embed is None else "no relative_bias"
        raise ValueError(f"parallel: sequence = True needs {what}")
    for config in model.blocks:
        require_attention(config)
    if len({config.attn.kv_heads == 1 for config in model.blocks}) > 1:
        raise ValueError("parallel: n_kv_heads must be 1 in all blocks, or in none")
    for name, value in options.items():
        if isinstance(value, EmbedConfig):
            options[name] = _parallel_embed(value, world)
        elif isinstance(value, RelativeConfig):
            options[name] = dataclasses.replace(value, n_heads=value.n_heads // world.size)
        elif name in ("blocks", "encoder", "decoder"):
            options[name] = tuple(parallel_block(c, world, sequence=sequence) for c in value)
    table = options.get("embed") or options.get("tgt_embed") or options.get("src_embed")
    if table is not None:
        options["head"] = parallel_head(model.head, table.vocab_size, world)
    elif getattr(model.head, "of_tokens", False):
        raise ValueError("parallel: a head over a vocabulary needs an embedding, got None")
    if sequence:
        options["sequence"] = True
    return kind(**options, original=model, world=world)


def _parallel_embed(config: EmbedConfig, world: World) -> ParallelEmbed:
    if config.vocab_size < world.size:
        raise ValueError(
            f"parallel: {world.size} processes need as many tokens, got vocab_size = "
            f"{config.vocab_size}"
        )
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return ParallelEmbed(**fields, world=world)
