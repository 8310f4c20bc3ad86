"""The index lists of an `ExactLoader`: drawn from the user's sampler, with a checksum, and left out up to a place."""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_hybrid.data.random_streams import SeededIndex

START, ITER, ORDER, CONTENT = range(4)  # what random numbers are for
END = object()


class IndexLists:
    """What stands for the sampler or batch sampler in the copy of its loader."""

    def __init__(self, sampler: Any, loader: Any) -> None:
        vars(self).update(_sampler=sampler, _loader=loader)

    def __iter__(self) -> Iterator[Any]:
        with self._loader.seeded_for(ITER):  # now: a `DataLoader` with workers makes two of these, and asks one
            indices = iter(self._sampler)
        return self._rest_of(indices)

    def _rest_of(self, indices: Iterator[Any]) -> Iterator[Any]:
        owner, number, checksum = self._loader, 0, 0
        while True:
            is_drawn = owner.is_stream or (number > 0 and owner.draws_at_once)
            with nullcontext() if is_drawn else owner.seeded_for(ORDER, number):
                index = next(indices, END)
            if index is END:
                if owner.expected is not None:  # it ends too early
                    owner.compare(owner.expected[0], None)
                return
            words, number = owner.words(CONTENT, number), number + 1
            if not owner.is_stream:
                checksum = _checksum_of_index(index, checksum)
                owner.compare(number, checksum)
                if number <= owner.place.batches:
                    owner.checksum = checksum
                    continue
                owner.checksums.append(checksum)
            yield SeededIndex(index, words) if owner.num_workers else index

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_sampler", "_loader"):  # copying asks before there is one
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._sampler, name, value)


def _checksum_of_index(index: Any, before: int) -> int:
    try:
        return zlib.crc32(array("q", index if isinstance(index, list | tuple) else [index]), before)
    except (TypeError, OverflowError):  # keys; objects without a `repr` of their own show where they lie
        return zlib.crc32(re.sub(r" at 0x[0-9a-f]+", "", repr(index)).encode(), before)


def checksum_of_batch(batch: Any) -> int:
    """Return a checksum of a batch, by the first numbers of each tensor: all of them would take too long."""
    leaves = (one.flatten()[:64].tolist() if isinstance(one, Tensor) else one for one in tree_leaves(batch))
    return zlib.crc32(repr([one for one in leaves if isinstance(one, list | str | int | float)]).encode())
