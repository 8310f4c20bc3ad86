"""Views of images: the published crops, equal for an image on any rank, and within a gray level of Pillow."""

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.datasets.images import crops
from recipes.datasets.images.crops import (
    NUM_DRAWS,
    EvalCrop,
    TrainCrop,
    draws_of,
    random_box,
    render_crop,
)
from recipes.datasets.images.normalize import IMAGENET_MEAN, IMAGENET_STD, NormalizeOnDevice
from tests.recipes.datasets.images.pictures import pixels_of

SIZE = 24


def row_of(crop, pixels, image=7, epoch=2):
    row = torch.zeros(SIZE, SIZE, 3, dtype=torch.uint8).permute(2, 0, 1)
    render_crop(pixels, row, crop.frame(*pixels.shape[:2], image=image, epoch=epoch))
    return row.permute(1, 2, 0).numpy()


def test_a_box_is_that_of_the_published_sequence():
    """Calculated by hand, try 1 is too wide and try 2 fits."""
    draws = np.zeros(NUM_DRAWS)
    draws[:3] = 0.999, 0.5, 0.1  # top, left, flip
    draws[3:5] = 1.0, 1.0  # whole area, ratio 4/3: 115 x 87 in 100 x 100
    draws[5:7] = 0.25, 1.0  # area 0.08 + 0.25 * 0.92 = 0.31, ratio 4/3: 64.29 x 48.22
    assert random_box(100, 100, draws, area=(0.08, 1.0), aspect=(3 / 4, 4 / 3)) == (52, 18, 48, 64)


@pytest.mark.parametrize(
    ("size", "area", "aspect", "box"),
    [
        # As wide as the image, so it fits; top = int(0.999 * 101).
        ((200, 100), (0.5, 0.5), (1, 1), (100, 0, 100, 100)),
        ((100, 200), (0.5, 0.5), (1, 1), (0, 100, 100, 100)),
        ((10, 10), (0.01, 0.5), (0.1, 0.1), (0, 4, 10, 1)),  # no width, then too high: the center
        ((10, 10), (0.01, 0.5), (10, 10), (4, 0, 1, 10)),
        ((100, 10), (1, 1), (0.5, 2), (40, 0, 20, 10)),  # too narrow: 10 / 0.5 high
        ((10, 100), (1, 1), (0.5, 2), (0, 40, 10, 20)),
    ],
)
def test_a_box_at_the_borders_of_what_fits(size, area, aspect, box):
    draws = np.full(NUM_DRAWS, 0.999)
    draws[3] = 0.0  # the smallest area in the first try
    assert random_box(*size, draws, area=area, aspect=aspect) == box


def test_the_center_is_rounded_as_in_torchvision_and_long_strips_are_cut():
    frame = EvalCrop(image_size=4, eval_resize=15).frame(15, 19, image=0, epoch=0)
    assert frame[3:5] == (6, 8)  # of 5.5 and 7.5
    strip = EvalCrop(image_size=4, eval_resize=4)
    assert strip.frame(1, 1000, image=0, epoch=0).box == (0, 468, 1, 64)
    assert strip.frame(1000, 1, image=0, epoch=0).box == (468, 0, 64, 1)
    assert strip.frame(10, 640, image=0, epoch=0).box == (0, 0, 10, 640)


def test_a_line_of_an_image_does_not_become_gigabytes(monkeypatch):
    """Resized to a short side of 256, a single row of 60,000 pixels would need 12 GB."""
    sizes = []
    resized = crops.resized

    def counted(pixels, *, height, width):
        sizes.append(3 * height * width)
        assert sizes[-1] < 2**24
        return resized(pixels, height=height, width=width)

    monkeypatch.setattr(crops, "resized", counted)
    row = torch.empty(3, 224, 224, dtype=torch.uint8)
    line = np.full((1, 60_000, 3), 7, dtype=np.uint8)
    crop = EvalCrop(image_size=224, eval_resize=256)
    render_crop(line, row, crop.frame(1, 60_000, image=0, epoch=0))
    assert (row == 7).all()
    assert len(sizes) == 1


def test_draws_depend_on_seed_epoch_and_image_and_on_nothing_else():
    key = {"seed": 1, "epoch": 2, "image": 3}
    draws = draws_of(**key)
    assert np.array_equal(draws, draws_of(**key))
    for name in key:
        assert not np.array_equal(draws, draws_of(**key | {name: key[name] + 1})), name
    # NumPy's key does not accept a negative seed.
    assert not np.array_equal(draws, draws_of(**key | {"seed": -1}))
    draws_of_50_images = set()
    for image in range(50):
        draws_of_50_images.update(draws_of(seed=1, epoch=2, image=image).tolist())
    assert len(draws_of_50_images) == 50 * 23


