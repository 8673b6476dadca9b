"""Names of the nodes of a cache: those of their parameters, such as `stack.blocks.3.attn.q`.

The cache of `layers.attention` in layer 3 of a GPT is the node `stack.blocks.3.attn`, and its
parameters are `params.stack.blocks[3].attn`. A node without parameters has the name of its field:
`stack.blocks.3.attn.core` is that of `ops.sdpa`, `stack.blocks.3.ffn.act` that of the activation.
Layers that share parameters have a name each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from xformer.base.choices import did_you_mean
from xformer.dispatch import NoCache, ops

UNFUSED = "run the forward within xf.unfused()"

Label = str | Callable[[str], str]  # of a part: what follows the node's name, or a new name
Labels = dict[str, Label | list[str]]  # field -> label; a list has one for each of several parts


def named(cache: Any) -> dict[str, Any]:
    """The nodes of a cache by name, inner nodes first.

    Of several nodes with one name, such as that of a layer and that of its only op, the outermost.
    """
    found: dict[str, Any] = {}

    def note(name: str, node: Any) -> Any:
        found[name] = node
        return node

    replaced(note, cache)
    return found


def chosen(what: str, cache: Any, patterns: Iterable[str]) -> dict[str, list[str]]:
    """For each pattern, as in `fnmatch`, the names of nodes that it matches.

    ValueError for a pattern that matches no name.
    """
    if _has(cache, NoCache):
        raise ValueError(f"{what}: the cache was made within inference(), which saves nothing")
    nodes = named(cache)
    found = {p: [name for name in nodes if fnmatchcase(name, p)] for p in patterns}
    for pattern, matches in found.items():
        if not matches:
            hint = did_you_mean(pattern, nodes)
            if (op := _any_fused_op(cache)) is not None:
                hint = f": a kernel of {op} ran; {UNFUSED}"
            elif (kind := _any_run_again(cache)) is not None:
                hint = f": layers within {kind} have no names, since they run again in backward"
            raise ValueError(f"{what}: {pattern!r} matches none of {len(nodes)} nodes{hint}")
    return found


def fused_op(node: Any) -> str | None:
    """The op of a kernel's cache that has no node for each layer or op in it; None for others."""
    op = op_of(node)
    is_kernel = type(node).__module__.startswith("xformer.backends.")
    return op if is_kernel and op in {op.__name__ for op in ops() if op.composite} else None


def _has(node: Any, kind: type) -> bool:
    return isinstance(node, kind) or (
        isinstance(node, tuple) and any(_has(part, kind) for part in node)
    )


def _any_fused_op(node: Any) -> str | None:
    """The first `fused_op` of the nodes of a cache."""
    if not isinstance(node, tuple):
        return None
    if (op := fused_op(node)) is not None:
        return op
    return next((op for part in node if (op := _any_fused_op(part)) is not None), None)


def _any_run_again(node: Any) -> str | None:
    """The first type of the nodes of a cache whose backward makes caches."""
    if not isinstance(node, tuple):
        return None
    if hasattr(node, "again"):
        return type(node).__name__
    return next((kind for part in node if (kind := _any_run_again(part)) is not None), None)


def op_of(node: Any) -> str:
    """The op of an op's cache: `op_name`, which some kernels' caches have, or the file's name."""
    name: str = getattr(node, "op_name", type(node).__module__.rpartition(".")[2])
    return name


def replaced(fn: Callable[[str, Any], Any], cache: Any) -> Any:
    """A copy of `cache` with `fn(name, node)` for each node that has a name, inner nodes first."""
    return _replaced(fn, cache, "", "")


def with_methods(
    cache: Any, methods: dict[str, Callable[..., Any]], *, edited: bool = False
) -> Any:
    """A copy of a cache, of a subclass of its type, with other methods of names in `METHODS`.

    methods: name -> method(before, cache, *args), with before(cache, *args) the method so far
    edited: whether the copy is another backward, which a pickle would lose
    """
    plain: Any = type(cache)
    kind = _editable(plain)
    copy: Any = kind._make(cache)
    copy.methods = dict(getattr(cache, "methods", {}))
    for name, method in methods.items():
        before = copy.methods.get(name, getattr(kind.__base__, name))
        copy.methods[name] = partial(method, before)
    copy.edited = edited or is_edited(cache)
    return copy


