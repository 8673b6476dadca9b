"""docs/look.md and docs/results.md: the code prints what is shown, and what is named exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from truths import published

from xformer.cli import main
from xformer.cli.command_line import COMMANDS

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "look.md").read_text(encoding="utf-8")
RESULTS = (DOCS / "results.md").read_text(encoding="utf-8")


def test_the_commands_and_their_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    names = set(COMMANDS)
    lines = [
        *re.findall(r"^xformer (.*)$", PAGE, re.MULTILINE),
        *re.findall(r"`xformer (.*?)`", PAGE),
    ]
    assert (
        {"plot", "attention", "signal-flow", "memory", "trace"}
        <= {line.split()[0] for line in lines}
        <= names
    )
    for line in lines:
        with pytest.raises(SystemExit):
            main([line.split()[0], "--help"])
        helped = capsys.readouterr().out
        for option in re.findall(r"--[a-z-]+", line):
            assert option in helped, line


def test_the_trace_is_of_today(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line in order, but for sizes and line numbers. `...` is what is left out."""
    (shown,) = re.findall(r"```sh\nxformer trace\n```.*?```text\n(.*?)\n```", PAGE, re.DOTALL)
    assert main(["trace"]) == 0
    rest = _without_sizes(capsys.readouterr().out)
    for part in _without_sizes(shown).split("...\n"):
        before, found, rest = rest.partition(part.removesuffix("..."))
        assert found, part
        assert not before or before.startswith("  9    linear "), before


def _without_sizes(text: str) -> str:
    """The table without root mean squares and line numbers. The loss stays."""
    return re.sub(r"(?m)(?<=  )[\d.e-]+(, [\d.e-]+)*$|:\d+\]", "", text)


@pytest.mark.parametrize("page", [PAGE, RESULTS], ids=["look", "results"])
def test_what_is_linked_is_there(page: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page) if "://" not in link]
    assert links
    for link in links:
        assert (DOCS / link.partition("#")[0]).is_file(), link
    for script in re.findall(r"python (\S+\.py)", page):
        assert (DOCS.parent / script).is_file(), script


def test_the_picture_of_attention_is_of_today(tmp_path: Path) -> None:
    """All that is written in it, in order; its lines differ between versions of matplotlib."""
    for package in ("matplotlib", "tokenizers"):
        pytest.importorskip(package)
    model, out = published("stories260K.bin"), tmp_path / "attention.svg"
    (text,) = re.findall(r'^xformer attention .*"(.*)" --out attention\.svg$', PAGE, re.MULTILINE)
    assert main(["attention", "--model", str(model), text, "--out", str(out)]) == 0
    drawn, shown = (
        re.findall("<!-- (.*?) -->", path.read_text(encoding="utf-8"))
        for path in (out, DOCS / "pictures" / "attention.svg")
    )
    assert drawn == shown and len(drawn) > 30


def test_a_script_draws_every_picture() -> None:
    drawn = (DOCS / "make_pictures.py").read_text(encoding="utf-8")
    others = (DOCS.parent / "truths" / "multi30k.py").read_text(encoding="utf-8")
    speeds = (DOCS.parent / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for picture in (DOCS / "pictures").iterdir():
        by_benchmarks = f"--picture docs/pictures/{picture.name}" in speeds
        assert picture.name in drawn or picture.stem in others or by_benchmarks, picture.name
