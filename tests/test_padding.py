"""Padding changes nothing for the tokens, whichever side it stands on."""

from __future__ import annotations

import numpy as np
import pytest
from block_configs import block_config, changed

from xformer.layers import EmbedConfig, RopeConfig
from xformer.models import LanguageModel

BLOCK = block_config(8, 2, 11, d_head=4, norm="rms", bias=False)
BARE = EmbedConfig(vocab_size=13, width=8, d_model=8, positions="none")
HALVES = {"factor": 2.0, "short_factor": (1.0, 2.0), "long_factor": (3.0, 4.0)}
ROTARY = {
    "rotary": RopeConfig(4),
    "dynamic": RopeConfig(4, scaling="dynamic", factor=4.0, max_len=6),
    "longrope": RopeConfig(4, scaling="longrope", original_max_len=6, **HALVES),
}
PLACES = {
    kind: EmbedConfig(vocab_size=13, width=8, d_model=8, max_len=20, positions=kind)
    for kind in ("learned", "sinusoidal")
}
MODELS = {
    **{kind: LanguageModel(config, (BLOCK,)) for kind, config in PLACES.items()},
    "alibi": LanguageModel(BARE, (BLOCK,), alibi=True),
    "window": LanguageModel(BARE, (changed(BLOCK, window=(2, None)),)),
    **{name: LanguageModel(BARE, (BLOCK,), rotary=config) for name, config in ROTARY.items()},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("left", [0, 4, 9])
@pytest.mark.parametrize("length", [5, 9])  # below and above what a scaling was trained on
def test_padding_changes_nothing(name: str, left: int, length: int) -> None:
    model = MODELS[name]
    params = model.init(dtype="float64")
    tokens = np.random.default_rng(0).integers(1, 13, (1, length))
    plain, _ = model.forward(params, tokens)
    padded = np.zeros((1, length + 9), dtype=np.int64)
    padded[:, left : left + length] = tokens
    logits, _ = model.forward(params, padded, mask=padded > 0)
    np.testing.assert_allclose(logits[:, left : left + length], plain, rtol=1e-12, atol=1e-13)
