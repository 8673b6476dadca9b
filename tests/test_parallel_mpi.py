"""Models in parts by MPI have the bits of models in parts by threads."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hanging import SECONDS

BESIDE = Path(sys.executable).with_name("mpiexec")
MPIEXEC = str(BESIDE) if BESIDE.exists() else shutil.which("mpiexec")
PROGRAM = """
import os

import numpy as np

import xformer as xf
from xformer import distributed, generation, optim, tree
from xformer.distributed.world import threads, world

model = xf.GPT(vocab_size=65, n_layers=3, d_model=24, n_heads=3, max_len=16)
params = model.init(seed=0, dtype="float64")
batches = [tuple(np.random.default_rng(i).integers(0, 65, (2, 2, 12))) for i in range(3)]


def cut(world):
    part = distributed.tensor_parallel(model, world, sequence=True)
    own = part.shard(params)
    loss, cache = part.loss(own, *batches[0])
    grads, norm = part.clip_by_global_norm(cache.backward(), max_norm=0.1)
    own, _ = optim.adamw(own, grads, optim.adamw_init(own), lr=1e-2)
    ids = generation.generate(part, own, [[1, 2]], max_new_tokens=3)
    return {"loss": loss, "norm": norm, "ids": np.asarray(ids), "params": part.whole(own)}


def staged(world):
    part = distributed.pipeline(model, world)
    loss, grads = part.gradients(part.shard(params), batches)
    return {"loss": loss, "grads": part.whole(grads)}


mine = world()
for work in (cut, staged):
    got = tree.flatten(work(mine))
    wanted = tree.flatten(threads.run(mine.size, work)[mine.rank])
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert np.array_equal(got[name], wanted[name]), name
os.write(1, f"rank {mine.rank} of {mine.size}: {len(got)} leaves\\n".encode())
"""


def test_the_same_bits_by_mpi(tmp_path: Path) -> None:
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    if MPIEXEC is None:
        pytest.skip("mpiexec is not installed")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    process = subprocess.Popen(
        [MPIEXEC, "-n", "3", sys.executable, "-m", "mpi4py", str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )
    try:
        out, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        pytest.fail(f"the processes did not end within {SECONDS} s: {out}")
    assert process.returncode == 0, out
    lines = sorted(line for line in out.splitlines() if line.startswith("rank"))
    assert [line.partition(":")[0] for line in lines] == [f"rank {i} of 3" for i in range(3)]
