"""Tracker that detects findings which persist over several consecutive windows of steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key")
Finding = TypeVar("Finding")


class Streaks(Generic[Key, Finding]):
    """Tracker that detects keys that have a finding in each of several consecutive windows.

    Args:
        length: Number of consecutive windows that make a streak.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._recent: dict[Key, deque[Finding | None]] = {}

    def add(
        self,
        findings: Mapping[Key, Finding],
    ) -> dict[Key, list[Finding]]:
        """Add the findings of a window, and return the findings of each complete streak by key.

        A streak is complete if its key had a finding in each of the last `length` windows.
        """
        for key in findings:
            if key not in self._recent:
                self._recent[key] = deque(maxlen=self._length)

        complete = {}
        for key, recent in self._recent.items():
            recent.append(findings.get(key))
            present = []
            for finding in recent:
                if finding is not None:
                    present.append(finding)
            if len(present) == self._length:
                complete[key] = present
        return complete

    def take_ended(self) -> list[Key]:
        """Remove and return the keys that have had no finding in the last `length` windows."""
        ended = []
        for key, recent in self._recent.items():
            has_finding = any(finding is not None for finding in recent)
            if len(recent) == self._length and not has_finding:
                ended.append(key)
        for key in ended:
            del self._recent[key]
        return ended
