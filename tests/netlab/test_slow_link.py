"""Link with half its bandwidth, and a slow rank in addition, in fits on an emulated cluster."""

import threading
import time
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_hybrid.callbacks import StragglerMonitor
from tests import toy
from tests.callbacks.stragglers.cases import StopsWhenNamed
from tests.netlab.cluster import Cluster
from tests.scenes import this_rank

NUMEL = 250_000
MBIT_PER_S = 100
NUM_HOSTS = 4
WINDOW = 5  # steps


class Wide(pl.LightningModule):
    """Module with a megabyte of gradients, which takes longer on the links than everything else."""

    def __init__(self, slow_rank):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL))
        self.slow_rank = slow_rank

    def training_step(self, batch, batch_idx):
        if this_rank() == self.slow_rank:
            time.sleep(0.3)
        return (self.weight * batch[0].sum()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def messages_of_a_fit(num_windows, slow_rank=-1):
    """Return the reports of rank zero with the number of windows so far. The fit ends with the first report."""
    monitor = StragglerMonitor(every_n_steps=WINDOW)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = toy.trainer(
            devices=1,
            num_nodes=dist.get_world_size(),
            max_epochs=-1,
            max_steps=num_windows * WINDOW,
            callbacks=[monitor, StopsWhenNamed(monitor)],
        )
        trainer.fit(Wide(slow_rank), DataLoader(toy.Blobs(64), batch_size=4))
    return [(step / WINDOW, text) for step, text in monitor.messages]


def run(rates, *args):
    with Cluster(num_hosts=len(rates), ranks_per_host=1, mbit_per_s=rates, delay_us=200) as cluster:
        return cluster.call(messages_of_a_fit, *args, timeout_s=500)[0]


@pytest.mark.long
@pytest.mark.parametrize("slow_host", range(NUM_HOSTS))
def test_a_link_at_half_its_rate_is_named(cluster_or_skip, slow_host):
    rates = [MBIT_PER_S] * NUM_HOSTS
    rates[slow_host] /= 2
    messages = run(rates, 20)
    assert len(messages) == 1, messages
    assert f"(rank {slow_host}) is slow: it carries" in messages[0][1]


@pytest.mark.long
def test_equal_links_are_not_named_and_a_slow_rank_on_them_is(cluster_or_skip):
    rates = [MBIT_PER_S] * NUM_HOSTS
    assert run(rates, 20) == []
    ((_, text),) = run(rates, 20, 1)
    assert text.startswith("rank 1 on host")
    assert "is slow: forward takes" in text


@pytest.mark.long
def test_of_two_hosts_a_link_that_becomes_slow_is_named(cluster_or_skip):
    with Cluster(num_hosts=2, ranks_per_host=1, mbit_per_s=MBIT_PER_S, delay_us=200) as cluster:
        slowed = threading.Timer(30.0, cluster.spoil_link, (1,), {"mbit_per_s": MBIT_PER_S / 2})
        slowed.start()
        messages = cluster.call(messages_of_a_fit, 1000, timeout_s=500)[0]
        slowed.join()
    assert len(messages) == 1, messages
    assert "the link from host" in messages[0][1]
