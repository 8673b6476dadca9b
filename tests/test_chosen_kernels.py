"""`xformer.kernels`: whose kernels run for NumPy's arrays, within a context and nowhere else."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from hanging import SECONDS

import xformer as xf
from xformer import backends, dispatch, ops
from xformer.backends.numpy import threads
from xformer.cli import embed, main, train
from xformer.dispatch import chosen_kernels
from xformer.generation import stream
from xformer.generation.prefix import backend_of_params
from xformer.training import Batch, TrainConfig, Windows, loss_of, start
from xformer.training import train as trained

X = np.ones((3000, 8), np.float32)
MODEL = xf.GPT(256, n_layers=1, d_model=16, n_heads=2, max_len=8)
numba_only = pytest.mark.skipif(
    backends.unavailable_reason("numba") is not None, reason="extra numba is not installed"
)


def ran() -> str:
    """Whose GELU runs here, and what `explain` says."""
    (first, *_) = xf.explain(ops.gelu, X).splitlines()
    _, cache = ops.gelu(X)
    if not isinstance(cache, dispatch.NoCache):  # within inference()
        of_numba = NUMBAS in first  # whose loops run within a program
        assert type(cache).__module__ in (EAGER if of_numba else first)
    return first.removeprefix("gelu on numpy: xformer.backends.").removesuffix(".gelu")


NUMPYS = "numpy.gelu"
NUMBAS = "numba.kernels.activations"
EAGER = "xformer.backends.numba.single_op"


@numba_only
def test_within_the_context_alone() -> None:
    place = backends.get("numba")
    assert (ran(), chosen_kernels(), backends.backend_of(X).name) == (NUMPYS, "numpy", "numpy")
    with xf.kernels("numba"):
        assert (ran(), chosen_kernels()) == (NUMBAS, "numba")
        assert backends.backend_of(X).name == backend_of_params(MODEL.init()).name == "numba"
        with xf.kernels("numpy"):
            assert (ran(), backends.backend_of(X).name) == (NUMPYS, "numpy")
        with backends.get().active():
            assert ran() == NUMPYS
        with xf.reference_only():
            assert "numba" not in xf.explain(ops.gelu, X).splitlines()[0]
        assert ran() == NUMBAS
    assert ran() == NUMPYS
    with pytest.raises(ZeroDivisionError), place.active():
        assert ran() == NUMBAS
        1 / 0  # noqa: B018
    assert ran() == NUMPYS


@numba_only
def test_numpys_kernels_after_numbas_and_the_reference_after_them() -> None:
    x, w = X.astype(np.float64), np.ones((8, 4))
    with xf.kernels("numba"):
        said = xf.explain(ops.linear, x, w).splitlines()
        assert said[0] == "linear on numpy: xformer.backends.numpy.linear.linear"
        assert said[1] == "- xformer.backends.numba.kernels.linear.linear: only float32"
        assert xf.explain(ops.tanh, x).startswith("tanh on numpy: the reference")


@numba_only
def test_a_kernel_for_numba_is_asked_there_alone() -> None:
    op = dispatch.Overridable(lambda x: "reference", backward=False)
    xf.kernel(op, "numba")(lambda x: "numba")
    assert op(X) == "reference"
    with xf.kernels("numba"):
        assert op(X) == "numba"
        xf.kernel(op, "numpy")(lambda x: "numpy")
        assert op(X) == "numba"
    assert op(X) == "numpy"


@numba_only
def test_other_threads_and_tasks_have_their_own() -> None:
    found: list[str] = []
    with xf.kernels("numba"):
        other = threading.Thread(target=lambda: found.append(ran()))
        other.start()
        other.join()
    assert found == [NUMPYS]

    async def one(name: str, mine: asyncio.Event, its: asyncio.Event) -> str:
        with xf.kernels(name):
            mine.set()
            await its.wait()  # the other is within its context now
            return ran()

    async def both() -> list[str]:
        events = asyncio.Event(), asyncio.Event()
        tasks = one("numba", *events), one("numpy", *events[::-1])
        return await asyncio.gather(*tasks)

    assert asyncio.run(both()) == [NUMBAS, NUMPYS]


@numba_only
def test_pieces_on_helper_threads_run_the_caller_s() -> None:
    found: list[tuple[int, str]] = []
    barrier = threading.Barrier(2, timeout=SECONDS)

    def piece(start: int, stop: int) -> None:
        barrier.wait()
        found.append((threading.get_ident(), ran()))

    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        for name, wanted in (("numba", NUMBAS), ("numpy", NUMPYS)):
            found.clear()
            with xf.kernels(name):
                threads.blocks(piece, 2, 1)
            assert len(dict(found)) == 2 and {who for _, who in found} == {wanted}


def test_names() -> None:
    for name in ("cupy", "Numba", "", 3):
        said = "name must be one of numpy, numba, mkl, got"
        with pytest.raises(ValueError, match=said), xf.kernels(name):  # type: ignore[arg-type]
            pass


# ---- What goes on later ----


def watched(seen: list[str]) -> Any:
    """A loss that notes whose kernels run."""
    loss = loss_of(MODEL)

    def noting(params: Any, batch: Batch, *rest: Any) -> Any:
        seen.append(ran())
        return loss(params, batch, *rest)

    return noting


@numba_only
@pytest.mark.parametrize("outside", ["numpy", "numba"])
@pytest.mark.parametrize(("name", "wanted"), [("numpy", NUMPYS), ("numba", NUMBAS)])
def test_training_steps(outside: str, name: str, wanted: str) -> None:
    """Those of the place that is passed; between steps the caller has its own."""
    seen: list[str] = []
    source = Windows(np.arange(200, dtype=np.uint8), 8, 2)
    config = TrainConfig(steps=2, batch_size=2, eval_every=1)
    state, place = start(MODEL.init(), config), backends.get(name)
    held = [source.batch(9)]
    with xf.kernels(outside):
        before = ran()
        for _ in trained(watched(seen), state, source, config, place, held_out=held):
            assert ran() == before
    assert len(seen) == 4 and set(seen) == {wanted}


@numba_only
@pytest.mark.parametrize(("name", "wanted"), [("numpy", NUMPYS), ("numba", NUMBAS)])
def test_a_text_has_those_of_its_call(name: str, wanted: str) -> None:
    seen: list[str] = []

    def sampler(logits: Any, ids: Any) -> Any:
        seen.append(ran())
        return logits

    with xf.kernels(name):
        text = stream(MODEL, MODEL.init(), [[1, 2]], max_new_tokens=3, sampler=sampler)
    for _ in text:
        assert ran() == NUMPYS
    assert seen == [wanted] * 3


# ---- Commands ----


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Whose kernels run within commands."""
    seen: list[str] = []

    def noted(*_: Any) -> int:
        seen.append(chosen_kernels())
        return 0

    monkeypatch.setattr(embed, "run", noted)
    monkeypatch.setattr(train, "_run", noted)
    return seen


