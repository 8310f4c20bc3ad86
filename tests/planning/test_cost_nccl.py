"""NCCL's model: constants as its source has them, written down here a second time, and what is made of them by hand.

Source: NVIDIA/nccl 2.28, src/graph/tuning.cc, `ncclTunerConstantsDefaults`, `ncclTopoTuneModel` and
`ncclTopoGetAlgoTime`; the hop of NVLS trees between nodes is of its main branch in June 2026.
"""

from __future__ import annotations

import math

import pytest

from lightning_hybrid.planning.cost import Link
from lightning_hybrid.planning.cost_nccl import Nccl, _tree_correction

# Microseconds of a start and of a hop: LL, LL128, Simple.
BASE_LATENCIES = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
HARDWARE_LATENCIES = {
    "nvlink": {"tree": (0.6, 1.25, 4.0), "ring": (0.6, 1.9, 3.4)},
    "pci": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)},
    "net": {"tree": (5.0, 8.5, 14.0), "ring": (2.7, 4.0, 14.0)},
}
NVLS_LATENCY, NVLS_TREE_NET_LATENCY = 25.0, 20.9
PROTOCOLS = ("ll", "ll128", "simple")
FREE = Link(latency_s=0.0, bytes_per_s=1e30)
NODES, RANKS = 4, 8


def latency_us(nccl, algorithm, num_bytes=0.0, num_nodes=NODES):
    ask = {"num_nodes": num_nodes, "ranks_per_node": RANKS, "inside": FREE, "across": FREE}
    return 1e6 * nccl.all_reduce(num_bytes, algorithm=algorithm, **ask).latency_s


@pytest.mark.parametrize("place", range(3), ids=PROTOCOLS.__getitem__)
@pytest.mark.parametrize("algorithm", ["tree", "ring"])
@pytest.mark.parametrize("inside", ["nvlink", "pci"])
def test_hops_take_what_the_tables_say(inside, algorithm, place):
    """Rings: 2 (P - 1) hops, 2 (N - 1) of them between nodes; trees: up and down k - 1 ranks and log2 N nodes."""
    intra, inter = (HARDWARE_LATENCIES[where][algorithm][place] for where in (inside, "net"))
    if algorithm == "tree":
        hops = 2 * ((RANKS - 1) * intra + math.log2(NODES) * inter)
    else:
        overhead = 1.0 * (3 if PROTOCOLS[place] == "simple" else 1)  # of a host by Intel
        hops = (2 * (NODES * RANKS - 1) - 2 * (NODES - 1)) * max(intra, overhead) + 2 * (NODES - 1) * inter
    found = latency_us(Nccl(inside=inside, protocols=(PROTOCOLS[place],)), algorithm)
    assert found == pytest.approx(BASE_LATENCIES[algorithm][place] + hops)


def test_the_switch_of_a_node_is_one_hop_whatever_is_behind_it():
    nccl = Nccl(inside="nvlink", algorithms=("nvls", "nvls_tree"))
    assert latency_us(nccl, "nvls", num_nodes=1) == pytest.approx(NVLS_LATENCY)
    between = 2 * math.log2(NODES) * NVLS_TREE_NET_LATENCY
    assert latency_us(nccl, "nvls_tree") == pytest.approx(NVLS_LATENCY + between)


@pytest.mark.parametrize(("is_before_ampere", "plateau"), [(False, 1.4), (True, 1.9)])
def test_simple_rings_between_nodes_wait_longer_from_64_bytes_a_rank_on(is_before_ampere, plateau):
    """`lat *= comm->minCompCap < 80 ? 1.9 : 1.4`, of the hops."""
    simple, start = Nccl(inside="pci", is_before_ampere=is_before_ampere, protocols=("simple",)), 8.4
    least = 64 * NODES * RANKS
    hops = latency_us(simple, "ring", least - 1) - start
    assert latency_us(simple, "ring", least) - start == pytest.approx(plateau * hops)
    ll = Nccl(inside="pci", is_before_ampere=is_before_ampere, protocols=("ll",))
    assert latency_us(ll, "ring", least) == latency_us(ll, "ring", least - 1)


@pytest.mark.parametrize(("protocol", "share"), [("ll", 0.5), ("ll128", 0.92), ("simple", 1.0)])
def test_protocols_reach_a_part_of_a_rings_rate(protocol, share):
    slow = Link(latency_s=0.0, bytes_per_s=1e9)
    ask = {"num_nodes": NODES, "ranks_per_node": RANKS, "inside": FREE, "across": slow, "algorithm": "ring"}
    found_s = Nccl(inside="nvlink", protocols=(protocol,)).all_reduce(1e6, **ask).transfer_s
    assert found_s == pytest.approx(2 * (NODES * RANKS - 1) / (NODES * RANKS) * 1e6 / 1e9 / share)


def test_trees_reach_0_92_of_the_rate_and_less_of_it_at_medium_sizes():
    """`treeCorrectionFactor` of Simple: "powers of two, 64 B to 256MB"."""
    factors = [*[0.9] * 7, 0.8, 0.7, 0.6, 0.6, *[0.5] * 4, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9]
    assert [_tree_correction(64 << step, 2) for step in range(23)] == factors
    slow = Link(latency_s=0.0, bytes_per_s=1e9)
    ask = {"num_nodes": NODES, "ranks_per_node": RANKS, "inside": FREE, "across": slow, "algorithm": "tree"}
    found_s = Nccl(inside="nvlink", protocols=("simple",)).all_reduce(2**30, **ask).transfer_s
    assert found_s == pytest.approx(2 * 2**30 / 1e9 / 0.92)
