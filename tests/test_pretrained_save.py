"""Models are saved only if their config.json describes them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from xformer import pretrained


def gpt2() -> Any:
    sizes = {"vocab_size": 11, "n_embd": 4, "n_head": 2, "n_layer": 2, "n_positions": 8}
    return pretrained.model({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: replace(b, reversible=True), "reversible must be False, got True"),
        (lambda b: replace(b, norm=replace(b.norm, eps=0.5)), "norm.eps must be 1e-05, got 0.5"),
        (
            lambda b: replace(b, norm=replace(b.norm, eps_inside=False)),
            "norm.eps_inside must be True, got False",
        ),
        (lambda b: replace(b, attn=replace(b.attn, window=(4, 0))), "attn.window must be None, "),
    ],
)
def test_options_that_the_file_cannot_hold_are_not_saved(
    tmp_path: Path, change: Any, said: str
) -> None:
    model = gpt2()
    blocks = model.blocks[0], *map(change, model.blocks[1:])
    if "reversible" in said:  # all blocks are, or none
        blocks = tuple(map(change, model.blocks))
    other = replace(model, blocks=blocks)
    first = next(i for i, (a, b) in enumerate(zip(blocks, model.blocks, strict=True)) if a != b)
    message = f"save: the model must be the one of its hf_config: blocks.{first}.{said}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}.*checkpoint.save stores any"):
        pretrained.save(other, other.init(), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_options_of_the_model_too(tmp_path: Path) -> None:
    other = replace(gpt2(), causal=False)
    with pytest.raises(
        ValueError, match=r"hf_config: causal must be True, got False; xformer\.tra"
    ):
        pretrained.save(other, other.init(), tmp_path / "b")


def test_options_of_training_need_no_file(tmp_path: Path) -> None:
    model = gpt2()
    attn, ffn = (
        replace(part, dropout=0.25) for part in (model.blocks[0].attn, model.blocks[0].ffn)
    )
    block = replace(model.blocks[0], attn=attn, ffn=ffn, dropout=0.5)
    other = replace(
        model, blocks=(block,) * len(model.blocks), activation_checkpointing=True, out_dropout=0.1
    )
    pretrained.save(other, other.init(), tmp_path / "b")
    again, _ = pretrained.load(tmp_path / "b")
    assert replace(again, hf_config=model.hf_config) == model
