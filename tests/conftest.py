"""`library`, the backend that a test runs on, one after the other; `--backend` demands some."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from libraries import LIBRARIES, opened

from xformer import backends
from xformer.backends import Backend

if importlib.util.find_spec("jax"):
    from xformer.backends.jax import enable_float64

    enable_float64()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        action="append",
        choices=backends.NAMES,
        help="test only on this backend, and fail where it cannot run; may be given several times",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "libraries(*names): run the test on these libraries only")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "library" in metafunc.fixturenames:
        demanded = metafunc.config.getoption("--backend") or backends.NAMES
        marker = metafunc.definition.get_closest_marker("libraries")
        possible = marker.args if marker else LIBRARIES
        names = [name for name in possible if LIBRARIES[name] in demanded]
        metafunc.parametrize("library", names, indirect=True, scope="function")


@pytest.fixture
def library(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The backend of a name in `LIBRARIES`; skips where it cannot run and was not demanded."""
    try:
        with opened(request.param) as backend:
            yield backend
    except backends.Unusable as error:
        if request.config.getoption("--backend"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
