"""Summary of one rank's step times over a window of steps, which is sent to the first rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from lightning_hybrid.comm.health.link_rates import UNKNOWN_LINK, LinkRate
from lightning_hybrid.comm.stats.phases import Phase, StepTimes

NUM_FIGURES = 4 + len(Phase)
"""Number of fp32 values that each rank sends for a window, which take 40 bytes."""


@dataclass(frozen=True, kw_only=True)
class RankWindow:
    """Median step and phase times of one rank over a window of steps.

    Attributes:
        step_s: Seconds per step.
        phases_s: Seconds per step of each phase.
        wait_error_s: Uncertainty of the median waiting time in seconds (`error_of_median`).
        link: Rate of this rank's slowest link to another node.
    """

    step_s: float
    phases_s: Mapping[Phase, float]
    wait_error_s: float = 0.0
    link: LinkRate = UNKNOWN_LINK

    @classmethod
    def of_steps(
        cls,
        steps: Sequence[StepTimes],
        link: LinkRate = UNKNOWN_LINK,
    ) -> RankWindow:
        """Create a window from the times of its steps, with all times zero if there are no steps."""
        phases_s = dict.fromkeys(Phase, 0.0)
        if not steps:
            return cls(step_s=0.0, phases_s=phases_s, link=link)
        for phase in Phase:
            phases_s[phase] = median([times[phase] for times in steps])
        step_times_s = [sum(times.values()) for times in steps]
        waits_s = [times[Phase.WAIT] + times[Phase.CALLBACKS] for times in steps]
        return cls(
            step_s=median(step_times_s),
            phases_s=phases_s,
            wait_error_s=error_of_median(waits_s),
            link=link,
        )

    def to_figures(self) -> list[float]:
        """Convert the window to a list of numbers that can be sent in a tensor."""
        figures = [self.step_s]
        for phase in Phase:
            figures.append(self.phases_s[phase])
        figures.append(self.wait_error_s)
        figures.append(self.link.bytes_per_s)
        figures.append(float(self.link.node))
        return figures

    @classmethod
    def from_figures(cls, figures: Sequence[float]) -> RankWindow:
        """Create a window from the numbers that `to_figures` returned."""
        step_s, *phases_s, wait_error_s, bytes_per_s, node = figures
        link = LinkRate(bytes_per_s=bytes_per_s, node=int(node))
        return cls(
            step_s=step_s,
            phases_s=dict(zip(Phase, phases_s, strict=True)),
            wait_error_s=wait_error_s,
            link=link,
        )


def error_of_median(values: Sequence[float]) -> float:
    """Estimate the uncertainty of a median from the spread of its values.

        error = 1.57 * interquartile range / sqrt(number of values)

    If two medians differ by more than the sum of their errors, they differ significantly at the 95 % level.

    Source: McGill, Tukey, Larsen 1978 (The American Statistician 32).

    >>> error_of_median([1.0] * 50), round(error_of_median([0.0, 1.0] * 32), 2)
    (0.0, 0.2)
    """
    if len(values) < 2:
        return 0.0
    first, _, third = quantiles(values, n=4)
    return 1.57 * (third - first) / len(values) ** 0.5
