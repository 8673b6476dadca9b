"""`python -m benchmarks.gpu --pack FOLDER`: wheels for a machine that reaches no package index.

That fetches what pyproject.toml asks for (dependencies, and the extras of CUDA and of tests) and
the machine has not, for its Python, and no dependencies of those: the extras name what is imported.
The frontend of cuDNN asks for compilers of hundreds of megabytes too, which no kernel here calls.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from benchmarks.harness import ROOT

EXTRAS = {"13": ("cuda13", "nvmath", "cudnn"), "12": ("cuda12", "nvmath", "cudnn-cu12")}
# What a machine has that has CuPy, torch with CUDA, which brings cuDNN, and pytest.
ASSUMED = ("numpy", "cupy-cuda13x", "cupy-cuda12x", "pytest", "nvidia-cudnn-cu13")
ASSUMED += ("nvidia-cudnn-cu12",)
WITHOUT = ("pytest-xdist",)  # tests run without it, one after the other
BEHIND = ("sortedcontainers>=2.1,<3",)  # what hypothesis imports
BUILD = "setuptools>=77.0.3"  # for the checkout itself, as [build-system] says
GLIBC = (28, 27, 24, 17, 12, 5)  # of 2.28, which CuPy's wheels need, and older ones


def pack(folder: Path, python: str, cuda: str, has: Mapping[str, str | None]) -> list[Path]:
    """Fetch the wheels. RuntimeError with what pip says where it cannot.

    python: a version, "3.12". cuda: "12" or "13". has: as of `requirements`.
    """
    wanted = requirements(python, cuda, has)
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
        command += ["--abi", abi]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC]
    for platform in (*platforms, "manylinux2014_x86_64", "any"):
        command += ["--platform", platform]
    done = subprocess.run(
        [*command, "--dest", str(folder), *wanted], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"pip could not fetch {', '.join(wanted)}:\n{done.stderr[-2000:]}")
    return sorted(folder.glob("*.whl"))


def requirements(python: str, cuda: str, has: Mapping[str, str | None]) -> list[str]:
    """What the machine has not; has: versions by name, None where the version does not matter."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    for extra in (*EXTRAS[cuda], "test"):
        lines += project["optional-dependencies"][extra]
    there = {canonicalize_name(name): version for name, version in has.items()}
    environment = {"python_version": python, "sys_platform": "linux", "platform_system": "Linux"}
    wanted = dict[str, SpecifierSet]()
    for one in map(Requirement, [*lines, *BEHIND, BUILD]):
        if one.marker is None or one.marker.evaluate(environment):
            name = canonicalize_name(one.name)
            wanted[name] = wanted.get(name, SpecifierSet()) & one.specifier
    return [
        f"{name}{specifier}"
        for name, specifier in wanted.items()
        if name not in WITHOUT and not _has(there, name, specifier)
    ]


def _has(there: Mapping[str, str | None], name: str, specifier: SpecifierSet) -> bool:
    if name not in there:
        return False
    version = there[name]
    return version is None or specifier.contains(version, prereleases=True)


def frozen(path: Path) -> dict[str, str | None]:
    """What `pip freeze` has printed on the machine, versions by name."""
    pairs = [line.partition("==") for line in path.read_text(encoding="utf-8").splitlines()]
    plain = {
        name.strip(): version.partition(";")[0].strip() for name, same, version in pairs if same
    }
    others = {name.partition(" @ ")[0].strip(): None for name, same, _ in pairs if not same}
    return {name: v for name, v in (others | plain).items() if re.match(r"\w", name)}


def say(folder: Path, wheels: list[Path]) -> str:
    """What was fetched, and what to run on the machine."""
    size = sum(path.stat().st_size for path in wheels)
    return f"""\
{len(wheels)} wheels, {size / 1e6:.1f} MB, in {folder}:
{chr(10).join(f"  {path.name}" for path in wheels)}

Bring them to the machine with this checkout. There, at its root:

  python -m venv --system-site-packages gpu
  gpu/bin/python -m pip install --no-index --no-deps {folder}/*.whl
  gpu/bin/python -m pip install --no-index --no-deps --no-build-isolation -e .
  gpu/bin/xformer info
  gpu/bin/python -m benchmarks.gpu

`xformer info` names what is still missing: CuPy, or a part of cuBLASLt or cuDNN.
{toolkit(wheels)}""".rstrip()


def toolkit(wheels: list[Path]) -> str:
    """What CuPy's wheel lacks, if it was fetched: the packages of its extra."""
    names = [path.name.partition("-")[0].replace("_", "-") for path in wheels]
    cupy = [name for name in names if name.startswith("cupy-cuda")]
    if not cupy:
        return ""
    return f"""
{cupy[0]} was fetched without its extra [ctk], CUDA's libraries and headers. The machine needs a
CUDA toolkit; or fetch them too: `pip download '{cupy[0]}[ctk]'`, with dependencies, for its
Python."""
