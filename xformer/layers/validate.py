"""Whether the parameters of blocks fit their configurations."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from xformer.base.tree import value
from xformer.initializers import Shape, Shapes
from xformer.layers.block import BlockConfig, BlockParams
from xformer.layers.linear import LoRAParams


def require_blocks(
    op: str,
    name: str,
    params: Sequence[BlockParams],
    configs: Sequence[BlockConfig],
    *,
    cross: bool = False,
    shared_memory: bool = False,
) -> None:
    """ValueError unless each block has the parts and shapes that its config would initialise.

    A `LoRAParams` fits if its base does; a frozen array is checked like another one.

    name: names params in the message, such as "params.stack.blocks"
    configs: one for each layer; equal runs of layers share a block
    cross, shared_memory: of `BlockConfig.init`
    """
    run, config = len(configs) // len(params), None
    for i, block in enumerate(params):
        if configs[i * run] is not config:
            config = configs[i * run]
            wanted = _wanted(config, cross, shared_memory)
        try:
            if wanted.form_of(block) == wanted.form:
                continue
        except AttributeError:  # a part is missing, frozen or has an adapter
            pass
        if misfit := _misfit(block, wanted.params):
            raise ValueError(f"{op}: {name}.{i}{misfit}")


class _Wanted(NamedTuple):
    """The parameters that fit a configuration, with a `Shape` for each array.

    form_of(params) is a tuple of classes and shapes: one call instead of a walk in Python,
    which takes ten times as long. For these parameters it is `form`.
    """

    params: Any
    form_of: attrgetter[tuple[Any, ...]]
    form: tuple[Any, ...]


@functools.lru_cache(maxsize=256)
def _wanted(config: BlockConfig, cross: bool, shared_memory: bool) -> _Wanted:
    shapes: Any = Shapes()
    params = config.init(shapes, cross=cross, shared_memory=shared_memory)
    form_of = attrgetter(*_paths("", params))
    return _Wanted(params, form_of, form_of(params))


def _paths(name: str, node: Any) -> Iterator[str]:
    """The dotted names of the shape of each leaf, and of the class of each other node."""
    path = f"{name}." if name else ""
    yield f"{path}shape" if isinstance(node, Shape) else f"{path}__class__"
    if not isinstance(node, tuple):
        return
    for field, part in zip(node._fields, node, strict=True):  # type: ignore[attr-defined]
        yield from _paths(f"{path}{field}", part)


def _misfit(got: Any, wanted: Any) -> str | None:
    """The path and the sentence about the first part of `got` that is not as `wanted`, or None."""
    got = value(got.base if isinstance(got, LoRAParams) else got)
    if isinstance(wanted, tuple):
        if type(got) is not type(wanted):
            return f" must be {type(wanted).__name__} by config, got {_form(got)}"
        for i, part in enumerate(wanted):
            if misfit := _misfit(got[i], part):
                return f".{wanted._fields[i]}{misfit}"  # type: ignore[attr-defined]
        return None
    shape = None if wanted is None else wanted.shape
    fits = got is None if shape is None else getattr(got, "shape", None) == shape
    return None if fits else f" must be {shape} by config, got {_form(got)}"


def _form(got: Any) -> str:
    """The shape of an array, the class of anything else, or None."""
    if got is None:
        return "None"
    return str(tuple(got.shape)) if hasattr(got, "shape") else type(got).__name__
