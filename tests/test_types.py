"""A user's program is typed, for mypy and for pyright, by an installed wheel and in a checkout."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "tests" / "typed_program.py"
WANTED = [  # what both print, or the end of it
    *(
        "Backend",
        "LanguageModel",
        "LanguageModelParams",
        "AdamState",
        "LossCache",
        "LanguageModelParams",
    ),
    *("LayerNormCache", "Report", "list[list[int]]", "LanguageModelParams", "Compiled"),
    *("LanguageModel | Any", "LanguageModelParams", "Overridable"),
]
N_PARAMETERS = 12  # of sdpa


@pytest.fixture(scope="module", params=["wheel", "checkout"])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with xformer, and with the packages of this one."""
    pytest.importorskip("mypy", reason="extra dev")
    pytest.importorskip("build", reason="extra dev")
    folder = tmp_path_factory.mktemp(request.param)
    run(sys.executable, "-m", "venv", "--system-site-packages", folder / "env")
    found = folder / "env" / "bin" / "python"
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    paths = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(paths))
    copy = folder / "source"  # an editable install writes into its checkout
    listed = run("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    what = [copy] if request.param == "wheel" else ["-e", copy]
    run(found, "-m", "pip", "install", "-q", "--no-deps", *what)
    return found


def run(*command: object) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path.home(), check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
def test_mypy(python: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, PROGRAM]
    require(re.findall(r'Revealed type is "(.*)"', run(*command, "--cache-dir", python.parent)))


def test_pyright(python: Path) -> None:
    pytest.importorskip("basedpyright", reason="extra dev")
    (folder := python.parent / "pyright").mkdir(exist_ok=True)
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    program = shutil.copy(PROGRAM, folder)
    said = run(
        sys.executable, "-m", "basedpyright", "--pythonpath", python, "--project", folder, program
    )
    require(re.findall(r'Type of ".*?" is "(.*)"', said))


def require(found: list[str]) -> None:
    assert len(found) == len(WANTED)
    for got, wanted in zip(found, WANTED, strict=True):
        assert wanted in got and got != "Any", f"wanted {wanted}, got {got[:200]}"
    sdpa = found[-1]
    assert "softcap: float | None" in sdpa and "SdpaCache" in sdpa
