"""The command line as a new user meets it."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from libraries import slow_but

import xformer
from xformer import backends, training
from xformer.cli import main, steps, train
from xformer.cli.run_options import stored
from xformer.cli.train_options import TrainOptions


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def test_train_then_generate(
    text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steps, "EVERY", 0.0)  # seconds between lines
    command = ["train", "--preset", "tiny", "--steps", "12", "--data", str(text)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "loss of a unigram model: " in out and "step 12/12" in out and "a sample" in out
    assert re.search(r"^step 11/12  loss \d\.\d{3}  validation -  [\d,]+ tokens/s", out, re.M)
    (loss,) = re.findall(r"validation loss (\d\.\d{3}) nats per byte, after step 12", out)
    (units,) = re.findall(r"^perplexity (\d+\.\d\d), (\d\.\d{3}) bits per byte$", out, re.M)
    nats = [math.log(float(units[0])), float(units[1]) * math.log(2)]
    assert nats == pytest.approx([float(loss)] * 2, abs=2e-3)
    log = [json.loads(line) for line in Path("runs/gpt/log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == list(range(1, 13))
    assert log[-1]["loss"] < log[0]["loss"] and log[-1]["validation"] is not None

    command = [
        "generate",
        "--model",
        "runs/gpt",
        "--prompt",
        "the quick",
        "--max-new-tokens",
        "20",
    ]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert first.startswith("the quick") and len(first) <= len("the quick") + 21
    assert main(command) == 0
    assert capsys.readouterr().out == first  # the same seed


@pytest.mark.parametrize("mode", slow_but(["qkv"], ["concat", "qkv"]))
def test_positions(mode: str, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are trained, resumed, generated with, and kept by a run that starts from the model."""
    usual = ["train", "--preset", "tiny", "--steps", "2", "--data", str(text)]
    chosen = ["--positions", "sinusoidal", "--position-mode", mode]
    assert main([*usual, *chosen, "--out", "a"]) == 0
    model, params = training.load("a", backends.get("numpy"))
    assert isinstance(model, xformer.models.LanguageModel)
    assert (model.embed.positions, model.embed.mode) == ("sinusoidal", mode)
    assert (params.embed.project is not None) == (mode == "concat")
    assert params.embed.positions is None
    assert main(["train", "--resume", "a", "--steps", "3"]) == 0
    assert main(["generate", "--model", "a", "--prompt", "the ", "--max-new-tokens", "80"]) == 0
    capsys.readouterr()
    assert main(["train", "--resume", "a", "--position-mode", "add"]) == 1
    assert f"--position-mode: the run in a has {mode}, got add" in capsys.readouterr().err
    assert main([*usual, "--from", "a", "--positions", "none", "--out", "b"]) == 1
    assert "--positions excludes --from: the model in a fixes it" in capsys.readouterr().err
    assert main([*usual, "--from", "a", "--out", "b"]) == 0
    notes = json.loads(Path("b/run.json").read_text())["notes"]
    assert (notes["positions"], notes["position_mode"]) == ("sinusoidal", mode)


def test_a_second_run_takes_another_folder(text: Path) -> None:
    command = ["train", "--preset", "tiny", "--steps", "1", "--data", str(text)]
    assert main(command) == main(command) == 0
    assert sorted(p.name for p in Path("runs").iterdir()) == ["gpt", "gpt-2"]


