"""Published all-reduces between nodes compared with the model by class: `tests/planning/model/test_uncertainty.py`.

`between_nodes.csv` contains rows of nccl-tests with their sources (addresses on GitHub). `before_us` is the prediction
before the model included NCCL's limits per channel, chunks and fabrics (commit c84df1b9). The sources were divided into
halves before that change. A source is in the read half if the first byte of the SHA-256 of its name is even, and in the
unread half if it is odd.
"""

import csv
import hashlib
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from lightning_hybrid.planning.model.cluster import WIDENED, Cluster
from lightning_hybrid.planning.model.cost import Link
from lightning_hybrid.planning.model.cost_nccl import Nccl

MIB = 2**20
ROWS = Path(__file__).with_name("between_nodes.csv")
SIZES = ("below 1 MiB", "1 to 64 MiB", "above 64 MiB")


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """Measured all-reduce: the columns of the file, and the size class of its bytes.

    `is_unread`: the source is in the half that was neither consulted nor used for a fit.
    """

    values: dict[str, str]
    source: str
    fabric: str
    num_bytes: float
    time_s: float
    size: str
    is_unread: bool

    @cached_property
    def now_s(self) -> float:
        """Time that the current model predicts."""
        return cluster_of(self).alone_s("nccl", self.num_bytes)


@cache
def rows() -> list[MeasuredRow]:
    """Read the file."""
    measured_rows = []
    with ROWS.open() as file:
        for row in csv.DictReader(file):
            num_bytes = float(row["bytes"])
            measured = MeasuredRow(
                values=row,
                source=row["source"],
                fabric=row["fabric"],
                num_bytes=num_bytes,
                time_s=float(row["time_us"]) / 1e6,
                size=SIZES[(num_bytes >= MIB) + (num_bytes > 64 * MIB)],
                is_unread=hashlib.sha256(row["source"].encode()).digest()[0] % 2 == 1,
            )
            measured_rows.append(measured)
    return measured_rows


GENERATIONS = {"A100": "ampere", "H100": "hopper"}
INSIDE_BYTES_PER_S = {
    "nvlink": {"A100": 240e9, "H100": 370.8e9},
    "pci": {"A100": 12e9, "H100": 24e9},
}
ALGORITHMS = {"ring": "ring", "nvlstree": "nvls_tree"}


def cluster_of(row: MeasuredRow) -> Cluster:
    """Describe the cluster of a row, with the algorithm and protocol that were forced or are known to be used."""
    values = row.values
    algorithm, _, protocol = values["algo"].lower().replace("?", "").partition("/")
    choices: dict[str, Any] = {}
    if protocol:
        choices["protocols"] = (protocol,)
    if algorithm:
        choices["algorithms"] = (ALGORITHMS[algorithm],)
    nccl = Nccl(
        inside=values["inside"],  # type: ignore[arg-type]
        generation=GENERATIONS[values["gpu"]],  # type: ignore[arg-type]
        fabric=row.fabric,  # type: ignore[arg-type]
        plugin="aws_p5" if values["system"].endswith("with-tuner") else None,
        version=values["nccl"] or "2.23",
        cpu=values["cpu"],  # type: ignore[arg-type]
        **choices,
    )
    return Cluster(
        num_nodes=int(values["nodes"]),
        ranks_per_node=int(values["gpus_per_node"]),
        inside=Link(latency_s=0.0, bytes_per_s=INSIDE_BYTES_PER_S[values["inside"]][values["gpu"]]),
        across=Link(latency_s=0.0, bytes_per_s=float(values["gbit_per_nic"]) * 1.25e8),
        nics_per_node=int(values["nics"]),
        transport=nccl,
    )


def log_error(row: MeasuredRow) -> float:
    """Return the logarithm of the ratio of measured and predicted time."""
    return math.log(row.time_s / row.now_s)


def class_of(row: MeasuredRow) -> tuple[str, str]:
    """Return the class of `model.cluster`. Fabrics that use verbs or the cloud's own library form one class."""
    if row.fabric in ("ib", "roce", "efa"):
        return "ib, roce, efa", row.size
    return row.fabric, row.size


def interval(errors: dict[str, list[float]]) -> tuple[float, float]:
    """Return the 10 % and 90 % quantiles of the errors, widened, with equal weight for each source."""
    weighted = []
    for errors_of_source in errors.values():
        weight = 1 / len(errors_of_source) / len(errors)
        weighted += [(error, weight) for error in errors_of_source]
    weighted.sort()
    ends = accumulate(weight for _, weight in weighted)
    middles = [end - weight / 2 for end, (_, weight) in zip(ends, weighted, strict=True)]
    low, high = np.interp([0.1, 0.9], middles, [error for error, _ in weighted])
    margin = (WIDENED - 1) * (high - low) / 2
    return low - margin, high + margin


Errors = dict[tuple[str, str], dict[str, list[float]]]


def errors_of(measured_rows: Iterable[MeasuredRow]) -> Errors:
    """Return the errors of each class by source."""
    groups: Errors = defaultdict(lambda: defaultdict(list))
    for row in measured_rows:
        groups[class_of(row)][row.source].append(log_error(row))
    return groups


def coverage(errors_by_class: Errors) -> float:
    """Return the share of rows within the intervals of the other sources of their class, weighting sources equally."""
    held = defaultdict[str, list[bool]](list)
    for by_source in errors_by_class.values():
        for source, errors in by_source.items():
            other_sources = dict(by_source)
            del other_sources[source]
            if other_sources:
                low, high = interval(other_sources)
                held[source] += [low <= error <= high for error in errors]
    return statistics.fmean(statistics.fmean(inside) for inside in held.values())
