"""Splitting of batches between samples, for all containers of a batch."""

from collections import UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pytest
import torch

from lightning_hybrid.batch_rows import count_rows, split_rows

ROWS = 5
TEXTS = [f"text {i}" for i in range(ROWS)]
X = torch.arange(2 * ROWS).view(ROWS, 2)
Pair = namedtuple("Pair", "x texts")


class Encoding(UserDict):
    """Output of a tokenizer."""


@dataclass(frozen=True)
class Sample:
    x: object
    texts: object


def plain(value):
    """Convert a nested batch to lists and dictionaries of Python values."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, Sample):
        return plain(vars(value))
    if hasattr(value, "items"):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


# One entry has the length of the batch.
RAGGED = [torch.arange(i + 3) for i in range(ROWS)]
BATCHES = {
    "tensor": X,
    "texts": TEXTS,
    "columns of texts": [tuple(TEXTS), TEXTS],
    "pairs of texts": [(text, text[::-1]) for text in TEXTS],
    "tensor and texts": [X, TEXTS],
    "views and texts": {"views": [X, X + 1, X + 2, X + 3, X + 4], "texts": TEXTS},
    "arrays": {"texts": np.array(TEXTS), "ids": np.arange(ROWS)},
    "ragged tensors": {"tokens": RAGGED, "labels": torch.arange(ROWS)},
    "ragged tensors and texts": (RAGGED, TEXTS),
    "lists of tokens": {
        "tokens": [[1] * i for i in range(ROWS)],
        "masks": [[0] * i for i in range(ROWS)],
    },
    "dictionaries": {"x": X, "targets": [{"boxes": torch.zeros(i, 4)} for i in range(ROWS)]},
    "named tuple": Pair(X, TEXTS),
    "dataclass": Sample(X, TEXTS),
    "mapping": MappingProxyType({"x": X, "texts": TEXTS}),
    "defaultdict": defaultdict(list, x=X, texts=TEXTS),
    "encoding of a tokenizer": Encoding({"input_ids": X, "texts": TEXTS}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_each_part_has_its_rows_and_the_type_of_the_batch(name):
    batch = BATCHES[name]
    parts = split_rows(batch, 2)
    assert count_rows(batch) == ROWS
    assert [part.num_rows for part in parts] == [2, 2, 1]
    assert all(type(part.batch) is type(batch) for part in parts)
    whole = plain(batch)
    for index, part in enumerate(parts):
        assert plain(part.batch) == rows_of(whole, slice(2 * index, 2 * index + 2))


def rows_of(whole, rows):
    """Return the given rows of a plain nested batch: every list of `ROWS` entries is indexed."""
    if isinstance(whole, dict):
        return {key: rows_of(value, rows) for key, value in whole.items()}
    if len(whole) == ROWS and not is_list_of_views(whole):
        return whole[rows]
    return [rows_of(column, rows) for column in whole]


def is_list_of_views(whole):
    return isinstance(whole[0], list) and whole[0] == X.tolist()


def test_constants_are_in_each_part():
    batch = {
        "x": X,
        "size": [224, 224],
        "scale": torch.tensor(2.0),
        "task": "pairs",
        "number": 3,
        "nothing": None,
    }
    batch |= {"positions": torch.ones(1, 3), "weights": np.ones(1)}
    for part in split_rows(batch, 2):
        assert plain({key: value for key, value in part.batch.items() if key != "x"}) == plain(
            {key: value for key, value in batch.items() if key != "x"}
        )


def test_a_sample_of_one_row_among_others_is_no_constant():
    samples = [torch.ones(1, 2), torch.ones(3, 2)]
    assert [len(part.batch[0]) for part in split_rows(samples, 1)] == [1, 3]


def test_a_batch_that_fits_is_given_as_it_is():
    assert split_rows(TEXTS, ROWS)[0].batch is TEXTS
    assert split_rows(torch.zeros(0, 3), 2)[0].num_rows == 0


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([torch.ones(2, 2), torch.ones(3, 2)], r"The tensors in `batch` \(with \[2, 3\] rows\)"),
        ({"x": X, "weights": np.ones(3)}, r"The tensors in `batch` \(with \[3, 5\] rows\)"),
        ({"a": TEXTS, "b": TEXTS[1:]}, r"The lists in `batch` \(of lengths \[4, 5\]\)"),
        ({"x": X[:2], "texts": [["a", "b"], ["c", "d"]]}, "a list of 2 lists with 2 entries each"),
        ({"x": X, "names": set(TEXTS)}, "`batch` contains a set"),
        ({"x": X, "rows": iter(TEXTS)}, "`batch` contains a list_iterator"),
        (3, r"`batch` \(of type int\) contains no tensor, array or list"),
    ],
)
def test_a_batch_whose_samples_are_unknown_is_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        split_rows(batch, 1)
