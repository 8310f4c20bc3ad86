"""Errors of pipelines that name a remedy, raised before any message is sent, instead of wrong results."""

import random
from functools import partial

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_hybrid import HybridPipelineStrategy
from lightning_hybrid.comm.norm_clipping import clip_by_norm_over_ranks
from lightning_hybrid.pipeline.cuts import BlockProfile
from lightning_hybrid.pipeline.microbatches import (
    Muting,
    input_of_net,
    loss_in,
    microbatches,
    random_state,
)
from lightning_hybrid.pipeline.options import blocks_of, check_ranks, cut_places
from lightning_hybrid.pipeline.rank_layout import OtherStages
from lightning_hybrid.pipeline.shapes import Boundary, output_of
from tests import toy
from tests.pipeline.cases import in_stages, loader_of
from tests.scenes import at, fit, play


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "pipedream"}, "weight stashing"),
        ({"schedule": "fastest"}, "must be one of gpipe, 1f1b, interleaved, zero_bubble"),
        ({"num_stages": 1}, "a pipeline with one stage is plain data parallelism"),
        ({"num_microbatches": 5, "schedule": "interleaved"}, "multiple of the number of rounds"),
        (
            {"cuts": [3, 3]},
            "must contain the index of the first block of each stage except the first",
        ),
        (
            {"schedule": "interleaved", "cuts": BlockProfile(seconds=[1], most_bytes=8)},
            "limits one stage",
        ),
    ],
)
def test_options_that_cannot_work_are_refused_by_the_constructor(options, words):
    with pytest.raises(ValueError, match="`") as caught:
        HybridPipelineStrategy(**options)
    assert words in str(caught.value)


class Module(pl.LightningModule):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def compiled():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    # As after `net.compile()`, without importing the compiler.
    net._compiled_call_impl = object()
    return Module(net=net)


class WithForward(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda: Module(body=nn.Linear(1, 1)), "one of its modules with parameters: body"),
        (lambda: Module(net=WithForward(nn.Linear(1, 1))), "must name an nn.Sequential"),
        (
            lambda: Module(net=nn.Sequential(nn.Linear(1, 1)), head=nn.Linear(1, 1)),
            "Parameters `head.weight`",
        ),
        (compiled, "names a network that is compiled as a whole"),
    ],
)
def test_networks_that_cannot_be_cut_are_refused(module, words):
    with pytest.raises(ValueError, match=r"`of`|Parameter") as caught:
        blocks_of(module(), "net")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: check_ranks(num_stages=4, world_size=6),
            r"`num_stages` \(=4\) must divide the number of ranks",
        ),
        (
            lambda: check_ranks(num_stages=2, world_size=4, schedule="zero_bubble"),
            "cannot be used with several pipelines",
        ),
        (lambda: cut_places([1.0, 1.0], [2], 2), "the last stage would be empty"),
        (
            lambda: cut_places([1.0, 1.0], BlockProfile(seconds=[1.0] * 3), 2),
            "a profile of 3 blocks",
        ),
        (
            lambda: microbatches(torch.zeros(6, 2), 4),
            r"`batch_size` \(=6\) must be a multiple of `num_microbatches`",
        ),
        (lambda: microbatches({"path": "a.jpg"}, 4), "contains no tensor, array or list"),
        (
            lambda: microbatches({"images": torch.zeros(8), "labels": torch.zeros(16)}, 4),
            r"\(with \[8, 16\] rows\) must",
        ),
    ],
)
def test_numbers_that_do_not_fit_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_network_that_is_not_called_with_tensors_and_a_loss_of_none_are_refused():
    net = nn.Identity()
    with pytest.raises(ValueError, match="must return a loss"):
        loss_in(None)
    for call in (lambda: net([torch.zeros(1), None]), lambda: net(input=torch.zeros(1))):
        with pytest.raises(ValueError, match="must be called with positional tensors only"):
            input_of_net(net, call)
    with pytest.raises(ValueError, match="must call the network"):
        input_of_net(net, lambda: torch.zeros(1))
    assert "forward" not in vars(net)


def test_blocks_with_other_things_than_tensors_or_shapes_by_value_are_refused():
    class Named(nn.Module):
        def forward(self, x):
            return {"x": x}

    class ByValue(nn.Module):
        def forward(self, x):
            return x[x > 0]

    inputs = [Boundary((2, 3), torch.float32)]
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match="must return a floating-point tensor, or a tuple"):
        output_of([Named()], inputs, cpu)
    with pytest.raises(ValueError, match="must have a shape that does not depend on tensor values"):
        output_of([ByValue()], inputs, cpu)


def test_gathering_is_refused_where_metrics_and_logs_are_muted():
    module = toy.Toy()
    with Muting(module).muted():
        module.log("a", 1.0)
        with pytest.raises(RuntimeError, match="cannot be called in `training_step`"):
            module.all_gather(torch.zeros(1))


