"""The budget of lines and the contract of imports: kept here, and broken by what is planted."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IGNORED = shutil.ignore_patterns("__pycache__")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources, where xformer/backends is a folder as in an installed package."""
    shutil.copytree(ROOT / "xformer", tmp_path / "xformer", ignore=IGNORED)
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=IGNORED)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def budget(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "budget.py"), str(root)]
    return subprocess.run(command, capture_output=True, text=True)


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("importlinter", reason="extra dev is not installed")
    code = f"import sys; sys.path.insert(0, {str(root)!r})\n"
    code += (
        "from importlinter.cli import lint_imports_command\nlint_imports_command(['--no-cache'])"
    )
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def test_every_room_is_within_its_budget() -> None:
    done = budget(ROOT)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ops +[\d,]+ of +[\d,]+$", done.stdout, re.M), done.stdout


def test_the_budget_counts_what_git_has() -> None:
    """The sum is the lines of the sources; nothing is counted twice by way of the link."""
    paths = [p for folder in ("xformer", "backends") for p in (ROOT / folder).rglob("*")]
    own = {p.resolve() for p in paths if p.suffix in (".py", ".cu", ".cuh")}
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in own)
    assert budget(ROOT).stdout.splitlines()[-1].split() == ["all", f"{lines:,}"]


@pytest.mark.parametrize("lines, sentence", [(300, "too many"), (-300, "lower its budget")])
def test_a_room_that_grows_or_shrinks_needs_a_new_number(
    tmp_path: Path, lines: int, sentence: str
) -> None:
    for folder in ("xformer", "backends", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=IGNORED, symlinks=True)
    path = tmp_path / "xformer" / "ops" / "cross_entropy.py"
    before = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines > 0:
        path.write_text("".join(before) + "# more\n" * lines, encoding="utf-8")
    else:
        path.write_text("", encoding="utf-8")
    done = budget(tmp_path)
    assert done.returncode == 1
    assert re.search(rf"^budget: ops/ has [\d,]+ lines.*{sentence}", done.stderr, re.M), done.stderr


def test_a_file_outside_the_rooms_is_named(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "budget.toml").write_text(
        '[ops]\nlines = 1\nfiles = ["xformer/ops/*.py"]\n'
    )
    (tmp_path / "xformer" / "new").mkdir(parents=True)
    (tmp_path / "xformer" / "new" / "layer.py").write_text("x = 1\n")
    done = budget(tmp_path)
    assert done.returncode != 0
    assert "xformer/new/layer.py is in no room of budget.toml" in done.stderr


def test_every_import_keeps_the_contract(checkout: Path) -> None:
    done = lint_imports(checkout)
    assert done.returncode == 0, done.stdout
    assert "3 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    "file, planted, broken",
    [
        ("layers/norm.py", "import xformer.training.loop", "The core knows no application"),
        ("ops/greedy.py", "import xformer.backends.numpy", "The core knows no application"),
        ("backends/numpy/greedy.py", "import xformer.models.gpt", "Backends know the core only"),
        (
            "base/tree.py",
            "def f():\n    import xformer.ops.gelu",
            "A room imports only from those below",
        ),
    ],
)
def test_a_planted_import_breaks_the_contract(
    checkout: Path, file: str, planted: str, broken: str
) -> None:
    path = checkout / "xformer" / file
    path.write_text(f"{path.read_text(encoding='utf-8')}\n{planted}\n", encoding="utf-8")
    done = lint_imports(checkout)
    assert done.returncode == 1, done.stdout
    assert re.search(rf"^{broken}.*BROKEN$", done.stdout, re.M), done.stdout
