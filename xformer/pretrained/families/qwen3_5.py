"""Qwen3.5 (text): gated DeltaNet layers (arXiv:2412.06464) between layers of gated attention."""

from __future__ import annotations

from dataclasses import replace

from xformer.layers import BlockConfig, GatedDeltaNetConfig
from xformer.layers.recurrent_state import is_recurrent
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import llama
from xformer.pretrained.family import layers
from xformer.pretrained.names import Link, Links, linear, norm, same
from xformer.pretrained.rope import rope

LINEAR = "linear_attention"
MROPE = ("mrope_section", "mrope_interleaved")  # of images; text has one position for all sections


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration. By default, each fourth layer has attention."""
    c.only("hidden_act", "silu")
    c.unread("attn_output_gate", True)
    c.unread("mamba_ssm_dtype", "float32")
    c.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    config = llama.block(
        c,
        kv_heads=4,
        d_head=256,
        norm_offset=1.0,
        bias=c.flag("attention_bias", default=False),
        qk_norm="head",
        output_gate=True,
    )
    kinds = _kinds(c)
    blocks = {llama.FULL: config, LINEAR: replace(config, attn=_delta_net(c))}
    for name in ("rope_parameters", "rope_scaling"):
        if (part := c.sub(name)) is not None:
            part.ignore(*MROPE)
    turned = rope(c, width=config.attn.head_width, max_len=32768, share=0.25)
    rotary = tuple(turned if kind == llama.FULL else None for kind in kinds)
    return llama.decoder(c, head, tuple(blocks[kind] for kind in kinds), rotary=rotary)


def _kinds(c: Config) -> tuple[str, ...]:
    """Return the type of each layer."""
    n_layers = layers(c)
    interval = c.integer("full_attention_interval", low=1, default=4)
    usual = tuple(llama.FULL if (i + 1) % interval == 0 else LINEAR for i in range(n_layers))
    given = c.texts("layer_types", choices=(llama.FULL, LINEAR), length=n_layers, default=None)
    return usual if given is None else tuple(given)


def _delta_net(c: Config) -> GatedDeltaNetConfig:
    """Return the configuration of the gated DeltaNet."""
    return GatedDeltaNetConfig(
        c.integer("hidden_size", low=1),
        n_heads=c.integer("linear_num_value_heads", low=1, default=32),
        d_key=c.integer("linear_key_head_dim", low=1, default=128),
        d_value=c.integer("linear_value_head_dim", low=1, default=128),
        n_key_heads=c.integer("linear_num_key_heads", low=1, default=16),
        conv_len=c.integer("linear_conv_kernel_dim", low=1, default=4),
        eps=c.number("rms_norm_eps", low=0, default=1e-6),
    )


def layer_links(theirs: str, ours: str, config: BlockConfig) -> Links:
    """Yield which tensor of a layer is which leaf of its block (`names.Link`)."""
    yield from norm(f"{theirs}.input_layernorm", f"{ours}.attn_norm")
    if is_recurrent(config):
        yield from delta_net_links(f"{theirs}.linear_attn", f"{ours}.attn")
    else:
        yield from attention_links(f"{theirs}.self_attn", f"{ours}.attn", config.attn.n_heads)
    yield from norm(f"{theirs}.post_attention_layernorm", f"{ours}.ffn_norm")
    yield from llama.feed_forward_links(f"{theirs}.mlp", f"{ours}.ffn")


def delta_net_links(theirs: str, ours: str) -> Links:
    """Yield the links of a gated DeltaNet."""
    for name, leaf in (("qkv", "qkv"), ("z", "gate"), ("b", "beta"), ("a", "decay")):
        yield Link((f"{theirs}.in_proj_{name}.weight",), (f"{ours}.{leaf}.w",), flip=True)
    yield Link((f"{theirs}.conv1d.weight",), (f"{ours}.conv",), depthwise=True)
    yield from same(f"{theirs}.dt_bias", f"{ours}.decay.b")
    yield from same(f"{theirs}.A_log", f"{ours}.log_rate")
    yield from norm(f"{theirs}.norm", f"{ours}.norm")
    yield from linear(f"{theirs}.out_proj", f"{ours}.o")


def attention_links(theirs: str, ours: str, n_heads: int) -> Links:
    """Yield the links of the attention. The file has each head's queries and gate side by side."""
    q = f"{theirs}.q_proj"
    both = tuple(f"{ours}.{leaf}" for leaf in ("q", "gate"))
    yield Link((f"{q}.weight",), tuple(f"{leaf}.w" for leaf in both), flip=True, groups=n_heads)
    yield Link((f"{q}.bias",), tuple(f"{leaf}.b" for leaf in both), groups=n_heads)
    for name, leaf in (("k_proj", "kv.k"), ("v_proj", "kv.v"), ("o_proj", "o")):
        yield from linear(f"{theirs}.{name}", f"{ours}.{leaf}")
    yield from norm(f"{theirs}.q_norm", f"{ours}.q_norm")
    yield from norm(f"{theirs}.k_norm", f"{ours}.kv.k_norm")


FAMILY = llama.family("Qwen3_5", build, layer_links)._replace(
    heads={
        "Qwen3_5ForCausalLM": llama.HEADS["ForCausalLM"],
        "Qwen3_5TextForSequenceClassification": llama.HEADS["ForSequenceClassification"],
        "Qwen3_5TextModel": llama.HEADS["Model"],
    },
    unused=(r"mtp\..*",),  # which predict the token after the next one
)
