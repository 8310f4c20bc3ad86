"""Whole steps of LARS and LAMB on scaled half-precision gradients: equal results, and no wait for the device."""

import traceback
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid import MasterWeightPrecision
from lightning_hybrid.callbacks import TrainingMetrics
from lightning_hybrid.optim import LAMB, LARS
from lightning_hybrid.precision.loss_scale import DynamicLossScale
from lightning_hybrid.precision.optimizer_protocol import supports_device_skip
from tests import toy
from tests.scenes import Saves, at, fit, play, same

OPTIMIZERS = {
    "lars": partial(LARS, lr=5.0, weight_decay=1e-3, foreach=False),
    "lars_lists": partial(LARS, lr=5.0, weight_decay=1e-3, foreach=True),
    "lars_fused": partial(LARS, lr=5.0, weight_decay=1e-3, fused=True),
    "lamb": partial(LAMB, lr=1e-2),
    "sgd_fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "sgd_dampened": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, fused=True),
    "adamw_fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


class Module(toy.Toy):
    def __init__(self, make, bad=(), bad_rank=0, scheduled=False):
        super().__init__()
        self.make = make
        self.bad = set(bad)
        self.bad_rank = bad_rank
        self.scheduled = scheduled

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if batch_idx in self.bad and self.global_rank == self.bad_rank:
            return loss * float("inf")
        return loss

    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        if not self.scheduled:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Hooked(Module):
    def on_before_zero_grad(self, optimizer):
        pass


class KeepsGradients(Module):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


def hooked_lars(params):
    optimizer = OPTIMIZERS["lars"](params)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def dtypes(trainer, module, optimizer):
    return {p.grad.dtype for p in module.parameters()}


LOOKS = at(on_before_optimizer_step=dtypes)  # this hook alone requests fp32 gradients


def on_rank(patches, scene):
    """Return the observations of a fit with patched values, and the number of steps on scaled gradients."""
    calls = []
    original = MasterWeightPrecision._step_on_scaled
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # A comparison that is patched to find differences also reports writes by the user.
        warnings.filterwarnings("ignore", ".*was written inside a training step")
        for target, value in patches:
            patch.setattr(target, value)

        def counted(*args, **kwargs):
            calls.append(1)
            return original(*args, **kwargs)

        patch.setattr(MasterWeightPrecision, "_step_on_scaled", counted)
        return play(scene), len(calls)


def wherever_it_can(optimizer, device):
    return supports_device_skip(optimizer, torch.device("cuda"))


# Steps on scaled gradients are forced as on a GPU. On a CPU, an eager step is faster if the host decides.
QUERIES = [
    "lightning_hybrid.precision.optimizer_protocol.supports_device_skip",
    "lightning_hybrid.precision.plugin.supports_device_skip",
]
AS_ON_CUDA = [(query, wherever_it_can) for query in QUERIES]


def scene_of(make, *, kind=Module, bad=(), bad_rank=0, scheduled=False, **scene):
    if isinstance(make, str):
        make = OPTIMIZERS[make]
    defaults = {"module": partial(kind, make, bad, bad_rank, scheduled), "precision": "16-true"}
    if scene.get("precision", "16-true") == "16-true":
        defaults["loss_scale"] = DynamicLossScale(2.0**10)
    return {**defaults, **scene}


def run(ranks, make, *, patches=(), as_on_cuda=True, timeout_s=60.0, **scene):
    if as_on_cuda:
        patches = [*AS_ON_CUDA, *patches]
    return ranks.run(on_rank, patches, scene_of(make, **scene), timeout_s=timeout_s)


# ---- the same step -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "precision"), [("lars", "16-true"), ("lamb", "bf16-true")])
def test_a_whole_step_of_the_optimizer_equals_the_step_by_parts_bit_for_bit(
    one_rank, optimizer, precision
):
    """This includes an overflow. Scales are powers of two, so dividing before or after the norm gives equal results."""
    scene = {"precision": precision, "bad": [2] if precision == "16-true" else []}
    ((whole, num_whole),) = run(one_rank, optimizer, **scene)
    ((parts, num_parts),) = run(one_rank, optimizer, callbacks=[LOOKS], **scene)
    assert (num_whole, num_parts) == (16, 0)
    assert whole.num_skipped == parts.num_skipped == 2 * len(scene["bad"])
    assert set.union(*parts.looks["on_before_optimizer_step"]) == {torch.float32}
    assert same(whole.weights, parts.weights)


@pytest.mark.parametrize(
    ("make", "scene"),
    [("lars", {"gradient_clip_val": 1.0}), ("lars", {"kind": Hooked}), (hooked_lars, {})],
    ids=["clipping", "hook of the module", "hook of the optimizer"],
)
def test_a_step_is_made_by_parts_if_anything_looks_at_gradients(one_rank, make, scene):
    ((_, num_whole),) = run(one_rank, make, max_epochs=1, **scene)
    assert num_whole == 0


def test_accumulated_and_kept_gradients_stay_scaled_and_are_not_lost(one_rank):
    scene = {"bad": [1], "accumulate_grad_batches": 2}
    ((whole, _),) = run(one_rank, "lars", kind=KeepsGradients, **scene)
    ((parts, _),) = run(one_rank, "lars", kind=KeepsGradients, callbacks=[LOOKS], **scene)
    ((dropped, _),) = run(one_rank, "lars", kind=Module, **scene)
    assert same(whole.weights, parts.weights)
    assert same(whole.weights, dropped.weights)


@pytest.mark.parametrize("optimizer", ["lars_fused", "sgd_fused", "sgd_dampened"])
def test_optimizers_skip_the_same_steps_as_the_host(one_rank, optimizer):
    """Steps are skipped from the first one on, where torch's fused SGD would leave its momentum uninitialized."""
    ((by_device, num_whole),) = run(one_rank, optimizer, bad=[0, 3], timeout_s=300)
    patches = [(query, never) for query in QUERIES]
    ((by_host, num_by_host),) = run(one_rank, optimizer, bad=[0, 3], patches=patches)
    assert by_device.num_skipped == 4
    assert by_host.num_skipped == 4
    assert num_whole == (16 if "lars" in optimizer else 0)
    assert num_by_host == 0
    assert same(by_device.weights, by_host.weights)


def test_on_a_cpu_an_eager_step_is_decided_by_the_host_and_a_fused_one_is_not(one_rank):
    ((_, num_eager),) = run(one_rank, "lars", as_on_cuda=False, max_epochs=1)
    ((_, num_fused),) = run(one_rank, "lars_fused", as_on_cuda=False, max_epochs=1)
    assert (num_eager, num_fused) == (0, 8)


# ---- ranks ---------------------------------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def collectives_of(scene):
    with Collectives() as mode:
        seen, _ = on_rank(AS_ON_CUDA, scene)
    return mode.counts, seen


def test_overflow_on_one_rank_skips_on_both_without_an_additional_collective(two_ranks):
    """The number of collectives equals that in bf16, which has the same tensors and no overflow to agree on."""
    full = two_ranks.run(collectives_of, scene_of("lars", precision="bf16-true"))
    half = two_ranks.run(collectives_of, scene_of("lars", bad=[1, 2], bad_rank=1))
    assert full[0][0], "the counter must see collectives"
    for (counts, seen), (full_counts, _) in zip(half, full, strict=True):
        assert seen.num_skipped == 4, f"rank {seen.rank}"
        assert counts == full_counts, f"rank {seen.rank}"
        assert same(seen.parameters, half[0][1].parameters), f"rank {seen.rank}"
    assert half[0][1].weights["net.8.weight"].isfinite().all()


# ---- no wait for the device ----------------------------------------------------------------------------------------


class HostReads(TorchDispatchMode):
    """Mode that counts operations that copy a number from a device to the host, by the calling file."""

    READS = frozenset(
        {torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.is_nonzero}
        | {torch.ops.aten.nonzero, torch.ops.aten.masked_select, torch.ops.aten._unique2}
    )

    def __init__(self):
        super().__init__()
        self.by_file = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in self.READS:
            files = [frame.filename for frame in traceback.extract_stack()[:-1]]
            caller = [file for file in files if "/torch/" not in file][-1]
            self.by_file["/".join(Path(caller).parts[-2:])] += 1
        return func(*args, **(kwargs or {}))


def begin_to_count(trainer, *_):
    """Count from the second batch to the last but one, to exclude reads that happen only once."""
    if trainer.global_step == 1:
        trainer.host_reads = HostReads()
        trainer.host_reads.__enter__()


def end_of_count(trainer, *_):
    if trainer.global_step == trainer.num_training_batches - 1:
        trainer.host_reads.__exit__(None, None, None)
        return dict(trainer.host_reads.by_file)


def host_reads(ranks, optimizer, *callbacks, **scene):
    """Return the host reads of each rank, without the comparison that only saves memory traffic on a CPU."""
    counting = at(on_train_batch_start=begin_to_count, on_train_batch_end=end_of_count)
    scene |= {
        "callbacks": [counting, *callbacks],
        "max_epochs": 1,
        "train": partial(toy.loader, 128),
        "patches": [("lightning_hybrid.precision.parameter_pair.is_rounded", never)],
        "log_every_n_steps": 50,
    }
    return [seen.looks["on_train_batch_end"][0] for seen, _ in run(ranks, optimizer, **scene)]


def never(*_):
    return False


@pytest.mark.parametrize(
    ("optimizer", "looks", "scene"),
    [
        ("lars_lists", [], {"bad": [1]}),
        ("lamb", [LOOKS], {}),
        ("adamw_fused", [], {"gradient_clip_val": 1.0}),
    ],
    ids=["skipped", "looked at", "clipped"],
)
def test_a_step_reads_nothing_from_the_device(one_rank, optimizer, looks, scene):
    """Of 16 steps, 14 are counted. Lightning's loop on one rank reads nothing either."""
    assert host_reads(one_rank, optimizer, *looks, **scene) == [{}]


def test_the_remaining_reads_from_the_device_are_these(one_rank, two_ranks):
    """Only optimizers that cannot skip and schedules by step read the skip flag. Lightning reads its SIGTERM flag."""
    assert host_reads(one_rank, "sgd") == [{"precision/plugin.py": 14}]
    assert host_reads(one_rank, "lars", scheduled=True) == [{"precision/skipped_steps.py": 14}]
    assert host_reads(two_ranks, "lars") == [{"loops/training_epoch_loop.py": 6 - 1}] * 2


# ---- schedules one step behind -------------------------------------------------------------------------------------


def rates_of_steps(trainer, module):
    """Return a list that grows by the learning rate of each step, and the group with the final learning rate."""
    (optimizer,) = trainer.optimizers
    rates = []
    optimizer.register_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    return rates, optimizer.param_groups[0]


def rate(trainer, *_):
    return trainer.optimizers[0].param_groups[0]["lr"]


PUTS_OFF = MasterWeightPrecision._may_put_off_schedules


def puts_off_as_on_cuda(self):
    device = self._device
    self._device = torch.device("cuda")
    try:
        return PUTS_OFF(self)
    finally:
        self._device = device


def fit_with_schedule(ranks, *, is_behind, callbacks=(), **scene):
    """Fit with a learning-rate schedule by step. `is_behind` delays the schedule by a step, as on CUDA."""
    looks = at(on_train_start=rates_of_steps, on_train_batch_start=rate)
    scene["callbacks"] = [looks, *callbacks]
    if is_behind:
        name = "lightning_hybrid.MasterWeightPrecision._may_put_off_schedules"
        scene["patches"] = [(name, puts_off_as_on_cuda)]
    ((seen, _),) = run(ranks, "lars", scheduled=True, **scene)
    return seen


@pytest.mark.parametrize("scene", [{"bad": [1, 4]}, {"bad": [7]}], ids=str)
def test_a_schedule_one_step_behind_gives_every_step_the_same_rate(one_rank, scene):
    at_once = fit_with_schedule(one_rank, is_behind=False, **scene, log_every_n_steps=4)
    behind = fit_with_schedule(one_rank, is_behind=True, **scene, log_every_n_steps=4)
    ((rates, group),) = at_once.looks["on_train_start"]
    ((rates_behind, group_behind),) = behind.looks["on_train_start"]
    assert rates_behind == rates
    assert group_behind["lr"] == group["lr"]
    assert len(set(rates)) > 3
    assert same(behind.weights, at_once.weights)
    at_starts = at_once.looks["on_train_batch_start"]
    at_starts_behind = behind.looks["on_train_batch_start"]
    assert at_starts_behind != at_starts, "it must have been behind"
    # A logger reads the current learning rate at the start of each logged step (every fourth) and after the last batch
    # of an epoch.
    assert at_starts_behind[3::4] == at_starts[3::4]
    assert at_starts_behind[8:9] == at_starts[8:9]


def test_a_checkpoint_does_not_know_that_the_schedule_is_behind(one_rank, tmp_path):
    checkpoints = []
    for is_behind in (False, True):
        path = tmp_path / "step6.ckpt"
        saves = Saves(path, step=6)
        fit_with_schedule(one_rank, is_behind=is_behind, callbacks=[saves], bad=[1])
        checkpoints.append(torch.load(path, weights_only=True))
    at_once, behind = checkpoints
    assert behind["lr_schedulers"] == at_once["lr_schedulers"]
    for checkpoint in checkpoints:
        group = checkpoint["optimizer_states"][0]["param_groups"][0]
        assert group["lr"] == 5.0 * 0.5**5


# ---- endless overflow ----------------------------------------------------------------------------------------------


def test_endless_overflow_between_logged_steps_is_an_error_at_the_end(one_rank):
    scene = {"bad": range(8), "max_epochs": 6, "log_every_n_steps": 1000, "raises": True}
    ((seen, _),) = run(one_rank, "lars", **scene)
    assert "inf or nan for 48 consecutive steps" in seen.error
    assert "net.1.weight" in seen.error


# ---- manual optimization -------------------------------------------------------------------------------------------


class TwoGames(toy.Toy):
    """Module with two networks and optimizers, trained in turn as in a GAN. The first one overflows at times."""

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
            if index == 0 and batch_idx in (1, 2):
                loss = loss * float("inf")
            self.manual_backward(loss)
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)
            for any_optimizer in self.optimizers():
                any_optimizer.zero_grad()

    def configure_optimizers(self):
        return [
            LARS(self.net.parameters(), lr=1.0),
            torch.optim.SGD(self.head.parameters(), lr=0.1, fused=True),
        ]


