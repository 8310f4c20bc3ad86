"""Exact mid-epoch resume for a user's `DataLoader`, with the same samples and random numbers.

    index lists         are drawn from the user's sampler. A resumed run draws earlier lists again and discards them.
    global generators   of random numbers are seeded by (seed, epoch, cycle, batch). For the content of a batch, the
                        seed includes the rank, and is set in the worker that reads the batch.
    sampler generators  are saved with their state at the beginning of the iteration.
    checksums           of the index lists are saved. If a resumed order differs, an error is raised on every rank.

Only the training loop's own iterator starts at the resumed position and updates it. Other iterators read all data.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from lightning_hybrid.data.exact_resume import ExactResume, NotExactError, Reader
from lightning_hybrid.data.place import PlaceIterator
from lightning_hybrid.data.plain_pass import copy_of_loader

__all__ = ["ExactLoader", "NotExactError", "can_be_exact", "exact"]


def can_be_exact(loader: object) -> bool:
    """Return whether `exact` supports a loader.

    `exact` supports torch's loaders that have no state of their own, and torchdata's loader. torchdata's own state is
    not used, because it is incomplete with a distributed sampler, and would lose one batch of an iterable data set.
    """
    is_torchdata = any(kind.__module__.startswith("torchdata.") for kind in type(loader).__mro__)
    return isinstance(loader, DataLoader) and (
        is_torchdata or not hasattr(loader, "load_state_dict")
    )


def exact(loader: DataLoader[Any], reader: Reader) -> Any:
    """Return a copy of a loader that can resume exactly in the middle of an epoch.

    Attributes of the user's own object stay equal to those of the copy, except for its samplers. A change by user code
    takes effect with the next batch, and changes by methods of the copy are visible in the user's object. Workers keep
    the attributes with which they were started.
    """
    copied = copy_of_loader(loader)
    copied.__class__ = type(
        type(loader).__name__, (ExactLoader, type(loader)), {"__module__": __name__}
    )
    copied.exact_resume = ExactResume(copied, loader, reader)
    return copied


class ExactLoader(DataLoader[Any]):
    """Base class that adds exact mid-epoch resume to a user's `DataLoader` class.

    `exact` creates the derived class. The attribute `exact_resume` holds the implementation.
    """

    exact_resume: ExactResume

    def __iter__(self) -> Any:
        return PlaceIterator(self.exact_resume)

    def of_user_class(self) -> Any:
        """Return a `super()` proxy of the loader that calls the methods of the user's class."""
        return super()

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batch that training has read."""
        return self.exact_resume.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a checkpointed state that contains the states of all ranks.

        The strategies of this package save states in this form.
        """
        self.exact_resume.load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # If `collate_fn` is a method of the loader, workers that are not forked receive the loader. The derived class
        # cannot be pickled, because it is not defined in a module.
        return _unpickled, (self.exact_resume.without_resume(),)

    def __copy__(self) -> Any:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied


def _unpickled(loader: DataLoader[Any]) -> DataLoader[Any]:
    return loader
