"""The documents print what is between a forward and its gradients; the reference's caches hold it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from xformer import reference_only


@pytest.fixture(autouse=True)
def _by_the_reference() -> Iterator[None]:
    with reference_only():
        yield
