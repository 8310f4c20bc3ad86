"""Exact resume of data loaders in a training loop that the user writes with Fabric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_hybrid.strategy.exact_resume.rank_states import states_of_all_ranks

# These are imported in functions at run time, because their package also imports the loaders of this project.
if TYPE_CHECKING:
    from lightning_hybrid.data.exact_resume import ExactResume
    from lightning_hybrid.data.place import Place


@dataclass
class LoopReader:
    """Position of a data loader in a user's own training loop, where each pass over it is one epoch.

    The first pass continues from the loaded state.

    Attributes:
        stays_in_epoch: Whether the next pass belongs to the epoch of the loaded state even if that epoch had no more
            batches on this rank. Other ranks then train on their remaining batches.
    """

    rank: int
    world_size: int
    seed: int
    accumulate_grad_batches: int = 1
    sets_epochs: bool = True  # because Fabric counts iterations from 0 after a resume
    reads_to_end: bool = True  # because a `for` loop requests a batch after the last one
    stays_in_epoch: bool = False

    def is_reading(self, holder: Iterator[Any]) -> bool:
        """Return True, because every iterator counts as part of training in a user's own loop."""
        return True

    def is_within_training(self) -> bool:
        """Return True, because the strategy cannot tell when a user's own loop is training."""
        return True

    def place_of(self, resume: ExactResume) -> Place:
        """Return the epoch and batch at which the next pass over the loader starts."""
        from lightning_hybrid.data.place import Place

        state = resume.loaded
        if state is None:
            return Place(resume.current.place.epoch + 1)
        if self.stays_in_epoch:
            self.stays_in_epoch = False
            return Place(state["epoch"], 0, resume.batches_after(state["batches"]))
        if state["is_over"]:
            return Place(state["epoch"] + 1)
        batches_done = resume.batches_after(state["batches"])
        length = resume.length
        if length is not None and batches_done >= length:
            return Place(state["epoch"] + 1)
        return Place(state["epoch"], 0, batches_done)


class LoopLoaders:
    """Manager of the data loaders of a Fabric object and of their states in checkpoints.

    Args:
        exact_resume: Whether a user's own `DataLoader` resumes exactly.
    """

    def __init__(self, exact_resume: bool) -> None:
        self._is_on = exact_resume
        self._num_loaders = 0

    def process(self, loader: Any, rank: int, world_size: int) -> Any:
        """Wrap a loader so that it can resume in the middle of an epoch, if exact resume is enabled and supported."""
        from lightning_hybrid.data.exact_loader import can_be_exact, exact

        if not self._is_on or not can_be_exact(loader):
            return loader
        exact_loader = exact(loader, LoopReader(rank, world_size, torch.initial_seed()))
        exact_loader.exact_resume.number = self._num_loaders
        self._num_loaders += 1
        return exact_loader

    def with_states(self, state: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """Return a checkpoint state in which each data loader is replaced by its state dicts from all ranks.

        Collective if there is a loader: every rank must call it.
        """
        state_to_save: dict[str, Any] = {}
        for name, value in state.items():
            if hasattr(value, "exact_resume"):
                value = states_of_all_ranks([value.state_dict()], rank, is_alone=False)[0]
            state_to_save[name] = value
        return state_to_save
