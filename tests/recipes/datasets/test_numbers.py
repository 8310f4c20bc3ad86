"""Numbers that data modules refuse, with the cause."""

from functools import partial

import pytest

from recipes.datasets.digits import DigitsDataModule
from recipes.datasets.synthetic import SyntheticImageNetDataModule
from recipes.datasets.text import TextDataModule

DIGITS = partial(DigitsDataModule, global_batch_size=8)
IMAGES = partial(SyntheticImageNetDataModule, global_batch_size=8)
TEXT = partial(TextDataModule, root=None, sequence_length=8, vocab_size=9, global_batch_size=8)


@pytest.mark.parametrize("data", [DIGITS, IMAGES, TEXT])
def test_a_negative_seed_is_refused(data):
    message = r"`seed` \(=-1\) must be an integer, 0 or more: random number generators accept"
    with pytest.raises(ValueError, match=message):
        data(seed=-1)


def test_zero_decoder_threads_are_refused():
    message = r"`num_threads` \(=0\) must be an integer, 1 or more: .* Set data.num_threads=null"
    with pytest.raises(ValueError, match=message):
        IMAGES(seed=0, num_threads=0)
