"""Decoding of image files to RGB pixels: simplejpeg where it is installed, Pillow for the rest."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

try:
    import simplejpeg
except ImportError:  # the extra `jpeg`
    simplejpeg = None

Pixels = NDArray[np.uint8]
JPEG_MAGIC = b"\xff\xd8"
DECODERS = ("simplejpeg", "pillow")  # of one image

# The largest image: where Pillow begins to warn of decompression bombs (a quarter of a gigabyte of RGB).
MAX_PIXELS = 89_478_485


class CorruptImageError(ValueError):
    """Bytes that are not an image, or not all of one."""


def default_decoder() -> str:
    """Return the faster of `DECODERS` that is installed."""
    if simplejpeg is None:
        return "pillow"
    return "simplejpeg"


def check_decoder(decoder: str) -> None:
    """Refuse a decoder that is not there.

    Raises:
        ValueError: The name is unknown, or the decoder is not installed.

    >>> check_decoder("libjpeg")
    Traceback (most recent call last):
        ...
    ValueError: `decoder` (='libjpeg') must be one of simplejpeg, pillow. Set data.decoder=null for the faster one.
    """
    if decoder not in DECODERS:
        raise ValueError(
            f"`decoder` (={decoder!r}) must be one of {', '.join(DECODERS)}. Set data.decoder=null for the faster one."
        )
    if decoder == "simplejpeg" and simplejpeg is None:
        raise ValueError(
            "`decoder` (='simplejpeg') must be installed: pip install 'lightning-hybrid[jpeg]', or set "
            "data.decoder=pillow."
        )


def decode_rgb(data: bytes, *, decoder: str) -> Pixels:
    """Decode an image file to RGB pixels: uint8 `"height width 3"`.

    Grey becomes three equal channels, CMYK is converted, of 16 bits the upper 8 stay, transparency is dropped.

    Raises:
        CorruptImageError: The file is no image, cut short, or has more than `MAX_PIXELS`.
    """
    if not data:
        raise CorruptImageError("the file is empty")
    # The same bits as Pillow's, as both run libjpeg-turbo with exact transforms, in less time. What it refuses goes to
    # Pillow: other formats under a JPEG's name (ImageNet has a PNG), and damage that libjpeg warns of.
    if decoder == "simplejpeg" and data.startswith(JPEG_MAGIC):
        try:
            height, width, *_ = simplejpeg.decode_jpeg_header(data)
            _check_size(height, width)
            pixels: Pixels = simplejpeg.decode_jpeg(data, colorspace="RGB")
            return pixels
        except ValueError:
            pass
    return _decode_with_pillow(data)


def _check_size(height: int, width: int) -> None:
    # By the header, before memory is taken: a few bytes can claim to be gigabytes of pixels.
    if height * width > MAX_PIXELS:
        raise CorruptImageError(
            f"{height} x {width} pixels are more than {MAX_PIXELS}, and take {height * width * 3} bytes"
        )


def _decode_with_pillow(data: bytes) -> Pixels:
    try:
        with Image.open(io.BytesIO(data)) as image:
            _check_size(image.height, image.width)
            if image.mode.startswith("I"):  # convert() would clip 16 bits, not scale them
                grey = (np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8)
                return np.repeat(grey[:, :, None], 3, axis=2)
            return np.array(image if image.mode == "RGB" else image.convert("RGB"))
    except CorruptImageError:
        raise
    except (
        Exception
    ) as error:  # Pillow's plugins raise nearly anything for bytes that are not what they claim
        raise CorruptImageError(f"{type(error).__name__}: {error}") from error


def encode_jpeg(pixels: Pixels, *, quality: int) -> bytes:
    """Encode RGB pixels as baseline JPEG, chroma halved both ways, as nearly all of ImageNet is."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=quality, subsampling="4:2:0")
    return buffer.getvalue()
