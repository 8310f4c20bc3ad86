"""Metrics that training logs: their steps and their values."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from torch.utils.data import DataLoader

from lightning_hybrid import HybridAllReduceStrategy, Report
from lightning_hybrid.callbacks import TrainingMetrics
from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.callbacks.metrics import METRICS
from lightning_hybrid.optim import LARS, param_groups
from tests import toy
from tests.callbacks.support import TWO_STEPS, WINDOWS, Module, counting, fit, rows_of, seen
from tests.scenes import at
from tests.scenes import fit as run


def test_metrics_are_logged_at_their_steps_with_their_values(two_ranks):
    """16 images in half a second are 32 per second. The windows that end at steps 6 and 8 begin after 4 steps.

    Each image takes 1e9 operations, on two devices of 1e11 per second.
    """
    metrics = {"flops_per_image": 1e9, "peak_flops_per_s": 1e11}
    rank_0, rank_1 = seen(
        two_ranks, strategy=HybridAllReduceStrategy(loss_scale=1024.0), metrics=metrics
    )
    assert list(rank_0.column(m.TRAIN_LOSS)) == [2, 4, 6, 8]
    assert rank_0.losses != rank_1.losses
    for step, loss in rank_0.column(m.TRAIN_LOSS).items():
        mean = (rank_0.losses[step - 1] + rank_1.losses[step - 1]) / 2
        assert loss == pytest.approx(mean, rel=1e-6)  # the mean is computed in fp32
    # The schedule is 0.1 / (1 + previous steps). The logger receives float32.
    rates = {2: 0.1 / 2, 4: 0.1 / 4, 6: 0.1 / 6, 8: 0.1 / 8}
    assert rank_0.column(m.TRAIN_LR) == pytest.approx(rates, rel=1e-6)
    assert rank_0.column(m.TRAIN_LOSS_SCALE) == dict.fromkeys((2, 4, 6, 8), 1024.0)
    assert rank_0.column(m.TRAIN_SKIPPED_STEPS) == dict.fromkeys((2, 4, 6, 8), 0.0)
    assert rank_0.column(m.IMAGES_PER_S) == {6: 32.0, 8: 32.0}
    assert rank_0.column(m.FLOPS_PER_S) == pytest.approx({6: 32e9, 8: 32e9})
    assert rank_0.column(m.MFU) == pytest.approx({6: 0.16, 8: 0.16})


def test_communication_is_logged_per_step_per_bucket_and_against_its_bound(two_ranks):
    options = {"report": Report(link_bytes_per_s=32000)}
    rank_0, _ = two_ranks.run(with_window, TWO_STEPS, options)
    of_bytes = {
        m.COMM_BYTES: 2000,
        m.COMM_LINK_BYTES: 3000,
        m.COMM_LEAST_LINK_BYTES: 2000,
        m.COMM_NODE_BYTES: 4000,
    }
    of_clock = {
        m.COMM_BUSY_S: 0.125,
        m.COMM_EXPOSED_S: 0.05,
        m.COMM_EXPOSED_SHARE: 0.1,  # of two steps of half a second
        "comm/exposed_s/bucket_0": 0.0,
        "comm/exposed_s/bucket_1": 0.05,
        m.COMM_ACHIEVED_BYTES_PER_S: 16000,
        m.COMM_ACHIEVED_SHARE: 0.5,
    }
    names = {name for name in rank_0.names() if name.startswith("comm/")}
    assert names == of_bytes.keys() | of_clock.keys()
    for name, value in of_bytes.items():
        assert rank_0.column(name) == dict.fromkeys((2, 4, 6, 8), value), name
    for name, value in of_clock.items():
        assert rank_0.column(name) == pytest.approx(dict.fromkeys((6, 8), value)), name


def with_window(window, options):
    return rows_of({"strategy": counting(window, **options)})


BETWEEN_NODES = {
    m.COMM_LINK_BYTES,
    m.COMM_LEAST_LINK_BYTES,
    m.COMM_ACHIEVED_BYTES_PER_S,
    m.COMM_ACHIEVED_SHARE,
}
IN_SECONDS = {
    name for name, metric in METRICS.items() if name.startswith("comm/") and metric.from_clock
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("one node", BETWEEN_NODES | {m.COMM_QUANTIZATION_NMSE}),
        ("cuda", IN_SECONDS | {m.COMM_QUANTIZATION_NMSE}),
    ],
)
def test_what_was_not_measured_is_not_logged(two_ranks, kind, missing):
    names = two_ranks.run(with_window, WINDOWS[kind], {})[0].names()
    assert {name for name in METRICS if name.startswith("comm/")} - names == missing


def test_between_logged_steps_nothing_is_read(two_ranks):
    assert two_ranks.run(reads_of_the_scale) == [4, 4]


def reads_of_the_scale():
    reads = []

    def read(scale):
        reads.append(scale)
        return 1.0

    def watch(trainer, module):
        scale = trainer.precision_plugin.loss_scale
        scale.__class__ = type("Watched", (type(scale),), {"value": property(read)})

    fit(callbacks=[at(on_train_start=watch)])
    return len(reads)


def halve_momentum(trainer, *_):
    for group in trainer.optimizers[0].param_groups:
        if "momentum" in group:
            group["momentum"] *= 0.5


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [("SGD", {2: 0.45, 4: 0.9 / 8, 6: 0.9 / 32, 8: 0.9 / 128}), ("Adagrad", {})],
)
def test_momentum_is_that_of_the_step(two_ranks, optimizer, expected):
    """The momentum follows the schedule 0.9 * 0.5 ** (previous steps). The logger receives float32."""
    scene = {
        "module": partial(Module, optimizer=optimizer),
        "callbacks": [at(on_train_batch_end=halve_momentum)],
        "precision": "32-true",
    }
    rank_0, _ = seen(two_ranks, **scene)
    assert rank_0.column(m.TRAIN_MOMENTUM) == pytest.approx(expected)


def test_waiting_for_data_is_per_step_and_of_its_window(two_ranks):
    """Each batch takes 3 ms, and the first four are not logged. Two batches make a step."""
    assert two_ranks.run(waits_logged, 2)[0] == pytest.approx({4: 0.006})
    assert two_ranks.run(waits_logged, 0)[0] == {}


def waits_logged(accumulate):
    class Waits(DataLoader):
        waited_s = 0.0

        def __iter__(self):
            for batch in super().__iter__():
                self.waited_s += 0.003
                yield batch

        def take_wait_s(self):
            waited_s = self.waited_s
            self.waited_s = 0.0
            return waited_s

    class Exact(HybridAllReduceStrategy):
        def process_dataloader(self, dataloader):  # a prefetcher would be one batch ahead
            return dataloader

    loader_class = Waits if accumulate else DataLoader
    settings = {
        "accumulate_grad_batches": max(1, accumulate),
        "use_distributed_sampler": False,
        "precision": "32-true",
        "skip_steps": 4 // max(1, accumulate),
    }
    train = loader_class(toy.Blobs(32), batch_size=8)
    logger, _, _ = fit(train=train, strategy=Exact(), **settings)
    return logger.column(m.DATA_WAIT_S)


def test_utilization_needs_two_numbers_above_zero():
    with pytest.raises(ValueError, match=r"`flops_per_image` \(=0\) must be positive"):
        TrainingMetrics(flops_per_image=0)
    with pytest.raises(ValueError, match=r"`peak_flops_per_s` \(=1e\+12\) needs `flops_per_image`"):
        TrainingMetrics(peak_flops_per_s=1e12)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the other source is Linux's")
def test_peak_memory_is_what_the_system_says(two_ranks):
    """The peak at the last step agrees with the operating system's count within 5 %."""
    logged, peak_bytes = two_ranks.run(memory_logged_and_counted)[0]
    assert logged == pytest.approx(peak_bytes, rel=0.05)


