"""The ids that begin and end texts, as the files of a model name them."""

from __future__ import annotations

from typing import Any

from xformer.models import EncoderDecoder
from xformer.pretrained.reading import PretrainedError


def token_ids(model: Any, name: str) -> tuple[int, ...]:
    """The ids under a key of the model's configuration, such as eos_token_id: one or a list.

    Empty where there is no such key. PretrainedError unless each is an integer of at least 0; a
    float without a fraction is taken for one.
    """
    value = (getattr(model, "source", None) or {}).get(name)
    if value is None:
        return ()
    found = [_id(v) for v in (value if isinstance(value, list) else [value])]
    if None in found:
        raise PretrainedError(
            f"config.json: {name} must be an id of at least 0 or a list of them, got {value!r:.100}"
        )
    return tuple(i for i in found if i is not None)


def token_id(model: Any, name: str) -> int | None:
    """The one id under a key; None where there is no such key.

    PretrainedError as `token_ids`, for several ids, and for one that the model has not.
    """
    ids = token_ids(model, name)
    size = n_tokens(model)
    if len(ids) > 1 or any(i >= size for i in ids):
        got = ids[0] if len(ids) == 1 else list(ids)
        raise PretrainedError(f"config.json: {name} must be one id below {size}, got {got}")
    return ids[0] if ids else None


def start_of(model: Any) -> int | None:
    """The id that targets of an encoder-decoder begin with; None where its files name none.

    In this order: decoder_start_token_id, bos_token_id, as in transformers; pad_token_id, with
    which T5's targets begin. PretrainedError as `token_id`.
    """
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    return next((i for name in names if (i := token_id(model, name)) is not None), None)


def _id(value: Any) -> int | None:
    """An id of at least 0; None for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_id = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_id else None


def n_tokens(model: Any) -> int:
    """The size of the vocabulary that a model writes in."""
    network: Any = getattr(model, "network", model)
    embed: Any = network.target_embed if isinstance(network, EncoderDecoder) else network.embed
    return int(embed.vocab_size)
