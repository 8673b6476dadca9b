"""What a command prints may be lost or replaced; what it does is done all the same."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hanging import SECONDS
from runs import rows

from xformer.cli import generate, main, output, train
from xformer.cli.output import Output, printing, visible

TEXT = "Die schönen Füchse – 日本 „springen“ über den faulen Hund. "
TRAIN = [
    *("train", "--preset", "tiny", "--layers", "1", "--d-model", "16", "--heads", "2"),
    *(
        "--max-len",
        "16",
        "--batch",
        "2",
        "--steps",
        "4",
        "--validate-every",
        "2",
        "--checkpoint-every",
        "2",
    ),
    *("--tokenizer", "characters"),
]
SAMPLES = ["--sample-every", "2"]
COMMAND = [sys.executable, "-m", "xformer"]
SHELL = os.name == "posix"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an umlaut, and a text in it. Samples are short."""
    real = train._sample
    monkeypatch.setattr(train, "_sample", lambda job, params, max_new_tokens: real(job, params, 9))
    monkeypatch.chdir(tmp_path)
    Path("für").mkdir()
    Path("für/bücher.txt").write_text(TEXT * 200, encoding="utf-8")
    return Path("für")


def console(monkeypatch: pytest.MonkeyPatch, encoding: str) -> io.TextIOWrapper:
    """Standard output in an encoding, which refuses other letters as Python's does."""
    found = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", found)
    return found


