"""The ids that begin and end texts, from a model's files."""

from __future__ import annotations

from typing import Any

from xformer.models import EncoderDecoder
from xformer.pretrained.files import CONFIG, GENERATION
from xformer.pretrained.reading import PretrainedError


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
