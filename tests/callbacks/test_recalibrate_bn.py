"""Recalibrated BatchNorm statistics, compared with one pass over all images, on any number of ranks."""

import warnings
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader

from lightning_hybrid.callbacks import MasterWeightAveraging, RecalibrateBatchNorm
from lightning_hybrid.data.prefetch import prefetch
from recipes.datasets.digits import DigitsDataModule
from tests import toy
from tests.scenes import fit, same

NUM_IMAGES = 256


class Digits(pl.LightningModule):
    def __init__(self, dropout=0.5):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(
                nn.Conv2d(1, 4, 3),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.Dropout(dropout),
                nn.Conv2d(4, 8, 3),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.Flatten(),
                nn.LazyLinear(10),
            )
            self.net(torch.zeros(2, 1, 16, 16))
            self.net[1].reset_running_stats()
            self.net[5].reset_running_stats()
        self.seen = []

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]).float(), batch[1])

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.seen.append(toy.weights(self.net))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def run(callbacks, accumulate=1, epochs=2, ckpt_path=None, dropout=0.5):
    module = Digits(dropout)
    torch.manual_seed(1)
    data = DigitsDataModule(global_batch_size=64, seed=3)
    settings = {
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 1,
        "limit_train_batches": 4,
        "max_epochs": epochs,
        "accumulate_grad_batches": accumulate,
    }
    trainer = toy.trainer(callbacks=callbacks, **settings)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer, module, data


def seen_by_validation(accumulate, averages=False):
    callbacks = [RecalibrateBatchNorm(NUM_IMAGES)]
    epochs = 2
    if averages:
        callbacks.insert(0, MasterWeightAveraging(decay=0.5))
        epochs = 1
    trainer, module, _ = run(callbacks, accumulate=accumulate, epochs=epochs)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module.seen, toy.weights(module.net), metrics


