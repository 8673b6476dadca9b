"""`language_model_loss`: a thread's share of a batch from tokens to losses in one call, and back.

For models of few classes, whose parts are small: between ops threads wait for each other's Python,
which finds nothing in a core's caches after loops that fill them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from xformer.backends.numba import language_model_loops as loops
from xformer.backends.numba.atomic import place
from xformer.backends.numba.blocks import tile_of_layer, turns_of
from xformer.backends.numba.compiled import PLAIN
from xformer.backends.numba.gemm import no_products, products
from xformer.backends.numba.language_model_plan import head_of, remembered_model
from xformer.backends.numba.linear_cross_entropy import LOGITS
from xformer.backends.numba.plan import require
from xformer.backends.numba.share import gradients_of
from xformer.backends.numba.share_layout import layout_of
from xformer.backends.numpy.blocks import require_no_routers, unparted
from xformer.backends.numpy.threads import lined, n_threads, run, scratch

from xformer import layers
from xformer.checks import finite, number, require_gradient, require_ids
from xformer.dispatch import keeps_nothing
from xformer.layers.embed import EmbedParams
from xformer.layers.linear import LinearParams
from xformer.layers.norm import NormParams
from xformer.layers.stack import StackParams
from xformer.models.language_model import LanguageModel, LanguageModelParams
from xformer.models.loss import LossCache
from xformer.ops.random_bits import Key
from xformer.typing import Array

FLOAT32 = np.dtype(np.float32)
OPTIONS = {"label_smoothing", "z_loss", "reduction", "ignore_index"}


def outside(
    tokens: Array,
    targets: Array,
    params: LanguageModelParams,
    *,
    model: LanguageModel,
    mask: Array | None = None,
    positions: Array | None = None,
    types: Array | None = None,
    dropout_key: Key | None = None,
    **options: Any,
) -> str | None:
    """Why the kernel cannot run."""
    if keeps_nothing():
        return "only for a backward"
    if not (mask is positions is types is None):
        return "a mask, positions or types of tokens"
    if dropout_key is not None and (not isinstance(dropout_key, Key) or _drops(model)):
        return "no dropout"
    if options.keys() - OPTIONS or options.get("ignore_index") is not None:
        return "no tokens that are ignored, nor options that it does not know"
    if options.get("reduction", "mean") not in ("mean", "sum"):
        return 'reduction "none" has a dloss for each token'
    given: Any = params
    if not isinstance(given, LanguageModelParams):
        return "parameters of another kind"
    plan = remembered_model(params, model)
    if plan.refusal is not None:
        return plan.refusal
    for ids in (tokens, targets):
        if type(ids) is not np.ndarray or ids.ndim != 2 or ids.dtype.kind not in "iu":
            return "only NumPy's own arrays of integers, for each token one target"
    if tokens.shape != targets.shape or tokens.size == 0:
        return "for each token one target, and at least one"
    if model.context is not None and tokens.shape[1] > model.context:
        return "more tokens than fit the context"
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
    dropout_key: Key | None = None,
    **options: Any,
) -> tuple[Array, LossCache]:
    """Shares of the texts, of each a row of what is kept."""
    a = number("cross_entropy", "label_smoothing", options.get("label_smoothing", 0.0), 0, 1)
    z = finite("cross_entropy", "z_loss", options.get("z_loss", 0.0))
    is_mean = options.get("reduction", "mean") == "mean"
    plan, embed = remembered_model(params, model), params.embed
    if plan.blocks is None or embed is None or model.embed is None:
        raise ValueError(f"language_model_loss: {plan.refusal}")
    (n_texts, length), (n_classes, d) = tokens.shape, _tables(embed, model)
    table = np.require(embed.table, None, PLAIN)
    tiles = [tile_of_layer(config, model.causal, length) for config in model.blocks]
    rotary = None
    if model.rotary is not None:
        rotary = layers.rotary(model.rotary, like=table, length=length)
    pad = np.empty((n_texts, 0), FLOAT32)
    how = np.array(tiles, np.int64), *turns_of(rotary, FLOAT32), pad
    size = -(-n_texts // n_threads())
    starts = layout_of(plan.blocks, params.stack.blocks, size * length).starts
    # Copies, which are checked, read, and written by in backward.
    ids, goals = np.array(tokens, np.int64, order="C"), np.array(targets, np.int64).reshape(-1)
    ids = require_ids("embedding", "ids", ids, n_classes, table)
    goals = require_ids("cross_entropy", "targets", goals, n_classes, table)
    x, y, dy = (lined((n_texts, length, d), FLOAT32) for _ in range(3))
    kept = lined((-(-n_texts // size), int(starts[-1, -1])), FLOAT32)
    weight = np.float32(1 / ids.size if is_mean else 1.0)
    embedding = ids, table, _of_positions(embed.positions, model, length, d), x
    top = *plan.norm, plan.head, np.array([a, z, weight], np.float32)
    losses = np.empty(ids.size, FLOAT32)
    sums = lined((len(kept), plan.spots[-1][1]), FLOAT32)

    def share(i: int) -> None:
        start = place(sums[i])
        dw, db, *norm = (start + 4 * at if at < end else 0 for at, end in plan.spots)
        places = np.array(norm), np.array([dw, plan.by_rows, db, False])
        shape = max(1, min(LOGITS // n_classes, size * length)), n_classes
        logits = scratch("logits", shape, FLOAT32)
        memory = *scratch("h", (2, size * length, d), FLOAT32), logits
        given = embedding, kept[i], starts, top, goals, y, losses, dy
        loops.forward(products(), i, size, plan.blocks.tables, how, *given, places, memory)

    run([partial(share, i) for i in range(len(kept))])
    total = sums[0] if len(sums) == 1 else np.add.reduce(sums, axis=0)
    loss = np.add.reduce(losses) * weight
    cache = SharesCache(params, model, how, size, ids, x, kept, dy, total, plan.by_rows)
    return loss, LossCache(cache, loss)


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
    by_rows: bool  # how those of the head's weights lie there

    def backward(self, dloss: Array, drouter_logits: None = None) -> LanguageModelParams:
        """Gradients of params; shares add to one another's in turn."""
        require_gradient("linear_cross_entropy", "dloss", dloss, self.dy, ())
        require_no_routers(drouter_logits)
        # Anew, since a cache may have been copied: addresses are of these parameters.
        params, plan = self.params, remembered_model(self.params, self.model)
        if plan.blocks is None or self.model.embed is None:
            raise ValueError(f"language_model_loss: {plan.refusal}")
        dy = self.dy if dloss == 1 else self.dy * dloss
        sums = self.sums * dloss  # which stay as they are, whoever writes over gradients
        dhead, dnorm = _of_sums(sums, plan.spots, self.by_rows, params)
        embed: Any = params.embed
        (n_classes, d), length = _tables(embed, self.model), self.ids.shape[1]
        dtable = dhead.w.T if params.head is None else np.zeros((n_classes, d), FLOAT32)
        learned = embed.positions
        dpositions = None if learned is None else np.zeros(learned.shape, FLOAT32)
        dx, rows = np.empty_like(self.x), _of_positions(dpositions, self.model, length, d)
        kept = plan.blocks, params.stack.blocks, self.how, self.size, self.x, self.kept
        dblocks = gradients_of(loops.backward, *kept, dy, (dx, self.ids, dtable, rows))
        return LanguageModelParams(
            EmbedParams(dtable, dpositions, None),
            StackParams(dblocks, dnorm, None),
            None if params.head is None else dhead,
        )


