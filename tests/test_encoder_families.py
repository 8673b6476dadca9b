"""BERT and what derives from it: what transformers computes, its gradients, its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoders import CLASSES, COUNTING, KINDS, MASKED, POOLED, TOKENS, T, batch, configured
from huggingface import Values, build, proof, transformers

from xformer.pretrained.family import ACTIVATIONS


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("head", [MASKED, CLASSES, TOKENS, "Model"])
@pytest.mark.parametrize("family", KINDS)
def test_heads(family: str, head: str, side: str | None, tmp_path: Path) -> None:
    config = configured(family, {"num_labels": 5})
    n_types = getattr(config, "type_vocab_size", 0)
    given, keep = batch(config.pad_token_id, side, n_types)
    tokens, types = given["input_ids"], given.get("token_type_ids")
    own: Values = {}
    if head == CLASSES and side == "left":
        # transformers takes the first place for the first token: it has to be judged on the right.
        given, _ = batch(config.pad_token_id, "right", n_types)
    elif family == "DistilBert":
        own["positions"] = np.arange(T)  # transformers has no way to give it positions
    elif family not in COUNTING:
        given["position_ids"] = np.maximum(np.cumsum(keep, axis=1) - 1, 0)
    proof(
        build(getattr(transformers, family + head), config),
        tmp_path,
        given,
        lambda model, params: model.forward(params, tokens, mask=keep, types=types, **own),
        output="last_hidden_state" if head == "Model" else "logits",
        keep=keep,
    )


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("family", POOLED)
def test_pooler(family: str, side: str | None, tmp_path: Path) -> None:
    config = configured(family, {})
    n_types = getattr(config, "type_vocab_size", 0)
    given, _ = batch(config.pad_token_id, side and "right", n_types)  # as above: never on the left
    same, keep = batch(config.pad_token_id, side, n_types)
    tokens, types = same["input_ids"], same.get("token_type_ids")
    proof(
        build(getattr(transformers, f"{family}Model"), config),
        tmp_path,
        given,
        lambda model, params: model.pooled(
            params, tokens, mask=keep, types=types, pooling="pooler"
        ),
        output="pooler_output",
    )


def names_of_activations() -> list[tuple[str, str]]:
    """Every name with BERT's masked head, which has it too; a few with the other families."""
    others = [("Roberta", "relu"), ("DistilBert", "relu"), ("Albert", "gelu"), ("Albert", "relu")]
    others += [("MPNet", "relu")]
    return [("Bert", name) for name in ACTIVATIONS] + others


@pytest.mark.parametrize(("family", "name"), names_of_activations())
def test_activations(family: str, name: str, tmp_path: Path) -> None:
    key = "activation" if family == "DistilBert" else "hidden_act"
    config = configured(family, {key: name})
    given, keep = batch(config.pad_token_id, "right")
    proof(
        build(getattr(transformers, family + MASKED), config),
        tmp_path,
        given,
        lambda model, params: model.forward(params, given["input_ids"], mask=keep),
        keep=keep,
    )


SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("Bert", {"num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 3}),
    ("Bert", {"num_hidden_layers": 3, "hidden_size": 14, "num_attention_heads": 7}),
    ("Bert", {"layer_norm_eps": 0.1, "max_position_embeddings": T}),
    ("Bert", {"pad_token_id": 5, "type_vocab_size": 1}),
    ("Roberta", {"pad_token_id": 0}),
    ("Roberta", {"pad_token_id": 4, "layer_norm_eps": 0.1, "type_vocab_size": 1}),
    ("Roberta", {"max_position_embeddings": T + 2}),
    ("DistilBert", {"n_layers": 3, "dim": 14, "n_heads": 7, "hidden_dim": 3}),
    ("DistilBert", {"max_position_embeddings": T, "sinusoidal_pos_embds": True}),
    ("Albert", {"num_hidden_groups": 2}),
    ("Albert", {"num_hidden_groups": 4, "embedding_size": 12}),
    ("Albert", {"num_hidden_layers": 3, "num_hidden_groups": 3, "embedding_size": 29}),
    ("Albert", {"num_hidden_layers": 1, "layer_norm_eps": 0.1, "type_vocab_size": 1}),
    ("XLMRoberta", {"pad_token_id": 4, "layer_norm_eps": 0.1, "type_vocab_size": 1}),
    ("Camembert", {"pad_token_id": 4, "layer_norm_eps": 0.1, "type_vocab_size": 1}),
    ("MPNet", {"pad_token_id": 4, "layer_norm_eps": 0.1, "max_position_embeddings": T + 2}),
]


@pytest.mark.parametrize(("family", "changes"), SHAPES)
def test_sizes(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = configured(family, changes)
    given, keep = batch(config.pad_token_id, "right", getattr(config, "type_vocab_size", 0))
    types = given.get("token_type_ids")
    proof(
        build(getattr(transformers, family + MASKED), config),
        tmp_path,
        given,
        lambda model, params: model.forward(params, given["input_ids"], mask=keep, types=types),
        keep=keep,
    )
