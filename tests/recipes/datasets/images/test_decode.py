"""Decoding: any image file becomes RGB, with equal bits from either decoder. Broken files raise an error."""

import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from recipes.datasets.images import decode
from recipes.datasets.images.decode import (
    MAX_PIXELS,
    CorruptImageError,
    check_decoder,
    decode_rgb,
    encode_jpeg,
)
from tests.recipes.datasets.images.pictures import encoded, image_of, pixels_of

both_decoders = pytest.mark.parametrize(
    "decoder",
    [
        pytest.param(
            "simplejpeg",
            marks=pytest.mark.skipif(
                decode.simplejpeg is None, reason="needs simplejpeg: the extra `jpeg`"
            ),
        ),
        "pillow",
    ],
)


def with_pillow(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@both_decoders
@pytest.mark.parametrize(
    "options", [{}, {"quality": 95, "subsampling": 0}, {"progressive": True}], ids=str
)
def test_a_jpeg_decodes_to_the_bits_of_pillow(decoder, options):
    data = encoded(pixels_of(3, 41, 57), **options)
    pixels = decode_rgb(data, decoder=decoder)
    assert (pixels.shape, pixels.dtype) == ((41, 57, 3), np.uint8)
    assert np.array_equal(pixels, with_pillow(data))


@both_decoders
def test_gray_cmyk_and_png_under_a_jpegs_name_become_rgb(decoder):
    colors = pixels_of(5)
    gray = encoded(colors[:, :, 0])
    assert np.array_equal(decode_rgb(gray, decoder=decoder), with_pillow(gray))
    png = encoded(colors, "PNG")
    assert np.array_equal(decode_rgb(png, decoder=decoder), colors)
    buffer = io.BytesIO()
    Image.fromarray(colors).convert("CMYK").save(buffer, format="JPEG", quality=95)
    pixels = decode_rgb(buffer.getvalue(), decoder=decoder).astype(int)
    # Both decoders convert CMYK in their own integer arithmetic, which differs by one level, plus the loss of JPEG.
    assert np.abs(pixels - with_pillow(buffer.getvalue()).astype(int)).max() <= 2
    assert np.abs(pixels - colors).mean() < 4


@both_decoders
def test_a_turn_that_exif_asks_for_is_not_made_as_in_torchvision(decoder):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    assert decode_rgb(encoded(pixels_of(3), exif=exif), decoder=decoder).shape == (40, 56, 3)


@both_decoders
def test_sixteen_bits_keep_the_upper_eight(decoder):
    levels = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    pixels = decode_rgb(encoded(levels, "PNG"), decoder=decoder)
    assert np.array_equal(pixels, np.repeat((levels >> 8).astype(np.uint8)[:, :, None], 3, axis=2))


PNG = encoded(pixels_of(1), "PNG")
BROKEN = {
    "empty": b"",
    "text": b"404 not found",
    "cut in the pixels": image_of(1)[:-300],
    "cut in the header": image_of(1)[:50],
    "half a PNG": PNG[:900],
    "a PNG with a broken chunk": PNG[:35]
    + b"\0"
    + PNG[36:],  # Pillow raises another kind of error for this
}


@both_decoders
@pytest.mark.parametrize("how", BROKEN)
def test_what_is_no_whole_image_is_an_error_of_one_kind(decoder, how):
    with pytest.raises(CorruptImageError):
        decode_rgb(BROKEN[how], decoder=decoder)


@both_decoders
def test_a_flaw_that_libjpeg_can_pass_over_is_shown_as_pillow_shows_it(decoder):
    # The remaining pixels are missing, but the file has an end marker.
    data = image_of(9)[:-200] + b"\xff\xd9"
    assert np.array_equal(decode_rgb(data, decoder=decoder), with_pillow(data))


def bomb_png(side):
    """Return a few dozen bytes that claim to be a square image with sides of `side` pixels."""

    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0"))
        + chunk(b"IEND", b"")
    )


def bomb_jpeg():
    data = bytearray(image_of(1))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", 65500, 65500)
    return bytes(data)


@both_decoders
@pytest.mark.parametrize(
    "bomb", [bomb_png(10_000), bomb_png(60_000), bomb_jpeg()], ids=["png", "huge png", "jpeg"]
)
def test_a_bomb_is_refused_before_memory_is_taken_for_it(decoder, bomb):
    tracemalloc.start()
    try:
        with pytest.raises(
            CorruptImageError, match=f"exceeds the limit of {MAX_PIXELS}|Decompression"
        ):
            decode_rgb(bomb, decoder=decoder)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_re_encoding_is_close_to_what_it_was():
    pixels = pixels_of(2)
    data = encode_jpeg(pixels, quality=90)
    again = decode_rgb(data, decoder="pillow")
    assert np.abs(again.astype(int) - pixels).mean() < 3
    assert data == encoded(pixels, quality=90, subsampling="4:2:0")


def test_a_decoder_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(decode, "simplejpeg", None)
    assert decode.default_decoder() == "pillow"
    assert np.array_equal(decode_rgb(image_of(1), decoder="pillow"), with_pillow(image_of(1)))
    with pytest.raises(
        ValueError,
        match=r"`decoder` \(='simplejpeg'\) needs the package simplejpeg, which is not installed",
    ):
        check_decoder("simplejpeg")
