"""Half precision on fp32 masters, through a real Trainer on real ranks: every row is a promise to the user."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import nn

from lightning_hybrid import HybridAllReduceStrategy, MasterWeightPrecision
from lightning_hybrid.precision.loss_scale import DynamicLossScale
from tests import toy

HALF = {"16-true": torch.float16, "bf16-true": torch.bfloat16}
NORMS = ("net.2.", "net.6.")


# ---- what the model is made of -------------------------------------------------------------------------------------


class Inspector(pl.Callback):
    """Looks at the run from inside, after every batch."""

    def __init__(self):
        self.seen = {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        masters = trainer.precision_plugin.masters
        (optimizer,) = trainer.optimizers
        parameters = dict(module.named_parameters())
        in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
        state_dtypes = {
            value.dtype for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)
        }
        self.seen = {
            "dtypes": {name: p.dtype for name, p in parameters.items()},
            "buffers": {name: b.dtype for name, b in module.named_buffers()},
            "in_groups": in_groups == {id(p) for p in parameters.values()},
            "state_keys": {id(p) for p in optimizer.state} <= in_groups,
            "state_dtypes": state_dtypes,
            "copies_exact": all(torch.equal(t.low, t.master.to(t.low.dtype)) for t in masters.pairs.values()),
        }


def inspect_a_fit(precision):
    inspector = Inspector()
    toy.trainer(precision=precision, callbacks=[inspector]).fit(toy.Toy(optimizer="AdamW", lr=1e-3), toy.loader())
    return inspector.seen


@pytest.mark.parametrize("precision", HALF)
def test_model_is_half_but_normalisation_masters_and_optimizer_state_are_fp32(two_ranks, precision):
    for seen in two_ranks.run(inspect_a_fit, precision):
        for name, dtype in seen["dtypes"].items():
            assert dtype is (torch.float32 if name.startswith(NORMS) else HALF[precision]), name
        assert set(seen["buffers"].values()) == {torch.float32, torch.int64}
        assert seen["in_groups"]
        assert seen["state_keys"]
        assert seen["state_dtypes"] == {torch.float32}
        assert seen["copies_exact"]


def inspect_a_fit_with_fp32_layers():
    inspector, module = Inspector(), toy.Toy()
    plugin = MasterWeightPrecision("16-true", keep_fp32=(nn.Linear,))
    toy.trainer(strategy=HybridAllReduceStrategy(precision_plugin=plugin), callbacks=[inspector]).fit(
        module, toy.loader()
    )
    return inspector.seen, module.losses, toy.weights(module)


def test_layers_that_are_to_stay_fp32_do_and_train_on_all_ranks(two_ranks):
    (seen, losses, weights), (_, _, others) = two_ranks.run(inspect_a_fit_with_fp32_layers)
    for name, dtype in seen["dtypes"].items():
        assert dtype is (torch.float16 if name.startswith("net.1.") else torch.float32), name
    assert seen["in_groups"]
    assert seen["copies_exact"]
    assert losses[-1] < 0.5 * losses[0]
    assert not torch.equal(weights["net.8.weight"], toy.weights(toy.Toy())["net.8.weight"])
    assert all(torch.equal(weights[name], others[name]) for name in weights if not name.startswith("net.2.running"))


def fit(precision="16-true", optimizer="SGD", lr=0.1, **settings):
    module = toy.Toy(optimizer=optimizer, lr=lr)
    trainer = toy.trainer(precision=precision, **settings)
    trainer.fit(module, toy.loader())
    return module.losses, toy.weights(module), trainer


def losses_and_weights(settings):
    return fit(**settings)[:2]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_training_follows_fp32_training_and_all_ranks_hold_the_same_bits(two_ranks, precision, optimizer):
    lr = 0.1 if optimizer == "SGD" else 1e-2
    full = two_ranks.run(losses_and_weights, {"precision": "32-true", "optimizer": optimizer, "lr": lr})
    half = two_ranks.run(losses_and_weights, {"precision": precision, "optimizer": optimizer, "lr": lr})
    parameters = [name for name in half[0][1] if "running" not in name and "num_batches" not in name]
    assert all(torch.equal(half[0][1][name], half[1][1][name]) for name in parameters)
    assert half[0][0] != half[1][0], "ranks must see different data"
    # Loss values near 1: fp16 rounds activations at 2**-11 and bf16 at 2**-8; a few layers and 8 steps add up.
    bound = 0.02 if precision == "16-true" else 0.1
    assert torch.allclose(torch.tensor(half[0][0]), torch.tensor(full[0][0]), atol=bound, rtol=0)
    assert full[0][0][-1] < 0.5 * full[0][0][0], "it must actually learn"


class ExactModule(pl.LightningModule):
    """Gradients are small integers: exact in fp16 at every scale up to 2**11, on every rank."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0) / 8)

    def training_step(self, batch, batch_idx):
        return (self.weight.float() * (batch.float().sum(0) + 4 * self.global_rank)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=2.0**-10, momentum=0.5)


