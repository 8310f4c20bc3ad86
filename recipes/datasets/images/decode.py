"""Decoding of image files to RGB pixels with simplejpeg if it is installed, otherwise with Pillow."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

try:
    import simplejpeg
except ImportError:  # installed by the extra `jpeg`
    simplejpeg = None

Pixels = NDArray[np.uint8]
JPEG_MAGIC = b"\xff\xd8"
DECODERS = ("simplejpeg", "pillow")  # image decoders, the faster one first

# Maximum image size: the size above which Pillow warns of decompression bombs, a quarter of a gigabyte of RGB.
MAX_PIXELS = 89_478_485


class CorruptImageError(ValueError):
    """Error raised for data that is not an image or is incomplete."""


def default_decoder() -> str:
    """Return the name of the fastest JPEG decoder that is installed."""
    if simplejpeg is None:
        return "pillow"
    return "simplejpeg"


def check_decoder(decoder: str) -> None:
    """Raise if the image decoder with this name is unknown or not installed.

    Raises:
        ValueError: The name is unknown, or the decoder is not installed.

    >>> check_decoder("libjpeg")
    Traceback (most recent call last):
        ...
    ValueError: `decoder` (='libjpeg') must be one of simplejpeg, pillow. Set data.decoder=null to use the fastest \
installed decoder.
    """
    if decoder not in DECODERS:
        raise ValueError(
            f"`decoder` (={decoder!r}) must be one of {', '.join(DECODERS)}. Set data.decoder=null to "
            "use the fastest installed decoder."
        )
    if decoder == "simplejpeg" and simplejpeg is None:
        raise ValueError(
            "`decoder` (='simplejpeg') needs the package simplejpeg, which is not installed. Run "
            "pip install 'lightning-hybrid[jpeg]', or set data.decoder=pillow."
        )


def decode_rgb(data: bytes, *, decoder: str) -> Pixels:
    """Decode the bytes of an image file to RGB pixels, a uint8 array of shape `"height width 3"`.

    Gray images get three equal channels, CMYK is converted, 16-bit values keep their upper 8 bits, and transparency is
    dropped.

    Raises:
        CorruptImageError: The file is not an image, is incomplete, or has more than `MAX_PIXELS`.
    """
    if not data:
        raise CorruptImageError("The file is empty")
    # simplejpeg is faster and gives the same bits as Pillow, because both use libjpeg-turbo with exact transforms.
    # Pillow decodes what it rejects: other formats named .JPEG (ImageNet has a PNG), and damaged files.
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
    # Checked in the header before memory is allocated: a tiny file can claim to have gigabytes of pixels.
    if height * width > MAX_PIXELS:
        raise CorruptImageError(
            f"The image has {height} x {width} pixels, which exceeds the limit of {MAX_PIXELS} pixels "
            f"and would need {height * width * 3} bytes"
        )


def _decode_with_pillow(data: bytes) -> Pixels:
    try:
        with Image.open(io.BytesIO(data)) as image:
            _check_size(image.height, image.width)
            # `convert()` would clip 16-bit values instead of scaling them.
            if image.mode.startswith("I"):
                gray = (np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8)
                return np.repeat(gray[:, :, None], 3, axis=2)
            return np.array(image if image.mode == "RGB" else image.convert("RGB"))
    except CorruptImageError:
        raise
    except Exception as error:  # Pillow's plugins raise many kinds of exceptions for invalid files
        raise CorruptImageError(
            f"The image cannot be decoded ({type(error).__name__}: {error})"
        ) from error


def encode_jpeg(pixels: Pixels, *, quality: int) -> bytes:
    """Encode RGB pixels as baseline JPEG with 4:2:0 chroma subsampling, like most images of ImageNet."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=quality, subsampling="4:2:0")
    return buffer.getvalue()
