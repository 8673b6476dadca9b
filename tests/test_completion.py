"""`xformer completion`: the script for bash is run, and completes every command and option."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hanging import SECONDS

from xformer.cli import main
from xformer.cli.command_line import COMMANDS, command_parser

ASK = """
source {script}
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_shtab_xformer
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def printed(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    pytest.importorskip("shtab", reason="shtab is not installed (extra completion)")
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.fixture
def script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Path:
    """The script for bash, in the current folder."""
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    monkeypatch.chdir(tmp_path)
    path = Path("completions.sh")
    path.write_text(printed("bash", capsys))
    return path


def completed(script: Path, *words: str) -> list[str]:
    """What the Tab key offers for the last of the words after `xformer`."""
    ask = ["bash", "-c", ASK.format(script=script), "bash", "xformer", *words]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0 and done.stderr == ""
    return done.stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("tr",), ["train", "trace"]),
        (("train", "--warm"), ["--warmup"]),
        (("train", "--optimiser", "ad"), ["adam", "adamw", "adafactor"]),
        (("train", "--steps", "3", "--preset", ""), ["tiny", "small", "medium"]),
        (("generate", "--backend", "nu"), ["numpy", "numba"]),
        (("signal-flow", "--norms", "pre", "s"), ["sandwich"]),
        (("completion", ""), ["bash", "zsh", "fish"]),
        (("generate", "--model", "ru"), ["run of mine", "runs"]),
        (("prepare", "text"), ["text.txt"]),
        (("plot", "runs", "text"), ["text.txt"]),
        (("generate", "--prompt", "x"), [""]),
        (("exercise", "soft"), ["softmax", "softmax_mistake"]),
    ],
)
def test_what_bash_offers(script: Path, words: tuple[str, ...], offered: list[str]) -> None:
    for folder in ("runs", "run of mine"):
        Path(folder).mkdir()
    Path("text.txt").touch()
    assert sorted(completed(script, *words)) == sorted(offered)


def test_bash_offers_every_command_and_option(script: Path) -> None:
    names = list(COMMANDS)
    assert completed(script, "") == names
    _, commands = command_parser()
    for name, parser in commands.items():
        options = [o for a in parser._actions for o in a.option_strings if o.startswith("--")]
        assert completed(script, name, "--") == options


@pytest.mark.parametrize(
    ("shell", "beginning", "option"),
    [
        ("bash", "# AUTOMATICALLY GENERATED", "--num-samples"),
        ("zsh", "#compdef xformer", "--num-samples"),
        ("fish", "# AUTOMATICALLY GENERATED", "-l num-samples"),
    ],
)
def test_the_script_of_each_shell(
    shell: str,
    beginning: str,
    option: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(shell, capsys)
    assert text.startswith(beginning) and option in text
    (tmp_path / "script").write_text(text)
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n", tmp_path / "script"], check=True)


def test_without_the_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    hint = "pip install 'xformer-array[completion]'"
    assert said.err == f"xformer: error: shtab is not installed: {hint}\n"
