"""Bytes that stay in a node where layers are cut over its ranks: those of the images, counted by the kernel."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.models.sliced import sliced_pair
from tests.netlab.cluster import Cluster
from tests.netlab.test_bytes import TOLERANCE, bytes_sent

# fc6 and fc7 of AlexNet at an eighth of its features, fp16, 64 images on each of four ranks.
NUM_RANKS, NUM_IMAGES, NUM_INPUTS, NUM_FEATURES = 4, 64, 1152, 512


def a_step():
    """What this host sent over its loopback, forward and backward."""
    fc6, fc7 = nn.Linear(NUM_INPUTS, NUM_FEATURES), nn.Linear(NUM_FEATURES, NUM_FEATURES)
    fc6, fc7 = (layer.half() for layer in sliced_pair(fc6, fc7, group=dist.group.WORLD))
    images = torch.randn(NUM_IMAGES, NUM_INPUTS).half().requires_grad_()
    fc7(fc6(images).relu()).sum().backward()  # opens connections
    dist.barrier()
    _, before = bytes_sent()
    dist.barrier()  # nobody starts before everybody has read
    fc7(fc6(images).relu()).sum().backward()
    dist.barrier()  # everybody has sent
    _, after = bytes_sent()
    dist.barrier()
    return after - before


@pytest.mark.long
def test_a_pair_sends_its_images_and_no_gradients(cluster_or_skip):
    """2 (g - 1) b (n_in + n_out) elements from each rank; whole layers would send 2 (g - 1) / g of all weights."""
    with Cluster(num_hosts=1, ranks_per_host=NUM_RANKS, mbit_per_s=1000) as cluster:
        sent = max(cluster.call(a_step, timeout_s=60))
    claim = NUM_RANKS * 2 * (NUM_RANKS - 1) * NUM_IMAGES * (NUM_INPUTS + NUM_FEATURES) * 2
    whole = 2 * (NUM_RANKS - 1) * (NUM_INPUTS + NUM_FEATURES) * NUM_FEATURES * 2
    print(f"sent {sent}, claimed {claim}; gradients of whole layers {whole}")
    assert claim <= sent <= claim * (1 + TOLERANCE) + 2**16  # barriers and counts of images
