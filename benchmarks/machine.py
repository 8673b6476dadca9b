"""Where and with what a result came about; nothing that tells whose machine it was."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import threadpoolctl

import xformer
from benchmarks.harness import ROOT
from xformer import backends

PACKAGES = ("numpy", "array-api-compat")
COMPILING = "TORCHINDUCTOR_COMPILE_THREADS"
CONTEXT = 1 << 29  # bytes of a GPU that a process takes before it has any array, about
LOADED = time.monotonic()
SLOWEST = 300  # seconds from the beginning of a process to here, at most
VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def n_cpus() -> int:
    """CPUs that this process may run on (Linux: `taskset` restricts them)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share_threads() -> dict[str, Any]:
    """Give every library one thread for each CPU of this process, and say what they have.

    NumPy's BLAS is set through threadpoolctl, torch by its own function. JAX has no such function
    and takes the CPUs of the process.
    """
    try:
        import torch
    except ImportError:
        pass
    else:
        torch.set_num_threads(n_cpus())
    threadpoolctl.threadpool_limits(n_cpus(), user_api="blas")
    return threads()


def environment() -> dict[str, str]:
    """What gives a new process one thread for each CPU of this one, whatever library it takes.

    And bytecode, which an installed library has, so that a checkout is not compiled at each start.
    """
    own = {COMPILING: os.environ.get(COMPILING, "1"), "PYTHONDONTWRITEBYTECODE": ""}
    return {name: str(n_cpus()) for name in VARIABLES} | own


def threads() -> dict[str, Any]:
    """The threads that the libraries of this process have, and the kernels of each BLAS.

    It loads no library for that.
    """
    found: dict[str, Any] = {"cpus": n_cpus()}
    if "torch" in sys.modules:
        found["torch"] = sys.modules["torch"].get_num_threads()
    pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    kernels = [pool.get("architecture", "unknown") for pool in pools]
    return found | {"blas": [pool["num_threads"] for pool in pools], "blas_kernels": kernels}


def free_memory(device: str | None = None) -> int | None:
    """Bytes that new processes may take, where the system tells (Linux); of the GPU for "cuda"."""
    if device == "cuda":
        free = nvidia_smi("memory.free")
        return None if free is None else int(free) << 20
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = dict(line.split(":", 1) for line in lines)
    return 1024 * int(sizes["MemAvailable"].split()[0])


def give_back() -> None:
    """What the libraries keep of the GPU's memory for later goes to other processes.

    Peaks are counted anew from then on.
    """
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.empty_cache()
        sys.modules["torch"].cuda.reset_peak_memory_stats()
    if "cupy" in sys.modules:
        with suppress(RuntimeError):  # CUDA's, where there is no device
            sys.modules["cupy"].get_default_memory_pool().free_all_blocks()


def held() -> int:
    """Bytes of the GPU that nobody else can have: of pools, graphs, and what CUDA itself takes."""
    found = CONTEXT
    if "torch" in sys.modules:
        found += sys.modules["torch"].cuda.memory_reserved()
    if "cupy" in sys.modules:
        from xformer.backends.cupy import driver

        found += sum(pool.total_bytes() for pool in driver.pools())
    return found


def nvidia_smi(field: str) -> str | None:
    """What the driver says of the first GPU that this process sees; None where it says nothing."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    command = ["nvidia-smi", f"--id={first}", f"--query-gpu={field}"]
    command.append("--format=csv,noheader,nounits")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def age() -> float:
    """Seconds since this process began, imports included.

    By Linux's /proc: field 22 of `stat`, in ticks since the machine started. Elsewhere, and where
    that cannot be right, since this module was imported.
    """
    least = time.monotonic() - LOADED
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii")
        began = int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        found = time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, AttributeError, ValueError, IndexError):
        return least
    return found if least <= found <= least + SLOWEST else least


def load() -> float | None:
    """Of the machine, over the last minute, where the system tells."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def describe(backend_names: Sequence[str], packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Date, commit, machine and versions."""
    changed = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if changed is None else bool(changed),
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "cpu": cpu_model(),
            "cpus": os.cpu_count(),
        },
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages}
        | {"xformer": xformer.__version__},
        "backends": {name: backends.get(name).describe() for name in backend_names},
    }


def cpu_model() -> str:
    """The processor's name, as far as the system tells, and its numbers: several share a name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return platform.processor() or "unknown"
    found: dict[str, str] = {}
    for line in lines:
        key, _, what = line.partition(":")
        found.setdefault(key.strip(), what.strip())  # of the first core
    name = found.get("model name") or platform.processor() or "unknown"
    numbers = [f"{key} {found[key]}" for key in ("cpu family", "model") if key in found]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def _git(*arguments: str) -> str | None:
    """What git prints; None outside a repository, or without git."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
