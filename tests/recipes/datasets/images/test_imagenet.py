"""ImageNet's data module: the same images from folders and shards, on any ranks and strategy. Resumed exactly."""

import pickle
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from recipes.datasets.images.imagenet import ImageNetDataModule, count_classes
from tests import toy
from tests.recipes.datasets.images.pictures import packed, write_root
from tests.scenes import Saves, at, fit

SMALL = {"num_classes": 3, "image_size": 16, "eval_resize": 20, "seed": 5, "num_threads": 2}


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return write_root(tmp_path_factory.mktemp("imagenet"))


def module_of(root, **changes) -> ImageNetDataModule:
    module = ImageNetDataModule(
        root=str(root), **SMALL | {"global_batch_size": 8, "eval_batch_size_per_rank": 4} | changes
    )
    module.setup("fit")
    return module


def read(loader):
    return [(images.clone(), labels.clone()) for images, labels in loader]


def same(one, other) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_batches_are_uint8_channels_last_with_the_labels_of_their_folders(root):
    module = module_of(root)
    batches = read(module.train_dataloader())
    assert [tuple(images.shape) for images, _ in batches] == [(8, 3, 16, 16)] * 3
    assert all(
        images.dtype is torch.uint8 and labels.dtype is torch.int64 for images, labels in batches
    )
    images, _ = next(iter(module.train_dataloader()))
    assert images.is_contiguous(memory_format=torch.channels_last)
    order = module.train_dataloader().order
    numbers = [
        int(module.train_rows.source.name(i).split("/")[-1][:5]) for i in order.permutation(0)[:24]
    ]
    assert [label for _, labels in batches for label in labels.tolist()] == [
        number % 3 for number in numbers
    ]


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
    source = module.train_rows.source
    row = torch.zeros(3, 16, 16, dtype=torch.uint8)
    return {
        source.name(index).split("/")[-1].split(":")[-1]: (
            module.train_rows.load(index, row, epoch=0),
            source.read(index),
        )
        for index in range(module.train_rows.num_images)
    }


def test_packed_images_are_the_same_images_and_counted_alike(root, tmp_path):
    modules = module_of(root), module_of(packed(root, tmp_path))
    assert len(list((tmp_path / "train").glob("shard-*.bin"))) > 1
    folder, shards = map(by_name, modules)
    assert folder == shards
    assert {len(folder), *(module.num_train_images_up_to(100) for module in modules)} == {26}
    assert [module.num_train_images_up_to(10) for module in modules] == [10, 10]
    assert [count_classes(str(place)) for place in (root, tmp_path)] == [3, 3]
    assert modules[1].train_rows.source.classes == ("n01", "n02", "n03")
    (tmp_path / "train" / "index.npz").write_bytes(b"cut short")
    with pytest.raises(ValueError, match=r"index of shards\) is damaged"):
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
        self.seen.append(
            (
                self.trainer.current_epoch,
                batch_idx,
                images.float().contiguous().numpy().tobytes(),
                labels,
            )
        )
        return nn.functional.cross_entropy(self.layer(images.mean((2, 3))).float(), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.seen.append(("val", batch_idx, images.float().contiguous().numpy().tobytes(), labels))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def seen_by_a_fit(ranks, root, **scene):
    scene["num_sanity_val_steps"] = 0
    return [
        seen.looks["on_train_end"][0]
        for seen in fit(ranks, Remembers, train=partial(module_of, root), **scene)
    ]


def remembered(trainer, module):
    return [(*seen[:-1], seen[-1].tolist()) for seen in module.seen], module.layouts


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
    whole = seen_by_a_fit(two_ranks, root, callbacks=[AT_THE_END, Saves(path, step=4)])
    settings = {"ckpt_path": path, "accumulate_grad_batches": 2, "callbacks": [AT_THE_END]}
    ((rest, _),) = seen_by_a_fit(one_rank, root, **settings)
    steps = [seen for seen in zip(whole[0][0], whole[1][0], strict=True) if seen[0][0] != "val"]
    expected = [
        piece
        for step in steps[4:]
        for piece in ((step[0][2], step[0][3]), (step[1][2], step[1][3]))
    ]
    assert [(pixels, labels) for place, _, pixels, labels in rest if place != "val"] == expected
    assert len(expected) == 4


def share_of_rank(root):
    module = module_of(root)
    module.trainer = toy.trainer()
    loaders = module.train_dataloader(), module.val_dataloader()
    return [[label for _, labels in loader for label in labels.tolist()] for loader in loaders]


def test_ranks_take_their_parts_from_the_trainer_and_a_loader_survives_pickling(two_ranks, root):
    (train, val), (other_train, other_val) = two_ranks.run(share_of_rank, str(root))
    alone = pickle.loads(pickle.dumps(module_of(root).train_dataloader()))
    halves = [[*train[at : at + 4], *other_train[at : at + 4]] for at in (0, 4, 8)]
    assert halves == [labels.tolist() for _, labels in alone]
    assert sorted(val + other_val) == sorted(number % 3 for number in range(1000, 1007))
