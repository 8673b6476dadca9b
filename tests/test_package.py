"""The package as installed: its name and version, its contents, what importing it costs."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.resources
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hanging import SECONDS

import xformer

ROOT = Path(__file__).parents[1]
LIBRARIES = {"numpy", "cupy", "torch", "jax", "jaxlib", "array_api_strict"}

# The mathematics: knows arrays only through the standard.
ROOMS = ("ops", "layers", "models", "optim")
MODULES = (
    *("base/namespace", "base/tree", "dispatch/op", "dispatch/shapes", "dispatch/checks"),
    "proofs/gradcheck",
)

# Dependencies point one way: a room imports only from those before it.
ORDER = (
    "ops",
    "layers",
    "models",
    "distributed",
    "pretrained",
    "generation",
    "sentences",
    "training",
    "finetune",
    "plots",
    "exercises",
    "cli",
)


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_pytest_finds_the_benchmarks_by_itself() -> None:
    """As the command `pytest`, which does not put the folder that it is called in on the path."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "tests/test_benchmark_products.py"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_ruff_sorts_imports_whatever_folders_there_are(tmp_path: Path) -> None:
    """A folder `runs` in the checkout is not the module `runs` of the tests."""
    known = pyproject()["tool"]["ruff"]["lint"]["isort"]["known-third-party"]
    files = [path.stem for path in (ROOT / "tests").glob("*.py")]
    helpers = [name for name in files if not name.startswith("test_") and name != "conftest"]
    wanted = sorted([*helpers, "needed"])  # the last is a module of truths/
    assert known == wanted
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder in ("tests", "truths", "xformer", "benchmarks"):
        leave = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=leave)
    for name in wanted:
        (tmp_path / name).mkdir(exist_ok=True)
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "I"]
    done = subprocess.run([*command, "."], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def python(code: str, cwd: Path) -> Any:
    """Run `code` in a new interpreter outside the checkout; what it prints, read as JSON."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def imports(source: Path) -> Iterator[str]:
    """Dotted names that `source` imports, anywhere in it."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: relative import, use the full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(room: str) -> list[Path]:
    return sorted((ROOT / "xformer" / room).rglob("*.py"))


def mathematics() -> list[Path]:
    modules = [ROOT / "xformer" / f"{name}.py" for name in MODULES]
    return modules + [path for room in ROOMS for path in sources(room)]


@pytest.mark.parametrize("source", mathematics(), ids=lambda p: str(p.relative_to(ROOT)))
def test_mathematics_imports_no_array_library(source: Path) -> None:
    assert not LIBRARIES & {name.partition(".")[0] for name in imports(source)}


@pytest.mark.parametrize("room", ORDER)
def test_dependencies_point_one_way(room: str) -> None:
    later = {f"xformer.{other}" for other in ORDER[ORDER.index(room) + 1 :]}
    for source in sources(room):
        used = {".".join(name.split(".")[:2]) for name in imports(source)}
        assert not used & later, source


def test_version_is_said_once() -> None:
    version = pyproject()["project"]["version"]
    assert xformer.__version__ == version
    assert importlib.metadata.version("xformer-array") == version


def test_package_list_equals_the_folders() -> None:
    folders = set()
    for top, name in (("xformer", "xformer"), ("backends", "xformer.backends")):
        for source in (ROOT / top).rglob("*.py"):
            folders.add(".".join([name, *source.parent.relative_to(ROOT / top).parts]))
            assert (source.parent / "__init__.py").exists(), source.parent
    assert set(pyproject()["tool"]["setuptools"]["packages"]) == folders


def test_type_marker_is_installed() -> None:
    assert (importlib.resources.files("xformer") / "py.typed").is_file()


def test_backends_are_imported_under_one_name(tmp_path: Path) -> None:
    """An editable install puts the checkout on the path, where backends/ is a folder too.

    That a wheel has no such top-level package, .ci/run checks.
    """
    code = """
import importlib, json, pkgutil, sys, xformer.backends
for name in ("numpy", "array_api_strict"):
    package = importlib.import_module(f"xformer.backends.{name}")
    for file in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{file.name}")
print(json.dumps([name for name in sys.modules if name.partition(".")[0] == "backends"]))
"""
    assert python(code, tmp_path) == []


def test_readme_names_the_distribution() -> None:
    """On the public index, `xformer` and `xformers` belong to others."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not re.findall(r"pip3? install[^\n`&;|]*?[\s'\"]xformers?(?!-array)\b", readme)


def test_import_loads_no_array_framework(tmp_path: Path) -> None:
    code = "import json, sys, xformer; print(json.dumps(list(sys.modules)))"
    loaded = set(python(code, tmp_path))
    assert "xformer" in loaded
    assert not loaded & {"torch", "jax", "jaxlib", "cupy", "array_api_strict", "matplotlib"}


def test_training_on_numpy_imports_no_part_of_numpy_that_is_for_tests(tmp_path: Path) -> None:
    code = """
import json, sys
import numpy as np
import xformer as xf
gpt = xf.GPT(vocab_size=5, n_layers=1, d_model=4, n_heads=2, max_len=8)
tokens = np.asarray([[1, 2, 3]])
_, cache = gpt.loss(gpt.init(seed=0), tokens, tokens)
cache.backward()
print(json.dumps(list(sys.modules)))
"""
    loaded = set(python(code, tmp_path))
    assert "xformer.backends.numpy" in loaded
    assert not loaded & {"numpy.f2py", "numpy.testing", "numpy.ma", "unittest"}


@pytest.mark.slow
def test_import_takes_at_most_twice_as_long_as_numpy(tmp_path: Path) -> None:
    code = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
    seconds: dict[str, list[float]] = {"numpy": [], "xformer": []}
    for _ in range(7):  # interleaved, and the minimum: the rest is the machine's other work
        for name, runs in seconds.items():
            runs.append(python(code.format(name), tmp_path))
    assert min(seconds["xformer"]) <= 2 * min(seconds["numpy"])
