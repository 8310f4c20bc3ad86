"""Synthetic samples of a known cluster, for tests of the fit."""

import numpy as np

from lightning_hybrid.planning.calibration.codec_benchmark import CODECS, CODED_SUMS
from lightning_hybrid.planning.calibration.microbenchmarks import (
    ADD_BYTES,
    ALGORITHMS,
    SUM_BYTES,
    Measurements,
    Microbenchmark,
)
from lightning_hybrid.planning.calibration.overhead_fit import MeasuredSetup, predicted_all_reduce_s
from lightning_hybrid.planning.model.cluster import Cluster
from lightning_hybrid.planning.model.cost import Link
from lightning_hybrid.planning.model.cost_gloo import Gloo

MESSAGES = (4, 256, 4096, 16384, 65536, 262144, 1 << 20, 1 << 22)
SOFTWARE_S = 60e-6  # per message on any link
MEMORY_BYTES_PER_S = 5e9

GLOO = Gloo(stage_s=1.4e-4, message_s=8e-5, segment_s=1e-4, ring_share=0.88, num_shared_cores=2)
"""Round numbers near those of conf/cluster/netlab.yaml."""


def gloo_cluster(num_nodes, ranks_per_node, *, mbit_per_s=1000.0, latency_s=2e-4, transport=GLOO):
    return Cluster(
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        inside=Link(latency_s=0.0, bytes_per_s=5e8),
        across=Link(latency_s=latency_s, bytes_per_s=mbit_per_s * 1e6 / 8),
        transport=transport,
    )


def world_of(cluster, **options):
    defaults = {"on_cuda": False, "itemsize": 2, "num_shared_cores": 2}
    nodes = {"num_nodes": cluster.num_nodes, "ranks_per_node": cluster.ranks_per_node}
    return MeasuredSetup(**nodes, **(defaults | options))


FLOW_BYTES = 1 << 26  # maximum message size of the real probes


def _links_of_messages(cluster, world):
    """Return the links that a message uses by name, with the latency that software adds."""
    links = {}
    if cluster.ranks_per_node > 1:
        bytes_per_s = cluster.inside.bytes_per_s if world.on_cuda else MEMORY_BYTES_PER_S
        links["inside"] = Link(latency_s=SOFTWARE_S, bytes_per_s=bytes_per_s)
    if cluster.num_nodes > 1:
        latency_s = SOFTWARE_S + cluster.across.latency_s
        links["across"] = Link(latency_s=latency_s, bytes_per_s=cluster.across.bytes_per_s)
    return links


def planted(
    cluster,
    world,
    *,
    noise=0.02,
    seed=0,
    num_samples=9,
    flow_gain=1.0,
    backend="gloo_ring",
    sums_s=None,
):
    """Return measurements of a known cluster.

    `sums_s`: seconds of all-reduces by algorithm and bytes, which replace those of the model.
    """
    generator = np.random.default_rng(seed)
    times_s = {}

    def add(kind, target, size, time_s):
        drawn = time_s * (1 + noise * generator.standard_normal(num_samples))
        times_s[Microbenchmark(kind=kind, what=target, num_bytes=size)] = drawn.tolist()

    links = _links_of_messages(cluster, world)
    for name, link in links.items():
        for size in MESSAGES:
            add("ping", name, size, link.seconds(size))
        add("exchange", name, 4, link.seconds(4) + link.latency_s)
    if "across" in links:
        far = links["across"]
        for flows, gain in (("1", 1.0), (str(cluster.ranks_per_node), flow_gain)):
            add("flows", flows, FLOW_BYTES, 2 * far.latency_s + FLOW_BYTES / far.bytes_per_s / gain)
    add("add", "float16", ADD_BYTES, ADD_BYTES / MEMORY_BYTES_PER_S)
    sums = []
    if "across" in links:
        turns = 1.0
        if not world.on_cuda:
            turns = GLOO.work_s(1.0, of_busiest=1, of_all=cluster.world_size)
        for name in CODECS:
            bytes_per_s = getattr(cluster.codec, f"{name}_bytes_per_s")
            add("codec", name, ADD_BYTES, turns * ADD_BYTES / bytes_per_s)
        sums += CODED_SUMS
    for name in (backend, *ALGORITHMS):
        sums += [(name, size) for size in SUM_BYTES if size <= 8 << 20]  # larger ones take too long
    for name, size in sums:
        time_s = (sums_s or {}).get((name, size))
        if time_s is None:
            time_s = predicted_all_reduce_s(cluster, name, size, world)
        add("sum", name, size, time_s)
    return Measurements(times_s=times_s, took_s=1.0)
