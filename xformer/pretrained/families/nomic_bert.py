"""NomicBERT (arXiv:2402.01613): BERT with RoPE, gated feed-forward networks and fewer biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.layers import FeedForwardConfig
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import bert
from xformer.pretrained.names import Links, attention, fused, linear, norm, same
from xformer.pretrained.rope import rope

THETA = 1000.0
# Keys of the model's own code, which transformers does not read, at the values of this family.
ORIGINAL: dict[str, Any] = {
    "activation_function": "swiglu",
    "causal": False,
    "prenorm": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "scale_attn_weights": True,
    "use_rms_norm": False,
}


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration. head: one of `FAMILY.heads`."""
    plain = bert.block(c, act="silu", dropout=0.0)
    attn: Any = plain.attn
    d_head = c.integer("head_dim", low=1, default=None)
    config = replace(
        plain,
        attn=replace(attn, d_head=d_head, bias=False),
        ffn=FeedForwardConfig(plain.ffn.d_ff, plain.ffn.activation, gated=True, bias=False),
    )
    turned = rope(c, width=config.attn.head_width, max_len=2048, theta=THETA)
    own = {
        "layer_norm_epsilon": config.norm.eps,
        "n_head": config.attn.n_heads,
        "rotary_emb_base": turned.theta,
    }
    for name, value in (ORIGINAL | own).items():
        c.only(name, value)
    top = bert.head_of(c, head, config)
    options: dict[str, Any] = {"vocab_size": 30528, "positions": "none", "max_len": None}
    return replace(bert.encoder(c, config, top, **options), rotary=turned)


def links(model: LanguageModel) -> Links:
    """Yield which tensor of a file is which leaf of the parameters (`names.Link`)."""
    name = "nomic_bert"
    yield from same(f"{name}.embeddings.word_embeddings.weight", "embed.table")
    yield from same(f"{name}.embeddings.token_type_embeddings.weight", "embed.types")
    yield from norm(f"{name}.emb_ln", "embed.norm")
    for i in range(len(model.blocks)):
        theirs, ours = f"{name}.encoder.layers.{i}", f"stack.blocks.{i}"
        qkv = f"{theirs}.attn.Wqkv"
        yield from fused(f"{qkv}.weight", f"{qkv}.bias", f"{ours}.attn")
        yield from linear(f"{theirs}.attn.out_proj", f"{ours}.attn.o")
        yield from norm(f"{theirs}.norm1", f"{ours}.attn_norm")
        yield from linear(f"{theirs}.mlp.fc11", f"{ours}.ffn.up")
        yield from linear(f"{theirs}.mlp.fc12", f"{ours}.ffn.gate")
        yield from linear(f"{theirs}.mlp.fc2", f"{ours}.ffn.down")
        yield from norm(f"{theirs}.norm2", f"{ours}.ffn_norm")
    transform = "cls.predictions.transform"
    masked = f"{transform}.dense", f"{transform}.layer_norm", "cls.predictions.bias"
    yield from bert.head_links(model, masked, (f"{name}.pooler.dense", "classifier"))


def links_in_memory(model: LanguageModel) -> Links:
    """Yield the links of tensors that have other names in the memory of transformers 5."""
    yield from norm("nomic_bert.embeddings.LayerNorm", "embed.norm")
    for i in range(len(model.blocks)):
        theirs, ours = f"nomic_bert.layers.{i}", f"stack.blocks.{i}"
        names = (f"{part}_proj" for part in "qkvo")
        yield from attention(f"{theirs}.self_attn", f"{ours}.attn", *names)
        yield from norm(f"{theirs}.post_attention_layernorm", f"{ours}.attn_norm")
        for part in ("up", "gate", "down"):
            yield from linear(f"{theirs}.mlp.{part}_proj", f"{ours}.ffn.{part}")
        yield from norm(f"{theirs}.post_mlp_layernorm", f"{ours}.ffn_norm")


FAMILY = bert.family(
    "NomicBert",
    "nomic_bert",
    "cls.predictions",
    build,
    links,
    in_memory=links_in_memory,
    buffers=(*bert.BUFFERS, r".*rotary_emb\.(original_)?inv_freq"),
    unused=(r"(nomic_bert\.)?pooler\..*",),
)
