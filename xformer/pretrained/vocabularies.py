"""The files that tokenizers come in, made into tokenizers of the package `tokenizers`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xformer.pretrained import llama2c
from xformer.pretrained.config import Config
from xformer.pretrained.reading import PretrainedError, listed, read_json, read_text

CONFIG, ADDED = "tokenizer_config.json", "added_tokens.json"
MAX_ID = 1 << 31
CONFIG_LIMIT = 4 << 20
LIMIT = 64 << 20  # bytes of a tokenizer.json
PART_LIMIT = 8 << 20  # of a vocabulary, or of merges: about a million of them
CONVERT = (
    "transformers converts it: AutoTokenizer.from_pretrained(folder).save_pretrained(folder) "
    "writes tokenizer.json"
)


def build(place: Path, config: Config) -> Any:
    """The tokenizer of a folder, or of one of its files (see `tokenizer.tokenizer`)."""
    package()
    folder = place if place.is_dir() else place.parent
    names = sorted(os.listdir(folder)) if place.is_dir() else [place.name]
    for pattern, read in FILES.items():
        for name in names:
            if re.fullmatch(pattern, name):
                with translated(folder / name):
                    return read(folder / name, config)
    raise FileNotFoundError(f"{place} is no file of a tokenizer, and no folder with one")


def settings(folder: Path) -> Config:
    """`special_tokens_map.json` and `tokenizer_config.json`, of which the latter wins."""
    data: dict[str, Any] = {}
    for name in ("special_tokens_map.json", CONFIG):
        if os.path.lexists(folder / name):
            data |= read_json(folder / name, CONFIG_LIMIT)
    if os.path.lexists(folder / ADDED):
        data["added_tokens"] = read_json(folder / ADDED, CONFIG_LIMIT)
    return Config(data, str(folder / CONFIG))


def content(config: Config, kind: str) -> str | None:
    """The text of a token, which is given as such or as an object with `content`."""
    if isinstance(config.data.get(kind), dict):
        token = config.sub(kind)
        return None if token is None else token.text("content")
    return config.text(kind, default=None)


@contextmanager
def translated(where: object) -> Iterator[None]:
    """The package's errors, among them panics of its Rust code, as PretrainedError."""
    try:
        yield
    except (PretrainedError, OSError):
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise PretrainedError(f"{where}: {error}") from error
        raise


def package() -> Any:
    """The package `tokenizers`; ImportError, which names the extra, without it."""
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("tokenizers is not installed: pip install 'xformer-array[hf]'") from error
    return tokenizers


def _whole(path: Path, config: Config) -> Any:
    return package().Tokenizer.from_str(read_text(path, LIMIT))


def _byte_level(path: Path, config: Config) -> Any:
    """Byte pairs over bytes, as GPT-2 has them, or RoBERTa, whose texts stand in <s> and </s>."""
    t, folder = package(), path.parent
    kind = _family(config, "GPT2Tokenizer", "RobertaTokenizer")
    vocab = _vocab(read_json(folder / "vocab.json", PART_LIMIT), folder / "vocab.json")
    merges = _merges(folder / "merges.txt")
    if lacking := set(t.pre_tokenizers.ByteLevel.alphabet()) - vocab.keys():
        raise PretrainedError(f"{folder / 'vocab.json'}: lacks the bytes {listed(lacking)}")
    config.only("add_bos_token", False)
    spaced = config.flag("add_prefix_space", default=False)
    inner = t.Tokenizer(t.models.BPE(vocab, merges))
    inner.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    inner.decoder = t.decoders.ByteLevel()
    roberta = {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    if kind == "RobertaTokenizer" or (kind is None and {"<s>", "</s>"} <= vocab.keys()):
        tokens = _specials(inner, config, roberta | {"mask_token": "<mask>"})
        inner.post_processor = t.processors.RobertaProcessing(
            _with_id(inner, config, tokens, "sep_token"),
            _with_id(inner, config, tokens, "cls_token"),
        )
    else:
        end = "<|endoftext|>"
        _specials(inner, config, {"bos_token": end, "eos_token": end, "unk_token": end})
    return inner


def _word_piece(path: Path, config: Config) -> Any:
    """BERT's words and pieces of words, a token on each line; texts stand in [CLS] and [SEP]."""
    t = package()
    _family(config, "BertTokenizer", "DistilBertTokenizer")
    config.only("do_basic_tokenize", True)
    lines = read_text(path, PART_LIMIT).replace("\r\n", "\n").removesuffix("\n").split("\n")
    vocab = {token: i for i, token in enumerate(lines)}
    usual = {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"}
    unknown = content(config, "unk_token") or usual["unk"]
    inner = t.Tokenizer(t.models.WordPiece(vocab, unk_token=unknown))
    tokens = _specials(inner, config, {f"{kind}_token": name for kind, name in usual.items()})
    inner.normalizer = t.normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.flag("tokenize_chinese_chars", default=True),
        strip_accents=config.flag("strip_accents", default=None),
        lowercase=config.flag("do_lower_case", default=True),
    )
    inner.pre_tokenizer = t.pre_tokenizers.BertPreTokenizer()
    inner.decoder = t.decoders.WordPiece(prefix="##")
    ends = [_with_id(inner, config, tokens, kind) for kind in ("cls_token", "sep_token")]
    first, last = (name for name, _ in ends)
    inner.post_processor = t.processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", last, "$B:1", f"{last}:1"],
        special_tokens=ends,
    )
    return inner


