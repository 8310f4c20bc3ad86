"""Images of one's own: one command trains on them; where it cannot, one message says the command that does."""

import re

import pytest

from recipes.training.build import build
from tests.recipes.datasets.images.pictures import write_split
from tests.recipes.training.test_recipes import configured

SMALL = "model.depth=18 model.width=0.0625 data.image_size=32 data.eval_resize=36 data.num_threads=1".split()


@pytest.fixture
def root(tmp_path):
    """41 images in two classes."""
    write_split(tmp_path / "train", 41, classes=("cats", "dogs"))
    write_split(tmp_path / "val", 6, classes=("cats", "dogs"), first=100)
    return tmp_path


def words_of(refusal):
    """What the message says to set."""
    return re.findall(r"Set ([^,]*?)(?: or less)?\.$", str(refusal.value), re.MULTILINE)[0].split()


def trained(root):
    trainer, module, data = build(configured("data=images", f"data.root={root}", "model=resnet50", *SMALL, *FEW))
    trainer.fit(module, data)
    return trainer.global_step, module.model.fc.out_features


FEW = ["global_batch_size=40", "trainer.max_steps=1", "warmup_epochs=0", "trainer.limit_val_batches=0"]


def test_one_command_trains_a_network_with_as_many_classes_as_there_are_folders(one_rank, root):
    assert one_rank.run(trained, root) == [(1, 2)]


def test_the_network_and_the_batch_that_fit_are_named_at_once(root):
    """The small network of the default and 128 images a step, in one message; what it says to set is enough."""
    own = ["data=images", f"data.root={root}"]
    with pytest.raises(ValueError, match=r"`model` \(=AlexNetBN\) must take images of 3 x 224 x 224") as refusal:
        build(configured(*own))
    assert words_of(refusal) == ["model=resnet50", "global_batch_size=41"]
    _, module, _ = build(configured(*own, *words_of(refusal), *SMALL))
    assert module.model.fc.out_features == 2
