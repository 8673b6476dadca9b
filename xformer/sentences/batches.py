"""Run a model on texts, in batches of similar lengths."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from array_api_compat import device

from xformer import backends, ops
from xformer.backends import Backend
from xformer.base import tree
from xformer.base.tree import value
from xformer.base.typing import Array
from xformer.compiling import Forward, bucket, records
from xformer.dispatch.checks import require_sizes, require_utf8
from xformer.inspection.summary import context
from xformer.models import LanguageModel, LMHead
from xformer.models.describe import in_words
from xformer.models.language_model import LanguageModelParams
from xformer.models.usage import require_params
from xformer.pretrained.tokenizer import Encoding

# Tokens of a batch on NumPy. The arrays of a larger batch do not fit into the processor's caches,
# which takes longer for each token.
NUMPY_TOKENS = 1024

# Caller -> the model that it needs, for a message.
WANTED = {
    "embed": "an encoder, such as all-MiniLM-L6-v2, or a decoder",
    "classify": "a classifier",
    "splade": "a masked language model",
    "colbert": "an encoder or a decoder",
    "rank": "a cross-encoder, such as ms-marco-MiniLM-L6-v2",
    "tag": "a token classifier, such as bert-base-NER",
}
KEPT = 8  # models whose programs are kept
GROUPS = (4, 8, 16, 32)  # batches of the first groups of texts; the others are as the last
Progress = Callable[[int], Any]
Finished = Callable[[int, Any], Any]
Text = str | Sequence[str]  # a text, or a pair of texts


def by_batch(
    what: str,
    model: Any,
    params: Any,
    tokenizer: Any,
    texts: Sequence[Text],
    forward: Callable[..., Any],
    width: int,
    *,
    pairs: bool = False,
    max_len: int | None,
    prompt: str,
    skip: int = 0,
    batch_size: int,
    progress: Progress | None,
    finished: Finished | None = None,
    nonzero: bool = False,
) -> np.ndarray:
    """The rows (N, width) of all texts, in their order, by `forward` in batches.

    A batch has texts of similar lengths, the longest first. If programs are recorded, T is one of
    few lengths (`compiling.bucket`).

    what: the caller's name, for messages
    forward: forward(params, tokens (B, T), mask (B, T)) -> (B, width); with the token types (B, T)
        as a further argument if the model has them and a text is a pair
    pairs: whether a text may be a pair of texts
    skip: ValueError for a text without a token after this many
    progress: called with the number of texts after each batch
    finished: called with the number of a text and the rows from this text on, when they and the
        rows of all texts before are computed. Then a batch has texts of one of the `GROUPS` only
    nonzero: ValueError for a row of zeros
    For the other arguments and errors see `embed`.
    """
    require_parts(what, params, tokenizer)
    texts = listed(what, texts, pairs)
    if not isinstance(prompt, str):
        raise TypeError(f"{what}: prompt must be a string, got {type(prompt).__name__}")
    require_utf8(f"{what}: prompt", prompt)
    (batch_size,) = require_sizes(what, 1, batch_size=batch_size)
    limit = longest(what, model, max_len)
    encoded, types = list[np.ndarray](), list[np.ndarray]()
    for i, found in enumerate(encodings(what, tokenizer, texts, prompt, limit, skip=skip)):
        encoded.append(np.asarray(found.ids, np.int64))
        is_pair = not isinstance(texts[i], str)
        types.append(np.asarray(found.types if is_pair else [0] * len(found.ids), np.int64))
    require_text_ids(what, encoded, model.embed.vocab_size)
    has_types = model.embed.n_types >= 2 and any(row.any() for row in types)
    fields = [encoded, types] if has_types else [encoded]
    table = value(params.embed.table)
    y = np.empty((len(texts), width), backends.backend_of(table).to_numpy(table[:0, :]).dtype)
    first = FirstItems(len(texts))
    in_order = finished is not None
    for numbers, rows in outputs(params, fields, forward, limit, batch_size, in_order=in_order):
        y[numbers] = rows
        if nonzero and len(zeros := np.flatnonzero(~rows.any(axis=1))):
            raise ValueError(
                f"{what}: the vector of text {numbers[zeros[0]] + 1} is zero; are the weights of "
                "the model zeros?"
            )
        if progress is not None:
            progress(len(numbers))
        start, end = first.add(numbers)
        if finished is not None and end > start:
            finished(start, y[start:end])
    return y


@lru_cache(KEPT)
def activated(model: Any, activation: str) -> Forward:
    """A function from tokens (B, T), their mask and types to a classifier's activated logits.

    activation: "softmax", "sigmoid" or "identity"
    """

    def run(params: Any, tokens: Array, mask: Array, types: Any = None) -> Array:
        logits, _ = model.forward(params, tokens, mask=mask, types=types)
        if activation == "identity":
            return logits
        return (ops.sigmoid if activation == "sigmoid" else ops.softmax)(logits)[0]

    return Forward(run)


class FirstItems:
    """How many of `n` items, from the first one on, are finished."""

    def __init__(self, n: int) -> None:
        self.finished = np.zeros(n + 1, bool)  # the last one never is
        self.end = 0

    def add(self, numbers: list[int]) -> tuple[int, int]:
        """The first `end` items are finished now, and the first `start` were before."""
        self.finished[numbers] = True
        start = self.end
        self.end += int(np.argmin(self.finished[start:]))
        return start, self.end


def outputs(
    params: Any,
    fields: Sequence[list[np.ndarray]],
    forward: Callable[..., Any],
    limit: int,
    batch_size: int,
    *,
    in_order: bool = False,
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield the indices of the texts of each batch, and the output of `forward`; see `by_batch`.

    fields: the ids (T,) of each text, and perhaps the token types
    limit: the most tokens of a text
    in_order: the texts of each of the `GROUPS` come before the texts of the next one

    ValueError for an output that is not finite, and for a model whose embeddings are zero.
    """
    table = value(params.embed.table)
    backend = replace(backends.backend_of(table), device=device(table))
    # A few rows answer for most models; a whole table takes long to copy from a device.
    if not any(backend.to_numpy(rows).any() for rows in (table[:8, :], table)):
        raise ValueError("the model's embeddings of tokens are zero; are its weights zeros?")
    lengths = [len(ids) for ids in fields[0]]
    if records(params):
        lengths = [max(n, min(bucket(n), limit)) for n in lengths]
    for numbers in _batches(lengths, batch_size, backend, in_order):
        (tokens, *more), mask = _padded(
            [[field[i] for i in numbers] for field in fields], lengths[numbers[0]]
        )
        with backend.active(), np.errstate(all="ignore"):  # the check below says it once
            arrays = map(backend.asarray, (tokens, mask, *more))
            rows = backend.to_numpy(forward(params, *arrays))
        if not np.isfinite(rows).all():
            i = next(i for i, row in zip(numbers, rows, strict=True) if not np.isfinite(row).all())
            raise ValueError(f"text {i + 1}: what the model computes is not finite{_where(params)}")
        yield numbers, rows


