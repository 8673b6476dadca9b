"""`language_model_loss`: a thread's share of a batch from tokens to losses in one call, and back.

For models of few classes, whose parts are small: between ops threads wait for each other's Python,
which finds nothing in a core's caches after loops that fill them.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from xformer.backends.numba import language_model_loops as loops
from xformer.backends.numba.atomic import needed, nothing_done, place
from xformer.backends.numba.blocks import tile_of_layer, turns_of
from xformer.backends.numba.compiled import PLAIN
from xformer.backends.numba.gemm import no_products, products
from xformer.backends.numba.known import Known
from xformer.backends.numba.linear_cross_entropy import LOGITS
from xformer.backends.numba.plan import (
    Unfit,
    gather,
    map_of,
    norm_of,
    remembered,
    require,
)
from xformer.backends.numba.share import other_norms
from xformer.backends.numba.share_layout import gradients, is_sideways, layout_of, memory_of
from xformer.backends.numpy.blocks import require_no_routers, unparted
from xformer.backends.numpy.linear_cross_entropy import LARGE
from xformer.backends.numpy.threads import lined, n_threads, run, scratch

from xformer import layers, ops
from xformer.checks import in_range, number, require_gradient
from xformer.dispatch import keeps_nothing
from xformer.layers.blocks import order_of
from xformer.layers.embed import EmbedParams
from xformer.layers.linear import LinearParams
from xformer.layers.norm import NormParams
from xformer.layers.stack import StackParams
from xformer.models.language_model import LanguageModel, LanguageModelParams
from xformer.models.lm_head import LMHead
from xformer.models.loss import LossCache
from xformer.tree import Frozen
from xformer.typing import Array

FLOAT32 = np.dtype(np.float32)
OPTIONS = {"label_smoothing", "z_loss", "reduction", "ignore_index"}


class Whole(NamedTuple):
    """What is known of a model and its parameters."""

    model: LanguageModel
    refusal: str | None  # why there is nothing
    plan: Any = None  # of its blocks
    norm: tuple[Array, ...] = ()  # the final one's row and numbers, as the plan has them
    head: Array | None = None  # its row of maps
    by_rows: bool = True  # how the gradient of its weights lies
    spots: tuple[tuple[int, int], ...] = ()  # from where to where those of its w and b, and of the
    # final norm's w and b, are among `sums`


def outside(
    tokens: Array,
    targets: Array,
    params: LanguageModelParams,
    *,
    model: LanguageModel,
    mask: Array | None = None,
    positions: Array | None = None,
    types: Array | None = None,
    dropout_key: ops.Key | None = None,
    **options: Any,
) -> str | None:
    """Why the kernel cannot run."""
    if keeps_nothing():
        return "only for a backward"
    if not (mask is positions is types is None):
        return "a mask, positions or types of tokens"
    if dropout_key is not None and _drops(model):
        return "no dropout"
    if options.keys() - OPTIONS or options.get("ignore_index") is not None:
        return "no tokens that are ignored, nor options that it does not know"
    if options.get("reduction", "mean") not in ("mean", "sum"):
        return 'reduction "none" has a dloss for each token'
    given: Any = params
    if not isinstance(given, LanguageModelParams):
        return "parameters of another kind"
    whole = known_of(params, model)
    if whole.refusal is not None:
        return whole.refusal
    for ids in (tokens, targets):
        if type(ids) is not np.ndarray or ids.ndim != 2 or ids.dtype.kind not in "iu":
            return "only NumPy's own arrays of integers, for each token one target"
    if tokens.shape != targets.shape or tokens.size == 0:
        return "for each token one target, and at least one"
    if model.context is not None and tokens.shape[1] > model.context:
        return "more tokens than fit the context"
    size = model.embed.vocab_size if model.embed else 0
    if not (in_range(tokens, size=size) and in_range(targets, size=size)):
        return "ids out of range"
    return unparted(*tokens.shape) or no_products()


def _drops(model: LanguageModel) -> bool:
    rates = [rate for c in model.blocks for rate in (c.dropout, c.probs_dropout, c.hidden_dropout)]
    return any((model.out_dropout, model.embed and model.embed.dropout, *rates))


def language_model_loss(
    tokens: Array,
    targets: Array,
    params: LanguageModelParams,
    *,
    model: LanguageModel,
    mask: Array | None = None,
    positions: Array | None = None,
    types: Array | None = None,
    dropout_key: ops.Key | None = None,
    **options: Any,
) -> tuple[Array, LossCache]:
    """Shares of the texts, of each a row of what is kept."""
    a = number("cross_entropy", "label_smoothing", options.get("label_smoothing", 0.0), 0, 1)
    z = number("cross_entropy", "z_loss", options.get("z_loss", 0.0))
    is_mean = options.get("reduction", "mean") == "mean"
    whole, embed = known_of(params, model), params.embed
    if whole.plan is None or embed is None or model.embed is None:
        raise ValueError(f"language_model_loss: {whole.refusal}")
    (n_texts, length), (n_classes, d) = tokens.shape, embed.table.shape
    table = np.require(embed.table, None, PLAIN)
    tiles = [tile_of_layer(config, model.causal, length) for config in model.blocks]
    rotary = None
    if model.rotary is not None:
        rotary = layers.rotary(model.rotary, like=table, length=length)
    pad = np.empty((n_texts, 0), FLOAT32)
    how = np.array(tiles, np.int64), *turns_of(rotary, FLOAT32), pad
    size = -(-n_texts // n_threads())
    starts = layout_of(whole.plan, params.stack.blocks, size * length).starts
    ids, goals = (np.require(x, np.int64, PLAIN) for x in (tokens, targets.reshape(-1)))
    x, y, dy = (lined((n_texts, length, d), FLOAT32) for _ in range(3))
    kept = lined((-(-n_texts // size), int(starts[-1, -1])), FLOAT32)
    weight = np.float32(1 / ids.size if is_mean else 1.0)
    embedding = ids, table, _of_positions(embed.positions, model, length, d), x
    top = *whole.norm, whole.head, np.array([a, z, weight], np.float32)
    losses = np.empty(ids.size, FLOAT32)
    sums = lined((len(kept), whole.spots[-1][1]), FLOAT32)

    def share(i: int) -> None:
        start = place(sums[i])
        dw, db, *norm = (start + 4 * at if at < end else 0 for at, end in whole.spots)
        places = np.array(norm), np.array([dw, whole.by_rows, db, False])
        shape = max(1, min(LOGITS // n_classes, size * length)), n_classes
        logits = scratch("logits", shape, FLOAT32)
        memory = *scratch("h", (2, size * length, d), FLOAT32), logits
        given = embedding, kept[i], starts, top, goals, y, losses, dy
        loops.forward(products(), i, size, whole.plan.tables, how, *given, places, memory)

    run([partial(share, i) for i in range(len(kept))])
    total = sums[0] if len(sums) == 1 else np.add.reduce(sums, axis=0)
    loss = np.add.reduce(losses) * weight
    return loss, LossCache(SharesCache(params, model, how, size, ids, x, kept, dy, total), loss)


class SharesCache(NamedTuple):
    """What `language_model_loss` keeps for its backward: gradients for dloss = 1 among it."""

    params: LanguageModelParams
    model: LanguageModel
    how: tuple[Array, Array, bool, Array]  # of attention: tiles, turns, interleaved, pad
    size: int  # how many texts a share has, at most
    ids: Array  # (B, T)
    x: Array  # (B, T, D), the vectors of tokens
    kept: Array  # of each share a row, as in `share_loops`
    dy: Array  # (B, T, D), of what the last layer gives
    sums: Array  # gradients of the head and of the final norm, one behind the other

    def backward(self, dloss: Array, drouter_logits: None = None) -> LanguageModelParams:
        """Gradients of params; shares add to one another's in turn."""
        require_gradient("linear_cross_entropy", "dloss", dloss, self.dy, ())
        require_no_routers(drouter_logits)
        # Anew, since a cache may have been copied: addresses are of these parameters.
        params, whole = self.params, known_of(self.params, self.model)
        if whole.plan is None or self.model.embed is None:
            raise ValueError(f"language_model_loss: {whole.refusal}")
        dy = self.dy if dloss == 1 else self.dy * dloss
        sums = self.sums * dloss  # which stay as they are, whoever writes over gradients
        dhead, dnorm = _of_sums(whole, sums, params)
        embed: Any = params.embed
        (n_classes, d), length = embed.table.shape, self.ids.shape[1]
        dtable = dhead.w.T if params.head is None else np.zeros((n_classes, d), FLOAT32)
        learned = embed.positions
        dpositions = None if learned is None else np.zeros(learned.shape, FLOAT32)
        tiles, turns, interleaved, pad = self.how
        back = turns * np.array([1, -1], turns.dtype)[:, None, None, None]
        layout = layout_of(whole.plan, params.stack.blocks, self.size * length)
        memory, dblocks = memory_of(layout), list[Any]()
        stages = nothing_done(len(params.stack.blocks) + 1)
        given = (
            self.size,
            whole.plan.tables,
            (tiles, back, interleaved, pad),
            np.array(order_of(params.stack.blocks, self.model.blocks), np.int64),
            self.x,
            self.kept,
            layout.starts,
            dy,
            place(memory),
            layout.dmaps,
            layout.dnorms,
            layout.totals,
            np.empty(self.x.shape, FLOAT32),
            self.ids,
            dtable,
            _of_positions(dpositions, self.model, length, d),
        )

        def backward() -> None:
            with needed(stages):
                mine = scratch("dblock", (int(layout.totals[:, 1].max()),), FLOAT32)
                own = scratch("slopes", (int(layout.rooms[-1]),), FLOAT32)
                loops.backward(products(), *given, mine, own, layout.rooms[:-1], stages)
            if not dblocks:  # by whoever is ready first, and would wait
                dblocks.append(gradients(layout, memory))

        run([backward] * len(self.kept))
        return LanguageModelParams(
            EmbedParams(dtable, dpositions, None),
            StackParams(dblocks[0], dnorm, None),
            None if params.head is None else dhead,
        )


