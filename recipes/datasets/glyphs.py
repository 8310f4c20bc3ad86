"""Synthetic images of characters, with different fonts for training, validation and test.

    32 classes: 2 ... 9 and A ... Z without I and O, which resemble other characters
    22 fonts that come with matplotlib (DejaVu, STIX, Computer Modern) -> 14 train, 4 validation, 4 test
    each image: a character with random rotation, shear, scale, position, gray levels and noise -> 32 x 32, uint8

Nothing is downloaded. The training set is large enough for large-batch runs with many steps per epoch. Results say
nothing about ImageNet. The three sets use different font files, but share font families on purpose.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_info
from matplotlib.ft2font import FT2Font
from torch import Tensor

from lightning_hybrid.checks import require_whole
from recipes.datasets.in_memory.datamodule import InMemoryDataModule
from recipes.datasets.in_memory.loader import ImageSet

CHARACTERS = "23456789ABCDEFGHJKLMNPQRSTUVWXYZ"
NUM_CLASSES = len(CHARACTERS)
IMAGE_SIZE = 32
NUM_TRAIN = 16384
NUM_VAL = 2048
NUM_TEST = 2048

# All fonts of matplotlib that have every character. `*Display`, STIX's `NonUni` and `Siz`, `cmex`, `cmsy` do not.
FONTS = {
    "train": (
        "DejaVuSans DejaVuSans-Bold DejaVuSans-BoldOblique DejaVuSansMono DejaVuSansMono-Bold DejaVuSansMono-Oblique "
        "DejaVuSerif DejaVuSerif-BoldItalic STIXGeneral STIXGeneralBolIta cmb10 cmmi10 cmr10 cmti10"
    ).split(),
    "val": "DejaVuSans-Oblique DejaVuSerif-Bold STIXGeneralItalic cmtt10".split(),
    "test": "DejaVuSansMono-BoldOblique DejaVuSerif-Italic STIXGeneralBol cmss10".split(),
}

# Our choice, readable by eye. The size of a character is the height of a capital letter as a fraction of the image.
_SIZE = (0.45, 0.8)
_TURN_RAD = 0.25
_SHEAR = 0.2
_SHIFT = 0.15
_INK = (0.5, 1.0)
_PAPER = (0.0, 0.3)
_NOISE = 0.12
_MASK_SIZE = 96
_MASK_POINTS = 64


def _mask(font_name: str, character: str) -> Tensor:
    # fp32 values: 0 is paper, 1 is ink
    font = FT2Font(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font_name}.ttf"))
    if font.get_char_index(ord(character)) == 0:
        raise ValueError(
            f"`font` (={font_name}) has no glyph for the character {character!r}, so images of "
            "this character would be blank. Remove the font."
        )
    font.set_size(_MASK_POINTS, 72)
    font.set_text(character)
    font.draw_glyphs_to_bitmap()
    ink = torch.from_numpy(np.array(font.get_image(), dtype=np.float32)) / 255
    ink = ink[:_MASK_SIZE, :_MASK_SIZE]
    mask = torch.zeros(_MASK_SIZE, _MASK_SIZE)
    (height, width) = ink.shape
    top = (_MASK_SIZE - height) // 2
    left = (_MASK_SIZE - width) // 2
    mask[top : top + height, left : left + width] = ink
    return mask


def _uniform(size: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(size, generator=generator)


def _placed(masks: Tensor, generator: torch.Generator) -> Tensor:
    num = len(masks)
    angle = _uniform((num,), -_TURN_RAD, _TURN_RAD, generator)
    capital = 0.72 * _MASK_POINTS / _MASK_SIZE  # height of a capital letter in a mask
    zoom = capital / _uniform((num,), *_SIZE, generator)
    shear = _uniform((num,), -_SHEAR, _SHEAR, generator)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(num, 2, 2)
    lean = torch.eye(2).repeat(num, 1, 1)
    lean[:, 0, 1] = shear
    matrix = zoom[:, None, None] * (turn @ lean)
    # affine_grid maps coordinates of the result to coordinates of the mask, from -1 to 1, so that zoom and shift are
    # those of the inverse map.
    shift = _uniform((num, 2, 1), -2 * _SHIFT, 2 * _SHIFT, generator)
    places = F.affine_grid(
        torch.cat([matrix, matrix @ shift], 2),
        [num, 1, IMAGE_SIZE, IMAGE_SIZE],
        align_corners=False,
    )
    return F.grid_sample(masks[:, None], places, align_corners=False)


def rendered(name: str, *, num_images: int, seed: int) -> ImageSet:
    """Render the images of one split, with balanced classes and fonts.

    The numbers of images per class differ by at most one, as do the numbers per font. The images are deterministic on
    one machine and version of torch.

    >>> image_set = rendered("val", num_images=256, seed=0)
    >>> image_set.images.shape, image_set.images.dtype, image_set.labels.bincount().tolist() == [8] * 32
    (torch.Size([256, 1, 32, 32]), torch.uint8, True)
    """
    fonts = FONTS[name]
    generator = torch.Generator().manual_seed(seed)
    masks = torch.stack([_mask(font, character) for font in fonts for character in CHARACTERS])
    which = torch.arange(num_images) % len(masks)
    # Rendered in chunks, because the masks of all training images would take 600 MB.
    drawn = torch.cat([_placed(masks[part], generator) for part in which.split(2048)])
    size = (num_images, 1, 1, 1)
    ink = _uniform(size, *_INK, generator)
    paper = _uniform(size, *_PAPER, generator)
    gray = paper + (ink - paper) * drawn + _NOISE * torch.randn(drawn.shape, generator=generator)
    return ImageSet(
        images=(gray.clamp(0, 1) * 255).round().to(torch.uint8), labels=which % NUM_CLASSES
    )


@lru_cache(maxsize=1)
def glyphs_split(num_train: int = NUM_TRAIN) -> dict[str, ImageSet]:
    """Render the splits `train`, `val` and `test`, once per process.

    The images take about 25 MB.
    """
    sizes = {"train": num_train, "val": NUM_VAL, "test": NUM_TEST}
    return {
        name: rendered(name, num_images=num, seed=seed)
        for seed, (name, num) in enumerate(sizes.items())
    }


class GlyphsDataModule(InMemoryDataModule):
    """Data module for synthetic images of characters, with 32 x 32 pixels.

    Args:
        num_train: Number of training images.
        global_batch_size, seed, shift_pixels, eval_batch_size_per_rank: As in `InMemoryDataModule`.

    Raises:
        ValueError: As in `InMemoryDataModule`, or `num_train` is below 1.
    """

    num_classes = NUM_CLASSES
    image_shape = (1, IMAGE_SIZE, IMAGE_SIZE)

    def __init__(
        self,
        *,
        global_batch_size: int,
        seed: int,
        shift_pixels: int = 1,
        eval_batch_size_per_rank: int = 128,
        num_train: int = NUM_TRAIN,
    ) -> None:
        require_whole(
            "num_train",
            num_train,
            f"training needs at least one image. Set data.num_train={NUM_TRAIN}",
        )
        self.num_train = num_train
        super().__init__(
            global_batch_size=global_batch_size,
            seed=seed,
            shift_pixels=shift_pixels,
            eval_batch_size_per_rank=eval_batch_size_per_rank,
        )

    def load(self) -> dict[str, ImageSet]:
        """Render the training, validation and test images with `glyphs_split`."""
        return glyphs_split(self.num_train)

    def setup(self, stage: str) -> None:
        """Render the images, and log once that the data is synthetic."""
        if not hasattr(self, "image_sets"):
            rank_zero_info(
                f"The data is synthetic: {self.num_train} training images of characters in "
                f"{len(FONTS['train'])} fonts. Validation uses {len(FONTS['val'])} other fonts, and "
                f"the test uses {len(FONTS['test'])}."
            )
        super().setup(stage)
