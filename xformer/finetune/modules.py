"""The modules of transformers' models and our linear maps, where adapters are concerned.

Most modules are one linear map. The queries, keys and values of GPT-2 and GPT-NeoX are one module,
whose adapter of three is, with ranks that add up,

    x [a_q a_k a_v] [b_q  .   .  ]
                    [ .  b_k  .  ]
                    [ .   .  b_v ]

It is read back row by row: what is zero for one of the three is no part of its adapter. A trained
adapter of PEFT's own has no such zeros and becomes three of its rank with equal a, which are
written as the one that they were as long as they are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.finetune.lora import linear_maps
from xformer.pretrained.loading import links_of
from xformer.pretrained.names import Link


class Adapter(NamedTuple):
    """An adapter on the host, in our layout: y = x w + scale * (x a) b."""

    a: np.ndarray  # (I, R)
    b: np.ndarray  # (R, O)
    scale: float


def modules(model: Any, params: Any, *, in_memory: bool = True) -> dict[str, Link]:
    """transformers' modules that are linear maps of ours: name -> link of the weights.

    in_memory: by the names that transformers has in memory, not in files.
    """
    ours = set(linear_maps(params))
    found: dict[str, Link] = {}
    for link in links_of(model, in_memory=in_memory):
        name = link.theirs[0].removesuffix(".weight")
        if len(link.theirs) == 1 and name != link.theirs[0] and ours.issuperset(maps(link)):
            found[name] = link
    return found


def maps(link: Link) -> list[str]:
    """Names of the linear maps whose weights a link is about."""
    return [leaf.removesuffix(".w") for leaf in link.ours]


def joined(link: Link, parts: Sequence[Adapter | None], widths: Sequence[int]) -> Adapter:
    """The adapter of a module from those of its linear maps, of these widths O; None: without."""
    there = [part for part in parts if part is not None]
    a, _, scale = there[0]
    shared = len(there) == len(parts) and all(
        part.scale == scale and np.array_equal(part.a, a) for part in there
    )
    if not shared:
        a = np.concatenate([part.a for part in there], axis=1)
    blocks, start = [], 0
    for part, width in zip(parts, widths, strict=True):
        block = np.zeros((a.shape[1], width), a.dtype)
        if part is not None:
            own = part.b if part.scale == scale else part.b * (part.scale / scale)
            block[start : start + len(own)] = own
            start += 0 if shared else len(own)
        blocks.append(block)
    (b,) = link._replace(flip=False).write(blocks).values()
    return Adapter(a, b, scale)


def split(link: Link, adapter: Adapter) -> dict[str, Adapter]:
    """The adapters of linear maps from that of their module: the inverse of `joined`."""
    a, b, scale = adapter
    parts: Mapping[str, np.ndarray] = link._replace(flip=False).read([b])
    if len(parts) == 1:
        return {maps(link)[0]: adapter}
    used = {name: part.any(axis=1) for name, part in parts.items()}  # (R,)
    unused = ~np.logical_or.reduce(list(used.values()))  # as before training: of all three
    found: dict[str, Adapter] = {}
    for name, part in parts.items():
        own = used[name] | unused
        if own.any():
            found[name.removesuffix(".w")] = Adapter(a[:, own], part[own], scale)
    return found
