"""What a launcher of several processes, such as mpiexec, says in the environment."""

from __future__ import annotations

import os

# Set by launchers: MPICH's and Intel's mpiexec, Open MPI's mpirun, Slurm's srun, torchrun. The
# first one counts: mpiexec may run within a step of Slurm, or in a container that sets WORLD_SIZE.
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE")
TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun alone


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