def memory_logged_and_counted():
    logger, _, _ = fit(max_epochs=1)
    logged = logger.column(m.PEAK_MEMORY_BYTES)[4]
    (kib,) = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return logged, int(kib) * 1024


@pytest.mark.parametrize(
    ("precision", "looked_at"),
    [("32-true", False), ("16-true", False), ("16-true", True)],
    ids=["fp32", "fp16, in one pass at steps that are not logged", "fp16, unscaled for a hook"],
)
def test_trust_ratios_are_those_of_the_gradients_just_used(two_ranks, precision, looked_at):
    """The ratios match a float64 computation. The learning rate is 0, so the weights are those of the step."""
    rank_0, _ = two_ranks.run(ratios_logged_and_expected, precision, looked_at)
    logged, expected, unseen = rank_0
    if precision == "16-true" and not looked_at:
        assert unseen == [1, 3, 5, 7]
    else:
        assert unseen == []
    assert list(logged) == [2, 4, 6, 8]
    for step, result in logged.items():
        assert result == pytest.approx(expected[step], rel=1e-5)
        assert 0 < result[0] < result[1] < result[2]


class Lars(Module):
    fused = False

    def configure_optimizers(self):
        return LARS(param_groups(self, weight_decay=0.01, rules=()), lr=0.0, fused=self.fused)