def is_edited(cache: Any) -> bool:
    """Whether `edit` has changed the backward of a node."""
    return getattr(cache, "edited", False)


METHODS = ("backward", "positions_backward", "again")


@functools.cache
def _editable(kind: Any) -> Any:
    """The subclass of a type of caches whose instances can have methods of their own.

    Only calls of `METHODS` are redirected, to the instance's dict `methods`. An edited instance
    cannot be copied or pickled; another one is pickled as an instance of `kind`.

    There is one subclass for each type: a class for each cache would be freed by the garbage
    collector only, and so would the arrays that its methods hold.

    kind: a type of caches; a subclass from here is returned as it is
    """
    if hasattr(kind, "edited"):
        return kind

    def of_instance(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **options: Any) -> Any:
            return self.methods.get(name, getattr(kind, name))(self, *args, **options)

        return functools.wraps(getattr(kind, name))(method)

    def backward_with(self: Any, dy: Any, ds: Any) -> Any:
        """The backward of a norm, with ds added to dx. Its own backward is this with ds = None."""
        if ds is None or "backward" not in self.methods:
            return kind.backward_with(self, dy, ds)
        dx, *others = self.backward(dy)
        return ds + dx, *others

    def replace(self: Any, **parts: Any) -> Any:
        new = kind._replace(self, **parts)
        new.methods, new.edited = self.methods, self.edited
        return new

    def reduce(self: Any) -> tuple[Any, ...]:
        if self.edited:
            raise TypeError(
                f"edit: an edited cache is neither copied nor pickled, got {kind.__name__}"
            )
        return kind._make, (tuple(self),)  # pickled as the cache itself

    body: dict[str, Any] = {name: of_instance(name) for name in METHODS if hasattr(kind, name)}
    body |= {"_replace": replace, "__reduce__": reduce, "methods": {}, "edited": False}
    if hasattr(kind, "backward_with"):
        body["backward_with"] = backward_with
    body |= {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), body)


def with_parts(node: Any, parts: Iterable[Any]) -> Any:
    """A copy of a NamedTuple with other parts, in order."""
    return node._replace(**dict(zip(node._fields, parts, strict=True)))


def is_node(part: Any) -> bool:
    """Whether `part` is a cache whose backward runs: a NamedTuple with a backward."""
    # The backward around a branch calls that of each of its parts.
    has_backward = hasattr(part, "_fields") and hasattr(part, "backward")
    return has_backward and kind_of(part) != "residual.BranchCache"


def kind_of(node: Any) -> str:
    """The last part of the module and the class of a node."""
    return f"{op_of(node)}.{type(node).__name__}"


def _replaced(fn: Callable[[str, Any], Any], node: Any, name: str, above: str) -> Any:
    """name: of the node. above: the name of the node around it."""
    if not isinstance(node, tuple):
        return node
    inside = name if is_node(node) else above
    if hasattr(node, "_fields") and fused_op(node) is None:
        labels = _LABELS.get(kind_of(node), _no_labels)(node)
        parts = [
            _part(fn, part, labels.get(field, field), name, inside)
            for field, part in zip(node._fields, node, strict=True)
        ]
        changed = any(new is not old for new, old in zip(parts, node, strict=True))
        node = with_parts(node, parts) if changed else node
    elif not hasattr(node, "_fields"):
        node = tuple(_part(fn, part, str(i), name, inside) for i, part in enumerate(node))
    return fn(name, node) if is_node(node) and name != above else node


def _part(
    fn: Callable[[str, Any], Any], part: Any, label: Label | list[str], name: str, above: str
) -> Any:
    if not isinstance(part, tuple):
        return part
    if not isinstance(label, list):
        below = label(name) if callable(label) else _inside(name, label)
        return _replaced(fn, part, below, above)
    several: Any = part
    if hasattr(several, "maps"):  # `LinearsCache`: the list is for its layers
        return several._replace(maps=_part(fn, several.maps, label, name, above))
    if hasattr(several, "_fields"):  # of a kernel, without a cache for each layer
        return _replaced(fn, part, _inside(name, "maps"), above)
    pairs = zip(part, label, strict=False)  # cross-attention has one map
    return tuple(_replaced(fn, one, _inside(name, each), above) for one, each in pairs)


