"""`xformer gradcheck`: compare every gradient with finite differences, on every backend.

The column "reference" checks the ops as they are in `xformer/ops`, on NumPy. The other columns
check the kernels of a backend, and the references of ops without a kernel. Gradients are computed
in float64. On backends whose compiled kernels are for float32, they are computed in
float32 and compared with finite differences in float64.

With --exact, derivatives on dual numbers take the place of finite differences. With --digits N they
are computed in N digits. With --arrays all runs on another array library, beside NumPy.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from xformer import backends, dispatch
from xformer.backends import Backend
from xformer.cli import gradcheck_arrays, gradcheck_digits
from xformer.cli.open_model import enable_float64, kernels_of
from xformer.cli.parser import Parser
from xformer.cli.progress import each
from xformer.cli.table import table
from xformer.proofs.catalogue import Case, cases
from xformer.proofs.gradcheck import Report, Row

REFERENCE = "reference"
IN_FLOAT32 = ("numba", "mkl")  # no compiled kernels for float64, which runs on NumPy


def add_arguments(parser: Parser) -> None:
    """Add the options of `xformer gradcheck`."""
    add = parser.add_argument
    what = f"one or more of {', '.join((REFERENCE, *backends.NAMES))} (default: all that work here)"
    add("--backend", nargs="+", metavar="NAME", help=what)
    add("--only", default="", metavar="TEXT", help="check only cases with this in their name")
    dual = "compare with derivatives on dual numbers"
    what = f"{dual}, which have only rounding errors, on NumPy"
    add("--exact", action="store_true", help=what)
    what = f"{dual} in N digits, such as 50, and show the errors of float64 (extra digits)"
    add("--digits", type=int, metavar="N", help=what)
    what = "run everything on the arrays that `asarray` of a Python module makes, such as "
    what += "array_api_strict, and compare with NumPy"
    add("--arrays", metavar="MODULE", help=what)
    add("--verbose", action="store_true", help="show one row for each case")


def run(args: argparse.Namespace) -> int:
    """Print a table of the largest relative errors; return 1 if a gradient is wrong.

    Before the table, stderr gets the number of checks and the progress.
    """
    if args.arrays is not None:
        if args.exact or args.backend or args.digits is not None:
            raise ValueError("--arrays is not possible with --exact, --digits or --backend")
        return gradcheck_arrays.run(args.arrays, args.only, by_case=args.verbose)
    chosen = [case for case in cases() if args.only in case.name]
    if not chosen:
        raise ValueError(f"no case has {args.only!r} in its name")
    if args.digits is not None:
        if args.exact or args.backend:
            raise ValueError("--digits is not possible with --exact or --backend")
        return gradcheck_digits.run(chosen, args.digits, by_case=args.verbose)
    everywhere = [REFERENCE, "numpy"] if args.exact else [REFERENCE, *backends.available()]
    names = args.backend or everywhere
    if args.exact and set(names) & set(IN_FLOAT32):
        raise ValueError(f"--exact needs float64, got --backend {' '.join(names)}")
    for name in names:
        enable_float64(name, "float64")
    libraries = {name: backends.get("numpy" if name == REFERENCE else name) for name in names}
    work = [(case, name) for case in chosen for name in libraries]
    reports = {}
    compiles = "; the first run compiles numba's kernels" if "numba" in names else ""
    print(f"{len(work)} checks on {', '.join(names)}{compiles}", file=sys.stderr, flush=True)
    with _recorded() as ran:
        for case, name in each(work, "gradcheck", "checks"):
            with dispatch.reference_only() if name == REFERENCE else kernels_of(name):
                reports[case, name] = _check(case, libraries[name], exact=args.exact)

    print(_table(reports, names, by_case=args.verbose))
    failed = {key: report for key, report in reports.items() if not report.ok}
    for (_, name), report in failed.items():
        print(f"\n{name}: {report}")
    if set(IN_FLOAT32) & set(names):
        print(f"\ncompiled kernels that ran, in float32: {', '.join(sorted(ran)) or 'none'}")
    print(f"\n{len(reports)} checks, {len(failed)} failed")
    return 1 if failed else 0


def _check(case: Case, backend: Backend, *, exact: bool) -> Report:
    """Check all inputs together; if that fails, each input alone, to name the wrong gradient."""
    try:
        if backend.name in IN_FLOAT32:
            return case.check_float32(backend)
        report = case.check(backend, alone=False, exact=exact)
        return report if report.ok else case.check(backend, elementwise=0, exact=exact)
    except Exception as error:  # a case that fails to run is one failed row of the table
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        return Report(case.name, (Row("runs", 0.0, 0.0, float("inf"), message),), rtol=0.0)


@contextmanager
def _recorded() -> Iterator[set[str]]:
    """Yield a set that collects the names of ops whose compiled numba kernel has run.

    Inside, these kernels run for inputs of any size.
    """
    ran = set[str]()
    if backends.unavailable_reason("numba") is not None:
        yield ran
        return
    from xformer.backends.numba.single_op import Eager

    def noted(op: dispatch.Overridable[..., Any]) -> dispatch.Kernel:
        eager = Eager(op, least=0)

        def run(*args: Any, **options: Any) -> Any:
            ran.add(op.__name__)
            return eager(*args, **options)

        return dispatch.Kernel(run, "numba", eager.unsupported)

    ops = [op for op in dispatch.ops() if op.import_kernels("numba.kernels")]
    before = {op: op.import_kernels("numba") for op in ops}
    for op in ops:
        op.kernels["numba"] = [noted(op)]
    try:
        yield ran
    finally:
        for op, kernels in before.items():
            op.kernels["numba"] = kernels


def _table(reports: dict[tuple[Case, str], Report], names: list[str], *, by_case: bool) -> str:
    """The largest relative errors: a row for each case or subject, a column for each backend."""
    worst: dict[str, dict[str, float]] = {}
    for (case, name), report in reports.items():
        row = worst.setdefault(case.name if by_case else case.subject, dict.fromkeys(names, 0.0))
        row[name] = max(row[name], report.worst)
    rows = [(label, *(f"{row[name]:.0e}" for name in names)) for label, row in worst.items()]
    return table([("", *names), *rows])
