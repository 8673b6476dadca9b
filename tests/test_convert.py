"""llama2.c's models as Llamas: the same outputs, here and in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xformer import pretrained, tree
from xformer.backends import Backend
from xformer.pretrained.convert import as_llama

SIZES: dict[str, Any] = {
    "model_type": "llama2.c",
    **{"d_model": 24, "d_ff": 20, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2},
    **{"vocab_size": 37, "max_len": 16},
}
IDS = np.random.default_rng(0).integers(0, 37, (2, 7))


@pytest.mark.parametrize("tied", [False, True])
def test_the_same_outputs(tied: bool, tmp_path: Path) -> None:
    model = pretrained.model(SIZES | {"tied": tied})
    params = model.init(0, dtype="float64")
    llama, moved = as_llama(model, params)
    assert llama.head == model.head and not llama.rotary.interleaved
    wanted = model.forward(params, IDS)[0]
    np.testing.assert_allclose(llama.forward(moved, IDS)[0], wanted, rtol=1e-12, atol=1e-14)
    pretrained.save(llama, moved, tmp_path)
    from huggingface import double_precision, torch, transformers

    with double_precision(), torch.no_grad():
        hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
        got = hf(torch.tensor(IDS)).logits.numpy()
    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)


def test_on_every_backend(library: Backend) -> None:
    model = pretrained.model(SIZES | {"tied": True})
    params = model.init(0)
    want = tree.flatten(as_llama(model, params)[1])
    got = tree.flatten(as_llama(model, tree.map(library.asarray, params))[1])
    assert all(np.array_equal(library.to_numpy(a), want[name]) for name, a in got.items())


def test_other_models_are_refused() -> None:
    model = pretrained.model(SIZES | {"tied": True})
    llama, params = as_llama(model, model.init(0))
    with pytest.raises(
        ValueError, match=r"as_llama: the model must be one of llama2\.c, got llama"
    ):
        as_llama(llama, params)
