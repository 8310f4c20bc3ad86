"""Timing of the phases of a training step on one rank.

    input       next batch requested -> training_step           waits for data, copies to the device
    forward     training_step -> backward
    backward    backward -> its last bucket is ready            computation of this rank
    wait        last bucket ready -> all buckets averaged       other ranks and the network, see `CommTrace.waiting`
    optimizer   gradients averaged -> weights updated
    callbacks   weights updated -> next batch requested         loggers, validation, and collectives of the loop

The strategy and the engine mark the beginning of each phase with a timestamp of a `PhaseClock`. A timestamp is either a
time on the host, or a device event, which is read once the device has reached it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from time import perf_counter
from typing import Any, Protocol


class Phase(Enum):
    """Phase of a training step, such as the forward pass or waiting for other ranks."""

    INPUT = "input"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    CALLBACKS = "callbacks"
    WAIT = "wait"


class PhaseClock(Protocol):
    """Interface of a clock whose timestamps may not be readable immediately, such as CUDA events."""

    def stamp(self) -> Any:
        """Take a timestamp."""

    def is_readable(self, stamp: Any) -> bool:
        """Return whether a timestamp and all earlier timestamps can be read without waiting."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the number of seconds between two readable timestamps."""


class HostClock:
    """Clock of the host, for ranks that train on a CPU."""

    def stamp(self) -> float:
        """Return the current time in seconds."""
        return perf_counter()

    def is_readable(self, stamp: float) -> bool:
        """Return True, because host timestamps are always readable."""
        return True

    def seconds(self, begin: float, end: float) -> float:
        """Return the number of seconds between two timestamps."""
        return end - begin


StepTimes = Mapping[Phase, float]
"""Duration of each phase of one step in seconds. The durations add up to the time of the step."""


class StepPhases:
    """Recorder of the time spent in each phase of a training step.

    Only one thread may call its methods at a time.

    Args:
        clock: Clock of the timestamps.

    Attributes:
        current: Phase that began last.
    """

    def __init__(self, clock: PhaseClock) -> None:
        self.current = Phase.CALLBACKS
        self._clock = clock
        # Beginning of each phase of the current step, in order.
        self._marks: list[tuple[Phase, Any]] = [(self.current, clock.stamp())]
        # Marks and end of each step whose times have not been read yet.
        self._unread: deque[tuple[list[tuple[Phase, Any]], Any]] = deque()

    def __deepcopy__(self, memo: dict[int, Any]) -> StepPhases:
        return self  # Copies of a hooked module or of the trainer share the recorder.

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin another one."""
        if phase is not self.current:
            self.current = phase
            self._marks.append((phase, self._clock.stamp()))

    def end_step(self) -> None:
        """End the current step, and begin the next step in the same phase."""
        end = self._clock.stamp()
        self._unread.append((self._marks, end))
        self._marks = [(self.current, end)]

    def take_steps(self) -> list[StepTimes]:
        """Remove and return the phase times of all steps that are readable, oldest first."""
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
