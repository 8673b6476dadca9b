"""What a command imports, and an interrupt while it does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_dispatch import python

from xformer.cli.command_line import COMMANDS

MODULES = {f"xformer.cli.{name.replace('-', '_')}" for name in COMMANDS}
IMPORTED = """
import contextlib, io, json, sys
before = set(sys.modules)
from xformer.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main({argv})
print(json.dumps(sorted(set(sys.modules) - before)))
"""
INTERRUPTED = """
import sys
class Interrupted:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from xformer.cli import main
sys.exit(main({argv}))
"""


def imported(argv: list[str], folder: Path) -> set[str]:
    return set(python(IMPORTED.format(argv=argv), folder))


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["tarin"]])
def test_the_list_of_commands_imports_no_command(argv: list[str], tmp_path: Path) -> None:
    modules = imported(argv, tmp_path)
    assert not modules & MODULES
    if argv != ["tarin"]:  # to say "did you mean train?" takes xformer.checks
        ours = {name for name in modules if name.partition(".")[0] == "xformer"}
        assert len(ours) < 15 and not modules & {"numpy", "array_api_compat", "tqdm"}


@pytest.mark.parametrize("name", ["train", "finetune", "classify", "memory", "info"])
def test_a_command_imports_no_catalogue_and_few_other_commands(name: str, tmp_path: Path) -> None:
    modules = imported([name, "--help"], tmp_path)
    assert len(modules & MODULES) <= 4  # `finetune` prints as `train` does
    assert "xformer.catalogue" not in modules


@pytest.mark.parametrize(
    ("module", "argv"),
    [
        ("xformer.cli.command_line", ["--help"]),
        ("argparse", ["--help"]),
        ("xformer.cli.train", ["train", "--help"]),
        ("numpy", ["info"]),
        ("numpy._core", ["train", "--steps", "1"]),
        ("xformer.models.gpt", ["train", "--steps", "1"]),
        ("xformer.world", ["train", "--steps", "1"]),
    ],
)
def test_an_interrupt_during_an_import_is_one_line(
    module: str, argv: list[str], tmp_path: Path
) -> None:
    code = INTERRUPTED.format(module=module, argv=argv)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "xformer: interrupted\n")
