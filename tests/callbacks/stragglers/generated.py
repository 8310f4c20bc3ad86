"""Synthetic windows of ranks, computed from the times of each rank's phases. A step ends when all ranks are ready."""

import numpy as np

from lightning_hybrid.callbacks.stragglers.window import RankWindow
from lightning_hybrid.comm.health.link_rates import UNKNOWN_LINK
from lightning_hybrid.comm.stats.phases import Phase

# Milliseconds of a step on a normal rank.
USUAL = {
    Phase.INPUT: 2.0,
    Phase.FORWARD: 40.0,
    Phase.BACKWARD: 80.0,
    Phase.OPTIMIZER: 10.0,
    Phase.CALLBACKS: 1.0,
}
TRANSFER = 5.0
NUM_STEPS = 50


def windows(
    num_ranks, extra=None, *, noise=0.0, transfer=TRANSFER, links=None, seed=0, num_steps=NUM_STEPS
):
    """Return a window of all ranks.

    `extra`: additional milliseconds by (rank, phase). `noise`: scale of an exponential delay of every phase, relative
    to its time. `links`: `LinkRate` by rank.
    """
    random = np.random.default_rng(seed)
    steps = [[] for _ in range(num_ranks)]
    for _ in range(num_steps):
        times = []
        for rank in range(num_ranks):
            phases = {}
            for phase, usual in USUAL.items():
                delay = noise * usual * random.exponential()
                phases[phase] = usual + delay + (extra or {}).get((rank, phase), 0.0)
            times.append(phases)
        ends_at = max(sum(phases.values()) for phases in times) + transfer
        for rank, phases in enumerate(times):
            phases[Phase.WAIT] = ends_at - sum(phases.values())
            steps[rank].append({phase: value / 1e3 for phase, value in phases.items()})
    return [
        RankWindow.of_steps(of_rank, (links or {}).get(rank, UNKNOWN_LINK))
        for rank, of_rank in enumerate(steps)
    ]
