"""BERT (arXiv:1810.04805), and functions that the families derived from it share."""

from __future__ import annotations

from typing import Any

from xformer.layers import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from xformer.models import Classifier, LanguageModel, MaskedLMHead, Pooler, TokenClassifier
from xformer.pretrained.config import Config
from xformer.pretrained.family import Family, activation, embedding, encoder_heads, layers, rate
from xformer.pretrained.names import Links, attention, linear, norm, same

BUFFERS = (r".*embeddings\.position_ids", r".*embeddings\.token_type_ids")


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration. head: one of `FAMILY.heads`."""
    # Keys of Google's Chinese and multilingual models; nothing reads them.
    unread = ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head")
    c.ignore(*(f"pooler_{key}" for key in unread))
    c.unread("pooler_type", "first_token_transform")
    c.unread("directionality", "bidi")
    config = block(c)
    return encoder(c, config, head_of(c, head, config, bare=pooler(c)))


def block(
    c: Config,
    act: str = "gelu",
    dropout: float = 0.1,
    sizes: tuple[int, int, int] = (768, 12, 3072),
) -> BlockConfig:
    """Return a post-LN block.

    act, dropout, sizes: the family's defaults; sizes: d_model, heads and d_ff
    """
    width, heads, hidden = sizes
    attn = AttentionConfig(
        d_model=c.integer("hidden_size", low=1, default=width),
        n_heads=c.integer("num_attention_heads", low=1, default=heads),
        dropout=rate(c, "attention_probs_dropout_prob", dropout),
    )
    ffn = FeedForwardConfig(
        d_ff=c.integer("intermediate_size", low=1, default=hidden),
        activation=activation(c, "hidden_act", act),
    )
    norm_config = NormConfig(eps=c.number("layer_norm_eps", low=0, default=1e-12))
    return BlockConfig(
        attn, ffn, norm_config, "post", dropout=rate(c, "hidden_dropout_prob", dropout)
    )


def encoder(
    c: Config,
    config: BlockConfig,
    head: Any,
    *,
    vocab_size: int = 30522,
    width: int | None = None,
    **embed: Any,
) -> LanguageModel:
    """Return an encoder whose blocks all have the configuration `config`.

    vocab_size: the family's default
    width: of the embedding; None: d_model
    embed: further options of the embedding; with n_types there is no key for it
    """
    c.only("position_embedding_type", "absolute")
    if isinstance(head, MaskedLMHead):
        c.only("tie_word_embeddings", True)
    c.ignore("tie_word_embeddings", "classifier_dropout", "classifier_dropout_prob")
    c.ignore("is_causal")  # only decoders use it
    options: dict[str, Any] = {
        "width": config.d_model if width is None else width,
        "max_len": c.integer("max_position_embeddings", low=1, default=512),
        "positions": "learned",
        "norm": config.norm,
        "dropout": config.dropout,
    }
    if "n_types" not in embed:
        options["n_types"] = c.integer("type_vocab_size", default=2)
    table = embedding(c, config.d_model, vocab_size, **options | embed)
    return LanguageModel(table, (config,) * layers(c, default=12), causal=False, head=head)


def pooler(c: Config) -> Pooler | None:
    """Return the pooler of a model without a head; None if its file has none."""
    has_pooler = c.tensors is None or any("pooler." in name for name in c.tensors)
    return Pooler() if has_pooler else None


def head_of(
    c: Config,
    head: str,
    config: BlockConfig,
    *,
    act: str | None = None,
    key: str = "classifier_dropout",
    default: float | None = None,
    dense: str | None = None,
    bare: Pooler | None = None,
) -> Any:
    """Return the head of an encoder.

    act: the activation of the head of a masked LM; None: that of the blocks
    key, default: of the dropout rate of classifiers; None: by default the rate of hidden states
    dense: the activation of the classifier's own dense layer, which has this dropout too; None: the
        classifier has the layer of a pooler
    bare: the head of a model without one
    """
    if head == "masked-lm":
        return MaskedLMHead(act or config.ffn.activation, config.norm.eps)
    if head not in ("classifier", "token_classifier"):
        return bare
    dropout = rate(c, key, config.dropout if default is None else default)
    if head == "token_classifier":
        return TokenClassifier(c.labels(), dropout=dropout)
    own: dict[str, Any] = {} if dense is None else {"dense": dense, "dense_dropout": dropout}
    return Classifier(c.labels(), dropout=dropout, **own)


def links(model: LanguageModel) -> Links:
    """Yield which tensor of a file is which leaf of the parameters (`names.Link`)."""
    yield from encoder_links(model, "bert")
    transform, dense = "cls.predictions.transform", "bert.pooler.dense"
    masked = f"{transform}.dense", f"{transform}.LayerNorm", "cls.predictions.bias"
    yield from head_links(model, masked, (dense, "classifier"), dense)


def head_links(
    model: LanguageModel,
    masked: tuple[str, str, str],
    classifier: tuple[str, str],
    pooler: str = "",
) -> Links:
    """Yield the links of a head.

    masked: the dense layer, the norm and the bias of a masked LM
    classifier: the dense layer and the output of a classifier
    pooler: the dense layer of a pooler; empty: no model of the family has one
    """
    if isinstance(model.head, MaskedLMHead):
        yield from linear(masked[0], "head.dense")
        yield from norm(masked[1], "head.norm")
        yield from same(masked[2], "head.b")
    elif isinstance(model.head, Classifier):
        yield from linear(classifier[0], "head.dense")
        yield from linear(classifier[1], "head.out")
    elif isinstance(model.head, TokenClassifier):
        yield from linear("classifier", "head.out")
    elif pooler:
        yield from linear(pooler, "head")


def encoder_links(model: LanguageModel, name: str) -> Links:
    """Yield the links of the embedding and the blocks. name: the prefix of their tensors."""
    yield from embed_links(f"{name}.embeddings")
    for i in range(len(model.blocks)):
        theirs, ours = f"{name}.encoder.layer.{i}", f"stack.blocks.{i}"
        names = "self.query", "self.key", "self.value", "output.dense"
        yield from attention(f"{theirs}.attention", f"{ours}.attn", *names)
        yield from norm(f"{theirs}.attention.output.LayerNorm", f"{ours}.attn_norm")
        yield from linear(f"{theirs}.intermediate.dense", f"{ours}.ffn.up")
        yield from linear(f"{theirs}.output.dense", f"{ours}.ffn.down")
        yield from norm(f"{theirs}.output.LayerNorm", f"{ours}.ffn_norm")


def embed_links(theirs: str) -> Links:
    """Yield the links of the embedding. theirs: the prefix of its tensors."""
    yield from same(f"{theirs}.word_embeddings.weight", "embed.table")
    yield from same(f"{theirs}.position_embeddings.weight", "embed.positions")
    yield from same(f"{theirs}.token_type_embeddings.weight", "embed.types")
    yield from norm(f"{theirs}.LayerNorm", "embed.norm")


def family(name: str, prefix: str, head: str, build: Any, links: Any, **more: Any) -> Family:
    """Return the family of an encoder whose architectures begin with `name`.

    prefix: of all tensors except the head's
    head: the prefix of the bias of a masked LM, and of a decoder, which repeats bias and table
    more: further fields of `Family`
    """
    table = f"{prefix}.embeddings.word_embeddings.weight"
    tied = {f"{head}.decoder.weight": table, f"{head}.decoder.bias": f"{head}.bias"}
    fields: Any = {"prefix": f"{prefix}.", "tied": tied, "buffers": BUFFERS}
    return Family(encoder_heads(name), build, links, **fields | more)


# The sentence-pair head of BERT's pretraining, and the pooler that it reads.
UNUSED = (r"cls\.seq_relationship\..*", r"bert\.pooler\..*")
FAMILY = family("Bert", "bert", "cls.predictions", build, links, unused=UNUSED)
