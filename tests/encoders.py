"""Small encoders of transformers: BERT and what derives from it, and what they are given."""

from __future__ import annotations

from typing import Any

import numpy as np
from huggingface import Values, transformers

B, T, V = 3, 7, 37
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
    "type_vocab_size": 3,
}
DISTILBERT: dict[str, Any] = {
    "vocab_size": V,
    "dim": 12,
    "n_layers": 2,
    "n_heads": 3,
    "hidden_dim": 20,
    "max_position_embeddings": 16,
}
OWN = {  # of families that have other keys
    "Albert": SIZES | {"embedding_size": 5, "num_hidden_layers": 4},
    "DistilBert": DISTILBERT,
    "ModernBert": {key: n for key, n in SIZES.items() if key != "type_vocab_size"}
    | {"num_hidden_layers": 4, "local_attention": 4, "pad_token_id": 0, "hidden_size": 18},
    "Electra": SIZES | {"embedding_size": 5},
    "NomicBert": SIZES | {"hidden_size": 24},
    "MPNet": {key: n for key, n in SIZES.items() if key != "type_vocab_size"},
}
KINDS = {  # the names of transformers' classes -> model_type
    "Albert": "albert",
    "Bert": "bert",
    "Camembert": "camembert",
    "DistilBert": "distilbert",
    "ModernBert": "modernbert",
    "Electra": "electra",
    "MPNet": "mpnet",
    "NomicBert": "nomic_bert",
    "Roberta": "roberta",
    "XLMRoberta": "xlm-roberta",
}
# Their positions are counted over what is not pad_id; those of the others over all tokens.
COUNTING = ("Camembert", "MPNet", "Roberta", "XLMRoberta")
POOLED = [
    family for family in KINDS if family not in ("DistilBert", "Electra", "ModernBert", "NomicBert")
]
REPLACED = "ForPreTraining"  # ELECTRA's discriminator
MASKED, CLASSES, TOKENS = "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"


def sizes_of(family: str) -> dict[str, Any]:
    return OWN.get(family, SIZES)


def configured(family: str, changes: dict[str, Any]) -> Any:
    return getattr(transformers, f"{family}Config")(**(sizes_of(family) | changes))


def batch(pad_id: int, side: str | None = None, n_types: int = 0) -> tuple[Values, np.ndarray]:
    """Inputs of transformers, the same tokens on either side of the padding; and what is kept.

    torch's `padding_idx` gives the row of pad_id no gradient: no token that is kept has that id.
    """
    rng = np.random.default_rng(0)
    tokens, types = rng.integers(pad_id + 1, V, (B, T)), rng.integers(0, max(n_types, 1), (B, T))
    keep = np.arange(T) < np.array([[T], [5], [2]]) if side else np.ones((B, T), np.bool_)
    tokens[~keep], types[~keep] = pad_id, 0
    if side == "left":
        order = np.argsort(keep, axis=1, stable=True)
        tokens, types, keep = (np.take_along_axis(a, order, 1) for a in (tokens, types, keep))
    inputs = {"input_ids": tokens, "attention_mask": keep.astype(int)}
    return inputs | ({"token_type_ids": types} if n_types else {}), keep
