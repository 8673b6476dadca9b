"""Reading and editing what flows through the nodes of a backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from array_api_compat import is_array_api_obj

from xformer.base.choices import require_one_of
from xformer.base.printing import short
from xformer.base.typing import Array
from xformer.dispatch.checks import require_gradient
from xformer.hooks.node_names import chosen, named, replaced, with_methods

ENDS = ("output", "input")


@short
class Watched(NamedTuple):
    """A node of a cache, and the gradients of one backward at it."""

    node: Any  # the cache: its fields are the activations that it saves
    dys: tuple[Any, ...]  # the gradients of its outputs
    grads: Any  # what its backward returned: the gradients of its arguments

    @property
    def x(self) -> Array:
        """The input of the node's first op. AttributeError if it is not saved."""
        found = _input(self.node)
        if found is None:
            raise AttributeError(f"x: {type(self.node).__name__} saves no input")
        return found

    @property
    def dy(self) -> Array:
        """The gradient of the output; of the last one, if there are several."""
        return self.dys[-1]

    @property
    def dx(self) -> Any:
        """The gradient of the first argument."""
        return _first(self.grads)


def watch(cache: Any, pattern: str, *dys: Any, dy: Any = None) -> tuple[Any, dict[str, Watched]]:
    """(grads, watched): the result of `cache.backward(*dys)`, and by name what flowed through it.

    pattern: of names of nodes, as in `fnmatch`: "stack.blocks.*.attn". The names are those of the
        parameters (`xformer/hooks/node_names.py`); "*" shows all of them.
    dys, dy: the arguments of `cache.backward`; none for a loss

    Forward should run within `xf.unfused()` or `xf.reference_only()`: a kernel may compute several
    layers at once, and then there are fewer nodes. A node that a backward makes itself, as in
    activation checkpointing, has no name.

    ValueError for a pattern that matches no node.
    """
    (names,) = map(set, chosen("watch", cache, [pattern]).values())
    nodes = named(cache)
    seen: dict[str, Watched] = {}

    def watched(name: str, node: Any) -> Any:
        if name not in names:
            return node

        def backward(before: Any, self: Any, *dys: Any, **options: Any) -> Any:
            grads = before(self, *dys, **options)
            seen[name] = Watched(nodes[name], dys, grads)
            return grads

        return with_methods(node, {"backward": backward})

    grads = replaced(watched, cache).backward(*(dys if dy is None else (*dys, dy)))
    return grads, {name: seen[name] for name in reversed(seen)}


def edit(cache: Any, edits: Mapping[str, Callable[[Array], Array]], *, at: str = "output") -> Any:
    """A copy of `cache` whose backward changes what flows through the named nodes.

    zero = xp.zeros_like
    edit(cache, {"stack.blocks.3.attn": zero})              # as if its output did not matter
    edit(cache, {"stack.blocks.3.attn": zero}, at="input")  # its parameters learn, x gets nothing

    edits: pattern of names, as in `watch` -> a function from a gradient to another one of the same
        shape and dtype
    at: "output": the function is applied to the gradient of each output of the node, before its
        backward; "input": to the gradient of its first argument, after it

    The backward is no longer that of the forward, except for the parameters after the nodes. Caches
    may be edited several times. `cache` stays as it is.

    ValueError for a pattern that matches no node, another `at`, and a function that returns another
    shape; TypeError if it returns another dtype or no array, and at "input" of a node that returns
    gradients of parameters alone, such as that of an embedding. These of the function and of the
    node are raised by the backward.
    """
    require_one_of("edit: at", at, ENDS)
    fns: dict[str, list[Callable[[Array], Array]]] = {}
    for pattern, names in chosen("edit", cache, edits).items():
        for name in names:
            fns.setdefault(name, []).append(edits[pattern])

    def edited(name: str, node: Any) -> Any:
        if name not in fns:
            return node

        def changed(gradient: Any) -> Any:
            if not is_array_api_obj(gradient):
                return gradient
            for fn in fns[name]:
                new = fn(gradient)
                require_gradient(f"edit: {name}", "the function's result", new, gradient)
                gradient = new
            return gradient

        def backward(before: Any, self: Any, *dys: Any, **options: Any) -> Any:
            if at == "output":
                return before(self, *map(changed, dys), **options)
            grads = before(self, *dys, **options)
            first = _first(grads)
            if not is_array_api_obj(first):
                raise TypeError(
                    f'edit: {name}: at "input" needs a node that returns the gradient of an array '
                    f"first, got {type(first).__name__}"
                )
            first = changed(first)
            return (first, *grads[1:]) if _are_many(grads) else first

        return with_methods(node, {"backward": backward}, edited=True)

    return replaced(edited, cache)


def _input(node: Any) -> Array | None:
    if is_array_api_obj(getattr(node, "x", None)):
        return node.x
    if not isinstance(node, tuple):
        return None
    parts = list(node)
    if getattr(node, "post", False):  # the norm after a sum
        chain: Any = node
        parts = [branch.sublayer for branch in chain.branches]
    return next((x for part in parts if (x := _input(part)) is not None), None)


def _are_many(grads: Any) -> bool:
    return isinstance(grads, tuple) and not hasattr(grads, "_fields")


def _first(grads: Any) -> Any:
    return grads[0] if _are_many(grads) else grads
