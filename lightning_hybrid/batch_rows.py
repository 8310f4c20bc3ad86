"""Utilities to count the samples of a batch and to split a batch along its first dimension.

A batch may consist of nested containers:

tensors, NumPy arrays     a row for each sample, in the first dimension
lists, tuples             an entry for each sample (texts, names), or a container of such columns
mappings, named tuples,
dataclasses               a container of columns
numbers, texts, None      constants, the same in every slice
arrays with one row       also constants, if other arrays have more rows
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor


class BatchPart(NamedTuple):
    """Slice of a batch along the batch dimension, with its number of samples.

    The slice has the same nested containers as the batch.
    """

    batch: Any
    num_rows: int


def split_rows(batch: Any, size: int) -> list[BatchPart]:
    """Split a batch along the batch dimension into slices of `size` samples.

    The last slice contains the remaining samples, which may be fewer.

    Raises:
        ValueError: The number of rows is unknown, or the batch contains an object that cannot be split.

    >>> for part in split_rows({"ids": np.arange(3), "names": ["a", "b", "c"], "task": "pairs"}, 2):
    ...     part.batch
    {'ids': array([0, 1]), 'names': ['a', 'b'], 'task': 'pairs'}
    {'ids': array([2]), 'names': ['c'], 'task': 'pairs'}
    """
    num_rows = count_rows(batch)
    if num_rows <= size:
        return [BatchPart(batch, num_rows)]
    parts = []
    for begin in range(0, num_rows, size):
        end = min(begin + size, num_rows)
        part = _take_rows(batch, slice(begin, end), num_rows, is_batch=True)
        parts.append(BatchPart(part, end - begin))
    return parts


def count_rows(batch: Any) -> int:
    """Return the number of samples in a batch.

    The number is the length of the tensors and arrays. If there are none, or if they are single samples of different
    lengths, the number is determined by the lists.

    Raises:
        ValueError: Tensors, arrays or lists disagree, or the batch contains an object whose samples cannot be counted.

    >>> count_rows([["a query", "another"], ["its answer", "another"], Tensor(2, 3)])
    2
    """
    _refuse_unknown_objects(batch)
    array_lengths = {len(leaf) for leaf in leaves(batch) if _is_array(leaf)}
    matching = [length for length in sorted(array_lengths) if _has_rows(batch, length)]
    if not matching:
        list_lengths = _lengths_of_lists(batch)
        if not list_lengths and not array_lengths:
            raise ValueError(
                f"`batch` (of type {type(batch).__name__}) contains no tensor, array or list that could be split into "
                "samples. Return tensors, arrays or lists with one entry per sample from the loader."
            )
        if len(list_lengths) == 1 and _has_rows(batch, *list_lengths):
            matching = list(list_lengths)
        elif not array_lengths:
            raise ValueError(
                f"The lists in `batch` (of lengths {sorted(list_lengths)}) must have one entry per sample, because "
                "the batch is split by samples. Return lists of equal length, or add a tensor with one row per "
                "sample to the batch."
            )
    if not matching:
        num_rows = max(array_lengths)
        if _has_rows(batch, num_rows, allows_constants=True):
            matching = [num_rows]
    if len(matching) != 1:
        raise ValueError(
            f"The tensors in `batch` (with {sorted(array_lengths)} rows) must all have one row per sample, because "
            "the batch is split by rows. Store constants in the module, and return samples of different lengths as a "
            "list."
        )
    return matching[0]


def copy_batch(batch: Any) -> Any:
    """Copy a batch and its tensors and arrays, so that in-place operations do not change the original.

    >>> images = Tensor([1, 2])
    >>> copy_batch([images])[0].zero_(), images
    (tensor([0., 0.]), tensor([1., 2.]))
    """
    if isinstance(batch, Tensor):
        return batch.clone()
    if isinstance(batch, np.ndarray):
        return batch.copy()
    return _with_entries(batch, copy_batch)


# ---- columns, lists of samples, and nested containers ----------------------------------------------------------------


def _take_rows(value: Any, rows: slice, num_rows: int, *, is_batch: bool = False) -> Any:
    if _is_array(value) and len(value) == num_rows:
        return value[rows]
    if _is_array(value):
        return value
    if _is_sample_list(value, num_rows, is_batch=is_batch):
        return value[rows]
    return _with_entries(value, lambda entry: _take_rows(entry, rows, num_rows))


def _has_rows(
    value: Any, num_rows: int, *, is_batch: bool = True, allows_constants: bool = False
) -> bool:
    """Return whether the first dimension of every tensor and array has `num_rows` entries.

    Arrays within a list of samples are not checked. With `allows_constants`, arrays may also have one row.
    """
    if _is_array(value):
        return len(value) == num_rows or (allows_constants and len(value) == 1)
    if _is_sample_list(value, num_rows, is_batch=is_batch):
        return True
    return all(
        _has_rows(entry, num_rows, is_batch=False, allows_constants=allows_constants)
        for entry in _entries(value)
    )


def _is_sample_list(value: Any, num_rows: int, *, is_batch: bool) -> bool:
    """Return whether a list contains one entry per sample, rather than columns such as `[images, labels]`.

    Raises:
        ValueError: The list is ambiguous.
    """
    if not _is_list(value) or len(value) != num_rows:
        return False
    num_with_columns = sum(_holds_column(entry, num_rows) for entry in value)
    if is_batch:
        return num_with_columns == 0
    # Some samples may have as many tokens as there are samples. If all of them do, they are columns.
    if num_with_columns == num_rows:
        return False
    if num_rows > 1 and all(_is_list(entry) and len(entry) == num_rows for entry in value):
        raise ValueError(
            f"`batch` contains a list of {num_rows} lists with {num_rows} entries each, so it is unknown whether the "
            "inner lists are samples or columns. Return them as separate entries of a dictionary, or as a NumPy "
            "array with one row per sample."
        )
    return True


def _holds_column(value: Any, num_rows: int) -> bool:
    return any(_is_array(leaf) and len(leaf) == num_rows for leaf in leaves(value))


def _lengths_of_lists(batch: Any) -> set[int]:
    """Return the candidate batch sizes implied by the lengths of the outermost lists in a batch."""
    if not _is_list(batch):
        lengths = set[int]()
        for entry in _entries(batch):
            if _is_list(entry):
                lengths.add(len(entry))
            else:
                lengths |= _lengths_of_lists(entry)
        return lengths
    if not batch or not all(_is_list(entry) for entry in batch):
        lengths = {len(entry) for entry in batch if _is_list(entry)}
        return lengths or {len(batch)}

    lengths = {len(entry) for entry in batch}
    if len(lengths) > 1:
        return lengths
    # The batch is a list of columns, as loaders return it, or a list of samples, as data sets return it. The larger of
    # the two lengths is the number of samples, because a batch has more samples than a sample has fields.
    return {max(len(batch), *lengths)}


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray) and value.ndim > 0


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


# ---- walking over nested containers ----------------------------------------------------------------------------------


def _entries(value: Any) -> list[Any]:
    """Return the entries of a mapping, sequence or dataclass, or an empty list for any other value."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if _is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return []


