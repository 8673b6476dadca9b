"""The help of every command, and errors that name what was probably meant."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from xformer.cli import main
from xformer.cli.command_line import COMMANDS, command_parser
from xformer.cli.train_options import PRESETS
from xformer.inspection.summary import summary
from xformer.models import GPT, LanguageModel

NAMES = tuple(COMMANDS)


def printed(argv: list[str], capsys: pytest.CaptureFixture[str], status: int = 0) -> str:
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


@pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in NAMES)])
def test_help_fits_80_columns(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(argv, capsys).splitlines()
    assert lines[0].startswith("usage: xformer ")
    assert [line for line in lines if len(line) > 80] == []


def test_the_help_of_train_shows_what_a_preset_stands_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = printed(["train", "--help"], capsys)
    head, *rows = text.splitlines()[-4:]
    columns = ["preset", "layers", "width", "heads", "context", "batch", "steps", "peak lr"]
    assert re.split("  +", head) == [*columns, "parameters"]
    assert len(rows) == len(PRESETS)
    for row, (name, p) in zip(rows, PRESETS.items(), strict=True):
        cells = row.split()
        model = GPT(256, p.layers, p.d_model, p.heads, p.max_len)
        assert cells == [name, *map(str, p), f"{summary(model).n_params:,}"]
    flat = " ".join(text.split())
    for name in ("layers", "d_model", "heads", "max_len", "batch", "steps", "lr"):
        values = ", ".join(f"{key} {getattr(preset, name)}" for key, preset in PRESETS.items())
        option = name.replace("_", "-")
        assert re.search(rf"--{option} [A-Z]+ [^()]+\(default: {re.escape(values)}[;)]", flat)
    assert "the preset's" not in flat


@pytest.mark.parametrize(
    ("argv", "start", "end"),
    [
        (["tran"], "xformer: error: argument COMMAND: must be one of prepare,", "train?"),
        (["Generate"], "xformer: error: argument COMMAND: must be one of prepare,", "generate?"),
        (["--versoin", "info"], "xformer: error: unrecognized: --versoin;", "--version?"),
        (
            ["train", "--warmpu", "3"],
            "xformer train: error: unrecognized: --warmpu 3;",
            "--warmup?",
        ),
        (["train", "--zzzzzzzz", "--stepz=4"], "xformer train: error: unrecog", "--steps?"),
        (["train", "--optimiser", "adamW2"], "xformer train: error: argument --opt", "adamw?"),
        (["train", "--schedule", "cosin"], "xformer train: error: argument --schedule:", "cosine?"),
        (["train", "--preset", "smal"], "xformer train: error: argument --preset:", "small?"),
        (["trace", "--backend", "touch"], "xformer trace: error: argument --backend:", "torch?"),
        (["finetune", "--task", "classfy"], "xformer finetune: error: argument", "classify?"),
        (["signal-flow", "--norms", "pre", "poost"], "xformer signal-flow: error: arg", "post?"),
        (["train", "--backend", "cuda"], "xformer train: error: argument --backend:", "cupy?"),
        (["train", "--backend", "cpu"], "xformer train: error: argument --backend:", "numpy?"),
        (["embed", "--dtype", "double"], "xformer embed: error: argument --dtype:", "float64?"),
        (["train", "--precision", "fp16"], "xformer train: error: argument --prec", "float16?"),
        (["finetune", "--task", "ner"], "xformer finetune: error: argument --task:", "tag?"),
        (["tag", "--aggregation", "mean"], "xformer tag: error: argument --aggr", "average?"),
        (["train", "--schedule", "cos"], "xformer train: error: argument --schedule:", "cosine?"),
        (["train", "--learning_rate", "1"], "xformer train: error: unrecognized:", "--lr?"),
        (["train", "--epochs", "3"], "xformer train: error: unrecognized:", "--steps?"),
    ],
)
def test_errors_name_what_was_probably_meant(
    argv: list[str], start: str, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error, hint = printed(argv, capsys, 2).splitlines()
    assert error.startswith(start) and error.endswith(f"; did you mean {end}")
    assert hint.startswith("for help: xformer ")
    assert "usage: " in printed(shlex.split(hint.removeprefix("for help: xformer ")), capsys)


@pytest.mark.parametrize(
    ("line", "name", "words"),
    [
        ("rank --model m q --top 3 a b", "text", ["a", "b"]),
        ("rank --model m q a --json b --file f c", "text", ["a", "b", "c"]),
        ("rank q --model m --file f", "text", []),
        ("search notes --model m q", "text", ["q"]),
        ("search notes --model m -- -q r", "text", ["-q", "r"]),
        ("embed a --model m -- -b --json", "text", ["a", "-b", "--json"]),
        ("tag --model m - --json -1", "text", ["-", "-1"]),
        ("plot a --out c.svg b", "runs", ["a", "b"]),
    ],
)
def test_options_may_be_among_the_words_of_a_list(line: str, name: str, words: list[str]) -> None:
    values = command_parser()[0].parse_args(line.split())
    assert getattr(values, name) == words


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["zzz"], "argument COMMAND: must be one of prepare, "),
        (["embed", "--dtype", "float16"], "must be one of float32, float64, got 'float16'\n"),
        (["train", "--dtype", "float16"], "got 'float16'; --precision takes float16\n"),
        (["train", "--dtype", "int8"], "must be one of float32, float64, got 'int8'\n"),
        (["train", "--schedule", "none"], "noam, got 'none'; --positions takes none\n"),
        (["train", "--file", "a", "--quiet"], "unrecognized: --file a --quiet\n"),
        (["train", "--zzzzzz"], "xformer train: error: unrecognized: --zzzzzz\n"),
        (["train", "text.txt"], "xformer train: error: unrecognized: text.txt\n"),
        (["embed", "a", "--model", "m", "b", "--zzzz"], "embed: error: unrecognized: b --zzzz\n"),
        (["plot", "a", "--out", "b", ""], "plot: error: argument RUN: must name a file or"),
        (["train", "--steps", "few"], "argument --steps: invalid int value: 'few'\n"),
    ],
)
def test_nothing_is_named_if_nothing_is_near(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    err = printed(argv, capsys, 2)
    assert said in err and "did you mean" not in err


def test_a_command_without_its_options_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(["generate"], capsys, 2)
    assert said.startswith("xformer generate: error: the following arguments are required: --model")
    assert said.endswith("\nfor help: xformer generate --help\n")


def test_the_help_is_made_only_to_be_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(LanguageModel, "init_from", None)  # counting parameters would fail
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--steps", "0"]) == 1
    assert "--steps must be" in capsys.readouterr().err
