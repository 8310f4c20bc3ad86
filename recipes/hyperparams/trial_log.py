"""Log of a search: one line of JSON per trial that ended, so that none runs twice."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

Status = Literal["done", "stopped", "diverged", "failed"]
Mode = Literal["min", "max"]


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """Result of one trial.

    Attributes:
        overrides: What this trial's configuration has instead of the study's; they name the trial.
        status: `done`; `stopped` early, as a loser; `diverged`, a loss that is not finite, or an accuracy that is no
            better than guessing at the end; `failed`, an error.
        reason: Why it was not done.
        value: Objective; None where there is none to compare.
        metrics: Everything measured at the end.
        curve: `(fraction of the run, objective)` of each validation on the way.
        wall_s: Duration.
    """

    overrides: tuple[str, ...]
    status: Status
    reason: str = ""
    value: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    curve: tuple[tuple[float, float], ...] = ()
    wall_s: float = 0.0

    @property
    def key(self) -> str:
        """Name of the trial; see `key_of`."""
        return key_of(self.overrides)


def key_of(overrides: Iterable[str]) -> str:
    """Return twelve letters that name a set of overrides, in whatever order they come.

    >>> key_of(["optim.lr=1", "seed=0"]) == key_of(["seed=0", "optim.lr=1"])
    True
    """
    return hashlib.sha256(json.dumps(sorted(overrides)).encode()).hexdigest()[:12]


def is_at_chance(accuracy: float, chance: float) -> bool:
    """Tell whether an accuracy is that of guessing, up to a tenth of it: classes are not equally frequent.

    A network whose units are all dead answers with one class, and its loss is finite.

    >>> is_at_chance(0.105, 0.1), is_at_chance(0.12, 0.1)
    (True, False)
    """
    return accuracy <= 1.1 * chance


def rank_of(outcome: TrialOutcome, *, mode: Mode = "min") -> tuple[int, float]:
    """Return a sort key, best first: finished trials by value, then stopped ones by value, then the rest.

    >>> lost = TrialOutcome(overrides=("a",), status="diverged", reason="loss is nan")
    >>> slow = TrialOutcome(overrides=("b",), status="stopped", value=0.1)
    >>> good = TrialOutcome(overrides=("c",), status="done", value=0.2)
    >>> [outcome.overrides[0] for outcome in sorted([lost, slow, good], key=rank_of)]
    ['c', 'b', 'a']
    """
    is_number = outcome.value is not None and math.isfinite(outcome.value)
    if outcome.status in ("diverged", "failed") or not is_number:
        return 2, 0.0
    assert outcome.value is not None
    return int(outcome.status == "stopped"), outcome.value if mode == "min" else -outcome.value


def best_of(outcomes: Iterable[TrialOutcome], *, mode: Mode = "min") -> TrialOutcome | None:
    """Return the best trial that was done; None if none was. Of equals the first."""
    done = [outcome for outcome in outcomes if rank_of(outcome, mode=mode)[0] == 0]
    return min(done, key=lambda outcome: rank_of(outcome, mode=mode), default=None)


class TrialLog:
    """Trials that ended, in memory and in a file that only grows.

    A line is written when a trial has ended, and not before: one that was killed leaves nothing and is run again. The
    half line of a write that was killed is dropped.

    Args:
        path: File, one JSON object per line; made if missing.
        fingerprint: Hash of all that the trials have in common. A file with another is refused.

    Raises:
        ValueError: The file belongs to other settings, or holds what is no trial.
    """

    def __init__(self, path: Path, *, fingerprint: str) -> None:
        self.path = path
        self.fingerprint = fingerprint
        self.outcomes: dict[str, TrialOutcome] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._read()

    def _read(self) -> None:
        text = self.path.read_text()
        # A kill within a write leaves half a line, which would spoil the next one.
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.path.write_text(whole)
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                values = json.loads(line)
                found = values.pop("fingerprint")
                values["overrides"] = tuple(values["overrides"])
                values["curve"] = tuple(tuple(point) for point in values["curve"])
                outcome = TrialOutcome(**values)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"`{self.path}` line {number} (={line[:60]!r}) must be a trial: {error}. Take the line out: its "
                    "trial is then run again."
                ) from None
            if self.fingerprint != found:
                raise ValueError(
                    f"`{self.path}` line {number} (fingerprint={found}) must come from the same settings as now "
                    f"(={self.fingerprint}): its trials would be compared with others than they ran against. Use "
                    "another directory, hydra.run.dir=..., or set everything as it was."
                )
            self.outcomes[outcome.key] = outcome

    def append(self, outcome: TrialOutcome) -> None:
        """Add a trial that ended."""
        self.outcomes[outcome.key] = outcome
        line = json.dumps(asdict(outcome) | {"fingerprint": self.fingerprint})
        with open(self.path, "a") as file:
            file.write(line + "\n")

    def of(self, overrides: Iterable[str]) -> TrialOutcome | None:
        """Return the trial with these overrides, if it has ended."""
        return self.outcomes.get(key_of(overrides))


def fingerprint_of(settings: Any) -> str:
    """Return eight letters that change with the settings, which must be plain data.

    >>> fingerprint_of({"a": 1, "b": 2}) == fingerprint_of({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]


def check_mode(mode: str) -> Mode:
    """Return `min` or `max`.

    Raises:
        ValueError: Another word.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"`mode` (={mode!r}) must be min, for a loss, or max, for an accuracy.")
    return cast(Mode, mode)
