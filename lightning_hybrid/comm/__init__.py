"""Gradient averaging over all ranks, overlapped with backward.

hook             scales a bucket and submits it to the engine
engine/          runs the all-reduce stages of successive buckets at the same time
topology         describes which ranks share a node
plan             chooses bucket sizes, and the all-reduce algorithm of each bucket
bucket_sizes     computes the sizes of buckets and chunks
message_pattern  chooses how the nodes exchange messages
health/          raises the same error on every rank when one rank fails
stats/           counts bytes and seconds

Example::

    engine = CommEngine(topology=Topology.discover(), plan=CommPlan(), timeout=timeout, device=device)
    ddp_model.register_comm_hook(HookState(engine=engine), average_bucket)
    ...
    engine.close()
"""

from lightning_hybrid.comm.engine.engine import CommEngine
from lightning_hybrid.comm.hook import HookState, average_bucket
from lightning_hybrid.comm.plan import CommPlan
from lightning_hybrid.comm.stats.link_bytes import Traffic, traffic_of
from lightning_hybrid.comm.stats.summary import BucketSummary, CommSummary
from lightning_hybrid.comm.stats.trace import CommTrace
from lightning_hybrid.comm.topology import Topology, host_identity, validate_ranks_per_node

__all__ = [
    "BucketSummary",
    "CommEngine",
    "CommPlan",
    "CommSummary",
    "CommTrace",
    "HookState",
    "Topology",
    "Traffic",
    "average_bucket",
    "host_identity",
    "traffic_of",
    "validate_ranks_per_node",
]