def exact_weights(precision, strategy_settings, accumulate=1):
    module = ExactModule()
    data = torch.arange(-16.0, 16.0).reshape(8, 4)
    trainer = toy.trainer(
        precision=precision,
        strategy=HybridAllReduceStrategy(**strategy_settings),
        max_epochs=1,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=1))
    return module.weight.detach().clone()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_loss_scale_does_not_change_the_step(two_ranks, accumulate):
    """Powers of two are exact: scale 1, 64, 1024 and no scaling in fp32 give the same bits."""
    reference = two_ranks.run(exact_weights, "32-true", {}, accumulate)[0]
    for scale in (1, 64, 1024):
        for result in two_ranks.run(exact_weights, "16-true", {"loss_scale": scale}, accumulate):
            assert torch.equal(result, reference)


class HalfLoss(ExactModule):
    """A loss of at least 2 in half precision, as `self(x).mean()` is, and what backward is given."""

    def training_step(self, batch, batch_idx):
        loss = (self.weight * 0).sum() + 2 + self.global_rank
        self.losses.append(loss.detach())
        return loss

    def on_before_backward(self, loss):
        self.scaled.append(loss.detach())


def scaled_half_losses():
    module = HalfLoss()
    module.losses, module.scaled = [], []
    trainer = toy.trainer(precision="16-true", strategy=HybridAllReduceStrategy(loss_scale=2**15), max_epochs=1)
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(8, 4), batch_size=1))
    return module.losses, module.scaled, trainer.precision_plugin.num_skipped_steps


def test_a_loss_in_half_precision_is_scaled_in_fp32(two_ranks):
    """65,536 and more are inf in fp16."""
    for rank, (losses, scaled, num_skipped) in enumerate(two_ranks.run(scaled_half_losses)):
        assert {loss.dtype for loss in losses} == {torch.float16}
        assert all(torch.equal(loss, torch.tensor(2.0**15 * (2 + rank))) for loss in scaled)
        assert num_skipped == 0


def test_feature_off_precisions_keep_lightnings_plugins(one_rank):
    names = one_rank.run(plugin_names)[0]
    assert names == {"32-true": "Precision", "bf16-mixed": "MixedPrecision", "64-true": "DoublePrecision"}


def plugin_names():
    return {p: type(toy.trainer(precision=p).precision_plugin).__name__ for p in ("32-true", "bf16-mixed", "64-true")}


# ---- what the user's code sees -------------------------------------------------------------------------------------


class Gradients(pl.Callback):
    def __init__(self):
        self.before_step = []
        self.norms = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.before_step.append({n: p.grad.detach().clone() for n, p in module.named_parameters()})

    def on_before_zero_grad(self, trainer, module, optimizer):
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        if gradients:
            self.norms.append(torch.stack([g.double().norm() for g in gradients]).norm().item())


def gradients_seen(precision, clip):
    callback = Gradients()
    fit(precision, callbacks=[callback], max_epochs=1, gradient_clip_val=clip)
    return callback.before_step[0], callback.norms


def test_hooks_see_unscaled_fp32_gradients(two_ranks):
    half, full = (two_ranks.run(gradients_seen, precision, None)[0][0] for precision in ("16-true", "32-true"))
    del half["net.1.bias"]  # stands before a BatchNorm: its true gradient is zero
    for name, gradient in half.items():
        assert gradient.dtype is torch.float32
        error = (gradient - full[name]).norm() / full[name].norm()
        assert error < 0.02, name  # a few roundings at 2**-11 through four layers


def test_gradient_clipping_clips_the_unscaled_norm(two_ranks):
    for _, norms in two_ranks.run(gradients_seen, "16-true", 1e-3):
        assert len(norms) == 3  # the norm after each step but the last, seen before the next zero_grad
        assert all(abs(norm - 1e-3) < 1e-7 for norm in norms)


