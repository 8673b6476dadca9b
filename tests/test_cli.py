"""The command line as a new user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import xformer
from xformer.cli import main


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def test_train_then_generate(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--preset", "tiny", "--steps", "12", "--data", str(text)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "a unigram model has" in out and "step 12/12" in out and "a sample" in out
    assert re.search(r"validation loss \d\.\d{3} nats per byte, after step 12", out)
    log = [json.loads(line) for line in Path("runs/gpt/log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == list(range(1, 13))
    assert log[-1]["loss"] < log[0]["loss"] and log[-1]["validation"] is not None

    command = ["generate", "--checkpoint", "runs/gpt", "--prompt", "the quick", "--max-new", "20"]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert first.startswith("the quick") and len(first) <= len("the quick") + 21
    assert main(command) == 0
    assert capsys.readouterr().out == first  # the same seed


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
        (["train", "--steps", "0"], "steps must be at least 1, got 0"),
        (["train", "--seed", "-1"], "seed must be at least 0, got -1"),
        (["generate", "--checkpoint", "absent", "--prompt", "x"], "absent is no checkpoint"),
    ],
)
def test_mistakes_are_one_line(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 1
    err = capsys.readouterr().err
    assert err.startswith("xformer: error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty, there is no text in it"),
        (b"x", "the text is too short: a window of 128 tokens needs 129, got 0 (the training part"),
        (b"x" * 1000, "129, got 100 (the validation part; --context makes it shorter)"),
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


def test_an_empty_prompt_is_refused(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--preset", "tiny", "--steps", "1", "--data", str(text), "--out", "a"])
    capsys.readouterr()
    assert main(["generate", "--checkpoint", "a", "--prompt", ""]) == 1
    assert "the prompt must hold at least one token" in capsys.readouterr().err


def test_info_names_every_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in xformer.backends.NAMES)
    assert "float32, float64" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert xformer.__version__ in capsys.readouterr().out
