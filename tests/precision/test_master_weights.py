"""Conversion of a module to half precision and back, tensor by tensor; no Trainer, no ranks."""

import copy
import pickle

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn.utils import parametrizations

from lightning_hybrid.precision import master_weights
from lightning_hybrid.precision.master_weights import MasterWeights

F16 = torch.float16


class Everything(nn.Module):
    """One of each kind of tensor that is treated apart."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.batch_norm = nn.BatchNorm2d(4)
        self.plain_batch_norm = nn.BatchNorm2d(4, affine=False)
        self.layer_norm = nn.LayerNorm(4)
        self.group_norm = nn.GroupNorm(2, 4)
        self.rms_norm = nn.RMSNorm(4)
        self.instance_norm = nn.InstanceNorm1d(4, affine=True)
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight  # tied
        self.scale = nn.Parameter(torch.rand(4))
        self.frozen = nn.Parameter(torch.rand(4), requires_grad=False)
        self.register_buffer("position", torch.rand(4))
        self.register_buffer("index", torch.arange(4))
        self.register_buffer("fp64", torch.rand(4, dtype=torch.float64))
        self.metric = torchmetrics.MeanMetric()
        self.metric.register_buffer("inside", torch.rand(2))


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_converted_and_what_stays(frozen):
    module = Everything()
    MasterWeights(module, F16, frozen=frozen)
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict(keep_vars=True).items()}
    half = {name for name, dtype in dtypes.items() if dtype is F16}
    trained = {"conv.weight", "conv.bias", "embedding.weight", "head.weight", "head.bias", "scale"}
    assert half == (trained | {"frozen"} if frozen else trained)
    assert dtypes["fp64"] is torch.float64
    assert dtypes["position"] is module.metric.inside.dtype is torch.float32
    assert {value.dtype for value in module.state_dict().values()} == {torch.float32, torch.float64, torch.int64}


def test_parameters_keep_their_identity_and_tied_ones_share_one_master():
    module = Everything()
    before = {name: id(p) for name, p in module.named_parameters()}
    masters = MasterWeights(module, F16)
    assert {name: id(p) for name, p in module.named_parameters()} == before
    assert masters.pair_of(module.head.weight) is masters.pair_of(module.embedding.weight)


def test_conversion_and_back_keeps_every_bit():
    module = Everything()
    before = copy.deepcopy(module.state_dict())
    MasterWeights(module, F16).restore()
    after = module.state_dict()
    assert all(before[name].dtype is after[name].dtype and torch.equal(before[name], after[name]) for name in before)


def test_tensors_that_were_half_from_the_start_come_back_half():
    module = nn.Linear(2, 2)
    module.bias.data = module.bias.data.half()
    MasterWeights(module, F16).restore()
    assert (module.weight.dtype, module.bias.dtype) == (torch.float32, F16)


def test_keep_fp32_keeps_the_named_types():
    module = Everything()
    MasterWeights(module, F16, keep_fp32=(nn.Embedding,))
    # the tied weight belongs to the head as well, and a tensor is converted once
    assert module.conv.weight.dtype is F16
    lone = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2))
    MasterWeights(lone, F16, keep_fp32=(nn.Embedding,))
    assert (lone[0].weight.dtype, lone[1].weight.dtype) == (torch.float32, F16)


@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "rms_norm", "instance_norm"])
def test_normalisation_computes_in_fp32_and_returns_half(name):
    """Values of 300 square to 90,000, beyond fp16: only fp32 statistics survive."""
    module = Everything()
    masters = MasterWeights(module, F16)
    layer, x = getattr(module, name), (300 * torch.randn(6, 4, 4)).half()
    expected = copy.deepcopy(layer)
    expected._forward_pre_hooks.clear()
    expected._forward_hooks.clear()
    with masters.hooks.in_step():
        y = layer(x)
    assert y.dtype is F16
    assert torch.equal(y, expected(x.float()).half())
    assert layer(x.float()).dtype is torch.float32, "outside of a step it is what it was"
    masters.restore()
    assert layer(x.float()).dtype is torch.float32
    assert torch.equal(layer(x.float()), expected(x.float())), "hooks must be gone"


def test_outside_writes_are_taken_over_and_untouched_elements_keep_their_fp32_bits():
    module = nn.Linear(4, 1, bias=False)
    masters = MasterWeights(module, F16)
    pair = masters.pair_of(module.weight)
    before = pair.master.clone()
    module.weight.data[0, 1] = 7.0
    module.weight.data[0, 2] = float("nan")
    pair.absorb_outside_writes_()
    assert pair.master[0, 1] == 7.0
    assert pair.master[0, 2].isnan()
    assert torch.equal(pair.master[0, [0, 3]], before[0, [0, 3]])


def test_state_dicts_are_fp32_of_any_part_and_any_copy():
    module = Everything()
    exact = copy.deepcopy(module.state_dict())
    masters = MasterWeights(module, F16)
    masters.follow_device()
    states = [module.state_dict(), copy.deepcopy(module).state_dict(), pickle.loads(pickle.dumps(module)).state_dict()]
    states.append({f"conv.{name}": value for name, value in module.conv.state_dict().items()})
    for state in states:
        assert all(
            torch.equal(value, exact[name]) and value.dtype is exact[name].dtype for name, value in state.items()
        )
    assert module.conv.state_dict(keep_vars=True)["weight"] is module.conv.weight


def test_a_copy_is_a_plain_fp32_module_that_runs_anywhere():
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    expected = copy.deepcopy(module)
    masters = MasterWeights(module, F16)
    masters.follow_device()
    x = torch.randn(3, 4)
    for same in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert {type(parameter) for parameter in same.parameters()} == {nn.Parameter}
        assert torch.equal(same(x), expected(x))
    masters.restore()
    assert torch.equal(module(x), expected(x))


def test_what_is_written_into_a_state_dict_is_written_into_the_module():
    module = nn.Linear(4, 2)
    masters = MasterWeights(module, F16)
    masters.follow_device()
    pair = masters.pair_of(module.weight)
    pair.mark_clean()
    module.state_dict()["weight"].fill_(1 / 3)
    pair.absorb_outside_writes_()
    assert torch.equal(module.weight, torch.full((2, 4), 1 / 3).half())
    assert torch.equal(pair.master, torch.full((2, 4), 1 / 3))


def test_loading_gives_the_masters_exact_fp32_values():
    module = nn.Sequential(nn.Linear(4, 2))
    state = {name: torch.randn_like(value) for name, value in module.state_dict().items()}
    masters = MasterWeights(module, F16)
    masters.follow_device()
    for pair in masters.pairs.values():
        pair.mark_clean()
    module.load_state_dict(state)
    assert torch.equal(module[0].weight, state["0.weight"].half())
    masters.restore()
    assert all(torch.equal(module.state_dict()[name], state[name]) for name in state)


def test_a_buffer_that_is_replaced_in_the_fit_stays_what_it_is():
    """`Module.to` makes new buffers: nothing may hang on the old ones."""
    module = Everything()
    masters = MasterWeights(module, F16)
    module._apply(lambda tensor: tensor.clone())
    module.position = torch.full((4,), 1 / 3)
    masters.follow_device()
    assert torch.equal(module.state_dict()["position"], torch.full((4,), 1 / 3))
    masters.restore()
    assert module.position.dtype is torch.float32


@pytest.mark.parametrize("reparametrise", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_what_a_weight_is_computed_from_stays_fp32(reparametrise):
    layer = reparametrise(nn.Linear(4, 3))
    MasterWeights(nn.Sequential(layer), F16)
    assert layer.weight.dtype is torch.float32
    assert layer.bias.dtype is F16


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW], ids=lambda m: m.__name__)
def test_masters_stand_in_for_one_call_only(make):
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    masters = MasterWeights(module, F16)
    optimizer = make(module.parameters(), lr=0.1)
    low = [id(p) for p in optimizer.param_groups[0]["params"]]
    for _ in range(2):
        for parameter in module.parameters():
            pair = masters.pair_of(parameter)
            (parameter if pair is None else pair.master).grad = torch.ones(parameter.shape)
        with masters.swapped_in(optimizer):
            assert all(p.dtype is torch.float32 for p in optimizer.param_groups[0]["params"])
            optimizer.step()
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == low
        assert {id(p) for p in optimizer.state} <= set(low)
    optimizer.state_dict()  # raises KeyError where state is keyed by tensors that are in no group


def test_low_tensors_are_back_although_the_step_raised():
    module = nn.Linear(2, 2)
    masters = MasterWeights(module, F16)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    low = [id(p) for p in optimizer.param_groups[0]["params"]]
    with pytest.raises(RuntimeError, match="in step"), masters.swapped_in(optimizer):
        raise RuntimeError("in step")
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == low


def test_lists_sum_gradients_to_the_bits_of_one_tensor_after_the_other(monkeypatch):
    """The lists are for CUDA; here both are given the CPU's tensors, one of which has no gradient at first."""
    sums = []
    for in_lists in (False, True):
        pairs = [
            master_weights.MasterPair(
                low=torch.zeros(numel, dtype=torch.float16), master=torch.zeros(numel), original_dtype=torch.float32
            )
            for numel in (5, 7, 1)
        ]
        generator = torch.Generator().manual_seed(0)
        for turn in range(3):
            for index, pair in enumerate(pairs):
                if turn or index:
                    pair.low.grad = torch.randn(pair.low.shape, generator=generator).half()
            ready = [pair for pair in pairs if pair.has_gradient_to_sum]
            (master_weights._sum_block_ if in_lists else master_weights.sum_gradients_)(ready)
            assert all(pair.low.grad is None for pair in pairs)
        sums.append([pair._sum for pair in pairs])
    for one, other in zip(*sums, strict=True):
        assert one.dtype is torch.float32
        assert torch.equal(one, other)
