"""Machine, versions and commit of a result; nothing that identifies the machine's owner."""

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
CONTEXT = 1 << 29  # bytes of a GPU that a process takes before its first array (an estimate)
LOADED = time.monotonic()
SLOWEST = 300  # seconds from the start of a process to the import of this module, at most
VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def n_cpus() -> int:
    """Return the number of CPUs that this process may run on (on Linux `taskset` restricts it)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share_threads() -> dict[str, Any]:
    """Set the threads of every library to the CPUs of this process; return `threads`.

    NumPy's BLAS is set by threadpoolctl, torch by `torch.set_num_threads`. JAX always uses all CPUs
    of the process.
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
    """Return the environment of a contestant's process: one thread per CPU of this process.

    Bytecode is written, so that a checkout is not compiled at each start; an installed library has
    bytecode as well.
    """
    others = {COMPILING: os.environ.get(COMPILING, "1"), "PYTHONDONTWRITEBYTECODE": ""}
    return {name: str(n_cpus()) for name in VARIABLES} | others


def threads() -> dict[str, Any]:
    """Return the number of threads of each loaded library, and the kernels of each BLAS.

    No library is imported.
    """
    counts: dict[str, Any] = {"cpus": n_cpus()}
    if "torch" in sys.modules:
        counts["torch"] = sys.modules["torch"].get_num_threads()
    pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    kernels = [pool.get("architecture", "unknown") for pool in pools]
    return counts | {"blas": [pool["num_threads"] for pool in pools], "blas_kernels": kernels}


def free_memory(device: str | None = None) -> int | None:
    """Return the free bytes of the host, or of the GPU for device "cuda"; None if unknown.

    The host's are known on Linux only.
    """
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
    """Free the memory pools of torch and CuPy on the GPU, for other processes.

    It also resets torch's peak memory.
    """
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.empty_cache()
        sys.modules["torch"].cuda.reset_peak_memory_stats()
    if "cupy" in sys.modules:
        with suppress(RuntimeError):  # CUDA raises it without a device
            sys.modules["cupy"].get_default_memory_pool().free_all_blocks()


def held() -> int:
    """Return the bytes of the GPU that this process holds: pools, graphs, and CUDA's context."""
    n_bytes = CONTEXT
    if "torch" in sys.modules:
        n_bytes += sys.modules["torch"].cuda.memory_reserved()
    if "cupy" in sys.modules:
        from xformer.backends.cupy import driver

        n_bytes += sum(pool.total_bytes() for pool in driver.pools())
    return n_bytes


def nvidia_smi(field: str) -> str | None:
    """Return a field of `nvidia-smi` for the first GPU of this process; None if that fails."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    command = ["nvidia-smi", f"--id={first}", f"--query-gpu={field}"]
    command.append("--format=csv,noheader,nounits")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def age() -> float:
    """Return the seconds since this process started, including imports.

    On Linux the start is field 22 of /proc/self/stat, in ticks since the machine started. If that
    is absent, 0 or implausible, the time since the import of this module is returned.
    """
    least = time.monotonic() - LOADED
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii")
        ticks = int(stat.rpartition(")")[2].split()[19])
        seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return least
    return seconds if ticks > 0 and least <= seconds <= least + SLOWEST else least


def load() -> float | None:
    """Return the machine's load average over the last minute; None if unknown."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def describe(backend_names: Sequence[str], packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Return date, commit, machine, and the versions of packages and backends."""
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
    """Return the processor's name, with its family and model number: several share a name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not on Linux
        return platform.processor() or "unknown"
    fields: dict[str, str] = {}
    for line in lines:
        key, _, what = line.partition(":")
        fields.setdefault(key.strip(), what.strip())  # of the first core
    name = fields.get("model name") or platform.processor() or "unknown"
    numbers = [f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def _git(*arguments: str) -> str | None:
    """Return the output of git; None outside a repository, or without git."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
