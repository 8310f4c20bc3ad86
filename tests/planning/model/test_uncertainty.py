"""Intervals of predicted all-reduces, derived from published rows, for clusters of the same class only."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lightning_hybrid.comm.plan import MIB, CommPlan
from lightning_hybrid.planning.model.cluster import ERRORS, MEASURED, MEASURED_VERBS, VERBS, bounds
from lightning_hybrid.planning.model.cost_nccl import Nccl
from tests.evidence.planner import between_nodes
from tests.evidence.planner import from_few_nodes as few
from tests.planning.model.clusters import cluster

H100 = Nccl(inside="nvlink", generation="hopper", fabric="ib")


def test_the_ends_of_a_sum_are_those_of_its_class_of_bytes():
    measured = cluster(4, 8, transport=H100)
    ends = bounds(measured)
    for num_bytes, (low, high) in zip((1000.0, 2 * MIB, 65 * MIB), VERBS, strict=True):
        alone_s = measured.alone_s("flat", num_bytes)
        shares = [end.alone_s("flat", num_bytes) / alone_s for end in ends]
        assert shares == pytest.approx([low, high])


@pytest.mark.parametrize(
    "of_no_class",
    [
        {"transport": replace(H100, fabric="tcpxo")},
        {"transport": replace(H100, fabric=None)},
        {"transport": replace(H100, generation="blackwell")},
        {"transport": replace(H100, inside="pci")},
        {"ranks_per_node": 72},
    ],
)
def test_what_was_never_compared_has_no_interval(of_no_class):
    assert bounds(replace(cluster(4, 8, transport=H100), **of_no_class)) is None


def test_the_intervals_are_those_of_the_published_rows():
    """They contain 70 to 90 % of the rows of a source that was left out. From 4 nodes on, measured intervals apply."""
    published = {"ib, roce, efa": VERBS, "slingshot": ERRORS["slingshot"], "tcp": ERRORS["tcp"]}
    measured = {"ib, roce, efa": MEASURED_VERBS, "slingshot": MEASURED}
    for errors, expected in (
        (between_nodes.errors_of(between_nodes.rows()), published),
        (few.errors_of_measured(), measured),
    ):
        for (kind, size), by_source in errors.items():
            ends = expected[kind][between_nodes.SIZES.index(size)]
            interval = [math.exp(end) for end in between_nodes.interval(by_source)]
            assert interval == pytest.approx(ends, abs=0.006), f"{kind}, {size}"
    read = [row for row in between_nodes.rows() if not row.is_unread]
    for rows in (read, between_nodes.rows()):
        assert 0.7 <= between_nodes.coverage(between_nodes.errors_of(rows)) <= 0.9


def test_four_nodes_say_what_eight_take():
    assert few.median("ib, roce, efa", 4, 8) <= 0.05
    assert few.median("slingshot", 4, 8) <= 0.12


def test_intervals_of_what_was_measured_hold_to_eight_times_the_nodes_and_widen_beyond():
    def high(num_nodes, **options):
        measured = cluster(num_nodes, 8, transport=replace(H100, fabric="slingshot"), **options)
        _, slowest = bounds(measured)
        return slowest.alone_s("flat", 65 * MIB) / measured.alone_s("flat", 65 * MIB)

    assert high(32, measured_nodes=4) == pytest.approx(MEASURED[2][1])
    assert high(128, measured_nodes=4) == pytest.approx(MEASURED[2][1] ** 1.5)
    # Two nodes are a special case for trees.
    assert high(16, measured_nodes=2) == pytest.approx(ERRORS["slingshot"][2][1])


def test_on_links_that_nobody_measured_the_library_keeps_its_plan():
    """The mutation to detect lets the planner choose on such links as well."""
    gradients = [MIB] * 64
    shape = SimpleNamespace(num_nodes=4, ranks_per_node=8)
    ask = {"itemsize": 2, "on_cuda": True}
    unknown = cluster(4, 8, transport=replace(H100, fabric="slingshot"))
    with pytest.warns(UserWarning, match="Measure 4 nodes"):
        assert unknown.plan_for(gradients, shape, **ask) == CommPlan()
    for measured in (replace(unknown, measured_nodes=4), cluster(4, 8, transport=H100)):
        assert measured.plan_for(gradients, shape, **ask) != CommPlan()


def test_the_unread_half_is_predicted_within_what_was_asked():
    """The median error is at most 7 % above 64 MiB and 15 % from 1 MiB. No prediction is off by a factor of two."""
    largest_medians = (0.14, 0.0677)  # ln 1.15 and ln 1.07
    for size, largest_median in zip(between_nodes.SIZES[1:], largest_medians, strict=True):
        errors = []
        for row in between_nodes.rows():
            if row.is_unread and row.size == size and row.values["gpus_per_node"] == "8":
                errors.append(abs(between_nodes.log_error(row)))
        errors.sort()
        assert errors[len(errors) // 2] <= largest_median, size
        assert errors[-1] <= 0.6931, size  # ln 2
