"""Small image sets on disk, with photo-like images of different sizes whose pixels encode class and number."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from recipes.datasets.packing import Packing

CLASSES = ("n01", "n02", "n03")


def pixels_of(number: int, height: int = 40, width: int = 56) -> np.ndarray:
    """Return smooth waves that depend on the number, as uint8 `"height width 3"`."""
    rows, columns = np.mgrid[0:height, 0:width]
    phases = np.random.default_rng([11, number]).uniform(0, 6, size=3)
    waves = [
        np.sin(rows / (5 + number % 3) + phase) * np.cos(columns / 7 + phase) for phase in phases
    ]
    return (np.stack(waves, axis=2) * 110 + 128).astype(np.uint8)


def encoded(pixels: np.ndarray, kind: str = "JPEG", **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=kind, **options)
    return buffer.getvalue()


def image_of(number: int) -> bytes:
    """Return a JPEG image. Landscape and portrait images alternate."""
    if number % 2:
        size = (40, 56)
    else:
        size = (56, 40)
    return encoded(pixels_of(number, *size), quality=90)


def write_split(folder: Path, num_images: int, classes=CLASSES, first: int = 0) -> None:
    """Write images `first`, `first + 1`, ..., and assign them to the classes in turn."""
    for number in range(first, first + num_images):
        path = folder / classes[number % len(classes)] / f"{number:05d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image_of(number))


def write_root(root: Path, num_train: int = 26, num_val: int = 7) -> Path:
    write_split(root / "train", num_train)
    write_split(root / "val", num_val, first=1000)
    return root


def packed(root: Path, out: Path, **changes) -> Path:
    options = {
        "splits": ["train", "val"],
        "seed": 0,
        "short_side": None,
        "quality": 90,
        "shard_bytes": 9000,
    }
    options |= {"max_corrupt_images": 0, "num_threads": 1, "verify": False}
    Packing(root=str(root), out=str(out), **options | changes).run()
    return out
