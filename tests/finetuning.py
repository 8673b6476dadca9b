"""Small folders to fine-tune: a random model, and a tokenizer of which each letter is a token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from xformer import pretrained

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>")
LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789+=.?"
PAD, UNK, CLS, SEP, MASK, BOS, EOS = range(7)
V = len(SPECIAL) + len(LETTERS)
# How texts stand in special tokens, and which of them the tokenizer is told of.
STYLES: dict[str, tuple[list[str], list[str]]] = {
    "bert": (["[CLS]", "$A", "[SEP]"], ["pad", "unk", "cls", "sep", "mask"]),
    "gpt": (["$A"], ["pad", "eos"]),
    "llama": (["<s>", "$A"], ["pad", "bos", "eos"]),
    "bare": (["$A"], ["pad"]),
    "t5": (["$A", "</s>"], ["pad", "eos"]),
}
PAIR = ["[CLS]", "$A", "[SEP]", "$B:1", "[SEP]:1"]
KINDS = dict(zip(("pad", "unk", "cls", "sep", "mask", "bos", "eos"), SPECIAL, strict=True))

SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "pad_token_id": PAD,
}
LLAMA = SIZES | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_key_value_heads": 1,
}
BERT = SIZES | {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
CLASSIFIER = BERT | {
    "architectures": ["BertForSequenceClassification"],
    "id2label": {"0": "no", "1": "yes", "2": "so"},
    "hidden_dropout_prob": 0.0,
}
RANKER = BERT | {
    "architectures": ["BertForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
    "hidden_dropout_prob": 0.0,
}
TAGGER = BERT | {
    "architectures": ["BertForTokenClassification"],
    "id2label": {"0": "O", "1": "B-X", "2": "I-X"},
    "hidden_dropout_prob": 0.0,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    **{"vocab_size": V, "n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 32},
}
T5: dict[str, Any] = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    **{"vocab_size": V, "d_model": 24, "d_kv": 12, "d_ff": 40, "num_layers": 1, "num_heads": 2},
    **{"is_encoder_decoder": True, "dropout_rate": 0.0, "decoder_start_token_id": PAD},
    "pad_token_id": PAD,
}


def write_tokenizer(folder: Path, style: str) -> None:
    """tokenizer.json and tokenizer_config.json."""
    template, kinds = STYLES[style]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *LETTERS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    inner.add_special_tokens(list(SPECIAL))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single=template,
        pair=PAIR if style == "bert" else None,
        special_tokens=[(token, vocab[token]) for token in SPECIAL],
    )
    inner.save(str(folder / "tokenizer.json"))
    config: dict[str, str | None]
    config = {f"{kind}_token": KINDS[kind] if kind in kinds else None for kind in KINDS}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_folder(
    folder: Path, config: Mapping[str, Any], style: str, dtype: str = "float32"
) -> Path:
    """A model of a configuration and a tokenizer."""
    model = pretrained.model(config)
    pretrained.save(model, model.init(0, dtype=dtype), folder)
    write_tokenizer(folder, style)
    return folder


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def ids(text: str) -> list[int]:
    """The ids of letters."""
    return [len(SPECIAL) + LETTERS.index(letter) for letter in text]
