"""Writes to the weights that are not ours are noticed, and no memory is read to find out that there was none."""

from __future__ import annotations

import copy
import io
import pickle

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import lightning_hybrid.precision.master_weights
from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.optim import LARS
from lightning_hybrid.precision.master_weights import MasterWeights
from lightning_hybrid.precision.write_tracking import is_untouched, mark_clean, track, untrack
from tests import toy


class Value:
    """What stands behind a parameter in fp32: a third of it."""

    def __init__(self, weight):
        self.master = weight.detach().float() / 3

    def exact(self):
        return self.master


def in_place(weight, data):
    with torch.no_grad():
        weight.mul_(2.0)


def in_inference_mode(weight, data):
    with torch.inference_mode():
        weight.view(-1)[1] = 3.0


def as_a_list(weight, data):
    with torch.no_grad():
        torch._foreach_mul_([weight], 2.0)


def through_detach(weight, data):
    weight.detach().clamp_(-0.1, 0.1)


def through_data(weight, data):
    weight.data.mul_(2.0)


def through_data_taken_long_ago(weight, data):
    data.mul_(2.0)


def a_new_memory(weight, data):
    weight.data = torch.full_like(weight, 2.0)


def from_a_vector(weight, data):
    nn.utils.vector_to_parameters(torch.full((weight.numel(),), 2.0, dtype=weight.dtype), [weight])


def a_new_memory_of_another_dtype(weight, data):
    weight.data = torch.full_like(weight, 1 / 3, dtype=torch.float32)
    assert weight.dtype is torch.float16


def a_state_dict(weight, data):
    module = nn.Linear(4, 3, bias=False, dtype=weight.dtype)
    module.weight = weight
    module.load_state_dict({"weight": torch.full_like(weight, 2.0)})


def init(weight, data):
    nn.init.constant_(weight, 2.0)


def another_optimizer(weight, data):
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1.0).step()
    weight.grad = None


def announced(weight, data):
    weight.detach().numpy()[0] = 2.0
    torch.autograd.graph.increment_version(weight)


WAYS = [in_place, in_inference_mode, as_a_list, through_detach, through_data, through_data_taken_long_ago]
WAYS += [a_new_memory, a_new_memory_of_another_dtype, from_a_vector, a_state_dict, init, another_optimizer, announced]


@pytest.mark.parametrize("write", WAYS, ids=lambda way: way.__name__)
def test_whatever_is_written_reaches_the_master(write):
    """Twice, with a step of ours between: what follows the first write must not be forgotten."""
    module = nn.Linear(4, 3, bias=False)
    masters = MasterWeights(module, torch.float16)
    masters.follow_device()
    pair = masters.pair_of(module.weight)
    data = module.weight.data if write is through_data_taken_long_ago else None
    for _ in range(2):
        pair.absorb_outside_writes_()
        before = pair.master.detach().clone()
        write(module.weight, data)
        assert not torch.equal(module.weight, before.half()), "the write must have changed something"
        assert not is_untouched(module.weight)
        pair.absorb_outside_writes_()
        assert torch.equal(pair.master.half(), module.weight)
        assert not torch.equal(pair.master, before)
        with torch.no_grad():
            pair.master.add_(0.25)
            module.weight.copy_(pair.master)
        pair.mark_clean()


def test_reading_is_no_write():
    weight = nn.Parameter(torch.rand(3))
    track(weight, Value(weight))
    assert not is_untouched(weight), "before it is marked clean anything may have happened"
    mark_clean(weight)
    (weight * 2).sum().backward()
    weight.grad.zero_()
    copies = [weight.detach().clone(), weight.cpu().half(), copy.deepcopy(weight), *nn.ParameterList([weight])]
    str(weight), weight.norm().item(), nn.Parameter(weight.detach()), [p for p in copies if p is weight]
    assert is_untouched(weight)


