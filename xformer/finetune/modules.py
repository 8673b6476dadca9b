"""Adapters of transformers' modules and of xformer's linear layers.

Most modules are one linear layer. In GPT-2 and GPT-NeoX, queries, keys and values are one module.
Three adapters become one adapter of that module, whose rank is the sum of theirs:

    x [a_q a_k a_v] [b_q  .   .  ]
                    [ .  b_k  .  ]
                    [ .   .  b_v ]

Reading splits it by rows: a row that is zero for one of the three is not a part of its adapter. An
adapter that PEFT trained has no such zeros. It becomes three adapters of the same rank with equal
a, which are written as one adapter while they are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.finetune.lora import linear_maps
from xformer.pretrained.loading import links_of
from xformer.pretrained.names import Link


class Adapter(NamedTuple):
    """An adapter on the host, in xformer's layout: y = x w + scale * (x a) b."""

    a: np.ndarray  # (I, R)
    b: np.ndarray  # (R, O)
    scale: float


def modules(model: Any, params: Any, *, in_memory: bool = True) -> dict[str, Link]:
    """The modules of transformers that are linear layers here: name -> link of the weights.

    in_memory: names as in transformers' memory; False: as in its files
    """
    ours = set(linear_maps(params))
    by_name: dict[str, Link] = {}
    for link in links_of(model, in_memory=in_memory):
        name = link.theirs[0].removesuffix(".weight")
        if len(link.theirs) == 1 and name != link.theirs[0] and ours.issuperset(maps(link)):
            by_name[name] = link
    return by_name


def maps(link: Link) -> list[str]:
    """The names of the linear layers of a link."""
    return [leaf.removesuffix(".w") for leaf in link.ours]


def joined(link: Link, parts: Sequence[Adapter | None], widths: Sequence[int]) -> Adapter:
    """The adapter of a module, from the adapters of its linear layers.

    parts: the adapter of each layer, or None
    widths: O of each layer
    """
    present = [part for part in parts if part is not None]
    a, _, scale = present[0]
    shared = len(present) == len(parts) and all(
        part.scale == scale and np.array_equal(part.a, a) for part in present
    )
    if not shared:
        a = np.concatenate([part.a for part in present], axis=1)
    blocks, start = [], 0
    for part, width in zip(parts, widths, strict=True):
        block = np.zeros((a.shape[1], width), a.dtype)
        if part is not None:
            scaled = part.b if part.scale == scale else part.b * (part.scale / scale)
            block[start : start + len(scaled)] = scaled
            start += 0 if shared else len(scaled)
        blocks.append(block)
    (b,) = link._replace(flip=False).write(blocks).values()
    return Adapter(a, b, scale)


def split(link: Link, adapter: Adapter) -> dict[str, Adapter]:
    """The adapter of one module of transformers as adapters of our linear layers, by their names.

    link: which linear layers the module holds, such as q, k and v in GPT-2. A layer gets the rank's
    rows of b that are not 0 for it, with their columns of a. Rows that are 0 for all layers go to
    all of them. A layer without rows is left out.
    """
    a, b, scale = adapter
    parts: Mapping[str, np.ndarray] = link._replace(flip=False).read([b])
    if len(parts) == 1:
        return {maps(link)[0]: adapter}
    used = {name: part.any(axis=1) for name, part in parts.items()}  # (R,)
    unused = ~np.logical_or.reduce(list(used.values()))  # zero before training: part of all three
    adapters: dict[str, Adapter] = {}
    for name, part in parts.items():
        rows = used[name] | unused
        if rows.any():
            adapters[name.removesuffix(".w")] = Adapter(a[:, rows], part[rows], scale)
    return adapters
