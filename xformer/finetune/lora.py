"""LoRA adapters (arXiv:2106.09685): y = x w + scale * (x a) b, with only a and b trained.

    params = lora.attach(params, rank=8, alpha=16)
    trained = tree.trained(params)                 # the adapters; all else is frozen
    ...
    params = lora.merge(params)                    # w + scale * a b: a model like any other

`peft.save` and `peft.load` exchange adapters with the package PEFT.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from array_api_compat import device, to_device

from xformer import backends
from xformer.backends import Generator
from xformer.base import tree
from xformer.base.namespace import array_namespace
from xformer.base.tree import Constant, value
from xformer.base.typing import Array
from xformer.dispatch.checks import number, require_sizes
from xformer.layers import LinearParams, LoRAParams

# The maps of queries and values, as in the paper. A latent attention (DeepSeek) has them above its
# latent vectors, and a gated DeltaNet (Qwen3.5) has one map for both. A model has some of them.
TARGETS = (
    *("*.attn.q", "*.attn.kv.v", "*.cross.q", "*.cross.kv.v"),
    *("*.attn.q.up", "*.attn.kv.up", "*.attn.qkv"),
)


def attach(
    params: Any, rank: int, alpha: float, targets: Sequence[str] | None = None, seed: int = 0
) -> Any:
    """Frozen `params` with an adapter at each linear layer whose name matches a target.

    a (I, R) is uniform in [-I^-1/2, I^-1/2), as in PEFT. b (R, O) is 0, so that the model does not
    change at first.

    rank: R
    alpha: scale = alpha / rank
    targets: patterns of `fnmatch` for dotted names such as "stack.blocks.0.attn.kv.v", which
        `linear_maps` lists; None: those of `TARGETS` that match, the maps of queries and values
    seed: of a

    ValueError for a target that matches no linear layer, and for a layer that has an adapter
    already. TypeError if targets is a string.
    """
    (rank,) = require_sizes("attach", 1, rank=rank)
    scale = number("attach", "alpha", alpha, low=0) / rank
    if isinstance(targets, str):
        raise TypeError(f"attach: targets must be a list of patterns, got {targets!r}")
    if targets is None:
        names = linear_maps(params)
        matching = [t for t in TARGETS if any(fnmatchcase(name, t) for name in names)]
        targets = matching or TARGETS[:1]  # whose error lists what there is
    if not targets:
        raise ValueError("attach: targets must hold at least one pattern")
    chosen = _chosen(params, targets)
    rng: list[Generator] = []

    def adapted(name: str, node: Any) -> Any:
        if name not in chosen:
            return tree.freeze(node)
        if isinstance(node, LoRAParams):
            raise ValueError(f"attach: {name} has an adapter already; merge it first")
        if not rng:
            rng.append(generator(value(node.w), seed))
        return with_adapter(node, *_drawn(rng[0], value(node.w), rank), scale)

    kinds = (LinearParams, LoRAParams)
    return tree.map_nodes(adapted, tree.freeze(params), kinds)


def with_adapter(node: LinearParams, a: Array, b: Array, scale: float) -> LoRAParams:
    """The frozen linear layer `node` with an adapter a (I, R), b (R, O)."""
    return LoRAParams(tree.freeze(node), a, b, Constant(scale))


def merge(params: Any) -> Any:
    """`params` with w + scale * a b for each linear layer with an adapter. Nothing is frozen."""

    def merged(_: str, node: LoRAParams) -> LinearParams:
        base, a, b, scale = tree.thaw(node)
        return base._replace(w=base.w + scale.value * (a @ b))

    return tree.thaw(tree.map_nodes(merged, params, LoRAParams))


def adapters(params: Any) -> dict[str, LoRAParams]:
    """The linear layers that have an adapter, by name."""
    return _nodes(params, LoRAParams)


def linear_maps(params: Any) -> tuple[str, ...]:
    """The dotted names of all linear layers in `params`, with or without an adapter.

    `attach` compares its targets, patterns such as "*.attn.q", with these names.
    """
    return tuple(_nodes(params, (LinearParams, LoRAParams)))


def _nodes(params: Any, kind: Any) -> dict[str, Any]:
    nodes: dict[str, Any] = {}
    tree.map_nodes(nodes.setdefault, params, kind)
    return nodes


def _chosen(params: Any, targets: Sequence[str]) -> set[str]:
    """The names of the linear layers that a target matches. ValueError for one without a match."""
    names = linear_maps(params)
    chosen: set[str] = set()
    for target in targets:
        matches = [name for name in names if fnmatchcase(name, target)]
        chosen.update(matches)
        if not matches:
            raise ValueError(
                f"attach: {target!r} matches no linear map; {_instead(params, target)}"
            )
    return chosen


def _instead(params: Any, target: str) -> str:
    """A hint for an error: the array that a target matches instead, else the possible targets."""
    others = [name for name in tree.flatten(params) if fnmatchcase(name, target)]
    if others:
        return f"{others[0]} is an array of another kind, such as experts or tables, without one"
    kinds = dict.fromkeys(
        name.rpartition(".blocks.")[2].partition(".")[2] or name for name in linear_maps(params)
    )
    return f"there are {', '.join('*.' + kind for kind in kinds)}"


def generator(like: Array, seed: int) -> Generator:
    """The generator of random parameters beside `like`."""
    return backends.backend_of(like).generator(seed, dtype_of(like))


def dtype_of(array: Array) -> str:
    """The dtype of new parameters beside `array`: float32 or float64."""
    return "float64" if array.dtype == array_namespace(array).float64 else "float32"


def _drawn(rng: Generator, w: Array, rank: int) -> tuple[Array, Array]:
    n_in, n_out = w.shape
    bound = n_in**-0.5
    a, b = rng.uniform((n_in, rank), low=-bound, high=bound), rng.full((rank, n_out), 0.0)
    return to_device(a, device(w)), to_device(b, device(w))