def test_a_training_view_is_pillows_crop_resized_and_flipped():
    pixels = pixels_of(4, 90, 120)
    flips = 0
    for image in range(12):
        result = row_of(TrainCrop(image_size=SIZE, seed=9), pixels, image=image)
        draws = draws_of(seed=9, epoch=2, image=image)
        top, left, height, width = random_box(
            90, 120, draws, area=(0.08, 1.0), aspect=(3 / 4, 4 / 3)
        )
        box = Image.fromarray(pixels).crop((left, top, left + width, top + height))
        expected = np.asarray(box.resize((SIZE, SIZE), Image.Resampling.BILINEAR)).astype(int)
        if draws[2] < 0.5:
            flips += 1
            expected = expected[:, ::-1]
        # Measured: both round to uint8 between the two passes.
        assert np.abs(result - expected).max() <= 1
    assert 0 < flips < 12
    unflipped = row_of(TrainCrop(image_size=SIZE, seed=9, flip=False), pixels, image=image)
    if draws[2] < 0.5:
        unflipped = unflipped[:, ::-1]
    assert np.array_equal(unflipped, result)


@pytest.mark.parametrize("size", [(90, 120), (120, 90), (32, 32), (31, 200)], ids=str)
def test_an_evaluation_view_is_the_center_of_the_resized_image(size):
    pixels = pixels_of(4, *size)
    result = row_of(EvalCrop(image_size=SIZE, eval_resize=32), pixels)
    height, width = size
    if height <= width:
        scaled = (32 * width // height, 32)
    else:
        scaled = (32, 32 * height // width)
    whole = Image.fromarray(pixels).resize(scaled, Image.Resampling.BILINEAR)
    left = round((scaled[0] - SIZE) / 2)
    top = round((scaled[1] - SIZE) / 2)
    expected = np.asarray(whole.crop((left, top, left + SIZE, top + SIZE))).astype(int)
    assert np.abs(result - expected).max() <= 1


def test_normalization_is_the_formula_and_keeps_channels_last():
    levels = torch.arange(2 * SIZE * SIZE * 3).remainder(256).reshape(2, SIZE, SIZE, 3)
    stored = levels.to(torch.uint8).permute(0, 3, 1, 2)
    images, labels = NormalizeOnDevice()((stored, torch.tensor([1, 2])))
    assert images.dtype is torch.float32
    assert images.is_contiguous(memory_format=torch.channels_last)
    mean = torch.tensor(IMAGENET_MEAN).double()
    std = torch.tensor(IMAGENET_STD).double()
    expected = (levels.double() / 255 - mean) / std
    # Two roundings of fp32 (2 ** -24 each) on values up to 255 / 57, and the roundings of mean and std.
    assert (images.permute(0, 2, 3, 1) - expected).abs().max() < 5 * 2**-22
    assert NormalizeOnDevice()((images, labels))[0] is images  # not normalized twice


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: TrainCrop(image_size=4, seed=0, area=(0.5, 0.08)), r"`area` \(=\[0\.5, 0\.08\]\)"),
        (lambda: TrainCrop(image_size=4, seed=0, area=(0.1, 0.5, 1.0)), r"`area` \(="),
        (lambda: TrainCrop(image_size=4, seed=0, aspect=(0.0, 1.0)), r"`aspect` \(="),
        (
            lambda: EvalCrop(image_size=224, eval_resize=200),
            r"`eval_resize` \(=200\).*data\.eval_resize=256",
        ),
        (
            lambda: NormalizeOnDevice(mean=(124, 117, 104)),
            r"`mean` \(=\[124, 117, 104\]\) must be three numbers",
        ),
        (lambda: NormalizeOnDevice(std=(0.2, 0.2, 0.0)), r"`std` \(="),
    ],
    ids=["area order", "three areas", "aspect", "eval_resize", "mean", "std"],
)
def test_what_makes_no_sense_is_refused_and_a_range_of_one_value_is_not(make, match):
    with pytest.raises(ValueError, match=match):
        make()
    TrainCrop(image_size=4, seed=0, area=(0.5, 0.5), aspect=(1.0, 1.0))
