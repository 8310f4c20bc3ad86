"""NCCL's model in areas with few published rows. `test_uncertainty.py` checks the rest against published rows.

Source: NVIDIA/nccl 2.28, src/graph/tuning.cc, `ncclTunerConstantsDefaults`, `ncclTopoTuneModel` and
`ncclTopoGetAlgoTime`. The hop of NVLS trees between nodes is from its main branch in June 2026.
"""

import math
from dataclasses import replace

import pytest

from lightning_hybrid.planning.model.cost import Link
from lightning_hybrid.planning.model.cost_nccl import Nccl
from lightning_hybrid.planning.model.nccl_tables import nvls_tree_round_bytes

# Microseconds of a start and of a hop: LL, LL128, Simple.
BASE_LATENCIES = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
HARDWARE_LATENCIES = {
    "nvlink": {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)},
    "pci": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)},
    "net": {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)},
}
PROTOCOLS = ("ll", "ll128", "simple")
FREE = Link(latency_s=0.0, bytes_per_s=1e30)


NODES = 4
RANKS = 8


def latency_us(nccl, algorithm, num_bytes=0.0, num_nodes=NODES):
    ask = {"num_nodes": num_nodes, "ranks_per_node": RANKS, "inside": FREE, "across": FREE}
    return 1e6 * nccl.all_reduce(num_bytes, algorithm=algorithm, **ask).latency_s


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("algorithm", ["tree", "ring"])
@pytest.mark.parametrize("inside", ["nvlink", "pci"])
def test_hops_take_what_the_tables_say(inside, algorithm, protocol):
    """Rings have 2 (P - 1) hops, 2 (N - 1) of them between nodes. Trees go up and down k - 1 ranks and log2 N nodes."""
    column = PROTOCOLS.index(protocol)
    inside_us = HARDWARE_LATENCIES[inside][algorithm][column]
    across_us = HARDWARE_LATENCIES["net"][algorithm][column]
    if algorithm == "tree":
        hops_us = 2 * ((RANKS - 1) * inside_us + math.log2(NODES) * across_us)
    else:
        overhead_us = 3.0 if protocol == "simple" else 1.0  # of an Intel host
        num_across = 2 * (NODES - 1)
        num_inside = 2 * (NODES * RANKS - 1) - num_across
        hops_us = num_inside * max(inside_us, overhead_us) + num_across * across_us
    result = latency_us(Nccl(inside=inside, protocols=(protocol,)), algorithm)
    assert result == pytest.approx(BASE_LATENCIES[algorithm][column] + hops_us)


FAST = Link(latency_s=0.0, bytes_per_s=1e15)


@pytest.mark.parametrize(("num_nodes", "limit"), [(2, 57.7e9), (4, 45.5e9)])
def test_a_channel_of_an_nvls_tree_has_a_limit_that_two_nodes_share_less(num_nodes, limit):
    """`perChMaxNVLSTreeBws` of Hopper limits the bus bandwidth to eight channels, however fast the links are."""
    nccl = Nccl(inside="nvlink", generation="hopper")
    ask = {
        "num_nodes": num_nodes,
        "ranks_per_node": 8,
        "inside": FREE,
        "across": FAST,
        "num_nics": 8,
    }
    transfer_s = nccl.all_reduce(2**33, algorithm="nvls_tree", **ask).transfer_s
    ranks = 8 * num_nodes
    assert transfer_s == pytest.approx(2 * (ranks - 1) / ranks * 2**33 / (8 * limit))


def test_a_tree_fills_by_rounds_of_channels_and_chunks():
    """On 2 x 8 H100, 16 channels of 8 heads send chunks of 128 KiB up and down one doubling."""
    nccl = Nccl(inside="nvlink", generation="hopper")
    slow = Link(latency_s=0.0, bytes_per_s=1e9)
    ask = {"num_nodes": 2, "ranks_per_node": 8, "inside": FREE, "across": slow, "num_nics": 8}
    latency_s = nccl.all_reduce(2**30, algorithm="nvls_tree", **ask).latency_s
    filling_s = 2 * nvls_tree_round_bytes(2**30, num_nodes=2, heads=8, generation="hopper") / 1e9
    assert latency_s == pytest.approx(25e-6 + 2 * 20.9e-6 + filling_s)
    assert filling_s == pytest.approx(2 * 16 * 8 * 2**17 / 1e9)


def test_the_plug_in_chooses_in_place_of_nccl():
    """On p5, trees with LL128 carry up to 31.4 MB on 16 ranks, where NCCL itself would choose another algorithm."""
    ask = {"num_nodes": 2, "ranks_per_node": 8, "inside": FREE, "across": FAST, "num_nics": 8}
    of_plugin = Nccl(inside="nvlink", generation="hopper", fabric="efa", plugin="aws_p5")
    of_nccl = replace(of_plugin, plugin=None)
    ll128 = replace(of_plugin, protocols=("ll128",))
    assert of_plugin.all_reduce(31e6, **ask) == ll128.all_reduce(31e6, algorithm="tree", **ask)
    assert of_nccl.all_reduce(31e6, **ask) != of_plugin.all_reduce(31e6, **ask)
    assert of_nccl.all_reduce(32e6, **ask) == of_plugin.all_reduce(32e6, **ask)


@pytest.mark.parametrize(
    ("version", "last"),
    [("2.3", "ring"), ("2.4", "tree"), ("2.17", "nvls"), ("2.18.3", "nvls_tree")],
)
def test_a_version_has_the_algorithms_of_its_time(version, last):
    assert Nccl(inside="nvlink", generation="hopper", version=version).available[-1] == last
