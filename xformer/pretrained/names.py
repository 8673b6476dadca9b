"""Links between the tensors of a file and the parameters of a model: names and layouts.

    linear("model.layers.0.self_attn.q_proj", "stack.blocks.0.attn.q")

says that `...q_proj.weight`, (O, I) in the file, is the transposed leaf `...attn.q.w`. If the model
has a bias, `...q_proj.bias` is the leaf `...attn.q.b`. A family lists the links for all parameters
that its models can have. Links to leaves that a model lacks are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]
Arrays = dict[str, np.ndarray]


class Link(NamedTuple):
    """A link between one tensor and one leaf, one tensor and several, or several and one leaf.

    theirs: names of tensors.
    ours: dotted names of leaves. The tensor has several leaves (queries, keys, values) side by side
        along their last axis, within each of its `groups` equal parts.
    flip: the last two axes are exchanged.
    stack: there is one tensor for each row of one leaf (experts), even if there is only one row.
    shares: integers that are proportional to the widths of several leaves; (): they are equal.
    depthwise: the tensor is (C, 1, L), of torch's `nn.Conv1d` with C groups, and the leaf (L, C).
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    flip: bool = False
    groups: int = 1
    stack: bool = False
    shares: tuple[int, ...] = ()
    depthwise: bool = False

    def shapes(self, leaves: Mapping[str, Shape]) -> dict[str, Shape]:
        """Name -> shape of each tensor, from the shapes of the leaves."""
        shape = leaves[self.ours[0]]
        if self.stack:
            shape = shape[1:]
        if len(self.ours) > 1:
            shape = (*shape[:-1], sum(leaves[name][-1] for name in self.ours))
        if self.flip:
            shape = (*shape[:-2], shape[-1], shape[-2])
        if self.depthwise:
            shape = (shape[1], 1, shape[0])
        return dict.fromkeys(self.theirs, shape)

    def read(self, tensors: list[np.ndarray]) -> Arrays:
        """The leaves by name, as views if possible."""
        if self.depthwise:
            return {self.ours[0]: tensors[0][:, 0].T}
        flipped = [t.swapaxes(-1, -2) if self.flip else t for t in tensors]
        if self.stack:
            return {self.ours[0]: np.stack(flipped)}
        if len(self.ours) == 1:
            return {self.ours[0]: flipped[0]}
        lead = flipped[0].shape[:-1]
        grouped = flipped[0].reshape(*lead, self.groups, -1)
        ends = np.cumsum(self.shares or (1,) * len(self.ours))
        ends = ends * grouped.shape[-1] // ends[-1]
        parts = np.split(grouped, ends[:-1], axis=-1)
        return {name: a.reshape(*lead, -1) for name, a in zip(self.ours, parts, strict=True)}

    def write(self, leaves: list[np.ndarray]) -> Arrays:
        """The tensors by name, as views if possible: the inverse of `read`."""
        if self.depthwise:
            return {self.theirs[0]: leaves[0].T[:, None]}
        if self.stack:
            tensors = list(leaves[0])
        elif len(self.ours) == 1:
            tensors = leaves
        else:
            lead = leaves[0].shape[:-1]
            grouped = [leaf.reshape(*lead, self.groups, -1) for leaf in leaves]
            tensors = [np.concatenate(grouped, axis=-1).reshape(*lead, -1)]
        flipped = [t.swapaxes(-1, -2) if self.flip else t for t in tensors]
        return dict(zip(self.theirs, flipped, strict=True))


Links = Iterator[Link]


def same(theirs: str, ours: str) -> Links:
    """The link of a tensor to a leaf of the same layout."""
    yield Link((theirs,), (ours,))


def linear(theirs: str, ours: str, *, flip: bool = True) -> Links:
    """The links of a linear map.

    flip: the file has (O, I), as torch's `nn.Linear`, and not (I, O), as GPT-2's `Conv1D`.
    """
    yield Link((f"{theirs}.weight",), (f"{ours}.w",), flip)
    yield Link((f"{theirs}.bias",), (f"{ours}.b",))


def norm(theirs: str, ours: str) -> Links:
    """The links of a norm."""
    yield Link((f"{theirs}.weight",), (f"{ours}.w",))
    yield Link((f"{theirs}.bias",), (f"{ours}.b",))


def attention(theirs: str, ours: str, q: str, k: str, v: str, o: str) -> Links:
    """The links of the four linear maps of attention. q, k, v, o: their names under `theirs`."""
    for name, leaf in ((q, "q"), (k, "kv.k"), (v, "kv.v"), (o, "o")):
        yield from linear(f"{theirs}.{name}", f"{ours}.{leaf}")


def fused(
    weight: str,
    bias: str,
    ours: str,
    *,
    flip: bool = True,
    groups: int = 1,
    shares: tuple[int, ...] = (),
) -> Links:
    """The links of one linear map for queries, keys and values.

    groups: of heads; the file has queries, keys and values of a group side by side.
    shares: numbers of their heads; (): they are equal.
    """
    leaves = [f"{ours}.{leaf}" for leaf in ("q", "kv.k", "kv.v")]
    yield Link((weight,), tuple(f"{leaf}.w" for leaf in leaves), flip, groups, shares=shares)
    yield Link((bias,), tuple(f"{leaf}.b" for leaf in leaves), groups=groups, shares=shares)


def experts(theirs: list[str], ours: str) -> Links:
    """The link of the experts' linear maps, without biases, to one leaf (E, I, O)."""
    yield Link(tuple(f"{name}.weight" for name in theirs), (ours,), flip=True, stack=True)