class UserWrites(pl.Callback):
    """Clamps the weights after every step, as WGAN does."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        for parameter in module.net[5].parameters():
            parameter.data.clamp_(-0.01, 0.01)


def test_weight_clamps_survive(two_ranks):
    _, weights = two_ranks.run(losses_and_weights, {"callbacks": [UserWrites()]})[0]
    # 0.01 is no fp16 number: the nearest is 0.01000213623
    assert weights["net.5.weight"].abs().max() <= torch.tensor(0.01).half().float()
    assert weights["net.8.weight"].abs().max() > 0.1


def averaged_weights(precision, kind):
    if kind == "swa":
        callback = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)
    else:
        callback = EMAWeightAveraging(decay=0.5)
    return fit(precision, callbacks=[callback], max_epochs=4)[1]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_averaging_callbacks_survive(two_ranks, kind):
    full = two_ranks.run(averaged_weights, "32-true", kind)[0]
    half = two_ranks.run(averaged_weights, "16-true", kind)[0]
    plain = two_ranks.run(losses_and_weights, {"max_epochs": 4})[0][1]
    for name in ("net.5.weight", "net.8.weight"):
        gap = (half[name] - full[name]).abs().max()
        assert gap < 0.02, f"{name} is {gap} from the average in fp32"
        assert (half[name] - plain[name]).abs().max() > 2 * gap, "averaging must have made a difference"


def test_zero_grad_without_none_changes_nothing(two_ranks):
    normal = two_ranks.run(losses_and_weights, {})
    longer = two_ranks.run(fit_keeping_gradients)
    assert toy.same_bits(normal[0][1], longer[0])


def fit_keeping_gradients():
    class Keeps(toy.Toy):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad(set_to_none=False)

    module = Keeps()
    toy.trainer(precision="16-true").fit(module, toy.loader())
    return toy.weights(module)


# ---- fp32 again after every entry point ----------------------------------------------------------------------------


def weights_after(entry_point):
    module = toy.Toy(lr=0.0)
    before = toy.weights(module)
    trainer = toy.trainer(precision="16-true", max_epochs=1)
    getattr(trainer, entry_point)(module, toy.loader())
    after = toy.weights(module)
    x = torch.randn(4, toy.NUM_FEATURES)
    return before, after, module.net(x).dtype, [p.grad_dtype for p in module.parameters()]


@pytest.mark.parametrize("entry_point", ["fit", "validate", "test", "predict"])
def test_exact_fp32_weights_are_back_after(two_ranks, entry_point):
    """With lr 0 the very bits of the beginning, although the model was fp16 in between."""
    for before, after, dtype, grad_dtypes in two_ranks.run(weights_after, entry_point):
        if entry_point == "fit":  # BatchNorm's statistics have seen the data
            before = {k: v for k, v in before.items() if not k.startswith("net.2.")}
            after = {k: v for k, v in after.items() if not k.startswith("net.2.")}
        assert toy.same_bits(before, after)
        assert dtype is torch.float32
        assert set(grad_dtypes) == {torch.float32}


def test_weights_are_fp32_after_an_error_in_training(one_rank):
    assert one_rank.run(dtypes_after_an_error)[0] == {torch.float32}


def dtypes_after_an_error():
    class Breaks(toy.Toy):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise KeyError("user's bug")
            return super().training_step(batch, batch_idx)

    module = Breaks()
    with pytest.raises(KeyError, match="user's bug"):
        toy.trainer(precision="16-true").fit(module, toy.loader())
    return {p.dtype for p in module.parameters()}


def test_two_fits_are_one_long_fit_in_two_parts(two_ranks):
    """The second fit starts from the exact masters of the first; plain SGD carries nothing else over."""
    for parts, whole in two_ranks.run(fit_in_parts):
        assert toy.same_bits(parts, whole)


def fit_in_parts():
    class Plain(toy.Toy):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    parts, whole = Plain(), Plain()
    # Lightning's sampler would shuffle by epoch, and a second fit starts at epoch 0 again.
    rank = torch.distributed.get_rank()
    data = torch.utils.data.Subset(toy.Blobs(), range(rank, 64, 2))
    fixed_order = torch.utils.data.DataLoader(data, batch_size=8)
    settings = {"precision": "16-true", "use_distributed_sampler": False}
    for _ in range(2):
        toy.trainer(max_epochs=1, **settings).fit(parts, fixed_order)
    toy.trainer(max_epochs=2, **settings).fit(whole, fixed_order)
    return toy.weights(parts), toy.weights(whole)


# ---- skipped steps -------------------------------------------------------------------------------------------------


class Overflows(toy.Toy):
    """The loss of rank 1 is infinite in the given batches; a schedule counts steps."""

    def __init__(self, bad=(), interval="step", value=float("inf"), rank=1):
        super().__init__(lr=0.1)
        self.bad, self.interval, self.value, self.bad_rank = set(bad), interval, value, rank
        self.history = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * self.value if batch_idx in self.bad and self.global_rank == self.bad_rank else loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}

    def on_train_batch_end(self, *args):
        self.history.append(
            (self.trainer.optimizers[0].param_groups[0]["lr"], self.net[8].weight.detach().float().sum().item())
        )


def history_of(bad, interval="step"):
    module = Overflows(bad, interval)
    trainer = toy.trainer(
        precision="16-true", max_epochs=1, strategy=HybridAllReduceStrategy(loss_scale=DynamicLossScale(2.0**10))
    )
    trainer.fit(module, toy.loader())  # torch's warning about a scheduler that ran first would be an error here
    plugin = trainer.precision_plugin
    plugin.state_dict()
    return module.history, plugin.num_skipped_steps, plugin.loss_scale.value


def test_one_bad_rank_makes_every_rank_skip_and_the_schedule_wait(two_ranks):
    for history, num_skipped, scale in two_ranks.run(history_of, [0, 2]):
        assert num_skipped == 2
        assert scale == 2.0**8
        assert [lr for lr, _ in history] == [0.1, 0.05, 0.05, 0.025]
        assert history[2][1] == history[1][1], "a skipped step leaves the weights alone"
        assert history[3][1] != history[2][1]


def test_without_overflow_the_schedule_moves_every_step(two_ranks):
    for history, num_skipped, scale in two_ranks.run(history_of, []):
        assert (num_skipped, scale) == (0, 2.0**10)
        assert [lr for lr, _ in history] == [0.05, 0.025, 0.0125, 0.00625]


def test_a_schedule_by_epochs_moves_although_its_last_step_was_skipped(two_ranks):
    """Four steps an epoch, the last one skipped: after the epoch the rate still halves."""
    assert two_ranks.run(lr_after_an_epoch)[0] == 0.05


def lr_after_an_epoch():
    module = Overflows([3], "epoch")
    trainer = toy.trainer(precision="16-true", max_epochs=1)
    trainer.fit(module, toy.loader())
    assert trainer.precision_plugin.num_skipped_steps == 1
    return trainer.optimizers[0].param_groups[0]["lr"]


def endless_overflow(value):
    module = Overflows(range(100), value=value)
    before = toy.weights(module)
    error = ""
    try:
        toy.trainer(precision="16-true", max_epochs=100).fit(module, toy.loader())
    except RuntimeError as caught:
        error = str(caught)
    after = toy.weights(module)
    parameters = [name for name in before if not name.startswith("net.2.")]
    return error, len(module.history), all(torch.equal(before[n], after[n]) for n in parameters)


def test_endless_overflow_stops_with_step_scale_and_cause(two_ranks):
    for error, _, weights_kept in two_ranks.run(endless_overflow, float("nan")):
        assert "inf or nan for 40 steps in a row" in error
        assert "the loss scale is 1 " in error
        assert "net.1.weight" in error
        assert weights_kept
    assert "not finite: look at the learning rate" in error  # rank 1, whose loss it was


# ---- accumulation, manual optimization, graphs ---------------------------------------------------------------------


def test_accumulated_batches_are_one_large_batch(two_ranks):
    for norm_free in two_ranks.run(accumulated_against_large):
        assert norm_free < 2e-3  # fp16 gradients of 2 micro-batches round twice at 2**-11


def accumulated_against_large():
    class NoNorm(toy.Toy):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(*[m for m in self.net if not isinstance(m, nn.BatchNorm1d)])

    one, other = NoNorm(), NoNorm()
    other.load_state_dict(one.state_dict())
    strided = torch.utils.data.DataLoader(toy.Blobs(), batch_size=16)
    toy.trainer(precision="16-true", max_epochs=1, accumulate_grad_batches=2).fit(one, toy.loader(batch_size=8))
    toy.trainer(precision="16-true", max_epochs=1).fit(other, strided)
    a, b = (torch.cat([p.flatten() for p in m.parameters()]) for m in (one, other))
    return ((a - b).norm() / b.norm()).item()


class TwoOptimizers(toy.Toy):
    """Two halves with an optimizer each, both losses backpropagated before either steps."""

    automatic_optimization = False

    def __init__(self, overflow_at=()):
        super().__init__()
        self.head = nn.Linear(toy.NUM_FEATURES, toy.NUM_CLASSES)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.head.reset_parameters()
        self.overflow_at = overflow_at

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = self.loss(batch)
        head_loss = torch.nn.functional.cross_entropy(self.head(batch[0]).float(), batch[1])
        if batch_idx in self.overflow_at:
            loss = loss * float("inf")
        self.manual_backward(loss + head_loss)
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
        self.losses.append(head_loss.item())

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.net.parameters(), lr=0.1),
            torch.optim.SGD(self.head.parameters(), lr=0.1),
        ]


def two_optimizers(precision, overflow_at=()):
    module = TwoOptimizers(overflow_at)
    trainer = toy.trainer(precision=precision)
    trainer.fit(module, toy.loader())
    return toy.weights(module), module.losses, getattr(trainer.precision_plugin, "num_skipped_steps", 0)


def test_two_optimizers_in_manual_optimization_follow_fp32(two_ranks):
    full = two_ranks.run(two_optimizers, "32-true")[0]
    half = two_ranks.run(two_optimizers, "16-true")[0]
    for name in ("net.5.weight", "head.weight"):
        assert (full[0][name] - half[0][name]).abs().max() < 5e-3


def test_overflow_of_one_optimizer_does_not_unscale_the_other_wrongly(two_ranks):
    """The net's gradients overflow in one step; the head, which steps after it, must not notice."""
    clean = two_ranks.run(two_optimizers, "16-true")[0]
    disturbed = two_ranks.run(two_optimizers, "16-true", (1,))[0]
    assert disturbed[2] == 2  # batch 1 of two epochs, the net's optimizer only
    assert (clean[0]["head.weight"] - disturbed[0]["head.weight"]).abs().max() < 2e-3


