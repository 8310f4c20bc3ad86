"""What sums on a few nodes say of more, and of buckets: `python -m tests.evidence.planner.from_few_nodes`.

Systems of `between_nodes.csv` with several numbers of nodes. Ratios of measured and modelled time by bytes, on the fewer
nodes, are the curve of the cluster that predicts the others. Buckets: 256 MiB of gradients, ready evenly over a backward
of half, once and twice one sum of all of it, in equal buckets on one stream; what a choice takes by the published times.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from lightning_hybrid.planning.cluster import HOLDS_TO
from lightning_hybrid.planning.cluster_costs import curve_at
from tests.evidence.planner.between_nodes import MIB, MeasuredRow, cluster_of, now_s, rows

TOTAL, DEFAULT = 256 * MIB, 25 * MIB
Runs = dict[tuple[str, ...], dict[int, list[MeasuredRow]]]


def runs() -> Runs:
    """Return the rows of each system by its number of nodes."""
    found: Runs = defaultdict(lambda: defaultdict(list))
    for row in rows():
        v = row.values
        found[row.fabric, row.source, v["system"], v["gpus_per_node"], v["algo"]][int(v["nodes"])].append(row)
    return found


def curve_of(measured: list[MeasuredRow]) -> dict[float, float]:
    """Return measured over modelled time by bytes."""
    return {row.num_bytes: row.time_s / now_s(row) for row in measured}


def calibrated_s(row: MeasuredRow, few: list[MeasuredRow]) -> float:
    """Predict a row from those on fewer nodes."""
    return replace(cluster_of(row), curves={"nccl": curve_of(few)}).alone_s("nccl", row.num_bytes)


def pairs() -> dict[tuple[tuple[str, ...], int, int], list[tuple[float, float]]]:
    """Return logarithms of measured over calibrated, and over modelled, time from 1 MiB on, by system, few and many."""
    found = {}
    for system, by_nodes in runs().items():
        for few, many in ((a, b) for a in by_nodes for b in by_nodes if 1 < a < b):
            large = [row for row in by_nodes[many] if row.num_bytes >= MIB]
            if large and sum(row.num_bytes >= MIB for row in by_nodes[few]) > 2:
                found[system, few, many] = [
                    (math.log(row.time_s / calibrated_s(row, by_nodes[few])), math.log(row.time_s / now_s(row)))
                    for row in large
                ]
    return found


def step_s(bucket_bytes: float, backward_s: float, sum_s: Callable[[float], float]) -> float:
    """Compute when the last of equal buckets is summed."""
    count, at_s = max(1, round(TOTAL / bucket_bytes)), 0.0
    for index in range(count):
        at_s = max(at_s, (index + 1) / count * backward_s) + sum_s(TOTAL / count)
    return at_s


def regrets(measured: list[MeasuredRow], few: list[MeasuredRow] | None) -> list[tuple[float, float]]:
    """Return what the chosen bucket and the default take beyond the best, for each backward."""
    truth, cluster = {row.num_bytes: row.time_s for row in measured}, cluster_of(measured[0])
    if few is not None:
        cluster = replace(cluster, curves={"nccl": curve_of(few)})
    sizes, found = [MIB << power for power in range(9)], []
    for part in (0.5, 1.0, 2.0):
        backward_s = part * curve_at(truth, TOTAL)
        takes_s = {size: step_s(size, backward_s, lambda n: curve_at(truth, n)) for size in [*sizes, DEFAULT]}
        told_s = {size: step_s(size, backward_s, lambda n: cluster.alone_s("nccl", n)) for size in takes_s}
        chosen = min(told_s, key=lambda size: told_s[size])
        least_s = min(takes_s.values())
        found.append((takes_s[chosen] / least_s - 1, takes_s[DEFAULT] / least_s - 1))
    return found


def share(logs: list[float]) -> str:
    """Format the median of errors."""
    return f"{math.expm1(statistics.median(map(abs, logs))):.0%}"


if __name__ == "__main__":
    print("| system | from nodes | to | calibrated, median | model alone |\n|---|---|---|---|---|")
    for (system, few, many), errors in sorted(pairs().items()):
        calibrated, alone = zip(*errors, strict=True)
        print(f"| {system[0]}: {system[2]} {system[4]} | {few} | {many} | {share(calibrated)} | {share(alone)} |")
    chosen = defaultdict[str, list[tuple[float, float]]](list)
    for system, by_nodes in runs().items():
        for many, measured in by_nodes.items():
            sizes = {row.num_bytes for row in measured}
            if many == 1 or min(sizes) > MIB or max(sizes) < TOTAL or len(sizes) < 6:
                continue
            kind = "ib, roce, efa" if system[0] in ("ib", "roce", "efa") else system[0]
            chosen[f"{kind}, model alone"] += regrets(measured, None)
            if few := [nodes for nodes in by_nodes if 4 <= nodes < many <= HOLDS_TO * nodes]:
                chosen[f"{kind}, measured on 4 nodes or more"] += regrets(measured, by_nodes[max(few)])
    print(
        "\n| choice of a bucket | cases | lost, mean | median | worst | always 25 MiB, mean |\n|---|---|---|---|---|---|"
    )
    for name, found in sorted(chosen.items()):
        lost, default = zip(*found, strict=True)
        values = (statistics.fmean(lost), statistics.median(lost), max(lost), statistics.fmean(default))
        print(f"| {name} | {len(lost)} | {' | '.join(f'{value:.1%}' for value in values)} |")
