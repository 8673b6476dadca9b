"""Mistral (arXiv:2310.06825) and Mixtral (arXiv:2401.04088)."""

from __future__ import annotations

from collections.abc import Iterable

from xformer.layers import BlockConfig, ExpertsConfig
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.family import activation, layers
from xformer.pretrained.names import Link, Links, experts

PARTS = (("w1", "gate"), ("w3", "up"), ("w2", "down"))


def build(c: Config, head: str) -> LanguageModel:
    """Return a Mistral: Llama with a sliding window."""
    config = llama.block(c, kv_heads=8, window=llama.window(c, default=4096))
    return llama.decoder(c, head, (config,) * layers(c), max_len=131072)


def build_mixtral(c: Config, head: str) -> LanguageModel:
    """Return a Mixtral: Mistral with a mixture of experts in every layer."""
    c.only("router_jitter_noise", 0.0, 0)
    act = activation(c, "hidden_act", "silu")
    mixture = ExpertsConfig(
        n_experts=c.integer("num_local_experts", low=1, high=1024, default=8),
        top_k=c.integer("num_experts_per_tok", low=1, high=1024, default=2),
        d_ff=c.integer("intermediate_size", low=1),
        activation=act,
    )
    config = llama.block(c, eps=1e-5, kv_heads=8, window=llama.window(c), ffn=mixture)
    return llama.decoder(
        c,
        head,
        (config,) * layers(c),
        max_len=131072,
        theta=1e6,
        load_balancing_weight=balancing(c, head),
    )


def balancing(c: Config, head: str, default: float = 0.001) -> float:
    """Return the weight of the auxiliary loss; 0 without `output_router_logits` or an LM head.

    default: the family's weight if the key is absent
    """
    weight = c.number("router_aux_loss_coef", low=0, default=default)
    return weight if c.flag("output_router_logits", default=False) and head == "lm" else 0.0


def layer_links(theirs: str, ours: str, config: BlockConfig) -> Links:
    """Yield which tensor of a layer is which leaf of its block (`names.Link`).

    The names are Llama's, except for the experts.
    """
    yield from llama.block_links(theirs, ours)
    yield from mixture_links(f"{theirs}.block_sparse_moe", f"{ours}.ffn", config, PARTS)


def mixture_links(
    theirs: str, ours: str, config: BlockConfig, parts: Iterable[tuple[str, str]]
) -> Links:
    """Yield the links of a router and of experts that have a tensor each.

    parts: the name of each linear map of an expert, and of its leaf
    """
    yield Link((f"{theirs}.gate.weight",), (f"{ours}.router",), flip=True)
    n_experts = 0 if config.experts is None else config.experts.n_experts
    for part, leaf in parts:
        each = [f"{theirs}.experts.{e}.{part}" for e in range(n_experts)]
        yield from experts(each, f"{ours}.{leaf}")


def links_in_memory(model: LanguageModel) -> Links:
    """Yield the links of the experts in memory, where transformers 5 stacks them.

    gate (E, F, I) and up (E, F, I) are one tensor (E, 2 F, I), gate first.
    """
    for i in range(len(model.blocks)):
        theirs, ours = f"model.layers.{i}.mlp", f"stack.blocks.{i}.ffn"
        both = (f"{ours}.gate", f"{ours}.up")
        yield Link((f"{theirs}.gate.weight",), (f"{ours}.router",), flip=True)
        yield Link((f"{theirs}.experts.gate_up_proj",), both, flip=True)
        yield Link((f"{theirs}.experts.down_proj",), (f"{ours}.down",), flip=True)


ALIASES = {"num_experts": "num_local_experts"}
MISTRAL = llama.family("Mistral", build)
MIXTRAL = llama.family(
    "Mixtral", build_mixtral, layer_links, in_memory=links_in_memory, aliases=ALIASES
)
