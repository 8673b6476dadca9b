"""Matching of the tensors in a model's files to parameters, under all names that files use."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from xformer.base import tree
from xformer.base.choices import did_you_mean
from xformer.initializers import Shapes
from xformer.pretrained import files
from xformer.pretrained.family import Family
from xformer.pretrained.names import Link
from xformer.pretrained.reading import PretrainedError, listed

LAYER_NORM = (  # (name, name in old files)
    ("LayerNorm.weight", "LayerNorm.gamma"),
    ("LayerNorm.bias", "LayerNorm.beta"),
)


def head_of(family: Family, config: Mapping[str, Any], where: str) -> str:
    """The head of the model that the configuration names, as in `Family.heads`.

    PretrainedError unless it names one architecture of the family.
    """
    names = config.get("architectures")
    if not family.heads and names is None:
        return "hidden"
    if not isinstance(names, list) or len(names) != 1 or names[0] not in family.heads:
        wanted = ", ".join(family.heads)
        one = names[0] if isinstance(names, list) and len(names) == 1 else None
        raise PretrainedError(
            f"{where}: architectures must be one of {wanted}, got {names!r:.100}"
            f"{did_you_mean(one, family.heads)}"
        )
    return family.heads[names[0]]


def n_own_layers(model: Any) -> int:
    """The number of layers that have their own tensors; 0 if layers share them."""
    if getattr(model, "n_shared_layer_groups", None) is not None:
        return 0
    return len(model.blocks)


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each parameter."""
    return {name: leaf.shape for name, leaf in tree.flatten(model.init_from(Shapes())).items()}


def links_for(
    family: Family,
    model: Any,
    like: Mapping[str, Any],
    bare: bool,
    is_there: Callable[[str], bool] = lambda name: False,
) -> Iterator[Link]:
    """The links whose leaves the model has.

    like: the parameters by name.
    bare: the model has no head, so names in its file have no prefix.
    is_there: whether a file has a tensor. If a file has all tensors of a link under the names that
        transformers 5 uses in memory, these names are used.
    """

    def named(links: Iterable[Link]) -> Iterator[Link]:
        for link in links:
            if all(name in like for name in link.ours):
                prefix = family.prefix if bare else ""
                theirs = tuple(name.removeprefix(prefix) for name in link.theirs)
                yield link._replace(theirs=theirs)

    covered: set[str] = set()
    for link in named(family.in_memory(model)):
        if all(is_there(name) for name in link.theirs):
            covered.update(link.ours)
            yield link
    for link in named(family.links(model)):
        if not covered.issuperset(link.ours):
            covered.update(link.ours)
            yield link
    if missing := like.keys() - covered:
        raise AssertionError(f"no link for {listed(missing)}: the family's links are incomplete")


def matched_links(
    family: Family,
    model: Any,
    tensors: files.Tensors,
    where: str,
    of_other_heads: Callable[[], Collection[str]] = tuple,
) -> list[tuple[Link, list[str]]]:
    """The links, each with the names of its tensors in the files.

    of_other_heads: returns names of tensors that may be in the files too. They are left out, with a
        warning.

    PretrainedError lists the tensors that are missing, misshapen or unexpected.
    """
    if (n_layers := n_own_layers(model)) > len(tensors):
        raise PretrainedError(
            f"{where}: config.json describes {n_layers} layers, and the files hold "
            f"{len(tensors)} tensors"
        )
    like = shapes_of(model)
    names = _Names(family, tensors, where)
    matched: list[tuple[Link, list[str]]] = []
    missing, misshapen = [], []
    bare = head_of(family, model.hf_config, where) == "hidden"
    for link in links_for(family, model, like, bare, names.is_there):
        spellings = {name: names.find(name) for name in link.theirs}
        for name, shape in link.shapes(like).items():
            spelling = spellings[name]
            if spelling is None:
                missing.append(names.used.get(name, name))  # it was used for the one it repeats
            elif (got := tensors[spelling].shape) != shape:
                misshapen.append(f"{spelling} (wanted {shape}, got {got})")
        matched.append((link, [name for name in spellings.values() if name is not None]))
        if len(missing) > 2 * len(tensors) + 1000:
            break  # for a configuration of millions of experts the message has enough names
    unexpected, unused = names.unexpected(of_other_heads)
    parts = (("missing", missing), ("misshapen", misshapen), ("unexpected", unexpected))
    if what := "; ".join(f"{len(names)} {word}: {listed(names)}" for word, names in parts if names):
        raise PretrainedError(f"{where}: tensors are not those that config.json describes: {what}")
    if unused:
        message = f"{where}: parameters that the model does not use are left out: {listed(unused)}"
        warnings.warn(message, stacklevel=5)
    return matched


class _Names:
    """The names of the tensors in the files, with the spellings of older versions."""

    def __init__(self, family: Family, tensors: files.Tensors, where: str) -> None:
        self.family, self.tensors, self.where = family, tensors, where
        self.used: dict[str, str] = {}  # name in the files -> current name
        self.repeated: dict[str, list[str]] = {}
        for name, of in family.tied.items():
            self.repeated.setdefault(of, []).append(name)

    def find(self, name: str) -> str | None:
        """The name in the files of the tensor whose current name is `name`; None if missing."""
        for spelled in self._spellings(name):
            if spelled in self.tensors and spelled not in self.used:
                self.used[spelled] = name
                return spelled
        return None

    def is_there(self, name: str) -> bool:
        """Whether the files have the tensor `name`, under any spelling."""
        return any(spelled in self.tensors for spelled in self._spellings(name))

    def _spellings(self, name: str) -> Iterator[str]:
        prefix = self.family.prefix
        full = name if name.startswith(prefix) else prefix + name
        # Tensors without the prefix are repeated under their plain name: the bias of a masked LM.
        repeated = {*self.repeated.get(name, ()), *self.repeated.get(full, ())}
        for same in (name, *sorted(repeated)):
            yield same
            # The file may be of a base model although the model has a head, or vice versa.
            other = same.removeprefix(prefix)
            yield other if other != same else prefix + same
        for new, old in LAYER_NORM:
            if name.endswith(new):
                yield from self._spellings(name.removesuffix(new) + old)

    def unexpected(
        self, of_other_heads: Callable[[], Collection[str]]
    ) -> tuple[list[str], list[str]]:
        """(names that should not be there, names to leave out), of those that no link uses.

        Buffers and exact repetitions of other tensors are in neither. If one name should not be
        there, none is left out.
        """
        unmatched = [name for name in self.tensors if name not in self.used]
        unmatched = [name for name in unmatched if not self._is_repetition(name)]
        unmatched = [
            n for n in unmatched if not any(re.fullmatch(p, n) for p in self.family.buffers)
        ]
        unused = [n for n in unmatched if any(re.fullmatch(p, n) for p in self.family.unused)]
        if len(unused) < len(unmatched):
            others = {self._plain(name) for name in of_other_heads()}
            unused += [n for n in unmatched if n not in unused and self._plain(n) in others]
        return ([], unused) if len(unused) == len(unmatched) else (unmatched, [])

    def _plain(self, name: str) -> str:
        """The current name without the prefix."""
        for new, old in LAYER_NORM:
            name = name.removesuffix(old) + new if name.endswith(old) else name
        return name.removeprefix(self.family.prefix)

    def _is_repetition(self, name: str) -> bool:
        prefix = self.family.prefix
        of = self.family.tied.get(name, self.family.tied.get(prefix + name))
        if of is None:
            return False
        original = of if of in self.tensors else of.removeprefix(prefix)
        return original in self.tensors and self.tensors[name].equals(self.tensors[original])
