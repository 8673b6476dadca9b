"""`--config FILE`: options in a file, and the file that a run writes."""

from __future__ import annotations

import argparse
import json
import math
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from finetuning import LLAMA, write_folder
from hypothesis import given
from hypothesis import strategies as st
from runs import rows

from xformer.cli import config_file, main, train, train_options
from xformer.cli.config_file import CONFIG
from xformer.cli.train_options import TrainOptions

FILE = """
data = "fox.txt"
preset = "tiny"
steps = 4
batch = 3
layers = 1
dropout = 0.1
lr = 1e-2
validate-every = 2
validate-batches = 2
warmup = 2
seed = 3
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a text; no samples, which take longer than these runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_sample", lambda *_, **__: None)
    Path("fox.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    Path("c.toml").write_text(FILE)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[TrainOptions]:
    """The options of the commands, which do nothing else."""
    found: list[TrainOptions] = []

    def kept(args: argparse.Namespace) -> int:
        found.append(train_options.settled(args))
        return 0

    monkeypatch.setattr(train, "run", kept)
    return found


def failing(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["train", *options]) == 1
    assert not Path("runs").exists()
    err = capsys.readouterr().err
    assert err.startswith("xformer: error: ") and err.count("\n") == 1
    return err.removeprefix("xformer: error: ").rstrip()


def test_a_run_is_repeated_by_its_file() -> None:
    """Bit for bit; and the file of the second run is the file of the first."""
    assert main(["train", "--config", "c.toml", "--out", "a", "--heads", "4"]) == 0
    os.rename("c.toml", "unused.toml")
    assert main(["train", "--config", f"a/{CONFIG}"]) == 0
    assert rows(Path("a")) == rows(Path("runs/gpt")) and len(rows(Path("a"))) == 4
    files = [Path(folder, CONFIG).read_text() for folder in ("a", "runs/gpt")]
    assert files[0] == files[1]
    assert 'preset = "tiny"' in files[0] and "heads = 4" in files[0] and "\nout" not in files[0]
    about = [json.loads(Path(folder, "run.json").read_text()) for folder in ("a", "runs/gpt")]
    assert about[0]["about"] == about[1]["about"] and about[0]["notes"] == about[1]["notes"]


def test_a_run_of_a_pretrained_model_is_repeated() -> None:
    Path("llama").mkdir()
    write_folder(Path("llama"), LLAMA, "llama")
    options = ["--data", "fox.txt", "--steps", "3", "--batch", "2", "--max-len", "16"]
    assert main(["train", "--from", "llama", *options, "--out", "a"]) == 0
    written = tomllib.loads(Path("a", CONFIG).read_text())
    assert written["from"] == str(Path("llama").absolute()) and written["max-len"] == 16
    assert main(["train", "--config", f"a/{CONFIG}", "--out", "b"]) == 0
    assert rows(Path("a")) == rows(Path("b"))


def test_a_fine_tuned_model_is_made_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Also options that the command requires, and lists, are read."""
    Path("llama").mkdir()
    write_folder(Path("llama"), LLAMA, "llama")
    Path("c.toml").write_text(
        'model = "llama"\ndata = "lines.txt"\nlora = 2\nbatch = 3\nsteps = 9\n'
    )
    Path("lines.txt").write_text("the quick brown fox\njumps over\nthe lazy dog\n" * 4)
    command = ["finetune", "--config", "c.toml", "--steps", "2", "--targets", "*.q", "*.v"]
    assert main([*command, "--seed", "1", "--out", "a"]) == 0
    written = tomllib.loads(Path("a", CONFIG).read_text())
    assert written["targets"] == ["*.q", "*.v"] and written["steps"] == 2 and "run" not in written
    assert written["model"] == str(Path("llama").absolute()) and written["task"] == "causal"
    assert main(["finetune", "--config", f"a/{CONFIG}", "--out", "b"]) == 0
    weights = [Path(folder, "model.safetensors").read_bytes() for folder in ("a", "b")]
    assert weights[0] == weights[1]
    files = [Path(folder, CONFIG).read_text() for folder in ("a", "b")]
    assert files[0] == files[1]
    for line, message in (
        ('targets = "*.q"', "c.toml: targets must be a list of strings, got '*.q'"),
        ("targets = [1]", "c.toml: targets must be a list of strings, got [1]"),
        ("sample-every = 3", "c.toml: sample-every is no option of xformer finetune"),
    ):
        capsys.readouterr()
        Path("c.toml").write_text(f'model = "llama"\ndata = "lines.txt"\n{line}\n')
        assert main(["finetune", "--config", "c.toml"]) == 1
        assert message in capsys.readouterr().err


