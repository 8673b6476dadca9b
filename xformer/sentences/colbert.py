"""ColBERT: a vector for each token of a text, and the score of two such texts."""

from __future__ import annotations

import os
import string
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import device

from xformer import ops
from xformer.base.namespace import array_namespace
from xformer.base.typing import Array
from xformer.compiling import Forward
from xformer.dispatch.checks import require_sizes
from xformer.pretrained.config import Config
from xformer.pretrained.files import CONFIG, open_tensors
from xformer.pretrained.loading import COLBERT, PROJECTION
from xformer.pretrained.reading import PretrainedError, read_json
from xformer.sentences.batches import (
    KEPT,
    Progress,
    encodings,
    listed,
    longest,
    outputs,
    require_language_model,
    require_text_ids,
)
from xformer.sentences.dense import Dense, dense, maps_like, read_dense, read_linear, width_after
from xformer.sentences.settings import METADATA, MODULES, WHOLE, read_max_len, read_modules

CHAIN, WANTED = "Transformer( Dense)+", "Transformer and one Dense or more"
QUERY_LEN = 32  # tokens, of a query without another setting


class ColbertSettings(NamedTuple):
    """Options of `colbert`, for queries or for documents."""

    modules: tuple[Dense, ...] = ()
    marker: str = ""
    max_len: int | None = None
    expand: bool = False
    attend: bool = False
    skiplist: tuple[str, ...] = ()


def colbert(
    model: Any,
    params: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    modules: tuple[Dense, ...] = (),
    marker: str = "",
    max_len: int | None = None,
    expand: bool = False,
    attend: bool = False,
    skiplist: tuple[str, ...] = (),
    batch_size: int = 32,
    progress: Progress | None = None,
) -> list[np.ndarray]:
    """The vectors (T, P) of length 1 of the tokens of each text (arXiv:2004.12832).

    The hidden state of each token is mapped by `modules`, then normalised. `maxsim` scores queries
    and documents. `colbert_settings(folder, query=True)` has the options of a model.

    model: a LanguageModel
    modules: Dense modules of each token's hidden state
    marker: a token of the vocabulary that follows the special tokens before a text, such as
        "[unused0]"; a text before each text if the vocabulary does not have it
    max_len: the most tokens of a text, special tokens and marker included; None: the model's
    expand: fill each text with the mask token to max_len tokens, whose vectors are returned too
    attend: whether tokens attend to those mask tokens
    skiplist: tokens whose vectors are left out, such as punctuation
    batch_size, progress, and other errors: see `embed`

    ValueError for expand without max_len, and for a tokenizer without a mask token.
    """
    require_language_model("colbert", model)
    texts = listed("colbert", texts)
    width_after("colbert", modules, model.d_model)
    if not isinstance(marker, str):
        raise TypeError(f"colbert: marker must be a string, got {type(marker).__name__}")
    if expand and max_len is None:
        raise ValueError("colbert: expand needs max_len")
    fill = tokenizer.mask_id if expand else None
    if expand and fill is None:
        raise ValueError("colbert: expand needs a tokenizer with a mask token")
    limit = longest("colbert", model, max_len)
    encoded = _encoded(tokenizer, texts, marker, limit)
    lengths = [len(ids) for ids in encoded]
    if fill is not None:
        encoded = [np.append(ids, [fill] * (limit - len(ids))) for ids in encoded]
    require_text_ids("colbert", encoded, model.embed.vocab_size)
    fields = [encoded]
    if fill is not None and not attend:
        fields.append([np.asarray(np.arange(limit) < n, np.int64) for n in lengths])
    run = _vectors(model, tuple(module.activation for module in modules))
    maps = maps_like(params, modules)
    skipped = [tokenizer.token_id(word) for word in skiplist]
    (batch_size,) = require_sizes("colbert", 1, batch_size=batch_size)
    vectors: list[Any] = [None] * len(texts)

    def forward(params: Any, *arrays: Array) -> Array:
        return run((params, maps), *arrays)

    for numbers, rows in outputs(params, fields, forward, limit, batch_size):
        for i, row in zip(numbers, rows, strict=True):
            kept = ~np.isin(encoded[i], [n for n in skipped if n is not None])
            vectors[i] = row[: len(kept)][kept]
        if progress is not None:
            progress(len(numbers))
    return vectors


def maxsim(queries: Sequence[np.ndarray], documents: Sequence[np.ndarray]) -> np.ndarray:
    """The scores (Q, N) of texts with a vector a token: sum_i max_j q_i . d_j (MaxSim).

    queries, documents: the vectors (T, P) of each text. ValueError for other shapes.
    """
    width = next((x.shape[-1] for x in (*queries, *documents) if x.ndim), 0)
    for name, texts in (("queries", queries), ("documents", documents)):
        for i, x in enumerate(texts):
            if x.ndim != 2 or not len(x) or x.shape[1] != width:
                raise ValueError(
                    f"maxsim: {name}[{i}] must be (T, P) with P = {width}, got shape {x.shape}"
                )
    if not len(queries) or not len(documents):
        return np.zeros((len(queries), len(documents)))
    starts = np.cumsum([0, *(len(x) for x in documents[:-1])])
    tokens = np.concatenate(documents).T  # (P, all tokens)
    return np.stack([np.maximum.reduceat(q @ tokens, starts, axis=1).sum(0) for q in queries])


