"""Summaries of models: published sizes, the command, and what it does not read."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_configs import block_config

from xformer import backends, optim, pretrained, training, tree
from xformer.cli import main
from xformer.initializers import Shapes
from xformer.inspection.summary import context, ranges, summary
from xformer.layers import EmbedConfig, ExpertsConfig
from xformer.models import GPT, LanguageModel
from xformer.pretrained import mapped

GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
LLAMA3 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
MIXTRAL = LLAMA3 | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
}
BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
ALBERT = BERT | {
    "model_type": "albert",
    "architectures": ["AlbertModel"],
    "vocab_size": 30000,
    "num_hidden_groups": 1,
}
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TINY = GPT2 | {"n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 16, "vocab_size": 11}


@pytest.mark.parametrize(
    ("config", "n_params", "n_active"),
    [
        (GPT2, 124_439_808, None),
        (LLAMA3, 8_030_261_248, None),
        (MIXTRAL, 46_702_792_704, 12_879_925_248),
        (BERT, 109_514_298, None),
        (ALBERT, 11_683_584, None),
        (T5, 60_506_624, None),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_parameters_are_those_that_are_published(
    config: dict[str, Any], n_params: int, n_active: int | None
) -> None:
    found = summary(pretrained.model(config))
    assert found.n_params == n_params
    assert found.n_active == (n_params if n_active is None else n_active)


def test_blocks_of_one_shape_are_one_part() -> None:
    names = [part.name for part in summary(pretrained.model(GPT2)).parts]
    assert names == ["embed", "blocks 0-11", "final norm"]
    names = [part.name for part in summary(pretrained.model(ALBERT)).parts]
    assert names == ["embed", "block 0, in 12 layers", "head"]
    names = [part.name for part in summary(pretrained.model(T5)).parts]
    assert names[1:3] == ["encoder blocks 0-5", "encoder final norm"]
    dense = block_config(8, 2, 5)
    sparse = block_config(8, 2, 5, experts=ExpertsConfig(4, 2, 5))
    model = LanguageModel(EmbedConfig(11, 8, 8, positions="none"), (dense, sparse) * 5)
    found = {part.name: part for part in summary(model).parts}
    assert list(found) == ["embed", "blocks 0, 2, ..., 8", "blocks 1, 3, ..., 9", "final norm"]
    experts = 3 * 4 * 8 * 5
    block = found["blocks 1, 3, ..., 9"]
    assert block.n_params - block.n_active == 5 * experts // 2
    assert block.paths[:2] == ("stack.blocks.1", "stack.blocks.3")


def test_parts_have_every_parameter_once() -> None:
    for config in (TINY, ALBERT, T5, MIXTRAL):
        model = pretrained.model(config)
        leaves = {
            name: leaf.shape for name, leaf in tree.flatten(model.init_from(Shapes())).items()
        }
        found = {
            f"{path}.{leaf}".removesuffix("."): shape
            for part in summary(model).parts
            for path in part.paths
            for leaf, shape in part.leaves.items()
        }
        assert found == leaves


def test_gpt2_takes_six_flops_a_parameter_and_attention() -> None:
    found = summary(pretrained.model(GPT2), length=1024)
    n, attention = found.n_params, 12 * 2 * 2 * 768 * (1024 + 1) / 2
    assert 3 * found.flops.weights == pytest.approx(6 * n, rel=0.01)
    assert found.flops.attention == attention
    assert found.flops.training == 3 * (found.flops.weights + attention)


def test_flops_of_experts_are_those_of_active_parameters() -> None:
    found = summary(pretrained.model(MIXTRAL))
    looked_up = 32000 * 4096
    norms = 65 * 4096
    assert found.flops.weights == 2 * (found.n_active - looked_up - norms)


def test_memory_of_training() -> None:
    model = pretrained.model(TINY)
    params = model.init()
    state = optim.adamw_init(params)
    memory = summary(model, batch=2, length=5).memory
    assert memory.params == tree.nbytes(params)
    assert memory.training == memory.saved + 2 * tree.nbytes(params) + tree.nbytes(
        (state.m, state.v)
    )
    wide = summary(model, batch=2, length=5, dtype="float64").memory
    assert wide.params == 2 * memory.params
    assert memory.kv_token == 2 * 3 * 8 * 4 and memory.kv_cache == 2 * 5 * memory.kv_token


def test_the_length_is_the_context_if_that_is_less() -> None:
    assert summary(pretrained.model(TINY)).length == 16
    assert summary(pretrained.model(LLAMA3)).length == 1024
    assert summary(pretrained.model(T5)).length == 1024
    found = [context(pretrained.model(config)) for config in (TINY, LLAMA3, BERT, T5)]
    assert found == [16, 8192, 512, None]
    assert summary(pretrained.model(LLAMA3), length=100_000).length == 100_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch must be an int of at least 1, got 0"),
        ({"length": 0}, "length must be an int of at least 1, got 0"),
        ({"length": 17}, "length must be at most 16"),
        ({"dtype": "float16"}, "dtype must be float32 or float64, got 'float16'"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        summary(pretrained.model(TINY), **options)


def test_what_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"model must be one of .*, got 'gpt2'"):
        summary("gpt2")


def test_ranges() -> None:
    given = [(3,), (0, 1, 2), (0, 2), (0, 2, 4, 6), (0, 2, 4, 6, 8), (1, 2, 3, 5, 6)]
    found = ["3", "0-2", "0, 2", "0, 2, 4, 6", "0, 2, ..., 8", "1, 2, ..., 6"]
    assert [ranges(numbers) for numbers in given] == found


def test_a_large_model_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        found = summary(pretrained.model(LLAMA3), batch=64, length=8192)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 256 << 20 < found.memory.saved


# The command.


def saved(folder: Path, config: dict[str, Any]) -> Path:
    model = pretrained.model(config)
    pretrained.save(model, model.init(), folder)
    return folder


def headers(folder: Path, config: dict[str, Any]) -> Path:
    """A model folder whose weights are a hole in a file, which does not end in it."""
    model = pretrained.model(config)
    zeros = tree.map(lambda leaf: np.broadcast_to(0.0, leaf.shape), model.init_from(Shapes()))
    header, end = {}, 0
    for name, array in pretrained.tensors_of(model, zeros).items():
        start, end = end, end + 2 * array.size
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.seek(8 + len(text) + end - 1)
        file.write(b"\1")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def output(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["summary", *options]) == 0
    said = capsys.readouterr()
    assert not said.err
    return said.out


def test_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path / "gpt2", TINY)
    out = output(capsys, "--model", str(folder), "--batch", "2")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "model GPT2LMHeadModel" in lines
    assert "stored 11.4 kB of F32" in lines
    assert "layers 3, width 8" in lines and "attention 2 heads of 4" in lines
    assert "context 16" in lines
    assert "blocks 0-2 3 x 872 2,616 91.9%" in lines
    assert "ffn.up 8 x 32 + 32 288" in lines
    assert "head, tied the embedding's table 0" in lines
    assert "total 2,848" in lines
    assert "memory float32, batch 2, length 16" in lines
    assert "parameters 11.4 kB" in lines
    assert any(line.endswith("FLOP 3 x forward") for line in lines)
    assert all(len(line) <= 100 and line == line.rstrip() for line in out.splitlines())


def test_verbose_has_every_parameter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path / "gpt2", TINY)
    out = output(capsys, "--model", str(folder), "--verbose")
    for name in tree.flatten(pretrained.model(TINY).init_from(Shapes())):
        assert f"\n{name} " in out


@pytest.mark.parametrize(
    "config",
    [TINY, ALBERT | {"num_hidden_groups": 3}, BERT, T5, MIXTRAL | SMALL],
    ids=lambda config: config["model_type"],
)
def test_the_json_has_what_the_library_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any]
) -> None:
    folder = headers(tmp_path, config)
    data = json.loads(output(capsys, "--model", str(folder), "--seq-len", "9", "--json"))
    found = summary(pretrained.model(config), length=9)
    assert data["parameters"] == found.n_params
    assert data["active_parameters"] == found.n_active
    assert data["bytes"]["training"] == found.memory.training
    assert data["flops_per_token"]["forward"] == found.flops.forward
    assert data["stored"] == {"BF16": 2 * found.n_params}
    assert sum(part["parameters"] for part in data["parts"]) == found.n_params


def test_a_folder_without_weights_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(mapped.Tensor, "read", read)
    out = output(capsys, "--model", str(headers(tmp_path, LLAMA3 | SMALL)))
    assert "8 key/value heads" in out and "of BF16" in out


def test_a_file_of_llama2c(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"d_model": 8, "d_ff": 12, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1}
    model = pretrained.model(
        {"model_type": "llama2.c", **sizes, "vocab_size": 11, "max_len": 16, "tied": True}
    )
    pretrained.save(model, model.init(), tmp_path / "model.bin")
    out = output(capsys, "--model", str(tmp_path / "model.bin"))
    assert "model         llama2.c\n" in out and "context       16\n" in out


def test_a_checkpoint_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpt = GPT(11, 2, 8, 2, 16)
    training.save(tmp_path, gpt, gpt.init(), backends.get("numpy"))
    data = json.loads(output(capsys, "--model", str(tmp_path), "--json"))
    assert data["model"] == "LanguageModel" and data["context"] == data["length"] == 16
    assert data["stored"] == {"F32": summary(gpt).memory.params}


def damaged(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def edited(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(TINY | changes))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damaged, "model.safetensors: "),
        (lambda folder: (folder / "model.safetensors").unlink(), "is no model: it has no"),
        (lambda folder: (folder / "config.json").unlink(), "is no model: it has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "is no valid JSON"),
        (lambda folder: edited(folder, model_type="mamba"), "model_type must be one of"),
        (lambda folder: edited(folder, per_layer_config={"0": {}}), "not supported: 'per_lay"),
        (lambda folder: edited(folder, n_layer=4), "12 missing: "),
        (lambda folder: edited(folder, n_embd=1 << 30), "misshapen"),
        (lambda folder: edited(folder, format="xformer-2"), "was not written by xformer"),
    ],
)
def test_folders_that_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Any, message: str
) -> None:
    spoil(saved(tmp_path / "gpt2", TINY))
    assert main(["summary", "--model", str(tmp_path / "gpt2")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("xformer: error: ") and message in err and err.count("\n") == 1


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", "--model", "absent"]) == 1
    assert "there is no folder or file absent" in capsys.readouterr().err


def test_a_length_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path / "gpt2", TINY)
    assert main(["summary", "--model", str(folder), "--seq-len", "17"]) == 1
    assert "--seq-len must be at most 16" in capsys.readouterr().err
