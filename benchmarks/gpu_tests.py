"""The kernels' tests, as a section of `benchmarks.gpu`."""

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

STOPPING = 20  # seconds that pytest has to say what it has found


def tested(tests: Sequence[str], wrong: list[str], seconds: float) -> dict[str, int]:
    """How many tests passed, failed, were skipped, of those that the time was enough for.

    tests: arguments of pytest. wrong: there to name what failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tests.xml"
        options = ("-q", "-p", "no:cacheprovider", f"--junitxml={path}")
        command = [sys.executable, "-m", "pytest", *options, *tests]
        said, over = outcome(command, seconds)
        if over:
            wrong.append(f"tests: stopped after {seconds:.0f} s, the rest did not run")
        if not path.is_file():
            raise RuntimeError(f"pytest: {said[-2000:]}")
        cases = list(ElementTree.parse(path).iter("testcase"))
    bad = [c for c in cases if c.findall("failure") or c.findall("error")]
    skipped = [c for c in cases if c.findall("skipped")]
    wrong += [f"tests: {c.get('classname')}.{c.get('name')} failed" for c in bad]
    passed = len(cases) - len(bad) - len(skipped)
    if not passed:
        raise RuntimeError(f"pytest: no test passed\n{said[-2000:]}")
    return {"passed": passed, "failed": len(bad), "skipped": len(skipped)}


def outcome(command: Sequence[str], seconds: float) -> tuple[str, bool]:
    """What a program says, and whether it was stopped: it may still write what it has found."""
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
