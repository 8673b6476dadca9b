"""BERT and what derives from it: what transformers computes, its gradients, its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoders import (
    CLASSES,
    COUNTING,
    KINDS,
    MASKED,
    POOLED,
    REPLACED,
    TOKENS,
    T,
    batch,
    configured,
)
from huggingface import Values, build, proof, transformers

from xformer.pretrained.family import ACTIVATIONS


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize(
    ("family", "head"),
    [
        *((family, head) for family in KINDS for head in (MASKED, CLASSES, TOKENS, "Model")),
        ("Electra", REPLACED),
    ],
)
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


def test_loss_of_a_discriminator(tmp_path: Path) -> None:
    config = configured("Electra", {})
    given, keep = batch(config.pad_token_id, "right", 3)
    replaced = np.random.default_rng(1).integers(0, 2, keep.shape)
    proof(
        build(getattr(transformers, f"Electra{REPLACED}"), config),
        tmp_path,
        given | {"labels": replaced},
        lambda model, params: model.loss(
            params,
            given["input_ids"],
            np.where(keep, replaced, -1),
            mask=keep,
            types=given["token_type_ids"],
            ignore_index=-1,
        ),
        output="loss",
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
    others += [("MPNet", "relu"), ("Electra", "relu"), ("NomicBert", "gelu")]
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


BY_TYPE = {
    "full_attention": {"rope_type": "linear", "factor": 2.5, "rope_theta": 300.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
}


def turned(kind: str, theta: float = 1000.0, **options: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **options}


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
    ("ModernBert", {"num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 3}),
    ("ModernBert", {"layer_types": ["sliding_attention", "full_attention"] * 2, "norm_eps": 0.1}),
    ("ModernBert", {"local_attention": 1, "global_attn_every_n_layers": 2, "norm_bias": True}),
    ("ModernBert", {"local_attention": 7, "attention_bias": True, "mlp_bias": True}),
    ("ModernBert", {"decoder_bias": False, "classifier_bias": True, "hidden_activation": "relu"}),
    ("ModernBert", {"tie_word_embeddings": False, "classifier_activation": "silu"}),
    ("ModernBert", {"global_rope_theta": 50.0, "local_rope_theta": 7.0}),
    ("ModernBert", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
    ("ModernBert", {"rope_parameters": BY_TYPE}),
    ("XLMRoberta", {"pad_token_id": 4, "layer_norm_eps": 0.1, "type_vocab_size": 1}),
    ("Camembert", {"pad_token_id": 4, "layer_norm_eps": 0.1, "type_vocab_size": 1}),
    ("MPNet", {"pad_token_id": 4, "layer_norm_eps": 0.1, "max_position_embeddings": T + 2}),
    ("Electra", {"embedding_size": 12, "layer_norm_eps": 0.1}),
    ("Electra", {"embedding_size": 29, "type_vocab_size": 1, "num_attention_heads": 2}),
    ("NomicBert", {"head_dim": 6, "layer_norm_eps": 0.1, "type_vocab_size": 1}),
    ("NomicBert", {"max_position_embeddings": 3, "rope_parameters": turned("default", 500.0)}),
    ("NomicBert", {"max_position_embeddings": 3, "rope_parameters": turned("dynamic", factor=2.0)}),
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


@pytest.mark.parametrize("changes", [{"classifier_bias": True}, {"norm_bias": True}])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_classifiers_of_modernbert(pooling: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """ "mean" does not count padding, on either side."""
    config = configured("ModernBert", changes | {"classifier_pooling": pooling, "num_labels": 5})
    given, keep = batch(config.pad_token_id, "left" if pooling == "mean" else "right")
    given["position_ids"] = np.maximum(np.cumsum(keep, axis=1) - 1, 0)
    proof(
        build(transformers.ModernBertForSequenceClassification, config),
        tmp_path,
        given,
        lambda model, params: model.forward(params, given["input_ids"], mask=keep),
    )
