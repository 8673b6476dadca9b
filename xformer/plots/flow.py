"""Signal flow: the sizes of activations and gradients in each layer at initialisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from xformer import backends
from xformer.base import tree
from xformer.base.typing import Array
from xformer.dispatch import reference_only
from xformer.dispatch.checks import require_sizes
from xformer.initializers import fixup
from xformer.layers import AttentionConfig, BlockConfig, EmbedConfig, FeedForwardConfig, StackParams
from xformer.layers.block import NORMS
from xformer.models import LanguageModel, LMHead
from xformer.ops._loss import one
from xformer.plots.style import line_of, orders_of_magnitude, panels, styled

VOCABULARY, BATCH, LENGTH = 256, 8, 32


class Flow(NamedTuple):
    """The sizes of activations and gradients in each of the L layers of a model."""

    name: str
    activations: np.ndarray  # (L,): root mean square of the layer's output
    gradients: np.ndarray  # (L,): norm of the gradient of the loss by the layer's parameters

    @property
    def depth(self) -> int:
        """L, the number of layers."""
        return len(self.gradients)


def flow(model: LanguageModel, params: Any, tokens: Array, targets: Array, name: str = "") -> Flow:
    """The `Flow` of one loss of `model` and its backward.

    tokens, targets: as for `LanguageModel.loss`.
    name: of the result.

    TypeError for another kind of model, or if layers share parameters or are reversible.
    """
    if not isinstance(model, LanguageModel) or model.n_shared_layer_groups is not None:
        raise TypeError(
            f"flow: model must be a LanguageModel whose layers share nothing, got {model!r:.60}"
        )
    if model.blocks[0].reversible:
        raise TypeError("flow: reversible blocks save no outputs of layers")
    model = replace(model, activation_checkpointing=False)  # else caches have only inputs of blocks
    with reference_only():  # its caches have the input of each op; caches of kernels may not
        loss, cache = model.loss(params, tokens, targets)
        grads = cache.backward(one(loss))
        below: Any = getattr(cache, "tokens", cache)  # the cache without the router losses
        stack = below.model.hidden.stack
        last = model.hidden(params, tokens)[0] if stack.norm is None else stack.norm.norm.x
    outputs = [*(_input(block) for block in stack.blocks[1:]), last]
    sizes = np.array([_norm(x) / math.sqrt(max(math.prod(x.shape), 1)) for x in outputs])
    return Flow(name, sizes, np.array([_norm(block) for block in grads.stack.blocks]))


# Models to compare: the placements of norms, and two kinds of models without norms.
REZERO, FIXUP = "rezero", "fixup"
KINDS = (*NORMS, REZERO, FIXUP)


def at_initialisation(
    kind: str, n_layers: int, d_model: int = 128, n_heads: int = 4, seed: int = 0
) -> Flow:
    """The `Flow` of a decoder with Xavier-uniform weights, as in arXiv:2002.04745.

    The tokens are random, the dtype is float64.

    kind: the placement of norms, as `norm_placement` of `layers.BlockConfig`. Or one of two kinds
        without norms: "rezero", with residual_scale 0 (arXiv:2003.04887), and "fixup", with
        residual_scale 1 and the weights of `initializers.fixup` (arXiv:1901.09321), but the head
        is drawn, because nothing below a head of 0 has a gradient

    ValueError for another kind.
    """
    (n_layers,) = require_sizes("flow", 1, n_layers=n_layers)
    attn, ffn = AttentionConfig(d_model, n_heads), FeedForwardConfig(4 * d_model)
    scale = {REZERO: 0.0, FIXUP: 1.0}.get(kind)
    placement = kind if scale is None else "none"
    block = BlockConfig(attn, ffn, norm_placement=placement, residual_scale=scale)
    embed = EmbedConfig(VOCABULARY, d_model, d_model, LENGTH)
    model = LanguageModel(embed, (block,) * n_layers, head=LMHead(tied=False))
    rng = backends.get("numpy").generator(seed, "float64")
    params, stack = model.init_from(rng), StackParams.init(rng, model.blocks)
    if kind == FIXUP:
        stack = fixup(stack, n_branches=2 * n_layers)
    tokens, targets = rng.integers((2, BATCH, LENGTH), high=VOCABULARY)
    return flow(model, params._replace(stack=stack), tokens, targets, kind)


@styled()
def flow_picture(flows: Sequence[Flow]) -> Any:
    """A figure of models of one depth or several, with one line for each name.

    For the deepest model of each name, it shows activations and gradients over the layers. If there
    are several depths, it also shows the gradient of the last layer over the depth.

    ValueError if there are no flows.
    """
    if not flows:
        raise ValueError("flow_picture: there are no flows")
    names = list(dict.fromkeys(each.name for each in flows))
    several = len({each.depth for each in flows}) > 1
    figure, (axes,) = panels(1, 3 if several else 2, (11.5 if several else 8, 3.3))
    for i, name in enumerate(names):
        named = sorted((each for each in flows if each.name == name), key=lambda f: f.depth)
        line = line_of(i) | {"marker": "o", "markersize": 3, "label": name}
        layers = np.arange(1, named[-1].depth + 1)
        axes[0].plot(layers, named[-1].activations, **line)
        axes[1].plot(layers, named[-1].gradients, **line)
        if several:
            axes[2].plot([f.depth for f in named], [f.gradients[-1] for f in named], **line)
    deepest = max(each.depth for each in flows)
    _labelled(axes[0], f"output of each of {deepest} layers, rms", "layer")
    _labelled(axes[1], f"gradient of each of {deepest} layers, norm", "layer")
    if several:
        _labelled(axes[2], "gradient of the last layer, norm", "layers of the model")
        depths = sorted({each.depth for each in flows})
        axes[2].set_xscale("log")
        axes[2].set_xticks(_apart(depths))
        axes[2].xaxis.set_major_formatter("{x:.0f}")
        axes[2].set_xticks([], minor=True)
    axes[0].legend(title="norms", alignment="left")
    return figure


def _labelled(axes: Any, title: str, xlabel: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(title=title, xlabel=xlabel)
    axes.xaxis.set_major_locator(
        MaxNLocator("auto", integer=True, steps=(1, 2, 5, 10), min_n_ticks=1)
    )
    orders_of_magnitude(axes)


def _apart(depths: Sequence[int]) -> list[int]:
    """The depths that fit as labels of a logarithmic axis, chosen from the largest down."""
    least_ratio = (depths[-1] / depths[0]) ** 0.08
    labels = [depths[-1]]
    for depth in depths[-2::-1]:
        if labels[-1] / depth >= least_ratio:
            labels.append(depth)
    return labels[::-1]


def _input(block: Any) -> Array:
    """The input of a block, from its cache."""
    x: Array
    norm = block.attn.sum
    x = block.attn.sublayer.maps.x if norm is None or block.chain.post else norm.norm.norm.x
    return x


def _norm(arrays: Any) -> float:
    """The Euclidean norm over all arrays of a tree."""
    leaves = tree.flatten(arrays).values()
    hosts = [backends.backend_of(a).to_numpy(a).astype(np.float64) for a in leaves]
    return math.sqrt(sum(float(np.sum(a**2)) for a in hosts))
