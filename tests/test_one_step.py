"""One training step on two ranks, checked stage by stage against a float64 computation by hand.

The stages are those in the docstring of ``strategy.py``. The model is one fp16 matrix under a squared loss, so every
number of the step can be written down:

    loss = mean over the rank's batch of  |W x|^2 / 2          dW = mean of (W x) x^T          W: 3 x 8
"""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid import Comm, HybridAllReduceStrategy
from lightning_hybrid.comm import average_bucket
from lightning_hybrid.optim import LARS
from tests import toy
from tests.reference.families import paper

SCALE = 256.0
LR = 0.5
WEIGHT_DECAY = 0.01
TRUST = 0.02
HALF_ULP = 2.0**-11  # relative error of one rounding to fp16


class Indexed(Dataset):
    def __init__(self):
        self.x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return torch.tensor(index), self.x[index]


class OneMatrix(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.randn(3, 8, generator=torch.Generator().manual_seed(2)))
        self.at = {}

    def training_step(self, batch, batch_idx):
        indices, x = batch
        y = self.layer(x)
        loss = y.float().square().sum(1).mean() / 2
        self.at |= {"indices": indices, "x": x, "y": y.detach(), "loss": loss.detach()}
        self.at["inside"] = self.layer.weight.detach().clone()
        return loss

    def backward(self, loss):
        self.at["scaled_loss"] = loss.detach()
        super().backward(loss)

    def on_after_backward(self):
        self.at["after_backward"] = self.layer.weight.grad.clone()
        self.at["weight_after_backward"] = self.layer.weight.detach().clone()

    def on_before_optimizer_step(self, optimizer):
        self.at["unscaled"] = self.layer.weight.grad.clone()
        self.at["master_before"] = self.layer.weight.detach().clone()

    def on_train_batch_end(self, *args):
        self.at["master"] = self.layer.weight.detach().clone()
        self.at["trace"] = self.trainer.strategy.comm_trace.drain()

    def configure_optimizers(self):
        return LARS(self.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, trust_coefficient=TRUST)


def one_step(algorithm):
    module = OneMatrix()
    initial = module.layer.weight.detach().clone()

    def watched(state, bucket):
        module.at["bucket"] = bucket.buffer().clone()
        return average_bucket(state, bucket).then(note_average)

    def note_average(future):
        module.at["averaged"] = future.value().detach().clone().view(3, 8)
        return future.value()

    strategy = HybridAllReduceStrategy(
        comm=Comm(algorithm=algorithm), loss_scale=SCALE, ranks_per_node=2
    )
    strategy._comm.bucket_hook = watched
    trainer = toy.trainer(strategy=strategy, precision="16-true", max_steps=1)
    trainer.fit(module, DataLoader(Indexed(), batch_size=8))
    return {**module.at, "initial": initial, "skipped": trainer.precision_plugin.num_skipped_steps}


def relative(value, exact):
    return ((value.double() - exact).norm() / exact.norm()).item()


@pytest.fixture(scope="module", params=["flat", "hierarchical", "two_level"])
def step(request, two_ranks):
    return two_ranks.run(one_step, request.param)


def test_1_batches_are_disjoint_and_their_union_is_the_epoch(step):
    seen = [set(rank["indices"].tolist()) for rank in step]
    assert not seen[0] & seen[1]
    assert seen[0] | seen[1] == set(range(16))


def test_2_batch_keeps_its_dtypes_and_its_operands_are_cast_where_they_are_used(step):
    for rank in step:
        assert rank["x"].dtype is torch.float32
        assert torch.equal(rank["x"], Indexed().x[rank["indices"]])


def test_3_forward_is_fp16_with_fp32_sums_and_the_loss_is_fp32(step):
    for rank in step:
        exact = rank["x"].half().double() @ rank["initial"].half().double().T
        assert rank["y"].dtype is torch.float16
        assert relative(rank["y"], exact) < HALF_ULP
        assert rank["loss"].dtype is torch.float32
        assert rank["loss"].item() == pytest.approx(
            (rank["y"].double() ** 2).sum(1).mean().item() / 2, rel=1e-6
        )


def test_4_scaling_is_exact(step):
    assert all(torch.equal(rank["scaled_loss"], rank["loss"] * SCALE) for rank in step)


def local_gradient(rank):
    y = rank["y"].double()
    return (y.T @ rank["x"].half().double()) / len(y)


def test_5_and_6_bucket_holds_the_ranks_own_scaled_fp16_gradient(step):
    assert not torch.equal(step[0]["bucket"], step[1]["bucket"]), "ranks must see different data"
    for rank in step:
        assert rank["bucket"].dtype is torch.float16
        # backward rounds dL/dy once, and dW once
        assert relative(rank["bucket"].view(3, 8) / SCALE, local_gradient(rank)) < 2 * HALF_ULP


def test_7_and_8_all_ranks_hold_the_same_bits_of_the_mean(step):
    mean = (step[0]["bucket"].double() + step[1]["bucket"].double()).view(3, 8) / 2
    assert torch.equal(step[0]["averaged"], step[1]["averaged"])
    assert step[0]["averaged"].dtype is torch.float16
    assert relative(step[0]["averaged"], mean) < HALF_ULP


def test_9a_unscaling_is_exact(step):
    for rank in step:
        assert torch.equal(rank["after_backward"], rank["unscaled"])
        assert rank["unscaled"].dtype is torch.float32
        assert torch.equal(rank["unscaled"], rank["averaged"].float() / SCALE)


def test_9b_lars_steps_the_fp32_weight_which_started_exact(step):
    for rank in step:
        assert torch.equal(rank["master_before"], rank["initial"])
        options = {"momentum": 0.9, "weight_decay": WEIGHT_DECAY, "trust_coefficient": TRUST}
        exact = paper(rank["initial"].double(), [rank["unscaled"].double()], [LR], **options)
        moved = rank["master"].double() - rank["initial"].double()
        should = exact - rank["initial"].double()
        # fp32 weights of size 1 move by 1e-2, so the relative error is 2**-24 / 1e-2 plus a margin
        assert (moved - should).norm() / should.norm() < 1e-4
        assert relative(rank["master"], exact) < 1e-6


def test_9c_the_model_is_rounded_inside_of_the_step_only(step):
    for rank in step:
        assert torch.equal(rank["inside"], rank["initial"].half())
        assert torch.equal(rank["weight_after_backward"], rank["initial"])
        assert rank["master"].dtype is torch.float32
    assert torch.equal(step[0]["master"], step[1]["master"])


def test_10_metrics_count_one_step_without_a_skip(step):
    for rank in step:
        assert rank["skipped"] == 0
        assert (rank["trace"].num_steps, rank["trace"].num_buckets) == (1, 1)
        assert rank["trace"].num_bytes == 3 * 8 * 2
        assert 0 < rank["trace"].exposed_s <= rank["trace"].busy_s
