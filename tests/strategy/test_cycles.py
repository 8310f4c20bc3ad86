"""Many complete fits in one process, as a sweep or a notebook makes them: nothing stays behind."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_hybrid import Comm, HybridAllReduceStrategy
from tests import toy
from tests.held import growth

NUM_CYCLES = 50
MOST_BYTES = 4 * 2**20
"""Of growth over all cycles: 80 KiB for each. Over three times what was seen; arenas of memory are never at rest."""


class Tiny(toy.Toy):
    """One layer: a fit is all set-up and teardown."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(toy.NUM_FEATURES, toy.NUM_CLASSES)

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0]).float(), batch[1])


def growth_over_fits():
    """Two nodes of one rank and one node of two, in turns: every kind of group and lane that two ranks have."""
    topologies = itertools.cycle([("auto", 1), ("hierarchical", 2)])

    def fit():
        algorithm, ranks_per_node = next(topologies)
        strategy = HybridAllReduceStrategy(comm=Comm(algorithm=algorithm), ranks_per_node=ranks_per_node)
        trainer = toy.trainer(strategy=strategy, precision="16-true", max_epochs=1)
        module = Tiny()
        trainer.fit(module, toy.loader(num_samples=32))
        assert trainer.global_step == 2
        assert module.net.weight.dtype is torch.float32  # torn down: the masters are back

    return growth(fit, num_warm_up=6, num_cycles=NUM_CYCLES)


@pytest.mark.long
def test_50_fits_leave_no_thread_no_group_no_file_and_no_memory_behind(two_ranks):
    for more in two_ranks.run(growth_over_fits):
        assert all(more[name] <= 0 for name in ("threads", "groups", "files")), more
        assert more["bytes"] <= MOST_BYTES, more
