"""Programs of several processes, started by mpiexec. A program that hangs is killed, and fails."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hanging import SECONDS

PROGRAM = Path(__file__).with_name("processes.py")
_BESIDE = Path(sys.executable).with_name("mpiexec")
MPIEXEC = str(_BESIDE) if _BESIDE.exists() else shutil.which("mpiexec")


def needs_mpi() -> None:
    """Skip the test, or the file, without mpi4py or an mpiexec."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed", allow_module_level=True)
    if MPIEXEC is None:
        pytest.skip("mpiexec is not installed", allow_module_level=True)


def start(*groups: tuple[int, tuple[Any, ...]], **env: str) -> subprocess.Popen[str]:
    """Processes of `processes.py`. groups: numbers of processes, each with its arguments."""
    assert MPIEXEC is not None
    command: list[str] = [MPIEXEC]
    for n, args in groups:
        command += [] if len(command) == 1 else [":"]
        command += ["-n", str(n), sys.executable, str(PROGRAM), *map(str, args)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",  # a sample of a model of bytes may be no UTF-8
        start_new_session=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | env,
    )


def finish(process: subprocess.Popen[str], limit: float = SECONDS) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of processes that end within `limit`."""
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"the processes did not end within {limit} s: {out}{err}")
    return process.returncode, out, err


def run(n: int, *args: Any, **env: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of n processes of `processes.py`."""
    return finish(start((n, args), **env))


def good(n: int, *args: Any, **env: str) -> str:
    """Standard output of n processes of `processes.py`, which succeed."""
    status, out, err = run(n, *args, **env)
    assert status == 0, out + err
    return out
