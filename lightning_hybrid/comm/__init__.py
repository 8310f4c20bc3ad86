"""Gradient averaging over all ranks, overlapped with backward.

hook             divides a bucket and submits it to the engine
engine/          runs the all-reduce stages of successive buckets at the same time
topology         knows which ranks share a node
plan             chooses the size of buckets, and the algorithm that sums each
bucket_layout    derives sizes of buckets and chunks from numbers of bytes
health/          turns the failure of one rank into the same error on every rank
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
