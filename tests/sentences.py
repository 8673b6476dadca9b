"""Small folders of models that read words: a random model, and a tokenizer of some twenty words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xformer import pretrained, tree

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

WORDS = [
    *("the", "a", "cat", "dog", "sat", "ran", "on", "mat", "tree", "and"),
    *("then", "it", "was", "good", "bad", "very", "not", "so", "that", "why"),
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
VOCAB_SIZE = len(WORDS) + len(SPECIAL)
TEXTS = [
    "the cat sat on the mat",
    "a dog",
    "it was not so very good that the dog ran and then the cat sat",
    "why",
    "the tree was bad and the cat ran",
]

BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 24,
}
LLAMA = BERT | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def write_tokenizer(folder: Path, *, special: bool = True) -> None:
    """A word, an id; special: texts stand in [CLS] and [SEP]."""
    vocab = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if special:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single=["[CLS]", "$A", "[SEP]"],
            pair=["[CLS]", "$A", "[SEP]", "$B:1", "[SEP]:1"],
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    inner.save(str(folder / "tokenizer.json"))


def cut_left(folder: Path, how: str) -> None:
    """Long texts lose their beginning: by tokenizer_config.json, or by tokenizer.json."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    if how == "config":
        config["truncation_side"] = "left"
    else:
        inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        inner.enable_truncation(20, direction="left")
        inner.save(str(folder / "tokenizer.json"))
    write(folder, tokenizer_config=config)


def write_model(
    folder: Path, config: dict[str, Any], dtype: str = "float64", *, special: bool = True
) -> Path:
    """A folder whose every parameter is random, norms and biases too."""
    model = pretrained.model(config)
    rng = np.random.default_rng(0)
    params = tree.map(lambda a: a + rng.normal(0, 0.3, a.shape), model.init(dtype="float64"))
    pretrained.save(model, tree.map(lambda a: a.astype(dtype), params), folder)
    write_tokenizer(folder, special=special)
    return folder


def write(folder: Path, **files: Any) -> None:
    """JSON files by their names, __ for a slash and without the ending."""
    for name, data in files.items():
        path = folder / (name.replace("__", "/") + ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(data), encoding="utf-8")
