"""User code under `elastic` on a single host: resumes in other layouts, errors, consecutive fits."""

import socket
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torchmetrics.classification import BinaryAUROC

from lightning_hybrid import HybridElasticStrategy
from lightning_hybrid.contrastive import GlobalBatch, InfoNCE
from lightning_hybrid.elastic import host_changes
from lightning_hybrid.elastic.membership import membership
from lightning_hybrid.elastic.options import ElasticOptions, resolved, warn_of_loopback
from lightning_hybrid.run_status import run_status
from tests import toy
from tests.elastic.user_runs import Net, Numbered
from tests.ports import free_addresses
from tests.rank_pool import Ranks
from tests.scenes import at, fit


@pytest.fixture(autouse=True)
def _meets_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_changes, "Membership", partial(host_changes.Membership, wait_s=0.1))


def elastic(max_hosts: int = 1) -> dict[str, Any]:
    return {
        "kind": HybridElasticStrategy,
        "max_hosts": max_hosts,
        "meet": free_addresses(1),
        "silent_s": 0.4,
        "max_epochs": 1,
        "logger": False,
    }


def shuffled(num_images: int = 32, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(Numbered(num_images), batch_size, shuffle=True)


class KeepsImages(Net):
    """Module that records the images of all its steps."""

    kept: list[list[int]]

    def __init__(self) -> None:
        super().__init__()
        KeepsImages.kept = self.images_read


def images_of(batches: list[list[int]]) -> list[int]:
    return sorted(image for batch in batches for image in batch)


def error_of_a_resume(path: str, loader: Any, max_hosts: int) -> str:
    """Return the error of a fit that resumes with another loader or number of hosts."""
    scene = {"train": loader, "ckpt_path": path, **elastic(max_hosts)}
    return fit(module=Net, raises=True, warns=True, **scene).error


def assert_same_weights(weights: dict[str, Any], expected: dict[str, Any]) -> None:
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


def fit_alone(**scene: Any) -> list[list[int]]:
    """Fit on this host, and return the images of its batches."""
    fit(module=KeepsImages, warns=True, **scene)  # warns about addresses of this machine
    return KeepsImages.kept


@pytest.fixture
def checkpoint_of_two_hosts(tmp_path: Path) -> str:
    """Return a checkpoint after 3 of 8 steps and 12 of 32 images.

    The run is for two hosts, of which only one is present.
    """
    path = str(tmp_path / "two.ckpt")
    fit_alone(train=shuffled, save_to=path, max_steps=3, **elastic(2))
    return path


def test_another_number_of_hosts_with_the_same_batch_size_is_refused(
    checkpoint_of_two_hosts: str,
) -> None:
    error = error_of_a_resume(checkpoint_of_two_hosts, shuffled, max_hosts=1)
    assert "NotExactError" in error
    assert "Set batch_size=4" in error


def test_half_the_hosts_with_twice_the_batch_read_the_remaining_images(
    checkpoint_of_two_hosts: str,
) -> None:
    twice = partial(shuffled, batch_size=4)
    whole = images_of(fit_alone(train=shuffled, **elastic(2)))
    assert whole == list(range(32))
    before = images_of(fit_alone(train=shuffled, max_steps=3, **elastic(2)))
    after = images_of(fit_alone(train=twice, ckpt_path=checkpoint_of_two_hosts, **elastic(1)))
    assert sorted(before + after) == whole


def test_another_batch_size_on_the_same_hosts_is_refused(checkpoint_of_two_hosts: str) -> None:
    twice = partial(shuffled, batch_size=4)
    error = error_of_a_resume(checkpoint_of_two_hosts, twice, max_hosts=2)
    assert "NotExactError" in error
    assert "Set batch_size=2" in error


def test_another_data_set_is_refused_in_the_middle_of_an_epoch(
    checkpoint_of_two_hosts: str,
) -> None:
    larger = partial(shuffled, num_images=36)
    error = error_of_a_resume(checkpoint_of_two_hosts, larger, max_hosts=2)
    assert "NotExactError" in error
    assert "data set" in error


def test_a_plain_run_on_two_ranks_resumes_from_two_hosts(
    two_ranks: Ranks, checkpoint_of_two_hosts: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "end.ckpt")
    plain = {"max_epochs": 1, "logger": False, "devices": 2}
    fit(
        two_ranks,
        module=Net,
        train=shuffled,
        warns=True,
        ckpt_path=checkpoint_of_two_hosts,
        save_to=path,
        **plain,
    )
    from_two_hosts = torch.load(path, weights_only=True)["state_dict"]
    fit_alone(train=shuffled, save_to=path, **elastic(2))
    undisturbed = torch.load(path, weights_only=True)["state_dict"]
    assert_same_weights(from_two_hosts, undisturbed)


def test_hosts_resume_from_a_plain_run_on_two_ranks_to_the_bit(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    middle = str(tmp_path / "middle.ckpt")
    plain = {"max_epochs": 1, "logger": False, "devices": 2}
    fit(two_ranks, module=Net, train=shuffled, save_to=middle, max_steps=3, **plain)
    end = str(tmp_path / "end.ckpt")
    fit_alone(train=shuffled, save_to=end, **elastic(2))
    undisturbed = torch.load(end, weights_only=True)["state_dict"]
    batches = fit_alone(train=shuffled, save_to=end, ckpt_path=middle, **elastic(2))
    resumed = torch.load(end, weights_only=True)["state_dict"]
    assert len(batches) == 2 * 5
    assert_same_weights(resumed, undisturbed)


def test_a_plain_run_on_four_ranks_is_refused_by_two_hosts_with_the_batch_that_fits(
    four_ranks: Ranks, tmp_path: Path
) -> None:
    middle = str(tmp_path / "middle.ckpt")
    plain = {"max_epochs": 1, "logger": False, "devices": 4}
    fit(four_ranks, module=Net, train=shuffled, save_to=middle, max_steps=2, **plain)
    error = error_of_a_resume(middle, shuffled, max_hosts=2)
    assert "NotExactError" in error
    assert "Set batch_size=4" in error


class Looks(pl.Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.images = next(iter(trainer.train_dataloader))[0].tolist()


def test_a_callback_that_reads_the_training_loader_changes_no_batch(
    checkpoint_of_two_hosts: str,
) -> None:
    scene = {"train": shuffled, "ckpt_path": checkpoint_of_two_hosts}
    without = list(fit_alone(**scene, **elastic(2)))
    with_look = fit_alone(callbacks=[Looks()], **scene, **elastic(2))
    assert with_look == without


class PlansItsRate(KeepsImages):
    """Module that reads the number of steps of the run, as a one-cycle schedule does."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=int(steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_a_schedule_over_the_steps_of_the_run_resumes(tmp_path: Path) -> None:
    callback = pl.callbacks.ModelCheckpoint(
        tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1
    )
    stops = {"enable_checkpointing": True, "callbacks": [callback]}
    whole = fit(module=PlansItsRate, train=shuffled, warns=True, **stops, **elastic(2))
    middle = str(tmp_path / "step=3.ckpt")
    resumed = fit(module=PlansItsRate, train=shuffled, warns=True, ckpt_path=middle, **elastic(2))
    assert len(PlansItsRate.kept) == 2 * 5
    assert_same_weights(resumed.weights, whole.weights)


def test_two_fits_of_one_trainer_may_log_over_the_ranks() -> None:
    """Two fits use the same `reduce` function. Otherwise Lightning would see different arguments of `log`."""
    scene = elastic(1)
    strategy_type = scene.pop("kind")
    hosts = {name: scene.pop(name) for name in ("max_hosts", "meet", "silent_s")}
    trainer = toy.trainer(strategy=strategy_type(**hosts), **scene)
    module = Net()
    trainer.fit(module, shuffled(8))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, shuffled(8))
    assert trainer.global_step == 8


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (
            {"reload_dataloaders_every_n_epochs": 1},
            "`reload_dataloaders_every_n_epochs` (=1) and `strategy`",
        ),
        ({"ranks_per_node": 1}, "`ranks_per_node` (=1)"),
        ({"exact_resume": False}, "`exact_resume` (=False)"),
        (
            {"train": lambda: {"a": shuffled(), "b": shuffled()}},
            "`train_dataloaders` contains 2 loaders",
        ),
        (
            {
                "train": lambda: DataLoader(
                    Numbered(8), batch_sampler=InPairs(SequentialSampler(range(8)), 2, False)
                )
            },
            "(DataLoader with InPairs)",
        ),
    ],
    ids=["reload", "ranks_per_node", "exact_resume", "loaders", "batch_sampler"],
)
def test_an_option_or_loader_that_an_elastic_run_cannot_have_is_refused_by_name(
    options: dict[str, Any], name: str
) -> None:
    scene = {"train": shuffled, **elastic(2), **options}
    try:
        error = fit(module=Net, raises=True, warns=True, **scene).error
    except ValueError as refused:  # raised before a trainer exists
        error = str(refused)
    assert name in error


def test_a_launch_over_several_nodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")  # as torchrun --nnodes=2 sets it
    seen = fit(module=Net, train=shuffled, raises=True, warns=True, **elastic(2))
    assert "`num_nodes` (=2)" in seen.error


class InPairs(BatchSampler):
    """A user's batch sampler."""


class LogsAuroc(Net):
    """Module with a metric whose states are lists."""

    def __init__(self) -> None:
        super().__init__()
        self.auroc = BinaryAUROC()
        self.val_auroc = BinaryAUROC()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.auroc(batch[1][:, 0], batch[0] % 2)
        self.log("auroc", self.auroc, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_auroc(batch[1][:, 0], batch[0] % 2)
        self.log("val_auroc", self.val_auroc, on_step=False, on_epoch=True)


def test_a_metric_that_hosts_do_not_add_up_is_named_once() -> None:
    scene = {"train": shuffled, "val": lambda: DataLoader(Numbered(8), 4)}
    seen = fit(module=LogsAuroc, warns=True, **scene, **elastic(2))
    texts = [text for text in seen.warnings if "only states that are sums" in text]
    assert len(texts) == 1
    assert "`auroc` (BinaryAUROC)" in texts[0]


def test_addresses_that_only_this_machine_can_reach_are_named() -> None:
    warning = "contains addresses that only this machine can reach"
    seen = fit(module=Net, train=shuffled, warns=True, **elastic(2))
    assert any(warning in text for text in seen.warnings)
    seen = fit(module=Net, train=shuffled, warns=True, **elastic(1))
    assert not any(warning in text for text in seen.warnings)


def test_a_host_whose_own_name_is_a_loopback_address_is_warned() -> None:
    """Debian resolves the name of a host to 127.0.1.1 on this host, and to its IP address on all others."""
    option = ElasticOptions(max_hosts=2, meet="127.0.1.1:29400,10.0.0.2:29400")
    with pytest.warns(UserWarning, match=r"only this machine can reach \(127\.0\.1\.1:29400\)"):
        warn_of_loopback(option, resolved(option.meeting_points))


def test_a_name_that_no_server_knows_is_an_error_that_names_the_option() -> None:
    options = elastic(1) | {"meet": "no-such-host.invalid:29400"}
    seen = fit(module=Net, train=shuffled, raises=True, warns=True, **options)
    assert "`meet` (=no-such-host.invalid:29400)" in seen.error


class Thaws(Net):
    """Module that trains its bias from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.net.bias.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.net.weight], 0.05)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.bias.requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": [self.net.bias]})


def test_a_parameter_thawed_in_training_is_named_although_the_launch_has_one_rank() -> None:
    scene = {"train": shuffled, **elastic(2), "max_epochs": 2}
    seen = fit(module=Thaws, raises=True, warns=True, **scene)
    assert "Parameter `net.bias`" in seen.error
    assert "trained but not averaged" in seen.error


class Contrasts(Net):
    """Module with a loss over the pairs of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = GlobalBatch(InfoNCE(0.1), chunk=4)


def test_a_loss_over_the_pairs_of_all_ranks_is_refused() -> None:
    seen = fit(module=Contrasts, train=shuffled, raises=True, warns=True, **elastic(2))
    assert "(=InfoNCE) and `strategy` (='hybrid_elastic')" in seen.error


class ReadsAnotherLoader(pl.Callback):
    """Callback that reads training images in the middle of an epoch, for example to recalibrate statistics."""

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            loader = trainer.strategy.process_dataloader(shuffled())
            next(iter(loader))


def test_another_loader_that_a_callback_reads_in_training_changes_no_batch() -> None:
    without = list(fit_alone(train=shuffled, **elastic(2)))
    assert fit_alone(train=shuffled, callbacks=[ReadsAnotherLoader()], **elastic(2)) == without


def numbers_of_run(trainer: Any, module: Any, *_: Any) -> tuple[Any, ...]:
    status = run_status(trainer)
    assert status.gather_over_hosts is not None
    return status.num_shards, status.num_ranks, status.gather_over_hosts("of this rank")


def test_callbacks_find_the_numbers_of_the_run_and_not_those_of_a_launch() -> None:
    looks = at(on_train_batch_end=numbers_of_run)
    seen = fit(module=Net, train=shuffled, warns=True, callbacks=[looks], **elastic(4))
    assert seen.looks["on_train_batch_end"] == [(4, 1, ["of this rank"])] * 4


def test_a_host_that_waits_says_who_answers_and_how_many_hosts_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "WAIT_MESSAGE_S", 0.5)
    texts: list[str] = []
    monkeypatch.setattr(
        host_changes.log, "warning", lambda text, *values: texts.append(text % values)
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        taken = f"127.0.0.1:{silent.getsockname()[1]}"
        nobody = free_addresses(1)
        options = elastic(2) | {"min_hosts": 2, "meet": [taken, nobody]}
        seen = fit(module=Net, train=shuffled, raises=True, warns=True, **options, timeout=3)
    assert "TimeoutError" in seen.error
    for text in (*texts[:1], seen.error):
        assert "1 of `min_hosts` (=2)" in text
        assert f"the process that listens at {taken} is not a host of an elastic run" in text
        assert f"{nobody} is this host" in text
    assert len(texts) >= 2


@pytest.mark.parametrize(
    ("meet", "words"),
    [
        ("tcp://10.0.0.1:29400", "begins with tcp://"),
        ("10.0.0.1:29400 10.0.0.2:29400", "addresses are separated by commas"),
        ("10.0.0.1", "has no port"),
        ("10.0.0.1:99999", "has no port from 1 to 65535"),
        ("10.0.0.1:²", "has no port from 1 to 65535"),
        ("[::1]:29400", "is an IPv6 address"),
        ([("10.0.0.1", 29400)], "is not a string"),
        (29400, "(=29400)"),
        (None, "(=None)"),
        ("", "has no port"),
        ([], "(=())"),
    ],
    ids=str,
)
def test_a_meet_that_is_no_address_is_refused_when_it_is_given(meet: Any, words: str) -> None:
    with pytest.raises(ValueError, match=r"`meet`") as caught:
        HybridElasticStrategy(max_hosts=2, meet=meet)
    assert words in str(caught.value)
