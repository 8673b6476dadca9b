"""The table of budgets, and the processes in which cases run. Nothing here imports CuPy.

budgets.json has a row for each case that returns numbers: calls of each kind, by the names of
`device`, of NVIDIA's libraries, and bytes. `python tests/null_device budgets --update` writes it.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BUDGETS = HERE / "budgets.json"
UPDATE = "python tests/null_device budgets --update"
QUICK = ("optimisers", "steps", "texts", "tokens")
SLOW = (
    *("device", "families", "families captured", "families in bfloat16", "optimisers captured"),
    *("options", "options captured", "steps in float16", "texts captured"),
)
GROUPS = QUICK + SLOW
SLACK = 0.02  # of bytes: how long locals are kept differs between versions of Python
OTHER_CUPY = 0.05, 2  # of all, with another CuPy than the table's; calls at least


def ran(group: str) -> list[dict[str, Any]]:
    """What became of the cases of a group, in a process of its own: as `cases.judged` yields it.

    RuntimeError where the process ends in another way.
    """
    command = [sys.executable, "-W", "error", str(HERE), "cases", group]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{' '.join(command)} ends with {done.returncode}:\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def require_refusal(said: list[str], refused: str | None) -> None:
    """AssertionError unless one warning holds `refused`, or there is none and `refused` is None."""
    assert len(said) == (refused is not None), said
    assert refused is None or refused in said[0], said


def budgets() -> dict[str, Any]:
    """CuPy's version, and the numbers of each case, under `group: case`."""
    found: dict[str, Any] = json.loads(BUDGETS.read_text(encoding="utf-8"))
    return found


def write(found: list[dict[str, Any]]) -> None:
    """Replaces the rows of the groups that these cases are of."""
    groups = {one["group"] for one in found}
    old = budgets()["cases"] if BUDGETS.exists() else {}
    rows = {key: row for key, row in old.items() if key.partition(": ")[0] not in groups}
    rows |= {_key(one): one["numbers"] for one in found if one["numbers"]}
    lines = [f"    {json.dumps(key)}: {json.dumps(rows[key])}" for key in sorted(rows)]
    head = f'{{\n  "cupy": {json.dumps(_version())},\n  "cases": {{\n'
    BUDGETS.write_text(head + ",\n".join(lines) + "\n  }\n}\n", encoding="utf-8")


def faults(found: list[dict[str, Any]], table: dict[str, Any]) -> list[str]:
    """Errors of the cases of one group, and where their numbers are not the table's."""
    said = [f"{_key(one)}: {one['error']}" for one in found if one["error"]]
    same = _version().split(".")[:2] == table["cupy"].split(".")[:2]
    for one in found:
        row = table["cases"].get(_key(one), {})
        if not one["error"]:
            said += [f"{_key(one)}: {why}" for why in _differences(one["numbers"] or {}, row, same)]
    (group,) = {one["group"] for one in found}
    keys = {key for key in table["cases"] if key.partition(": ")[0] == group}
    gone = keys - {_key(one) for one in found}
    return said + [f"{key}: the table has a row, and there is no such case" for key in sorted(gone)]


def _differences(new: dict[str, int], old: dict[str, int], same: bool) -> list[str]:
    said = []
    for name in sorted(old.keys() | new.keys()):
        before, now = old.get(name, 0), new.get(name, 0)
        slack = before * SLACK if name.endswith("bytes") else 0
        if not same:
            slack = max(before * OTHER_CUPY[0], OTHER_CUPY[1])
        if abs(now - before) > slack:
            said.append(f"{name}: {now:,}, in the table {before:,}")
    return said


def _key(one: dict[str, Any]) -> str:
    return f"{one['group']}: {one['case']}"


def _version() -> str:
    return importlib.metadata.version("cupy-cuda13x")
