"""BERT on masked text: equal losses for any ranks and precision, exact resumes, and a second phase."""

from functools import cache

import pytest
import torch

from recipes.datasets.text_packing import TextPacking
from recipes.training.build import build
from tests.recipes.composed import composed
from tests.recipes.training.test_recipes import NO_FILES, QUIET
from tests.scenes import Saves, at, same

pytest.importorskip("transformers")

NUM_STEPS = 20
# For the second precision: a change of one thousandth moves losses of about 6 by 1.1e-4.
BOUNDS = {
    "32-true": 1e-5,
    "16-true": 2e-5,
}
SMALL = (
    "recipe=bert_tiny model.num_classes=500 global_batch_size=16 warmup_epochs=null warmup_steps=4"
)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    out = tmp_path_factory.mktemp("text")
    TextPacking(root=None, out=str(out), vocab_size=500, max_chars=150_000).run()
    return str(out)


def configured(root, *overrides):
    words = [
        *SMALL.split(),
        f"trainer.max_steps={NUM_STEPS}",
        f"data.root={root}",
        "trainer.limit_val_batches=0",
    ]
    return composed("train", *QUIET, *NO_FILES, *words, "trainer.accelerator=cpu", *overrides)


def losses_of(trainer, module, outputs, batch, batch_idx):
    return outputs["loss"].item() * trainer.accumulate_grad_batches


def fitted(root, *overrides, spoil=0.0, callbacks=(), ckpt_path=None, node_slices=()):
    """Return the loss of each step, averaged over its batches on this rank, and the final weights."""
    trainer, module, data = build(configured(root, *overrides))
    module.model.node_slices = node_slices
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(index)
            parameter *= 1 + spoil * torch.randn(parameter.shape, generator=generator)
    looks = at(on_train_batch_end=losses_of)
    trainer.callbacks += [looks, *callbacks]
    trainer.fit(module, data, ckpt_path=ckpt_path)
    batch_losses = torch.tensor(looks.kept["on_train_batch_end"], dtype=torch.float64)
    step_losses = batch_losses.view(-1, trainer.accumulate_grad_batches).mean(1)
    weights = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    return step_losses, weights


@cache
def undisturbed(*words):
    return fitted(*words, *ONE_RANK)


@pytest.mark.long
def test_twenty_steps_are_the_same_on_one_two_and_four_ranks_and_accumulated(rank_pool, text):
    whole, _ = undisturbed(text)
    assert whole[0] > 6 > whole[-1]  # log 500 = 6.2
    for num_ranks, *overrides in ((1, "batch_size_per_rank=4"), (2,), (4,)):
        words = (f"trainer.devices={num_ranks}", *overrides)
        if num_ranks == 1:
            results = [fitted(text, *words)]
        else:
            results = rank_pool.ranks(num_ranks).run(fitted, text, *words)
        mean_losses = sum(losses for losses, _ in results) / num_ranks
        torch.testing.assert_close(mean_losses, whole, rtol=1e-5, atol=0)
        weights_of_rank_0 = results[0][1]
        for rank, (_, weights) in enumerate(results):
            assert same(weights, weights_of_rank_0), f"rank {rank} of {num_ranks}"


STAGES = "strategy=pipeline trainer.accumulate_grad_batches=1 strategy.num_microbatches=4".split()


@pytest.mark.parametrize(
    ("num_stages", "precision", "bound"),
    [
        (4, "64-true", 1e-10),
        # The case with sliced layers is in every run.
        pytest.param(2, "32-true", 1e-5, marks=pytest.mark.long),
        pytest.param(4, "32-true", 1e-5, marks=pytest.mark.long),
        pytest.param(2, "64-true", 1e-10, marks=pytest.mark.long),
    ],
)
def test_twenty_steps_are_the_same_in_stages(rank_pool, text, num_stages, precision, bound):
    whole, weights = undisturbed(text, f"precision={precision}", "strategy=ddp")
    words = (
        *STAGES,
        f"trainer.devices={num_stages}",
        f"strategy.num_stages={num_stages}",
        f"precision={precision}",
    )
    results = rank_pool.ranks(num_stages).run(fitted, text, *words, timeout_s=300)
    for rank, (losses, stage_weights) in enumerate(results):
        torch.testing.assert_close(losses, whole, rtol=bound, atol=0)
        assert list(stage_weights) == list(weights), f"rank {rank}"


TWO_BY_TWO = (*STAGES, "trainer.devices=4")
ONE_RANK = ("trainer.devices=1",)