def _with_entries(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a container with `change` applied to each entry.

    A value that is not a container is returned unchanged.
    """
    if isinstance(value, Mapping):
        changed = {key: change(entry) for key, entry in value.items()}
        if not isinstance(value, MutableMapping):
            mapping_type: Any = type(value)
            return mapping_type(changed)
        # A tokenizer's mapping has attributes in addition to its entries.
        duplicate = copy.copy(value)
        for key, entry in changed.items():
            duplicate[key] = entry
        return duplicate
    if isinstance(value, list | tuple):
        entries = [change(entry) for entry in value]
        is_named_tuple = hasattr(value, "_fields")
        if is_named_tuple:
            return type(value)(*entries)
        return type(value)(entries)
    if _is_dataclass(value):
        duplicate = copy.copy(value)
        for field in dataclasses.fields(value):
            changed_entry = change(getattr(value, field.name))
            object.__setattr__(duplicate, field.name, changed_entry)  # the dataclass may be frozen
        return duplicate
    return value


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaf values of nested mappings, sequences and dataclasses, in order."""
    if isinstance(value, Mapping | list | tuple) or _is_dataclass(value):
        for entry in _entries(value):
            yield from leaves(entry)
    else:
        yield value


def requires_grad(batch: Any) -> bool:
    """Return whether any tensor of the batch requires a gradient."""
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves(batch))


def _refuse_unknown_objects(batch: Any) -> None:
    for leaf in leaves(batch):
        has_parts = hasattr(leaf, "__len__") or hasattr(leaf, "__next__")
        if has_parts and not isinstance(leaf, Tensor | np.ndarray | np.generic | str | bytes):
            raise ValueError(
                f"`batch` contains a {type(leaf).__name__}, which cannot be split into samples. Use tensors, arrays, "
                "lists or dictionaries."
            )
