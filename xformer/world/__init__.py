"""Several processes that work together: one file for each engine, imported when it is needed."""

from __future__ import annotations

import os

from xformer.world._alone import Alone
from xformer.world.base import World

__all__ = ["Alone", "World", "end_all", "launched", "world"]

# Set by launchers: MPICH's and Intel's mpiexec, Open MPI's mpirun, Slurm's srun, torchrun. The
# first one counts: mpiexec may run within a step of Slurm, or in a container that sets WORLD_SIZE.
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE")
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun alone
INSTALL = "pip install 'xformer-array[mpi]'"
_worlds: list[World] = []  # the world, once it is known


def launched() -> int:
    """The number of processes that were started together, by the launcher's environment.

    1 if this process was started alone. It imports nothing.
    """
    name = _deciding()
    return 1 if name is None else int(os.environ[name])


def by_mpi() -> bool:
    """Whether an MPI launcher or Slurm started this process. It imports nothing."""
    return _deciding() not in (None, "WORLD_SIZE")


def _deciding() -> str | None:
    """The variable of the launcher nearest to this process; None without a launcher."""
    # torchrun in a step of Slurm starts the processes itself.
    names = ("WORLD_SIZE",) if TORCHRUN in os.environ else SIZES
    found = (name for name in names if os.environ.get(name, "").isdecimal())
    name = next(found, None)
    # Some containers set WORLD_SIZE for a job whose processes they do not start.
    return None if name == "WORLD_SIZE" and not os.environ.get("RANK", "").isdecimal() else name


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

        from xformer.world.mpi import Mpi
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
