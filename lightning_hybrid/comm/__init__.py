"""Averaging gradients over all ranks while backward runs.

A bucket goes from `hook` (divide, submit) to `engine/` (stages of successive buckets at the same time). `topology` says
which ranks share a node, `plan` how large buckets are and which algorithm sums each, `bucket_layout` what follows from
bytes alone. `health/` makes one error of a failure and `stats/` counts bytes and seconds.
In use::

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
