"""Adapters' files: what is written is read back as it was, and what cannot be used is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import damaged, edited, refused_at_most, some
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from test_lora import CONFIGS, GPT2, LLAMA, made

from xformer import pretrained, tree
from xformer.backends import Backend
from xformer.base.tree import Constant, Frozen
from xformer.finetune import lora, peft
from xformer.layers import LoRAParams
from xformer.pretrained import PretrainedError

PREFIX = "base_model.model."


def require_equal(got: Any, want: Any) -> None:
    """The same adapters, bit for bit, of the same scales."""
    a, b = lora.adapters(got), lora.adapters(want)
    assert list(a) == list(b)
    for name, node in b.items():
        assert a[name].scale == node.scale
        for x, y in zip(a[name][1:3], node[1:3], strict=True):
            assert x.dtype == y.dtype and np.array_equal(x, y)


@pytest.mark.parametrize("name", CONFIGS)
def test_written_and_read(name: str, tmp_path: Path) -> None:
    """All linear maps; those that are one module of transformers too."""
    model, params = made(name)
    peft.save(model, params, tmp_path)
    again = peft.load(model, lora.merge(model.init(0, dtype="float64")), tmp_path)
    require_equal(again, params)
    trained = tree.flatten(tree.trained(again))
    assert {name.rpartition(".")[2] for name in trained} == {"a", "b"}


def test_gpt2s_three_are_one_module(tmp_path: Path) -> None:
    """Ranks add up; what is no part of a map's adapter is 0; a part may have none."""
    model, params = made("gpt2", targets=("*.attn.q", "*.attn.kv.v"), rank=3, alpha=6)
    nodes = lora.adapters(params)
    peft.save(model, params, tmp_path, base="gpt2")
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = f"{PREFIX}transformer.h.1.attn.c_attn"
    down, up = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
    assert len(tensors) == 4 and down.shape == (6, 12) and up.shape == (36, 6)
    q, v = (nodes[f"stack.blocks.1.attn.{part}"] for part in ("q", "kv.v"))
    assert np.array_equal(down, np.concatenate([q.a, v.a], axis=1).T)
    assert np.array_equal(up[:12, :3], q.b.T) and np.array_equal(up[24:, 3:], v.b.T)
    assert not up[12:24].any() and not up[:12, 3:].any() and not up[24:, :3].any()
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["fan_in_fan_out"]) == (6, 12, True)
    assert (config["base_model_name_or_path"], config["task_type"]) == ("gpt2", "CAUSAL_LM")
    assert config["rank_pattern"] == config["alpha_pattern"] == {}


