"""Micro-batches of any batch that a loader returns: each contains its samples, whatever the type of the columns."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lightning_hybrid.pipeline.microbatches import digest_of, microbatches
from tests import toy
from tests.pipeline.cases import in_stages
from tests.scenes import fit, same

NUM_SAMPLES = 4
TEXTS = [f"text {number}" for number in range(NUM_SAMPLES)]
NUMBERS = torch.arange(NUM_SAMPLES)
Pair = namedtuple("Pair", "texts numbers")


@dataclass(frozen=True)
class Sample:
    texts: object
    numbers: object


def columns(batch):
    """Return texts and numbers of a batch in one of the formats below."""
    if isinstance(batch, dict):
        return batch["nest"]["texts"], batch["numbers"]
    if isinstance(batch, Sample):
        return batch.texts, batch.numbers
    return batch[0], batch[1]


BATCHES = {
    "list before the tensor": [TEXTS, NUMBERS],
    "tuple of texts": (tuple(TEXTS), NUMBERS),
    "array before the tensor": [np.array(TEXTS), NUMBERS],
    "arrays alone": [np.array(TEXTS), NUMBERS.numpy()],
    "lists alone": [TEXTS, NUMBERS.tolist()],
    "named tuple": Pair(TEXTS, NUMBERS),
    "dataclass": Sample(TEXTS, NUMBERS),
    "nest": {"scale": torch.ones(1), "nest": {"texts": TEXTS}, "numbers": NUMBERS},
    "ragged tensors": [[torch.zeros(number + 1) for number in range(NUM_SAMPLES)], NUMBERS],
}


@pytest.mark.parametrize("name", BATCHES)
def test_each_microbatch_has_the_entries_of_its_samples(name):
    batch = BATCHES[name]
    texts, _ = columns(batch)
    parts = microbatches(batch, 2)
    assert len(parts) == 2
    for index, part in enumerate(parts):
        assert type(part) is type(batch)
        texts_of_part, numbers_of_part = columns(part)
        assert [int(number) for number in numbers_of_part] == [2 * index, 2 * index + 1]
        expected = texts[2 * index : 2 * index + 2]
        for text, expected_text in zip(texts_of_part, expected, strict=True):
            assert np.array_equal(text, expected_text)


def test_a_constant_of_one_row_is_in_each_microbatch():
    parts = microbatches({"positions": torch.ones(1, 3), "numbers": NUMBERS}, 2)
    assert [tuple(part["positions"].shape) for part in parts] == [(1, 3), (1, 3)]


def test_batches_of_different_texts_have_different_digests():
    assert digest_of([TEXTS], with_values=True) != digest_of([TEXTS[::-1]], with_values=True)
    assert digest_of([TEXTS], with_values=True) == digest_of([list(TEXTS)], with_values=True)


Texts = namedtuple("Texts", "scale texts labels images")


class OfTexts(toy.Toy):
    """Classifier whose batch starts with a constant and texts. Labels are a list, and images an array."""

    def training_step(self, batch, batch_idx):
        assert list(batch.texts) == [f"label {label}" for label in batch.labels]
        images = torch.as_tensor(batch.images)
        return super().training_step((images, torch.tensor(batch.labels)), batch_idx)


def collate(samples):
    images, labels = zip(*samples, strict=True)
    labels = [int(label) for label in labels]
    texts = tuple(f"label {label}" for label in labels)
    return Texts(torch.ones(1), texts, labels, torch.stack(images).numpy())


def text_loader():
    return torch.utils.data.DataLoader(toy.Blobs(20), batch_size=8, collate_fn=collate)


def test_a_pipeline_trains_on_batches_of_texts_lists_and_arrays_as_on_tensors(two_ranks):
    """The last batch is smaller. Once, only a tensor with one row per sample made the stages notice this."""
    scene = {"num_microbatches": 2}
    tensors = fit(two_ranks, **in_stages(data=toy.Blobs(20), **scene))
    texts = fit(two_ranks, OfTexts, **in_stages(train=text_loader, **scene))
    for seen, expected in zip(texts, tensors, strict=True):
        assert same(seen.weights, expected.weights), f"rank {seen.rank}"
