"""Encoding of text to token ids and decoding, with the tokenizer in a model's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from xformer.base.files import replacing
from xformer.pretrained.config import Config
from xformer.pretrained.tokenizer_config import (
    CONFIG,
    EXTRA,
    MAX_ID,
    NAMED,
    content,
    settings,
    tokens_of,
)
from xformer.pretrained.vocabularies import build, translated

# Names to look for if no tokenizer_config.json names these tokens.
USUAL = {
    "bos_token": ("<s>", "<bos>", "<|begin_of_text|>", "<|endoftext|>"),
    "eos_token": ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    "pad_token": ("<pad>", "[PAD]"),
    "mask_token": ("<mask>", "[MASK]"),
    "unk_token": ("<unk>", "[UNK]"),
}
ENDS = ("cls_token", "sep_token")
PLAIN = "PreTrainedTokenizerFast"  # the class that follows tokenizer.json
LEFT = ("LlamaTokenizer", "GemmaTokenizer")  # classes that pad at the left by default
# Settings that `save` writes as they were read.
KEPT = (
    *("model_input_names", "model_max_length", "padding_side", "chat_template"),
    "clean_up_tokenization_spaces",
)


def tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a folder, or of one of its files.

    It looks for these files, in this order:
    - `tokenizer.json`
    - `vocab.json` with `merges.txt` (GPT-2, RoBERTa)
    - `vocab.txt` (BERT's WordPiece)
    - `tok*.bin` of llama2.c

    ImportError without the package `tokenizers` (extra `hf`). FileNotFoundError if there is none of
    these files, PretrainedError if one is damaged or not supported.
    """
    root = Path(path)
    config = settings(root if root.is_dir() else root.parent)
    inner, usual = build(root, config)
    return Tokenizer(inner, config, str(root), usual)


class Encoding(NamedTuple):
    """The tokens of a text, or of a pair of texts."""

    ids: list[int]
    types: list[int]  # token types: 1 for the second text of a pair, if the model has them
    spans: list[tuple[int, int]]  # the characters text[start:end] of each token; else (0, 0)
    special: list[bool]  # whether the tokenizer added the token


