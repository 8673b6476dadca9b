"""Gradients of parts of a model, reported while its backward runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Ready = Callable[[str, Any], None]  # ready(name of a part, its gradients)


def report(ready: Ready | None, name: str, dparams: Any) -> None:
    """Call ready(name, dparams), unless one of both is None."""
    if ready is not None and dparams is not None:
        ready(name, dparams)


def below(ready: Ready | None, name: str) -> Ready | None:
    """`ready` for the parts of the part `name`: their names are "name.part"."""
    if ready is None:
        return None
    return lambda part, dparams: ready(f"{name}.{part}", dparams)
