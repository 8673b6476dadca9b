"""Sums as a binary tree, so that the bits do not depend on who adds which part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class PairwiseSum:
    """A sum of terms that arrive one after the other: ((0 + 1) + (2 + 3)) + ...

    plus: adds two terms

    The terms of any block of 2^k, from a multiple of 2^k on, are added first. So several processes
    that each add a block get the same bits if they add their sums in the same way. At most
    log2(n) + 1 sums are in memory.
    """

    def __init__(self, plus: Callable[[Any, Any], Any]) -> None:
        self.plus = plus
        self._sums: list[tuple[int, Any]] = []  # (number of terms, their sum), the largest first

    def add(self, term: Any) -> None:
        """Add the next term."""
        n = 1
        while self._sums and self._sums[-1][0] == n:
            term = self.plus(self._sums.pop()[1], term)
            n *= 2
        self._sums.append((n, term))

    def total(self) -> Any:
        """The sum of all terms, of which there is at least one. Nothing can be added later."""
        _, total = self._sums.pop()
        while self._sums:
            total = self.plus(self._sums.pop()[1], total)
        return total
