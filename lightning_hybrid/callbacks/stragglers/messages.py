"""Warning texts and logged metrics about slow ranks and slow links."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.callbacks.stragglers.gather import Hosts
from lightning_hybrid.callbacks.stragglers.slow_links import SlowLink, floor_s, rates_of
from lightning_hybrid.callbacks.stragglers.slow_ranks import SlowRank, held_up_s, typical_s
from lightning_hybrid.callbacks.stragglers.window import RankWindow
from lightning_hybrid.comm.stats.phases import Phase

MAX_RATIO = 10.0
"""Maximum ratio to the median that is shown. Above it, both times are shown, because the median is almost zero."""

_VERBS = {
    Phase.INPUT: "waiting for data takes",
    Phase.FORWARD: "forward takes",
    Phase.BACKWARD: "backward takes",
    Phase.OPTIMIZER: "the optimizer's step takes",
    Phase.CALLBACKS: "callbacks and loggers take",
}


def name_rank(slow_rank: SlowRank, hosts: Hosts) -> str:
    """Name a slow rank by its global rank and its host."""
    node = hosts.nodes[slow_rank.rank]
    return f"rank {hosts.ranks[slow_rank.rank]} on host {hosts.node_names[node]}"


def describe_slow_rank(slow_rank: SlowRank, hosts: Hosts) -> str:
    """Describe a slow rank in one sentence, with its slow phase and how much time it costs."""
    phase_s = slow_rank.phase_s
    typical_s = slow_rank.typical_s
    if 0 < phase_s <= MAX_RATIO * typical_s:
        comparison = f"{phase_s / typical_s:.1f} times the median"
    else:
        comparison = f"{1e3 * phase_s:.3g} ms (the median is {1e3 * typical_s:.2g} ms)"
    return (
        f"{name_rank(slow_rank, hosts)} is slow: {_VERBS[slow_rank.phase]} {comparison}, which costs "
        f"{100 * slow_rank.cost_share:.0f} % of every step"
    )


def name_link(slow_link: SlowLink, hosts: Hosts) -> str:
    """Name a slow link by the hosts at its ends, as far as they are known."""
    names = hosts.node_names
    if slow_link.sender is None:
        return "a link between the nodes"
    if slow_link.receiver is None:
        return f"the link of host {names[slow_link.sender]}"
    return f"the link from host {names[slow_link.sender]} to host {names[slow_link.receiver]}"


def describe_slow_link(slow_link: SlowLink, hosts: Hosts) -> str:
    """Describe a slow link in one sentence, with its bandwidth and the waiting time that it causes."""
    text = f"{name_link(slow_link, hosts)} is slow: "
    if slow_link.bytes_per_s > 0:
        text += (
            f"it carries {slow_link.bytes_per_s / 1e6:.3g} MB/s instead of the usual "
            f"{slow_link.usual_bytes_per_s / 1e6:.3g} MB/s, and "
        )
    return (
        text
        + f"no rank is slow, but every rank waits {100 * slow_link.wait_share:.0f} % of each step for gradients"
    )


def straggler_metrics(
    windows: Sequence[RankWindow], hosts: Hosts, named: Sequence[SlowRank]
) -> dict[str, float]:
    """Compute the logged metrics about slow ranks and links in a window of steps.

    Args:
        windows: Step times of all ranks.
        hosts: Hosts of the ranks.
        named: Ranks that are currently reported as slow.
    """
    step_s = median([window.step_s for window in windows])
    held_s = [
        held_up_s(windows, rank, (Phase.WAIT, Phase.CALLBACKS)) for rank in range(len(windows))
    ]
    values = {
        m.STRAGGLER_COST_SHARE: max(held_s) / step_s,
        m.STRAGGLER_WAIT_SHARE: floor_s(windows) / step_s,
    }
    for phase, name in m.STRAGGLER_EXCESS_S.items():
        excess_s = [window.phases_s[Phase(phase)] for window in windows]
        for rank in range(len(windows)):
            excess_s[rank] -= typical_s(windows, rank, Phase(phase))
        values[name] = max(excess_s)
    if named:
        costliest = max(named, key=lambda slow_rank: slow_rank.cost_share)
        values[m.STRAGGLER_RANK] = float(hosts.ranks[costliest.rank])
    rates = rates_of(windows, hosts.nodes)
    if rates:
        values[m.STRAGGLER_LINK_BYTES_PER_S] = min(rates.values())
    return values