def test_other_ranks_and_scales(tmp_path: Path) -> None:
    """Of one module too: what the scales differ by goes into b."""
    model, params = made("gpt2", targets=("*.attn.q", "*.attn.kv.k", "*.attn.o"))

    def changed(name: str, node: LoRAParams) -> LoRAParams:
        return node._replace(scale=Constant(0.25)) if name.endswith("1.attn.kv.k") else node

    params = tree.map_nodes(changed, params, LoRAParams)
    peft.save(model, params, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    outs = [f"transformer.h.{i}.attn.c_proj" for i in range(2)]
    assert config["r"] == 4 and config["rank_pattern"] == dict.fromkeys(outs, 2)
    assert config["lora_alpha"] == 6 and config["alpha_pattern"] == dict.fromkeys(outs, 3)
    again = peft.load(model, model.init(0, dtype="float64"), tmp_path)
    ids = np.arange(10).reshape(2, 5)
    got, want = (model.forward(p, ids)[0] for p in (again, params))
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


def test_fresh_adapters_are_read_as_nothing_yet(tmp_path: Path) -> None:
    model = pretrained.model(GPT2)
    params = model.init(0)
    peft.save(model, lora.attach(params, 2, 2, ("*.attn.q",)), tmp_path)
    again = peft.load(model, params, tmp_path)
    ids = np.arange(5)[None]
    assert np.array_equal(model.forward(again, ids)[0], model.forward(params, ids)[0])


def test_on_every_backend(library: Backend, tmp_path: Path) -> None:
    model, params = made("llama")
    peft.save(model, params, tmp_path)

    def move(tree_: Any) -> Any:
        return tree.map(library.asarray, tree_)

    again = peft.load(model, move(model.init(0, dtype="float64")), tmp_path)
    peft.save(model, again, tmp_path / "again")
    files = [load_file(p / "adapter_model.safetensors") for p in (tmp_path, tmp_path / "again")]
    assert files[0].keys() == files[1].keys()
    assert all(np.array_equal(files[0][name], files[1][name]) for name in files[0])


# ---- Refused ----


@pytest.fixture
def written(tmp_path: Path) -> tuple[Any, Any, Path]:
    """A small Llama with an adapter in a folder."""
    model, params = made("llama")
    peft.save(model, params, tmp_path)
    return model, model.init(0), tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora must be False, got True"),
        ({"bias": "lora_only"}, "bias must be 'none', got 'lora_only'"),
        ({"lora_bias": True}, "lora_bias must be False"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights must be True or False or 'gaussian'"),
        ({"loftq_config": {"bits": 4}}, r"loftq_config must be \{\}"),
        ({"trainable_token_indices": [1]}, r"trainable_token_indices must be \[\]"),
        ({"target_parameters": ["x"]}, r"target_parameters must be \[\], got \['x'\]"),
        ({"layer_replication": [[0, 1]]}, "layer_replication must be"),
        ({"use_qalora": True}, "use_qalora must be False"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens must be"),
        ({"peft_type": "IA3"}, "peft_type must be 'LORA', got 'IA3'"),
        ({"r": 0}, "r must be an integer from 1 to 65536, got 0"),
        ({"r": 3}, "'lm_head' must have rank 3, its tensors have 2"),
        ({"rank_pattern": {"q_proj": 5}}, "self_attn.q_proj' must have rank 5"),
        ({"alpha_pattern": {"(a+)+": 1}}, r"alpha_pattern: '\(a\+\)\+': it must be a name, or an"),
        ({"alpha_pattern": {"q_proj\\": 1}}, "alpha_pattern: .*bad escape"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern: q_proj must be a number"),
        ({"lora_alpha": None}, "lora_alpha is missing"),
    ],
)
def test_configurations_that_are_refused(
    written: tuple[Any, Any, Path], change: dict[str, Any], message: str
) -> None:
    model, params, folder = written
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PretrainedError, match=message):
        peft.load(model, params, folder)


def test_a_key_that_peft_does_not_read_is_named(written: tuple[Any, Any, Path]) -> None:
    model, params, folder = written
    plain = peft.load(model, params, folder)
    path = folder / "adapter_config.json"
    keys = {"unsloth_version": "2025.1", "note": {"by": "me"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    with pytest.warns(UserWarning, match="PEFT does not read are left out: 'note', 'unsloth_ver"):
        require_equal(peft.load(model, params, folder), plain)


def test_scales(written: tuple[Any, Any, Path]) -> None:
    """use_rslora; patterns that are ends of names, or expressions for them."""
    model, params, folder = written
    path = folder / "adapter_config.json"
    patterns = {r"layers.\d.self_attn.q_proj": 7, "^lm_head": 9, "o_proj": 5.5}
    config = {"use_rslora": True, "alpha_pattern": patterns}
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    scales = {n: a.scale.value for n, a in lora.adapters(peft.load(model, params, folder)).items()}
    assert scales["stack.blocks.1.attn.q"] == 7 / 2**0.5
    assert scales["stack.blocks.0.attn.o"] == 5.5 / 2**0.5
    assert scales["head"] == 9 / 2**0.5
    assert scales["stack.blocks.0.attn.kv.k"] == 3 / 2**0.5


def test_tensors_that_are_refused(written: tuple[Any, Any, Path]) -> None:
    model, params, folder = written
    path = folder / "adapter_model.safetensors"
    good = load_file(path)
    name = f"{PREFIX}lm_head"
    down, up = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
    zeros = np.zeros((2, 3), np.float32)
    for change, message in (
        ({down: None}, f"not supported: '{up}'"),
        ({f"{name}.lora_magnitude_vector": zeros}, "not supported: .*lora_magnitude_vector"),
        ({f"{PREFIX}scores.weight": zeros}, "not supported: 'scores.weight'"),
        ({f"{name}.base_layer.weight": zeros}, r"base_layer.weight must be \(37, 12\), got shape"),
        ({down: zeros}, r"lora_A.weight must be \(2, 12\), got shape \(2, 3\)"),
        ({up: zeros}, r"lora_B.weight must be \(37, 2\), got shape \(2, 3\)"),
        ({down: np.zeros((0, 12)), up: np.zeros((37, 0))}, r"got shape \(0, 12\)"),
        ({down: zeros[0]}, r"must be \(2, 12\), got shape \(3,\)|\(3, 12\), got shape"),
        ({down: np.zeros((2, 12), np.int64)}, "must be one of F64, F32"),
        (
            {f"{PREFIX}lm_heat{end}": good[name + end] for end in (peft.DOWN, peft.UP)},
            "the model has no linear maps 'lm_heat'",
        ),
    ):
        tensors = {n: a for n, a in (good | change).items() if a is not None}
        save_file(tensors, path)
        with pytest.raises(PretrainedError, match=message):
            peft.load(model, params, folder)


def test_what_is_not_there(written: tuple[Any, Any, Path], tmp_path: Path) -> None:
    model, params, folder = written
    with pytest.raises(FileNotFoundError, match="absent is no adapter: it has no adapter_config"):
        peft.load(model, params, folder / "absent")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"it has no adapter_model.safetensors"):
        peft.load(model, params, folder)


def test_what_is_not_written(tmp_path: Path) -> None:
    model, params = made("llama")
    with pytest.raises(ValueError, match="save: there are no adapters"):
        peft.save(model, lora.merge(params), tmp_path)
    with pytest.raises(ValueError, match=r"save: trained beside the adapters: 'embed.table'; "):
        peft.save(model, tree.thaw(params, "embed.*"), tmp_path)
    with pytest.raises(ValueError, match="load: params have adapters already"):
        peft.load(model, params, tmp_path)
    own = pretrained.model(
        {"model_type": "nn.TransformerEncoder", "d_model": 8, "nhead": 2, "num_layers": 1}
    )
    with pytest.raises(ValueError, match=r"no modules of a model of transformers: 'stack.blocks"):
        peft.save(own, lora.attach(own.init(0), 1, 1), tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_write_leaves_what_there_was(
    written: tuple[Any, Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, params, folder = written
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        peft.save(model, lora.attach(params, 1, 1), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@some
@given(data=st.data())
def test_damaged_files_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    model, params = made("llama")
    plain = model.init(0)
    peft.save(model, params, tmp_path)
    config = tmp_path / "adapter_config.json"
    weights = tmp_path / "adapter_model.safetensors"
    if data.draw(st.booleans()):
        config.write_bytes(data.draw(edited(json.loads(config.read_text()))))
    else:
        weights.write_bytes(data.draw(damaged(weights.read_bytes())))
    with refused_at_most():
        peft.load(model, plain, tmp_path)


def test_a_frozen_model_is_loaded_into(written: tuple[Any, Any, Path]) -> None:
    model, params, folder = written
    leaves = tree.flatten(peft.load(model, tree.freeze(params), folder))
    assert {n.rpartition(".")[2] for n, a in leaves.items() if not isinstance(a, Frozen)} == {
        "a",
        "b",
    }
    assert LLAMA["model_type"] == model.hf_config["model_type"]
