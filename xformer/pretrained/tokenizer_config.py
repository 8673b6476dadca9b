"""tokenizer_config.json and related files: the class of a tokenizer, and its tokens.

docs/tokenizers.md lists the keys that are supported, that change no ids, and that are refused.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from xformer.pretrained.config import Config
from xformer.pretrained.reading import PretrainedError, read_json

CONFIG, ADDED, MAP = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
MODEL = "config.json"
CONFIG_LIMIT = 4 << 20  # bytes
MAX_ID = 1 << 31
NAMED = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
EXTRA = ("extra_special_tokens", "additional_special_tokens")
BY_ID = "added_tokens_decoder"

# model_type of config.json -> class, if no file names a class.
REGISTERED = {
    "albert": "AlbertTokenizer",
    "bert": "BertTokenizer",
    "camembert": "CamembertTokenizer",
    "distilbert": "BertTokenizer",
    "electra": "BertTokenizer",
    **dict.fromkeys(("gemma2", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("gpt2", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "olmoe"), "GPTNeoXTokenizer"),
    "mpnet": "MPNetTokenizer",
    "nomic_bert": "BertTokenizer",
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    "roberta": "RobertaTokenizer",
    "t5": "T5Tokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
}
# Only tokenizer.json is used, whatever class a file names.
GENERIC = ("granite", "mistral", "mixtral", "modernbert", "olmo2", "olmo3", "phi3")
FIXED = ("qwen2",)  # the registered class is used, whatever class a file names
ALIASES = {
    **dict.fromkeys(
        [f"{kind}Tokenizer" for kind in ("DistilBert", "Electra", "MobileBert", "SqueezeBert")],
        "BertTokenizer",
    ),
    **dict.fromkeys(
        [f"{kind}Tokenizer" for kind in ("Bart", "LED", "Longformer")], "RobertaTokenizer"
    ),
}


class Tokens(NamedTuple):
    """The tokens that the files name, as `tokenizers.AddedToken`."""

    named: dict[str, Any]  # by key: bos_token, ..., image_token; None: there is none
    extra: list[Any]
    by_id: dict[int, Any]


def package() -> Any:
    """The package `tokenizers`. ImportError, which names the extra, if it is not installed."""
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("tokenizers is not installed: pip install 'xformer-array[hf]'") from error
    return tokenizers


def settings(folder: Path) -> Config:
    """The settings of `tokenizer_config.json` and of the older files.

    `special_tokens_map.json` has priority. If tokenizer_config.json has `added_tokens_decoder`,
    neither the map nor `added_tokens.json` is read, as in transformers.
    """
    data: dict[str, Any] = {}
    if os.path.lexists(folder / CONFIG):
        data = read_json(folder / CONFIG, CONFIG_LIMIT)
    extra = [(key, data[key]) for key in EXTRA if data.get(key)]
    if data.get(BY_ID) is None and os.path.lexists(folder / MAP):
        data |= (older := read_json(folder / MAP, CONFIG_LIMIT))
        extra += [(key, older[key]) for key in EXTRA if older.get(key)]
    data = {key: value for key, value in data.items() if key not in EXTRA}
    # The first object, whose tokens have names, and the first list.
    for key, value in extra:
        if not any(
            isinstance(value, dict) == isinstance(data[k], dict) for k in EXTRA if k in data
        ):
            data.setdefault(key, value)
    if data.get(BY_ID) is None and os.path.lexists(folder / ADDED):
        data["added_tokens"] = read_json(folder / ADDED, CONFIG_LIMIT)
    if str(data.get("tokenizer_class")).removesuffix("Fast") == "DistilBertTokenizer":
        # It is BERT's but for the inputs. Without a name, transformers takes BERT's class.
        data.setdefault("model_input_names", ["input_ids", "attention_mask"])
    return Config(data, str(folder / CONFIG))


def class_of(config: Config, folder: Path) -> tuple[str | None, bool]:
    """(class without "Fast" or None, whether a file names it) of the tokenizer in a folder.

    config: the result of `settings`. The folder's config.json is read too.
    """
    path = folder / MODEL
    model = Config(read_json(path) if os.path.lexists(path) else {}, str(path))
    named = config.text("tokenizer_class", default=None)
    named = named or model.text("tokenizer_class", default=None)
    kind = model.text("model_type", default=None)
    if kind in GENERIC:
        return None, named is not None
    if named is None or kind in FIXED:
        return REGISTERED.get(kind), False
    name = named.removesuffix("Fast")
    return ALIASES.get(name, name), True


def require_followed(config: Config, is_known: bool) -> None:
    """PretrainedError for a key that changes ids in a way that is not supported.

    is_known: whether the tokenizer's class is supported.
    """
    code = config.data.get("auto_map")
    if not is_known and (not isinstance(code, dict) or "AutoTokenizer" in code) and code:
        name = config.data.get("tokenizer_class")
        raise PretrainedError(
            f"{config.where}: auto_map: the folder's own code for {name!r:.100} is not run"
        )
    config.only("fix_mistral_regex", False)
    config.only("init_inputs", [])
    files = config.data.get("fast_tokenizer_files") or ["tokenizer.json"]
    if files != ["tokenizer.json"]:
        raise config.refused("fast_tokenizer_files", '["tokenizer.json"]')


def tokens_of(config: Config) -> Tokens:
    """The tokens that the files name."""
    keys = [key for key in config.data if key.endswith("_token")]
    named = {
        key: _named(config, key)
        for key in (*NAMED, *keys)
        if key in config.data and not isinstance(config.data[key], bool)  # add_bos_token
    }
    # In added_tokens.json only these tokens are special, as in transformers.
    special = {token.content for key in NAMED if (token := named.get(key))}
    listed_tokens: list[Any] = []
    for name in EXTRA:
        if isinstance(config.data.get(name), dict):
            parts = config.sub(name) or Config({})
            named |= {key: _named(parts, key) for key in parts.data}
            continue
        listed_tokens += _listed(config, name)
        if name == EXTRA[0]:
            special.update(token.content for token in listed_tokens)
    return Tokens(named, listed_tokens, dict(_by_id(config, special)))


def content(config: Config, kind: str) -> str | None:
    """The text of a token. The file has it as a string, or as an object with `content`."""
    if isinstance(config.data.get(kind), dict):
        part = config.sub(kind)
        return None if part is None else part.text("content")
    return config.text(kind, default=None)


def require_ids(config: Config, wanted: Mapping[int, Any], inner: Any) -> None:
    """PretrainedError if added tokens have other ids than in the files."""
    got = {token.content: inner.token_to_id(token.content) for token in wanted.values()}
    if wrong := {token.content: i for i, token in wanted.items() if got[token.content] != i}:
        text, i = next(iter(wrong.items()))
        raise PretrainedError(
            f"{config.where}: the added token {text!r:.100} must have the id {i} that the files "
            f"give it, the vocabulary gives it {got[text]}; {len(wrong)} tokens differ"
        )


def _added(text: str, **flags: bool) -> Any:
    # The space before a mask belongs to the mask, as in the training of the models.
    usual = {"special": True, "normalized": False, "lstrip": text == "<mask>"}
    return package().AddedToken(text, **usual | flags)


def _named(config: Config, key: str) -> Any:
    if isinstance(config.data.get(key), dict):
        part = config.sub(key)
        return None if part is None else _token(part, special=True)
    text = config.text(key, default=None)
    return None if text is None else _added(text)


def _token(part: Config, *, special: bool) -> Any:
    """A token from an object. special: the default of its flag."""
    flags = {name: part.flag(name, default=False) for name in ("lstrip", "rstrip", "single_word")}
    flags["special"] = part.flag("special", default=special)
    flags["normalized"] = part.flag("normalized", default=not flags["special"])
    return _added(part.text("content"), **flags)


def _listed(config: Config, name: str) -> Iterator[Any]:
    """The tokens of extra_special_tokens, or of additional_special_tokens."""
    extra = config.data.get(name)
    if not isinstance(extra, list | None):
        raise config.refused(name, "a list of tokens, or an object of them")
    for token in extra or []:
        if not isinstance(token, str | dict):
            raise config.refused(name, "a list of tokens")
        part = Config(token, f"{config.where}: {name}") if isinstance(token, dict) else None
        yield _added(str(token)) if part is None else _token(part, special=True)


def _by_id(config: Config, special: Collection[str]) -> Iterator[tuple[int, Any]]:
    """(id, token) of each token that was added to the vocabulary."""
    parts = config.sub(BY_ID) or Config({})
    for i in parts.data:
        if not (i.isascii() and i.isdecimal() and int(i) < MAX_ID):
            raise PretrainedError(f"{parts.where}: {i!r:.100} must be an id")
        if (part := parts.sub(i)) is not None:
            yield int(i), _token(part, special=False)
    older = config.sub("added_tokens") or Config({})
    for text in older.data:
        is_special = text in special
        flags = {"special": is_special, "normalized": not is_special, "lstrip": False}
        yield older.integer(text, high=MAX_ID - 1), _added(text, **flags)