def known_of(params: LanguageModelParams, model: LanguageModel) -> Whole:
    """Found once of the same arrays: it takes Python long."""
    leaves: list[Any] = []
    gather(params, leaves)
    whole: Whole | None = _known.of(leaves)
    if whole is not None and (whole.model is model or whole.model == model):
        return whole
    try:
        whole = _found(params, model, leaves)
    except Unfit as unfit:
        whole = Whole(model, str(unfit))
    if all(x is None or isinstance(x, np.ndarray | Frozen) for x in leaves):
        _known.keep(leaves, whole)
    return whole


_known = Known()


def _found(params: LanguageModelParams, model: LanguageModel, leaves: list[Any]) -> Whole:
    """Unfit where the loops are not for such a model, or parameters are not its own."""
    embed, head, stack, d = model.embed, model.head, params.stack, model.d_model
    if embed is None or params.embed is None:
        raise Unfit("vectors in the place of tokens")
    plain = embed.positions == "none" or (embed.positions == "learned" and embed.mode == "add")
    if not plain or embed.scale != 1 or embed.n_types or embed.norm or embed.projects:
        raise Unfit("only a table of tokens and one of positions")
    if type(head) is not LMHead or head.softcap is not None or head.scale != 1:
        raise Unfit("only a head of a product and a bias")
    if head.tied is not (params.head is None):
        raise Unfit("a head of another kind")
    if embed.vocab_size >= LARGE:
        raise Unfit(f"NumPy's kernels are for {LARGE} classes and more")
    if model.alibi or model.relative or model.checkpoint or model.balance or model.router_z:
        raise Unfit("relative positions, checkpoints or losses of routers")
    if any(isinstance(x, Frozen) for x in leaves):
        raise Unfit("what is frozen has no gradient")
    if why := other_norms(stack.blocks, model.blocks):
        raise Unfit(why)
    n_blocks = len(model.blocks) if model.n_groups is None else model.n_groups
    ends = model.final_norm is not False
    if len(stack.blocks) != n_blocks or (stack.norm is not None) != ends:
        raise Unfit("a stack of another kind")
    require(params.embed.table, (embed.vocab_size, d))
    learned = embed.positions == "learned"
    if learned:
        require(params.embed.positions, (embed.rows, d))
    absent = params.embed[2:] if learned else params.embed[1:]
    if any(x is not None for x in (*absent, stack.memory, stack.relative)):
        raise Unfit("parameters that are not the model's")
    plan = remembered(stack.blocks, model.blocks)
    if plan.refusal is not None:
        raise Unfit(plan.refusal)
    if model.rotary is not None and model.rotary.width > min(k for _, k, _ in plan.heads):
        raise Unfit("rotary positions of another kind")
    *norm, eps, offset = norm_of(stack.norm, model.blocks[-1])
    numbers = np.array([eps, offset], np.float32)
    own = _head(params)
    row = np.array(map_of(own, d, embed.vocab_size), np.int64)
    spots = _spots(*own, *(stack.norm or (None, None)))
    norm_rows = np.array(norm, np.int64), numbers
    return Whole(model, None, plan, norm_rows, row, not is_sideways(own.w), spots)


