"""Whatever bytes an image, an index of shards or a plan is made of: read, or an error that names file and field."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from lightning_hybrid.comm import CommPlan
from recipes.datasets.images import crops
from recipes.datasets.images.crops import EvalCrop, TrainCrop
from recipes.datasets.images.decode import DECODERS, MAX_PIXELS, CorruptImageError, decode_rgb, simplejpeg
from recipes.datasets.images.shards import INDEX_NAME, ShardedImages
from tests.recipes.datasets.images.pictures import encoded, image_of, packed, pixels_of, write_root

INSTALLED = [name for name in DECODERS if name == "pillow" or simplejpeg is not None]


def cases(pytestconfig, number):
    return settings(
        max_examples=pytestconfig.getoption("--fuzz-cases") or number,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def seeds_of_images():
    pixels = pixels_of(3)
    grey16 = io.BytesIO()
    Image.fromarray(pixels[:, :, 0].astype(np.uint16) << 8).save(grey16, "PNG")
    cmyk, turned = io.BytesIO(), io.BytesIO()
    Image.fromarray(pixels).convert("CMYK").save(cmyk, "JPEG")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.fromarray(pixels).save(turned, "JPEG", exif=exif)
    palette, clear = io.BytesIO(), io.BytesIO()
    Image.fromarray(pixels).convert("P").save(palette, "GIF")
    Image.fromarray(pixels).convert("RGBA").save(clear, "PNG")
    files = [image_of(1), encoded(pixels, "PNG"), encoded(pixels, "BMP"), encoded(pixels, "TIFF")]
    more = (grey16, cmyk, turned, palette, clear)
    return [*files, encoded(pixels, "JPEG", progressive=True), *(file.getvalue() for file in more)]


IMAGES = seeds_of_images()


@st.composite
def broken(draw, whole):
    """Bytes of a file, cut, turned over, doubled or with others put in."""
    data = bytearray(draw(st.sampled_from(whole)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["cut", "flip", "insert", "overwrite"])):
            case "cut":
                del data[at:]
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "insert":
                data[at:at] = draw(st.binary(max_size=8))
            case "overwrite":
                put = draw(st.binary(max_size=4))
                data[at : at + len(put)] = put
    return bytes(data)


@pytest.mark.parametrize("decoder", INSTALLED)
def test_any_bytes_are_an_image_or_corrupt(decoder, pytestconfig):
    @cases(pytestconfig, 120)
    @given(data=st.one_of(broken(IMAGES), st.binary(max_size=64)))
    @example(data=b"")
    @example(data=b"\xff\xd8")
    def is_read_or_corrupt(data):
        try:
            pixels = decode_rgb(data, decoder=decoder)
        except CorruptImageError:
            return
        assert pixels.dtype == np.uint8
        assert pixels.ndim == 3
        assert pixels.shape[2] == 3
        row = torch.empty(3, 8, 8, dtype=torch.uint8)
        for crop in (EvalCrop(image_size=8, eval_resize=9), TrainCrop(image_size=8, seed=0)):
            crops.render_crop(pixels, row, crop.frame(*pixels.shape[:2], image=0, epoch=0))

    is_read_or_corrupt()


@pytest.mark.parametrize("decoder", INSTALLED)
def test_every_kind_of_image_is_read_as_rgb_of_its_own_size(decoder):
    """As stored: a turn that EXIF asks for is not made, as in torchvision's loader."""
    for data in IMAGES:
        assert decode_rgb(data, decoder=decoder).shape == (40, 56, 3)