def test_a_watched_parameter_is_itself_and_its_copies_are_plain():
    weight = nn.Parameter(torch.rand(3))
    identity, plain = id(weight), copy.deepcopy(weight)
    track(weight, Value(weight))
    track(weight, Value(weight))
    assert isinstance(weight, nn.Parameter)
    assert id(weight) == identity
    assert type(weight + 1) is type(weight.detach()) is torch.Tensor
    assert repr(weight) == repr(plain)
    file = io.BytesIO()
    torch.save({"weight": weight.detach(), "whole": weight}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)["whole"]
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), loaded):
        assert type(other) is nn.Parameter
        assert torch.equal(other, plain / 3), "a copy holds what stands behind"
    untrack(weight)
    assert type(weight) is nn.Parameter
    assert not vars(weight)


def test_a_class_of_the_users_stays_and_is_always_compared():
    class Own(nn.Parameter):
        pass

    weight = Own(torch.rand(3))
    track(weight, Value(weight))
    mark_clean(weight)
    assert type(weight) is Own
    assert not is_untouched(weight)


@pytest.mark.parametrize("memory", ["contiguous", "channels_last", "slice"])
def test_one_element_written_in_a_large_layer_is_found(memory, monkeypatch):
    monkeypatch.setattr(lightning_hybrid.precision.master_weights, "_BLOCK", 64)
    module = nn.Conv2d(10, 7, 3, bias=False)
    if memory == "channels_last":
        module.to(memory_format=torch.channels_last)
    if memory == "slice":
        module.weight.data = torch.rand(7, 20, 3, 3)[:, ::2]
    masters = MasterWeights(module, torch.float16)
    pair = masters.pair_of(module.weight)
    for index in (0, 5, 63, 64, 320, 629):
        before = pair.master.detach().clone()
        with torch.no_grad():
            module.weight[torch.unravel_index(torch.tensor(index), module.weight.shape)] = 5.0
        pair.absorb_outside_writes_()
        assert (pair.master != before).sum() == 1


# ---- whole steps ---------------------------------------------------------------------------------------------------


class Comparisons(pl.Callback):
    """Counts comparisons of weights with masters, from the second step on; may write as a user would."""

    def __init__(self, write):
        self.write, self.steps = write, []

    def on_train_start(self, trainer, module):
        self.original = lightning_hybrid.precision.master_weights._is_rounded
        lightning_hybrid.precision.master_weights._is_rounded = self.count

    def count(self, low, master):
        self.steps[-1] += 1
        return self.original(low, master)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.steps.append(0)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.write == "data":
            module.net[5].weight.data.clamp_(-0.1, 0.1)
        elif self.write == "once" and trainer.global_step == 4:
            with torch.no_grad():
                module.net[5].weight.clamp_(-0.1, 0.1)

    def on_train_end(self, trainer, module):
        lightning_hybrid.precision.master_weights._is_rounded = self.original


def comparisons(optimizer, write, precision="16-true"):
    class Module(toy.Toy):
        def configure_optimizers(self):
            if optimizer == "lars_fused":
                return LARS(self.parameters(), lr=0.1, fused=True)
            return super().configure_optimizers()

    counting = Comparisons(write)
    trainer = toy.trainer(precision=precision, strategy=HybridAllReduceStrategy(), callbacks=[counting], max_epochs=1)
    module = Module(optimizer=optimizer)
    trainer.fit(module, toy.loader(64))
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    return counting.steps


@pytest.mark.parametrize(
    ("optimizer", "precision"), [("SGD", "16-true"), ("AdamW", "bf16-true"), ("lars_fused", "16-true")]
)
def test_steps_compare_no_weights_where_nobody_wrote(one_rank, optimizer, precision):
    """The net has six parameters in half precision: the first step compares them, no other does."""
    assert one_rank.run(comparisons, optimizer, None, precision, timeout_s=300) == [[6, 0, 0, 0, 0, 0, 0, 0]]


def test_steps_compare_what_somebody_wrote_or_may_write(one_rank):
    assert one_rank.run(comparisons, "SGD", "once") == [[6, 0, 0, 0, 1, 0, 0, 0]]
    assert one_rank.run(comparisons, "SGD", "data") == [[6, 1, 1, 1, 1, 1, 1, 1]]
