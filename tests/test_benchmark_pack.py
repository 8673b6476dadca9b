"""`python -m benchmarks.gpu --pack`: what pip is asked for, and what is said."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

pytest.importorskip("packaging", reason="packaging, which pytest brings, is not installed")

from benchmarks import gpu, gpu_pack

# A pip that notes what it is asked for, and makes a wheel of each.
PIP = """
import json, os, pathlib, re, sys
with open(os.environ["PIP_LOG"], "a", encoding="utf-8") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if os.environ.get("PIP_FAILS"):
    sys.exit("there is no such wheel")
at = sys.argv.index("--dest")
for line in sys.argv[at + 2 :]:
    name = re.split("[<>=!]", line)[0].replace("-", "_")
    pathlib.Path(sys.argv[at + 1], f"{name}-1.0-py3-none-any.whl").write_bytes(b"x" * 1000)
"""


@pytest.fixture
def pip_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "fake" / "pip"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "__main__.py").write_text(PIP, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    monkeypatch.setenv("PIP_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def test_wheels_of_a_bare_machine(
    tmp_path: Path, pip_log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "wheels"
    assert gpu.main(["--pack", str(folder), "--python-version", "3.12"]) == 0
    (asked,) = (json.loads(line) for line in pip_log.read_text(encoding="utf-8").splitlines())
    assert asked[0] == "download" and {"--no-deps", "--only-binary=:all:"} <= set(asked)
    options = list(itertools.pairwise(asked))
    assert ("--python-version", "3.12") in options and ("--abi", "cp312") in options
    assert {("--abi", "abi3"), ("--abi", "none"), ("--platform", "any")} <= set(options)
    assert ("--platform", "manylinux_2_28_x86_64") in options
    names = {path.name.partition("-")[0] for path in folder.glob("*.whl")}
    assert {"array_api_compat", "array_api_strict", "nvmath_python", "cuda_core"} <= names
    assert {"nvidia_cudnn_frontend", "cuda_bindings", "cuda_pathfinder", "setuptools"} <= names
    assert not {"numpy", "cupy_cuda13x", "pytest", "nvidia_cudnn_cu13"} & names
    said = capsys.readouterr().out
    assert f"{len(names)} wheels, 0.0 MB, in {folder}:" in said
    assert f"pip install --no-index --no-deps {folder}/*.whl\n" in said
    assert "\n  gpu/bin/python -m benchmarks.gpu\n" in said and "[ctk]" not in said


def test_a_machine_without_cupy(
    tmp_path: Path, pip_log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its wheel is fetched, but CUDA's libraries are not: they are named."""
    (tmp_path / "frozen").write_text("numpy==2.4.6\n", encoding="utf-8")
    command = ["--pack", str(tmp_path / "wheels"), "--has", str(tmp_path / "frozen")]
    assert gpu.main(command) == 0
    assert list((tmp_path / "wheels").glob("cupy_cuda13x-*.whl"))
    said = capsys.readouterr().out
    assert "cupy-cuda13x was fetched without its extra [ctk], CUDA's libraries" in said


def test_what_the_machine_has_is_not_fetched(tmp_path: Path) -> None:
    frozen = tmp_path / "frozen"
    lines = ["cupy-cuda12x==14.2.0", "numpy==2.4.6", "cuda_bindings==12.9.4", "pytest==8.4.0"]
    lines += ["nvidia-cudnn-cu12==9.10.2.21", "torch @ file:///a.whl", "-e here", "tqdm==4.70.1"]
    frozen.write_text("\n".join([*lines, "hypothesis @ file:///b.whl", ""]), encoding="utf-8")
    has = gpu_pack.frozen(frozen)
    assert has["torch"] is None and has["tqdm"] == "4.70.1" and "-e here" not in has
    wanted = {line.partition(">")[0].partition("<")[0] for line in has_not(has)}
    assert not {"cupy-cuda12x", "numpy", "cuda-bindings", "tqdm", "hypothesis"} & wanted
    assert "nvidia-cudnn-cu12" in wanted  # too old
    other = has | {"cuda_bindings": "13.0.0"}  # fits an extra, and not the other
    (line,) = (line for line in has_not(other) if line.startswith("cuda-bindings"))
    assert set(line.removeprefix("cuda-bindings").split(",")) == {">=12.9.2", "<13", "<14"}


def has_not(has: dict[str, str | None]) -> list[str]:
    return gpu_pack.requirements("3.11", "12", has)


def test_a_wheel_that_is_not_there(
    tmp_path: Path,
    pip_log: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PIP_FAILS", "1")
    assert gpu.main(["--pack", str(tmp_path / "wheels")]) == 1
    err = capsys.readouterr().err
    assert "pip could not fetch array-api-compat" in err and "there is no such wheel" in err
    with pytest.raises(SystemExit):
        gpu.main(["--pack", str(tmp_path), "--python-version", "three"])
    assert "--python-version must be like 3.12, got 'three'" in capsys.readouterr().err
