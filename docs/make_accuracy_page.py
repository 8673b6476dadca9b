"""Write the generated tables of docs/accuracy.md: digits of gradients, and errors of float64.

python -m docs.make_accuracy_page

It needs the extra digits and takes a minute. tests/test_digits.py compares the page with what this
would write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from xformer.proofs.catalogue import Case, cases
from xformer.proofs.digits import CONSTANTS, accuracy

PAGE = Path(__file__).resolve().parent / "accuracy.md"
DIGITS = 50
HEAD = "digits", "y", "gradients", "y, kernels", "gradients, kernels", "constants in float64"


def page() -> str:
    """The text of docs/accuracy.md with its generated tables made anew."""
    text = PAGE.read_text(encoding="utf-8")
    for group in ("ops", "layers", "models"):
        lines = [(group.removesuffix("s"), *HEAD), ("---", *["---:"] * 5, "---")]
        lines += rows([case for case in cases() if case.group == group])
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        before, begin, rest = text.partition(f"<!-- {group} -->\n")
        text = f"{before}{begin}{table}\n{''.join(rest.partition('<!-- end -->')[1:])}"
    return text


def rows(chosen: Iterable[Case]) -> Iterator[tuple[str, ...]]:
    """The cells of a row for each subject of the cases."""
    groups: dict[str, list[Case]] = {}
    for case in chosen:
        groups.setdefault(case.subject, []).append(case)
    for subject, group in groups.items():
        found = [accuracy(case, DIGITS) for case in group]
        columns = zip(*((*each.reference, *each.kernels) for each in found), strict=True)
        shown = (f"{error:.1e}" if error else "0" for error in map(max, columns))
        agreed = min(each.agreed for each in found)
        yield f"`{subject}`", str(agreed), *shown, CONSTANTS.get(subject, "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
