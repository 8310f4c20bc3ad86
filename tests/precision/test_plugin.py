"""Half precision on fp32 master weights with a real Trainer on real ranks. Each test is a promise to users."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from packaging.version import Version
from torch import nn
from torch.utils.data import DataLoader

from lightning_hybrid import MasterWeightPrecision
from lightning_hybrid.precision.loss_scale import DynamicLossScale
from tests import toy
from tests.scenes import Spoiled, at, fit, same
from tests.toy import Toy

HALF = {"16-true": torch.float16, "bf16-true": torch.bfloat16}
NORMS = ("net.2.", "net.6.")
fp16 = partial(fit, precision="16-true")


def outside(trainer, module, *_):
    (optimizer,) = trainer.optimizers
    parameters = list(module.parameters())
    in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
    state_dtypes = set()
    for state in optimizer.state.values():
        state_dtypes |= {value.dtype for value in state.values() if torch.is_tensor(value)}
    return {
        "dtypes": {p.dtype for p in parameters} | {p.grad.dtype for p in parameters},
        "buffers": {b.dtype for b in module.buffers()},
        "in_groups": in_groups == {id(p) for p in parameters} >= {id(p) for p in optimizer.state},
        "state": state_dtypes,
    }


class Noted(Toy):
    """Module that records the dtypes of its parameters in each step, and checks that they are rounded."""

    def __init__(self, **options):
        super().__init__(**options)
        self.inside = {}
        self.outside = {}

    def on_train_batch_start(self, batch, batch_idx):
        self.outside = {name: p.detach().clone() for name, p in self.named_parameters()}

    def training_step(self, batch, batch_idx):
        self.inside = {name: p.dtype for name, p in self.named_parameters()}
        for name, parameter in self.named_parameters():
            assert torch.equal(parameter.detach(), self.outside[name].to(parameter.dtype))
        return super().training_step(batch, batch_idx)


def dtypes_inside(trainer, module, *_):
    return module.inside


@pytest.mark.parametrize("precision", HALF)
def test_parameters_are_half_inside_of_a_step_and_everything_is_fp32_outside(two_ranks, precision):
    module = partial(Noted, optimizer="AdamW", lr=1e-3)
    looks = at(on_train_batch_end=outside, on_train_epoch_end=dtypes_inside)
    for seen in fit(two_ranks, module, precision=precision, callbacks=[looks]):
        for name, dtype in seen.looks["on_train_epoch_end"][-1].items():
            expected = torch.float32 if name.startswith(NORMS) else HALF[precision]
            assert dtype is expected, f"{name} on rank {seen.rank}"
        last = seen.looks["on_train_batch_end"][-1]
        assert last["dtypes"] == {torch.float32}, f"rank {seen.rank}"
        assert last["buffers"] == {torch.float32, torch.int64}, f"rank {seen.rank}"
        assert last["state"] == {torch.float32}, f"rank {seen.rank}"
        assert last["in_groups"], f"rank {seen.rank}"


def test_layers_that_are_to_stay_fp32_do_and_train_on_all_ranks(two_ranks):
    plugin = MasterWeightPrecision("16-true", keep_fp32=(nn.Linear,))
    looks = at(on_train_epoch_end=dtypes_inside)
    rank_0, rank_1 = fit(two_ranks, Noted, precision_plugin=plugin, callbacks=[looks])
    for name, dtype in rank_0.looks["on_train_epoch_end"][-1].items():
        assert dtype is (torch.float16 if name.startswith("net.1.") else torch.float32), name
    assert rank_0.losses != rank_1.losses, "ranks must see different data"
    assert rank_0.losses[-1] < 0.5 * rank_0.losses[0]
    assert same(rank_0.parameters, rank_1.parameters)


class ExactModule(pl.LightningModule):
    """Module whose gradients are small integers, exact in fp16 at every scale up to 2**11 on every rank."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0) / 8)

    def training_step(self, batch, batch_idx):
        return (self.weight.float() * (batch.float().sum(0) + 4 * self.global_rank)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=2.0**-10, momentum=0.5)


def test_loss_scale_does_not_change_the_step(two_ranks):
    """Powers of two are exact, so scales 1 and 1024 give the same bits as fp32 without scaling."""
    train = DataLoader(torch.arange(-16.0, 16.0).reshape(8, 4), batch_size=1)
    scene = {"train": train, "max_epochs": 1, "accumulate_grad_batches": 2}
    reference = fit(two_ranks, ExactModule, precision="32-true", **scene)[0]
    for scale in (1, 1024):
        for seen in fp16(two_ranks, ExactModule, loss_scale=scale, **scene):
            assert same(seen.weights, reference.weights)