def _where(params: Any) -> str:
    """Text: the first parameter that is not finite; empty if all are."""
    for name, leaf in tree.flatten(params).items():
        if not np.isfinite(backends.backend_of(value(leaf)).to_numpy(value(leaf))).all():
            return f", because its parameter {name} is not"
    return ""


def require_language_model(what: str, model: Any) -> None:
    """ValueError unless the model is a LanguageModel that reads tokens, and no GPT of one's own."""
    if not isinstance(model, LanguageModel) or _is_own_gpt(model):
        raise ValueError(
            f"{what}: the model must be {WANTED[what]} in a Hugging Face folder, "
            f"got {in_words(model)}"
        )
    if model.embed is None:
        raise ValueError(f"{what}: the model must read tokens, got one that reads vectors")


def _is_own_gpt(model: LanguageModel) -> bool:
    """Whether nobody trained it to embed: a causal model with logits, in no Hugging Face folder."""
    return model.causal and isinstance(model.head, LMHead) and model.hf_config is None


def require_parts(what: str, params: Any, tokenizer: Any) -> None:
    """TypeError unless the other two parts of a model are its parameters and a tokenizer."""
    require_params(what, params, LanguageModelParams)
    if not hasattr(tokenizer, "batch"):
        got = "None" if tokenizer is None else type(tokenizer).__name__
        raise TypeError(
            f"{what}: tokenizer must be one of xformer.pretrained.tokenizer.tokenizer(folder), "
            f"got {got}"
        )


def listed(what: str, texts: Any, pairs: bool = False) -> list[Any]:
    """`texts` as a list. TypeError or ValueError unless it holds texts; see `by_batch`."""
    if isinstance(texts, str | bytes):
        raise TypeError(f"{what}: texts must be a list of texts, got one text")
    if not isinstance(texts, Iterable):
        raise TypeError(f"{what}: texts must be a list of texts, got {type(texts).__name__}")
    listed = list(texts)
    for i, text in enumerate(listed):
        name = f"{what}: text {i + 1}"
        is_pair = pairs and isinstance(text, list | tuple)
        if is_pair and len(text) != 2:
            raise ValueError(f"{name} must be a string or 2 strings, got {len(text)}")
        for part in text if is_pair else (text,):
            if not isinstance(part, str):
                wanted = "a string or 2 strings" if pairs else "a string"
                raise TypeError(f"{name} must be {wanted}, got {type(part).__name__}")
            require_utf8(name, part)
    return listed


