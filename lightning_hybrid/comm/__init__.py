"""Averaging gradients over all ranks while backward runs.

The way of a bucket is ``hook`` (divide, hand over) -> ``engine`` (stages of successive buckets at the same time) ->
``allreduce`` (flat, hierarchical or two-level sum). Beside it: ``topology`` (who shares a node; process groups),
``plan`` (bucket size; algorithm by bytes), ``traffic`` (bytes on the links), ``trace`` (bytes and seconds), ``tuning``
(another plan while training runs, by the decisions of ``tune``, ``race`` and ``drift``). Apart from that, for clusters
one does not have: ``cost`` (seconds by counting), ``cluster`` (links, stages), ``simulate`` (steps).
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
