"""Report of values that fp16 cannot represent, with remedies, and without an effect on the run."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_hybrid.callbacks import HalfPrecisionReport, half_precision_report
from tests import scenes, toy
from tests.scenes import same


class Known(pl.LightningModule):
    """Layers of size 4: weights of 1e-9, an output of 1e5, a normalization, and gradients that need a loss scale."""

    def __init__(self, factor=1e-7):
        super().__init__()
        self.small = nn.Linear(4, 4, bias=False)
        self.large = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.dropout = nn.Dropout(0.5)
        self.factor = factor
        self.num_calls = 0
        self.register_buffer("seen", torch.zeros(()))
        nn.init.constant_(self.small.weight, 1e-9)
        nn.init.constant_(self.large.bias, 1e5)

    def training_step(self, batch, batch_idx):
        self.num_calls += 1
        self.seen += 1
        hidden = self.norm(self.large(batch + self.small(batch)))
        self.log("loss", hidden.mean())
        return {"loss": self.factor * self.dropout(hidden).sum()}


def batches():
    return torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0))


def report_on(module):
    report = half_precision_report(module, batches())
    return report, {(tensor.kind, tensor.name): tensor for tensor in report.tensors}


def test_each_tensor_out_of_range_is_named_with_its_share_and_its_remedy():
    report, tensors = report_on(Known())
    small = tensors["weight", "small.weight"]
    large = tensors["activation", "large (Linear)"]
    assert (small.below_subnormal, small.above) == (1, 0)
    assert "initialize the weights with a larger spread" in small.remedy
    assert "weight_norm_bounds" in small.remedy
    assert (large.below_subnormal, large.above) == (0, 1)
    assert "normalization" in large.remedy
    assert "bf16-true" in large.remedy
    assert tensors["weight", "large.bias"].above == 1
    assert ("weight", "norm.weight") not in tensors  # it stays fp32
    shares = "weight small.weight: 100.0% below 6e-8, 100.0% below 6e-5, 0.0% above 65,504"
    assert f"{shares}. Remedy: initialize the weights with a larger spread" in str(report)


def test_small_gradients_get_the_loss_scale_that_holds_them_and_large_ones_none():
    name = ("gradient", "dropout (Dropout)")
    report, tensors = report_on(Known(factor=1e-7))
    gradient = tensors[name]
    assert (gradient.below_subnormal, gradient.below_normal) == (0, 1)  # 1e-7, below 6e-5
    assert gradient.remedy == f"set loss_scale='dynamic' or loss_scale={report.loss_scale:g}"
    assert report.loss_scale == 2**24
    report, tensors = report_on(Known(factor=2.0**15))
    assert report.loss_scale == 1
    assert tensors[name].remedy == ""
    _, tensors = report_on(Known(factor=1e5))
    assert "bf16-true" in tensors[name].remedy


def test_edges_are_those_of_fp16():
    class Edges(Known):
        def training_step(self, batch, batch_idx):
            return self.small(batch).sum()

    module = Edges()
    edges = [2.0**-25, 2.0**-24, 2.0**-15, 2.0**-14, 65504.0, 65536.0, float("inf"), 0.0]
    module.small.weight = nn.Parameter(torch.tensor(edges)[:, None].expand(8, 4).contiguous())
    _, tensors = report_on(module)
    weight = tensors["weight", "small.weight"]
    assert weight.below_subnormal == pytest.approx(1 / 7)
    assert weight.below_normal == pytest.approx(3 / 7)
    assert weight.above == pytest.approx(2 / 7)
    half = torch.tensor(edges).half()  # the values rounded to fp16
    assert (half == 0).sum() == 2
    assert half.isinf().sum() == 2


def test_module_buffers_gradients_random_numbers_and_metrics_stay():
    module = Known()
    module.large.weight.grad = torch.ones(4, 4)
    before = toy.weights(module)
    state = torch.get_rng_state()
    half_precision_report(module, batches())
    assert same(dict(module.state_dict()), before)
    assert torch.equal(module.large.weight.grad, torch.ones(4, 4))
    assert module.small.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert module.num_calls == 0
    for layer in module.modules():
        assert not layer._forward_hooks
        assert not layer._backward_hooks


def test_a_fit_with_the_callback_is_the_fit_without_on_every_rank(two_ranks):
    """Each rank has the same shuffled batches, dropout and BatchNorm as without, also in half precision."""
    plain = scenes.fit(two_ranks, Drops, precision="16-true")
    reported = scenes.fit(two_ranks, Drops, precision="16-true", callbacks=[HalfPrecisionReport])
    for rank in range(2):
        assert same(plain[rank].weights, reported[rank].weights), f"rank {rank}"
        assert plain[rank].losses == reported[rank].losses, f"rank {rank}"


class Drops(toy.Toy):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)  # seeds dropout, because earlier tests drew numbers in the ranks

    def training_step(self, batch, batch_idx):
        return super().training_step([nn.functional.dropout(batch[0], 0.1), *batch[1:]], batch_idx)


def test_what_the_report_cannot_see_is_refused():
    module = Known()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match=r"`automatic_optimization` \(=False\) cannot be combined"):
        half_precision_report(module, batches())
    with pytest.raises(ValueError, match=r"`parameters\(\)` is empty"):
        half_precision_report(pl.LightningModule(), batches())
