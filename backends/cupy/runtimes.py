"""What kernels ask, that call a library of NVIDIA's, of the library of their arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from xformer.typing import Array


class Runtime(NamedTuple):
    """CuPy's are in `driver`; tests bring their own."""

    library: Callable[[], Any]  # NVIDIA's package, or why it cannot be used, in words
    place: Callable[[list[Array]], Any]  # where work goes; ValueError for arrays of another device
    memory: Callable[[int], Any]  # so many bytes of the device, from `ptr` on


def runtime_of(known: dict[type, Runtime], array_type: type) -> Runtime:
    """That of CuPy's arrays, or of the stand-in's."""
    if array_type not in known:
        from xformer.backends.cupy import driver

        known[array_type] = known[driver.ARRAY]
    return known[array_type]
