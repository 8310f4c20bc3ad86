"""LARS and LAMB may take over a step from scaled half gradients to half weights: same numbers, no wait."""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid import HybridAllReduceStrategy, MasterWeightPrecision
from lightning_hybrid.callbacks import StopOnSignal, TrainingMetrics
from lightning_hybrid.optim import LAMB, LARS
from lightning_hybrid.precision import master_step, master_weights, optimizer_protocol
from lightning_hybrid.precision.loss_scale import DynamicLossScale
from lightning_hybrid.precision.master_step import MasterStep
from lightning_hybrid.precision.optimizer_protocol import supports_device_skip
from tests import toy
from tests.scenes import Saves

OPTIMIZERS = {
    "lars": lambda params: LARS(params, lr=5.0, weight_decay=1e-3, foreach=False),
    "lars_lists": lambda params: LARS(params, lr=5.0, weight_decay=1e-3, foreach=True),
    "lars_fused": lambda params: LARS(params, lr=5.0, weight_decay=1e-3, fused=True),
    "lamb": lambda params: LAMB(params, lr=1e-2),
    "sgd_fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "sgd_dampened": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1, fused=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


class Module(toy.Toy):
    """Reads nothing back; the loss of one rank is infinite in the given batches."""

    def __init__(self, optimizer, bad=(), bad_rank=0, scheduled=False):
        super().__init__()
        self.make, self.bad, self.bad_rank, self.scheduled = OPTIMIZERS[optimizer], set(bad), bad_rank, scheduled
        self.rates = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * float("inf") if batch_idx in self.bad and self.global_rank == self.bad_rank else loss

    def on_train_batch_start(self, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        if not self.scheduled:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class LooksAtGradients(pl.Callback):
    """Its mere presence asks for fp32 gradients."""

    def __init__(self):
        self.dtypes = set()

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.dtypes |= {p.grad.dtype for p in module.parameters()}


def wherever_it_can(optimizer, device):
    return supports_device_skip(optimizer, torch.device("cuda"))


def fit(
    optimizer,
    precision="16-true",
    bad=(),
    bad_rank=0,
    looks=False,
    scheduled=False,
    callbacks=(),
    num_samples=64,
    as_on_cuda=True,
    ckpt_path=None,
    **settings,
):
    """The module and its trainer after two epochs of eight batches over all ranks; the number of steps handed over.

    `as_on_cuda` hands steps over where a GPU would, although a CPU's eager step is faster when the host decides.
    """
    module = Module(optimizer, bad, bad_rank, scheduled)
    scale = DynamicLossScale(2.0**10) if precision == "16-true" else None
    watching = LooksAtGradients()
    trainer = toy.trainer(
        precision=precision,
        strategy=HybridAllReduceStrategy(loss_scale=scale),
        callbacks=[*callbacks, *([watching] if looks else [])],
        **settings,
    )
    calls = []
    if as_on_cuda:
        optimizer_protocol.supports_device_skip = master_step.supports_device_skip = wherever_it_can
    original = MasterStep.in_one_pass
    MasterStep.in_one_pass = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    try:
        trainer.fit(module, toy.loader(num_samples), ckpt_path=ckpt_path)
    finally:
        MasterStep.in_one_pass = original
        optimizer_protocol.supports_device_skip = master_step.supports_device_skip = supports_device_skip
    if looks:
        assert watching.dtypes == {torch.float32}
    return module, trainer, len(calls)


def weights_of(optimizer, settings):
    module, trainer, num_calls = fit(optimizer, **settings)
    return toy.weights(module), trainer.precision_plugin.num_skipped_steps, num_calls


# ---- the same step -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
@pytest.mark.parametrize("optimizer", ["lars", "lars_lists", "lamb"])
def test_a_step_handed_over_is_the_step_by_parts_bit_for_bit(one_rank, optimizer, precision):
    """Also around an overflow: scales are powers of two, so dividing before the norm or after it is the same."""
    bad = [2] if precision == "16-true" else []
    settings = {"precision": precision, "bad": bad}
    whole, skipped, num_whole = one_rank.run(weights_of, optimizer, settings)[0]
    parts, also_skipped, num_parts = one_rank.run(weights_of, optimizer, {**settings, "looks": True})[0]
    assert (num_whole, num_parts) == (16, 0)
    assert skipped == also_skipped == 2 * len(bad)
    assert toy.same_bits(whole, parts)


def test_the_fused_step_handed_over_is_the_step_by_parts_within_its_rounding(one_rank):
    whole, skipped, num_whole = one_rank.run(weights_of, "lars_fused", {"bad": [2]}, timeout_s=300)[0]
    parts, _, _ = one_rank.run(weights_of, "lars", {"bad": [2], "looks": True})[0]
    assert (num_whole, skipped) == (16, 2)
    del whole["net.1.bias"], parts["net.1.bias"]  # before a BatchNorm: its gradient is rounding noise
    for name in whole:
        # fp32 masters differ by 2e-6; where that tips the rounding of an fp16 weight, activations follow at 2**-11
        assert (whole[name].double() - parts[name].double()).norm() <= 2e-3 * parts[name].double().norm(), name


@pytest.mark.parametrize("reason", ["clipping", "hook of the module", "hook of the optimizer"])
def test_whatever_looks_at_gradients_gets_the_step_by_parts(one_rank, reason):
    assert one_rank.run(steps_handed_over, reason) == [0]


def steps_handed_over(reason):
    if reason == "clipping":
        return fit("lars", gradient_clip_val=1.0)[2]
    if reason == "hook of the module":
        Module.on_before_zero_grad = lambda self, optimizer: None
        try:
            return fit("lars")[2]
        finally:
            del Module.on_before_zero_grad
    original = OPTIMIZERS["lars"]

    def hooked(params):
        optimizer = original(params)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer

    OPTIMIZERS["lars"] = hooked
    try:
        return fit("lars")[2]
    finally:
        OPTIMIZERS["lars"] = original


def test_accumulated_and_kept_gradients_stay_scaled_and_are_not_lost(one_rank):
    """Two micro-batches a step, gradients zeroed rather than dropped, an overflow that changes the scale between."""
    whole, parts = (one_rank.run(accumulating, looks)[0] for looks in (False, True))
    assert toy.same_bits(whole, parts)


def accumulating(looks):
    Module.optimizer_zero_grad = lambda self, epoch, batch_idx, optimizer: optimizer.zero_grad(set_to_none=False)
    try:
        return toy.weights(fit("lars", bad=[1], looks=looks, accumulate_grad_batches=2)[0])
    finally:
        del Module.optimizer_zero_grad


@pytest.mark.parametrize("optimizer", ["sgd_fused", "adamw_fused", "sgd_dampened"])
def test_torchs_fused_optimizers_skip_as_the_host_would(one_rank, optimizer):
    """From the very first step on, which a fused SGD of torch's cannot skip without leaving momentum uninitialised."""
    by_itself, skipped, _ = one_rank.run(weights_of, optimizer, {"bad": [0, 3]})[0]
    by_host, also_skipped, _ = one_rank.run(with_the_host_deciding, optimizer, {"bad": [0, 3]})[0]
    assert skipped == also_skipped == 4
    assert toy.same_bits(by_itself, by_host)


def with_the_host_deciding(optimizer, settings):
    global wherever_it_can
    original, wherever_it_can = wherever_it_can, lambda *_: False
    try:
        return weights_of(optimizer, settings)
    finally:
        wherever_it_can = original


def test_on_a_cpu_an_eager_step_is_decided_by_the_host_and_a_fused_one_handed_over(one_rank):
    eager = {"as_on_cuda": False, "bad": [2]}
    by_host, skipped, num_by_host = one_rank.run(weights_of, "lars", eager)[0]
    by_itself, also_skipped, _ = one_rank.run(weights_of, "lars", {"bad": [2]})[0]
    assert (num_by_host, skipped, also_skipped) == (0, 2, 2)
    assert toy.same_bits(by_host, by_itself)


# ---- ranks ---------------------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Counts what goes through process groups."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def collectives_and_weights(optimizer, precision, bad):
    with Collectives() as mode:
        module, trainer, _ = fit(optimizer, precision=precision, bad=bad, bad_rank=1)
    plugin = trainer.precision_plugin
    return mode.counts, toy.weights(module), getattr(plugin, "num_skipped_steps", 0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", ["lars", "sgd_fused", "sgd"])
def test_overflow_on_one_rank_skips_on_both_without_a_collective_more(two_ranks, optimizer):
    """As many as with bf16, which has the same tensors and nothing to agree on."""
    full = two_ranks.run(collectives_and_weights, optimizer, "bf16-true", [])
    half = two_ranks.run(collectives_and_weights, optimizer, "16-true", [1, 2])
    assert full[0][0], "the counter must see collectives"
    for (counts, weights, skipped), (full_counts, _, _) in zip(half, full, strict=True):
        assert skipped == 4
        assert counts == full_counts
        parameters = [name for name in weights if not name.startswith("net.2.")]
        assert all(torch.equal(weights[name], half[0][1][name]) for name in parameters)
    assert half[0][1]["net.8.weight"].isfinite().all()


# ---- no wait -------------------------------------------------------------------------------------------------------


class HostReads(TorchDispatchMode):
    """Counts operations that give the host a number of the device's, by the file that asks."""

    READS = frozenset(
        {torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.is_nonzero}
        | {torch.ops.aten.nonzero, torch.ops.aten.masked_select, torch.ops.aten._unique2}
    )

    def __init__(self):
        super().__init__()
        self.by_file = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in self.READS:
            stack = [f.filename for f in traceback.extract_stack()[:-1] if "/torch/" not in f.filename]
            self.by_file["/".join(Path(stack[-1]).parts[-2:])] += 1
        return func(*args, **(kwargs or {}))


class Counting(pl.Callback):
    """Counts from the start of the second batch to the end of the last but one: what comes once is not of a step."""

    def __init__(self):
        self.mode = HostReads()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 1:
            self.mode.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == trainer.num_training_batches - 1:
            self.mode.__exit__(None, None, None)


def host_reads(optimizer, settings, every_n_steps=None):
    counting = Counting()
    # On a CPU a comparison that answers at once saves memory traffic; on CUDA it is not asked: count what runs there.
    original = master_weights._same_bits
    master_weights._same_bits = lambda *_: False
    try:
        also = [] if every_n_steps is None else [StopOnSignal(every_n_steps=every_n_steps)]
        fit(optimizer, callbacks=[counting, *also], log_every_n_steps=50, num_samples=128, max_epochs=1, **settings)
    finally:
        master_weights._same_bits = original
    return dict(counting.mode.by_file)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", ["lars", "lars_lists", "lamb", "sgd_fused", "adamw_fused"])
@pytest.mark.parametrize("settings", [{}, {"looks": True}, {"bad": [1]}, {"gradient_clip_val": 1.0}], ids=str)
def test_a_step_asks_the_device_nothing(one_rank, optimizer, settings):
    """16 steps, 14 of them counted; Lightning's loop on one rank asks nothing either."""
    assert one_rank.run(host_reads, optimizer, settings) == [{}]


def test_what_still_asks_is_named(one_rank, two_ranks):
    """An optimizer that cannot skip: the skip flag. A schedule by steps: the same. Ranks: Lightning's SIGTERM."""
    assert one_rank.run(host_reads, "sgd", {}) == [{"precision/master_step.py": 14}]
    assert one_rank.run(host_reads, "lars", {"scheduled": True}) == [{"precision/skipped_steps.py": 14}]
    for reads in two_ranks.run(host_reads, "lars", {}):
        assert reads == {"loops/training_epoch_loop.py": 6 - 1}


def test_the_question_to_all_ranks_whether_to_stop_can_be_put_less_often(two_ranks):
    """Before batches 0 to 7, of which 2 on are counted."""
    assert two_ranks.run(host_reads, "lars", {}, 1) == [{"callbacks/stop_on_signal.py": 6 - 1}] * 2
    assert two_ranks.run(host_reads, "lars", {}, 4) == [{"callbacks/stop_on_signal.py": 1}] * 2


class NoSync(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 3:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.is_last_batch:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("scheduled", [False, True])
def test_cuda_is_never_synchronised_in_a_step(scheduled):
    try:
        fit("lars", callbacks=[NoSync()], scheduled=scheduled, accelerator="gpu", devices=1, log_every_n_steps=1000)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- schedules one step behind -------------------------------------------------------------------------------------


class Monitor(pl.Callback):
    """The rate with which each step is made, seen from the optimizer."""

    def __init__(self):
        self.rates = []

    def on_train_start(self, trainer, module):
        (optimizer,) = trainer.optimizers
        optimizer.register_step_pre_hook(lambda optimizer, *_: self.rates.append(optimizer.param_groups[0]["lr"]))


def rates_and_weights(put_off, settings, *callbacks):
    """Rates of the steps; those seen at the start of a batch; weights; the final rate. `put_off` as on CUDA."""
    monitor = Monitor()
    original = MasterWeightPrecision._may_put_off_schedules

    def as_on_cuda(self):
        device, self._device = self._device, torch.device("cuda")
        try:
            return original(self)
        finally:
            self._device = device

    MasterWeightPrecision._may_put_off_schedules = as_on_cuda if put_off else original
    try:
        module, trainer, _ = fit("lars", scheduled=True, callbacks=[monitor, *callbacks], **settings)
    finally:
        MasterWeightPrecision._may_put_off_schedules = original
    return monitor.rates, module.rates, toy.weights(module), trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize("settings", [{"bad": [1, 4]}, {"bad": [7]}, {"bad": [], "max_steps": 6}], ids=str)
def test_a_schedule_one_step_behind_gives_every_step_the_same_rate(one_rank, settings):
    at_once, seen, weights, last = one_rank.run(rates_and_weights, False, {**settings, "log_every_n_steps": 4})[0]
    behind, seen_behind, same_weights, same_last = one_rank.run(
        rates_and_weights, True, {**settings, "log_every_n_steps": 4}
    )[0]
    assert behind == at_once
    assert len(set(at_once)) > 3
    assert toy.same_bits(weights, same_weights)
    assert last == same_last
    assert seen_behind != seen, "it must have been behind"
    # What a logger reads at the start of a logged step (each fourth) and after an epoch's last batch is today's rate.
    assert seen_behind[3::4] == seen[3::4]
    assert seen_behind[8:9] == seen[8:9]


def checkpoint_made(put_off, path):
    rates_and_weights(put_off, {"bad": [1]}, Saves(path, step=6))
    checkpoint = torch.load(path, weights_only=True)
    return checkpoint["optimizer_states"][0]["param_groups"][0]["lr"], checkpoint["lr_schedulers"]


def test_a_checkpoint_does_not_know_that_the_schedule_is_behind(one_rank, tmp_path):
    at_once = one_rank.run(checkpoint_made, False, str(tmp_path / "at_once.ckpt"))
    behind = one_rank.run(checkpoint_made, True, str(tmp_path / "behind.ckpt"))
    assert at_once == behind
    assert at_once[0][0] == 5.0 * 0.5**5


def whole_and_resumed(optimizer, path):
    """Four epochs in one go, and the same from a checkpoint after the first; each with its scale and skipped steps."""
    settings = {"bad": [1], "scheduled": True, "max_epochs": 4}
    runs = [
        fit(optimizer, callbacks=[Saves(path, epoch=0)], **settings),
        fit(optimizer, ckpt_path=path, **settings),
    ]
    return [(toy.weights(module), trainer.precision_plugin.state_dict()) for module, trainer, _ in runs]


@pytest.mark.parametrize("optimizer", ["lars", "sgd_fused"])
def test_a_resumed_run_is_the_whole_one_bit_for_bit(one_rank, tmp_path, optimizer):
    (whole, state), (resumed, same_state) = one_rank.run(whole_and_resumed, optimizer, str(tmp_path / "1.ckpt"))[0]
    assert toy.same_bits(whole, resumed)
    assert state == same_state
    assert state["num_skipped_steps"] == 4


# ---- endless overflow ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("log_every_n_steps", "num_steps"), [(10, 40), (25, 50), (1000, 80)])
def test_endless_overflow_is_found_at_a_logged_step_or_at_the_end(one_rank, log_every_n_steps, num_steps):
    error = one_rank.run(toy.error_of, endless, log_every_n_steps)[0]
    assert f"inf or nan for {num_steps} steps in a row" in error
    assert "net.1.weight" in error


def endless(log_every_n_steps):
    fit("lars", bad=range(8), max_epochs=10, log_every_n_steps=log_every_n_steps)


# ---- manual optimization -------------------------------------------------------------------------------------------


class TwoGames(toy.Toy):
    """Two parts with an optimizer each, trained in turns as in a GAN; the first overflows now and then."""

    automatic_optimization = False

    def __init__(self, toggles):
        super().__init__()
        self.head = torch.nn.Linear(toy.NUM_FEATURES, toy.NUM_CLASSES)
        self.toggles = toggles

    def training_step(self, batch, batch_idx):
        for index, optimizer in enumerate(self.optimizers()):
            if self.toggles:
                self.toggle_optimizer(optimizer)
            output = self.net(batch[0]) + self.head(batch[0])
            loss = torch.nn.functional.cross_entropy(output.float(), batch[1])
            self.manual_backward(loss * float("inf") if index == 0 and batch_idx in (1, 2) else loss)
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)
            for one in self.optimizers():
                one.zero_grad()

    def configure_optimizers(self):
        return [LARS(self.net.parameters(), lr=1.0), torch.optim.SGD(self.head.parameters(), lr=0.1, fused=True)]


def scales_of_two_games(toggles):
    module = TwoGames(toggles)
    metrics = TrainingMetrics()
    strategy = HybridAllReduceStrategy(loss_scale=DynamicLossScale(2.0**10), find_unused_parameters=True)
    trainer = toy.trainer(precision="16-true", strategy=strategy, callbacks=[metrics], log_every_n_steps=1)
    trainer.fit(module, toy.loader())
    plugin = trainer.precision_plugin
    logged = [trainer.callback_metrics[f"train/loss_scale{of}"].item() for of in ("", "/optimizer_1")]
    scales = [record.loss_scale.value for record in plugin.optimizer_steps]
    assert logged == scales
    restored = MasterWeightPrecision("16-true")
    restored.optimizer_steps.of(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    restored.optimizer_steps.of(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    restored.load_state_dict(plugin.state_dict())
    assert restored.state_dict() == plugin.state_dict()
    return scales, [int(record.num_skipped) for record in plugin.optimizer_steps], plugin.num_skipped_steps


def test_each_optimizer_has_its_own_scale_where_it_is_toggled(one_rank):
    assert one_rank.run(scales_of_two_games, True) == [([2.0**6, 2.0**10], [4, 0], 4)]


def test_optimizers_reached_by_one_backward_share_the_smallest_scale(one_rank):
    assert one_rank.run(scales_of_two_games, False) == [([2.0**6, 2.0**6], [4, 0], 4)]
