"""Trees of arrays: parameters, gradients, optimiser state and caches.

Inner nodes are NamedTuples, tuples, lists and dicts; everything else is a leaf. None is an absent
leaf: `map` keeps it, `flatten` omits it. A `Frozen` leaf of parameters is not trained:

    params = tree.freeze(params, "embed.*")
    trained = tree.trained(params)                 # None for each frozen leaf
    loss, cache = model.loss(params, tokens, targets)
    grads = cache.backward()                       # None for these too; they are not computed
    trained, state = optim.adamw(trained, grads, state, lr=1e-4)
    params = tree.join(params, trained)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from array_api_compat import is_array_api_obj

from xformer.base.keys import exact
from xformer.base.namespace import array_namespace
from xformer.base.typing import Tree

INNER = tuple, list, dict


@dataclass(frozen=True)
class Frozen:
    """A leaf of parameters that is not trained. `map` maps its value, and the result is frozen."""

    value: Any


@dataclass(frozen=True)
class Constant:
    """A number among parameters, which is not a leaf. `map` keeps it, `flatten` omits it."""

    value: float


def value(leaf: Any) -> Any:
    """The value of a leaf, frozen or not."""
    return leaf.value if isinstance(leaf, Frozen) else leaf


def freeze(params: Tree, *patterns: str) -> Tree:
    """`params` with the leaves frozen whose dotted names match a pattern ("stack.blocks.*.ffn.*").

    patterns: as in `fnmatch`; without patterns all leaves are frozen.

    ValueError for a pattern that matches no leaf.
    """
    return _chosen("freeze", lambda leaf: Frozen(value(leaf)), params, patterns)


def thaw(params: Tree, *patterns: str) -> Tree:
    """`params` without `Frozen` for the leaves whose dotted names match a pattern.

    patterns: as in `fnmatch`; without patterns no leaf stays frozen.

    ValueError for a pattern that matches no leaf.
    """
    return _chosen("thaw", value, params, patterns)


def _chosen(what: str, fn: Callable[[Any], Any], params: Any, patterns: tuple[str, ...]) -> Any:
    """`params` with `fn(leaf)` for each leaf whose name matches a pattern, or for all leaves."""
    names = list(flatten(params))
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{what}: each pattern must be a string, got {pattern!r:.60}")
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"{what}: {pattern!r} matches none of {len(names)} parameters")
    rest = iter(names)

    def one(leaf: Any) -> Any:
        name = next(rest)
        chosen = not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
        return fn(leaf) if chosen else leaf

    return _map(one, (params,), "")


def trained(params: Any) -> Any:
    """`params` with None for each frozen leaf: the structure of the gradients."""
    return _map(lambda leaf: None if isinstance(leaf, Frozen) else leaf, (params,), "")


def frozen(params: Any) -> dict[str, Any]:
    """The values of the frozen leaves by dotted name, in order."""
    leaves = flatten(params).items()
    return {name: leaf.value for name, leaf in leaves if isinstance(leaf, Frozen)}


def join(params: Tree, trained: Any) -> Tree:
    """`params` with the leaves of `trained`: the inverse of `trained(params)`.

    ValueError if `trained` has a leaf that params lacks.
    """
    new = flatten(trained)
    like = {name: new.get(name, leaf) for name, leaf in flatten(params).items()}
    if extra := sorted(new.keys() - like.keys()):
        raise ValueError(f"join: no parameters of these names: {', '.join(extra)}")
    return unflatten(params, like)


def map(fn: Callable[..., Any], tree: Tree, *rest: Any) -> Tree:
    """A tree with `fn(leaf, *others)` for each leaf of `tree` and the same leaves of `rest`.

    All trees must have the same structure. ValueError names the first node that differs.
    """
    if not callable(fn):
        raise TypeError(f"tree.map: fn must be a function, got {fn!r:.100}")

    def inside(first: Any, *others: Any) -> Any:
        mapped = fn(value(first), *(value(other) for other in others))
        return Frozen(mapped) if isinstance(first, Frozen) else mapped

    return _map(inside, (tree, *rest), "")


def _map(fn: Callable[..., Any], trees: tuple[Any, ...], path: str) -> Any:
    first, *rest = trees
    if isinstance(first, Constant):
        return first
    if first is None:
        if any(t is not None for t in rest):
            raise ValueError(f"tree.map: {path or 'the root'} is absent in the first tree only")
        return None
    names = _names(first)
    if names is None:
        for other in rest:  # a loop, as a generator for each leaf is slower
            if other is None or _names(other) is not None:
                message = f"tree.map: {path or 'the root'} is an array in the first tree only"
                raise ValueError(message)
        return fn(*trees)
    for other in rest:
        if _names(other) != names:
            raise ValueError(
                f"tree.map: {path or 'the root'} has parts {', '.join(names)} in the first tree, "
                f"got {', '.join(_names(other) or ()) or type(other).__name__}"
            )
    children = zip(*(_parts(t) for t in trees), strict=True)
    parts = [
        _map(fn, below, _inside(path, name)) for name, below in zip(names, children, strict=True)
    ]
    return _rebuild(first, parts)


def map_nodes(fn: Callable[[str, Any], Any], tree: Tree, kind: Any) -> Tree:
    """`tree` with `fn(name, node)` for each node of type `kind`, a type or a tuple of types."""
    return _map_nodes(fn, tree, kind, "")


def _map_nodes(fn: Callable[[str, Any], Any], node: Any, kind: Any, path: str) -> Any:
    if isinstance(node, kind):
        return fn(path, node)
    names = _names(node)
    if names is None:
        return node
    parts = [
        _map_nodes(fn, part, kind, _inside(path, name))
        for name, part in zip(names, _parts(node), strict=True)
    ]
    return _rebuild(node, parts)


def flatten(tree: Any) -> dict[str, Any]:
    """Leaves by dotted name, in order: `{"blocks.0.attn.q.w": ..., ...}`. None is omitted.

    ValueError if two leaves have the same name, which keys with dots can cause.
    """
    leaves, kinds = _collected(tree)
    key = tuple(kinds)
    names = _known.get(key)
    if names is None:
        if len(_known) >= REMEMBERED:
            _known.clear()
        names = _known[key] = _distinct(_leaf_names(tree))
    return dict(zip(names, leaves, strict=True))


def unflatten(like: Tree, leaves: dict[str, Any]) -> Tree:
    """The inverse of `flatten`: a tree with the structure of `like` and the given leaves.

    ValueError lists the names that are missing or unexpected.
    """
    wanted = flatten(like)
    if wanted.keys() != leaves.keys():
        missing, extra = (sorted(a.keys() - b) for a, b in ((wanted, leaves), (leaves, wanted)))
        raise ValueError(
            f"unflatten: missing {', '.join(missing) or 'nothing'}; "
            f"unexpected {', '.join(extra) or 'nothing'}"
        )
    names = iter(wanted)
    return _map(lambda _: leaves[next(names)], (like,), "")


def beside(*trees: Any) -> list[tuple[Any, ...]] | None:
    """A tuple of the leaves of all trees, for each leaf, in the order of `flatten`, without names.

    None if the trees differ in structure or in the types of their leaves, or if keys of dicts could
    give two leaves the same name.
    """
    rows: list[tuple[Any, ...]] = []
    return rows if _beside([(tree,) for tree in trees], rows) else None


def _beside(nodes: Sequence[Iterable[Any]], rows: list[tuple[Any, ...]]) -> bool:
    for parts in zip(*nodes, strict=True):
        first = parts[0]
        if first is None or isinstance(first, Constant):
            if not all(part is None or isinstance(part, Constant) for part in parts):
                return False
            continue
        kind = type(first)
        for part in parts:  # a generator would take twice as long
            if type(part) is not kind:
                return False
        if not isinstance(first, INNER):
            rows.append(parts)
            continue
        below: Sequence[Iterable[Any]] = parts
        if isinstance(first, dict):
            if any(list(part) != list(first) for part in parts) or not _are_plain(first):
                return False
            below = [part.values() for part in parts]
        elif not hasattr(first, "_fields") and any(len(part) != len(first) for part in parts):
            return False
        if not _beside(below, rows):
            return False
    return True


def _are_plain(keys: Iterable[Any]) -> bool:
    """Whether all keys are strings without dots, so that no two leaves have the same name."""
    return all(isinstance(key, str) and "." not in key for key in keys)


def nbytes(tree: Any) -> int:
    """Bytes of the arrays in `tree`. An array that appears several times counts once."""
    leaves = [value(leaf) for leaf in _collected(tree)[0]]
    arrays = {id(leaf): leaf for leaf in leaves if is_array_api_obj(leaf)}
    return sum(math.prod(a.shape) * _itemsize(a) for a in arrays.values())


def parts(tree: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """(leaves, structure): leaves in the order of `flatten`, and a hashable structure.

    Trees with equal structures have the same names.
    """
    leaves, kinds = _collected(tree)
    return leaves, tuple(kinds)


REMEMBERED = 256
_known: dict[tuple[Any, ...], list[str]] = {}  # structure -> names of the leaves


def _collected(tree: Any) -> tuple[list[Any], list[Any]]:
    """(leaves, kinds): leaves in order, and the type of each node. Equal kinds mean equal names."""
    kinds: list[Any] = []
    leaves: list[Any] = []
    _collect((tree,), kinds, leaves)
    return leaves, kinds


def _collect(parts: Iterable[Any], kinds: list[Any], leaves: list[Any]) -> None:
    for part in parts:  # one call for each leaf would take twice as long
        if part is None:
            kinds.append(None)
        elif isinstance(part, INNER):
            kinds.append(type(part))
            if isinstance(part, dict):
                kinds.append(
                    tuple(part) if {str}.issuperset(map(type, part)) else exact(list(part))
                )
            elif not hasattr(part, "_fields"):
                kinds.append(len(part))
            _collect(_parts(part), kinds, leaves)
        elif isinstance(part, Constant):
            kinds.append((Constant, exact(part.value)))
        else:
            kinds.append(Any)
            leaves.append(part)


def _leaf_names(tree: Any) -> list[str]:
    names: list[str] = []
    _name("", tree, names)
    return names


def _name(path: str, node: Any, leaf_names: list[str]) -> None:
    names = _names(node)
    if names is not None:
        for name, part in zip(names, _parts(node), strict=True):
            _name(_inside(path, name), part, leaf_names)
    elif node is not None and not isinstance(node, Constant):
        leaf_names.append(path)


def _distinct(names: list[str]) -> list[str]:
    for name, times in Counter(names).items():
        if times > 1:
            raise ValueError(f"flatten: two leaves are called {name}")
    return names


def _inside(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name.lstrip(".")


def _names(node: Any) -> tuple[str, ...] | None:
    """Names of the parts of an inner node; None for a leaf."""
    if isinstance(node, tuple):
        return getattr(node, "_fields", None) or tuple(str(i) for i in range(len(node)))
    if isinstance(node, list):
        return tuple(str(i) for i in range(len(node)))
    if isinstance(node, dict):
        return tuple(str(key) for key in node)
    return None


def _parts(node: Any) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node


def _rebuild(like: Any, parts: list[Any]) -> Any:
    if isinstance(like, dict):
        return dict(zip(like, parts, strict=True))
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


def _itemsize(array: Any) -> int:
    if hasattr(array.dtype, "itemsize"):  # also of bfloat16, of which `isdtype` knows nothing
        return int(array.dtype.itemsize)
    xp = array_namespace(array)
    if xp.isdtype(array.dtype, "bool"):
        return 1
    integral = xp.isdtype(array.dtype, "integral")
    parts = 2 if xp.isdtype(array.dtype, "complex floating") else 1
    return parts * int((xp.iinfo if integral else xp.finfo)(array.dtype).bits) // 8
