"""Iteration over a training loader in user code, without changing the state of training."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_hybrid.data.index_lists import END
from lightning_hybrid.data.random_streams import SeededStreams


def plain_pass(loader: DataLoader[Any], *words: int, is_training: bool) -> Iterator[Any]:
    """Yield all batches of a copy of a loader, with random numbers seeded by `words`.

    Args:
        loader: Loader of the user, with its original samplers.
        *words: Numbers that seed the global random number generators during the iteration.
        is_training: Whether a training loop is currently reading the same loader.

    Raises:
        RuntimeError: A sampler or an iterable data set cannot be copied while training uses it.
    """
    separate = _separate_copy(loader, is_training)
    seeded = SeededStreams()
    with seeded(*words):
        batches = iter(separate)
    batch_number = 0
    while True:
        with seeded(*words, batch_number):
            batch = next(batches, END)
        if batch is END:
            return
        yield batch
        batch_number += 1


def copy_of_loader(loader: DataLoader[Any]) -> Any:
    """Return a shallow copy of a loader.

    If an attribute is a bound method of the loader, such as a `collate_fn`, it is bound to the copy.
    """
    copied = copy.copy(loader)
    copied._iterator = None  # persistent workers belong to the original loader
    for name, value in vars(loader).items():
        if is_bound_to(loader, value):
            setattr(copied, name, rebound(value, loader, copied))
    return copied


def rebound(value: Any, loader: DataLoader[Any], target: DataLoader[Any]) -> Any:
    """Return `value`, bound to `target` if it is a bound method of `loader`."""
    if not is_bound_to(loader, value):
        return value
    if isinstance(value, partial):
        method = MethodType(value.func.__func__, target)  # type: ignore[attr-defined]
        return partial(method, *value.args, **value.keywords)
    return MethodType(value.__func__, target)


def is_bound_to(loader: DataLoader[Any], value: Any) -> bool:
    """Return whether `value` is a bound method of `loader`, or a `functools.partial` of one."""
    function = value.func if isinstance(value, partial) else value
    return isinstance(function, MethodType) and function.__self__ is loader


def _separate_copy(loader: DataLoader[Any], is_training: bool) -> DataLoader[Any]:
    """Return a copy of a loader with its own samplers and random number generators.

    Map-style data sets are shared with the original.
    """
    copied = copy_of_loader(loader)
    dataset = loader.dataset
    names = ["sampler", "batch_sampler", "generator"]
    # An iterable data set has a position, so it must be copied. Workers have their own copies.
    copies_stream = isinstance(dataset, IterableDataset) and not loader.num_workers
    if copies_stream:
        names.append("dataset")
    # Samplers refer to the data set, or to the data set of a `Subset`. The data set must not be copied with them.
    memo = {}
    for part in _below(dataset):
        if not (copies_stream and isinstance(part, IterableDataset)):
            memo[id(part)] = part
    for name in names:
        try:
            value = copy.deepcopy(getattr(loader, name), memo)
        except Exception as error:
            if is_training:
                raise RuntimeError(_cannot_copy(loader, name, error)) from error
            value = getattr(loader, name)
        object.__setattr__(copied, name, value)  # `DataLoader` does not allow setting some of them
    return copied


def _below(dataset: Any) -> list[Any]:
    """Return a data set and all data sets that are nested in it."""
    datasets: list[Any] = []
    waiting = [dataset]
    while waiting:
        current = waiting.pop()
        if current is None or any(current is known_dataset for known_dataset in datasets):
            continue
        datasets.append(current)
        waiting.append(getattr(current, "dataset", None))
        parts = getattr(current, "datasets", None)
        if isinstance(parts, list | tuple):
            waiting.extend(parts)
    return datasets


def _cannot_copy(loader: DataLoader[Any], name: str, error: Exception) -> str:
    kind = type(getattr(loader, name)).__name__
    return (
        f"The training loader ({type(loader).__name__}) cannot be read outside of the training loop, because its "
        f"`{name}` (of type {kind}) cannot be copied ({error}), and a second reader would change its state. Create "
        "another loader for this purpose, or set exact_resume=False."
    )