def _inside(name: str, label: str) -> str:
    return f"{name}.{label}" if name and label else name or label


def _no_labels(_: Any) -> Labels:
    return {}


def _branches(node: Any) -> Labels:
    names = ["attn", "cross", "ffn"] if len(node.branches) == 3 else ["attn", "ffn"]
    return {"branches": names[-len(node.branches) :]}


def _of_latents(node: Any) -> Labels:
    """The parts of latent attention: the queries may come from a latent vector, or directly."""
    labels: Labels = {"q_norm": "q.norm", "q_up": "q.up", "kv_norm": "kv.norm", "kv_up": "kv.up"}
    return labels | {"maps": ["q" if node.q_up is None else "q.down", "kv.down"]}


def _of_attention(node: Any) -> Labels:
    """The maps of x, to queries, keys and values, and to the gate."""
    of_memory = node.kv is None or hasattr(node.kv, "maps")  # then k and v are not of x
    maps = ["q", "gate"] if of_memory else ["q", "kv.k", "kv.v", "gate"]
    return {"maps": maps, "q": "q_heads", "r": "xl.r", "gate": "gated"}


def _always(**labels: Any) -> Callable[[Any], Labels]:
    return lambda _: labels


def _after(suffix: str) -> Callable[[str], str]:
    return lambda name: name + suffix


def _norm_of_heads(name: str) -> str:
    return name.removesuffix("heads") + "norm"


def _is(name: str) -> Callable[[str], str]:
    return lambda _: name


# Where a part is not called as its field. "": the part has the name of the node.
_LABELS: dict[str, Callable[[Any], Labels]] = {
    "loss.LossCache": _always(model=""),
    "loss.LogitsLossCache": _always(logits=""),
    "language_model.BalancedLossCache": _always(tokens=""),
    "language_model.LanguageModelCache": _always(hidden=""),
    "pooled.PooledCache": _always(hidden="", pooler="head"),
    "lm_head.LMHeadCache": _always(top=""),
    "heads.MaskedLMHeadCache": _always(top=""),
    "heads.PoolerTanhCache": _always(linear=""),
    "encoder_decoder.EncodeCache": _always(embed=_is("src_embed"), stack=_is("encoder")),
    "encoder_decoder.DecodeCache": _always(
        embed=_is("tgt_embed"), stack=_is("decoder"), head=_is("head")
    ),
    "stack.StackCache": _always(layers=""),
    "blocks.BlocksCache": lambda node: {"blocks": [f"blocks.{i}" for i in range(len(node.blocks))]},
    "block.BlockCache": _always(chain=""),
    "residual.ResidualsCache": _branches,
    "residual.ParallelCache": _branches,
    "residual.BranchCache": _always(
        sum=_after("_norm"),
        sublayer="",
        out_norm=_after("_out_norm"),
        scale=_after("_scale"),
        drop=_after("_drop"),
    ),
    "attention.AttentionCache": _of_attention,
    "latent_attention.LatentAttentionCache": _of_latents,
    "gated_delta_net.GatedDeltaNetCache": _always(maps=["qkv", "gate", "beta", "decay"]),
    "attention.KeyValueSaved": _always(maps=["k", "v"], heads=""),
    "attention.KeyValueHeadsCache": _always(k="k_heads", v="v_heads"),
    "attention.HeadsCache": _always(all_norm=_norm_of_heads, head_norm=_norm_of_heads),
    "feed_forward.FeedForwardCache": lambda node: {"up": ["up", "gate"]} if node.gated else {},
    "linear.LinearCache": _always(op=""),
    "linear.LoRACache": _always(down="a", up="b"),
    "norm.NormCache": _always(norm=""),
    "norm.AddNormCache": _always(norm=""),
    "residual.ScaledCache": _always(op=""),
    "linear_cross_entropy.LinearCrossEntropyCache": _always(linear=""),
}
