"""GPT-NeoX (arXiv:2204.06745) and Pythia (arXiv:2304.01373)."""

from __future__ import annotations

from xformer.layers import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.family import Family, activation, decoder_head, embedding, layers, rate
from xformer.pretrained.names import Links, fused, linear, norm, same
from xformer.pretrained.rope import rope

ROTARY = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration."""
    # Keys of a token classifier, and of old files; transformers does not read the latter either.
    c.ignore("classifier_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob")
    attn = AttentionConfig(
        d_model=c.integer("hidden_size", low=1, default=6144),
        n_heads=c.integer("num_attention_heads", low=1, default=64),
        bias=c.flag("attention_bias", default=True),
        dropout=rate(c, "attention_dropout", 0.0),
    )
    c.only("head_dim", attn.head_width)  # RoPE of transformers reads it
    ffn = FeedForwardConfig(
        d_ff=c.integer("intermediate_size", low=1, default=24576),
        activation=activation(c, "hidden_act", "gelu"),
    )
    block = BlockConfig(
        attn,
        ffn,
        NormConfig(eps=c.number("layer_norm_eps", low=0, default=1e-5)),
        parallel=c.flag("use_parallel_residual", default=True),
        dropout=rate(c, "hidden_dropout", 0.0),
    )
    embed = embedding(c, attn.d_model, 50432, dropout=block.dropout)
    turned = rope(c, width=attn.head_width, max_len=2048, share=0.25, names=ROTARY)
    top = decoder_head(c, head, tied=c.flag("tie_word_embeddings", default=False))
    return LanguageModel(embed, (block,) * layers(c, default=44), rotary=turned, head=top)


def links(model: LanguageModel) -> Links:
    """Yield which tensor of a file is which leaf of the parameters (`names.Link`).

    In the file, the queries, keys and values of a head are side by side.
    """
    yield from same("gpt_neox.embed_in.weight", "embed.table")
    for i, config in enumerate(model.blocks):
        theirs, ours = f"gpt_neox.layers.{i}", f"stack.blocks.{i}"
        qkv = f"{theirs}.attention.query_key_value"
        yield from norm(f"{theirs}.input_layernorm", f"{ours}.attn_norm")
        yield from fused(f"{qkv}.weight", f"{qkv}.bias", f"{ours}.attn", groups=config.attn.n_heads)
        yield from linear(f"{theirs}.attention.dense", f"{ours}.attn.o")
        yield from norm(f"{theirs}.post_attention_layernorm", f"{ours}.ffn_norm")
        yield from linear(f"{theirs}.mlp.dense_h_to_4h", f"{ours}.ffn.up")
        yield from linear(f"{theirs}.mlp.dense_4h_to_h", f"{ours}.ffn.down")
    yield from norm("gpt_neox.final_layer_norm", "stack.norm")
    yield from linear("embed_out", "head")
    yield from linear("score", "head.out")


def links_in_memory(model: LanguageModel) -> Links:
    """Yield the link of the head, which transformers 5 names `lm_head` in memory."""
    yield from linear("lm_head", "head")


FAMILY = Family(
    heads={
        "GPTNeoXForCausalLM": "lm",
        "GPTNeoXForSequenceClassification": "classifier",
        "GPTNeoXModel": "hidden",
    },
    build=build,
    links=links,
    in_memory=links_in_memory,
    prefix="gpt_neox.",
    free=("is_decoder",),  # both values give the same model
    tied=dict.fromkeys(("embed_out.weight", "lm_head.weight"), "gpt_neox.embed_in.weight"),
    buffers=(r".*\.attention\.(masked_)?bias", r".*rotary_emb\.inv_freq"),
)