def fitted_in_slices(options, *args):
    return fitted(*args, node_slices=(("network",),), **options)


def fitted_in(layout, rank_pool, *args, **options):
    """Return losses and weights, on one rank or in two stages with layers sliced in two, equal on all ranks."""
    if layout is ONE_RANK:
        return fitted(*args, *layout, **options)
    results = rank_pool.ranks(4).run(fitted_in_slices, options, *args, *layout, timeout_s=300)
    weights_of_rank_0 = results[0][1]
    for rank, (_, weights) in enumerate(results):
        assert same(weights, weights_of_rank_0), f"rank {rank}"
    # Each data rank has half of a batch.
    means = [(results[stage][0] + results[2 + stage][0]) / 2 for stage in range(2)]
    assert torch.equal(*means)
    return means[0], weights_of_rank_0


@pytest.mark.parametrize(
    ("precision", "bound"),
    [("32-true", 1e-5), pytest.param("64-true", 1e-10, marks=pytest.mark.long)],
)
def test_twenty_steps_are_the_same_in_stages_whose_layers_are_cut(
    rank_pool, text, precision, bound
):
    # Clipping moves losses by a thousandth.
    words = (text, f"precision={precision}", "trainer.gradient_clip_val=0.5")
    whole, weights = undisturbed(*words, "strategy=ddp")
    losses, cut_weights = fitted_in(TWO_BY_TWO, rank_pool, *words)
    torch.testing.assert_close(losses, whole, rtol=bound, atol=0)
    assert cut_weights.keys() == weights.keys()


@pytest.mark.parametrize(
    "layout", [ONE_RANK, pytest.param(TWO_BY_TWO, marks=pytest.mark.long)], ids=["1", "2x2"]
)
def test_half_precision_stays_within_the_band_of_a_change_of_a_thousandth(rank_pool, text, layout):
    """The band is the largest distance from fp32 if each initial weight is changed randomly by a thousandth."""
    whole, _ = undisturbed(text)
    spoiled, _ = fitted(text, *ONE_RANK, spoil=1e-3)
    band = (spoiled - whole).abs().max()
    half, _ = fitted_in(layout, rank_pool, text, "precision=16-true")
    assert 0 < (half - whole).abs().max() < band


@pytest.mark.long
@pytest.mark.parametrize("precision", ["32-true", "16-true"])
@pytest.mark.parametrize(
    ("first", "then"),
    [(TWO_BY_TWO, TWO_BY_TWO), (TWO_BY_TWO, ONE_RANK), (ONE_RANK, TWO_BY_TWO)],
    ids=["2x2 to 2x2", "2x2 to 1", "1 to 2x2"],
)
def test_a_run_goes_on_in_another_layout(rank_pool, text, tmp_path, first, then, precision):
    """The checkpoint is within an epoch. The run resumes bit for bit in the same layout."""
    words = (text, f"precision={precision}", "trainer.max_steps=10")
    path = str(tmp_path / "some.ckpt")
    losses, weights = fitted_in(first, rank_pool, *words, callbacks=[Saves(path, step=6)])
    resumed_losses, resumed_weights = fitted_in(then, rank_pool, *words, ckpt_path=path)
    if first is then:
        assert torch.equal(resumed_losses, losses[6:])
        assert same(weights, resumed_weights)
    else:
        torch.testing.assert_close(resumed_losses, losses[6:], rtol=BOUNDS[precision], atol=0)


def test_a_resumed_run_ends_with_the_same_bits(text, tmp_path):
    """Dropout is on, and the checkpoint is within an epoch. The resumed run uses the same masks and dropout."""
    path = str(tmp_path / "some.ckpt")
    words = ("trainer.devices=1", "model.dropout=0.1", "precision=16-true", "trainer.max_steps=10")
    losses, weights = fitted(text, *words, callbacks=[Saves(path, step=7)])
    resumed_losses, resumed_weights = fitted(text, *words, ckpt_path=path)
    assert torch.equal(losses[7:], resumed_losses)
    assert same(weights, resumed_weights)


def test_activation_checkpointing_changes_no_bit(text):
    for precision in ("32-true", "16-true"):
        words = (
            "trainer.devices=1",
            f"precision={precision}",
            "model.dropout=0.1",
            "trainer.max_steps=3",
        )
        losses, weights = fitted(text, *words, "model.checkpoint_activations=false")
        checkpointed = fitted(text, *words, "model.checkpoint_activations=true")
        assert torch.equal(losses, checkpointed[0])
        assert same(weights, checkpointed[1])
