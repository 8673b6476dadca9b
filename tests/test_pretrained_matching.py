"""Names of tensors, in all spellings that transformers writes and reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface import require_close, require_equal, rewritten, torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from tiny import KINDS, tiny

from xformer import pretrained
from xformer.models import EncoderDecoder
from xformer.pretrained.families import FAMILIES

TOKENS = np.random.default_rng(0).integers(5, 37, (2, 6))
HEADS = [(kind, None) for kind in KINDS] + [
    (kind, head) for kind in ("mixtral", "gpt_neox") for head in ("classifier", "hidden")
]
TIED = [
    (kind, name, of)
    for kind in KINDS
    for name, of in FAMILIES[kind].tied.items()
    if (kind, name) != ("gpt_neox", "lm_head.weight")  # a name that is in no file of a tied model
]


def output(model: Any, params: Any) -> np.ndarray:
    more = (TOKENS,) if isinstance(model, EncoderDecoder) else ()
    return np.asarray(model.forward(params, TOKENS, *more)[0])


def require_same_as(hf: Any, folder: Path) -> Any:
    """What transformers gives for the tokens; our parameters."""
    inputs = {"input_ids": torch.tensor(TOKENS)}
    if hf.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor(TOKENS)
    with torch.no_grad():
        wanted = hf(**inputs)[0].numpy()
    model, params = pretrained.load(folder)
    require_close(str(folder), output(model, params), wanted, 1e-4)
    return params


@pytest.mark.parametrize(("kind", "head"), HEADS)
def test_names_in_memory_load_as_names_in_files(
    kind: str, head: str | None, tmp_path: Path
) -> None:
    hf = tiny(kind, head)
    hf.save_pretrained(tmp_path / "files")
    hf.save_pretrained(tmp_path / "memory", save_original_format=False)
    hf.config.save_pretrained(tmp_path / "state")
    state = {name: tensor.clone() for name, tensor in hf.state_dict().items()}  # tied ones twice
    save_file(state, tmp_path / "state" / "model.safetensors")
    params = require_same_as(hf, tmp_path / "files")
    for folder in ("memory", "state"):
        require_equal(pretrained.load(tmp_path / folder)[1], params)


def test_names_in_memory_are_saved_as_in_files(tmp_path: Path) -> None:
    hf = tiny("mixtral")
    hf.save_pretrained(tmp_path / "memory", save_original_format=False)
    pretrained.save(*pretrained.load(tmp_path / "memory"), tmp_path / "ours")
    names = load_file(tmp_path / "ours" / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.experts.2.w3.weight" in names
    again, info = type(hf).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    assert all(map(torch.equal, hf.state_dict().values(), again.state_dict().values()))


@pytest.mark.parametrize(("kind", "name", "of"), TIED)
def test_a_tied_name_alone_stands_for_the_tensor(
    kind: str, name: str, of: str, tmp_path: Path
) -> None:
    ties = {"tie_word_embeddings": True} if name.endswith("weight") else {}
    hf = tiny(kind, **ties)
    hf.save_pretrained(tmp_path)
    assert of in load_file(tmp_path / "model.safetensors")
    rewritten(tmp_path, lambda tensor: name if tensor == of else tensor)
    judge = type(hf).from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert torch.equal(judge.state_dict()[of], hf.state_dict()[of])
    require_same_as(hf, tmp_path)