@pytest.mark.long
def test_compiled_network_trains_like_the_eager_one(one_rank):
    compiled, eager = one_rank.run(compiled_and_eager, timeout_s=180)[0]
    assert max(abs(a - b) for a, b in zip(compiled, eager, strict=True)) < 0.02


def compiled_and_eager():
    losses = []
    for compiled in (True, False):
        module = toy.Toy()
        if compiled:
            module.net.compile(backend="aot_eager")  # traced, without the minutes of code generation
        toy.trainer(precision="16-true", max_epochs=1).fit(module, toy.loader())
        losses.append(module.losses)
    return losses


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_ddp_options_change_nothing(two_ranks, option):
    plain = two_ranks.run(losses_and_weights, {})[0]
    with_option = two_ranks.run(fit_with_option, option)[0]
    assert with_option[0] == pytest.approx(plain[0], abs=1e-6)


def fit_with_option(option):
    return fit(strategy=HybridAllReduceStrategy(**{option: True}))[:2]


# ---- what is refused -----------------------------------------------------------------------------------------------


def fit_optimizer(make_optimizer_name):
    class Chooses(toy.Toy):
        def configure_optimizers(self):
            return REFUSED[make_optimizer_name](self.parameters())

    toy.trainer(precision="16-true").fit(Chooses(), toy.loader())


