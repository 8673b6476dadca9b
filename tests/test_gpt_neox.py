"""GPT-NeoX and Pythia: what transformers computes, its gradients, its files, its configurations."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface import Values, build, proof, transformers

from xformer import pretrained, tree
from xformer.initializers import Shapes
from xformer.layers import RopeConfig
from xformer.pretrained.reading import PretrainedError

B, T, V = 3, 7, 37
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
CONFIG: dict[str, Any] = SIZES | {
    "model_type": "gpt_neox",
    "architectures": ["GPTNeoXForCausalLM"],
}


def agrees(head: str, changes: dict[str, Any], folder: Path, padding: str = "none") -> None:
    """Logits or hidden states, all gradients, saved and loaded again."""
    config = transformers.GPTNeoXConfig(**(SIZES | changes))
    hf = build(getattr(transformers, f"GPTNeoX{head}"), config)
    inputs, keep = batch(padding)
    proof(
        hf,
        folder,
        inputs,
        lambda model, params: model.forward(params, inputs["input_ids"], mask=keep),
        output="last_hidden_state" if head == "Model" else "logits",
        keep=keep,
    )


def batch(padding: str) -> tuple[Values, np.ndarray]:
    """Inputs of transformers, which counts positions over padding unless told, and the tokens."""
    keep = np.ones((B, T), np.bool_)
    for row, n_pads in ((1, 2), (2, 5)):
        place = {"none": slice(0), "left": slice(n_pads), "right": slice(T - n_pads, T)}[padding]
        keep[row, place] = False
    ids = np.where(keep, np.random.default_rng(0).integers(1, V, (B, T)), 0)
    positions = np.maximum(np.cumsum(keep, axis=1) - 1, 0)
    return {"input_ids": ids, "attention_mask": keep.astype(int), "position_ids": positions}, keep


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("head", ["ForCausalLM", "ForSequenceClassification", "Model"])
def test_heads(head: str, padding: str, tmp_path: Path) -> None:
    agrees(head, {"num_labels": 5} if "Class" in head else {}, tmp_path, padding)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_parallel_residual": False},
        {"attention_bias": False},
        {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0},
        {"rotary_pct": 1.0},
        {"rotary_pct": 0.5, "rotary_emb_base": 300},
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.75}},
        {"tie_word_embeddings": True},
        {"num_attention_heads": 1},
        {"hidden_act": "gelu_fast"},
        {"hidden_act": "relu"},
        {"layer_norm_eps": 0.1},
        {"is_decoder": True},
    ],
    ids=str,
)
def test_configurations(changes: dict[str, Any], tmp_path: Path) -> None:
    agrees("ForCausalLM", changes, tmp_path, "left")


def test_pythia_has_its_parameters() -> None:
    """70,426,624 in pythia-70m, 18,915,328 of them not in embeddings, by its authors' table."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
    depth = {"num_hidden_layers": 6, "vocab_size": 50304, "max_position_embeddings": 2048}
    model = pretrained.model(CONFIG | sizes | depth | {"rotary_pct": 0.25})
    leaves = tree.flatten(model.init_from(Shapes())).items()
    counts = {name: math.prod(leaf.shape) for name, leaf in leaves}
    assert sum(counts.values()) == 70_426_624
    rest = sum(n for name, n in counts.items() if name not in ("embed.table", "head.w"))
    assert rest == 18_915_328


@pytest.mark.parametrize(
    ("keys", "width", "theta"),
    [
        ({}, 2, 10000.0),
        ({"rotary_pct": 0.5, "rotary_emb_base": 300}, 4, 300.0),
        # transformers 4 repeats both under names of its own
        ({"rotary_pct": 0.5, "partial_rotary_factor": 0.5}, 4, 10000.0),
        ({"rotary_emb_base": 300, "rope_theta": 300, "rope_scaling": None}, 2, 300.0),
        # transformers 5
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}, 2, 300.0),
        ({"rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 300.0}}, 8, 300.0),
    ],
)
def test_rotary_keys(keys: dict[str, Any], width: int, theta: float) -> None:
    assert pretrained.model(CONFIG | keys).rotary == RopeConfig(width, theta)
    theirs = transformers.GPTNeoXConfig(**SIZES, **keys).rope_parameters
    assert theirs["rope_theta"] == theta
    assert int(theirs["partial_rotary_factor"] * 8) == width


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rotary_pct": 0}, "partial_rotary_factor must be more than 0 and at most 1, got 0"),
        ({"rotary_pct": 2.0}, "partial_rotary_factor must be more than 0 and at most 1, got 2"),
        ({"rotary_pct": 0.4}, "rotary: width must be even, got 3"),
        ({"rope_theta": 300.0}, "rope_theta must be 10000.0, got 300.0"),
        ({"rotary_emb_base": 300, "rope_theta": 400}, "rope_theta must be 300.0, got 400"),
        ({"rotary_pct": 0.5, "partial_rotary_factor": 1.0}, "partial_rotary_factor must be 0.5"),
        (
            {"rotary_emb_base": 300, "rope_parameters": {"rope_theta": 400.0}},
            "rope_parameters: rope_theta must be 300, as outside",
        ),
        ({"use_parallel_residual": 1}, "use_parallel_residual must be true or false, got 1"),
        ({"num_attention_heads": 5}, "n_heads = 5 must divide d_model = 24"),
        ({"hidden_dropout": 2}, "hidden_dropout must be a number from 0 to 1"),
        ({"head_dim": 3}, "head_dim must be"),
        ({"architectures": ["GPTNeoXForTokenClassification"]}, "architectures must be one of"),
    ],
    ids=str,
)
def test_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(PretrainedError, match=message):
        pretrained.model(CONFIG | keys)


def test_defaults() -> None:
    """What is absent is as transformers has it; all that its configuration may hold is known."""
    full = transformers.GPTNeoXConfig(architectures=CONFIG["architectures"]).to_dict()
    sparse = {name: full[name] for name in ("architectures", "model_type")}
    first, second = (replace(pretrained.model(each), hf_config=None) for each in (full, sparse))
    assert first == second


def test_dropout_is_where_it_was() -> None:
    model = pretrained.model(CONFIG | {"hidden_dropout": 0.3, "attention_dropout": 0.2})
    own = model.blocks[0]
    assert (model.embed.dropout, own.dropout, own.attn.dropout) == (0.3, 0.3, 0.2)
    assert own.ffn.dropout == model.out_dropout == 0


def test_old_files(tmp_path: Path) -> None:
    """Buffers that version 4 wrote are no parameters; nor are rates that nothing ever read."""
    from safetensors.numpy import load_file, save_file

    hf = build(transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig(**SIZES)).float()
    hf.save_pretrained(tmp_path)
    _, before = pretrained.load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for i in range(2):
        attention = f"gpt_neox.layers.{i}.attention"
        tensors[f"{attention}.bias"] = np.tril(np.ones((1, 1, 16, 16), np.bool_))
        tensors[f"{attention}.masked_bias"] = np.array(-1e9, np.float32)
        tensors[f"{attention}.rotary_emb.inv_freq"] = np.ones(1, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rotary_pct": 0.25, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, after = pretrained.load(tmp_path)
    assert model.blocks[0].dropout == 0
    for name, leaf in tree.flatten(before).items():
        np.testing.assert_array_equal(tree.flatten(after)[name], leaf)
