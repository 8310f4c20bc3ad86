"""Published all-reduces between nodes against the model, by class: `python -m tests.evidence.planner.between_nodes`.

`between_nodes.csv` has rows of nccl-tests with their sources (addresses on GitHub). `before_us` is what the model said
before NCCL's limits per channel, chunks and fabrics were in it (commit c84df1b9). Sources were halved before that
change: a source is read where the first byte of the SHA-256 of its name is even, and unread where it is odd.
"""

from __future__ import annotations

import csv
import hashlib
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
ROWS = Path(__file__).with_name("between_nodes.csv")
SIZES = ("below 1 MiB", "1 to 64 MiB", "above 64 MiB")


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """One measured all-reduce; columns as in the file."""

    values: dict[str, str]

    @property
    def source(self) -> str:
        """Where it was published."""
        return self.values["source"]

    @property
    def fabric(self) -> str:
        """The network."""
        return self.values["fabric"]

    @property
    def num_bytes(self) -> float:
        """What was summed."""
        return float(self.values["bytes"])

    @property
    def size(self) -> str:
        """The class of its size."""
        return SIZES[(self.num_bytes >= MIB) + (self.num_bytes > 64 * MIB)]

    @property
    def is_unread(self) -> bool:
        """Whether its source is in the half that nothing was looked up in or fitted to."""
        return hashlib.sha256(self.source.encode()).digest()[0] % 2 == 1


def rows() -> list[MeasuredRow]:
    """Read the file."""
    with ROWS.open() as file:
        return [MeasuredRow(values=row) for row in csv.DictReader(file)]


def table(found: Iterable[MeasuredRow], models: dict[str, Callable[[MeasuredRow], float]]) -> str:
    """Format median and worst errors of each model (seconds of a row), by fabric and class of size."""
    groups = defaultdict[tuple[str, str], list[MeasuredRow]](list)
    for row in found:
        groups[row.fabric, row.size].append(row)
    titles = [f"{name}, {what}" for name in models for what in ("median", "worst")]
    lines = [
        "| " + " | ".join(["fabric", "bytes", "sources", "rows", *titles]) + " |",
        "|---" * (4 + len(titles)) + "|",
    ]
    for (fabric, size), members in sorted(groups.items(), key=lambda item: (item[0][0], SIZES.index(item[0][1]))):
        cells = [fabric, size, str(len({row.source for row in members})), str(len(members))]
        for model in models.values():
            errors = [abs(math.log(float(row.values["time_us"]) / 1e6 / model(row))) for row in members]
            cells += [f"{math.exp(statistics.median(errors)) - 1:.0%}", f"{math.exp(max(errors)):.2f}x"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def before_s(row: MeasuredRow) -> float:
    """Return what the model said before."""
    return float(row.values["before_us"]) / 1e6


if __name__ == "__main__":
    for is_unread in (False, True):
        print("unread half" if is_unread else "read half", sep="\n")
        print(table((row for row in rows() if row.is_unread == is_unread), {"before": before_s}), end="\n\n")