class HalfLoss(ExactModule):
    """Module with a half-precision loss of at least 2, like that of `self(x).mean()`."""

    def training_step(self, batch, batch_idx):
        return (self.weight * 0).sum() + 2 + self.global_rank

    def backward(self, loss):
        self.scaled_loss = loss.detach()
        super().backward(loss)


def losses_of(trainer, module, *_):
    return module.scaled_loss


def test_a_loss_in_half_precision_is_scaled_in_fp32(two_ranks):
    """The scaled loss is at least 65,536, which is inf in fp16."""
    scene = {
        "train": DataLoader(torch.zeros(8, 4), batch_size=1),
        "max_epochs": 1,
        "loss_scale": 2**15,
    }
    for rank, seen in enumerate(
        fp16(two_ranks, HalfLoss, callbacks=[at(on_train_batch_end=losses_of)], **scene)
    ):
        assert len(seen.looks["on_train_batch_end"]) == 4
        assert all(
            same(loss, torch.tensor(2.0**15 * (2 + rank)))
            for loss in seen.looks["on_train_batch_end"]
        )
        assert seen.num_skipped == 0


@pytest.mark.parametrize("call", ["fit", "predict"])
def test_exact_fp32_weights_are_back_after(two_ranks, call):
    before = toy.weights(Toy())
    for seen in fp16(two_ranks, partial(Toy, lr=0.0), call=call, max_epochs=1):
        after = dict(seen.weights)
        for name in before:
            # BatchNorm's statistics have changed with the data.
            if call == "fit" and name.startswith("net.2."):
                after[name] = before[name]
        assert same(before, after), f"rank {seen.rank}"


def dtypes_after_an_error():
    """Return the dtypes of parameters and gradients, and of the output."""
    module = Breaks()
    seen = fit(None, module, precision="16-true", raises=True)
    assert "user's bug" in seen.error
    output = module.net(torch.ones(4, toy.NUM_FEATURES))
    return {(p.dtype, p.grad_dtype) for p in module.parameters()}, output.dtype


class Breaks(Toy):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise KeyError("user's bug")
        return super().training_step(batch, batch_idx)


def test_module_and_gradients_are_fp32_after_an_error_in_training(one_rank):
    ((dtypes, output_dtype),) = one_rank.run(dtypes_after_an_error)
    assert dtypes == {(torch.float32, torch.float32)}
    assert output_dtype is torch.float32


class Scheduled(Spoiled):
    def __init__(self, interval="step", **options):
        super().__init__(**options)
        self.interval = interval

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": self.interval},
        }


def rate_and_weight(trainer, module, *_):
    weight = module.net[8].weight.detach().float()
    return trainer.optimizers[0].param_groups[0]["lr"], weight.sum().item()


RATES = at(on_train_batch_end=rate_and_weight, on_train_end=rate_and_weight)


@pytest.mark.parametrize(
    ("bad", "rates"),
    [((0, 2), [0.1, 0.05, 0.05, 0.025]), ((), [0.05, 0.025, 0.0125, 0.00625])],
    ids=str,
)
def test_one_bad_rank_makes_every_rank_skip_and_the_schedule_wait(two_ranks, bad, rates):
    """Torch's warning about a scheduler that steps before the optimizer would be an error here."""
    module = partial(Scheduled, batches=bad)
    scale = DynamicLossScale(2.0**10)
    for seen in fp16(two_ranks, module, max_epochs=1, loss_scale=scale, callbacks=[RATES]):
        history = seen.looks["on_train_batch_end"]
        assert (seen.num_skipped, seen.loss_scale) == (len(bad), 2.0 ** (10 - len(bad)))
        assert [rate for rate, _ in history] == rates, f"rank {seen.rank}"
        weights = [weight for _, weight in history]
        # A skipped step leaves the weights unchanged.
        assert (weights[2] == weights[1]) is bool(bad), f"rank {seen.rank}"
        assert weights[3] != weights[2], f"rank {seen.rank}"


def test_a_schedule_by_epochs_moves_although_its_last_step_was_skipped(two_ranks):
    """The last of four steps of the epoch is skipped, and the learning rate still halves after the epoch."""
    seen = fp16(
        two_ranks,
        partial(Scheduled, interval="epoch", batches=[3]),
        max_epochs=1,
        callbacks=[RATES],
    )[0]
    assert seen.num_skipped == 1
    assert seen.looks["on_train_end"][0][0] == 0.05


def test_endless_overflow_stops_with_step_scale_and_cause(two_ranks):
    module = partial(Scheduled, batches=range(100), factor=float("nan"))
    for seen in fp16(two_ranks, module, max_epochs=100, raises=True):
        assert "inf or nan for 40 consecutive steps" in seen.error
        assert "The loss scale is 1, " in seen.error
        assert "net.1.weight" in seen.error
        assert all(
            torch.equal(value, toy.weights(Toy())[name]) for name, value in seen.parameters.items()
        )
    assert "not finite. Check the learning rate" in seen.error  # rank 1, whose loss is not finite


