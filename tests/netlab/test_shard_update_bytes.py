"""Bytes of the update shared within a node, counted by the kernel: those of `two_level`, between nodes and inside."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.comm import CommEngine, CommPlan, Topology
from tests.netlab.cluster import Cluster
from tests.netlab.test_bytes import NUM_BYTES, TOLERANCE, bytes_sent

HOSTS, RANKS_PER_HOST = 2, 2


def sent_in_both():
    """On every rank: what its host sent for gradients by `two_level`, and for gradients and weights where shared."""
    engine = CommEngine(
        topology=Topology.discover(),
        plan=CommPlan(algorithm="two_level"),
        timeout=timedelta(seconds=30),
        device=torch.device("cpu"),
        shares_update=True,
    )

    def counted(send):
        dist.barrier()
        before = bytes_sent()
        dist.barrier()  # nobody starts before everybody has read
        send()
        dist.barrier()  # everybody has sent
        return [after - earlier for after, earlier in zip(bytes_sent(), before, strict=True)]

    gradients, weights = torch.ones(NUM_BYTES // 2, dtype=torch.float16), torch.ones(NUM_BYTES // 2).half()

    def whole():
        engine.submit(gradients, bucket_index=0).wait()

    def shared():
        engine.submit(gradients, bucket_index=1, keeps_shard=True).wait()
        engine.submit(weights, bucket_index=0, exchange="node_gather").wait()

    whole(), shared()  # the first time ranks compare what they submit
    found = counted(whole), counted(shared)
    engine.close()
    return found


@pytest.mark.long
def test_a_shared_update_sends_the_bytes_of_two_level(cluster_or_skip):
    with Cluster(num_hosts=HOSTS, ranks_per_host=RANKS_PER_HOST, mbit_per_s=2000) as cluster:
        for whole, shared in cluster.call(sent_in_both, timeout_s=60):
            print(f"two_level {whole}, shared {shared}: bytes between hosts, inside")
            for one, other in zip(whole, shared, strict=True):
                assert other == pytest.approx(one, rel=TOLERANCE)
