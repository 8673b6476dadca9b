"""stories260K (llama2.c): a real Llama's weights, whose greedy text others published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from libraries import only, slow_but
from truths import published

from xformer import pretrained
from xformer.backends import Backend
from xformer.pretrained.tokenizer import tokenizer

LENGTH = 200


@only("numpy", "jax", "cupy", *slow_but((), ["torch"]))
def test_greedy_text_is_the_published_one(library: Backend) -> None:
    """Byte for byte, each token by a forward pass over all the text (behind it, ids unseen)."""
    pytest.importorskip("tokenizers")
    model, params = pretrained.load(published("stories260K.bin"), backend=library.name)
    next_token = best_after(library, model, params)
    ids = np.zeros((1, LENGTH + 1), dtype=np.int64)
    ids[0, 0] = 1  # <s>
    for t in range(LENGTH):
        ids[0, t + 1] = next_token(library.asarray(ids), t)
    text = tokenizer(published("tok512.bin")).decode(ids[0])
    assert text.encode() == published("stories260K_greedy_200_tokens.txt").read_bytes()


def best_after(library: Backend, model: Any, params: Any) -> Any:
    """The likeliest token after ids[:t + 1]; compiled where the library would do so anyway."""

    def logits(ids: Any) -> Any:
        return model.forward(params, ids)[0]

    if library.name == "jax":
        import jax

        logits = jax.jit(logits)
    return lambda ids, t: int(library.to_numpy(logits(ids))[0, t].argmax())


def test_it_is_saved_as_it_was(tmp_path: Path) -> None:
    """Byte for byte too, but for the rotary tables, which nothing reads."""
    path = published("stories260K.bin")
    pretrained.save(*pretrained.load(path), tmp_path / "copy.bin")
    before, after = path.read_bytes(), (tmp_path / "copy.bin").read_bytes()
    tables = 2 * 512 * 4 * 4  # at the end: (512, 4) cosines, then sines, float32
    assert len(before) == len(after)
    assert before[:-tables] == after[:-tables]
    rounded = (np.frombuffer(data[-tables:], "<f4") for data in (before, after))
    np.testing.assert_allclose(*rounded, atol=4e-5)
