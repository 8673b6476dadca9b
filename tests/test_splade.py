"""SPLADE beside sentence-transformers' SparseEncoder, and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentences import BERT, TEXTS, write, write_model

from xformer import GPT, layers, pretrained
from xformer.pretrained.reading import PretrainedError
from xformer.pretrained.tokenizer import tokenizer
from xformer.sentences import SpladeSettings, splade, splade_settings

TOLERANCE = 1e-12  # of float64
MLM = BERT | {"architectures": ["BertForMaskedLM"]}
MODULES = "sentence_transformers.sparse_encoder.models"


def chain(
    first: str = f"{MODULES}.MLMTransformer", second: str = f"{MODULES}.SpladePooling"
) -> Any:
    paths = {first: "", second: "1_SpladePooling"}
    kinds = enumerate(paths.items())
    return [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in kinds]


def write_splade(folder: Path, **pooling: str) -> Path:
    write_model(folder, MLM)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    write(
        folder,
        modules=chain(),
        sentence_bert_config={"max_seq_length": 12, "do_lower_case": False},
        tokenizer_config=special | {"tokenizer_class": "PreTrainedTokenizerFast"},
        config_sentence_transformers={
            "model_type": "SparseEncoder",
            "prompts": {"query": "why ", "document": ""},
            "default_prompt_name": None,
        },
        **{"1_SpladePooling__config": {"word_embedding_dimension": None} | pooling},
    )
    return folder


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize(("activation", "saturation"), [("relu", "log"), ("log1p_relu", "log_log")])
def test_beside_the_sparse_encoder(
    tmp_path: Path, pooling: str, activation: str, saturation: str
) -> None:
    judge = pytest.importorskip("sentence_transformers", reason="sentence-transformers is missing")
    import torch

    options = {"pooling_strategy": pooling, "activation_function": activation}
    folder = write_splade(tmp_path, **options)
    own = splade_settings(folder)
    assert own == SpladeSettings(pooling, saturation, 12, "")
    opened = (*pretrained.load(folder, dtype="float64"), tokenizer(folder))
    dtype = {"dtype": torch.float64}
    encoder = judge.SparseEncoder(str(folder), device="cpu", model_kwargs=dtype)
    for name in ("document", "query"):
        options = splade_settings(folder, prompt_name=name)._asdict()
        with pytest.warns(UserWarning, match="splade: cut to 12 tokens: text 3$"):
            got = splade(*opened, TEXTS, batch_size=2, **options)
        assert got.shape == (5, 24) and got.dtype == np.float64
        want = encoder.encode(TEXTS, prompt_name=name, convert_to_sparse_tensor=False)
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)
    assert (got == 0).any() and (got > 0).any()


def test_what_version_6_writes(tmp_path: Path) -> None:
    folder = write_splade(tmp_path)
    base = "sentence_transformers.base.modules.transformer.Transformer"
    own = "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling"
    task = {"transformer_task": "fill-mask", "module_output_name": "token_embeddings"}
    write(folder, modules=chain(base, own), sentence_bert_config={"max_seq_length": 20} | task)
    assert splade_settings(folder) == SpladeSettings(max_len=20)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules": chain(second="custom.SpladePooling")}, "module 1: type must be of sentence_"),
        ({"modules": chain()[:1]}, "modules must be Transformer, SpladePooling, got MLMTransfor"),
        ({"1_SpladePooling__config": {"pooling_strategy": "mean"}}, "must be one of max, sum"),
        (
            {"1_SpladePooling__config": {"activation_function": "gelu"}},
            "must be one of relu, log1p",
        ),
        ({"1_SpladePooling__config": {"top": 3}}, "not supported: 'top'"),
        (
            {"config_sentence_transformers": {"max_active_dims": 64}},
            "config_sentence_transformers.json: not supported: 'max_active_dims'",
        ),
        (
            {"config_sentence_transformers": {"model_type": "SentenceTransformer"}},
            "model_type must be 'SparseEncoder', got 'SentenceTransformer'",
        ),
    ],
    ids=range(7),
)
def test_what_is_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    folder = write_splade(tmp_path)
    write(folder, **files)
    with pytest.raises(PretrainedError, match=message):
        splade_settings(folder)


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PretrainedError, match=r"is no SPLADE model: it has no modules\.json"):
        splade_settings(write_model(tmp_path, BERT))
    opened = (*pretrained.load(tmp_path), tokenizer(tmp_path))
    with pytest.raises(ValueError, match="splade: the model must be a masked language model, got"):
        splade(*opened, TEXTS)
    gpt = GPT(7, 1, 4, 1, 5)
    with pytest.raises(ValueError, match=r"splade: the model must be a masked.*, got a causal"):
        splade(gpt, gpt.init(), opened[2], TEXTS)
    for options, message in (
        ({"pooling": "mean"}, "splade: pooling must be one of max, sum, got 'mean'"),
        ({"saturation": "relu"}, "splade: saturation must be one of log, log_log, got 'relu'"),
    ):
        with pytest.raises(ValueError, match=message):
            layers.splade(np.ones((1, 2, 3)), **options)
    _, cache = layers.splade(np.ones((1, 2, 3)))
    with pytest.raises(ValueError, match=r"splade: dy must have shape \(1, 3\), got \(1, 4\)"):
        cache.backward(np.ones((1, 4)))