def test_a_used_folder_is_not_overwritten(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--preset", "tiny", "--steps", "1", "--data", str(text), "--out", "a"]
    assert main(command) == 0
    before = Path("a/model.safetensors").read_bytes()
    assert main(command) == 1
    assert "a is not empty" in capsys.readouterr().err
    assert Path("a/model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["train", "--data", "absent.txt"], "there is no file or folder"),
        (["train", "--steps", "0"], "--steps must be an int of at least 1, got 0"),
        (["train", "--seed", "-1"], "--seed must be an int of at least 0, got -1"),
        (["train", "--batch", "0"], "--batch must be an int of at least 1, got 0"),
        (["train", "--validate-every", "0"], "--validate-every must be an int of at least 1"),
        (["train", "--validate-batches", "0"], "--validate-batches must be an int of at least 1"),
        (["train", "--sample-every", "0"], "--sample-every must be an int of at least 1, got 0"),
        (
            ["train", "--keep-checkpoints", "0"],
            "--keep-checkpoints must be an int of at least 1, got 0",
        ),
        (["train", "--max-len", "0"], "--max-len must be an int of at least 1, got 0"),
        (["train", "--lr", "nan"], "--lr must lie in [0, inf], got nan"),
        (["train", "--clip", "-1"], "--clip must lie in [0, inf], got -1"),
        (
            ["generate", "--model", "absent", "--prompt", "x"],
            "there is no folder or file absent",
        ),
    ],
)
def test_mistakes_are_one_line(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 1
    err = capsys.readouterr().err
    assert err.startswith("xformer: error: ") and message in err and err.count("\n") == 1
    assert not Path("runs").exists()


PATHS = {
    "attention": ("--model", "--tokenizer", "--out"),
    "classify": ("--model", "--tokenizer", "--file"),
    "embed": ("--model", "--tokenizer", "--file"),
    "export": ("--model", "--out"),
    "finetune": ("--model", "--data", "--out", "--tokenizer"),
    "signal-flow": ("--out",),
    "generate": ("--model", "--tokenizer"),
    "rank": ("--model", "--tokenizer", "--file"),
    "memory": ("--model",),
    "plot": ("--out",),
    "search": ("--model", "--tokenizer", "--file", "--index"),
    "summary": ("--model",),
    "tag": ("--model", "--tokenizer", "--file"),
    "trace": ("--model", "--tokenizer"),
    "train": ("--data", "--out", "--resume"),
}


@pytest.mark.parametrize("command", PATHS)
def test_an_empty_path_is_not_this_folder(
    command: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in PATHS[command]:
        with pytest.raises(SystemExit) as left:
            main([command, option, ""])
        assert left.value.code == 2
        said = capsys.readouterr().err
        assert option in said and "must name a file or a folder, got an empty path" in said


@pytest.mark.parametrize(
    "command", [["prepare", "", "new"], ["prepare", "fox.txt", ""], ["plot", ""]]
)
def test_an_empty_place_is_not_this_folder(
    command: list[str], text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(command)
    assert "must name a file or a folder, got an empty path" in capsys.readouterr().err
    assert [*Path().iterdir()] == [Path("fox.txt")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty, there is no text in it"),
        (b"x", "the training part of short.txt is empty: give more text; if the text was prepared"),
        (b"x" * 900, "129, got 90 (the validation part; reduce --max-len)"),
        (b"caf\xe9" * 1000, "is not UTF-8 text: byte 0xe9 at offset 3"),
    ],
)
def test_text_that_is_none_leaves_nothing_behind(
    text: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("short.txt").write_bytes(text)
    assert main(["train", "--data", "short.txt"]) == 1
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


TINY = ["train", "--preset", "tiny", "--layers", "1", "--max-len", "16", "--d-model", "16"]


def test_what_is_said_last_can_be_done(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of characters, of which there may be no "def", and where a text begins with a dash."""
    monkeypatch.setattr(train, "_sample", lambda *_, **__: None)
    text.write_text("-- 1 2 3 " * 300)
    options = ["--tokenizer", "characters", "--clip", "0", "--out", "a run"]
    assert main([*TINY, "--steps", "1", "--data", str(text), *options]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(Path("a run/run.json").read_text())["about"]["training"]["clip"] is None
    command = shlex.split(last.removeprefix("to generate more: xformer "))
    assert main([*command, "--max-new-tokens", "2"]) == 0


def test_a_run_goes_on_with_both_its_parts_only(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That which is validated on too; prepared or not makes no difference."""
    monkeypatch.setattr(train, "_sample", lambda *_, **__: None)
    assert main([*TINY, "--steps", "2", "--data", str(text), "--out", "a"]) == 0
    assert main(["prepare", str(text), "tokens"]) == 0
    assert main(["train", "--resume", "a", "--data", "tokens"]) == 0
    text.write_text(text.read_text()[:-9] + "end dog. ")
    capsys.readouterr()
    assert main(["train", "--resume", "a"]) == 1
    assert "is of another run: data.validation is" in capsys.readouterr().err


def test_damaged_tokens_are_not_trained_on(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", str(text), "tokens", "--validation-fraction", "0"]) == 0
    capsys.readouterr()
    assert main([*TINY, "--data", "tokens"]) == 1
    said = capsys.readouterr().err
    assert "the validation part of fox.txt is empty" in said and "--max-len" not in said
    assert main(["prepare", str(text), "others"]) == 0
    content = bytearray(Path("others/train.bin").read_bytes())
    content[100] ^= 1
    Path("others/train.bin").write_bytes(content)
    assert main([*TINY, "--data", "others"]) == 1
    assert "train.bin: is damaged, its SHA-256 is not that" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "is not a run of xformer train: resume it from Python"),
        ({"more": 1}, "is not a run of xformer train: resume it from Python"),
        ({"preset": "nope"}, "notes: preset must be one of tiny, small, medium, got 'nope'"),
        ({"backend": "abacus"}, "notes: backend must be one of numpy, "),
        ({"steps": "x"}, "notes: steps must be an integer, got 'x'"),
        ({"d_model": None}, "notes: d_model must be an integer, got None"),
        ({"data": 5}, "notes: data must be a string, got 5"),
        ({"clip": "x"}, "notes: clip must be a number, got 'x'"),
        ({"patience": "x"}, "notes: patience must be an integer, got 'x'"),
        ({"optimiser": "adamax"}, "notes: optimiser must be one of sgd, "),
    ],
)
def test_a_damaged_run_is_named(
    change: dict[str, object] | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = {name: field.default for name, field in stored(TrainOptions).items()}
    content: dict[str, object] = {"format": "xformer-run-1", "about": {}}
    if change is not None:
        content["notes"] = usual | change
    Path("a").mkdir()
    Path("a/run.json").write_text(json.dumps(content))
    assert main(["train", "--resume", "a"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("xformer: error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (["--out", "fox.txt"], "--out: fox.txt is a file; name a new folder"),
        (["--out", "fox.txt/a"], "fox.txt/a cannot be made: Not a directory"),
        (["--out", "sealed/a"], "sealed/a cannot be made: Permission denied"),
        ([], "runs/gpt cannot be made: Permission denied"),
    ],
)
def test_a_folder_that_cannot_be_made(
    out: list[str],
    message: str,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the system says it, which lets a superuser write everywhere."""
    real = os.mkdir

    def mkdir(path: Any, *args: Any) -> None:
        if Path(path).parts[0] in ("sealed", "runs"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        real(path, *args)

    before = text.read_bytes()
    monkeypatch.setattr(os, "mkdir", mkdir)
    assert main([*TINY, "--data", str(text), *out]) == 1
    assert capsys.readouterr().err == f"xformer: error: {message}\n"
    assert [p.name for p in Path().iterdir()] == ["fox.txt"] and text.read_bytes() == before


def test_an_empty_prompt_is_refused(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--preset", "tiny", "--steps", "1", "--data", str(text), "--out", "a"])
    capsys.readouterr()
    assert main(["generate", "--model", "a", "--prompt", ""]) == 1
    assert "the prompt must hold at least one token" in capsys.readouterr().err


def test_info_names_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in xformer.backends.NAMES)
    assert "float32, float64" in out


def test_info_names_what_is_missing_beside_cupy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device too: before a machine with one is asked for."""
    said = {"cuBLASLt": "130100", "cuDNN": "cuDNN cannot be called: package cuda-bindings is ..."}
    driver: Any = types.ModuleType("xformer.backends.cupy.driver")
    driver.beside = lambda: said
    monkeypatch.setitem(sys.modules, driver.__name__, driver)
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "\ncupy, cuBLASLt: 130100\ncupy, cuDNN: cuDNN cannot be called: package cuda-b" in out
    monkeypatch.setitem(sys.modules, driver.__name__, None)  # CuPy is not installed
    assert main(["info"]) == 0
    assert "cuBLASLt" not in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert xformer.__version__ in capsys.readouterr().out
