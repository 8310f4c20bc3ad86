"""Weights that are still being gathered when forward begins: every reader waits for the gathered values."""

import pytest
import torch
from torch import nn

from lightning_hybrid.comm import CommTrace
from lightning_hybrid.optim import LARS
from lightning_hybrid.strategy.shard_update.late_gather import LateGather, is_compiled
from tests.scenes import at
from tests.strategy.shard_update.shared import fit, sgd


class Brings:
    """Future that writes a weight when it is waited for."""

    def __init__(self, weight):
        self.weight = weight
        self.is_done = False

    def wait(self):
        self.is_done = True
        self.weight.detach().fill_(0.5)


READERS = {
    "its module": lambda module, optimizer: module(torch.ones(1, 3)),
    "a list of weights": lambda module, optimizer: torch._foreach_norm(list(module.parameters())),
    "a state dict": lambda module, optimizer: module.state_dict(),
    "a callback": lambda module, optimizer: optimizer.param_groups[0]["params"][0].data,
    "another layer": lambda module, optimizer: nn.functional.linear(
        torch.ones(1, 3), weight=module.weight
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_of_a_weight_waits_for_it_alone(reader):
    module = nn.Linear(3, 3)
    unread = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    late = LateGather(CommTrace())
    futures = [Brings(module.weight), Brings(module.weight), Brings(unread.weight)]
    with late:
        for future in futures:
            late.add(future, [future.weight, future.weight])
        READERS[reader](module, optimizer)
        assert [future.is_done for future in futures] == [True, True, False]
        late.wait()
        assert futures[2].is_done


def test_a_reader_of_shape_or_flags_does_not_wait():
    module = nn.Linear(3, 3)
    future = Brings(module.weight)
    with LateGather(CommTrace()) as late:
        late.add(future, [module.weight])
        module.zero_grad()
        assert module.weight.requires_grad
        assert module.weight.shape == (3, 3)
        assert not future.is_done


def lars(module):
    return LARS(module.parameters(), lr=0.1, momentum=0.9, fused=True)


def num_under_way(trainer, module, *args):
    return len(trainer.strategy._extensions.members[0]._sharded_fit._late._futures)


@pytest.mark.parametrize("precision", ["16-true", "32-true"])
def test_a_step_leaves_its_weights_to_be_gathered_during_the_next_one(two_ranks, precision):
    options = {"ranks_per_node": 1, "callbacks": [at(on_train_batch_end=num_under_way)]}
    for seen in fit(two_ranks, sgd, precision, "world", num=2, **options):
        # All parameters with several blocks, and the convolution.
        assert seen.looks["on_train_batch_end"] == [4, 4]


@pytest.mark.parametrize("precision", ["16-true", "32-true"])
def test_a_step_on_scaled_gradients_leaves_its_weights_to_be_gathered_during_the_next_one(
    two_ranks, precision
):
    """Without a callback at the end of a batch, LARS steps on scaled gradients and its gather overlaps too."""
    options = {"ranks_per_node": 1, "callbacks": [at(on_train_batch_start=num_under_way)]}
    for seen in fit(two_ranks, lars, precision, "world", num=2, **options):
        assert seen.looks["on_train_batch_start"] == [0, 4]


def test_a_compiled_part_of_a_module_is_found():
    module = nn.Sequential(nn.Linear(2, 2))
    assert not is_compiled(module)
    module[0].compile(backend="eager")
    assert is_compiled(module)
    assert is_compiled(nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager")))
