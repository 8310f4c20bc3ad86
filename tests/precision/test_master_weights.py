"""Conversion of a module to half precision and back, tensor by tensor; no Trainer, no ranks."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn.utils import parametrizations

from lightning_hybrid.precision import master_weights
from lightning_hybrid.precision.master_weights import MasterWeights
from tests.scenes import same

F16 = torch.float16


class Everything(nn.Module):
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
        self.empty = nn.Parameter(torch.zeros(0, 3))
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
    trained = {"conv.weight", "conv.bias", "embedding.weight", "head.weight", "head.bias", "scale", "empty"}
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


def test_conversion_and_back_keeps_every_bit_and_what_was_half_from_the_start_half():
    module = Everything()
    module.conv.bias.data = module.conv.bias.data.half()
    before = copy.deepcopy(module.state_dict())
    MasterWeights(module, F16).restore()
    assert same(module.state_dict(), before)
    assert module.conv.bias.dtype is F16


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


def followed(module):
    masters = MasterWeights(module, F16)
    masters.follow_device()
    for pair in masters.pairs.values():
        pair.mark_clean()
    return masters


def test_state_dicts_are_fp32_of_any_part_and_any_copy():
    module = Everything()
    exact = copy.deepcopy(module.state_dict())
    followed(module)
    for one in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert same(dict(one.state_dict()), dict(exact))
    of_part = {f"conv.{name}": value for name, value in module.conv.state_dict().items()}
    assert same(of_part, {name: exact[name] for name in of_part})
    assert module.conv.state_dict(keep_vars=True)["weight"] is module.conv.weight


def test_a_copy_is_a_plain_fp32_module_that_runs_anywhere():
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    x, expected = torch.randn(3, 4), copy.deepcopy(module)
    masters = followed(module)
    copies = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    masters.restore()
    for one in (*copies, module):
        assert {type(parameter) for parameter in one.parameters()} == {nn.Parameter}
        assert torch.equal(one(x), expected(x))


@pytest.mark.parametrize("reparametrise", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_what_a_weight_is_computed_from_stays_fp32(reparametrise):
    layer = reparametrise(nn.Linear(4, 3))
    MasterWeights(nn.Sequential(layer), F16)
    assert layer.weight.dtype is torch.float32
    assert layer.bias.dtype is F16


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW], ids=lambda m: m.__name__)
def test_masters_stand_in_for_one_call_only_also_where_it_raises(make):
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    masters = MasterWeights(module, F16)
    optimizer = make(module.parameters(), lr=0.1)
    low = [id(p) for p in optimizer.param_groups[0]["params"]]
    for is_error in (False, False, True):
        for parameter in module.parameters():
            pair = masters.pair_of(parameter)
            (parameter if pair is None else pair.master).grad = torch.ones(parameter.shape)
        with pytest.raises(RuntimeError, match="in step") if is_error else nullcontext(), masters.swapped_in(optimizer):
            assert all(p.dtype is torch.float32 for p in optimizer.param_groups[0]["params"])
            optimizer.step()
            if is_error:
                raise RuntimeError("in step")
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == low
        assert {id(p) for p in optimizer.state} <= set(low)
    optimizer.state_dict()  # raises KeyError where state is keyed by tensors that are in no group


def test_lists_sum_gradients_to_the_bits_of_one_tensor_after_the_other():
    """The lists are for CUDA; here both are given the CPU's tensors, one of which has no gradient at first."""
    sums = []
    for sum_ in (master_weights._sum_block_, master_weights.sum_gradients_):
        lows = [torch.zeros(numel, dtype=F16) for numel in (5, 7, 1)]
        pairs = [master_weights.MasterPair(low=low, master=low.float(), original_dtype=torch.float32) for low in lows]
        generator = torch.Generator().manual_seed(0)
        for turn in range(3):
            for low in lows if turn else lows[1:]:
                low.grad = torch.randn(low.shape, generator=generator).half()
            sum_([pair for pair in pairs if pair.low.grad is not None])
            assert all(low.grad is None for low in lows)
        sums.append([pair._sum for pair in pairs])
    assert {one.dtype for one in sums[0]} == {torch.float32}
    assert same(*sums)
