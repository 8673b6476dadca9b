"""`python -m benchmarks.gpu --pack FOLDER`: wheels for a machine without a package index.

It fetches the requirements of pyproject.toml (dependencies, and the extras for CUDA and tests)
that the machine lacks, for the machine's Python. It does not fetch their dependencies: the extras
name every imported package. cuDNN's frontend, for example, depends on compilers of hundreds of
megabytes, which no kernel here calls.
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
# Packages of a machine with CuPy, pytest, and torch with CUDA (which brings cuDNN).
ASSUMED = ("numpy", "cupy-cuda13x", "cupy-cuda12x", "pytest", "nvidia-cudnn-cu13")
ASSUMED += ("nvidia-cudnn-cu12",)
WITHOUT = ("pytest-xdist",)  # not needed: the tests run in one process
BEHIND = ("sortedcontainers>=2.1,<3",)  # a dependency that hypothesis imports
BUILD = "setuptools>=77.0.3"  # for the checkout itself, as [build-system] says
GLIBC = (28, 27, 24, 17, 12, 5)  # minor versions: CuPy's wheels need 2.28, others older ones


def pack(folder: Path, python: str, cuda: str, has: Mapping[str, str | None]) -> list[Path]:
    """Fetch the wheels that `requirements` names into `folder`. Returns their paths.

    python: a version, "3.12"   cuda: "12" or "13"
    has: versions of the machine's packages by name; None if the version does not matter.
    Raises RuntimeError with pip's message if pip fails.
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
    """Return the requirements that the machine lacks; arguments as of `pack`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    for extra in (*EXTRAS[cuda], "test"):
        lines += project["optional-dependencies"][extra]
    installed = {canonicalize_name(name): version for name, version in has.items()}
    environment = {"python_version": python, "sys_platform": "linux", "platform_system": "Linux"}
    specifiers = dict[str, SpecifierSet]()
    for one in map(Requirement, [*lines, *BEHIND, BUILD]):
        if one.marker is None or one.marker.evaluate(environment):
            name = canonicalize_name(one.name)
            specifiers[name] = specifiers.get(name, SpecifierSet()) & one.specifier
    return [
        f"{name}{specifier}"
        for name, specifier in specifiers.items()
        if name not in WITHOUT and not _has(installed, name, specifier)
    ]


def _has(installed: Mapping[str, str | None], name: str, specifier: SpecifierSet) -> bool:
    if name not in installed:
        return False
    version = installed[name]
    return version is None or specifier.contains(version, prereleases=True)


def frozen(path: Path) -> dict[str, str | None]:
    """Read the output of `pip freeze`. Returns versions by name; None for installs from a URL."""
    pairs = [line.partition("==") for line in path.read_text(encoding="utf-8").splitlines()]
    pinned = {
        name.strip(): version.partition(";")[0].strip() for name, same, version in pairs if same
    }
    unpinned = {name.partition(" @ ")[0].strip(): None for name, same, _ in pairs if not same}
    return {name: v for name, v in (unpinned | pinned).items() if re.match(r"\w", name)}


def say(folder: Path, wheels: list[Path]) -> str:
    """Return a text: the fetched wheels, and the commands to run on the machine."""
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
    """Return a text on CuPy's extra [ctk], which is not fetched; "" if CuPy was not fetched."""
    names = [path.name.partition("-")[0].replace("_", "-") for path in wheels]
    cupy = [name for name in names if name.startswith("cupy-cuda")]
    if not cupy:
        return ""
    return f"""
{cupy[0]} was fetched without its extra [ctk], CUDA's libraries and headers. The machine needs a
CUDA toolkit; or fetch them too: `pip download '{cupy[0]}[ctk]'`, with dependencies, for its
Python."""
