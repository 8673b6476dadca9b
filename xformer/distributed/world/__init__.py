"""Several processes that work together: one file for each engine, imported when it is needed."""

from __future__ import annotations

from xformer.distributed.launcher import launched
from xformer.distributed.world.processes import Alone, World

__all__ = ["Alone", "World", "end_all", "world"]

INSTALL = "pip install 'xformer-array[mpi]'"
_worlds: list[World] = []  # the world, once it is known


def world() -> World:
    """The processes that were started together, or this one alone. The same object at every call.

    The launcher's environment alone decides. ImportError if there are several and mpi4py or an MPI
    is missing; RuntimeError if mpi4py belongs to another MPI than the launcher.
    """
    if not _worlds:
        n = launched()
        _worlds.append(Alone() if n == 1 else _by_mpi(n))
    return _worlds[0]


def end_all(message: str) -> None:
    """Print an error on stderr. If `world` has found other processes, end them too: `World.end`."""
    (_worlds[0] if _worlds else Alone()).end(message)


def _by_mpi(n: int) -> World:
    together = f"{n} processes were started together"
    try:
        from mpi4py import MPI  # initialises MPI

        from xformer.distributed.world.mpi import Mpi
    except ModuleNotFoundError as error:
        raise ImportError(f"{together}, and mpi4py is missing: {INSTALL}") from error
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no MPI
        raise ImportError(f"{together}, and mpi4py finds no MPI: {INSTALL}; {error}") from error
    found = Mpi()
    if found.size != n:
        library = MPI.Get_library_version().partition("\n")[0]
        raise RuntimeError(
            f"{together}, but mpi4py finds {found.size}: start them with the mpiexec of its MPI, "
            f"which is {library}"
        )
    return found
