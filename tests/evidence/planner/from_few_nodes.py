"""What sums on a few nodes say of more, and of buckets: `tests/planning/test_uncertainty.py`.

Systems of `between_nodes.csv` with several numbers of nodes. Ratios of measured and modelled time by bytes, on the
fewer nodes, are the curve of the cluster that predicts the others. Buckets: 256 MiB of gradients, ready evenly over a
backward of half, once and twice one sum of all of it, in equal buckets on one stream, by the published times.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from lightning_hybrid.planning.cluster import HOLDS_TO, MEASURED_FROM, Cluster
from lightning_hybrid.planning.cost import curve_at
from tests.evidence.planner.between_nodes import (
    MIB,
    Errors,
    MeasuredRow,
    class_of,
    cluster_of,
    log_error,
    rows,
)

TOTAL, DEFAULT = 256 * MIB, 25 * MIB
Runs = dict[tuple[str, ...], dict[int, list[MeasuredRow]]]


def runs() -> Runs:
    """Return the rows of each system by its number of nodes."""
    found: Runs = defaultdict(lambda: defaultdict(list))
    for row in rows():
        v = row.values
        found[row.fabric, row.source, v["system"], v["gpus_per_node"], v["algo"]][int(v["nodes"])].append(row)
    return found


def calibrated(row: MeasuredRow, few: list[MeasuredRow]) -> Cluster:
    """Describe where a row was measured, with the curve of those on fewer nodes."""
    return replace(cluster_of(row), curves={"nccl": {each.num_bytes: each.time_s / each.now_s for each in few}})


@cache
def pairs() -> dict[tuple[str, int, int], list[tuple[MeasuredRow, float]]]:
    """Return rows and logarithms of measured over calibrated time, by class, few and many nodes."""
    found = defaultdict[tuple[str, int, int], list[tuple[MeasuredRow, float]]](list)
    for by_nodes in runs().values():
        for few, many in ((a, b) for a in by_nodes for b in by_nodes if 1 < a < b):
            for row in by_nodes[many]:
                error = math.log(row.time_s / calibrated(row, by_nodes[few]).alone_s("nccl", row.num_bytes))
                found[class_of(row)[0], few, many].append((row, error))
    return found


def errors_of_measured() -> Errors:
    """Return errors by class of the sums that 4 nodes or more say, as far as their curve is to hold."""
    found: Errors = defaultdict(lambda: defaultdict(list))
    for (kind, few, many), errors in pairs().items():
        for row, error in errors if few >= MEASURED_FROM and many <= HOLDS_TO * few else ():
            found[kind, row.size][row.source].append(error)
    return found


def median(kind: str, few: int, many: int) -> tuple[float, float]:
    """Return the median errors of sums from 1 MiB on: calibrated, and of the model alone."""
    both = [(abs(e), abs(log_error(row))) for row, e in pairs()[kind, few, many] if row.num_bytes >= MIB]
    of_curve, of_model = (math.expm1(statistics.median(errors)) for errors in zip(*both, strict=True))
    return of_curve, of_model


def step_s(bucket_bytes: float, backward_s: float, sum_s: Callable[[float], float]) -> float:
    """Compute when the last of equal buckets is summed."""
    count, at_s = max(1, round(TOTAL / bucket_bytes)), 0.0
    each_s = sum_s(TOTAL / count)
    for index in range(count):
        at_s = max(at_s, (index + 1) / count * backward_s) + each_s
    return at_s


def regrets(measured: list[MeasuredRow], few: list[MeasuredRow] | None) -> list[tuple[float, float]]:
    """Return what the chosen bucket and the default take beyond the best, for each backward."""
    truth = {row.num_bytes: row.time_s for row in measured}
    cluster = cluster_of(measured[0]) if few is None else calibrated(measured[0], few)
    sizes, found = [MIB << power for power in range(9)], []
    for part in (0.5, 1.0, 2.0):
        backward_s = part * curve_at(truth, TOTAL)
        takes_s = {size: step_s(size, backward_s, lambda n: curve_at(truth, n)) for size in [*sizes, DEFAULT]}
        told_s = {size: step_s(size, backward_s, lambda n: cluster.alone_s("nccl", n)) for size in takes_s}
        chosen = min(told_s, key=lambda size: told_s[size])
        least_s = min(takes_s.values())
        found.append((takes_s[chosen] / least_s - 1, takes_s[DEFAULT] / least_s - 1))
    return found


def chosen_buckets() -> dict[str, list[tuple[float, float]]]:
    """Return what `regrets` says, by class and by whether 4 nodes or more were measured."""
    chosen = defaultdict[str, list[tuple[float, float]]](list)
    for by_nodes in runs().values():
        for many, measured in by_nodes.items():
            sizes, kind = {row.num_bytes for row in measured}, class_of(measured[0])[0]
            if many == 1 or min(sizes) > MIB or max(sizes) < TOTAL or len(sizes) < 6:
                continue
            chosen[f"{kind}, model alone"] += regrets(measured, None)
            if few := [nodes for nodes in by_nodes if MEASURED_FROM <= nodes < many <= HOLDS_TO * nodes]:
                chosen[f"{kind}, measured"] += regrets(measured, by_nodes[max(few)])
    return chosen
