"""What is known of a language model and its parameters, for `language_model`."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
from xformer.backends.numba.known import Known, gather
from xformer.backends.numba.plan import Unfit, map_of, norm_of, remembered, require
from xformer.backends.numba.share import other_norms
from xformer.backends.numba.share_layout import is_sideways
from xformer.backends.numpy.linear_cross_entropy import LARGE

from xformer.layers.linear import LinearParams
from xformer.models.language_model import LanguageModel, LanguageModelParams
from xformer.models.lm_head import LMHead
from xformer.tree import Frozen
from xformer.typing import Array


class ModelPlan(NamedTuple):
    """Of a model and its parameters, as loops read what stands around its blocks."""

    model: LanguageModel
    refusal: str | None  # why there is nothing
    blocks: Any = None  # their plan
    norm: tuple[Array, ...] = ()  # the final one's row and numbers, as the plan has them
    head: Array | None = None  # its row of maps
    by_rows: bool = True  # how the gradient of its weights lies
    spots: tuple[tuple[int, int], ...] = ()  # from where to where those of its w and b, and of the
    # final norm's w and b, are among `sums`


def remembered_model(params: LanguageModelParams, model: LanguageModel) -> ModelPlan:
    """Found once of the same arrays: it takes Python long."""
    leaves: list[Any] = []
    gather(params, leaves)
    plan: ModelPlan | None = _known.of(leaves)
    if plan is not None and (plan.model is model or plan.model == model):
        return plan
    try:
        plan = _found(params, model, leaves)
    except Unfit as unfit:
        plan = ModelPlan(model, str(unfit))
    if all(x is None or isinstance(x, np.ndarray | Frozen) for x in leaves):
        _known.keep(leaves, plan)
    return plan


_known = Known()


def _found(params: LanguageModelParams, model: LanguageModel, leaves: list[Any]) -> ModelPlan:
    """Unfit where the loops are not for such a model, or parameters are not its own."""
    embed, head, stack, d = model.embed, params.head, params.stack, model.d_model
    if why := other_model(model) or other_norms(stack.blocks, model.blocks):
        raise Unfit(why)
    if embed is None or params.embed is None:
        raise Unfit("no table of tokens")
    if any(isinstance(x, Frozen) for x in leaves):
        raise Unfit("what is frozen has no gradient")
    n_blocks = len(model.blocks) if model.n_groups is None else model.n_groups
    if len(stack.blocks) != n_blocks or (stack.norm is None) != (model.final_norm is False):
        raise Unfit("a stack of another kind")
    tied = isinstance(model.head, LMHead) and model.head.tied
    if not isinstance(head, LinearParams | None) or (head is None) != tied:
        raise Unfit("a head of another kind")
    require(params.embed.table, (embed.vocab_size, d))
    learned = embed.positions == "learned"
    if learned:
        require(params.embed.positions, (embed.rows, d))
    absent = params.embed[2:] if learned else params.embed[1:]
    if any(x is not None for x in (*absent, stack.memory, stack.relative)):
        raise Unfit("parameters that are not the model's")
    blocks = remembered(stack.blocks, model.blocks)
    if blocks.refusal is not None:
        raise Unfit(blocks.refusal)
    if model.rotary is not None and model.rotary.width > min(k for _, k, _ in blocks.heads):
        raise Unfit("rotary positions of another kind")
    *norm, eps, offset = norm_of(stack.norm, model.blocks[-1])
    numbers = np.array([eps, offset], np.float32)
    own = head_of(params)
    row = np.array(map_of(own, d, embed.vocab_size), np.int64)
    spots = _spots(*own, *(stack.norm or (None, None)))
    norm_rows = np.array(norm, np.int64), numbers
    return ModelPlan(model, None, blocks, norm_rows, row, not is_sideways(own.w), spots)


def other_model(model: LanguageModel) -> str | None:
    """Why the loops have not what stands around its blocks."""
    embed, head = model.embed, model.head
    if type(model) is not LanguageModel:
        return "a model of another kind"
    if embed is None:
        return "vectors in the place of tokens"
    plain = embed.positions == "none" or (embed.positions == "learned" and embed.mode == "add")
    if not plain or embed.scale != 1 or embed.n_types or embed.norm or embed.projects:
        return "only a table of tokens and one of positions"
    if type(head) is not LMHead or head.softcap is not None or head.scale != 1:
        return "only a head of a product and a bias"
    if embed.vocab_size >= LARGE:
        return f"NumPy's kernels are for {LARGE} classes and more"
    if model.alibi or model.relative or model.checkpoint or model.balance or model.router_z:
        return "relative positions, checkpoints or losses of routers"
    return None


def head_of(params: LanguageModelParams) -> LinearParams:
    """Of a tied one, the table on its side."""
    embed: Any = params.embed
    head: LinearParams | None = params.head
    return LinearParams(embed.table.T, None) if head is None else head


def _spots(*arrays: Array | None) -> tuple[tuple[int, int], ...]:
    """From where to where they would be, one behind the other."""
    ends = list(itertools.accumulate(0 if x is None else x.size for x in arrays))
    return tuple(itertools.pairwise([0, *ends]))
