"""The stand-in under the compiler's sanitizers: planted mistakes end the process.

The kernels' own tests run so in .ci/run:

    LD_PRELOAD=$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \\
        XFORMER_CUDA_SHIM=sanitize python -m pytest -m cuda_shim tests/test_cuda_kernels.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cuda_shim
import pytest
from cuda_shim.build import COMPILER, missing_compiler
from hanging import SECONDS

pytestmark = pytest.mark.slow
FOLDER = Path(cuda_shim.__file__).parent
# y is followed by nothing of NumPy's: its memory is its own.
CODE = """
import numpy as np, cuda_shim
from xformer.backends.cupy.module import Source, launch
library = cuda_shim.backend()
x, y = (library.asarray(np.arange({size}, dtype=np.float32)) for _ in range(2))
launch(Source({path!r}), "{name}", x, grid=(1,), block=(64,), args=({args}), shared={shared})
print("finished")
"""


def ran(name: str, args: str = "x, y", size: int = 64, shared: int = 0) -> tuple[int, str]:
    """Exit status and output of a planted kernel under the sanitizers."""
    if why := missing_compiler():
        pytest.skip(f"CUDA sources are not compiled: {why}")
    asked = [COMPILER, "-print-file-name=libasan.so"]
    asan = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(asan).is_absolute():
        pytest.skip("CUDA sources are not checked: there is no libasan")
    code = CODE.format(
        name=name, args=args, size=size, shared=shared, path=str(FOLDER / "planted.py")
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ
        | {
            "LD_PRELOAD": asan,
            "ASAN_OPTIONS": "detect_leaks=0",
            "XFORMER_CUDA_SHIM": "sanitize",
            "PYTHONPATH": str(FOLDER.parent),
        },
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    return done.returncode, done.stdout + done.stderr


def test_right_kernels_pass() -> None:
    for name, args, shared in (("reverse", "x, y", 0), ("dynamic", "x, y, 64", 256)):
        status, said = ran(name, args, shared=shared)
        assert status == 0 and "finished" in said, said


@pytest.mark.parametrize(
    ("name", "args", "shared", "message"),
    [
        ("write_behind", "x, y", 0, "AddressSanitizer: heap-buffer-overflow"),
        ("read_before", "x, y", 0, "AddressSanitizer: heap-buffer-overflow"),
        ("shared_behind", "y,", 0, "AddressSanitizer: global-buffer-overflow|index 63 out of bou"),
        ("dynamic_behind", "y,", 252, "AddressSanitizer: use-after-poison"),
        ("misaligned", "x, y", 0, "runtime error: load of misaligned address"),
        ("overflow", "x, y", 0, "runtime error: signed integer overflow"),
    ],
)
def test_mistakes_are_reported(name: str, args: str, shared: int, message: str) -> None:
    status, said = ran(name, args, shared=shared)
    assert status != 0 and "finished" not in said
    assert any(part in said for part in message.split("|")), said
