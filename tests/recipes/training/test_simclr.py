"""Self-supervised recipe: exact resumes, and correct views and probes."""

import pytest
import torch

from recipes.datasets.digits import DigitsDataModule
from recipes.training.build import build
from recipes.training.simclr import knn, linear_probe, random_view
from tests.recipes.composed import composed
from tests.recipes.training.test_recipes import NO_FILES, QUIET
from tests.scenes import Saves, same

SMALL = (
    "recipe=simclr_lars global_batch_size=32 module.chunk=8 model.width=0.0625 warmup_epochs=0.1 trainer.max_steps=6 "
    "+module.max_probe_images=256 trainer.limit_test_batches=1"
)


def configured(*overrides):
    return composed(
        "train", *QUIET, *NO_FILES, *SMALL.split(), "trainer.accelerator=cpu", *overrides
    )


def ends_of(path):
    """Return the weights and probes of a run, and of a run that resumes at its third step."""
    results = []
    for ckpt_path in (None, path):
        trainer, module, data = build(configured("trainer.devices=2"))
        if ckpt_path is None:
            trainer.callbacks.append(Saves(path, step=3))
        trainer.fit(module, data, ckpt_path=ckpt_path)
        [probes] = trainer.test(module, data, verbose=False)
        results.append(
            ({name: value.detach() for name, value in module.named_parameters()}, probes)
        )
    return results


@pytest.mark.long
def test_the_recipe_resumes_in_mid_epoch_to_the_bit_and_probes_its_features(two_ranks, tmp_path):
    rank_0, rank_1 = two_ranks.run(ends_of, str(tmp_path / "third.ckpt"), timeout_s=240.0)
    (whole, probes), (resumed, again) = rank_0
    assert same(whole, resumed)
    assert same(whole, rank_1[0][0])
    assert probes == again
    assert {"test/acc", "test/acc_knn"} <= probes.keys()
    # Features of a random network can distinguish digits.
    assert all(0.3 < value <= 1 for value in probes.values())


def test_probes_are_given_every_training_image_once_over_all_ranks():
    seen = []
    for rank in range(2):
        data = DigitsDataModule(global_batch_size=64, seed=0, shift_pixels=0)
        data.setup("fit")
        loader = data.train_dataloader()
        loader.order = type(loader.order)(**{**vars(loader.order), "world_size": 2, "rank": rank})
        seen += [images.flatten(1) for images, _ in loader.every_image()]
    images = data.normalize(data.image_sets["train"].images).flatten(1)
    assert same(torch.cat(seen).sort(0).values, images.sort(0).values)


def test_probes_find_what_is_apart():
    bank = torch.eye(3).repeat(5, 1)
    labels = torch.arange(3).repeat(5)
    bank += 0.1 * torch.randn(bank.shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(linear_probe(bank, labels, 3)(torch.eye(3)).argmax(1), torch.arange(3))
    scores = knn(torch.eye(3), bank, labels, 5, 3)
    assert torch.equal(scores.argmax(1), torch.arange(3))
    assert (scores > 0).sum() == 3  # all five neighbors are of one class


def test_views_are_of_an_image_itself_and_differ():
    image = torch.rand(1, 1, 16, 16)
    views = random_view(image.repeat(64, 1, 1, 1), least_area=0.5, jitter=0.0, flip=False)
    assert len({tuple(view.flatten().tolist()) for view in views}) == 64
    assert views.min() >= image.min() - 1e-6
    assert views.max() <= image.max() + 1e-6
    flipped = random_view(image.repeat(64, 1, 1, 1), least_area=1.0, jitter=0.0, flip=True)
    mirrored = sum(torch.allclose(view, image[0].flip(2), atol=1e-5) for view in flipped)
    assert 10 < mirrored < 54
    assert mirrored + sum(torch.allclose(view, image[0], atol=1e-5) for view in flipped) == 64


def test_a_strategy_that_shards_classifiers_refuses_it():
    with pytest.raises(
        ValueError, match=r"`module` \(=SimCLR\) and strategy=fsdp2 cannot be combined"
    ):
        build(configured("trainer.devices=1", "strategy=fsdp2", "precision=32-true"))
