"""A backend in a distribution of its own, made as CONTRIBUTING.md says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = """
# A toy array library: NumPy's arrays in a class of its own.
import sys

import array_api_compat.numpy as xp
import numpy as np

class Array:
    def __init__(self, values):
        self.values = values

    dtype, shape, ndim, size = (
        property(lambda self, name=name: getattr(self.values, name))
        for name in ("dtype", "shape", "ndim", "size")
    )
    T, mT = (property(lambda self, n=n: Array(getattr(self.values, n))) for n in ("T", "mT"))
    device = "cpu"

    def __array_namespace__(self, api_version=None):
        return sys.modules[__name__]

    def __array__(self, dtype=None, copy=None):
        return self.values

def plain(x):
    if isinstance(x, Array):
        return x.values
    if isinstance(x, (tuple, list)) and not hasattr(x, "_fields"):
        return type(x)(map(plain, x))
    return x

def own(x):
    if isinstance(x, (np.ndarray, np.generic)):
        return Array(np.asarray(x))
    if isinstance(x, (tuple, list)):
        return type(x)(*map(own, x)) if hasattr(x, "_fields") else type(x)(map(own, x))
    return x

for name in (
    "add radd sub rsub mul rmul truediv rtruediv pow rpow matmul neg abs getitem and or invert "
    "lt le gt ge eq ne floordiv mod lshift rshift xor rand ror"
).split():
    def operator(self, *rest, name=f"__{name}__"):
        return own(getattr(self.values, name)(*map(plain, rest)))
    setattr(Array, f"__{name}__", operator)
for name in ("float", "int", "bool", "index"):
    setattr(Array, f"__{name}__", lambda self, name=f"__{name}__": getattr(self.values, name)())

def __getattr__(name):
    found = getattr(xp, name)
    if not callable(found) or isinstance(found, type):
        return found
    return lambda *args, **options: own(
        found(*map(plain, args), **{key: plain(value) for key, value in options.items()})
    )
"""
BACKEND = """
import numpy as np
import toylib
from xformer.dispatch.backend import Backend

def backend(device=None):
    return Backend("toylib", toylib, None, ("float32", "float64"), "1")
"""
KERNEL = """
import numpy as np
import toylib
from xformer.dispatch import kernel
from xformer.ops.relu import ReluCache, relu as reference

def unsupported(x):
    return None if x.ndim == 2 else "x is no matrix"

@kernel(reference, "toylib", unsupported=unsupported)
def relu(x):
    y, cache = reference.reference(x)
    return y + 0.0, cache
"""
PROGRAM = """
import numpy as np
import xformer as xf

assert "toylib" in xf.backends.names() and xf.backends.unavailable_reason("toylib") is None
backend = xf.backends.get("toylib")
x = backend.asarray(np.linspace(-1, 1, 12).reshape(3, 4))
assert type(x).__module__ == "toylib" and xf.backends.backend_of(x) == backend
print(xf.explain(xf.ops.relu, x))
print(xf.explain(xf.ops.relu, x[0, :]))
y, cache = xf.ops.relu(x)
dx = cache.backward(y)
wanted, numpys = xf.ops.relu(backend.to_numpy(x))
assert np.array_equal(backend.to_numpy(y), wanted)
assert np.array_equal(backend.to_numpy(dx), numpys.backward(wanted))
print(xf.gradcheck(xf.ops.relu, x).ok)
try:
    xf.backends.get("nonsense")
except ValueError as error:
    print(error)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What pip would have installed."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (entry,) = re.findall(r'\[project\.entry-points\."(xformer\.backends)"\]\n(.*)\n', page)
    (tmp_path / "toylib.py").write_text(LIBRARY)
    (tmp_path / "toy_backend").mkdir()
    (tmp_path / "toy_backend/__init__.py").write_text(BACKEND)
    (tmp_path / "toy_backend/relu.py").write_text(KERNEL)
    info = tmp_path / "toy_backend-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-backend\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{entry[0]}]\n{entry[1].replace(chr(34), '')}\n")
    return tmp_path


def test_it_is_found_and_its_kernel_runs(folder: Path) -> None:
    (folder / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, folder / "program.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "relu on toylib: toy_backend.relu.relu"
    assert lines[1:3] == [
        "relu on toylib: the reference",
        "- toy_backend.relu.relu: x is no matrix",
    ]
    assert lines[3] == "True"
    command = [sys.executable, "-m", "xformer", "info"]
    said = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )
    assert any(line.split()[:2] == ["toylib", "1"] for line in said.stdout.splitlines())
    assert lines[4].startswith("backend must be one of numpy, ") and ", toylib, got" in lines[4]
