"""Times of the phases of a training step on one rank, measured from the marks that strategy and engine set.

    input       the loader is asked -> training_step            waits for data, copies to the device
    forward     training_step -> backward
    backward    backward -> its last bucket is ready            the rank's own computing
    wait        last bucket ready -> all buckets averaged       other ranks and the network, see `CommTrace.waiting`
    optimizer   gradients averaged -> weights updated
    callbacks   weights updated -> the loader is asked          loggers, validation, and collectives of the loop

Marks are stamps of a `PhaseClock`: the host's, or events on a device, which are read when the device has passed them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from time import perf_counter
from typing import Any, Protocol


class Phase(Enum):
    """Phase of a training step."""

    INPUT = "input"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    CALLBACKS = "callbacks"
    WAIT = "wait"


class PhaseClock(Protocol):
    """Clock whose stamps may become readable later."""

    def stamp(self) -> Any:
        """Return a stamp of this moment."""

    def is_readable(self, stamp: Any) -> bool:
        """Return whether this stamp, and every earlier one, can be read without waiting."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the time between two readable stamps."""


class HostClock:
    """Clock of a rank whose device is the host."""

    def stamp(self) -> float:
        """Return the time now."""
        return perf_counter()

    def is_readable(self, stamp: float) -> bool:
        """Return True: a time is known at once."""
        return True

    def seconds(self, begin: float, end: float) -> float:
        """Return the time between two stamps."""
        return end - begin


StepTimes = Mapping[Phase, float]
"""Seconds of each phase in one step. They add up to the time of the step."""


class StepPhases:
    """Recorder of the phases of each step. Only one thread at a time may call it.

    Args:
        clock: Clock of the stamps.

    Attributes:
        current: Phase that has begun last.
    """

    def __init__(self, clock: PhaseClock) -> None:
        self.current = Phase.CALLBACKS
        self._clock = clock
        # Begin of each phase, in order, of the step that is being recorded.
        self._marks: list[tuple[Phase, Any]] = [(self.current, clock.stamp())]
        # Marks and end of the steps whose times have not been read yet.
        self._unread: deque[tuple[list[tuple[Phase, Any]], Any]] = deque()

    def __deepcopy__(self, memo: dict[int, Any]) -> StepPhases:
        return self  # A copy of a hooked module or of the trainer shares the recorder.

    def enter(self, phase: Phase) -> None:
        """Begin a phase, which ends the one before."""
        if phase is not self.current:
            self.current = phase
            self._marks.append((phase, self._clock.stamp()))

    def end_step(self) -> None:
        """End a step. The next one begins in the same phase."""
        end = self._clock.stamp()
        self._unread.append((self._marks, end))
        self._marks = [(self.current, end)]

    def take_steps(self) -> list[StepTimes]:
        """Return the times of the steps that have become readable, oldest first. Never waits."""
        steps: list[StepTimes] = []
        while self._unread and self._clock.is_readable(self._unread[0][1]):
            marks, end = self._unread.popleft()
            steps.append(self._times_of(marks, end))
        return steps

    def _times_of(self, marks: list[tuple[Phase, Any]], end: Any) -> StepTimes:
        times = dict.fromkeys(Phase, 0.0)
        ends = [begin for _, begin in marks[1:]]
        ends.append(end)
        for (phase, begin), phase_end in zip(marks, ends, strict=True):
            times[phase] += self._clock.seconds(begin, phase_end)
        return times
