"""The update of the parameters inside the backward, so that few gradients exist at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xformer.base import tree
from xformer.base.typing import Tree
from xformer.hooks.node_names import chosen, named, replaced, with_methods
from xformer.optim._checks import require_matching

Update = Callable[[str, Any, Any], Any]  # (name, params, grads) -> new params, of one part


def stepped(cache: Any, params: Tree, update: Update, *dys: Any, donate: bool = False) -> Tree:
    """The parameters after an update that each layer gets during the backward (LOMO).

    The gradients of a layer are dropped after its update, so that those of one layer are in memory
    at a time (arXiv:2306.09782). The result has the same bits as an update after the backward, if
    the rule treats parameters one by one, as SGD does. Global norms are not known to it.

    def update(name, params, grads):
        return tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = xf.stepped(cache, params, update, donate=True)

    params: those of the forward
    update: called with the name of a part ("stack.blocks.3", "head", and "" for all the rest), its
        parameters and their gradients; returns the new parameters of the part. The rest is updated
        after the backward; so are layers that share their parameters. `optim.clip_by_global_norm`
        within it clips each part by the norm of this part alone.
    dys: the arguments of `cache.backward`; none for a loss
    donate: the arrays of params are overwritten, if their library allows it, and must not be used
        otherwise any more; nor may the cache. Without it the old parameters stay in memory.

    Forward should run within `xf.unfused()` or `xf.reference_only()`, as for `watch`.

    ValueError if the cache has no node for each layer, and for an update that lacks a parameter or
    has another shape; TypeError for one with another dtype, or of no arrays.
    """
    chosen("stepped", cache, ["*.blocks.0"])
    new: dict[str, Any] = {}
    parts = {name for name in named(cache) if _is_part(name)}
    parts = {name for name in parts - _shared(cache, parts) if _at(params, name) is not None}

    def updated(name: str, node: Any) -> Any:
        if name not in parts:
            return node

        def backward(before: Any, self: Any, *dys: Any) -> Any:
            dx, grads, *others = before(self, *dys)
            new[name] = _updated(name, _at(params, name), grads)
            return dx, None, *others

        return with_methods(node, {"backward": backward})

    def _updated(name: str, old: Any, grads: Any) -> Any:
        trained = tree.trained(old)
        new = update(name, trained, grads)
        changed = tree.join(old, new)
        require_matching(f"stepped: {name or 'the rest'}", trained, new, "the update")
        return tree.map(_overwritten, old, changed) if donate else changed

    grads = replaced(updated, cache).backward(*dys)
    rest = params
    for name in new:
        rest = _with(rest, name, None)
    rest = _updated("", rest, grads)
    for name, part in new.items():
        rest = _with(rest, name, part)
    return rest


def _is_part(name: str) -> bool:
    """Whether the node of this name is the head or a layer of the stack.

    The backward of such a node returns dx, then the gradients of its parameters.

    name: dotted; the head's is "head", a layer's ends in "blocks.N", such as "stack.blocks.3"
    """
    *around, last = name.split(".")
    return name == "head" or (around[-1:] == ["blocks"] and last.isdigit())


def _shared(cache: Any, parts: set[str]) -> set[str]:
    """The layers of stacks in which several layers have the same parameters."""
    shared = set()
    for name, node in named(cache).items():
        order = getattr(getattr(node, "layers", None), "order", ())
        if len(set(order)) < len(order):
            shared |= {part for part in parts if part.startswith(f"{name}.blocks.")}
    return shared


def _at(params: Any, name: str) -> Any:
    """The part of `params` of this name."""
    for field in name.split("."):
        params = params[int(field)] if field.isdigit() else getattr(params, field)
    return params


def _with(params: Any, name: str, part: Any) -> Any:
    """`params` with another part of this name."""
    field, _, below = name.partition(".")
    if field.isdigit():
        i = int(field)
        new = part if not below else _with(params[i], below, part)
        return (*params[:i], new, *params[i + 1 :])
    new = part if not below else _with(getattr(params, field), below, part)
    return params._replace(**{field: new})


def _overwritten(old: Any, new: Any) -> Any:
    """The array `old` with the numbers of `new`; `new` if it cannot be overwritten."""
    try:
        old[...] = new
    except (TypeError, ValueError):  # arrays of JAX, and read-only ones
        return new
    return old
