"""How the tensors of a file stand for the parameters of a model: names, and layouts.

    linear("model.layers.0.self_attn.q_proj", "stack.blocks.0.attn.q")

says that `...q_proj.weight`, (O, I) in the file, is the transposed leaf `...attn.q.w`, and
`...q_proj.bias` the leaf `...attn.q.b`, where the model has one. A family lists such links for all
that its models may have; those whose leaves a model does not have are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]
Arrays = dict[str, np.ndarray]


class Link(NamedTuple):
    """One tensor and one leaf; or one tensor that is several leaves; or several that are one leaf.

    theirs: names of tensors   ours: dotted names of leaves. flip: the last two axes change places.
    One tensor for several leaves (queries, keys, values), all equally wide: side by side along the
    last axis of ours, within each of `groups` equal parts of it. stack: one tensor for each row of
    one leaf (experts), be it a single one.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    flip: bool = False
    groups: int = 1
    stack: bool = False

    def shapes(self, leaves: Mapping[str, Shape]) -> dict[str, Shape]:
        """Shapes of the tensors, from those of the leaves."""
        shape = leaves[self.ours[0]]
        if self.stack:
            shape = shape[1:]
        if len(self.ours) > 1:
            shape = (*shape[:-1], len(self.ours) * shape[-1])
        if self.flip:
            shape = (*shape[:-2], shape[-1], shape[-2])
        return dict.fromkeys(self.theirs, shape)

    def read(self, tensors: list[np.ndarray]) -> Arrays:
        """The leaves, as views where that can be."""
        own = [t.swapaxes(-1, -2) if self.flip else t for t in tensors]
        if self.stack:
            return {self.ours[0]: np.stack(own)}
        if len(self.ours) == 1:
            return {self.ours[0]: own[0]}
        n, *lead = len(self.ours), *own[0].shape[:-1]
        if self.groups == 1:
            parts = np.split(own[0], n, axis=-1)
        else:
            grouped = own[0].reshape(*lead, self.groups, n, -1)
            parts = [grouped[..., i, :].reshape(*lead, -1) for i in range(n)]
        return dict(zip(self.ours, parts, strict=True))

    def write(self, leaves: list[np.ndarray]) -> Arrays:
        """The tensors, as views where that can be: the inverse of `read`."""
        if self.stack:
            tensors = list(leaves[0])
        elif len(self.ours) == 1:
            tensors = leaves
        else:
            lead = leaves[0].shape[:-1]
            grouped = [leaf.reshape(*lead, self.groups, 1, -1) for leaf in leaves]
            tensors = [np.concatenate(grouped, axis=-2).reshape(*lead, -1)]
        own = [t.swapaxes(-1, -2) if self.flip else t for t in tensors]
        return dict(zip(self.theirs, own, strict=True))


Links = Iterator[Link]


def same(theirs: str, ours: str) -> Links:
    """A tensor that is a leaf."""
    yield Link((theirs,), (ours,))


def linear(theirs: str, ours: str, *, flip: bool = True) -> Links:
    """A linear map; flip: torch's `nn.Linear` has (O, I), GPT-2's `Conv1D` has not."""
    yield Link((f"{theirs}.weight",), (f"{ours}.w",), flip)
    yield Link((f"{theirs}.bias",), (f"{ours}.b",))


def norm(theirs: str, ours: str) -> Links:
    """A normalisation."""
    yield Link((f"{theirs}.weight",), (f"{ours}.w",))
    yield Link((f"{theirs}.bias",), (f"{ours}.b",))


def attention(theirs: str, ours: str, q: str, k: str, v: str, o: str) -> Links:
    """Four linear maps under a common name."""
    for name, leaf in ((q, "q"), (k, "kv.k"), (v, "kv.v"), (o, "o")):
        yield from linear(f"{theirs}.{name}", f"{ours}.{leaf}")


def fused(weight: str, bias: str, ours: str, *, flip: bool = True, groups: int = 1) -> Links:
    """Queries, keys and values in one linear map; groups: of heads, each with its own three."""
    leaves = [f"{ours}.{leaf}" for leaf in ("q", "kv.k", "kv.v")]
    yield Link((weight,), tuple(f"{leaf}.w" for leaf in leaves), flip, groups)
    yield Link((bias,), tuple(f"{leaf}.b" for leaf in leaves), groups=groups)


def experts(theirs: list[str], ours: str) -> Links:
    """One linear map of each expert, without biases, in one leaf (E, I, O)."""
    yield Link(tuple(f"{name}.weight" for name in theirs), (ours,), flip=True, stack=True)