def scales_and_skips(trainer, *_):
    plugin = trainer.precision_plugin
    restored = MasterWeightPrecision("16-true")
    for _ in range(2):
        restored.optimizer_steps.of(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    restored.load_state_dict(plugin.state_dict())
    assert restored.state_dict() == plugin.state_dict()
    return [(record.loss_scale.value, int(record.num_skipped)) for record in plugin.optimizer_steps]


@pytest.mark.parametrize(("toggles", "second_scale"), [(True, 2.0**10), (False, 2.0**6)])
def test_optimizers_that_are_toggled_have_a_scale_each_and_others_share_the_smallest(
    one_rank, toggles, second_scale
):
    """All parameters that one backward pass reaches have the same scale."""
    scene = {
        "loss_scale": DynamicLossScale(2.0**10),
        "find_unused_parameters": True,
        "log_every_n_steps": 1,
        "callbacks": [at(on_train_end=scales_and_skips), TrainingMetrics],
        "precision": "16-true",
    }
    (seen,) = fit(one_rank, partial(TwoGames, toggles), **scene)
    assert seen.looks["on_train_end"] == [[(2.0**6, 4), (second_scale, 0)]]
    assert seen.num_skipped == 4
    assert seen.metrics["train/loss_scale"] == 2.0**6
    assert seen.metrics["train/loss_scale/optimizer_1"] == second_scale
