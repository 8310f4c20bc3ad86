"""Extrapolation of all-reduces from few nodes to more: `tests/planning/model/test_uncertainty.py`.

The systems are those of `between_nodes.csv` with several numbers of nodes. For each system, the ratios of measured and
modeled time by bytes on the smaller number of nodes form a curve. The cluster with this curve predicts the others.
"""

import math
import statistics
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import product

from lightning_hybrid.planning.model.cluster import HOLDS_TO, MEASURED_FROM, Cluster
from tests.evidence.planner.between_nodes import (
    MIB,
    Errors,
    MeasuredRow,
    class_of,
    cluster_of,
    rows,
)

Runs = dict[tuple[str, ...], dict[int, list[MeasuredRow]]]


def runs() -> Runs:
    """Return the rows of each system by its number of nodes."""
    result: Runs = defaultdict(lambda: defaultdict(list))
    for row in rows():
        values = row.values
        system = (row.fabric, row.source, values["system"], values["gpus_per_node"], values["algo"])
        result[system][int(values["nodes"])].append(row)
    return result


def calibrated(row: MeasuredRow, few: list[MeasuredRow]) -> Cluster:
    """Describe the cluster of a row, with the curve from rows with fewer nodes."""
    curve = {small.num_bytes: small.time_s / small.now_s for small in few}
    return replace(cluster_of(row), curves={"nccl": curve})


@cache
def pairs() -> dict[tuple[str, int, int], list[tuple[MeasuredRow, float]]]:
    """Return rows and logarithms of measured over calibrated time, by class and by small and large number of nodes."""
    result = defaultdict[tuple[str, int, int], list[tuple[MeasuredRow, float]]](list)
    for by_nodes in runs().values():
        for few, many in product(by_nodes, by_nodes):
            if not 1 < few < many:
                continue
            for row in by_nodes[many]:
                predicted_s = calibrated(row, by_nodes[few]).alone_s("nccl", row.num_bytes)
                error = math.log(row.time_s / predicted_s)
                kind, _ = class_of(row)
                result[kind, few, many].append((row, error))
    return result


def errors_of_measured() -> Errors:
    """Return errors by class, calibrated on at least 4 nodes, within the range in which the curve should hold."""
    result: Errors = defaultdict(lambda: defaultdict(list))
    for (kind, few, many), errors in pairs().items():
        if few >= MEASURED_FROM and many <= HOLDS_TO * few:
            for row, error in errors:
                result[kind, row.size][row.source].append(error)
    return result


def median(kind: str, few: int, many: int) -> float:
    """Return the median error of calibrated all-reduces of at least 1 MiB."""
    errors = []
    for row, error in pairs()[kind, few, many]:
        if row.num_bytes >= MIB:
            errors.append(abs(error))
    return math.expm1(statistics.median(errors))
