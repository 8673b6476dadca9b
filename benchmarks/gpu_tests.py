"""A section of `benchmarks.gpu`: the kernels' tests."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT

STOPPING = 20  # seconds for pytest to write its report after the interrupt


def tested(tests: Sequence[str], wrong: list[str], seconds: float) -> dict[str, int]:
    """Run pytest for at most `seconds`; return how many tests passed, failed and were skipped.

    tests: arguments of pytest
    wrong: a line is appended for each failed test, and one if time was over.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tests.xml"
        options = ("-q", "-p", "no:cacheprovider", f"--junitxml={path}")
        command = [sys.executable, "-m", "pytest", *options, *tests]
        output, stopped = outcome(command, seconds)
        if stopped:
            wrong.append(f"tests: stopped after {seconds:.0f} s, the rest did not run")
        if not path.is_file():
            raise RuntimeError(f"pytest: {output[-2000:]}")
        cases = list(ElementTree.parse(path).iter("testcase"))
    failed = [c for c in cases if c.findall("failure") or c.findall("error")]
    skipped = [c for c in cases if c.findall("skipped")]
    wrong += [f"tests: {c.get('classname')}.{c.get('name')} failed" for c in failed]
    passed = len(cases) - len(failed) - len(skipped)
    if not passed:
        raise RuntimeError(f"pytest: no test passed\n{output[-2000:]}")
    return {"passed": passed, "failed": len(failed), "skipped": len(skipped)}


def outcome(command: Sequence[str], seconds: float) -> tuple[str, bool]:
    """Run `command`; return its output, and whether it was interrupted after `seconds`.

    After the interrupt it has STOPPING seconds to write its report; then it is killed.
    """
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        try:
            return process.communicate(timeout=seconds)[0], False
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=STOPPING)[0], True
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate()[0], True
