"""Sentence embeddings and text classification: a vector or class probabilities for each text.

folder = "all-MiniLM-L6-v2"
model, params = pretrained.load(folder)
vectors = embed(model, params, tokenizer(folder), texts, **settings(folder)._asdict())
"""

from xformer.sentences.classify import classify, labels
from xformer.sentences.dense import Dense
from xformer.sentences.embed import embed, similarity
from xformer.sentences.index import Index, read_index, write_index
from xformer.sentences.search import Hit, make_index, search
from xformer.sentences.settings import Settings, prompts, settings
from xformer.sentences.splade import SpladeSettings, splade, splade_settings

__all__ = [
    "Dense",
    "Hit",
    "Index",
    "Settings",
    "SpladeSettings",
    "classify",
    "embed",
    "labels",
    "make_index",
    "prompts",
    "read_index",
    "search",
    "settings",
    "similarity",
    "splade",
    "splade_settings",
    "write_index",
]
