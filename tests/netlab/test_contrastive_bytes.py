"""Bytes that a loss over the pairs of all ranks sends, counted by the kernel against the formula of its docstring."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.contrastive import InfoNCE, SigLIP
from tests.netlab.cluster import Cluster
from tests.netlab.test_bytes import TOLERANCE, bytes_sent

RANKS, PAIRS, FEATURES = 4, 4096, 128
FORMULAS = {"InfoNCE": 16 * FEATURES + 8, "SigLIP": 12 * FEATURES}  # times N (W - 1) / W, by each rank


def bytes_of_losses():
    found = {}
    for name, loss in (("InfoNCE", InfoNCE()), ("SigLIP", SigLIP())):
        views = [torch.randn(PAIRS // RANKS, FEATURES, requires_grad=True) for _ in range(2)]
        loss(*views).backward()  # opens connections
        dist.barrier()
        _, before = bytes_sent()
        dist.barrier()
        loss(*views).backward()
        dist.barrier()
        found[name] = bytes_sent()[1] - before
        dist.barrier()
    return found


@pytest.mark.long
def test_losses_send_what_their_formulas_say(cluster_or_skip):
    with Cluster(num_hosts=1, ranks_per_host=RANKS, mbit_per_s=1000) as cluster:
        sent = cluster.call(bytes_of_losses, timeout_s=150)
    for name, formula in FORMULAS.items():
        claim = (RANKS - 1) * PAIRS * formula  # of all ranks: they share a host
        counted = max(each[name] for each in sent)
        print(f"{name}: sent {counted}, claimed {claim}, ratio {counted / claim:.4f}")
        assert claim <= counted <= claim * (1 + TOLERANCE) + 2**16
