"""Run encoders on texts: vectors, class probabilities, scores of pairs.

folder = "all-MiniLM-L6-v2"
model, params = pretrained.load(folder)
vectors = embed(model, params, tokenizer(folder), texts, **settings(folder)._asdict())
"""

from typing import TYPE_CHECKING

from xformer.base.lazy import later

if TYPE_CHECKING:
    from xformer.sentences.classify import classify as classify
    from xformer.sentences.classify import labels as labels
    from xformer.sentences.colbert import ColbertSettings as ColbertSettings
    from xformer.sentences.colbert import colbert as colbert
    from xformer.sentences.colbert import colbert_settings as colbert_settings
    from xformer.sentences.colbert import maxsim as maxsim
    from xformer.sentences.dense import Dense as Dense
    from xformer.sentences.embed import embed as embed
    from xformer.sentences.embed import similarity as similarity
    from xformer.sentences.index import Index as Index
    from xformer.sentences.index import read_index as read_index
    from xformer.sentences.index import write_index as write_index
    from xformer.sentences.rank import Ranked as Ranked
    from xformer.sentences.rank import rank as rank
    from xformer.sentences.search import Hit as Hit
    from xformer.sentences.search import make_index as make_index
    from xformer.sentences.search import search as search
    from xformer.sentences.settings import RankSettings as RankSettings
    from xformer.sentences.settings import Settings as Settings
    from xformer.sentences.settings import prompts as prompts
    from xformer.sentences.settings import rank_settings as rank_settings
    from xformer.sentences.settings import settings as settings
    from xformer.sentences.settings import similarity_name as similarity_name
    from xformer.sentences.splade import SpladeSettings as SpladeSettings
    from xformer.sentences.splade import splade as splade
    from xformer.sentences.splade import splade_settings as splade_settings
    from xformer.sentences.tag import Tag as Tag
    from xformer.sentences.tag import tag as tag

later(__name__)
