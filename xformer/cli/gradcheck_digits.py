"""`xformer gradcheck --digits N`: every gradient to N digits, and the errors of float64."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence

from xformer.arrays.digits import require_digits
from xformer.cli import progress
from xformer.cli.table import Row, table
from xformer.proofs.catalogue import Case
from xformer.proofs.digits import CONSTANTS, Accuracy, Errors, accuracy

HEAD: Row = ("", "digits", "reference y", "gradients", "kernels y", "gradients")


def run(cases: Sequence[Case], n: int, *, by_case: bool) -> int:
    """Print a table of digits and of errors in float64; return 1 if a gradient is wrong."""
    require_digits(n)
    found = [_measured(case, n) for case in progress.each(cases, f"gradcheck, {n} digits", "cases")]
    print(errors(found, by_case=by_case))
    subjects = dict.fromkeys(each.case.subject for each in found if each.ok and each.agreed < n)
    if subjects:
        print(f"\nfewer than {n} digits because of constants in float64:")
        print("\n".join(f"  {subject}: {CONSTANTS[subject]}" for subject in subjects))
    failed = [each for each in found if not each.ok]
    for each in failed:
        print(f"\n{each.case.name}: the gradients agree to {each.agreed} digits only")
    print(f"\n{len(found)} checks, {len(failed)} failed")
    return 1 if failed else 0


def errors(found: Sequence[Accuracy], *, by_case: bool) -> str:
    """A row for each case or subject: digits that agree, and the largest errors of float64."""
    groups: dict[str, list[Accuracy]] = {}
    for each in found:
        groups.setdefault(each.case.name if by_case else each.case.subject, []).append(each)
    rows = [HEAD]
    for label, group in groups.items():
        columns = zip(*((*each.reference, *each.kernels) for each in group), strict=True)
        agreed = min(each.agreed for each in group)
        rows.append((label, str(agreed), *(f"{max(column):.1e}" for column in columns)))
    return table(rows)


def _measured(case: Case, n: int) -> Accuracy:
    """What a case shows; if it fails to run, no digit agrees."""
    try:
        return accuracy(case, n)
    except Exception:
        traceback.print_exc()
        failed = Errors(math.inf, math.inf)
        return Accuracy(case, n, math.inf, failed, failed)
