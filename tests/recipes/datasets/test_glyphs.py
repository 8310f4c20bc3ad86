"""Glyphs data set: test fonts are not in training, no image is blank, and images are reproducible."""

import itertools

import pytest
import torch

from recipes.datasets import glyphs
from recipes.datasets.glyphs import CHARACTERS, FONTS, IMAGE_SIZE, GlyphsDataModule, rendered


def test_no_font_is_in_two_sets():
    fonts = []
    for fonts_of_set in FONTS.values():
        fonts += fonts_of_set
    assert len(fonts) == 14 + 4 + 4
    assert len(set(fonts)) == len(fonts)


@pytest.mark.parametrize("name", FONTS)
def test_every_font_draws_every_character_whole_and_no_two_alike(name):
    masks = [glyphs._mask(*pair) for pair in itertools.product(FONTS[name], CHARACTERS)]
    for mask in masks:
        assert mask.sum() > 100  # pixels of ink; an I would have about 300
        # Nothing is cut off.
        assert mask[:2].sum() == mask[-2:].sum() == mask[:, :2].sum() == mask[:, -2:].sum() == 0
    assert len({mask.numpy().tobytes() for mask in masks}) == len(masks)


def test_images_are_not_blank_nor_alike_the_same_every_time_and_others_with_another_seed():
    """Noise alone has a standard deviation of 0.12 * 255 = 31, clipped at black. A character adds to it."""
    images, labels = rendered("train", num_images=150, seed=3)
    images_again, labels_again = rendered("train", num_images=150, seed=3)
    images_of_seed_4, _ = rendered("train", num_images=150, seed=4)
    assert torch.equal(images, images_again)
    assert torch.equal(labels, labels_again)
    assert (images != images_of_seed_4).flatten(1).any(1).all()
    assert len({image.numpy().tobytes() for image in images}) == 150
    middle = images[:, 0, 4:-4, 4:-4].float().flatten(1)
    assert (middle.topk(20).values.mean(1) - middle.median(1).values).min() > 40


def test_the_module_serves_three_sets(monkeypatch):
    monkeypatch.setattr(glyphs, "NUM_VAL", 64)
    monkeypatch.setattr(glyphs, "NUM_TEST", 32)
    glyphs.glyphs_split.cache_clear()
    try:
        data = GlyphsDataModule(global_batch_size=64, seed=1, num_train=320)
        data.setup("fit")
        for name, num_images in (("train", 320), ("val", 64), ("test", 32)):
            assert len(data.image_sets[name].labels) == num_images, name
        images, _ = next(iter(data.train_dataloader()))
        assert images.shape == (64, 1, IMAGE_SIZE, IMAGE_SIZE)
    finally:
        glyphs.glyphs_split.cache_clear()


def test_a_character_without_glyph_and_a_batch_larger_than_the_set_are_refused():
    with pytest.raises(
        ValueError, match=r"`font` \(=DejaVuSansDisplay\) has no glyph for the character 'A'"
    ):
        glyphs._mask("DejaVuSansDisplay", "A")
    with pytest.raises(ValueError, match=r"`global_batch_size` \(=16385\) must be at most"):
        GlyphsDataModule(global_batch_size=16385, seed=0)
