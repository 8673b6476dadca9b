"""What the library's messages say to do next, followed to the letter: it works, and helps."""

from __future__ import annotations

import inspect
import re
import shlex
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from causal_models import causal

from xformer import finetune, pretrained
from xformer.backends.cupy.packages import LIBRARIES
from xformer.cli import main, train
from xformer.dispatch.registry import INSTALL
from xformer.pretrained import PretrainedError
from xformer.pretrained.foreign import require_model

CODE = re.compile(r"`(.*?)`")
ROOT = Path(__file__).parents[1]


def advice(folder: Path) -> str:
    """The code in what is said of a folder or a file."""
    with pytest.raises(PretrainedError) as raised:
        require_model(folder)
    (code,) = CODE.findall(str(raised.value))
    return str(code)


def follow(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(code, names)
    return names


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "head"), [("bert", "masked-lm"), ("llama", "lm"), ("qwen2", "classifier")]
)
def test_a_pickle_of_transformers_is_converted_with_its_head(
    kind: str, head: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from huggingface import torch
    from test_pretrained_matching import require_same_as
    from tiny import architecture, tiny

    hf = tiny(kind, head)
    hf.config.architectures = [architecture(kind, head)]
    hf.config.save_pretrained(tmp_path / "it's old")
    torch.save(hf.state_dict(), tmp_path / "it's old" / "pytorch_model.bin")
    before = (tmp_path / "it's old" / "config.json").read_bytes()
    follow(advice(tmp_path / "it's old"))
    require_same_as(hf, tmp_path / "it's old-safetensors")
    assert (tmp_path / "it's old" / "config.json").read_bytes() == before
    # Without a tokenizer's files only the model is written; with them they are too.
    assert "AutoTokenizer" not in advice(tmp_path / "it's old")
    (tmp_path / "it's old" / "tokenizer.json").write_text("{}")
    assert "t.AutoTokenizer.from_pretrained(" in advice(tmp_path / "it's old")


def test_a_state_dict_becomes_a_model(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("safetensors.torch")
    model, params = small(tmp_path)
    tensors = {n: torch.tensor(a) for n, a in pretrained.tensors_of(model, params).items()}
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "weights.pth")
    follow(advice(tmp_path / "weights.pth"))
    require_same(tmp_path, model, params)


def test_arrays_of_numpy_become_a_model(tmp_path: Path) -> None:
    model, params = small(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    np.savez(tmp_path / "weights.npz", **pretrained.tensors_of(model, params))
    follow(advice(tmp_path / "weights.npz"))
    require_same(tmp_path, model, params)


def test_an_adapter_is_merged_into_its_base(tmp_path: Path) -> None:
    model, params = small(tmp_path / "base")
    params = finetune.lora.attach(params, rank=2, alpha=3)
    finetune.peft.save(model, params, tmp_path / "adapter", base=str(tmp_path / "base"))
    follow(advice(tmp_path / "adapter"))
    require_same(tmp_path / "adapter-merged", model, finetune.lora.merge(params), 1e-3)  # float32


def test_adapters_are_merged_before_others_come(tmp_path: Path) -> None:
    model, params = small(tmp_path)
    params = finetune.lora.attach(params, rank=2, alpha=3)
    with pytest.raises(ValueError, match=r"merge them first \(lora\.merge\)"):
        finetune.peft.load(model, params, tmp_path)
    with pytest.raises(ValueError, match="merge it first"):
        finetune.lora.attach(params, rank=2, alpha=3)
    finetune.lora.attach(finetune.lora.merge(params), rank=2, alpha=3)


def test_more_than_adapters_is_written_as_a_whole(tmp_path: Path) -> None:
    from xformer import tree

    model, params = small(tmp_path)
    params = tree.thaw(finetune.lora.attach(params, rank=2, alpha=3), "embed.*")
    with pytest.raises(ValueError, match=r"write the whole model: pretrained\.save") as raised:
        finetune.peft.save(model, params, tmp_path / "adapter")
    code = str(raised.value).rpartition("model: ")[2]
    names = {"pretrained": pretrained, "lora": finetune.lora, "model": model, "params": params}
    exec(code, names | {"folder": tmp_path / "whole"})
    require_same(tmp_path / "whole", model, finetune.lora.merge(params))


def test_the_hubs_command_takes_what_is_said() -> None:
    """`hf download NAME --local-dir FOLDER`, without the network."""
    pytest.importorskip("huggingface_hub", reason="transformers, which brings it, is not installed")
    from huggingface_hub.cli.download import download

    known = set(inspect.signature(download).parameters)
    assert {"repo_id", "repo_type", "local_dir"} <= known


def test_extras_that_are_named_exist() -> None:
    """pip install 'xformer-array[EXTRA]', in every message."""
    extras = set(metadata("xformer-array").get_all("Provides-Extra") or ())
    files = [*(ROOT / "xformer").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    named = set(re.findall(r"xformer-array\[([\w,-]+)\]", text))
    assert named and {extra for group in named for extra in group.split(",")} <= extras
    for hint in (*INSTALL.values(), *LIBRARIES.values()):
        commands = re.split(r", or for CUDA 12: ", hint)
        for install, what in (shlex.split(command.removeprefix("pip ")) for command in commands):
            assert install == "install" and re.fullmatch(r"[\w-]+(\[[\w-]+\])?", what)


def test_the_commands_that_commands_print_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """prepare says how to train, and train how to go on; folders may have blanks."""
    monkeypatch.setattr(train, "_sample", lambda *_, **__: None)
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 100)
    data, folder = tmp_path / "my data", tmp_path / "my run"
    assert main(["prepare", str(tmp_path / "text.txt"), str(data)]) == 0
    (said,) = re.findall(r"to train on it: xformer (.*)", capsys.readouterr().out)
    tiny = ["--preset", "tiny", "--layers", "1", "--max-len", "16", "--d-model", "16"]
    assert main([*shlex.split(said), *tiny, "--steps", "1", "--out", str(folder)]) == 0
    with pytest.raises(PretrainedError, match="is of a run of xformer train") as raised:
        pretrained.load(folder)
    assert "params" in follow(CODE.findall(str(raised.value))[0])
    (said,) = re.findall(r"to resume: xformer (.*)", capsys.readouterr().out)
    assert main(shlex.split(said)) == 0
    assert "after 2 steps" in capsys.readouterr().out


def test_an_existing_run_is_resumed_as_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "_sample", lambda *_, **__: None)
    (tmp_path / "it's.txt").write_text("the cat sat on the mat\n" * 100)
    tiny = ["--preset", "tiny", "--layers", "1", "--max-len", "16", "--d-model", "16"]
    command = ["train", "--data", str(tmp_path / "it's.txt"), *tiny, "--steps", "1"]
    command += ["--out", str(tmp_path / "it's a run")]
    assert main(command) == 0
    assert main(command) == 1
    (said,) = re.findall(r"resume the run in it: xformer (.*)", capsys.readouterr().err)
    assert main(shlex.split(said)) == 0
    assert "after 1 steps" in capsys.readouterr().out
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    assert main([*command[:-1], str(tmp_path / "other")]) == 1
    assert capsys.readouterr().err.endswith("other is not empty; name a new folder\n")


def test_a_missing_path_is_found_next_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_sample", lambda *_, **__: None)
    Path("data").mkdir()
    Path("data/my fox.txt").write_text("the quick brown fox\n" * 100)
    Path("data/pairs.jsonl").write_text('{"text": "a"}\n')
    tiny = ["--preset", "tiny", "--layers", "1", "--max-len", "16", "--d-model", "16"]
    tiny += ["--steps", "1"]

    def meant(*argv: str) -> str:
        assert main(list(argv)) == 1
        (said,) = re.findall(r"; did you mean (.*)\?", capsys.readouterr().err)
        (path,) = shlex.split(said)
        return path

    data = meant("train", *tiny, "--data", "data/my-fox.txt", "--out", "runs/gpt")
    assert main(["train", *tiny, "--data", data, "--out", "runs/gpt"]) == 0
    assert meant("train", "--resume", "runs/gtp") == "runs/gpt"
    assert meant("train", "--resume", "run/gpt") == "runs/gpt"
    assert meant("train", "--resume", "gpt") == "runs/gpt"  # runs/ is forgotten
    assert main(["train", "--resume", "zzz"]) == 1
    assert capsys.readouterr().err == "xformer: error: zzz does not exist\n"
    assert meant("generate", "--model", "runs/gpt2", "--prompt", "a") == "runs/gpt"
    assert meant("summary", "--model", "runs/gpd") == "runs/gpt"
    assert main(["summary", "--model", "runs/gpd"]) == 1
    assert "Hub" not in capsys.readouterr().err  # runs/ is a folder, and no owner
    command = ("finetune", "--model", "runs/none", "--task", "causal")
    assert meant(*command, "--data", "data/pair.jsonl") == "data/pairs.jsonl"
    capsys.readouterr()
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert meant("plot", "runs/gtp") == "runs/gpt"
    for path in ("data", "elsewhere/gpt", "runs/zzz"):  # it exists, no folder, nothing is alike
        assert main(["plot", path]) == 1
        assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("karpathy/tiny_shakespeare", "hf download karpathy/tiny_shakespeare --repo-type dataset "
         "--local-dir tiny_shakespeare"),
        ("books.txt", None),
        ("data/books", None),
        ("/a/b", None),
    ],
)  # fmt: skip
def test_data_of_the_hub(
    name: str,
    command: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for argv in (["train", "--data", name], ["prepare", name, "new"]):
        assert main(argv) == 1
        err = capsys.readouterr().err
        assert re.match(rf"xformer: error: there is no file or folder \S*{name}\b", err)
        assert CODE.findall(err) == [command] * (command is not None)


def small(folder: Path) -> tuple[Any, Any]:
    """A tiny Llama in a folder."""
    model, params = causal("llama")
    pretrained.save(model, params, folder)
    return model, params


def require_same(folder: Path, model: Any, params: Any, tolerance: float = 1e-9) -> None:
    """What a folder holds gives the same logits."""
    tokens = np.arange(6).reshape(1, 6)
    again = pretrained.load(folder, dtype="float64")
    wanted, _ = model.forward(params, tokens)
    np.testing.assert_allclose(again[0].forward(again[1], tokens)[0], wanted, rtol=tolerance)
