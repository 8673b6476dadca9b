"""ELECTRA (arXiv:2003.10555): BERT with a narrow embedding and heads of its own."""

from __future__ import annotations

from xformer.models import Discriminator, LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import bert
from xformer.pretrained.family import Family
from xformer.pretrained.names import Links, linear


def build(c: Config, head: str) -> LanguageModel:
    """Return the model of a configuration. head: one of `FAMILY.heads`."""
    summary = ("activation", "first_dropout", "last_dropout", "proj_to_labels", "type", "use_proj")
    c.ignore(*(f"summary_{key}" for key in summary))  # of multiple choice
    config = bert.block(c, sizes=(256, 4, 1024))
    top = bert.head_of(c, head, config, act="gelu", dense="gelu")
    if head == "discriminator":
        top = Discriminator(config.ffn.activation)
    width = c.integer("embedding_size", low=1, default=128)
    return bert.encoder(c, config, top, width=width, project_bias=True)


def links(model: LanguageModel) -> Links:
    """Yield which tensor of a file is which leaf of the parameters (`names.Link`)."""
    yield from linear("electra.embeddings_project", "embed.project")
    yield from bert.encoder_links(model, "electra")
    if isinstance(model.head, Discriminator):
        yield from linear("discriminator_predictions.dense", "head.dense")
        yield from linear("discriminator_predictions.dense_prediction", "head.out")
        return
    dense, own = "generator_predictions.dense", "generator_predictions.LayerNorm"
    masked = dense, own, "generator_lm_head.bias"
    yield from bert.head_links(model, masked, ("classifier.dense", "classifier.out_proj"))


FAMILY = Family(
    heads={
        "ElectraForMaskedLM": "masked-lm",
        "ElectraForPreTraining": "discriminator",
        "ElectraForSequenceClassification": "classifier",
        "ElectraForTokenClassification": "token_classifier",
        "ElectraModel": "hidden",
    },
    build=build,
    links=links,
    prefix="electra.",
    tied={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    buffers=bert.BUFFERS,
)