def trust_ratio(parameter):
    grad_norm = parameter.grad.double().norm()
    weight_norm = parameter.double().norm()
    if weight_norm == 0 or grad_norm == 0:
        return 1.0
    return (0.001 * weight_norm / (grad_norm + 0.01 * weight_norm)).item()


def ratios_logged_and_expected(precision, looked_at):
    """Return logged and expected ratios, and the steps whose gradients the optimizer used unseen."""
    expected = {}
    unseen = []
    module = Lars()
    module.fused = precision == "16-true" and not looked_at

    def look(trainer, module, *_):
        if any(parameter.grad is None for parameter in module.parameters()):
            if trainer.global_step:
                unseen.append(trainer.global_step)
            return
        ratios = sorted(trust_ratio(parameter) for parameter in module.parameters())
        expected[trainer.global_step] = [ratios[0], ratios[(len(ratios) - 1) // 2], ratios[-1]]

    # Hooks after a step would request visible gradients. Hooks of the next batch see what the step has left.
    callbacks = [at(on_train_batch_start=look, on_train_end=look)]
    if looked_at:
        callbacks.append(at(on_before_optimizer_step=lambda *_: None))
    loss_scale = None
    if precision == "16-true":
        loss_scale = 1024.0
    strategy = HybridAllReduceStrategy(loss_scale=loss_scale)
    settings = {"strategy": strategy, "precision": precision, "validate": False}
    logger, _, _ = fit(module=module, callbacks=callbacks, **settings)
    columns = [logger.column(name) for name in m.TRUST_RATIOS]
    logged = {step: [column[step] for column in columns] for step in columns[0]}
    return logged, expected, unseen


def validate_before_fitting():
    trainer = toy.trainer(callbacks=[TrainingMetrics()])
    module = toy.Toy()
    trainer.validate(module, toy.loader(), verbose=False)
    return trainer.state.status


def test_validation_before_any_fit_needs_no_clock_of_training(one_rank):
    assert one_rank.run(validate_before_fitting) == [TrainerStatus.FINISHED]


class Graphs:
    """Batch of one object without rows, as libraries for graphs return it."""

    def __init__(self, samples):
        self.images = torch.stack([image for image, _ in samples])
        self.targets = torch.stack([target for _, target in samples])

    def to(self, device):
        return self


class OfGraphs(toy.Toy):
    def loss(self, batch):
        return super().loss((batch.images, batch.targets))


def test_batches_without_rows_have_no_throughput_and_one_warning():
    train = DataLoader(toy.Blobs(), batch_size=8, collate_fn=Graphs)
    metrics = TrainingMetrics(skip_steps=0, flops_per_image=1e9, peak_flops_per_s=1e11)
    scene = {"callbacks": lambda: metrics, "log_every_n_steps": 1}
    result = run(module=OfGraphs, train=train, warns=True, **scene)
    assert list(result.column(m.TRAIN_LOSS)) == list(range(1, 17))
    for name in (m.IMAGES_PER_S, m.FLOPS_PER_S, m.MFU):
        assert result.column(name) == {}, name
    (warning,) = [text for text in result.warnings if "TrainingMetrics" in text]
    assert "number of samples in a batch of type `Graphs` is unknown" in warning


class Manual(toy.Toy):
    """Module with manual optimization, whose step returns something under the name "loss"."""

    def __init__(self, returned):
        super().__init__()
        self.automatic_optimization = False
        self.returned = returned

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        return {"loss": self.returned}


@pytest.mark.parametrize(
    ("returned", "expected"),
    [(torch.ones(3), {}), (torch.full((1, 1), 2.0), {4: 2.0, 8: 2.0})],
    ids=["vector", "one element"],
)
def test_the_loss_of_manual_optimization_is_logged_if_it_has_one_element(returned, expected):
    scene = {"log_every_n_steps": 4, "max_epochs": 1, "callbacks": TrainingMetrics}
    assert run(module=partial(Manual, returned), **scene).column(m.TRAIN_LOSS) == expected


class WithoutOptimizer(Module):
    def configure_optimizers(self):
        return None


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_without_an_optimizer_the_other_metrics_are_logged():
    logger, _, _ = fit(module=WithoutOptimizer, validate=False, precision="32-true")
    names = {name for _, row in logger.rows for name in row}
    assert m.TRAIN_LOSS in names
    assert not names & {m.TRAIN_LR, m.TRAIN_MOMENTUM, *m.TRUST_RATIOS}
