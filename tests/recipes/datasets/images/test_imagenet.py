"""Data module of ImageNet: equal images from folders and shards, for any ranks and strategy, and exact resumes."""

import pickle
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from recipes.datasets.images.imagenet import ImageNetDataModule, count_classes
from tests import toy
from tests.recipes.datasets.images.pictures import packed, write_root
from tests.scenes import Saves, at, fit, same

SMALL = {"num_classes": 3, "image_size": 16, "eval_resize": 20, "seed": 5, "num_threads": 2}


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return write_root(tmp_path_factory.mktemp("imagenet"))


def module_of(root, **changes) -> ImageNetDataModule:
    settings = {**SMALL, "global_batch_size": 8, "eval_batch_size_per_rank": 4, **changes}
    module = ImageNetDataModule(root=str(root), **settings)
    module.setup("fit")
    return module


def read(loader):
    return [(images.clone(), labels.clone()) for images, labels in loader]


def test_batches_are_uint8_channels_last_with_the_labels_of_their_folders(root):
    module = module_of(root)
    batches = read(module.train_dataloader())
    assert [tuple(images.shape) for images, _ in batches] == [(8, 3, 16, 16)] * 3
    for images, labels in batches:
        assert images.dtype is torch.uint8
        assert labels.dtype is torch.int64
    images, _ = next(iter(module.train_dataloader()))
    assert images.is_contiguous(memory_format=torch.channels_last)
    order = module.train_dataloader().order
    classes = []
    for index in order.permutation(0)[:24]:
        file_name = module.train_rows.source.name(index).split("/")[-1]
        classes.append(int(file_name[:5]) % 3)
    assert [label for _, labels in batches for label in labels.tolist()] == classes


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"seed": -1}, r"`seed` \(=-1\) .* random number generators accept no other seeds"),
        ({"num_threads": 0}, r"`num_threads` \(=0\) .*images are decoded in threads"),
        ({"max_corrupt_images": -1}, r"`max_corrupt_images` \(=-1\) .* images is replaced"),
    ],
    ids=str,
)
def test_an_option_that_is_out_of_range_is_refused_with_its_own_reason(option, message, root):
    with pytest.raises(ValueError, match=message):
        module_of(root, **option)


def test_evaluation_reads_every_image_once(root):
    module = module_of(root)
    for loader in (module.val_dataloader(), module.test_dataloader()):
        labels = [label for _, labels in loader for label in labels.tolist()]
        assert sorted(labels) == sorted(number % 3 for number in range(1000, 1007))
    once = read(module.val_dataloader())
    again = read(module.val_dataloader())
    assert same(once, again)


def test_views_change_with_epoch_and_seed_and_not_with_ranks_or_threads(root):
    loader = module_of(root).train_dataloader()
    first = read(loader)
    second = read(loader)
    assert not same(first, second)
    assert same(first, read(module_of(root, num_threads=1, num_batches_ahead=1).train_dataloader()))
    assert not same(first, read(module_of(root, seed=6).train_dataloader()))


def by_name(module):
    """Return label and bytes of each training image by file name."""
    source = module.train_rows.source
    row = torch.zeros(3, 16, 16, dtype=torch.uint8)
    images = {}
    for index in range(module.train_rows.num_images):
        file_name = source.name(index).split("/")[-1].split(":")[-1]
        label = module.train_rows.load(index, row, epoch=0)
        images[file_name] = (label, source.read(index))
    return images


def test_packed_images_are_the_same_images_and_counted_alike(root, tmp_path):
    folder = module_of(root)
    shards = module_of(packed(root, tmp_path))
    assert len(list((tmp_path / "train").glob("shard-*.bin"))) > 1
    images_of_folder = by_name(folder)
    assert images_of_folder == by_name(shards)
    assert len(images_of_folder) == 26
    for module in (folder, shards):
        assert module.num_train_images_up_to(100) == 26
        assert module.num_train_images_up_to(10) == 10
    assert count_classes(str(root)) == 3
    assert count_classes(str(tmp_path)) == 3
    assert shards.train_rows.source.classes == ("n01", "n02", "n03")
    (tmp_path / "train" / "index.npz").write_bytes(b"cut short")
    with pytest.raises(ValueError, match=r"The shard index .* is damaged"):
        count_classes(str(tmp_path))