def colbert_settings(folder: str | os.PathLike[str], *, query: bool) -> ColbertSettings:
    """The options of `colbert` in a model's folder, for queries or for documents.

    The folder is of PyLate (modules.json and `1_Dense`), or of ColBERT itself (HF_ColBERT, with
    artifact.metadata). PretrainedError for damaged files and for what is not supported.
    """
    root = Path(folder)
    if os.path.lexists(root / MODULES):
        return _of_pylate(root, query)
    if read_json(root / CONFIG).get("architectures") == [COLBERT]:
        return _of_stanford(root, query)
    raise PretrainedError(f"{root}: is no ColBERT model: it has no {MODULES} and is no {COLBERT}")


def _of_pylate(root: Path, query: bool) -> ColbertSettings:
    _, paths = read_modules(root / MODULES, CHAIN, WANTED)
    modules = tuple(read_dense(root / path, "token_embeddings") for path in paths[1:])
    c = Config(read_json(root / WHOLE), str(root / WHOLE))
    c.ignore("__version__", "requirements", "default_prompt_name")
    c.only("similarity_fn_name", "MaxSim")
    c.only("model_type", "ColBERT")
    c.only("prompts", {}, {"query": "", "document": ""})
    markers = [c.text(f"{role}_prefix", default="") for role in ("query", "document")]
    lengths = [c.integer(f"{role}_length", low=3, default=None) for role in ("query", "document")]
    expand = c.flag("do_query_expansion", default=True)
    attend = c.flag("attend_to_expansion_tokens", default=False)
    skiplist = c.texts("skiplist_words", default=tuple(string.punctuation))
    c.finish()
    if query:
        length = lengths[0] or (QUERY_LEN if expand else read_max_len(root))
        return ColbertSettings(modules, markers[0], length, expand, expand and attend)
    length = lengths[1] or read_max_len(root)
    return ColbertSettings(modules, markers[1], length, skiplist=skiplist)


def _of_stanford(root: Path, query: bool) -> ColbertSettings:
    tensors = open_tensors(root)
    if PROJECTION not in tensors:
        raise PretrainedError(f"{root}: has no {PROJECTION}")
    if len(shape := tensors[PROJECTION].shape) != 2:
        raise PretrainedError(f"{root}: {PROJECTION} must be a matrix, got shape {shape}")
    modules = (Dense(read_linear(root, "linear", (shape[1], shape[0]), False, alone=False)),)
    path = root / METADATA
    c = Config(read_json(path) if os.path.lexists(path) else {}, str(path))
    c.only("similarity", "cosine")
    if query:
        length = c.integer("query_maxlen", low=3, default=QUERY_LEN)
        attend = c.flag("attend_to_mask_tokens", default=False)
        marker = c.text("query_token_id", default="[unused0]")
        return ColbertSettings(modules, marker, length, True, attend)
    length = c.integer("doc_maxlen", low=3, default=None) or read_max_len(root)
    skiplist = tuple(string.punctuation) if c.flag("mask_punctuation", default=True) else ()
    marker = c.text("doc_token_id", default="[unused1]")
    return ColbertSettings(modules, marker, length, skiplist=skiplist)


def _encoded(tokenizer: Any, texts: Sequence[str], marker: str, limit: int) -> list[np.ndarray]:
    """The ids of each text with the marker, at most `limit`, with a warning for longer texts."""
    number = next(
        (
            n
            for word in (marker, *marker.split()[:1])
            if (n := tokenizer.token_id(word)) is not None
        ),
        None,
    )
    prompt, n_added = (marker, 0) if number is None else ("", 1)
    rows = []
    for found in encodings("colbert", tokenizer, texts, prompt, limit, n_added=n_added):
        ids = list(found.ids)
        if number is not None:  # an empty text has only special tokens: the marker is the second
            ids.insert(found.special.index(False) if False in found.special else 1, number)
        rows.append(np.asarray(ids, np.int64))
    return rows


@lru_cache(KEPT)
def _vectors(model: Any, activations: tuple[str | None, ...]) -> Forward:
    """A function from tokens (B, T) and their mask to the normalised vectors (B, T, P).

    Its optional last argument (B, T) is 1 for the tokens that are attended to.
    """

    def vectors(params: Any, tokens: Array, mask: Array, seen: Array | None = None) -> Array:
        own, maps = params
        positions = None
        if seen is not None:
            xp = array_namespace(tokens)
            steps = xp.arange(tokens.shape[1], dtype=tokens.dtype, device=device(tokens))
            mask, positions = seen != 0, xp.broadcast_to(steps[None, :], tokens.shape)
        x, _ = model.hidden(own, tokens, mask=mask, positions=positions)
        x = dense(x, tuple(map(Dense, maps, activations)))
        return ops.l2_normalize(x)[0]

    return Forward(vectors)
