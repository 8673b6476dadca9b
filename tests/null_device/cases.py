"""Cases by name, in groups that each have a process of their own, and how one is judged.

A case is a function, which raises where something is wrong, and returns what a budget holds it to.
What it leaves behind on the device is an error of its own.
"""

from __future__ import annotations

import gc
import importlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from null_device import device, table
from null_device.device import cupy
from xformer import backends

MODULES = ("of_device", "of_families", "of_options", "of_sizes", "of_texts")
Numbers = dict[str, int]
Case = Callable[[], Numbers | None]
_cases: dict[str, dict[str, Case]] = {}


def case(group: str, name: str) -> Callable[[Case], Case]:
    """Make a function the case of that name."""

    def add(run: Case) -> Case:
        assert name not in _cases.setdefault(group, {}), f"{group}, {name}: there are two"
        _cases[group][name] = run
        return run

    return add


def known() -> dict[str, dict[str, Case]]:
    """group -> name -> case."""
    for module in MODULES:
        importlib.import_module(f"null_device.{module}")
    assert _cases.keys() == set(table.GROUPS), sorted(_cases)
    return _cases


def judged(groups: list[str]) -> Iterator[dict[str, Any]]:
    """Runs all cases of the groups: each one's group, name, error (None: none) and numbers."""
    for group in groups:
        for name, run in known()[group].items():
            found: dict[str, Any] = {"group": group, "case": name, "error": None, "numbers": None}
            before = _levels()
            try:
                found["numbers"] = run()
            except BaseException:
                found["error"] = traceback.format_exc(limit=-12)
            else:
                gc.collect()
                if (after := _levels()) != before:
                    found["error"] = f"left on the device: {after}, before {before}"
            gc.collect()
            yield found


def _levels() -> dict[str, int]:
    """Memory in use, that of graphs, streams and graphs."""
    backends.get("cupy").memory()  # which frees what graphs have left
    held, pool = device.held(), cupy.get_default_memory_pool()
    found = {"in use": pool.used_bytes(), "of graphs": held["bytes"] - pool.total_bytes()}
    return found | {"streams": held["streams"], "graphs": held["graphs"]}