@pytest.mark.parametrize("draw", [lambda: torch.rand(1).item(), random.random, np.random.rand])
def test_a_draw_within_a_random_state_is_noticed_and_does_not_change_draws_outside(draw):
    cpu = torch.device("cpu")
    with random_state(1, cpu):
        outside = [draw(), draw()]
    with random_state(1, cpu):
        before = draw()
        with random_state((7, 0), cpu) as has_drawn:
            assert not has_drawn()
            draw()
            assert has_drawn()
        assert [before, draw()] == outside


def test_parameters_of_other_stages_free_their_memory():
    layer = nn.Linear(2, 3)
    weight = layer.weight
    OtherStages([layer])
    assert layer.weight.is_meta
    assert weight.numel() == 0


class Unshuffled(toy.Blobs):
    def __getitem__(self, index):
        images, targets = super().__getitem__(index)
        return images, (targets + dist.get_rank()) % toy.NUM_CLASSES


class Wider(toy.Toy):
    def __init__(self):
        super().__init__()
        self.net[5] = nn.Linear(4 * toy.NUM_FEATURES, 16, bias=dist.get_rank() == 0)


def error_of_ranks_that_differ(name):
    """Return the error of a fit in which the ranks differ in one setting."""
    rank = dist.get_rank()
    settings_of_rank = {
        "cuts": {"cuts": [2 + rank]},
        "profiles": {"cuts": BlockProfile(seconds=[[3, 4], [2, 2, 2]][rank] + [1] * (7 - rank))},
        "num_microbatches": {"num_microbatches": 4 * (1 + rank)},
        "labels": {"data": Unshuffled(32)},
        "shapes": {"batch_size": 8 + 8 * rank},
        "size": {"num_microbatches": 8, "batch_size": 12},
        "blocks": {"module": Wider},
    }
    settings = {"module": toy.Toy, "data": toy.Blobs(32), "max_epochs": 1}
    settings |= settings_of_rank[name]
    return play(in_stages(**settings, raises=True, warns=False)).error


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cuts", "`cuts` is [2] on rank 0 and [3] on rank 1"),
        ("profiles", "`cuts` is [2] on rank 0 and [3] on rank 1"),
        ("num_microbatches", "`num_microbatches` is 4 on rank 0 and 8 on rank 1"),
        ("blocks", "`blocks` is '9 of"),
        ("labels", "The batch must be the same on all ranks of a pipeline"),
        ("shapes", "The batch must be the same on all ranks of a pipeline"),
        ("size", "must be a multiple of `num_microbatches`"),
    ],
)
def test_ranks_that_differ_are_refused_on_all_before_a_message_is_sent(two_ranks, name, words):
    for rank, error in enumerate(two_ranks.run(error_of_ranks_that_differ, name)):
        assert error.startswith("ValueError"), f"rank {rank}"
        assert words in error, f"rank {rank}"


class Flipped(toy.Blobs):
    def __getitem__(self, index):
        image, target = super().__getitem__(index)
        return image * (1 - 2 * dist.get_rank()), target


class Decodes(toy.Toy):
    def loss(self, batch):
        images, _ = batch
        return F.mse_loss(self.net(images).float(), images[:, : toy.NUM_CLASSES])


class Masks(toy.Toy):
    def loss(self, batch):
        images, targets = batch
        losses = F.cross_entropy(self.net(images).float(), targets, reduction="none")
        return losses[torch.from_numpy(images.numpy()[:, 0] > 0)].sum()


FLIPPED = {"data": Flipped(32), "batch_size": 16, "max_epochs": 1}


@pytest.mark.parametrize("module", [Decodes, Masks])
def test_images_that_the_loss_depends_on_must_be_the_same_on_all_ranks(two_ranks, module):
    for seen in fit(two_ranks, module, **in_stages(**FLIPPED, raises=True)):
        assert "ValueError: The loss of the first micro-batch is" in seen.error
        assert "ranks augment images differently" in seen.error


def test_images_that_the_loss_does_not_depend_on_may_differ_between_ranks(two_ranks):
    for seen in fit(two_ranks, toy.Toy, **in_stages(**FLIPPED)):
        assert seen.global_step == 2, f"rank {seen.rank}"


class Sharded(torch.utils.data.IterableDataset):
    """Data set that gives each rank its share, as users write it without a pipeline."""

    def __iter__(self):
        data = toy.Blobs(32)
        return (data[index] for index in range(dist.get_rank(), 32, 2))


@pytest.mark.parametrize("call", ["fit", "predict"])
def test_batches_that_differ_between_ranks_are_refused_in_validation_and_prediction(
    two_ranks, call
):
    scene = in_stages(data=toy.Blobs(32), max_epochs=1, call=call, raises=True)
    shards = partial(loader_of, Sharded(), 8)
    if call == "fit":
        scene["val"] = shards
    else:
        scene["train"] = shards
    for seen in fit(two_ranks, **scene):
        assert "ValueError: The batch must be the same on all ranks" in seen.error
        assert "IterableDataset" in seen.error


class Mixes(toy.Toy):
    """Module that mixes images and labels with the same random numbers, outside of the network."""

    def training_step(self, batch, batch_idx):
        images, targets = batch
        order = torch.randperm(len(targets))
        self.orders.append([*order.tolist(), random.random(), np.random.beta(1.0, 1.0)])
        return F.cross_entropy(self.net(images[order]).float(), targets[order])

    def __init__(self):
        super().__init__()
        self.orders = []