def _head(params: LanguageModelParams) -> Any:
    """Of a tied one, the table on its side."""
    if params.head is None:
        return LinearParams(params.embed.table.T, None)  # type: ignore[union-attr]
    if not isinstance(params.head, LinearParams):
        raise Unfit("adapters")
    return params.head


def _of_positions(x: Array | None, model: LanguageModel, length: int, d: int) -> Array:
    """The rows of the first tokens, of a table or of its gradient; none where there is no table."""
    if x is None or model.embed is None:
        return np.empty((0, d), FLOAT32)
    first = model.embed.offset
    return np.require(x[first : first + length], None, PLAIN)


def _spots(*arrays: Array | None) -> tuple[tuple[int, int], ...]:
    """From where to where they would be, one behind the other."""
    ends = list(itertools.accumulate(0 if x is None else x.size for x in arrays))
    return tuple(itertools.pairwise([0, *ends]))


def _of_sums(
    whole: Whole, sums: Array, params: LanguageModelParams
) -> tuple[LinearParams, NormParams | None]:
    """Gradients of the head, whose weights lie as its own do, and of the final norm."""
    w, b = _head(params)
    dw, db, *dnorm = (sums[at:end] for at, end in whole.spots)
    dw = dw.reshape(w.shape) if whole.by_rows else dw.reshape(w.shape[::-1]).T
    dhead, norm = LinearParams(dw, None if b is None else db), params.stack.norm
    if norm is None:
        return dhead, None
    return dhead, NormParams(dnorm[0], None if norm.b is None else dnorm[1])
