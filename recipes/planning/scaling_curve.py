"""Steps, efficiency and images per second over the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recipes.planning.scenario import Scenario

SHOWN_TIMES = 4  # the curve is printed up to so many times the ranks that were asked for
FAR_RANKS = (256, 1024, 4096, 16384)  # of the curve in table.md, beyond what is printed


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """Scale on the curve. `least_s`: what no all-reduce of all gradients can beat between these nodes."""

    num_ranks: int
    step_s: float
    exposed_s: float
    efficiency: float
    images_per_s: float
    least_s: float


def scales(num_ranks: int, *, ranks_per_node: int) -> list[int]:
    """Return the ranks of the curve: from one to four times those asked for, and then to thousands.

    >>> scales(24, ranks_per_node=8)
    [1, 6, 8, 12, 24, 48, 96, 256, 1024, 4096, 16384]
    """
    near = {1, ranks_per_node, num_ranks // 4, num_ranks // 2, num_ranks, 2 * num_ranks, SHOWN_TIMES * num_ranks}
    return sorted(near - {0}) + [far for far in FAR_RANKS if far > SHOWN_TIMES * num_ranks]


def scaling_point(scenario: Scenario) -> ScalingPoint:
    """Simulate one scale."""
    outcome = scenario.run()
    return ScalingPoint(
        num_ranks=scenario.cluster.world_size,
        step_s=outcome.step_s,
        exposed_s=float(outcome.exposed_s.mean()),
        efficiency=outcome.efficiency,
        images_per_s=scenario.global_batch_size / outcome.step_s,
        least_s=scenario.cluster.least_s(scenario.node_bytes(outcome)),
    )


def curve_table(points: Sequence[ScalingPoint]) -> str:
    """Format the curve."""
    lines = ["| ranks | step s | exposed s | efficiency | images/s | byte bound s |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {p.num_ranks} | {p.step_s:.4g} | {p.exposed_s:.3g} | {p.efficiency:.1%} | {p.images_per_s:,.0f} "
        f"| {p.least_s:.3g} |"
        for p in points
    ]
    return "\n".join(lines)
