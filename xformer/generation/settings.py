"""The generation settings in a model's files, read as transformers reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from xformer.generation.token_ids import n_tokens, valid_ids
from xformer.pretrained.config import Config
from xformer.pretrained.files import CONFIG, GENERATION

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
