"""`library`, the backend that a test runs on, one after the other; `--backend` demands some."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import math
import os
import pkgutil
import signal
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import Any

import pytest
import threadpoolctl
from libraries import LIBRARIES, ON_DEMAND, STAND_IN, header, opened

from xformer import backends, kernels, layers, models, ops, optim
from xformer.backends import Backend
from xformer.backends.numpy.threads import n_threads
from xformer.cli import progress, steps, train

for package in (layers, models, ops, optim):  # tests go over `dispatch.ops()`: those defined so far
    for file in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(file.name)

# Several tests run at once, and more threads than cores wait for each other. Here, and in workers
# and commands; tests of threads ask for their own.
threadpoolctl.threadpool_limits(1)
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# What a command prints when some seconds have passed depends on the machine's other work. Tests of
# it set these.
progress.PATIENCE = steps.EVERY = math.inf
train.SAMPLE = 20  # a long one takes longer than a short run

if importlib.util.find_spec("jax"):
    # JAX compiles every operation for every shape; small arrays want it done quickly, not well.
    quickly = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    os.environ.setdefault("XLA_FLAGS", quickly)
    from xformer.backends.jax import enable_float64

    enable_float64()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        action="append",
        choices=(*backends.NAMES, STAND_IN),
        help="test only on this backend, and fail where it cannot run; may be given several times",
    )

    parser.addoption(
        "--skipped-in",
        metavar="FILE",
        help="run only the tests that a run with --junitxml=FILE did not, for want of a library",
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    """With --backend cupy, versions and what is missing, as `xformer info` says."""
    return header(config.getoption("--backend") or ())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrized = {mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")}
    if "library" in metafunc.fixturenames and not any("library" in name for name in parametrized):
        demanded = metafunc.config.getoption("--backend")
        names = [
            name
            for name, backend in (LIBRARIES | {STAND_IN: STAND_IN}).items()
            if (backend in demanded if demanded else name not in ON_DEMAND)
        ]
        metafunc.parametrize("library", names, indirect=True)


@pytest.hookimpl(tryfirst=True)  # before slow ones are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests on libraries that cannot be used here. Tests on JAX are slow.

    It compiles every op for every shape. test_gradients.py, whose cases are compiled in one piece,
    always runs. Those on the stand-in for CUDA have a mark of their own, since they compile C++.
    With --backend all tests on it run, and fail where it cannot be used.

    UsageError for a test whose id holds an address, by which processes would disagree about it.
    """
    if addressed := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"the id of a test holds an address: {addressed[0]}")
    if earlier := config.getoption("--skipped-in"):
        ran = _ran(earlier)
        items[:] = [item for item in items if _name(item) not in ran]
    if config.getoption("--backend"):
        return
    left_out = [item for item in items if _unusable(_library_of(item))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not _unusable(_library_of(item))]
    for item in items:
        if _library_of(item) == "jax" and item.path.name != "test_gradients.py":
            item.add_marker(pytest.mark.slow)
        elif _library_of(item) == STAND_IN:
            item.add_marker(pytest.mark.cuda_shim)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say which libraries' tests were left out, and why."""
    if not config.getoption("--backend"):
        for name in dict.fromkeys(LIBRARIES.values()):
            if reason := _unusable(name):
                terminalreporter.write_line(f"LEFT OUT: tests on {name}: {reason}")


def _library_of(item: pytest.Item) -> str | None:
    """The name of a test's `library`, if it has one."""
    on = getattr(item, "callspec", None)
    name: str | None = on and on.params.get("library")
    return name


@functools.cache
def _unusable(library: str | None) -> str | None:
    """Why a library cannot be used here. The stand-in's tests say it themselves."""
    if library not in LIBRARIES:
        return None
    return backends.unavailable_reason(LIBRARIES[library])


def pytest_collection_finish() -> None:
    """What was collected stays: garbage need not be looked for in it, in each of many tests."""
    gc.collect()
    gc.freeze()


def _ran(path: str) -> set[str]:
    """The tests that a run's XML says were run. It does not name every module that was skipped."""
    cases = ElementTree.parse(path).iter("testcase")
    ran = [case for case in cases if not case.findall("skipped")]
    return {f"{case.get('classname')}.{case.get('name')}" for case in ran}


def _name(item: pytest.Item) -> str:
    module = item.nodeid.partition("::")[0].removesuffix(".py").replace("/", ".")
    return f"{module}.{item.name}"


@pytest.fixture(scope="session", autouse=True)
def usual_ctrl_c() -> None:
    """Ctrl-C as in a terminal, also in tests that a shell began with `&`, which ignores it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A test that left BLAS more threads would change what the next ones do."""
    yield
    assert n_threads() == 1, "this test left NumPy's BLAS more threads than it found"


@pytest.fixture(scope="module", autouse=True)
def forget_compiled() -> Iterator[None]:
    """What JAX has compiled for a module's shapes is of no use to the next, and takes gigabytes."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


@pytest.fixture
def numba_kernels() -> Iterator[None]:
    """The test runs within `kernels("numba")`."""
    with kernels("numba"):
        yield


@pytest.fixture
def stand_in(library: Backend) -> Backend:
    """The CUDA stand-in, for what it alone shows."""
    if library.name != STAND_IN:
        pytest.skip("what the CUDA stand-in alone shows")
    return library


@pytest.fixture
def launched(library: Backend, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, Any]]:
    """Names, grids and arguments of the CUDA kernels that are launched."""
    from xformer.backends.cupy.module import driver_of

    seen: list[tuple[str, Any, Any]] = []
    module = driver_of(type(library.asarray([1.0])))
    launch = module.launch

    def noted(
        source: Any, name: str, like: Any, grid: Any, block: Any, args: Any, *rest: Any
    ) -> None:
        seen.append((name, grid, args))
        launch(source, name, like, grid, block, args, *rest)

    monkeypatch.setattr(module, "launch", noted)
    return seen


@pytest.fixture
def library(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The backend of a name that `opened` knows; fails where it cannot run and was demanded."""
    demanded = request.config.getoption("--backend")
    if demanded and LIBRARIES.get(request.param, STAND_IN) not in demanded:
        pytest.skip(f"{request.param} was not demanded by --backend")
    try:
        with opened(request.param) as backend:
            yield backend
    except backends.Unusable as error:
        if demanded:
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
