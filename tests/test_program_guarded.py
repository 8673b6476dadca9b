"""Native kernels touch nothing but what their instructions name: memory around it kills a process.

Each buffer of a program has pages of its own, with a page before or behind it that nobody may read.
Case by case in a process that would end with a signal: ops, and some models, in float32 and in two
pieces.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba", reason="needs extra numba")

from test_program import CASES, MODELS, Both

from xformer.backends.numba.program import program
from xformer.backends.numba.program.binding import Code, Memory
from xformer.backends.numba.program.run import Recorded

GUARDED = [case for case in CASES if case.group == "ops"] + MODELS[::6]
PAGE = mmap.PAGESIZE
PROT_NONE = 0


class Guarded:
    """Memory of so many bytes that begins, or ends, where a page begins that nobody may touch."""

    def __init__(self, nbytes: int, *, behind: bool) -> None:
        n = -(-max(nbytes, 1) // PAGE) * PAGE
        self.pages = mmap.mmap(-1, n + PAGE)
        raw = np.frombuffer(self.pages, np.uint8)
        at = raw.ctypes.data + (n if behind else 0)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(PAGE), PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
        begin = n - nbytes if behind else PAGE
        self.memory = raw[begin : begin + nbytes]


def guarded(recorded: Recorded, inputs: list[np.ndarray], *, behind: bool) -> None:
    """One run in guarded memory."""
    buffers = [*recorded._inputs, *recorded._outputs, *recorded.plan.offsets]
    kept = {buffer: Guarded(buffer.nbytes, behind=behind) for buffer in buffers}
    memory = {buffer: own.memory for buffer, own in kept.items()}
    for buffer, x in zip(recorded._inputs, inputs, strict=True):
        memory[buffer][:] = np.frombuffer(x.tobytes(), np.uint8)
    run = Code(recorded.code, {}, recorded.threads)  # no arena: each buffer lies by itself
    run(Memory(np.empty(1, np.uint8), {}, memory))


def main() -> None:
    """All of them; the last line names the one that is under way."""
    faulthandler.enable()
    program.WORTH = 0
    for case in GUARDED:
        print(case.name, flush=True)
        both = Both(case, "float32")
        for behind in (False, True):
            guarded(both.recorded, [np.ascontiguousarray(x) for x in both.inputs], behind=behind)
    print("all", flush=True)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are guarded on Linux alone")
def test_kernels() -> None:
    own = Path(__file__)
    done = subprocess.run(
        [sys.executable, "-c", "import test_program_guarded as own; own.main()"],
        cwd=own.parent,
        capture_output=True,
        text=True,
    )
    last = (done.stdout.splitlines() or ["nothing"])[-1]
    assert (done.returncode, last) == (0, "all"), f"{last}\n{done.stderr[-3000:]}"


@pytest.mark.skipif(sys.platform != "linux", reason="pages are guarded on Linux alone")
@pytest.mark.parametrize("behind", [False, True])
def test_the_guard(behind: bool) -> None:
    """A read of one byte outside ends a process."""
    line = f"own.Guarded(100, behind={behind}).memory"
    outside = f"ctypes.string_at({line}.ctypes.data + {100 if behind else -1}, 1)"
    done = subprocess.run(
        [sys.executable, "-c", f"import ctypes, test_program_guarded as own; {outside}"],
        cwd=Path(__file__).parent,
        capture_output=True,
    )
    assert done.returncode < 0
