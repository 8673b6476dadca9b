"""`xformer gradcheck --arrays MODULE`: every op, layer, model and optimiser on other arrays."""

from __future__ import annotations

from xformer.backends import Backend
from xformer.cli.progress import each
from xformer.cli.table import table
from xformer.proofs.foreign import RTOL, Work, distance, foreign, missing, works


def run(module: str, only: str, *, by_case: bool) -> int:
    """Print what is missing, and a table of distances from NumPy; return 1 after a failure."""
    backend = foreign(module)
    (dtype,) = backend.dtypes
    print(f"{module} {backend.version} in {dtype}, beside NumPy")
    lacks = missing(backend)
    if lacks:
        print(f"missing: {', '.join(lacks)}")
    chosen = [work for work in works() if only in work.name]
    if not chosen:
        raise ValueError(f"no case or optimiser has {only!r} in its name")
    found = [(work, *_measured(work, backend)) for work in each(chosen, "gradcheck", "cases")]
    print(_table(found, by_case=by_case))
    failed: dict[str, list[str]] = {}
    for work, _, why in found:
        if why:
            failed.setdefault(why, []).append(work.name)
    for why, names in failed.items():
        others = f", and {len(names) - 1} others" if names[1:] else ""
        print(f"\n{why}\n  {names[0]}{others}")
    n_failed = sum(map(len, failed.values()))
    print(f"\n{len(found)} checks, {n_failed} failed")
    return 1 if lacks or n_failed else 0


def _measured(work: Work, backend: Backend) -> tuple[float, str]:
    """The distance from NumPy's result, and why it is a failure; "" if it is none."""
    try:
        error = distance(work, backend)
    except Exception as raised:  # the library is any code
        said = str(raised).partition("\n")[0]
        return float("inf"), f"{type(raised).__name__}: {said:.200}"
    return error, "" if error <= RTOL[backend.dtypes[0]] else "the result differs from NumPy's"


def _table(found: list[tuple[Work, float, str]], *, by_case: bool) -> str:
    """A row for each case or subject: checks that passed, and the largest error of these."""
    rows: dict[str, list[tuple[float, str]]] = {}
    for work, error, why in found:
        rows.setdefault(work.name if by_case else work.subject, []).append((error, why))
    lines = [("", "passed", "error")]
    for label, results in rows.items():
        passed = [error for error, why in results if not why]
        worst = f"{max(passed):.0e}" if passed else "-"
        lines.append((label, f"{len(passed)} / {len(results)}", worst))
    return table(lines)
