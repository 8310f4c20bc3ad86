"""Photo-like JPEGs for benchmarks, cut from photographs that libraries contain: nothing is downloaded.

    scikit-learn   china.jpg, flower.jpg (640 x 427)          matplotlib   grace_hopper.jpg (512 x 600)

Each image is a random rectangle of one of them, at least half as wide and high, resized to about 500 x 375 (one in four
standing), with the grain of a sensor, so that its bytes and the work to decode them are near those of ImageNet (mean
110 KB). What they show has no meaning.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.cbook
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images

from recipes.datasets.images.decode import encode_jpeg

LONG_SIDE, SHORT_SIDE = 500, 375  # the most frequent size in ImageNet
GRAIN = 6.0  # our choice, with the quality: standard deviation in grey levels that brings the mean to 80 to 110 KB
QUALITY = 92


def photographs() -> list[Image.Image]:
    """Return the photographs that are installed."""
    images = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    path = Path(str(matplotlib.cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)))
    return [*images, Image.open(path).convert("RGB")]


def photo(originals: list[Image.Image], number: int) -> NDArray[np.uint8]:
    """Return image `number`, uint8 `"height width 3"`: always the same."""
    generator = np.random.default_rng([2012, number])
    original = originals[number % len(originals)]
    long_side = LONG_SIDE + int(generator.integers(-20, 21))
    width, height = (SHORT_SIDE, long_side) if generator.random() < 0.25 else (long_side, SHORT_SIDE)
    box_width, box_height = (int(side * generator.uniform(0.5, 1.0)) for side in original.size)
    left = int(generator.integers(original.width - box_width + 1))
    top = int(generator.integers(original.height - box_height + 1))
    image = original.resize(
        (width, height), Image.Resampling.BICUBIC, box=(left, top, left + box_width, top + box_height)
    )
    grain = generator.normal(0.0, GRAIN, size=(height, width, 1))
    return np.clip(np.asarray(image) + grain, 0, 255).astype(np.uint8)


def write_photos(root: Path, *, num_train: int, num_val: int, num_classes: int) -> None:
    """Write an image set in ImageNet's layout; files that exist stay."""
    originals = photographs()
    for split, num_images, first in (("train", num_train, 0), ("val", num_val, 10**6)):
        for number in range(first, first + num_images):
            path = root / split / f"n{number % num_classes:08d}" / f"{number:08d}.JPEG"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(encode_jpeg(photo(originals, number), quality=QUALITY))
