"""The tokenizer classes of transformers: normaliser, pre-tokeniser, decoder and post-processor.

As in transformers 5, a class named by the files replaces these parts of tokenizer.json. Its
settings are in tokenizer_config.json. The vocabulary and the merges stay as in tokenizer.json. The
post-processor stays too, unless the class has one.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from xformer.pretrained.config import Config
from xformer.pretrained.reading import PretrainedError
from xformer.pretrained.tokenizer_config import content, package

END = "<|endoftext|>"
BERT_KEYS = {  # of tokenizer_config.json: name in tokenizer.json
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
SPACE = "\u2581"  # represents a space in pieces
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)

Rules = Callable[[Any, Config], None]


class Kind(NamedTuple):
    """A tokenizer class.

    model: the name of its model in `tokenizers`.
    tokens: its tokens, unless the files name others.
    rules: sets the normaliser, the pre-tokeniser and the decoder.
    around: sets the post-processor; None keeps the one of tokenizer.json.
    extra: returns further special tokens, unless the files name some.
    strips: its mask token includes the spaces before it, whatever its text.
    """

    model: str
    tokens: Mapping[str, str | None]
    rules: Rules
    around: Rules | None = None
    extra: Callable[[Config], list[str]] | None = None
    strips: bool = False


def of_class(kind: Kind, source: Any, config: Config) -> Any:
    """A tokenizer of the class `kind` with the model of `source`, without its added tokens."""
    inner = package().Tokenizer(source.model)
    if (normalizer := _precompiled(source)) is not None:
        inner.normalizer = normalizer
    if source.post_processor is not None:
        inner.post_processor = source.post_processor
    if source.truncation is not None:
        inner.enable_truncation(**source.truncation)
    kind.rules(inner, config)
    return inner


def with_id(inner: Any, config: Config, kind: str) -> tuple[str, int]:
    """(token, id) of a token that a class needs. PretrainedError if there is none."""
    token = content(config, kind)
    if token is None:
        raise PretrainedError(f"{config.where}: {kind} must be a token, got None")
    i: int | None = inner.token_to_id(token)
    if i is None:
        raise PretrainedError(f"{config.where}: {token!r:.100} must be in the vocabulary")
    return token, i


def ends(inner: Any, config: Config) -> None:
    """Set the post-processor according to add_bos_token and add_eos_token."""
    tokens = {
        side: with_id(inner, config, f"{side}_token")
        for side in ("bos", "eos")
        if config.flag(f"add_{side}_token", default=False) and content(config, f"{side}_token")
    }
    before, after = ([tokens[side][0]] if side in tokens else [] for side in ("bos", "eos"))
    second = [f"{token}:1" for token in (*before, "$B", *after)]
    inner.post_processor = package().processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *second],
        special_tokens=list(tokens.values()),
    )


def _bert(inner: Any, config: Config) -> None:
    t = package()
    model = inner.model
    model.unk_token = content(config, "unk_token") or "[UNK]"
    model.max_input_chars_per_word, model.continuing_subword_prefix = 100, "##"
    inner.normalizer = t.normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.flag("tokenize_chinese_chars", default=True),
        strip_accents=config.flag("strip_accents", default=None),
        lowercase=config.flag("do_lower_case", default=True),
    )
    inner.pre_tokenizer = t.pre_tokenizers.BertPreTokenizer()
    inner.decoder = t.decoders.WordPiece(prefix="##")


def _bert_ends(inner: Any, config: Config) -> None:
    tokens = [with_id(inner, config, kind) for kind in ("cls_token", "sep_token")]
    first, last = (name for name, _ in tokens)
    inner.post_processor = package().processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", last, "$B:1", f"{last}:1"],
        special_tokens=tokens,
    )


def _byte_level(inner: Any, config: Config) -> None:
    t = package()
    spaced = config.flag("add_prefix_space", default=False)
    _pairs(inner)
    inner.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    inner.decoder = t.decoders.ByteLevel()


def _roberta_ends(inner: Any, config: Config) -> None:
    sep, cls = (with_id(inner, config, kind) for kind in ("sep_token", "cls_token"))
    inner.post_processor = package().processors.RobertaProcessing(
        sep,
        cls,
        trim_offsets=config.flag("trim_offsets", default=True),
        add_prefix_space=config.flag("add_prefix_space", default=False),
    )


def _neox(inner: Any, config: Config) -> None:
    _byte_level(inner, config)
    inner.normalizer = package().normalizers.NFC()


def _qwen2(inner: Any, config: Config) -> None:
    t = package()
    spaced = config.flag("add_prefix_space", default=False)
    _pairs(inner)
    inner.normalizer = t.normalizers.NFC()
    inner.pre_tokenizer = t.pre_tokenizers.Sequence(
        [
            t.pre_tokenizers.Split(t.Regex(QWEN2), behavior="isolated"),
            t.pre_tokenizers.ByteLevel(add_prefix_space=spaced, use_regex=False),
        ]
    )
    inner.decoder = t.decoders.ByteLevel()


def _llama(inner: Any, config: Config) -> None:
    t = package()
    spaced = config.flag("add_prefix_space", default=True, null=True)
    scheme = "always" if config.flag("legacy", default=False) else "first"
    _pairs(inner, of_pieces=True)
    inner.pre_tokenizer = t.pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme=scheme if spaced else "never", split=False
    )
    inner.decoder = _of_pieces(*([t.decoders.Strip(" ", 1, 0)] if spaced else []))


def _gemma(inner: Any, config: Config) -> None:
    t = package()
    _pairs(inner, of_pieces=True, unknown=content(config, "unk_token"))
    inner.normalizer = t.normalizers.Replace(" ", SPACE)
    inner.pre_tokenizer = t.pre_tokenizers.Split(" ", behavior="merged_with_previous")
    inner.decoder = _of_pieces()


def _t5(inner: Any, config: Config) -> None:
    _require_unknown(inner, config, 2)
    _words(inner)


def _t5_ends(inner: Any, config: Config) -> None:
    end = with_id(inner, config, "eos_token")
    inner.post_processor = package().processors.TemplateProcessing(
        single=["$A", end[0]], pair=["$A", end[0], "$B", end[0]], special_tokens=[end]
    )


def _sentinels(config: Config) -> list[str]:
    return [f"<extra_id_{i}>" for i in range(config.integer("extra_ids", high=10_000, default=100))]


def _albert(inner: Any, config: Config) -> None:
    t = package()
    n = t.normalizers
    _require_unknown(inner, config, 1)
    steps = [n.Replace("``", '"'), n.Replace("''", '"')]
    if not config.flag("keep_accents", default=False):
        steps += [n.NFKD(), n.StripAccents()]
    if config.flag("do_lower_case", default=True):
        steps.append(n.Lowercase())
    if inner.normalizer is not None:
        steps.append(inner.normalizer)
    inner.normalizer = n.Sequence(steps)
    _words(inner, spaced=config.flag("add_prefix_space", default=True))


def _albert_ends(inner: Any, config: Config) -> None:
    if inner.post_processor is None:
        _bert_ends(inner, config)


def _xlm_roberta(inner: Any, config: Config) -> None:
    _require_unknown(inner, config, 3)
    _words(inner, spaced=config.flag("add_prefix_space", default=True))


def _camembert(inner: Any, config: Config) -> None:
    # The id of unk_token, or 0 if the vocabulary has no such token, as in transformers.
    _require_unknown(inner, config, inner.token_to_id(content(config, "unk_token") or "") or 0)
    _words(inner, spaced=config.flag("add_prefix_space", default=True))


def _xlm_roberta_ends(inner: Any, config: Config) -> None:
    tokens = [with_id(inner, config, kind) for kind in ("bos_token", "eos_token")]
    first, last = (name for name, _ in tokens)
    inner.post_processor = package().processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", last, last, "$B", last],
        special_tokens=tokens,
    )


def _not_used(config: Config) -> list[str]:
    return [f"{token}NOTUSED" for token in ("<s>", "</s>", "<unk>")]


def _words(inner: Any, *, spaced: bool = True) -> None:
    """Split a text at its spaces. spaced: a word begins with one, also the first of a text."""
    t = package()
    spaces = {"replacement": SPACE, "prepend_scheme": "always" if spaced else "never"}
    inner.pre_tokenizer = t.pre_tokenizers.Sequence(
        [t.pre_tokenizers.WhitespaceSplit(), t.pre_tokenizers.Metaspace(**spaces)]
    )
    inner.decoder = t.decoders.Metaspace(**spaces)


def _pairs(inner: Any, *, of_pieces: bool = False, unknown: str | None = None) -> None:
    """Set the options of byte-pair merging.

    of_pieces: merge pieces, with bytes for unknown characters; False: merge bytes.
    """
    model = inner.model
    model.unk_token, model.dropout = unknown, None
    model.fuse_unk = model.byte_fallback = of_pieces
    model.ignore_merges = False


def _of_pieces(*more: Any) -> Any:
    d = package().decoders
    return d.Sequence([d.Replace(SPACE, " "), d.ByteFallback(), d.Fuse(), *more])


def _require_unknown(inner: Any, config: Config, wanted: int) -> None:
    got = json.loads(inner.model.__getstate__()).get("unk_id")
    if got != wanted:
        raise PretrainedError(
            f"{config.where}: the class's unknown token must have id {wanted}, "
            f"tokenizer.json says {got}"
        )


def require_agreement(inner: Any, config: Config) -> None:
    """PretrainedError if BERT's normaliser in tokenizer.json has other settings than config.

    It is for classes that are not in `KINDS`, because it is unknown which settings they use.
    """
    for part in _normalizers(inner):
        for key, theirs in BERT_KEYS.items():
            if part["type"] == "BertNormalizer" and config.flag(key, default=None) is not None:
                config.only(key, part[theirs])


def _normalizers(inner: Any) -> list[dict[str, Any]]:
    """The normalisers of a tokenizer, in the format of tokenizer.json."""
    if inner.normalizer is None:
        return []
    state = json.loads(inner.normalizer.__getstate__())
    parts: list[dict[str, Any]] = state.get("normalizers", [state])
    return parts


def _precompiled(inner: Any) -> Any:
    """The precompiled normaliser of SentencePiece in tokenizer.json; None if there is none."""
    for part in _normalizers(inner):
        if part["type"] == "Precompiled":
            return package().normalizers.Precompiled(b64decode(part["precompiled_charsmap"]))
    return None


def _same(*kinds: str, token: str | None) -> dict[str, str | None]:
    return dict.fromkeys([f"{kind}_token" for kind in kinds], token)


_ROBERTA = (
    _same("bos", "cls", token="<s>")
    | _same("eos", "sep", token="</s>")
    | {f"{kind}_token": f"<{kind}>" for kind in ("unk", "pad", "mask")}
)
AROUND = (_bert_ends, _roberta_ends)  # post-processors that add [CLS] and [SEP] around a text

KINDS = {
    "BertTokenizer": Kind(
        "WordPiece",
        {f"{kind}_token": f"[{kind.upper()}]" for kind in ("unk", "sep", "pad", "cls", "mask")},
        _bert,
        _bert_ends,
    ),
    "GPT2Tokenizer": Kind(
        "BPE", _same("bos", "eos", "unk", token=END) | _same("pad", token=None), _byte_level
    ),
    "MPNetTokenizer": Kind(
        "WordPiece", _ROBERTA | {"unk_token": "[UNK]"}, _bert, _roberta_ends, strips=True
    ),
    "RobertaTokenizer": Kind("BPE", _ROBERTA, _byte_level, _roberta_ends),
    "GPTNeoXTokenizer": Kind(
        "BPE",
        _same("bos", "eos", "unk", token=END) | _same("pad", token="<|padding|>"),
        _neox,
        ends,
    ),
    "Qwen2Tokenizer": Kind(
        "BPE", _same("eos", "unk", "pad", token=END) | _same("bos", token=None), _qwen2
    ),
    "LlamaTokenizer": Kind(
        "BPE", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, _llama
    ),
    "GemmaTokenizer": Kind(
        "BPE",
        {f"{kind}_token": f"<{kind}>" for kind in ("bos", "eos", "unk", "pad", "mask")},
        _gemma,
    ),
    "T5Tokenizer": Kind(
        "Unigram",
        {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        _t5,
        _t5_ends,
        _sentinels,
    ),
    "AlbertTokenizer": Kind(
        "Unigram",
        _same("bos", "cls", token="[CLS]")
        | _same("eos", "sep", token="[SEP]")
        | {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "[MASK]"},
        _albert,
        _albert_ends,
    ),
    "XLMRobertaTokenizer": Kind("Unigram", _ROBERTA, _xlm_roberta, _xlm_roberta_ends),
    "CamembertTokenizer": Kind(
        "Unigram", _ROBERTA, _camembert, _xlm_roberta_ends, _not_used, strips=True
    ),
}
