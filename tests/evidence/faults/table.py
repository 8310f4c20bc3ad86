"""Outcomes of injected faults, one per case, as a table and as JSON."""

import csv
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lightning_hybrid.callbacks.run_report.environment import environment
from lightning_hybrid.formatting import markdown_table
from recipes.cli.results import write_json

HEADER = ("promise", "fault", "phase", "where", "detected by", "s to the error", "lost", "held")


@dataclass(frozen=True, kw_only=True)
class FaultOutcome:
    """Result of one injected fault.

    `promise`: what must hold in any case, in a word or two. `fault`: what was done to the run. `phase`: phase of the
    run in which it was done. `where`: affected rank, host or file. `detected_by`: who or what noticed, with its own
    message if it has one. `seconds`: time from the fault to the error, or None if the run continued as promised.
    `lost`: steps, or "nothing". `is_held`: whether the promise was kept, as judged by the case and not by a person.

        >>> outcome = FaultOutcome(promise="named", fault="a rank dies", phase="backward", where="rank 1",
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

    def cells(self) -> list[str]:
        """Format one row of the table."""
        content = [self.promise, self.fault, self.phase, self.where, self.detected_by]
        content = [" ".join(cell.split()).replace("|", "\\|") for cell in content]
        if self.seconds is None:
            seconds = "survived"
        else:
            seconds = f"{self.seconds:.1f}"
        return [*content, seconds, self.lost, "yes" if self.is_held else "NO"]


def markdown(outcomes: Sequence[FaultOutcome]) -> str:
    """Format the table, and a line with the number of promises that were kept.

    >>> outcome = FaultOutcome(promise="p", fault="f", phase="b", where="w", detected_by="d", seconds=None, lost="-",
    ...                   is_held=False)
    >>> print(markdown([outcome]).splitlines()[-1])
    0 of 1 held.
    """
    table = markdown_table(HEADER, [outcome.cells() for outcome in outcomes])
    num_held = sum(outcome.is_held for outcome in outcomes)
    return f"{table}\n\n{num_held} of {len(outcomes)} held."


def write_table(
    folder: Path, outcomes: Sequence[FaultOutcome], *, config: dict[str, Any], title: str
) -> None:
    """Write `table.md`, `table.csv` and `faults.json` with configuration and versions into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(f"{title}\n\n{markdown(outcomes)}\n")
    with open(folder / "table.csv", "w", newline="") as file:
        writer = csv.DictWriter(
            file, [field.name for field in fields(FaultOutcome)], lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(asdict(outcome) for outcome in outcomes)
    content = {
        "title": title,
        "config": config,
        "environment": environment(Path(__file__).parent),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    write_json(folder / "faults.json", content)


def record(
    outcomes_to_come: Iterable[FaultOutcome], folder: Path, *, config: dict[str, Any], title: str
) -> None:
    """Print each outcome and update the table. Exit with status 1 if a promise was broken."""
    outcomes = list[FaultOutcome]()
    for outcome in outcomes_to_come:
        outcomes.append(outcome)
        print("  ".join(outcome.cells()), flush=True)
        write_table(folder, outcomes, config=config, title=title)
    print(f"\n{markdown(outcomes)}\n\nwritten to {folder.resolve()}", flush=True)
    if not all(outcome.is_held for outcome in outcomes):
        sys.exit(1)


def chosen_of(
    cases: Sequence[Any], only: Sequence[str] | None, part: str | None = None
) -> list[Any]:
    """Return the cases whose fault is in `only` (None: all), and the run without a fault.

    `part`, such as "2/16", selects every 16th of these from number 2 on, and the run without a fault.

    Raises:
        ValueError: The fault or the part does not exist.
    """
    faults = dict.fromkeys(case.fault for case in cases)
    for fault in only or ():
        if fault not in faults:
            raise ValueError(
                f"`only` (={fault}) must be faults of {', '.join(faults)}. Leave `only` out for all of them."
            )
    chosen = [case for case in cases if only is None or case.fault in ("none", *only)]
    if part is None:
        return chosen
    first, _, num = part.partition("/")
    if not (first.isdecimal() and num.isdecimal() and int(first) < int(num)):
        raise ValueError(
            f"`part` (={part}) must be k/n with k below n: every n-th case from number k on. Set part=0/16."
        )
    return [
        case for i, case in enumerate(chosen) if case.fault == "none" or i % int(num) == int(first)
    ]
