"""The C part, compiled with gcc, and what it needs. Nothing here imports CuPy."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

from cuda_shim import nvrtc

HERE = Path(__file__).parent
KEPT = HERE / "__pycache__"  # compiled, as bytecode is
NAME = "null_device_driver"
COMPILER = "gcc"
FLAGS: tuple[str, ...] = ("-O2", "-std=gnu11", "-shared", "-fPIC", "-Wall", "-Wextra")
FLAGS += ("-Wno-unused-parameter", "-Wno-missing-field-initializers")
HEADER = "cuda_fp16.h"  # of nvidia-cuda-runtime: CuPy's own headers include it


@functools.cache
def missing() -> str | None:
    """Why there is no null device here, or None where there is."""
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: pip install '.[test-cuda]'"
    if importlib.util.find_spec("ml_dtypes") is None:
        return "there is no bfloat16: ml_dtypes is missing"
    try:
        nvrtc.library()
    except ImportError as error:
        return str(error)
    if not any(f.name == HEADER for f in _files("nvidia-cuda-runtime")):
        return "there are no headers of CUDA's: nvidia-cuda-runtime is missing"
    if shutil.which(COMPILER) is None:
        return f"there is no {COMPILER}"
    if not (_include() / "Python.h").exists():
        return "there is no Python.h, a header that packages such as python3-dev bring"
    return None


def load() -> ModuleType:
    """The compiled module, compiled unless it is there already. ImportError where it is refused."""
    text = (HERE / "device.c").read_text(encoding="utf-8")
    digest = hashlib.sha256("\0".join([text, *FLAGS, sys.version]).encode()).hexdigest()
    path = KEPT / f"{NAME}-{digest[:16]}.so"
    if not path.exists():
        KEPT.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as folder:
            new = Path(folder) / "new.so"
            command = (COMPILER, *FLAGS, f"-I{_include()}", HERE / "device.c", "-o", new)
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
            if done.returncode:
                raise ImportError(f"{COMPILER} refuses device.c:\n{done.stderr}")
            new.replace(path)
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _files(package: str) -> list[importlib.metadata.PackagePath]:
    try:
        return importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _include() -> Path:
    return Path(sysconfig.get_paths()["include"])
