"""The honest count: how many cases there were, and how they went."""

from __future__ import annotations

from collections import Counter

OUTCOMES = ("bit-equal", "close", "refused in words", "deliberately different", "fails")


class Tally:
    """Counts outcomes by precision.

    >>> tally = Tally()
    >>> tally.count("32-true", "bit-equal"), tally.count("16-true", "close"), tally.count("16-true", "fails")
    (None, None, None)
    >>> print(tally.table())
    32-true: 1 case: 1 bit-equal
    16-true: 2 cases: 1 close, 1 fails
    """

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}

    def count(self, precision: str, outcome: str) -> None:
        self.counts.setdefault(precision, Counter())[outcome] += 1

    def table(self) -> str:
        return "\n".join(f"{precision}: {self._line(counts)}" for precision, counts in self.counts.items())

    def _line(self, counts: Counter[str]) -> str:
        number = sum(counts.values())
        parts = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
        return f"{number} case{'s' if number > 1 else ''}: {parts}"


TALLY = Tally()
