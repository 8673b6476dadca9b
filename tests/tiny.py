"""The smallest model of transformers of every family that folders are read of."""

from __future__ import annotations

from typing import Any

import causal_models
import encoders
from huggingface import build, transformers

from xformer.pretrained.families import FAMILIES

ENCODERS = {kind: name for name, kind in encoders.KINDS.items()}
KINDS = [kind for kind in FAMILIES if FAMILIES[kind].heads]  # the others are not transformers'


def architecture(kind: str, head: str | None = None) -> str:
    """The family's first architecture, or the first with that word for its head."""
    heads = FAMILIES[kind].heads
    return next(name for name, word in heads.items() if head in (None, word))


def config(kind: str, **changes: Any) -> Any:
    """A configuration of transformers."""
    if kind in ENCODERS:
        return encoders.configured(ENCODERS[kind], changes)
    sizes = causal_models.T5 if kind == "t5" else causal_models.CONFIGS[kind]
    sizes = {key: value for key, value in sizes.items() if key != "architecture"}
    return transformers.AutoConfig.for_model(kind, **sizes | {"pad_token_id": 0} | changes)


def tiny(kind: str, head: str | None = None, **changes: Any) -> Any:
    """A model in float32 whose every parameter is random."""
    cls = getattr(transformers, architecture(kind, head))
    return build(cls, config(kind, **changes)).float()
