"""Clusters for tests of costs and of the simulator, with round numbers that match no real hardware."""

from hypothesis import strategies as st

from lightning_hybrid.planning.model.cluster import Cluster
from lightning_hybrid.planning.model.cost import Link
from lightning_hybrid.planning.model.cost_gloo import Gloo
from lightning_hybrid.planning.model.cost_nccl import Nccl

FAST = Link(latency_s=1e-6, bytes_per_s=1e10)
SLOW = Link(latency_s=1e-4, bytes_per_s=1e8)
FREE_GLOO = Gloo(stage_s=0.0, message_s=0.0, segment_s=0.0)
NCCL = Nccl(inside="nvlink", payload_share=1.0)

BYTES = st.just(0.0) | st.floats(1.0, 1e9)  # the smallest floats have few digits
NODES = st.integers(1, 300)
RANKS = st.integers(1, 16)
LINKS = st.builds(Link, latency_s=st.floats(0, 1e-2), bytes_per_s=st.floats(1e6, 1e12))


def cluster(num_nodes=2, ranks_per_node=2, transport=FREE_GLOO, **options):
    return Cluster(
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        transport=transport,
        **{"inside": FAST, "across": SLOW, **options},
    )
