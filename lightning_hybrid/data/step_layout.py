"""Division of the images of a step over ranks and batches, and its conversion when a run resumes with another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """Division of the images of an optimizer step: over ranks, and over the batches that a rank accumulates.

    Args:
        world_size: Ranks that read different images.
        batch_size: Images in a batch of a rank; None if the user's batch sampler decides.
        accumulate_grad_batches: Batches that a rank reads for a step.
    """

    world_size: int
    batch_size: int | None
    accumulate_grad_batches: int

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> StepLayout:
        """Return the layout in the state of a loader."""
        return cls(
            world_size=state["world_size"],
            batch_size=state["batch_size"],
            accumulate_grad_batches=state["accumulate_grad_batches"],
        )

    def has_batches_of(self, other: StepLayout) -> bool:
        """Return whether batch n of a rank holds the same images in both layouts."""
        return self.world_size == other.world_size and self.batch_size == other.batch_size

    @property
    def images_per_step(self) -> int:
        """Images of a step over all ranks."""
        if self.batch_size is None:
            raise ValueError(
                "`batch_size` (=None) has no number of images: the user's batch sampler decides."
            )
        return self.world_size * self.batch_size * self.accumulate_grad_batches

    def batches_after(self, batches_done: int, saved: StepLayout, *, is_dealt: bool) -> int:
        """Return the number of batches of this layout that hold the images of the whole steps done in the saved one.

            batches = steps done * accumulate_grad_batches        if ranks or batch sizes differ
            batches = batches done                                if each batch holds the same images

        Args:
            batches_done: Batches of the epoch that ranks of the saved layout have read for whole steps.
            saved: The layout of the run that wrote the checkpoint.
            is_dealt: Whether Lightning's `DistributedSampler` deals the same order to any number of ranks, so that the
                images of a step do not depend on the layout.

        Raises:
            ValueError: Images would be repeated or left out, or the next step would be a part of a step.
        """
        if self.has_batches_of(saved):
            self._refuse_part_of_step(batches_done, saved)
            return batches_done
        if not is_dealt:
            self._refuse_difference(saved)
        if self.images_per_step != saved.images_per_step:
            raise ValueError(self._of_same_step(saved))
        steps_done = batches_done // saved.accumulate_grad_batches
        return steps_done * self.accumulate_grad_batches

    def _refuse_part_of_step(self, batches_done: int, saved: StepLayout) -> None:
        if batches_done % self.accumulate_grad_batches:
            raise ValueError(
                f"`accumulate_grad_batches` (={self.accumulate_grad_batches}) must divide the {batches_done} batches "
                "of the epoch that are done, or the next step would have fewer batches: set accumulate_grad_batches="
                f"{saved.accumulate_grad_batches}, as in the checkpoint"
            )

    def _refuse_difference(self, saved: StepLayout) -> None:
        for name in ("world_size", "batch_size"):
            value = getattr(self, name)
            saved_value = getattr(saved, name)
            if value != saved_value:
                raise ValueError(
                    f"`{name}` (={value}) must be that of the checkpoint: set {name}={saved_value}"
                )

    def _of_same_step(self, saved: StepLayout) -> str:
        num_parts = self.world_size * self.accumulate_grad_batches
        batch_size, remainder = divmod(saved.images_per_step, num_parts)
        rule = (
            f"`batch_size` (={self.batch_size}) must give the {saved.images_per_step} images of a step, over "
            f"{self.world_size} ranks and {self.accumulate_grad_batches} batches"
        )
        if not remainder:
            return f"{rule}: set batch_size={batch_size}"
        return (
            f"{rule}, which do not divide them: set batch_size={saved.batch_size}, accumulate_grad_batches="
            f"{saved.accumulate_grad_batches} and train on {saved.world_size} ranks, as in the checkpoint"
        )
