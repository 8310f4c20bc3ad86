"""Bytes of steps between nodes, counted by the kernel: two sums of weights in H steps, in fp32 or through a codec."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_hybrid import Comm, HybridAllReduceStrategy, LocalSteps
from lightning_hybrid.comm import CommPlan
from tests import toy
from tests.netlab.cluster import Cluster
from tests.netlab.test_bytes import TOLERANCE, bytes_sent

HOSTS, RANKS_PER_HOST, WIDTH, NUM_STEPS = 4, 2, 2048, 16
# In small chunks messages of 4 bits are of a few KiB, of which headers are some percent.
PLAN = CommPlan(algorithm="two_level", chunk_bytes=2**22)
# What a node sends of a byte that is summed over nodes, and of words on state and signals, all steps together.
SENT, WORDS = 2 * (HOSTS - 1) / HOSTS, 100_000


class OneLayer(pl.LightningModule):
    """As many weights as gradients weigh something, and momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Sent(Callback):
    """What this host sends to others from the first step to the last."""

    def on_train_start(self, trainer, module):
        dist.barrier()
        self.before, _ = bytes_sent()
        dist.barrier()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == NUM_STEPS:
            dist.barrier()
            self.total = bytes_sent()[0] - self.before
            dist.barrier()


def sent_by_fits():
    found = []
    for every, across in ((1, None), (8, None), (8, "int8"), (8, "int4")):
        sent = Sent()
        strategy = HybridAllReduceStrategy(
            between_nodes=LocalSteps(every=every, dtype=across), comm=Comm(plan=PLAN, tune="off")
        )
        trainer = toy.trainer(strategy=strategy, precision="16-true", max_steps=NUM_STEPS, callbacks=[sent])
        trainer.fit(OneLayer(), DataLoader(torch.randn(NUM_STEPS * HOSTS * RANKS_PER_HOST, WIDTH), batch_size=1))
        found.append(sent.total)
    return found


@pytest.mark.long
def test_nodes_send_weights_and_momentum_once_in_eight_steps(cluster_or_skip):
    """In 8 bits an eighth of what fp16 gradients are in every step."""
    with Cluster(num_hosts=HOSTS, ranks_per_host=RANKS_PER_HOST, mbit_per_s=2000) as cluster:
        for of_host in cluster.call(sent_by_fits, timeout_s=120):
            expected = [2 * NUM_STEPS, *(2 * one * NUM_STEPS / 8 for one in (4, 258 / 256, 130 / 256))]  # an element
            print(of_host, [one / of_host[0] for one in of_host])
            assert of_host == pytest.approx([WORDS + SENT * WIDTH**2 * one for one in expected], rel=TOLERANCE)
            assert of_host[2] / of_host[0] == pytest.approx(1 / 8, rel=TOLERANCE)
