"""RoBERTa (arXiv:1907.11692): BERT with other heads. Position ids begin after the padding id.

CamemBERT (arXiv:1911.03894) has a vocabulary for French, XLM-RoBERTa (arXiv:1911.02116) one for a
hundred languages.
"""

from __future__ import annotations

from functools import partial

from xformer.models import LanguageModel
from xformer.pretrained.config import Config
from xformer.pretrained.families import bert
from xformer.pretrained.family import Family
from xformer.pretrained.names import Links


def build(c: Config, head: str, *, vocab_size: int) -> LanguageModel:
    """Return the model of a configuration. vocab_size: the family's default."""
    config = bert.block(c)
    top = bert.head_of(c, head, config, act="gelu", dense="tanh", bare=bert.pooler(c))
    offset = c.integer("pad_token_id", default=1) + 1
    return bert.encoder(c, config, top, vocab_size=vocab_size, offset=offset)


def links(model: LanguageModel) -> Links:
    """Yield which tensor of a file is which leaf of the parameters (`names.Link`)."""
    yield from bert.encoder_links(model, "roberta")
    yield from head_links(model, "roberta")


def head_links(model: LanguageModel, name: str) -> Links:
    """Yield the links of the head. name: the prefix of a pooler."""
    masked = "lm_head.dense", "lm_head.layer_norm", "lm_head.bias"
    classifier = "classifier.dense", "classifier.out_proj"
    yield from bert.head_links(model, masked, classifier, f"{name}.pooler.dense")


def family(name: str, *, vocab_size: int) -> Family:
    """Return the family whose architectures begin with `name`. vocab_size: its default."""
    make = partial(build, vocab_size=vocab_size)
    return bert.family(name, "roberta", "lm_head", make, links, unused=(r"roberta\.pooler\..*",))


FAMILY = family("Roberta", vocab_size=50265)
CAMEMBERT = family("Camembert", vocab_size=30522)
XLM_ROBERTA = family("XLMRoberta", vocab_size=30522)