class Tokenizer:
    """A tokenizer, which encodes text to ids and decodes ids to text.

    bos_id, eos_id, pad_id, mask_id, unk_id: ids of these tokens; None if there is no such token.
    vocab_size: one more than the largest id.
    special_ids: ids of special tokens, which are not text.
    truncation_side: the end at which `batch` truncates long texts, "right" or "left".
    guessed: kinds such as "eos_token" that no file names. For them the token of the class is used,
        or a usual name in the vocabulary.
    """

    def __init__(
        self,
        inner: Any,
        config: Config,
        where: str,
        usual: Mapping[str, str | None] = MappingProxyType({}),
    ) -> None:
        side = (inner.truncation or {}).get("direction", "right")
        self.truncation_side: str = config.text(
            "truncation_side", choices=("right", "left"), default=side
        )
        inner.encode_special_tokens = config.flag("split_special_tokens", default=False)
        inner.no_truncation()  # a file may enable truncation and padding; here the caller decides
        inner.no_padding()
        self._inner, self._where = inner, where
        inputs = config.texts("model_input_names", default=("token_type_ids",))
        self._marks_words = bool(getattr(inner.model, "continuing_subword_prefix", None))
        self._has_types = "token_type_ids" in inputs
        kept = [*KEPT, *EXTRA, *(key for key in tokens_of(config).named if key not in NAMED)]
        self._kept = {key: config.data[key] for key in kept if config.data.get(key) is not None}
        self._tokens = {kind: self._token(kind, config, usual) for kind in (*USUAL, *ENDS)}
        if str(config.data.get("tokenizer_class")).removesuffix("Fast") in LEFT:
            self._kept.setdefault("padding_side", "left")
        is_plain = config.data.get("tokenizer_class") in (None, PLAIN) and ENDS[0] not in usual
        if "model_input_names" not in self._kept and not is_plain:
            has_types = self._tokens[ENDS[0]] is not None and any(inner.encode("a", "a").type_ids)
            names = ["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"]
            self._kept["model_input_names"] = names
        tokens = (self._tokens[kind] for kind in USUAL)
        ids = (inner.token_to_id(token) if token else None for token in tokens)
        self.bos_id, self.eos_id, self.pad_id, self.mask_id, self.unk_id = ids
        self.guessed = frozenset(USUAL.keys() - config.data.keys())
        added = inner.get_added_tokens_decoder().items()
        self.special_ids = frozenset(i for i, token in added if token.special)
        self.vocab_size = max(inner.get_vocab().values(), default=-1) + 1

    @property
    def split_special_tokens(self) -> bool:
        """Whether the name of a special token in a text is encoded as text."""
        return bool(self._inner.encode_special_tokens)

    @property
    def where(self) -> str:
        """The folder or the file from which the tokenizer was read."""
        return self._where

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text, with the model's special tokens before and after it.

        special: False omits the special tokens, for a part of a text.
        """
        with translated(self._where):
            ids: list[int] = self._inner.encode(_checked(text), add_special_tokens=special).ids
        return ids

    def encoding(
        self, text: str, second: str | None = None, *, max_len: int | None = None
    ) -> Encoding:
        """The tokens of a text or of a pair of texts, with the model's special tokens.

        second: the second text of a pair
        max_len: the most tokens. Texts are truncated at truncation_side. The longer text of a pair
            is truncated first, until both have equal lengths ("longest_first" of transformers).
            Special tokens are kept. None: no limit.

        ValueError if max_len has no room for text.
        """
        extra = self._inner.num_special_tokens_to_add(second is not None)
        if max_len is not None and max_len <= extra:
            message = f"max_len must exceed the {extra} special tokens, got {max_len}"
            raise ValueError(f"encode: {message}")
        texts = _checked(text), None if second is None else _checked(second)
        with translated(self._where):
            found = self._inner.encode(*texts)
        types = found.type_ids if self._has_types else [0] * len(found.ids)
        special = [bool(flag) for flag in found.special_tokens_mask]
        whole = Encoding(found.ids, types, found.offsets, special)
        if max_len is None or len(found.ids) <= max_len:
            return whole
        kept = _kept(found.sequence_ids, max_len, self.truncation_side)
        fields: Any = ([field[i] for i in kept] for field in whole)
        return Encoding(*fields)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without special tokens and unknown ids.

        ValueError for an id outside [0, 2^31).
        """
        numbers = [int(i) for i in ids]
        if any(not 0 <= i < MAX_ID for i in numbers):
            raise ValueError(
                f"decode: ids must lie in [0, {MAX_ID}), got {min(numbers)} to {max(numbers)}"
            )
        with translated(self._where):
            text: str = self._inner.decode(numbers)
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary; None for an unknown token."""
        number: int | None = self._inner.token_to_id(token)
        return number

    def token(self, i: int) -> str | None:
        """The token of an id in the vocabulary; None for an unknown id."""
        spelling: str | None = self._inner.id_to_token(i)
        return spelling

    def continues(self, i: int, text: str, start: int, end: int) -> bool:
        """Whether token i, which is the characters text[start:end], continues a word.

        If the tokenizer marks these tokens (BERT's ##), they are longer than their characters.
        Otherwise a token begins a word if its first character or the one before is a space. The
        unknown token begins a word. TokenClassificationPipeline of transformers has these rules.
        """
        if i == self.unk_id:
            return False
        if self._marks_words:
            return len(self.token(i) or "") != end - start
        return start > 0 and " " not in text[start - 1 : start + 1]

    def batch(
        self, texts: Sequence[str], *, side: str = "right", max_len: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids, mask) of texts: ids (B, T) int64, and mask (B, T), True for tokens.

        T is the length of the longest text. The padding is pad_id, or eos_id or 0 if there is none.

        side: the side of the padding, "right" or "left".
        max_len: longer texts are truncated at truncation_side; special tokens before and after the
            text stay. None: no limit.

        ValueError for another side, and if max_len has no room for text. TypeError for a single
        text.
        """
        self._require(texts, side, max_len)
        rows = [
            self.encode(t) if max_len is None else self.encoding(t, max_len=max_len).ids
            for t in texts
        ]
        pad = next((i for i in (self.pad_id, self.eos_id) if i is not None), 0)
        ids = np.full((len(rows), max(map(len, rows), default=0)), pad, np.int64)
        mask = np.zeros(ids.shape, np.bool_)
        for i, row in enumerate(rows):
            span = slice(len(row)) if side == "right" else slice(ids.shape[1] - len(row), None)
            ids[i, span], mask[i, span] = row, True
        return ids, mask

    def to_json(self) -> str:
        """The contents of `tokenizer.json`, as text."""
        text: str = self._inner.to_str(pretty=True)
        return text

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `tokenizer.json`, and `tokenizer_config.json` if the folder has none.

        tokenizer_config.json has the special tokens and the settings. transformers makes the same
        inputs of a model from these files. An interrupted write leaves the old files.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        tokens = {k: token for k, token in self._tokens.items() if k in USUAL or token is not None}
        config: dict[str, Any] = {"tokenizer_class": PLAIN, **tokens}
        config |= self._kept
        before = self._inner.pre_tokenizer  # transformers 4 changes it unless the key agrees
        state = {} if before is None else json.loads(before.__getstate__())
        config["add_prefix_space"] = bool(state.get("add_prefix_space", False))
        config["truncation_side"] = self.truncation_side
        config["split_special_tokens"] = self.split_special_tokens
        texts = {target / "tokenizer.json": self.to_json()}
        if not os.path.lexists(target / CONFIG):
            texts[target / CONFIG] = json.dumps(config, indent=2) + "\n"
        with replacing(*texts) as parts:
            for part, text in zip(parts, texts.values(), strict=True):
                part.write_text(text, encoding="utf-8")

    def _token(self, kind: str, config: Config, usual: Mapping[str, str | None]) -> str | None:
        """The token of a kind if the vocabulary has it: configured, of the class, or usual."""
        names: Iterable[str | None] = USUAL.get(kind, ())
        if kind in config.data or kind in usual:
            names = [content(config, kind) if kind in config.data else usual[kind]]
        return next((n for n in names if n and self._inner.token_to_id(n) is not None), None)

    def _require(self, texts: Any, side: str, max_len: int | None) -> None:
        if isinstance(texts, str):
            raise TypeError("batch: texts must be a list of texts, got one text")
        if side not in ("right", "left"):
            raise ValueError(f'batch: side must be "right" or "left", got {side!r}')
        extra = self._inner.num_special_tokens_to_add(False)
        if max_len is not None and max_len <= extra:
            message = f"max_len must exceed the {extra} special tokens, got {max_len}"
            raise ValueError(f"batch: {message}")


def _kept(sequences: Sequence[int | None], max_len: int, side: str) -> list[int]:
    """The indices of the max_len tokens that stay.

    The package's `enable_truncation` is not used, because it would also truncate the texts that
    other threads encode.

    sequences: the number of each token's text, 0 or 1; None for a special token, which stays
    """
    first, second = ([i for i, number in enumerate(sequences) if number == n] for n in (0, 1))
    room = max_len - sequences.count(None)
    fewer = min(len(first), len(second), room // 2)
    lengths = (fewer, room - fewer) if len(first) <= len(second) else (room - fewer, fewer)
    kept: set[int] = set()
    for text, n in zip((first, second), lengths, strict=True):
        kept.update(text[:n] if side == "right" else text[len(text) - n :])
    return [i for i, number in enumerate(sequences) if number is None or i in kept]


def _checked(text: Any) -> str:
    """The text. TypeError for another type, ValueError for half a surrogate pair."""
    if not isinstance(text, str):
        raise TypeError(f"encode: text must be a string, got {type(text).__name__}")
    if not text.isascii():
        text.encode()  # UnicodeEncodeError, a ValueError
    return text