def bomb_png(side):
    """A few dozen bytes that claim to be an image of `side` squared."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def bomb_jpeg():
    """A JPEG whose header claims 65,500 x 65,500."""
    data = bytearray(image_of(1))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", 65500, 65500)
    return bytes(data)


@pytest.mark.parametrize("decoder", INSTALLED)
@pytest.mark.parametrize("bomb", [bomb_png(10_000), bomb_png(60_000), bomb_jpeg()], ids=["png", "huge png", "jpeg"])
def test_a_bomb_is_refused_before_memory_is_taken_for_it(decoder, bomb):
    tracemalloc.start()
    try:
        with pytest.raises(CorruptImageError, match=f"are more than the {MAX_PIXELS}|Decompression"):
            decode_rgb(bomb, decoder=decoder)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_line_of_an_image_does_not_become_gigabytes(monkeypatch):
    """Resized to a short side of 256, one row of 60,000 pixels would be 12 GB."""
    sizes, resized = [], crops.resized

    def counted(pixels, *, height, width):
        sizes.append(3 * height * width)
        assert sizes[-1] < 2**24
        return resized(pixels, height=height, width=width)

    monkeypatch.setattr(crops, "resized", counted)
    row = torch.empty(3, 224, 224, dtype=torch.uint8)
    line = np.full((1, 60_000, 3), 7, dtype=np.uint8)
    crops.render_crop(line, row, EvalCrop(image_size=224, eval_resize=256).frame(1, 60_000, image=0, epoch=0))
    assert (row == 7).all()
    assert len(sizes) == 1


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("set")
    return packed(write_root(folder / "images", 9, 3), folder / "packed") / "train"


WRONG = {
    "negative": lambda array: array.astype(np.int64) - 10**6,
    "huge": lambda array: array.astype(np.int64) + 2**40,
    "short": lambda array: array[:-1],
    "empty": lambda array: array[:0],
    "fractions": lambda array: array.astype(np.float64),
    "square": lambda array: array[None],
    "words": lambda array: np.asarray(["zzz"] * len(array)),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("field", ["shards", "offsets", "num_bytes", "labels", "names", "shard_num_bytes", "classes"])
def test_a_wrong_field_of_an_index_is_named(shards, field, wrong, tmp_path):
    with np.load(shards / INDEX_NAME) as arrays:
        fields = {name: arrays[name] for name in arrays.files}
    if fields[field].dtype.kind in "SU" and wrong in ("negative", "huge", "fractions", "words"):
        fields[field] = np.arange(len(fields[field]))
    else:
        fields[field] = WRONG[wrong](fields[field])
    for shard in shards.glob("shard-*.bin"):
        (tmp_path / shard.name).symlink_to(shard)
    np.savez(tmp_path / INDEX_NAME, **fields)
    with pytest.raises(ValueError, match=rf"({INDEX_NAME}|root).* again"):
        ShardedImages(tmp_path)


def test_any_bytes_are_an_index_or_damaged(shards, tmp_path, pytestconfig):
    whole = (shards / INDEX_NAME).read_bytes()
    for shard in shards.glob("shard-*.bin"):
        (tmp_path / shard.name).symlink_to(shard)

    @cases(pytestconfig, 100)
    @given(data=broken([whole]))
    def is_read_or_damaged(data):
        (tmp_path / INDEX_NAME).write_bytes(data)
        try:
            images = ShardedImages(tmp_path)
        except ValueError as error:
            assert str(tmp_path) in str(error) or "root" in str(error)  # noqa: PT017
            return
        for index in range(len(images)):
            with suppress(CorruptImageError):  # counted by who reads
                images.read(index)

    is_read_or_damaged()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"bucket_bytes": 1, "bucket_bytes": 2}', "`bucket_bytes` must stand in a plan once"),
        ('{"bucket_bytes": NaN}', "NaN must not stand in a plan"),
        ('{"bucket_bytes": Infinity}', "Infinity must not"),
        ('{"bucket_bytes": 1e3}', r"`bucket_bytes` \(=1000.0\) must be a whole number"),
        ('{"bucket_bytes": 1' + "0" * 30 + "}", r"`bucket_bytes` \(=10{30}\) must be at most"),
        ('{"num_chunks": 1}', "`num_chunks` .* is no key of a plan"),
        ("[" * 100_000, "a plan must be a JSON object"),
        ("[]", "must be a JSON object"),
        ("", "Expecting value"),
    ],
    ids=lambda text: text[:30],
)
def test_a_wrong_plan_is_told_by_its_field(text, message):
    with pytest.raises(ValueError, match=message):
        CommPlan.from_json(text)
