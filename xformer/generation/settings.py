"""The generation settings and the token ids in a model's files, as transformers reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from xformer.models import EncoderDecoder
from xformer.pretrained.config import Config
from xformer.pretrained.files import CONFIG, GENERATION
from xformer.pretrained.reading import PretrainedError

# The defaults of transformers. Old releases wrote all of them to config.json, where equal values
# mean nothing.
DEFAULTS: dict[str, Any] = {
    "max_length": 20,
    "min_length": 0,
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
}
# Keys that change texts in transformers and are not followed here, with their neutral values.
NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "constraints": (),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "guidance_scale": (1,),
    "max_time": (),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "renormalize_logits": (False,),
    "sequence_bias": (),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}


class Settings(NamedTuple):
    """Keys of generation_config.json; None or empty if the file does not have them.

    `token_ids` reads the ids of tokens that begin and end texts.
    """

    where: str = GENERATION  # the name of the file
    max_new_tokens: int | None = None
    max_length: int | None = None  # with the prompt; of an encoder-decoder, with the start token
    min_new_tokens: int | None = None
    min_length: int | None = None  # counted like max_length
    stop_strings: tuple[str, ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    not_followed: tuple[str, ...] = ()  # keys that would change texts in transformers


def settings_of(model: Any) -> Settings:
    """The settings in the model's generation_config.json; without that file, in its config.json.

    PretrainedError, which names file and key, for an invalid value.
    """
    config = getattr(model, "generation_config", None)
    if config is not None:
        return _settings(Config(config, GENERATION), n_tokens(model))
    source: Mapping[str, Any] = getattr(model, "hf_config", None) or {}
    changed = {key: value for key, value in source.items() if value != DEFAULTS.get(key)}
    settings = _settings(Config(changed, CONFIG), n_tokens(model))
    pad_id = getattr(model, "pad_id", None)  # no target, so its logits are not trained
    if pad_id is None:
        return settings
    return settings._replace(suppress_tokens=(*settings.suppress_tokens, pad_id))


def _settings(c: Config, size: int) -> Settings:
    forced = valid_ids(c.data.get("forced_bos_token_id"), "forced_bos_token_id", c.where)
    if len(forced) > 1 or any(i >= size for i in forced):
        raise c.refused("forced_bos_token_id", f"one id below {size}")
    flat = ("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")
    ids = {name: valid_ids(c.data.get(name), name, c.where) for name in flat}
    return Settings(
        c.where,
        max_new_tokens=c.integer("max_new_tokens", low=1, default=None),
        max_length=c.integer("max_length", low=1, default=None),
        min_new_tokens=c.integer("min_new_tokens", default=None),
        min_length=c.integer("min_length", default=None),
        stop_strings=_strings(c),
        forced_bos_token_id=forced[0] if forced else None,
        **{name: tuple(i for i in listed if i < size) for name, listed in ids.items()},
        bad_words_ids=_bad_words(c, size),
        do_sample=c.flag("do_sample", default=None),
        temperature=c.number("temperature", low=0, default=None),
        top_k=c.integer("top_k", default=None),
        top_p=c.number("top_p", low=0, high=1, default=None),
        min_p=c.number("min_p", low=0, high=1, default=None),
        repetition_penalty=c.number("repetition_penalty", low=1e-6, default=None),
        no_repeat_ngram_size=c.integer("no_repeat_ngram_size", default=None),
        num_beams=c.integer("num_beams", low=1, default=None),
        length_penalty=c.number("length_penalty", default=None),
        early_stopping=_early_stopping(c),
        not_followed=tuple(
            name
            for name, neutral in NOT_FOLLOWED.items()
            if c.data.get(name) is not None and c.data[name] not in neutral
        ),
    )


def _strings(c: Config) -> tuple[str, ...]:
    if isinstance(c.data.get("stop_strings"), str):
        strings: tuple[str, ...] = (c.text("stop_strings"),)
    else:
        strings = c.texts("stop_strings", default=())
    if "" in strings:
        raise c.refused("stop_strings", "strings that are not empty")
    return strings


def _bad_words(c: Config, size: int) -> tuple[tuple[int, ...], ...]:
    words = c.data.get("bad_words_ids") or []
    if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise c.refused("bad_words_ids", "a list of lists of ids")
    ids = tuple(valid_ids(word, "bad_words_ids", c.where) for word in words)
    if any(i >= size for word in ids for i in word):
        raise c.refused("bad_words_ids", f"lists of ids below {size}")
    return ids


def _early_stopping(c: Config) -> bool | str | None:
    value = c.data.get("early_stopping")
    if value not in (None, True, False, "never"):
        raise c.refused("early_stopping", 'true, false or "never"')
    checked: bool | str | None = value
    return checked


def token_ids(model: Any, name: str) -> tuple[int, ...]:
    """The ids of a key of the model's files, such as eos_token_id; empty if there is no such key.

    generation_config.json overrides config.json. PretrainedError, which names file and key, for an
    invalid value.
    """
    where, value = _said(model, name)
    return valid_ids(value, name, where)


def token_id(model: Any, name: str) -> int | None:
    """The only id of a key of the model's files; None if there is no such key.

    PretrainedError for an invalid value, several ids, and an id outside the vocabulary.
    """
    ids = token_ids(model, name)
    size = n_tokens(model)
    if len(ids) > 1 or any(i >= size for i in ids):
        where, value = _said(model, name)
        raise PretrainedError(f"{where}: {name} must be one id below {size}, got {value!r:.100}")
    return ids[0] if ids else None


def start_of(model: Any) -> int | None:
    """The start token of an encoder-decoder's targets; None if its files have none.

    The keys, in this order: decoder_start_token_id and bos_token_id, as in transformers;
    pad_token_id, with which T5's targets begin. PretrainedError for an invalid value.
    """
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    return next((i for name in names if (i := token_id(model, name)) is not None), None)


def valid_ids(value: Any, name: str, where: str) -> tuple[int, ...]:
    """The ids of a key's value, which is one id, a list of ids, or None.

    PretrainedError, which names file and key, unless each is an integer of at least 0. A float
    without a fraction counts as an integer.
    """
    if value is None:
        return ()
    ids = [_id(v) for v in (value if isinstance(value, list) else [value])]
    if None in ids:
        raise PretrainedError(
            f"{where}: {name} must be an id of at least 0 or a list of them, got {value!r:.100}"
        )
    return tuple(i for i in ids if i is not None)


def n_tokens(model: Any) -> int:
    """The size of the vocabulary that a model generates; of an encoder-decoder, of its targets."""
    embed: Any = model.target_embed if isinstance(model, EncoderDecoder) else model.embed
    return int(embed.vocab_size)


def _said(model: Any, name: str) -> tuple[str, Any]:
    """The name of the file that has a key, and its value; None if no file has it."""
    for where, field in ((GENERATION, "generation_config"), (CONFIG, "hf_config")):
        value = (getattr(model, field, None) or {}).get(name)
        if value is not None:
            return where, value
    return CONFIG, None


def _id(value: Any) -> int | None:
    """`value` as an integer of at least 0; None for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_id = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_id else None
