"""DALI decodes our bytes in our order with our crops: labels and resume as ever, pixels but for rounding."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.datasets import dali
from recipes.datasets.dali import JPEG_END, DaliFiller, dali_filler, decodable, has_dali
from recipes.datasets.images.decode import CorruptImageError, check_decoder, decode_rgb
from recipes.datasets.images.host_buffers import HostBuffers
from recipes.datasets.images.imagenet import ImageNetDataModule
from tests import toy
from tests.recipes.datasets.images.pictures import encoded, image_of, pixels_of, write_root

needs_dali = pytest.mark.skipif(not has_dali(), reason="needs DALI: the extra `dali`")
SMALL = {"num_classes": 3, "image_size": 16, "eval_resize": 20, "seed": 5, "num_threads": 2}


@pytest.fixture
def root(tmp_path):
    return write_root(tmp_path / "imagenet", num_train=26, num_val=7)


def module_of(root, decoder="dali", **changes) -> ImageNetDataModule:
    options = {
        "global_batch_size": 8,
        "eval_batch_size_per_rank": 4,
        "decoder": decoder,
        "batch_decoders": {"dali": dali_filler},
    }
    module = ImageNetDataModule(root=str(root), **SMALL | options | changes)
    module.setup("fit")
    return module


def read(loader):
    return [(images.clone(), labels.clone()) for images, labels in loader]


def assert_same_but_for_rounding(one, other, *, ring=0):
    """Labels equal; pixels a grey level apart at most, as both round to uint8 after resizing, inside a ring."""
    assert len(one) == len(other)
    for (images, labels), (theirs, their_labels) in zip(one, other, strict=True):
        assert torch.equal(labels, their_labels)
        assert images.shape == theirs.shape
        difference = (images.int() - theirs.int()).abs()
        inside = slice(ring, images.shape[-1] - ring)
        assert difference[:, :, inside, inside].max() <= 1


def test_without_dali_the_decoder_is_refused(monkeypatch):
    def not_there(name):
        raise ModuleNotFoundError(name)

    for find_spec in (not_there, lambda name: None):
        monkeypatch.setattr(dali.importlib.util, "find_spec", find_spec)
        assert not has_dali()
        with pytest.raises(ValueError, match=r"`decoder` \(='dali'\) must be installed: pip install .*\[dali\]"):
            dali_filler(num_threads=1)
    with pytest.raises(ValueError, match=r"`decoder` \(='dali'\) must be one of simplejpeg, pillow\."):
        check_decoder("dali")


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}], ids=str)
def test_a_plain_jpeg_goes_to_dali_as_it_is(options):
    for pixels in (pixels_of(3, 41, 57), pixels_of(3, 41, 57)[:, :, 0]):
        data = encoded(pixels, **options)
        assert decodable(data, decoder="pillow") == (data, 41, 57)


def test_other_formats_are_decoded_here_and_go_on_as_pixels():
    colours, cmyk = pixels_of(5), io.BytesIO()
    Image.fromarray(colours).convert("CMYK").save(cmyk, format="JPEG", quality=95)
    sixteen_bits = encoded(np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8), "PNG")
    for data in (encoded(colours, "PNG"), cmyk.getvalue(), sixteen_bits, image_of(1) + b"\0"):
        file, height, width = decodable(data, decoder="pillow")
        expected = decode_rgb(data, decoder="pillow")
        assert (height, width) == expected.shape[:2]
        with Image.open(io.BytesIO(file)) as image:
            assert image.format == "PPM"
            assert np.array_equal(np.asarray(image), expected)


@pytest.mark.parametrize("data", [b"", b"404", image_of(1)[:-200], image_of(1)[:50], b"\xff\xd8\xff\xd9"], ids=range(5))
def test_what_is_no_whole_image_is_refused_before_dali_sees_it(data):
    with pytest.raises(CorruptImageError):
        decodable(data, decoder="pillow")


@needs_dali
def test_images_are_those_of_the_threads_but_for_rounding(root):
    """A photo that its camera says to turn, which nobody does, and a flaw that Pillow puts up with, too.

    DALI repeats the edge of a crop where Pillow leaves it out: that reaches the outermost ring, and no further.
    """
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    source = module_of(root).train_rows.source
    for number, data in ((4, encoded(pixels_of(9, 40, 56), quality=90, exif=exif)), (5, image_of(9)[:-200] + JPEG_END)):
        with open(source.name(number), "wb") as file:
            file.write(data)
    loader = module_of(root, global_batch_size=26).train_dataloader()
    for epoch in (0, 1):
        expected = module_epoch(root, epoch, global_batch_size=26)
        assert_same_but_for_rounding(read(loader), read(expected), ring=1)
    ((images, labels),) = read(loader)
    assert (images.shape, images.dtype, labels.dtype) == ((26, 3, 16, 16), torch.uint8, torch.int64)
    assert (images[0].int() - images[1].int()).abs().max() > 50  # what other images are apart
    assert next(iter(loader))[0].is_contiguous(memory_format=torch.channels_last)
    batches = read(module_of(root).val_dataloader())
    assert sum(len(labels) for _, labels in batches) == 7
    assert_same_but_for_rounding(batches, read(module_of(root, "pillow").val_dataloader()))


@needs_dali
@pytest.mark.parametrize("stop", [1, 2])
def test_a_resumed_epoch_gives_the_same_pixels_and_either_decoder_resumes_the_other(root, stop):
    whole = read(module_of(root).train_dataloader())
    loader = module_of(root).train_dataloader()
    iterator = iter(loader)
    for _ in range(stop):
        next(iterator)
    resumed = module_of(root).train_dataloader()
    resumed.load_state_dict(loader.state_dict())  # DALI was ahead: its work does not count
    rest = read(resumed)
    assert len(rest) == 3 - stop
    assert all(torch.equal(a, b) for x, y in zip(whole[stop:], rest, strict=True) for a, b in zip(x, y, strict=True))
    threads = module_of(root, "pillow").train_dataloader()
    threads.load_state_dict(loader.state_dict())
    assert_same_but_for_rounding(rest, read(threads), ring=1)
    iterator.close()


class Broken:
    """A pipeline that gives `num_good` batches and then fails for good, as one without memory."""

    def __init__(self, feed, num_good):
        self.feed, self.num_good = feed, num_good

    def run(self):
        next(self.feed)
        if self.num_good == 0:
            raise RuntimeError("out of memory")
        self.num_good -= 1
        return ("decoded",)


@pytest.mark.parametrize(
    ("goods", "num_batches"), [([1, 1, 1, 1], 6), ([1, 0], 2), ([0, 0], 1), ([0, 1, 9], 6)], ids=str
)
def test_dali_that_fails_twice_in_a_row_over_sound_images_ends_the_run(root, monkeypatch, goods, num_batches):
    """Once may be an image that the other decoder puts up with; without end it would be decoding without DALI."""
    rows = module_of(root, "pillow").train_rows
    pipelines = iter(goods)
    monkeypatch.setattr(DaliFiller, "_pipeline", lambda self, feed, **_: Broken(feed, next(pipelines)))
    received = lambda decoded, buffers, num_images, stream: buffers.take(num_images)  # noqa: E731
    monkeypatch.setattr(dali, "_received", received)
    shares = iter(np.arange(26)[:24].reshape(6, 4))
    buffers = HostBuffers(max_images=4, image_size=16, pin_memory=False)
    batches = DaliFiller(num_threads=1).fill(shares, rows, buffers, epoch=0)
    found = []
    if num_batches < 6:
        with pytest.raises(RuntimeError, match=r"(?s)DALI cannot decode.*out of memory.*With data\.decoder=null"):
            found.extend(labels.tolist() for _, labels in batches)
    else:
        found.extend(labels.tolist() for _, labels in batches)
    assert found == rows.source.labels[: 4 * num_batches].reshape(-1, 4).tolist()


def module_epoch(root, epoch, **changes):
    loader = module_of(root, "pillow", **changes).train_dataloader()
    loader.set_epoch(epoch)
    return loader


def test_a_gpu_is_used_where_lightning_uses_one(root, monkeypatch):
    module = module_of(root, batch_decoders={"dali": DaliFiller})
    assert module.train_dataloader().filler == DaliFiller(num_threads=2)
    module.trainer = toy.trainer()
    assert module.val_dataloader().filler.device_id is None
    monkeypatch.setattr(type(module.trainer.strategy), "root_device", torch.device("cuda", 3))
    assert module.train_dataloader().filler == DaliFiller(num_threads=2, device_id=3)
