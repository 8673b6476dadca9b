"""`xformer warm-up`: compile the kernels of backend numba ahead of their first use."""

from __future__ import annotations

import argparse
import time

from xformer import backends
from xformer.cli.parser import Parser
from xformer.cli.progress import each


def add_arguments(parser: Parser) -> None:
    """Add the description of `xformer warm-up`; it has no options."""
    parser.description = (
        "numba compiles each kernel at its first use and keeps the machine code. This command "
        "compiles all kernels now, so that no later command waits for them."
    )


def run(args: argparse.Namespace) -> int:
    """Compile what is not stored; print how much that was, the seconds, and the folder."""
    start = time.perf_counter()
    backends.get("numba")  # raises if numba is missing
    from xformer.backends.numba import jit, warm_up

    before = jit.counts["compiled"]
    for compilation in each(warm_up.compilations(), "compiling", "kernels"):
        compilation()
    n, folder = jit.counts["compiled"] - before, jit.folder()
    if n == 0:
        print(f"nothing to compile: the machine code of all kernels is in {folder}")
    else:
        seconds = time.perf_counter() - start
        print(f"{n} kernels compiled in {seconds:.0f} s; the machine code is in {folder}")
    return 0
