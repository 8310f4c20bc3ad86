"""What became of each injected fault: one outcome per case; a table, and JSON of all of them."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lightning_hybrid.callbacks.run_report.environment import environment
from recipes.cli.markdown import markdown_table
from recipes.cli.results import write_json

HEADER = ("promise", "fault", "phase", "where", "detected by", "s to the error", "lost", "held")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One fault, injected once.

    ``promise``: what is to be true whatever happens, in a word or two. ``fault``: what was done to the run. ``phase``:
    of the run, when it was done. ``where``: to which rank, host or file. ``detected_by``: who or what noticed, in its
    own words where it has any. ``seconds``: from the fault to the error; None where the run went on, as promised.
    ``lost``: steps, or "nothing". ``is_held``: whether the promise was kept, judged by the case, not by a person.

    Raises ``ValueError`` where a word is missing, or where ``seconds`` is negative: such a row tells nothing.

    >>> outcome = Outcome(promise="named", fault="a rank dies", phase="backward", where="rank 1",
    ...                   detected_by="rank 0", seconds=1.26, lost="1 step", is_held=True)
    >>> outcome.cells()[-3:]
    ['1.3', '1 step', 'yes']
    """

    promise: str
    fault: str
    phase: str
    where: str
    detected_by: str
    seconds: float | None
    lost: str
    is_held: bool

    def __post_init__(self) -> None:
        for name in ("promise", "fault", "phase", "where", "detected_by", "lost"):
            if not getattr(self, name).strip():
                raise ValueError(f"`{name}` (={getattr(self, name)!r}) must say something: it is a cell of the table.")
        if self.seconds is not None and not self.seconds >= 0:
            raise ValueError(f"`seconds` (={self.seconds}) must be at least 0, or None where there was no error.")

    def cells(self) -> list[str]:
        """One row of the table."""
        told = [self.promise, self.fault, self.phase, self.where, self.detected_by]
        told = [" ".join(cell.split()).replace("|", "\\|") for cell in told]
        seconds = "survived" if self.seconds is None else f"{self.seconds:.1f}"
        return [*told, seconds, self.lost, "yes" if self.is_held else "NO"]


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The table, and a line on how many promises were held.

    >>> outcome = Outcome(promise="p", fault="f", phase="b", where="w", detected_by="d", seconds=None, lost="nothing",
    ...                   is_held=False)
    >>> print(markdown([outcome]).splitlines()[-1])
    0 of 1 held.
    """
    table = markdown_table(HEADER, [outcome.cells() for outcome in outcomes])
    num_held = sum(outcome.is_held for outcome in outcomes)
    return f"{table}\n\n{num_held} of {len(outcomes)} held."


def write(folder: Path, outcomes: Sequence[Outcome], *, config: dict[str, Any], title: str) -> None:
    """``table.md``, ``table.csv`` and ``faults.json`` with configuration and versions, in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(f"{title}\n\n{markdown(outcomes)}\n")
    with open(folder / "table.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Outcome)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(outcome) for outcome in outcomes)
    told = {
        "title": title,
        "config": config,
        "environment": environment(Path(__file__).parent),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    write_json(folder / "faults.json", told)


def read(path: Path) -> list[Outcome]:
    """The outcomes in a ``faults.json``."""
    return [Outcome(**each) for each in json.loads(path.read_text())["outcomes"]]
