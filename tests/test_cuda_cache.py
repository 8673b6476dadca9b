"""What is compiled is kept: by the next process, in another folder, and where the sources moved."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hanging import SECONDS

import xformer.backends.cupy
from xformer.backends.cupy.module import Source

FOLDER = Path(xformer.backends.cupy.__file__).parent
# On a device that computes nothing: kernels of this library, in two precisions, and one of CuPy's.
STEP = """
from null_device import device
import cupy, ml_dtypes, numpy as np
from xformer import ops
for dtype in (np.dtype("f4"), np.dtype(ml_dtypes.bfloat16)):
    x, w = cupy.empty((4, 8), dtype), cupy.empty(8, dtype)
    y, cache = ops.rms_norm(x, w)
    cache.backward(y)
y + y
"""


def kept(cache: Path) -> dict[str, tuple[int, int]]:
    """Files in CuPy's folder; one that is compiled anew is another file of the same name."""
    return {x.name: (x.stat().st_ino, x.stat().st_mtime_ns) for x in cache.iterdir()}


def run(cache: Path) -> dict[str, tuple[int, int]]:
    environment = os.environ | {"CUPY_CACHE_DIR": str(cache)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", STEP],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return kept(cache)


def test_nothing_is_compiled_twice(tmp_path: Path) -> None:
    """One module for each file, dtype and choice of macros that was launched, and no other."""
    build = pytest.importorskip("null_device.build", reason="there is no null device")
    if why := build.missing():
        pytest.skip(f"there is no null device under CuPy: {why}")
    first = run(tmp_path / "first")
    assert len(first) == 4  # rms_norm in both, column_sums of float32, and CuPy's addition
    assert run(tmp_path / "first") == first
    shutil.copytree(tmp_path / "first", tmp_path / "carried")
    carried = kept(tmp_path / "carried")
    assert run(tmp_path / "carried") == carried
    assert carried.keys() == first.keys()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.cu")), ids=lambda path: path.stem)
def test_sources_are_the_same_wherever_they_lie(path: Path, tmp_path: Path) -> None:
    """CuPy keeps what it compiles by source and options: none of both may name a folder."""
    for file in FOLDER.glob("*.cu*"):
        shutil.copy(file, tmp_path)
    own: Source = importlib.import_module(f"xformer.backends.cupy.{path.stem}").SOURCE
    moved = Source(str(tmp_path / f"{path.stem}.py"), dtypes=own.dtypes, **own.macros)
    assert moved.text == own.text
    for variant in own.variants():
        assert moved.options(*variant) == own.options(*variant)
        assert not any(str(FOLDER) in option for option in own.options(*variant))
