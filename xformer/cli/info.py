"""`xformer info`: the backends with version and device, or the reason why one does not work.

The libraries that a backend also calls follow, then those for several processes, each with its
version or what is missing.
"""

from __future__ import annotations

import argparse
import platform
import warnings

import xformer
from xformer import backends
from xformer.cli.parser import Parser
from xformer.cli.table import table
from xformer.distributed.world import INSTALL


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer info`."""


def run(args: argparse.Namespace) -> int:
    """Print one row for each backend, and one for each library that a backend also calls."""
    print(f"xformer {xformer.__version__}, Python {platform.python_version()}")
    rows = [("backend", "version", "device", "computes in")]
    for name in backends.names():
        try:
            backend = backends.get(name)
        except backends.Unusable as error:
            rows.append((name, "-", "-", str(error)))
        else:
            computes_in = ", ".join(backend.dtypes)
            rows.append((name, backend.version, backend.device_name(), computes_in))
    print(table(rows, right=()))
    for name in backends.names():
        for library, description in backends.beside(name).items():
            print(f"{name}, {library}: {description}")
    print(f"processes, MPI: {_mpi()}")
    print(f"processes, NCCL: {_nccl()}")
    return 0


def _mpi() -> str:
    """The versions of mpi4py and of its MPI, or what is missing. MPI is not initialised."""
    try:
        import mpi4py

        initialize, mpi4py.rc.initialize = mpi4py.rc.initialize, False
        try:
            from mpi4py import MPI
        finally:
            mpi4py.rc.initialize = initialize
        name, version = MPI.get_vendor()
    except ModuleNotFoundError:
        return f"mpi4py is not installed: {INSTALL}"
    except (ImportError, RuntimeError) as error:  # RuntimeError: it found no library
        return f"mpi4py finds no MPI: {str(error).partition(chr(10))[0]}"
    return f"mpi4py {mpi4py.__version__}, {name} {'.'.join(map(str, version))}"


def _nccl() -> str:
    """The version of NCCL that CuPy finds, or what is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # how to install it, in several lines
            from cupy.cuda import nccl
    except ImportError:
        return "CuPy is not installed"
    if not getattr(nccl, "available", True):
        return "CuPy finds no libnccl"
    n = nccl.get_version()
    return f"{n // 10000}.{n // 100 % 100}.{n % 100}; no command uses it yet"