def longest(what: str, model: Any, max_len: int | None) -> int:
    """The most tokens of a text: max_len, at most the model's context."""
    if max_len is not None:
        (max_len,) = require_sizes(what, 1, max_len=max_len)
    limits = (max_len, context(model))
    return min((n for n in limits if n is not None), default=sys.maxsize)


def encodings(
    what: str,
    tokenizer: Any,
    texts: Sequence[Text],
    prompt: str,
    limit: int,
    *,
    n_added: int = 0,
    skip: int = 0,
    cut: bool = True,
) -> Iterator[Encoding]:
    """Yield the tokens of each text after `prompt`, at most `limit`.

    Longer texts are cut at the tokenizer's truncation_side, with a warning to the caller's caller's
    caller; of a pair, the longer one.

    n_added: tokens that the caller adds to each text
    cut: False: longer texts are whole
    ValueError for a text without tokens after the first `skip`, and for a prompt without room.
    """
    require_room(what, tokenizer, prompt, limit - n_added)
    long = []
    for i, text in enumerate(texts):
        first, second = (text, None) if isinstance(text, str) else text
        found = tokenizer.encoding(prompt + first, second)
        if cut and len(found.ids) > limit - n_added:
            long.append(i)
            found = tokenizer.encoding(prompt + first, second, max_len=limit - n_added)
        if len(found.ids) + n_added <= skip:
            after = " after the prompt" if skip else ""
            raise ValueError(f"{what}: text {i + 1} has no tokens{after}, got {text!r:.40}")
        yield found
    if long:
        more = f" and {len(long) - 1} more of {len(texts)}" if len(long) > 1 else ""
        message = f"{what}: cut to {limit} tokens: text {long[0] + 1}{more}"
        warnings.warn(message, stacklevel=4)


def require_room(what: str, tokenizer: Any, prompt: str, limit: int) -> None:
    """ValueError if special tokens and the prompt leave no room for a text. limit: the most ids."""
    tokenizer.batch([], max_len=limit)  # raises for special tokens
    n = len(tokenizer.encode(prompt)) if prompt else 0
    if n >= limit:
        raise ValueError(
            f"{what}: the prompt leaves no room for a text: it has {n} tokens, special tokens "
            f"included, and a text at most {limit}, got {prompt!r:.40}"
        )


def require_text_ids(what: str, encoded: Sequence[np.ndarray], vocab_size: int) -> None:
    """ValueError if an id is not below vocab_size. encoded: the ids of each text."""
    last = max((int(np.max(ids)) for ids in encoded), default=0)
    if last >= vocab_size:
        raise ValueError(
            f"{what}: the tokenizer must be the model's, whose ids are below {vocab_size}, "
            f"got id {last}"
        )


def _batches(
    lengths: list[int], batch_size: int, backend: Backend, in_order: bool
) -> Iterator[list[int]]:
    """Yield the indices of the texts of each batch, the longest texts of a group first."""
    for group in _groups(len(lengths), batch_size) if in_order else [range(len(lengths))]:
        order = sorted(group, key=lambda i: -lengths[i])
        start, n = 0, batch_size
        while start < len(order):
            if backend.name in backends.WITH_NUMPY:
                n = min(batch_size, max(1, NUMPY_TOKENS // lengths[order[start]]))
            yield order[start : start + n]
            start += n


def _groups(n_texts: int, batch_size: int) -> Iterator[range]:
    """Yield the indices of the texts of each of the `GROUPS`.

    The first group is small, so that the first results come soon. A large one needs less padding.
    """
    start = 0
    for n in itertools.chain(GROUPS, itertools.repeat(GROUPS[-1])):
        if start >= n_texts:
            return
        yield range(start, min(start + n * batch_size, n_texts))
        start += n * batch_size


def _padded(fields: list[list[np.ndarray]], length: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Each field's rows padded with 0 to (B, T) of T = length; the mask (B, T), True = a token."""
    lengths = np.asarray([len(row) for row in fields[0]])
    mask = np.arange(length) < lengths[:, None]
    padded = [np.zeros(mask.shape, np.int64) for _ in fields]
    for array, rows in zip(padded, fields, strict=True):
        array[mask] = np.concatenate(rows)
    return padded, mask
