"""Reading of tokenizer files into tokenizers of the package `tokenizers`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xformer.base.choices import near_path
from xformer.pretrained import llama2c
from xformer.pretrained.config import Config
from xformer.pretrained.reading import PretrainedError, listed, read_json, read_text
from xformer.pretrained.tokenizer_classes import (
    AROUND,
    KINDS,
    Kind,
    ends,
    of_class,
    require_agreement,
    with_id,
)
from xformer.pretrained.tokenizer_config import (
    BY_ID,
    CONFIG,
    EXTRA,
    MAX_ID,
    NAMED,
    class_of,
    content,
    package,
    require_followed,
    require_ids,
    tokens_of,
)

PLAIN = ("PreTrainedTokenizer", "TokenizersBackend")  # classes without rules
LIMIT = 64 << 20  # bytes of a tokenizer.json
PART_LIMIT = 8 << 20  # of a vocabulary, or of merges: about a million of them
CONVERT = (
    "transformers converts it: AutoTokenizer.from_pretrained(folder).save_pretrained(folder) "
    "writes tokenizer.json"
)


# The tokenizer, and the default tokens of its class by key.
Built = tuple[Any, dict[str, str | None]]


def build(path: Path, config: Config) -> Built:
    """The tokenizer of a folder, or of one of its files (see `tokenizer.tokenizer`)."""
    package()
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}{near_path(path)}")
    folder = path if path.is_dir() else path.parent
    names = sorted(os.listdir(folder)) if path.is_dir() else [path.name]
    for pattern, read in FILES.items():
        for name in names:
            if re.fullmatch(pattern, name):
                with translated(folder / name):
                    return read(folder / name, config)
    raise FileNotFoundError(f"{path} is no file of a tokenizer, and no folder with one")


@contextmanager
def translated(where: object) -> Iterator[None]:
    """A context that raises errors of the package, and its Rust panics, as PretrainedError."""
    try:
        yield
    except (PretrainedError, OSError):
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise PretrainedError(f"{where}: {error}") from error
        raise


def _whole(path: Path, config: Config) -> Built:
    """The tokenizer of tokenizer.json, with the rules of a class of transformers if one counts."""
    text = read_text(path, LIMIT)
    source = package().Tokenizer.from_str(text)
    name, is_named = class_of(config, path.parent)
    if name == "LlamaTokenizer" and '"ByteLevel"' in text:  # Llama 3 names it, but does not use it
        name = None
    kind = KINDS.get(name or "")
    if kind is not None and type(source.model).__name__ != kind.model:
        if is_named:
            raise PretrainedError(
                f"{path}: for tokenizer_class {name} its model must be {kind.model}, got "
                f'{type(source.model).__name__}; with tokenizer_class "PreTrainedTokenizerFast" '
                f"in {CONFIG}, {path.name} alone counts"
            )
        kind = None
    is_known = name in (*KINDS, None, *PLAIN)
    require_followed(config, is_known)
    if not is_known:
        require_agreement(source, config)
    without = ("add_bos_token", "add_eos_token")  # the post-processor decides
    data = {key: value for key, value in config.data.items() if key not in without}
    return _finished(source, kind, Config(data, config.where))


def _finished(source: Any, kind: Kind | None, config: Config) -> Built:
    """The tokenizer with the rules of its class and the added tokens."""
    usual: dict[str, str | None] = {}
    if source.padding is not None:
        usual["pad_token"] = source.padding["pad_token"]
    if kind is not None:
        usual = dict.fromkeys(NAMED) | usual | dict(kind.tokens)
    extra = {}
    if kind is not None and kind.extra is not None and not config.data.keys() & set(EXTRA):
        extra[EXTRA[0]] = kind.extra(config)
    data = {**usual, **extra, **config.data}
    if kind is not None and kind.strips and isinstance(data["mask_token"], str):
        data["mask_token"] = {"content": data["mask_token"], "lstrip": True}
    config = Config(data, config.where)
    inner = source if kind is None else of_class(kind, source, config)
    _add(inner, source, config)
    if kind is not None and kind.around is not None:
        kind.around(inner, config)
    elif kind is not None and inner.post_processor is None:
        ends(inner, config)
    return inner, usual


def _add(inner: Any, source: Any, config: Config) -> None:
    """Add the tokens that the files name, in the order in which transformers assigns ids."""
    named, extra, by_id = tokens_of(config)
    older = source.get_added_tokens_decoder()
    if config.data.get(BY_ID) is None:
        by_id |= older
    known = {token.content for token in inner.get_added_tokens_decoder().values()}
    known |= {token.content for token in by_id.values()}
    names = {token.content for token in named.values() if token}
    tokens = [by_id[i] for i in sorted(by_id)]
    for token in tokens:
        token.special = token.special or token.content in names
    more = [token for token in [*named.values(), *extra] if token and token.content not in known]
    inner.add_tokens(tokens + more)
    require_ids(config, by_id, inner)
    now = {token.content for token in inner.get_added_tokens_decoder().values()}
    if lost := {token.content for token in older.values()} - now:
        raise PretrainedError(
            f"{config.where}: {BY_ID} must have the tokens that tokenizer.json adds, it lacks "
            f"{listed(lost)}"
        )


def _byte_level(path: Path, config: Config) -> Built:
    """Byte-level BPE of GPT-2, or of RoBERTa, which adds <s> and </s> around a text."""
    t, folder = package(), path.parent
    name = _class(
        config, folder, "GPT2Tokenizer", "RobertaTokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer"
    )
    vocab = _vocab(read_json(folder / "vocab.json", PART_LIMIT), folder / "vocab.json")
    merges = _merges(folder / "merges.txt")
    if lacking := set(t.pre_tokenizers.ByteLevel.alphabet()) - vocab.keys():
        raise PretrainedError(f"{folder / 'vocab.json'}: lacks the bytes {listed(lacking)}")
    if name is None:
        name = "RobertaTokenizer" if {"<s>", "</s>"} <= vocab.keys() else "GPT2Tokenizer"
    return _of_files(t.models.BPE(vocab, merges), name, config)


def _word_piece(path: Path, config: Config) -> Built:
    """WordPiece of BERT or MPNet, from a file with one token a line."""
    name = _class(config, path.parent, "BertTokenizer", "MPNetTokenizer") or "BertTokenizer"
    config.only("do_basic_tokenize", True)
    lines = read_text(path, PART_LIMIT).replace("\r\n", "\n").removesuffix("\n").split("\n")
    vocab = {token: i for i, token in enumerate(lines)}
    unknown = content(config, "unk_token") or "[UNK]"
    model = package().models.WordPiece(vocab, unk_token=unknown)
    return _of_files(model, name, config, "unk_token")


def _of_files(model: Any, name: str, config: Config, *needed: str) -> Built:
    """A tokenizer of the class `name`. Its vocabulary must have the tokens around a text."""
    require_followed(config, True)
    source, kind = package().Tokenizer(model), KINDS[name]
    if kind.around in AROUND:
        needed += ("cls_token", "sep_token")
    merged = Config({**kind.tokens, **config.data}, config.where)
    for token in needed:
        with_id(source, merged, token)
    return _finished(source, kind, config)


def _llama2c(path: Path, config: Config) -> Built:
    """BPE of SentencePiece: the pair whose merged piece has the highest score is merged first."""
    t = package()
    pieces = llama2c.read_pieces(path)
    vocab = {piece: i for i, (piece, _) in enumerate(pieces)}
    plain = dict(pieces[llama2c.FIRST_PIECE :])
    splits = (
        (piece[:i], piece[i:])
        for piece in plain
        for i in range(1, len(piece))
        if piece[i:] in plain
    )
    merges = [(left, right) for left, right in splits if left in plain]
    merges.sort(key=lambda pair: (-plain[pair[0] + pair[1]], -len(pair[0])))
    model = t.models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    inner = t.Tokenizer(model)
    usual: dict[str, str | None] = {"bos_token": "<s>", "eos_token": "</s>"}
    config = Config({**usual, **config.data}, config.where)
    first = with_id(inner, config, "bos_token")
    _add(inner, inner, config)
    space = "\u2581"  # represents a space in pieces
    inner.normalizer = t.normalizers.Sequence(
        [t.normalizers.Prepend(space), t.normalizers.Replace(" ", space)]
    )
    inner.post_processor = t.processors.TemplateProcessing(
        single=[first[0], "$A"], special_tokens=[first]
    )
    decoders = t.decoders
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace(space, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return inner, usual


def _sentence_piece(path: Path, config: Config) -> Built:
    raise PretrainedError(f"{path}: SentencePiece models are not supported; {CONVERT}")


def _vocab(data: dict[str, Any], path: Path) -> dict[str, int]:
    for token, i in data.items():
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < MAX_ID:
            raise PretrainedError(f"{path}: {token!r:.100} must have an id, got {i!r:.100}")
    return data


def _merges(path: Path) -> list[tuple[str, str]]:
    merges = []
    for i, line in enumerate(read_text(path, PART_LIMIT).replace("\r\n", "\n").split("\n")):
        if not line or (i == 0 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise PretrainedError(f"{path}: line {i + 1} must be two tokens, got {line!r:.100}")
        merges.append((left, right))
    return merges


def _class(config: Config, folder: Path, *names: str) -> str | None:
    """The class that the files name, one of `names`; None if they name none.

    PretrainedError for another class.
    """
    name, is_named = class_of(config, folder)
    if name in names:
        return name
    if is_named:
        wanted, got = " or ".join(names), config.data.get("tokenizer_class", name)
        raise PretrainedError(
            f"{config.where}: without a tokenizer.json, tokenizer_class must be {wanted}, got "
            f"{got!r:.100}; {CONVERT}"
        )
    return None


# Pattern of a file's name -> its reader. In a folder, the first pattern that matches is used.
FILES: dict[str, Callable[[Path, Config], Built]] = {
    r"tokenizer\.json": _whole,
    r"vocab\.json|merges\.txt": _byte_level,
    r"vocab\.txt": _word_piece,
    r".*\.model": _sentence_piece,
    r"tok\w*\.bin": _llama2c,
}