def said(console: io.TextIOWrapper) -> str:
    console.seek(0)
    return console.read()


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_letters_that_a_console_has_not_end_nothing(
    encoding: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ["--data", "für/bücher.txt", *SAMPLES]
    assert main([*TRAIN, *data, "--out", "für/usual"]) == 0
    found = console(monkeypatch, encoding)
    assert main([*TRAIN, *data, "--out", "für/läuft"]) == 0
    assert rows(folder / "läuft") == rows(folder / "usual")
    weights = [Path(folder, run, "model.safetensors").read_bytes() for run in ("usual", "läuft")]
    assert weights[0] == weights[1]
    assert (
        main(["generate", "--model", "für/läuft", "--prompt", "日本", "--max-new-tokens", "20"])
        == 0
    )
    assert main(["prepare", "für/bücher.txt", "für/tokens"]) == 0
    out = said(found)
    assert "\\u65e5\\u672c" in out and "--- step 2" in out and "--- step 4" in out
    assert ("saved to f\\xfcr/tokens" if encoding == "ascii" else "saved to für/tokens") in out
    assert json.loads(Path("für/tokens/corpus.json").read_text("utf-8"))["description"]


def test_the_picture_of_a_run_is_drawn_on_any_console(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert main([*TRAIN, "--data", "für/bücher.txt", "--out", "für/läuft"]) == 0
    found = console(monkeypatch, "ascii")
    assert main(["plot", "für/läuft", "--out", "für/kurve.svg"]) == 0
    assert said(found).splitlines()[-1] == "f\\xfcr/kurve.svg" and (folder / "kurve.svg").exists()


def test_names_that_are_no_utf8(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python has them: bytes that are no letters are lone surrogates."""
    name = "f\udcfcr"
    try:
        Path(name).mkdir()
    except (OSError, UnicodeError):
        pytest.skip("the system has no such names")
    Path(name, "b.txt").write_text(TEXT * 200, encoding="utf-8")
    found = console(monkeypatch, "utf-8")
    assert main([*TRAIN, "--data", f"{name}/b.txt", "--out", f"{name}/run"]) == 0
    assert main(["train", "--resume", f"{name}/run"]) == 0
    assert "saved to f\\udcfcr/run after 4 steps" in said(found)


class Failing(io.RawIOBase):
    """A file that takes nothing, until its error is 0."""

    def __init__(self, number: int) -> None:
        self.number = number

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.number:
            raise OSError(self.number, os.strerror(self.number))
        return len(data)


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EAGAIN])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_console_that_fails_ends_nothing(
    name: str,
    number: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    raw = Failing(number)
    monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), write_through=True))
    status = main([*TRAIN, "--data", "für/bücher.txt", "--out", "für/läuft"])
    assert [row["step"] for row in rows(folder / "läuft")] == [1, 2, 3, 4]
    assert (folder / "läuft/checkpoints/step-00000004.safetensors").is_file()
    is_output_lost = name == "stdout" and number != errno.EPIPE
    assert status == (1 if is_output_lost else 0)
    if name == "stdout":
        why = f"standard output cannot be written: {os.strerror(number)}"
        assert (why in capsys.readouterr().err) == is_output_lost
    raw.number = 0  # for what is left in the buffer


def test_a_text_ends_where_nobody_reads_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = OSError(errno.EPIPE, "Broken pipe")
    with printing() as out:
        pieces = iter(["a", "b", "c"])
        out.lost = lost
        generate.write(pieces, "prompt")
        assert list(pieces) == ["b", "c"]


def test_what_is_printed_is_as_it_was() -> None:
    """Where all is well, and the process has its streams back."""
    before = sys.stdout, sys.stderr
    stream = io.StringIO()
    output = Output(stream)
    print("für", end="", file=output, flush=True)
    assert stream.getvalue() == "für" and output.lost is None and not output.isatty()
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert (sys.stdout, sys.stderr) == before


def test_standard_input_that_is_closed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["embed", "-", "--model", "absent"]) == 1
    assert capsys.readouterr().err == "xformer: error: - reads standard input, but that is closed\n"


# In processes of their own


def run(command: str, *options: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A line of the shell, with the command and the options as "$@"."""
    if not SHELL:
        pytest.skip("the system has no such shell")
    return subprocess.run(
        ["sh", "-c", command, "sh", *COMMAND, *options],
        capture_output=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"} | environment,
        timeout=SECONDS,
    )


@pytest.mark.parametrize(
    "command", ['"$@" 2>&-', '"$@" <&- >&- 2>&-', '"$@" | head -n 1', '"$@" >/dev/full']
)
def test_a_process_without_its_streams(command: str, folder: Path) -> None:
    """No file of a run is opened as a stream that is closed, to be printed into."""
    if "full" in command and not Path("/dev/full").exists():
        pytest.skip("the system has no /dev/full")
    done = run(command, *TRAIN, "--data", "für/bücher.txt", "--out", "run")
    assert done.returncode == (1 if "full" in command else 0)
    assert [row["step"] for row in rows(Path("run"))] == [1, 2, 3, 4]
    assert Path("run/model.safetensors").is_file()
    if "full" in command:
        said = "xformer: error: standard output cannot be written: No space left on device"
        assert done.stderr.decode().splitlines() == [said]
    else:
        assert b"rror" not in done.stderr


def test_the_locale_c(folder: Path) -> None:
    """Whose file names are lone surrogates: bytes that are no ASCII. No file is in ASCII."""
    options = [*TRAIN, "--data", "für/bücher.txt", "--out", "für/läuft"]
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    plain |= {"PYTHONWARNDEFAULTENCODING": "1", "PYTHONWARNINGS": "error::EncodingWarning"}
    done = run('"$@"', *options, **plain)
    assert done.returncode == 0, done.stderr
    assert len(rows(folder / "läuft")) == 4 and b"sch\\xf6" in done.stdout
    assert main(["train", "--resume", "für/läuft"]) == 0  # with a locale of UTF-8


def test_control_characters_are_visible_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model's text: a terminal would obey them."""
    text = "a\x1b[2Jb\x07\r\n\tc\x9b\x7f\u00e9"
    assert visible(text) == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert visible(text) == "a\\x1b[2Jb\\x07\\x0d\n\tc\\x9b\\x7f\u00e9"


def test_the_log_of_the_library_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("xformer.backends.numba.jit")
    with output.notes():
        log.info("numba compiles\n")
    log.info("nobody reads this")
    assert capsys.readouterr().err == "xformer: numba compiles\\n\n"
