"""Which parameters are cut among the processes of a tensor-parallel model, and along which axis."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.tree import Frozen, value
from xformer.base.typing import Tree
from xformer.distributed.partition import joined, own_part
from xformer.distributed.world import World

WHOLE = "whole"  # every process has it, and uses it as the others do
COPIED = "copied"  # every process has it, and uses it for its own heads or hidden units
FIRST = "first"  # only process 0 has it: a bias that is added to a sum over all processes
Cut = int | str  # an axis that is cut, or one of these words

# By the dotted name of a parameter, with a dot before it. The first pattern that matches counts.
CUTS: dict[str, Cut] = {
    # Heads: columns of the projections to them, rows of the projection from them.
    "*.q.w": 1,
    "*.q.b": 0,
    "*.kv.k.w": 1,
    "*.kv.k.b": 0,
    "*.kv.v.w": 1,
    "*.kv.v.b": 0,
    "*.o.w": 0,
    "*.o.b": FIRST,
    "*.sinks": 0,
    "*.relative_bias": 1,
    "*.xl.r.w": 1,
    "*.xl.content_bias": 0,
    "*.xl.position_bias": 0,
    "*.q_norm.*": COPIED,
    "*.k_norm.*": COPIED,
    "*.shaw.*": COPIED,
    # Hidden units: columns of the layers to them, rows of the layer from them.
    "*.up.w": 1,
    "*.up.b": 0,
    "*.gate.w": 1,
    "*.gate.b": 0,
    "*.down.w": 0,
    "*.down.b": FIRST,
    # The same of each expert.
    "*.up": 2,
    "*.gate": 2,
    "*.down": 1,
    "*.router": COPIED,
    "*.gate_bias": 1,
    "*.up_bias": 1,
    "*.down_bias": FIRST,
    "*.router_bias": COPIED,
    "*.shared_gate": COPIED,
    "*.correction": COPIED,
    # The vocabulary: rows of the table, columns of an untied head.
    "*embed.table": 0,
    "*.head.w": 1,
    "*.head.b": 0,
    # What is outside the sublayers.
    "*embed.*": WHOLE,
    "*norm.*": WHOLE,
    "*_scale": WHOLE,
    "*.head.*": WHOLE,
}

# Rules that come before these: of one head of keys and values, and of a head over other labels.
# No pattern may also be one of CUTS: in `ONE_KEY_HEAD | CUTS` it would have the value of CUTS.
ONE_KEY_HEAD: dict[str, Cut] = {"*.kv.*": COPIED, "*.xl.r.*": COPIED}
LABELS: dict[str, Cut] = {"*.head.*": WHOLE}


def cut_of(name: str, cuts: Mapping[str, Cut] = CUTS) -> Cut:
    """The axis at which the parameter of this name is cut, or "whole", "copied" or "first".

    ValueError for a name that no pattern matches: to have it on every process could be wrong.
    """
    for pattern, cut in cuts.items():
        if fnmatchcase(f".{name}", pattern):
            return cut
    raise ValueError(f"shard: no rule says how to cut the parameter {name}")


def shard(params: Tree, world: World, cuts: Mapping[str, Cut] = CUTS) -> Tree:
    """This process's part of `params`: copies of its parts, and the leaves that are not cut.

    Of an optimiser state too: the names of its leaves end as those of the parameters do.

    ValueError for a parameter that no pattern of `cuts` matches, such as one of an adapter.
    """

    def own(name: str, leaf: Any) -> Any:
        cut = _cut(name, leaf, cuts)
        if cut == FIRST:
            return leaf if world.rank == 0 else None
        if not isinstance(cut, int):
            return leaf
        x = value(leaf)
        return _frozen_as(leaf, array_namespace(x).asarray(own_part(x, cut, world), copy=True))

    leaves = tree.flatten(params)
    return tree.unflatten(params, {name: own(name, leaf) for name, leaf in leaves.items()})


def whole(params: Tree, world: World, cuts: Mapping[str, Cut] = CUTS) -> Tree:
    """The inverse of `shard`: what all processes have together, on each of them."""
    like = world.broadcast(tree.map(lambda _: 0, params))  # process 0 has every leaf
    own = tree.flatten(params)

    def all_of(name: str) -> Any:
        leaf = own.get(name)
        cut = _cut(name, leaf, cuts)
        if cut == FIRST:
            return world.broadcast(leaf)
        if not isinstance(cut, int):
            return leaf
        return _frozen_as(leaf, joined(value(leaf), cut, world))

    return tree.unflatten(like, {name: all_of(name) for name in tree.flatten(like)})


def _cut(name: str, leaf: Any, cuts: Mapping[str, Cut]) -> Cut:
    is_number = leaf is not None and not getattr(value(leaf), "shape", ())
    return WHOLE if is_number else cut_of(name, cuts)  # a number: of an optimiser state


def _frozen_as(leaf: Any, x: Any) -> Any:
    return Frozen(x) if isinstance(leaf, Frozen) else x