def _llama2c(path: Path, config: Config) -> Any:
    """SentencePiece's byte pairs: the pair that makes the piece of the highest score goes first."""
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
    tokens = _specials(inner, config, {"bos_token": "<s>", "eos_token": "</s>"})
    first = _with_id(inner, config, tokens, "bos_token")
    space = "\u2581"  # stands for a space in pieces
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
    return inner


def _sentence_piece(path: Path, config: Config) -> Any:
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


def _family(config: Config, *names: str) -> str | None:
    """Which of these classes the files were made for, where that is said; others read them too."""
    name: str | None = config.text("tokenizer_class", default=None)
    if name is not None and name.removesuffix("Fast") not in names:
        wanted = " or ".join(names)
        raise PretrainedError(
            f"{config.where}: without a tokenizer.json, tokenizer_class must be {wanted}, got "
            f"{name!r:.100}; {CONVERT}"
        )
    return name and name.removesuffix("Fast")


def _specials(inner: Any, config: Config, usual: dict[str, str]) -> dict[str, str]:
    """Make the special tokens of the vocabulary known as such; kind -> token, configured or usual.

    Ones that are configured must be in the vocabulary.
    """
    named = {f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
    tokens = dict(usual)
    for kind in sorted(named & config.data.keys()):
        token = content(config, kind)
        tokens.pop(kind, None)
        if token is not None:
            _require_known(inner, config, [token])
            tokens[kind] = token
    _require_known(inner, config, _more(config))
    known = {kind: name for kind, name in tokens.items() if inner.token_to_id(name) is not None}
    # The space before a mask belongs to it: models were trained so.
    added = [
        package().AddedToken(name, special=True, normalized=False, lstrip=name == "<mask>")
        for name in dict.fromkeys(known.values())
    ]
    inner.add_special_tokens(added)
    return tokens


def _more(config: Config) -> list[str]:
    """Tokens that were added to a vocabulary later, by the two files that may say so."""
    names = list((config.sub("added_tokens") or Config({})).data)
    by_id = config.sub("added_tokens_decoder") or Config({})
    for i in by_id.data:
        if token := by_id.sub(i):
            names.append(token.text("content"))
    return names


def _require_known(inner: Any, config: Config, tokens: Iterable[str]) -> None:
    if unknown := [token for token in tokens if inner.token_to_id(token) is None]:
        raise PretrainedError(
            f"{config.where}: {listed(unknown)} must be in the vocabulary; {CONVERT}"
        )


def _with_id(inner: Any, config: Config, tokens: Mapping[str, str], kind: str) -> tuple[str, int]:
    if kind not in tokens:
        raise PretrainedError(f"{config.where}: {kind} must be a token, got None")
    _require_known(inner, config, [tokens[kind]])
    return tokens[kind], inner.token_to_id(tokens[kind])


# What a file must be called, and its reader; of a folder's files, the first in this order.
FILES: dict[str, Callable[[Path, Config], Any]] = {
    r"tokenizer\.json": _whole,
    r"vocab\.json|merges\.txt": _byte_level,
    r"vocab\.txt": _word_piece,
    r".*\.model": _sentence_piece,
    r"tok\w*\.bin": _llama2c,
}
