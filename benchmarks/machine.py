"""Where and with what a result came about; nothing that tells whose machine it was."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xformer
from benchmarks.harness import ROOT
from xformer import backends

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def n_cpus() -> int:
    """CPUs that this process may run on (Linux: `taskset` restricts them)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share_threads() -> dict[str, Any]:
    """Give every library one thread for each CPU of this process, and say what they have.

    NumPy's BLAS is set through threadpoolctl where that is installed; without it, BLAS takes its
    own default, all CPUs unless an environment variable says otherwise. torch is set by its own
    function. JAX has no such function and takes the CPUs of the process.
    """
    n = n_cpus()
    threads: dict[str, Any] = {"cpus": n}
    for name in VARIABLES:
        if name in os.environ:
            threads[name] = os.environ[name]
    try:
        import torch
    except ImportError:
        pass
    else:
        torch.set_num_threads(n)
        threads["torch"] = torch.get_num_threads()
    try:
        import threadpoolctl
    except ImportError:
        threads["blas"] = "its default (threadpoolctl is not installed)"
    else:
        threadpoolctl.threadpool_limits(n, user_api="blas")
        pools = threadpoolctl.threadpool_info()
        threads["blas"] = [p["num_threads"] for p in pools if p["user_api"] == "blas"]
    return threads


def describe(backend_names: Sequence[str]) -> dict[str, Any]:
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
        "versions": {
            name: importlib.metadata.version(name) for name in ("numpy", "array-api-compat")
        }
        | {"xformer": xformer.__version__},
        "backends": {name: backends.get(name).describe() for name in backend_names},
    }


def cpu_model() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _git(*arguments: str) -> str | None:
    """What git prints; None outside a repository, or without git."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