class SkipsRows(toy.Toy):
    def loss(self, batch):
        images, targets = (torch.cat([part, part[:1]]) for part in batch)
        return super().loss((images, targets))


TWO_MICROBATCHES = {"batch_size": 16, "num_microbatches": 2, "max_epochs": 1}


def test_a_loss_over_other_rows_than_those_of_the_micro_batches_is_refused(two_ranks):
    for seen in fit(two_ranks, SkipsRows, raises=True, **in_stages(**TWO_MICROBATCHES)):
        assert (
            "(of shape (17, 12)) must have as many rows as all of its micro-batches together (= 18)"
            in seen.error
        )


@pytest.mark.parametrize(("num_samples", "num_warnings"), [(22, 1), (20, 0)])
def test_a_last_batch_that_cannot_be_split_is_a_warning_before_training(
    two_ranks, num_samples, num_warnings
):
    """The error at the end of the first epoch once came without a warning, and its steps were lost."""
    scene = in_stages(data=toy.Blobs(num_samples), max_epochs=1, raises=True, warns=True)
    rank_0, _ = fit(two_ranks, **scene)
    assert (
        len([text for text in rank_0.warnings if "The last batch of an epoch" in text])
        == num_warnings
    )
    assert ("`batch_size` (=6) must be a multiple" in rank_0.error) == bool(num_warnings)


class Swaps(nn.Module):
    """Block that makes the samples the second dimension."""

    def forward(self, x):
        return x.transpose(0, 1)


class Loses(nn.Module):
    """Block that returns a single loss."""

    def forward(self, x):
        return x.square().mean()


class EndsWith(toy.Toy):
    def __init__(self, last_block):
        super().__init__()
        self.net = nn.Sequential(nn.Unflatten(1, (12, 1)), nn.Linear(1, 3), last_block())

    def loss(self, batch):
        return self.net(batch[0]).mean()


@pytest.mark.parametrize(
    ("last_block", "words"),
    [
        (
            Swaps,
            "(of shape (12, 8, 3) for a micro-batch) must have one row per sample in its first dim",
        ),
        (Loses, "but returned a single number. To compute the loss in the last block, return the"),
    ],
)
def test_outputs_that_cannot_be_joined_by_rows_are_refused(two_ranks, last_block, words):
    module = partial(EndsWith, last_block)
    for seen in fit(two_ranks, module, raises=True, **in_stages(**TWO_MICROBATCHES)):
        assert words in seen.error


@pytest.mark.parametrize(("module", "num_warnings"), [(Mixes, 1), (toy.Toy, 0)])
def test_a_logged_loss_that_draws_random_numbers_again_is_a_single_warning(
    two_ranks, module, num_warnings
):
    rank_0, _ = fit(two_ranks, module, warns=True, **in_stages(**TWO_MICROBATCHES))
    texts = [text for text in rank_0.warnings if "draws random numbers" in text]
    assert len(texts) == num_warnings


def seed_by_rank(trainer, module, stage):
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(dist.get_rank())  # blocks draw their own numbers


def orders(trainer, module):
    return [order for order in module.orders if len(order) == 8 + 2]


@pytest.mark.filterwarnings("ignore:`training_step` draws")
def test_the_first_and_the_last_stage_mix_images_and_labels_alike(two_ranks):
    callbacks = [at(setup=seed_by_rank, on_train_end=orders)]
    scene = in_stages(**TWO_MICROBATCHES, limit_train_batches=2, callbacks=callbacks)
    rank_0, rank_1 = fit(two_ranks, Mixes, **scene)
    # Without the first order, which is only drawn to find the shape.
    orders_of_first = rank_0.looks["on_train_end"][0][-4:]
    orders_of_last = rank_1.looks["on_train_end"][0][-4:]
    assert orders_of_first == orders_of_last
    assert len({str(order) for order in orders_of_first}) == 4


def votes(trainer, module):
    """Return the decisions of all ranks and of any rank, when only rank zero agrees."""
    decide = trainer.strategy.reduce_boolean_decision
    agrees = trainer.global_rank == 0
    return [decide(agrees), decide(agrees, all=False)]


def test_a_decision_of_all_needs_every_rank_and_a_decision_of_any_needs_one(two_ranks):
    scene = in_stages(callbacks=[at(on_train_start=votes)], limit_train_batches=1, max_epochs=1)
    for seen in fit(two_ranks, **scene):
        assert seen.looks["on_train_start"] == [[False, True]], f"rank {seen.rank}"


def test_a_stage_without_gradients_sends_its_norms_from_the_rank_s_device(monkeypatch):
    """NCCL cannot send CPU tensors. A stage has no gradients if it is frozen or only has pooling layers."""
    sent = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: sent.append(tensor.device.type))
    frozen = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    clip_by_norm_over_ranks(frozen, 1.0, stage_group=object(), device=torch.device("meta"))
    assert sent == ["meta"]
