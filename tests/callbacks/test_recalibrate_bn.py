"""BatchNorm's statistics of the present weights: against one pass over all images, on any number of ranks."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_hybrid.callbacks import MasterWeightAveraging, RecalibrateBatchNorm
from lightning_hybrid.data.prefetch import prefetch
from recipes.datasets.digits import DigitsDataModule
from tests import toy
from tests.scenes import same

NUM_IMAGES = 256


class Digits(pl.LightningModule):
    def __init__(self, dropout=0.5):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = [
                nn.Conv2d(1, 4, 3),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.Dropout(dropout),
                nn.Conv2d(4, 8, 3),
            ]
            self.net = nn.Sequential(
                *layers, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
            )
            self.net(torch.zeros(2, 1, 16, 16))
            self.net[1].reset_running_stats(), self.net[5].reset_running_stats()
        self.seen = []

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]).float(), batch[1])

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.seen.append({name: value.clone() for name, value in self.net.state_dict().items()})

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
    }
    settings |= {"max_epochs": epochs, "accumulate_grad_batches": accumulate}
    trainer = toy.trainer(callbacks=callbacks, **settings)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return trainer, module, data


def seen_by_validation(accumulate, averages=False):
    callbacks = [*[MasterWeightAveraging(decay=0.5)] * averages, RecalibrateBatchNorm(NUM_IMAGES)]
    trainer, module, _ = run(callbacks, accumulate=accumulate, epochs=1 if averages else 2)
    end = {name: value.clone() for name, value in module.net.state_dict().items()}
    return (
        module.seen,
        end,
        {name: float(value) for name, value in trainer.callback_metrics.items()},
    )


def assert_statistics_are_of_ghost_batches(seen, ghost):
    """Mean and variance of both layers, over ghost batches taken one by one, float64."""
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
    for index, own in inputs.items():
        for name, value in zip(
            ("var", "mean"), torch.var_mean(torch.cat(own), dim=(0, 2, 3)), strict=True
        ):
            torch.testing.assert_close(
                seen[f"{index}.running_{name}"].double(), value, rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize(("accumulate", "ghost"), [(1, 64), (4, 16)])
def test_validation_sees_the_statistics_of_one_pass_over_the_images_in_ghost_batches(
    one_rank, accumulate, ghost
):
    ((seen, _, measured),) = one_rank.run(seen_by_validation, accumulate)
    assert len(seen) == 3
    for one in seen[1:]:  # the first is Lightning's look before training, which costs no pass
        assert_statistics_are_of_ghost_batches(one, ghost)
    assert measured["time/recalibration_s"] > 0


def test_an_average_of_weights_gets_statistics_of_its_own(one_rank):
    ((seen, end, _),) = one_rank.run(seen_by_validation, 1, True)
    assert_statistics_are_of_ghost_batches(seen[-1], 64)
    # in the end the module has both
    assert all(torch.equal(end[name], value) for name, value in seen[-1].items())


def test_they_are_the_same_on_any_number_of_ranks(one_rank, two_ranks):
    """Ghost batches of 16 images each. Weights differ by the order of the ranks' sums, so before the first step."""
    (alone,) = one_rank.run(untrained, 4)
    assert all(same(alone, state) for state in two_ranks.run(untrained, 2))


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
    """Dropout, and a first normalisation by statistics of other data, as fine-tuning keeps them."""

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
    text = [
        str(warning.message) for warning in caught if "RecalibrateBatchNorm" in str(warning.message)
    ]
    return means, [layer.training for layer in norms], text


def test_layers_in_evaluation_mode_while_the_module_trains_keep_their_statistics(two_ranks):
    results = two_ranks.run(frozen)
    for means, modes, _ in results:
        assert means[0] == [3.0] * 8
        assert means[1] != [0.0] * 8
        assert means == results[0][0]
        assert modes == [False, True]
    assert [len(text) for *_, text in results] == [1, 0]
    assert results[0][2][0].startswith("`RecalibrateBatchNorm`: `net.1` keep their statistics")


def with_and_without(num_workers, precision, has_generator=True):
    if num_workers:
        more = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    else:
        more = {}
    ends = []
    for callbacks in ([RecalibrateBatchNorm(32)], []):
        module = FineTuned(False)
        if has_generator:
            own = torch.Generator().manual_seed(7)
        else:
            own = None
        loader = DataLoader(toy.Blobs(64), 8, shuffle=True, generator=own, **more)
        torch.manual_seed(1)
        settings = {
            "use_distributed_sampler": False,
            "val_check_interval": 3,
            "num_sanity_val_steps": 0,
        }
        toy.trainer(callbacks=callbacks, precision=precision, **settings).fit(
            module, loader, toy.loader()
        )
        state = {
            name: value for name, value in toy.weights(module).items() if "running" not in name
        }
        ends.append([state, module.losses])
    return same(*ends)


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_the_order_of_a_users_loader_and_dropout_are_what_they_are_without(one_rank):
    """A pass in the middle of an epoch draws from the generators of loader, samplers and process."""
    assert one_rank.run(with_and_without, 1, "32-true") == [True]


def test_a_pass_over_a_loader_that_draws_from_the_global_stream_moves_no_dropout(one_rank):
    assert one_rank.run(with_and_without, 0, "32-true", False) == [True]


def test_training_in_half_precision_has_the_same_bits_with_and_without(two_ranks):
    assert two_ranks.run(with_and_without, 0, "16-true") == [True, True]


class WithoutForward(Digits):
    forward = nn.Module.forward

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]).float(), batch[1])


def test_a_module_without_forward_is_told_what_to_give():
    data = DigitsDataModule(global_batch_size=64, seed=3)
    words = r"`WithoutForward.forward` is not defined: .*RecalibrateBatchNorm.forward=lambda module"
    short = {
        "max_epochs": 1,
        "limit_train_batches": 1,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    with pytest.raises(Exception, match=words):
        toy.trainer(callbacks=RecalibrateBatchNorm(64), **short).fit(WithoutForward(), data)
    given = RecalibrateBatchNorm(64, forward=lambda module, batch: module.net(batch[0]))
    toy.trainer(callbacks=given, **short).fit(WithoutForward(), data)
