"""Writes to the weights that are not ours are noticed, and no memory is read to find out that there was none."""

import copy

import pytest
import torch
from torch import nn

from lightning_hybrid.optim import LARS
from lightning_hybrid.precision import master_weights
from lightning_hybrid.precision.master_weights import MasterWeights
from lightning_hybrid.precision.write_tracking import is_untouched, mark_clean, track
from tests.scenes import at, fit
from tests.toy import Toy


class Value:
    def __init__(self, weight):
        self.master = weight.detach().float() / 3

    def exact(self):
        return self.master


def without_autograd(write):
    def way(weight, data):
        with torch.no_grad():
            write(weight)

    return way


def in_inference_mode(weight, data):
    with torch.inference_mode():
        weight.view(-1)[1] = 3.0


def a_new_memory(weight, data):
    weight.data = torch.full_like(weight, 2.0)


def a_new_memory_of_another_dtype(weight, data):
    weight.data = torch.full_like(weight, 1 / 3, dtype=torch.float32)
    assert weight.dtype is torch.float16


def another_optimizer(weight, data):
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=1.0).step()
    weight.grad = None


def announced(weight, data):
    weight.detach().numpy()[0] = 2.0
    torch.autograd.graph.increment_version(weight)


WAYS = {
    "in place": without_autograd(lambda weight: weight.mul_(2.0)),
    "through detach": lambda weight, data: weight.detach().clamp_(-0.1, 0.1),
    "through data": lambda weight, data: weight.data.mul_(2.0),
    "through data taken long ago": lambda weight, data: data.mul_(2.0),
}
for way in (in_inference_mode, a_new_memory, a_new_memory_of_another_dtype, another_optimizer, announced):
    WAYS[way.__name__] = way


@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_written_reaches_the_master(way):
    """Twice, with a step of ours between: what follows the first write must not be forgotten."""
    module = nn.Linear(4, 3, bias=False)
    masters = MasterWeights(module, torch.float16)
    masters.follow_device()
    pair = masters.pair_of(module.weight)
    data = module.weight.data if way == "through data taken long ago" else None
    for _ in range(2):
        pair.absorb_outside_writes_()
        before = pair.master.detach().clone()
        WAYS[way](module.weight, data)
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


def test_a_class_of_the_users_stays_and_is_always_compared():
    class Own(nn.Parameter):
        pass

    weight = Own(torch.rand(3))
    track(weight, Value(weight))
    mark_clean(weight)
    assert type(weight) is Own
    assert not is_untouched(weight)


@pytest.mark.parametrize("memory", ["channels_last", "slice"])
def test_one_element_written_in_a_large_layer_is_found(memory, monkeypatch):
    monkeypatch.setattr(master_weights, "_BLOCK", 64)
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


def clamp_data(trainer, module, *_):
    module.net[5].weight.data.clamp_(-0.1, 0.1)


def clamp_once(trainer, module, *_):
    if trainer.global_step == 4:
        with torch.no_grad():
            module.net[5].weight.clamp_(-0.1, 0.1)


def comparisons(module, precision, write):
    """Numbers of comparisons of weights with masters, by step."""
    counts, original = [], master_weights._is_rounded

    def count(low, master):
        counts[-1] += 1
        return original(low, master)

    looks = {"on_train_batch_start": lambda *_: counts.append(0), "on_train_end": lambda *_: list(counts)}
    looks |= {"on_train_batch_end": write} if write else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(master_weights, "_is_rounded", count)
        seen = fit(None, module := module(), precision=precision, callbacks=[at(**looks)], max_epochs=1)
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    return seen.looks["on_train_end"][0]


class Fused(Toy):
    def configure_optimizers(self):
        return LARS(self.parameters(), lr=0.1, fused=True)


@pytest.mark.parametrize(
    ("module", "precision", "write", "expected"),
    [
        (Toy, "16-true", None, [6, 0, 0, 0, 0, 0, 0, 0]),
        (Fused, "bf16-true", None, [6, 0, 0, 0, 0, 0, 0, 0]),
        (Toy, "16-true", clamp_once, [6, 0, 0, 0, 1, 0, 0, 0]),
        (Toy, "16-true", clamp_data, [6, 1, 1, 1, 1, 1, 1, 1]),
    ],
    ids=["SGD", "fused", "once", "data"],
)
def test_steps_compare_no_weights_but_what_somebody_wrote_or_may_write(one_rank, module, precision, write, expected):
    """The net has six parameters in half precision: the first step compares them."""
    assert one_rank.run(comparisons, module, precision, write, timeout_s=300) == [expected]