def assert_statistics_are_of_ghost_batches(seen, ghost):
    """Compare mean and variance of both layers with a float64 pass over individual ghost batches."""
    data = DigitsDataModule(global_batch_size=64, seed=3)
    data.setup("fit")
    data.trainer = toy.trainer(devices=1, accumulate_grad_batches=64 // ghost)
    net = Digits(dropout=0.0).net
    net.load_state_dict(seen)
    net.double()
    inputs = {1: [], 5: []}
    for index in inputs:
        net[index].train()
        net[index].register_forward_pre_hook(
            lambda _, args, index=index: inputs[index].append(args[0])
        )
    loader = iter(prefetch(data.train_dataloader(), torch.device("cpu"), None))
    with torch.no_grad():
        for _ in range(NUM_IMAGES // ghost):
            images = next(loader)[0]
            assert len(images) == ghost
            net(images.double())
    for index, inputs_of_layer in inputs.items():
        var, mean = torch.var_mean(torch.cat(inputs_of_layer), dim=(0, 2, 3))
        running_var = seen[f"{index}.running_var"].double()
        running_mean = seen[f"{index}.running_mean"].double()
        torch.testing.assert_close(running_var, var, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(running_mean, mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("accumulate", "ghost"), [(1, 64), (4, 16)])
def test_validation_sees_the_statistics_of_one_pass_over_the_images_in_ghost_batches(
    one_rank, accumulate, ghost
):
    ((seen, _, measured),) = one_rank.run(seen_by_validation, accumulate)
    assert len(seen) == 3
    for state in seen[1:]:  # the first state is from Lightning's sanity check, which needs no pass
        assert_statistics_are_of_ghost_batches(state, ghost)
    assert measured["time/recalibration_s"] > 0


def test_an_average_of_weights_gets_statistics_of_its_own(one_rank):
    ((seen, end, _),) = one_rank.run(seen_by_validation, 1, True)
    assert_statistics_are_of_ghost_batches(seen[-1], 64)
    # At the end the module has both.
    assert same(end, seen[-1])


def test_recalibrated_statistics_are_the_same_on_any_number_of_ranks(one_rank, two_ranks):
    """Statistics over ghost batches of 16 images agree.

    They are compared before the first step, because afterwards weights differ by the order of the reductions.
    """
    (alone,) = one_rank.run(untrained, 4)
    for rank, state in enumerate(two_ranks.run(untrained, 2)):
        assert same(alone, state), f"rank {rank}"


def untrained(accumulate):
    callback = RecalibrateBatchNorm(256)
    module = Digits()
    data = DigitsDataModule(global_batch_size=64, seed=3)
    trainer = toy.trainer(
        callbacks=callback, accumulate_grad_batches=accumulate, use_distributed_sampler=False
    )
    trainer.test(module, data, verbose=False)
    return module.seen[0]


class FineTuned(toy.Toy):
    """Toy with dropout, and with statistics of other data in its first normalization, as in fine-tuning."""

    def __init__(self, freezes=True):
        super().__init__()
        self.freezes = freezes
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = [
                nn.Linear(toy.NUM_FEATURES, 8),
                nn.BatchNorm1d(8),
                nn.Linear(8, 8),
                nn.BatchNorm1d(8),
            ]
            self.net = nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(8, toy.NUM_CLASSES))
        self.net[1].running_mean.fill_(3.0)

    def forward(self, images):
        return self.net(images)

    def on_train_epoch_start(self):
        if self.freezes:
            self.net[1].eval()


def frozen():
    module = FineTuned()
    callbacks = [RecalibrateBatchNorm(32)]
    trainer = toy.trainer(callbacks=callbacks, limit_train_batches=2, num_sanity_val_steps=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, toy.loader(), toy.loader())
    norms = [module.net[1], module.net[3]]
    means = [layer.running_mean.tolist() for layer in norms]
    modes = [layer.training for layer in norms]
    messages = [str(warning.message) for warning in caught]
    return means, modes, [text for text in messages if "RecalibrateBatchNorm" in text]


def test_layers_in_evaluation_mode_while_the_module_trains_keep_their_statistics(two_ranks):
    results = two_ranks.run(frozen)
    means_of_rank_0, _, messages_of_rank_0 = results[0]
    for rank, (means, modes, _) in enumerate(results):
        assert means[0] == [3.0] * 8, f"rank {rank}"
        assert means[1] != [0.0] * 8, f"rank {rank}"
        assert means == means_of_rank_0, f"rank {rank}"
        assert modes == [False, True], f"rank {rank}"
    assert [len(messages) for *_, messages in results] == [1, 0]
    assert messages_of_rank_0[0].startswith(
        "`RecalibrateBatchNorm` does not update the statistics of `net.1`"
    )


def with_and_without(num_workers, precision, has_generator=True):
    options = {}
    if num_workers:
        options = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    settings = {
        "precision": precision,
        "use_distributed_sampler": False,
        "val_check_interval": 3,
        "num_sanity_val_steps": 0,
    }
    results = []
    for callbacks in ([RecalibrateBatchNorm(32)], []):
        module = FineTuned(False)
        generator = torch.Generator().manual_seed(7) if has_generator else None
        loader = DataLoader(toy.Blobs(64), 8, shuffle=True, generator=generator, **options)
        torch.manual_seed(1)
        trainer = toy.trainer(callbacks=callbacks, **settings)
        trainer.fit(module, loader, toy.loader())
        weights = toy.weights(module)
        for name in list(weights):
            if "running" in name:
                del weights[name]
        results.append([weights, module.losses])
    return same(*results)


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_the_order_of_a_users_loader_and_dropout_are_what_they_are_without(one_rank):
    """A pass in the middle of an epoch would draw from the generators of loader, samplers and process."""
    assert one_rank.run(with_and_without, 1, "32-true") == [True]


def test_a_pass_over_a_loader_that_draws_from_the_global_stream_moves_no_dropout(one_rank):
    assert one_rank.run(with_and_without, 0, "32-true", False) == [True]


def test_training_in_half_precision_has_the_same_bits_with_and_without(two_ranks):
    assert two_ranks.run(with_and_without, 0, "16-true") == [True, True]


def through_net(module, batch):
    return module.net(batch[0])


def test_exact_evaluation_does_not_change_the_batches_of_the_recalibration(two_ranks):
    """Each rank has 5 of 9 training samples in one batch, which exact evaluation would split."""
    scene = {
        "train": partial(toy.loader, 9, 5),
        "val": toy.loader,
        "callbacks": [partial(RecalibrateBatchNorm, 32, through_net)],
        "max_epochs": 1,
    }
    exact = fit(two_ranks, exact_evaluation=True, **scene)
    padded = fit(two_ranks, exact_evaluation=False, **scene)
    for rank in range(2):
        assert same(exact[rank].weights, padded[rank].weights), f"rank {rank}"


class OfTwoLoaders(toy.Toy):
    def train_dataloader(self):
        return {"images": toy.loader(32), "others": toy.loader(64)}

    def training_step(self, batch, batch_idx):
        return super().training_step(batch["images"], batch_idx)


def through_net_of_images(module, batch):
    return module.net(batch["images"][0])


def test_several_training_loaders_are_combined_as_in_training():
    """The statistics equal those of a run whose only loader has the same images."""
    scene = {"val": toy.loader, "limit_train_batches": 4, "max_epochs": 1}
    of_two = fit(
        module=OfTwoLoaders,
        train=None,
        callbacks=[partial(RecalibrateBatchNorm, 32, through_net_of_images)],
        **scene,
    )
    of_one = fit(
        train=partial(toy.loader, 32),
        callbacks=[partial(RecalibrateBatchNorm, 32, through_net)],
        **scene,
    )
    assert same(of_two.weights, of_one.weights)


def two_combined_loaders():
    return CombinedLoader({"images": toy.loader(32), "others": toy.loader(64)}, "min_size")


def test_a_combined_loader_of_the_user_keeps_its_place_in_training():
    scene = {"val": toy.loader, "val_check_interval": 2, "train": two_combined_loaders}
    callbacks = [partial(RecalibrateBatchNorm, 32, through_net_of_images)]
    recalibrated = fit(module=OfTwoLoaders, callbacks=callbacks, **scene)
    plain = fit(module=OfTwoLoaders, **scene)
    assert recalibrated.losses == plain.losses


class ForwardOfImages(OfTwoLoaders):
    def forward(self, images):
        return self.net(images)


def test_a_forward_that_takes_a_part_of_the_batch_is_told_the_option():
    scene = {"val": toy.loader, "callbacks": [partial(RecalibrateBatchNorm, 32)], "raises": True}
    error = fit(module=ForwardOfImages, train=None, **scene).error
    assert "`RecalibrateBatchNorm` called `forward` with a whole batch, which is a dict" in error
    assert "RecalibrateBatchNorm(forward=" in error


class TrainsOnlyInFit(pl.LightningDataModule):
    def setup(self, stage):
        if stage == "fit":
            self.train_set = toy.Blobs()

    def train_dataloader(self):
        return DataLoader(self.train_set, 8)

    def val_dataloader(self):
        return toy.loader()


def test_validation_without_training_data_names_the_stage_and_the_cure():
    words = (
        r"`RecalibrateBatchNorm` needs training data, but `TrainsOnlyInFit.train_dataloader` raised AttributeError: "
        r".*train_set.*calls only `setup\(stage='validate'\)`. Create the training data set in every stage"
    )
    trainer = toy.trainer(callbacks=RecalibrateBatchNorm(32, through_net))
    with pytest.raises(RuntimeError, match=words):
        trainer.validate(toy.Toy(), TrainsOnlyInFit(), verbose=False)


class WithoutForward(Digits):
    forward = nn.Module.forward

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]).float(), batch[1])


def test_a_module_without_forward_is_told_what_to_give():
    data = DigitsDataModule(global_batch_size=64, seed=3)
    words = r"`WithoutForward.forward` is not defined, .*RecalibrateBatchNorm.forward=lambda module"
    short = {
        "max_epochs": 1,
        "limit_train_batches": 1,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    with pytest.raises(Exception, match=words):
        toy.trainer(callbacks=RecalibrateBatchNorm(64), **short).fit(WithoutForward(), data)
    with_forward = RecalibrateBatchNorm(64, forward=lambda module, batch: module.net(batch[0]))
    toy.trainer(callbacks=with_forward, **short).fit(WithoutForward(), data)
