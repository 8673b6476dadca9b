"""Run encoders on texts: vectors, class probabilities, scores of pairs.

folder = "all-MiniLM-L6-v2"
model, params = pretrained.load(folder)
vectors = embed(model, params, tokenizer(folder), texts, **settings(folder)._asdict())
"""

from xformer.sentences.classify import classify, labels
from xformer.sentences.colbert import ColbertSettings, colbert, colbert_settings, maxsim
from xformer.sentences.dense import Dense
from xformer.sentences.embed import embed, similarity
from xformer.sentences.index import Index, read_index, write_index
from xformer.sentences.rank import Ranked, rank
from xformer.sentences.rank_settings import RankSettings, rank_settings
from xformer.sentences.search import Hit, make_index, search
from xformer.sentences.settings import Settings, prompts, settings, similarity_name
from xformer.sentences.splade import SpladeSettings, splade, splade_settings
from xformer.sentences.tag import Tag, tag

__all__ = [
    "ColbertSettings",
    "Dense",
    "Hit",
    "Index",
    "RankSettings",
    "Ranked",
    "Settings",
    "SpladeSettings",
    "Tag",
    "classify",
    "colbert",
    "colbert_settings",
    "embed",
    "labels",
    "make_index",
    "maxsim",
    "prompts",
    "rank",
    "rank_settings",
    "read_index",
    "search",
    "settings",
    "similarity",
    "similarity_name",
    "splade",
    "splade_settings",
    "tag",
    "write_index",
]
