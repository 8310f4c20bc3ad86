"""Exact mid-epoch resume for a user's own `DataLoader`: the remaining images, in order, with their random numbers.

    index list n     is drawn from the user's sampler; a resumed run draws the lists before it again, and drops them
    global streams   are seeded by (seed, epoch, cycle, n), for content by the rank too, in the worker that reads it
    own streams      of samplers are saved as they were when the iteration began
    checksum         of the index lists so far: an order that is not repeated is refused, on any rank

Only the training loop's own iterator takes and moves the place. Any other reader gets a plain pass over the data.
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
    """Return whether `exact` supports this loader: torch's, without a state of its own that would be restored.

    torchdata's loader qualifies. Under a distributed sampler its own state is lost, and with it a batch of a stream.
    """
    is_torchdata = any(kind.__module__.startswith("torchdata.") for kind in type(loader).__mro__)
    return isinstance(loader, DataLoader) and (
        is_torchdata or not hasattr(loader, "load_state_dict")
    )


def exact(loader: DataLoader[Any], reader: Reader) -> Any:
    """Return a copy of `loader`, of its class, that resumes exactly. The user's own object stays as it is."""
    copied = copy_of_loader(loader)
    copied.__class__ = type(
        type(loader).__name__, (ExactLoader, type(loader)), {"__module__": __name__}
    )
    copied.exact_resume = ExactResume(copied, loader, reader)
    return copied


class ExactLoader(DataLoader[Any]):
    """Methods that `exact` adds to the class of a loader. Everything else is in its attribute `exact_resume`."""

    exact_resume: ExactResume

    def __iter__(self) -> Any:
        return PlaceIterator(self.exact_resume)

    def of_user_class(self) -> Any:
        """Return the loader with the methods of the user's class."""
        return super()

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that training has read."""
        return self.exact_resume.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state that strategies of this package saved, with the states of all ranks."""
        self.exact_resume.load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Workers that are not forked receive the loader with a `collate_fn` that is a method of it.
        # The derived class is not in any module, where unpickling would look for it.
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