@numba_only
def test_commands_run_those_of_their_backend(chosen: list[str]) -> None:
    for name in ("numpy", "numba"):
        assert main(["embed", "--model", "a-model", "--backend", name]) == 0
        assert main(["train", "--backend", name]) == 0
    assert chosen == ["numpy", "numpy", "numba", "numba"]
    assert chosen_kernels() == "numpy"


# ---- The process ----


def said_by(code: str) -> Any:
    """What a process of its own prints, read as JSON."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_without_its_extra_it_says_what_to_install() -> None:
    said = said_by("""
import json, sys
sys.modules["numba"] = None
import xformer
try:
    with xformer.kernels("numba"):
        pass
except ImportError as error:
    print(json.dumps([type(error).__name__, str(error), xformer.dispatch.chosen_kernels()]))
""")
    assert said[0] == "Unusable" and said[2] == "numpy"
    assert "pip install 'xformer-array[numba]'" in said[1]


@numba_only
def test_numpy_and_malloc_stay_as_they_are() -> None:
    """After work on backend numba: NumPy's names are the same, and freed memory is given back."""
    found = said_by("""
import json, platform, sys
import numpy as np
before = dict(vars(np))
import xformer
place = xformer.backends.get("numba")
with place.active():
    gpt = xformer.GPT(256, n_layers=1, d_model=16, n_heads=2, max_len=8)
    ids = place.asarray([[1, 2, 3]])
    gpt.loss(gpt.init(backend="numba"), ids, ids)[1].backward()
after = vars(np)
new = {name: after[name] for name in after.keys() - before.keys()}
changed = [name for name, value in before.items() if after.get(name) is not value]
# NumPy imports some of its modules when they are first asked for.
ours = [name for name, x in new.items() if sys.modules.get(f"numpy.{name}") is not x]
in_use = place.memory().in_use
array = np.ones(2**25)
del array
kept = place.memory().in_use - in_use if platform.libc_ver()[0] == "glibc" else 0
print(json.dumps([changed, ours, kept]))
""")
    assert found[:2] == [[], []]
    assert found[2] < 2**27