def test_a_longer_run_has_its_new_length() -> None:
    options = ["--schedule", "constant", "--out", "a"]
    assert main(["train", "--config", "c.toml", *options]) == 0
    before = Path("a", CONFIG).read_text()
    assert main(["train", "--resume", "a", "--steps", "6", "--checkpoint-every", "7"]) == 0
    written = tomllib.loads(Path("a", CONFIG).read_text())
    assert written["steps"] == 6 and written["checkpoint-every"] == 100
    lines = [line for line in Path("a", CONFIG).read_text().splitlines() if "steps" not in line]
    assert lines == [line for line in before.splitlines() if "steps" not in line]
    assert main(["train", "--config", f"a/{CONFIG}", "--out", "b"]) == 0
    assert rows(Path("a")) == rows(Path("b")) and len(rows(Path("a"))) == 6


def test_the_command_line_wins(settled: list[TrainOptions]) -> None:
    for options in (
        ["--config", "c.toml", "--steps", "7", "--batch=5"],
        ["--steps", "7", "--batch", "5", "--config=c.toml"],
        ["--steps", "7", "--config", "c.toml", "--batch", "5"],
    ):
        assert main(["train", *options]) == 0
    for found in settled:
        assert (found.steps, found.batch, found.lr, found.layers) == (7, 5, 0.01, 1)
        assert found.d_model == 64  # the preset's
    assert main(["train", "--preset", "small"]) == 0  # nothing of a file stays for the next
    assert (settled[-1].steps, settled[-1].data) == (1500, None)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("compile = false", "compile", False),
        ("compile = true", "compile", True),
        ("deterministic = true", "deterministic", True),
        ("activation-checkpointing = false", "activation_checkpointing", False),
        ("clip = 2", "clip", 2.0),
        ("patience = 3", "patience", 3),
        ('from = "absent"', "origin", "absent"),
        ('precision = "bfloat16"', "precision", "bfloat16"),
        ('out = "a b"', "out", "a b"),
        ("# nothing", "steps", 4),
    ],
)
def test_every_kind_of_option(
    line: str, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[argparse.Namespace] = []
    monkeypatch.setattr(train, "run", lambda args: found.append(args) or 0)
    Path("c.toml").write_text(f"{FILE}\n{line}\n")
    assert main(["train", "--config", "c.toml"]) == 0
    read = getattr(found[0], name)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("width = 64", "c.toml: width is no option of xformer train"),
        ("d_model = 64", "c.toml: d_model is no option of xformer train; did you mean d-model?"),
        ("stpes = 64", "c.toml: stpes is no option of xformer train; did you mean steps?"),
        ('config = "c.toml"', "c.toml: config is no option of xformer train"),
        ("help = true", "c.toml: help is no option of xformer train"),
        (
            "no-compile = true",
            "c.toml: no-compile is no option of xformer train; did you mean comp",
        ),
        ("[model]\nlayers = 2", "c.toml: options must not be in tables, got [model]"),
        ("heads = '2'", "c.toml: heads must be an integer, got '2'"),
        ("heads = 2.0", "c.toml: heads must be an integer, got 2.0"),
        ("heads = true", "c.toml: heads must be an integer, got True"),
        ("heads = [2]", "c.toml: heads must be an integer, got [2]"),
        ("clip = '1'", "c.toml: clip must be a number, got '1'"),
        ("clip = true", "c.toml: clip must be a number, got True"),
        (f"clip = 1{'0' * 400}", "c.toml: clip must be a number, got 1000"),
        ("compile = 1", "c.toml: compile must be true or false, got 1"),
        ("tokenizer = 1", "c.toml: tokenizer must be a string, got 1"),
        ("tokenizer = 2026-11-27", "c.toml: tokenizer must be a string, got datetime.date("),
        (
            "schedule = 'up'",
            "c.toml: schedule must be one of cosine, linear, wsd, constant, noam, g",
        ),
        ("backend = 'nunpy'", "c.toml: backend must be one of "),
        ("out = ''", "c.toml: out must name a file or a folder, got an empty path"),
        ("steps = 5", "c.toml is not TOML: Cannot overwrite a value (at line 13, column 10)"),
        ("heads = ", "c.toml is not TOML: Invalid value (at line 13, column 9)"),
        (f"heads = {'9' * 5000}", "c.toml is not TOML: Exceeds the limit"),
        (f"heads = {'[' * 100_000}", "c.toml is not TOML: "),
        # What is known later: the message of the option, and where it was given.
        (
            "accumulate = 0",
            "--accumulate must be an int of at least 1, got 0; c.toml has accumulate =",
        ),
        ("clip = nan", "--clip must lie in [0, inf], got nan"),
        (
            "weight-decay = inf",
            "--weight-decay must be finite, got inf; c.toml has weight-decay = inf",
        ),
        (
            "heads = 7",
            "--heads = 7 must divide d_model = 64, or d_head must be given; c.toml has heads = 7",
        ),
        ("tokenizer = 'braille'", "got 'braille'; options are from c.toml"),
        (
            "resume = 'runs/gpt'",
            "--config starts a new run: it excludes --resume, which has its opt",
        ),
        ("resume-step = 3", "--resume-step needs --resume; c.toml has resume-step = 3"),
    ],
)
def test_mistakes_name_file_key_and_what_was_wanted(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("c.toml").write_text(f"{FILE}{line}\n")
    assert message in failing(capsys, "--config", "c.toml")


def test_a_flag_of_the_file_is_overridden(settled: list[TrainOptions]) -> None:
    flags = ("reversible", "activation-checkpointing", "deterministic", "compile")
    Path("c.toml").write_text(FILE + "".join(f"{name} = true\n" for name in flags))
    assert main(["train", "--config", "c.toml"]) == 0
    assert main(["train", "--config", "c.toml", *(f"--no-{name}" for name in flags)]) == 0
    for name in flags:
        assert [getattr(found, name.replace("-", "_")) for found in settled] == [True, False]


def test_a_file_of_the_other_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Of train, given to finetune: the message names the command."""
    Path("c d.toml").write_text(FILE)
    assert main(["finetune", "--config", "c d.toml"]) == 1
    err = capsys.readouterr().err
    way = "xformer train --config 'c d.toml'"
    assert err.endswith(f"no option of xformer finetune; the file is for xformer train: {way}\n")
    Path("c.toml").write_text('task = "causal"\nlora = 4\nsteps = 3\n')
    message = failing(capsys, "--config", "c.toml")
    assert message.endswith("the file is for xformer finetune: xformer finetune --config c.toml")


def test_other_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(capsys, "--config", "absent.toml") == "--config: there is no file absent.toml"
    assert failing(capsys, "--config", ".") == "--config: there is no file ."
    Path("c.toml").write_bytes(b"\xff\xfe")
    assert failing(capsys, "--config", "c.toml").startswith("c.toml is not TOML: 'utf-8' codec")
    Path("c.toml").write_text(FILE + "accumulate = 0\n")
    # The option of the command line is not blamed on the file.
    message = failing(capsys, "--config", "c.toml", "--accumulate", "-1")
    assert message.endswith("got -1; options are from c.toml")
    with pytest.raises(SystemExit):
        main(["train", "--config"])
    assert "argument --config: expected one argument" in capsys.readouterr().err


def test_a_command_without_the_option() -> None:
    with pytest.raises(SystemExit):
        main(["info", "--config", "c.toml"])
    with pytest.raises(SystemExit):
        main(["--config", "c.toml"])


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    TEXT,
    st.lists(TEXT, min_size=1),
)


@given(options=st.dictionaries(st.from_regex(r"[a-z][a-z-]*", fullmatch=True), VALUES))
def test_what_is_written_is_read_back(
    options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("written")
    config_file.write(folder, "train", options)
    text = (folder / CONFIG).read_text(encoding="utf-8")
    read = tomllib.loads(text)
    assert [*read] == [*options]
    for name, value in options.items():
        is_nan = isinstance(value, float) and math.isnan(value)
        assert type(read[name]) is type(value) and (read[name] == value or is_nan)
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG]


def test_what_toml_cannot_hold_is_left_out() -> None:
    options = {"data": "a\udcff", "steps": 3, "ema": None, "freeze": []}
    config_file.write(Path(), "train", options)
    text = Path(CONFIG).read_text()
    assert tomllib.loads(text) == {"steps": 3}
    assert r"# data is not UTF-8; give it on the command line: 'a\udcff'" in text


def test_a_preset_beside_sizes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sizes.toml").write_text("layers = 1\nd-model = 8\nlr = 0.1\n")
    assert main(["train", "--config", "sizes.toml", "--preset", "tiny"]) == 1
    message = "sizes.toml: --preset would change layers, d-model, lr: leave them out"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--positions", "xl", "--norm-placement", "none", "--residual-scale", "0"],
        ["--reversible"],
        ["--position-mode", "concat", "--norm-placement", "none", "--init", "fixup"],
    ],
    ids=lambda options: options[0],
)
def test_variants_are_repeated_resumed_and_trained_further(options: list[str]) -> None:
    assert main(["train", "--config", "c.toml", *options, "--steps", "2", "--out", "a"]) == 0
    assert main(["train", "--config", f"a/{CONFIG}", "--out", "b"]) == 0
    assert rows(Path("a")) == rows(Path("b"))
    assert main(["train", "--resume", "a", "--steps", "3"]) == 0
    data = tomllib.loads(Path("a", CONFIG).read_text())["data"]
    more = ["--from", "a", "--data", data, "--batch", "2", "--max-len", "8", "--steps", "1"]
    assert main(["train", *more, "--out", "c"]) == 0
    notes = json.loads(Path("c", "run.json").read_text())["notes"]
    assert notes["reversible"] == ("--reversible" in options)
    assert main(["train", "--resume", "c", "--steps", "2"]) == 0


def test_positions_xl_exclude_reversible(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--config", "c.toml", "--positions", "xl", "--reversible"]) == 1
    assert "--positions xl excludes --reversible" in capsys.readouterr().err