def _tables(embed: EmbedParams, model: LanguageModel) -> tuple[int, int]:
    """V and D; Unfit where the plan knew the tables in another shape."""
    config: Any = model.embed
    require(embed.table, (config.vocab_size, model.d_model))
    if embed.positions is not None:
        require(embed.positions, (config.rows, model.d_model))
    return config.vocab_size, model.d_model


def _of_positions(x: Array | None, model: LanguageModel, length: int, d: int) -> Array:
    """The rows of the first tokens, of a table or of its gradient; none where there is no table."""
    if x is None or model.embed is None:
        return np.empty((0, d), FLOAT32)
    first = model.embed.offset
    return np.require(x[first : first + length], None, PLAIN)


def _of_sums(
    sums: Array, spots: tuple[tuple[int, int], ...], by_rows: bool, params: LanguageModelParams
) -> tuple[LinearParams, NormParams | None]:
    """Gradients of the head and of the final norm, by where they are, and how the weights' lie."""
    w, b = head_of(params)
    dw, db, *dnorm = (sums[at:end] for at, end in spots)
    dw = dw.reshape(w.shape) if by_rows else dw.reshape(w.shape[::-1]).T
    dhead, norm = LinearParams(dw, None if b is None else db), params.stack.norm
    if norm is None:
        return dhead, None
    return dhead, NormParams(dnorm[0], None if norm.b is None else dnorm[1])
