"""Bytes that stay in a node where layers are cut over its ranks: those of the images, counted by the kernel."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.strategy.node_slices.sliced_fit import cut_
from tests.netlab.cluster import Cluster
from tests.netlab.test_bytes import TOLERANCE, bytes_sent

# fc6, fc7 and fc8 of AlexNet at a quarter of their features, fp16, a quarter of 64 images on each of eight ranks: all
# bytes are those of the whole network, divided by 16.
NUM_RANKS, NUM_IMAGES, NUM_INPUTS, NUM_FEATURES, NUM_CLASSES = 8, 16, 2304, 1024, 256


def counted(step):
    """What this host sent over its loopback in one step."""
    step()  # opens connections
    dist.barrier()
    _, before = bytes_sent()
    dist.barrier()  # nobody starts before everybody has read
    step()
    dist.barrier()  # everybody has sent
    _, after = bytes_sent()
    dist.barrier()
    return after - before


def sent():
    """By the pair; by pair and head; and by the sum of the gradients of whole layers."""
    torch.manual_seed(0)
    layers = [(NUM_INPUTS, NUM_FEATURES), (NUM_FEATURES, NUM_FEATURES), (NUM_FEATURES, NUM_CLASSES)]
    net = nn.Sequential(*(nn.Linear(*sizes) for sizes in layers)).half()
    gradients = torch.cat([one.detach().flatten() for one in net.parameters()])
    fc6, fc7, fc8 = cut_(net, [("0", "1"), ("2",)], dist.group.WORLD)
    images = torch.randn(NUM_IMAGES, NUM_INPUTS).half().requires_grad_()
    return [
        counted(lambda: fc7(fc6(images).relu()).sum().backward()),
        counted(lambda: fc8(fc7(fc6(images).relu())).sum().backward()),
        counted(lambda: dist.all_reduce(gradients)),
    ]


@pytest.mark.long
def test_slices_send_their_images_and_no_gradients(cluster_or_skip):
    """2 (g - 1) b (n_in + n_out) elements from each rank; whole layers would send 2 (g - 1) / g of all weights."""
    with Cluster(num_hosts=1, ranks_per_host=NUM_RANKS, mbit_per_s=1000) as cluster:
        pair, cut, whole = (max(of_ranks) for of_ranks in zip(*cluster.call(sent, timeout_s=120), strict=True))
    rows = NUM_RANKS * 2 * (NUM_RANKS - 1) * NUM_IMAGES * 2
    claims = rows * (NUM_INPUTS + NUM_FEATURES), rows * (NUM_INPUTS + 2 * NUM_FEATURES + NUM_CLASSES // NUM_RANKS)
    print(f"pair {pair} of {claims[0]}, with the head {cut} of {claims[1]}, gradients of whole layers {whole}")
    for found, claim in zip((pair, cut), claims, strict=True):
        assert claim <= found <= claim * (1 + TOLERANCE) + 2**19  # barriers and counts of images of eight ranks
    whole_fc8 = NUM_RANKS * 2 * (NUM_RANKS - 1) / NUM_RANKS * NUM_FEATURES * NUM_CLASSES * 2
    assert whole / (pair + whole_fc8) == pytest.approx(5.4, rel=0.05)
    assert whole / cut == pytest.approx(6.5, rel=0.05)
