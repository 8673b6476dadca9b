"""Real CuPy on a device that computes nothing: no call raises, nothing waits, nothing is left.

Launches, copies and bytes of a step and of a token are those of tests/null_device/budgets.json: a
change that is meant to change them writes the table anew, as docs/cuda-testing.md says.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from null_device import build, table

TABLE_ONLY = {"cupy": "0.0.0", "cases": {"group: case": {"launch": 100, "peak bytes": 1000}}}


def require_device() -> None:
    if why := build.missing():
        pytest.skip(f"there is no null device under CuPy: {why}")


@pytest.mark.parametrize(
    "group",
    [*table.QUICK, *(pytest.param(group, marks=pytest.mark.slow) for group in table.SLOW)],
)
def test_cases(group: str) -> None:
    require_device()
    said = table.faults(table.ran(group), table.budgets())
    assert not said, f"(where it is meant to be so: {table.UPDATE})\n" + "\n".join(said)


def test_a_case_that_differs() -> None:
    """Calls by any number, bytes by more than their slack; rows without a case, cases without."""
    found = {"group": "group", "case": "case", "error": None, "numbers": {}}
    version = table._version() if not build.missing() else None
    if version is None:
        pytest.skip(f"there is no null device under CuPy: {build.missing()}")
    own = {"cupy": version, "cases": TABLE_ONLY["cases"]}

    def said(numbers: dict[str, int], of: dict[str, object] = own, **other: object) -> list[str]:
        return table.faults([{**found, "numbers": numbers, **other}], of)

    assert not said({"launch": 100, "peak bytes": 1019})
    assert said({"launch": 101, "peak bytes": 1000}) == [
        "group: case: launch: 101, in the table 100"
    ]
    assert len(said({"launch": 100, "peak bytes": 1021, "wait": 1})) == 2
    assert said({}, error="it raises")[0] == "group: case: it raises"
    assert "no such case" in said({}, case="another")[-1]
    assert not said({"launch": 104, "peak bytes": 1040}, TABLE_ONLY)  # counted with another CuPy
    assert len(said({"launch": 106, "peak bytes": 1060}, TABLE_ONLY)) == 2


def test_a_graph_that_is_missing_is_said_once() -> None:
    """What cannot be captured must say so, and what can be must not."""
    table.require_refusal([], None)
    table.require_refusal(["no graph: cuBLAS while it is captured"], "cuBLAS")
    for said, refused in (([], "cuBLAS"), (["no graph"], None), (["no"], "cuBLAS")):
        with pytest.raises(AssertionError):
            table.require_refusal(said, refused)
    with pytest.raises(AssertionError):
        table.require_refusal(["cuBLAS", "cuBLAS"], "cuBLAS")


def test_a_step_by_kernel() -> None:
    """The command that counts what a step of given sizes launches, and from where."""
    require_device()
    sizes = {"layers": 1, "width": 32, "heads": 2, "vocabulary": 50, "batch": 2, "length": 16}
    options = [f"--{name}={size}" for name, size in sizes.items()]
    command = [sys.executable, "-W", "error", str(table.HERE), "step", *options, "--by", "function"]
    done = subprocess.run(
        [*command, "--with", "cublaslt"], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["wait", "0"] in rows and ["cublaslt", "19"] in rows
    assert ["1", "adamw", "backends.cupy.adamw.adam_update"] in rows


def test_it_comes_before_cupy() -> None:
    """In a process that has CuPy already nothing is replaced: that is an error."""
    require_device()
    code = "import sys; sys.modules['cupy'] = None; import null_device.device"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=table.HERE.parent, capture_output=True, text=True
    )
    assert "the null device comes before CuPy" in done.stderr