class Remembers(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.seen = []
        self.layouts = set()

    def training_step(self, batch, batch_idx):
        images, labels = batch
        self.layouts.add((images.dtype, images.is_contiguous(memory_format=torch.channels_last)))
        pixels = images.float().contiguous().numpy().tobytes()
        self.seen.append((self.trainer.current_epoch, batch_idx, pixels, labels))
        return nn.functional.cross_entropy(self.layer(images.mean((2, 3))).float(), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        pixels = images.float().contiguous().numpy().tobytes()
        self.seen.append(("val", batch_idx, pixels, labels))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def seen_by_a_fit(ranks, root, **scene):
    scene["num_sanity_val_steps"] = 0
    results = fit(ranks, Remembers, train=partial(module_of, root), **scene)
    return [seen.looks["on_train_end"][0] for seen in results]


def remembered(trainer, module):
    """Return (epoch or "val", batch index, pixels, labels) of each batch, and the memory formats of images."""
    batches = []
    for epoch, batch_idx, pixels, labels in module.seen:
        batches.append((epoch, batch_idx, pixels, labels.tolist()))
    return batches, module.layouts


AT_THE_END = at(on_train_end=remembered)


@pytest.mark.parametrize("precision", ["bf16-true", "16-mixed"])
def test_a_step_gets_the_same_bits_with_and_without_prefetcher(one_rank, root, precision):
    if precision == "16-mixed" and not torch.cuda.is_available():
        precision = "bf16-mixed"
    scene = {"precision": precision, "callbacks": [AT_THE_END]}
    ((ours, layout),) = seen_by_a_fit(one_rank, root, **scene)
    ((stock, stock_layout),) = seen_by_a_fit(one_rank, root, strategy="ddp", **scene)
    assert len(ours) == 2 * (3 + 2)
    assert ours == stock
    if precision == "bf16-true":
        dtype = torch.bfloat16
    else:
        dtype = torch.float32
    assert layout == stock_layout == {(dtype, True)}


def test_a_fit_of_two_ranks_is_resumed_by_one_with_the_same_images(
    two_ranks, one_rank, root, tmp_path
):
    path = str(tmp_path / "some.ckpt")
    callbacks = [AT_THE_END, Saves(path, step=4)]
    (rank_0, _), (rank_1, _) = seen_by_a_fit(two_ranks, root, callbacks=callbacks)
    settings = {"ckpt_path": path, "accumulate_grad_batches": 2, "callbacks": [AT_THE_END]}
    ((resumed, _),) = seen_by_a_fit(one_rank, root, **settings)

    expected = []
    for batches_of_step in list(zip(images_trained(rank_0), images_trained(rank_1), strict=True))[
        4:
    ]:
        expected += batches_of_step
    assert images_trained(resumed) == expected
    assert len(expected) == 4


def images_trained(batches):
    return [(pixels, labels) for epoch, _, pixels, labels in batches if epoch != "val"]


def share_of_rank(root):
    module = module_of(root)
    module.trainer = toy.trainer()
    loaders = module.train_dataloader(), module.val_dataloader()
    return [[label for _, labels in loader for label in labels.tolist()] for loader in loaders]


def test_ranks_take_their_parts_from_the_trainer_and_a_loader_survives_pickling(two_ranks, root):
    (train_0, val_0), (train_1, val_1) = two_ranks.run(share_of_rank, str(root))
    alone = pickle.loads(pickle.dumps(module_of(root).train_dataloader()))
    batches = [train_0[at : at + 4] + train_1[at : at + 4] for at in (0, 4, 8)]
    assert batches == [labels.tolist() for _, labels in alone]
    assert sorted(val_0 + val_1) == sorted(number % 3 for number in range(1000, 1007))
