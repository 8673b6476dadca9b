"""Prompts that are read by one program for each of few lengths (`xformer.compile`)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from array_api_compat import array_namespace

from xformer.compiling import Forward, bucket, records
from xformer.models import LanguageModel
from xformer.models.state import DecodeState
from xformer.typing import Array

KEPT = 8  # models whose programs are kept


def read_by_program(
    network: Any, params: Any, tokens: Array, mask: Array | None
) -> tuple[Array, DecodeState] | None:
    """As `LanguageModel.decode` of no text with tokens (B, T) and mask; None where no program does.

    Programs are for T in a few numbers (`bucket`); shorter prompts have padding in front, which is
    then taken away. They are recorded where the backend `records`: to record takes 1 to 11 times as
    long as a program saves of one prompt (12 to 256 tokens, 0.3 and 11 million parameters). Logits
    differ from single ops' by rounding. Single ops read sources of an encoder-decoder, and prompts
    after a prefix or in chunks.
    """
    if not isinstance(network, LanguageModel) or not records(params):
        return None
    size, length = tokens.shape
    columns = min(bucket(length), network.context or bucket(length))
    steady = math.inf if network.rotary is None else network.rotary.max_unscaled_len
    if columns > steady:
        return None
    xp, n = array_namespace(tokens), columns - length
    padding = xp.zeros((size, n), dtype=tokens.dtype)
    kept = xp.ones((size, length), dtype=xp.bool) if mask is None else mask
    seen = xp.concat([xp.zeros((size, n), dtype=xp.bool), kept], axis=1)
    logits, state = _forward(network)(params, xp.concat([padding, tokens], axis=1), seen)
    state = state._replace(mask=seen).padded(length)
    return logits, state._replace(mask=mask)


@lru_cache(KEPT)
def _forward(network: LanguageModel) -> Forward:
    """The model's programs."""

    def read(params: Any, tokens: Array, mask: Array) -> tuple[Array, DecodeState]:
        logits, state = network.decode(params, tokens, network.init_state(), mask=mask)
        return logits, state._replace(mask=None)  # what was given is no result

    return Forward(read)