class OwnsTheClosure(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


REFUSED = {
    "lbfgs": lambda params: torch.optim.LBFGS(params),
    "owns_the_closure": lambda params: OwnsTheClosure(params, lr=0.1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_run_the_closure_themselves_are_refused(one_rank, name):
    error = one_rank.run(toy.error_of, fit_optimizer, name)[0]
    assert "must not run the closure by itself with precision='16-true'" in error


def test_sparse_gradients_are_refused_with_the_cure(one_rank):
    error = one_rank.run(toy.error_of, fit_sparse)[0]
    assert "sparse" in error
    assert "sparse=False" in error


def fit_sparse():
    class Sparse(toy.Toy):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(8, 4, sparse=True)

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + self.table(batch[1]).float().sum()

    toy.trainer(precision="16-true").fit(Sparse(), toy.loader())


def test_plugin_under_a_strategy_that_would_lose_the_masters_is_refused(one_rank):
    error = one_rank.run(toy.error_of, fit_plugin_under_ddp)[0]
    assert "`strategy` (=DDPStrategy) does not know master weights" in error


def fit_plugin_under_ddp():
    import lightning_hybrid

    trainer = toy.trainer(strategy="ddp", plugins=[lightning_hybrid.MasterWeightPrecision()])
    trainer.fit(toy.Toy(), toy.loader())


def test_empty_parameters_and_parameters_without_gradient_are_no_obstacle(one_rank):
    assert one_rank.run(toy.error_of, fit_with_odd_parameters) == [""]


def fit_with_odd_parameters():
    class Odd(toy.Toy):
        def __init__(self):
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.unused = nn.Linear(2, 2)

        def loss(self, batch):
            return super().loss(batch) + self.empty.float().sum()

    toy.trainer(precision="16-true", strategy="hybrid_allreduce_find_unused_parameters_true").fit(Odd(), toy.loader())