class Compiled(Toy):
    def __init__(self):
        super().__init__()
        # Trace the whole network, but skip code generation, which takes minutes. A graph break is an error.
        self.net.compile(backend="aot_eager", fullgraph=True)

    def on_train_end(self):
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.14"),
    reason="torch.compile cannot trace `Unflatten` under a torch function mode",
)
def test_a_compiled_network_is_one_graph_in_all_steps_and_trains_like_the_eager_one(one_rank):
    (compiled,), (eager,) = (
        fp16(one_rank, kind, max_epochs=1, timeout_s=180) for kind in (Compiled, Toy)
    )
    assert compiled.losses == pytest.approx(eager.losses, abs=0.02)


class OwnsTheClosure(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


class Chooses(Toy):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def configure_optimizers(self):
        return self.make(self.parameters())


@pytest.mark.parametrize(
    "make",
    [partial(torch.optim.LBFGS, lr=0.1, max_iter=3), partial(OwnsTheClosure, lr=0.1)],
    ids=["lbfgs", "own step"],
)
def test_optimizers_that_evaluate_the_loss_train_as_in_fp32(two_ranks, make):
    scene = {"max_epochs": 1}
    half = fp16(two_ranks, partial(Chooses, make), **scene)
    full = fit(two_ranks, partial(Chooses, make), precision="32-true", **scene)
    for seen, reference in zip(half, full, strict=True):
        assert seen.losses == pytest.approx(reference.losses, abs=0.05)
        assert same(seen.parameters, half[0].parameters)


class Sparse(Toy):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.table(batch[1]).float().sum()


def test_sparse_gradients_are_refused_with_the_cure(one_rank):
    (seen,) = fp16(one_rank, Sparse, raises=True)
    assert "sparse" in seen.error
    assert "sparse=False" in seen.error


def test_plugin_under_another_strategy_is_refused(one_rank):
    (seen,) = fit(one_rank, strategy="ddp", plugins=[MasterWeightPrecision()], raises=True)
    assert "`strategy` (=DDPStrategy) does not support MasterWeightPrecision" in seen.error


class NoGradient(Toy):
    """Module whose loss has no gradient on one rank in the third batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 1 and batch_idx == 2:
            return loss.detach()
        return loss


class ZeroLoss(Toy):
    """Module that returns zero instead of the loss on one rank in the third batch, as for a batch without labels."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 2:
            return torch.tensor(0.0, requires_grad=True)
        return super().training_step(batch, batch_idx)


class ZeroOfOtherTensors(Toy):
    """Module like `ZeroLoss` whose loss comes from tensors that are not parameters."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 2:
            return torch.zeros(3, requires_grad=True).sum() * 2
        return super().training_step(batch, batch_idx)


class ZeroTimesTheNetwork(Toy):
    """Module that follows the advice in the error message."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 2:
            return self.net(batch[0]).sum() * 0
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("module", [ZeroLoss, ZeroOfOtherTensors])
@pytest.mark.parametrize("precision", ["16-true", "32-true"])
def test_a_rank_whose_loss_depends_on_no_parameter_is_named_at_once(two_ranks, precision, module):
    """Otherwise the other ranks would wait for the gradients until the time-out, and blame the network."""
    scene = {"precision": precision, "raises": True, "max_epochs": 1, "timeout_s": 200.0}
    rank_0, rank_1 = fit(two_ranks, module, **scene)
    assert "The loss on rank 1 of 2 does not depend on any trained parameter" in rank_0.error
    assert "The loss on rank 1 of 2 does not depend on any trained parameter" in rank_1.error
    assert "`self.net(x).sum() * 0`" in rank_1.error


@pytest.mark.parametrize("precision", ["16-true", "32-true"])
def test_the_advice_for_a_batch_without_a_loss_trains(two_ranks, precision):
    for seen in fit(two_ranks, ZeroTimesTheNetwork, precision=precision, max_epochs=1):
        assert seen.global_step == 4, f"rank {seen.rank}"
        for name, weight in seen.weights.items():
            assert torch.isfinite(weight).all(), f"{name} on rank {seen.rank}"


@pytest.mark.parametrize("precision", ["16-true", "32-true"])
def test_a_rank_whose_loss_has_no_gradient_is_named_at_once(two_ranks, precision):
    rank_0, rank_1 = fit(two_ranks, NoGradient, precision=precision, raises=True, max_epochs=1)
    assert "The loss on rank 1 of 2 does not require a gradient" in rank_1.error
    assert "The loss on rank 1 of 2 does not require a gradient" in rank_0.error
