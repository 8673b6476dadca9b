"""The documents print what lies between forward and gradients; the reference keeps it in caches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from xformer import reference_only


@pytest.fixture(autouse=True)
def _by_the_reference() -> Iterator[None]:
    with reference_only():
        yield
