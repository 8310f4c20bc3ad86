"""The benchmark of the input pipeline measures what it says: every arm gives batches, and a step waits when it must."""

from __future__ import annotations

import itertools
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from lightning_hybrid.data.prefetch import prefetch
from recipes.benchmarks import input_cases, photos
from recipes.benchmarks.input_baselines import PillowImages

ROOT = Path(__file__).resolve().parents[3]


def test_photos_are_always_the_same_and_of_imagenets_size():
    originals = photos.photographs()
    one, again, other = (photos.photo(originals, number) for number in (7, 7, 10))
    assert np.array_equal(one, again)
    assert one.shape != other.shape or not np.array_equal(one, other)
    sizes = [len(photos.encode_jpeg(photos.photo(originals, number), quality=photos.QUALITY)) for number in range(12)]
    assert 80_000 < np.mean(sizes) < 110_000
    assert {min(photos.photo(originals, number).shape[:2]) for number in range(6)} == {375}


def test_the_rival_reads_the_same_files(tmp_path):
    photos.write_photos(tmp_path, num_train=2, num_val=1, num_classes=2)
    (path,) = (tmp_path / "train" / "n00000001").glob("*.JPEG")
    image, label = PillowImages([str(path)], [1], image_size=32)[0]
    assert (tuple(image.shape), image.dtype, label) == ((3, 32, 32), torch.uint8, 1)


class Paced:
    """Batches that are ready `period_s` after the one before was taken."""

    def __init__(self, period_s):
        self.period_s = period_s

    def __iter__(self):
        ready_s = time.perf_counter()
        while True:
            ready_s = max(ready_s, time.perf_counter() - self.period_s) + self.period_s
            time.sleep(max(0.0, ready_s - time.perf_counter()))
            yield torch.zeros(1)


def test_a_step_waits_for_what_it_is_shorter_than_its_data():
    ahead = prefetch(Paced(0.06), torch.device("cpu"))
    waits_s = list(input_cases._waits(ahead, step_s=0.005, num_steps=6))
    assert len(waits_s) == 6
    assert np.median(waits_s) >= 0.03  # 60 ms less the step of 5 ms, which a busy machine makes longer
    with closing(input_cases._endless([1, 2])) as endless:
        assert list(itertools.islice(endless, 5)) == [1, 2, 1, 2, 1]
