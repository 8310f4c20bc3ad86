"""Division of a step's samples over ranks and batches, and conversion of positions after a resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """Division of the samples of an optimizer step over ranks and accumulated batches.

    Args:
        world_size: Number of ranks that read different samples.
        batch_size: Number of samples in a batch of a rank, or None if the user's batch sampler determines it.
        accumulate_grad_batches: Number of batches that a rank reads per step.
    """

    world_size: int
    batch_size: int | None
    accumulate_grad_batches: int

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> StepLayout:
        """Create the layout from the saved state of a loader."""
        return cls(
            world_size=state["world_size"],
            batch_size=state["batch_size"],
            accumulate_grad_batches=state["accumulate_grad_batches"],
        )

    def has_batches_of(self, other: StepLayout) -> bool:
        """Return whether batch n of a rank contains the same samples in both layouts."""
        return self.world_size == other.world_size and self.batch_size == other.batch_size

    @property
    def images_per_step(self) -> int:
        """Number of samples in a step, over all ranks."""
        if self.batch_size is None:
            raise ValueError(
                "`batch_size` (=None) must be a number, because a batch sampler does not define the number of samples "
                "per batch. Set `batch_size` in the loader."
            )
        return self.world_size * self.batch_size * self.accumulate_grad_batches

    def batches_after(self, batches_done: int, saved: StepLayout, *, is_dealt: bool) -> int:
        """Convert a number of finished batches in a saved layout to this layout.

            batches = steps done * accumulate_grad_batches        if ranks or batch sizes differ
            batches = batches done                                if batches contain the same samples

        Args:
            batches_done: Number of batches in the finished steps of the epoch, in the saved layout.
            saved: Layout of the run that wrote the checkpoint.
            is_dealt: Whether a `DistributedSampler` divides the same order over any number of ranks, so that the
                samples of a step do not depend on the layout.

        Raises:
            ValueError: Samples would be repeated or skipped, or the next step would be incomplete.
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
                f"`accumulate_grad_batches` (={self.accumulate_grad_batches}) must divide the number of finished "
                f"batches of the epoch (={batches_done}), because the next step would have fewer batches otherwise. "
                f"Set accumulate_grad_batches={saved.accumulate_grad_batches}, as in the checkpoint"
            )

    def _refuse_difference(self, saved: StepLayout) -> None:
        for name in ("world_size", "batch_size"):
            value = getattr(self, name)
            saved_value = getattr(saved, name)
            if value != saved_value:
                raise ValueError(
                    f"`{name}` (={value}) must equal the value in the checkpoint (={saved_value}), because "
                    f"the samples of a batch depend on it. Resume with {name}={saved_value}"
                )

    def _of_same_step(self, saved: StepLayout) -> str:
        num_parts = self.world_size * self.accumulate_grad_batches
        batch_size, remainder = divmod(saved.images_per_step, num_parts)
        rule = (
            f"`batch_size` (={self.batch_size}) times {self.world_size} ranks times {self.accumulate_grad_batches} "
            "accumulated batches must equal the number of samples per step in the checkpoint "
            f"(={saved.images_per_step})"
        )
        if not remainder:
            return f"{rule}. Set batch_size={batch_size}"
        return (
            f"{rule}, which is not a multiple of {num_parts}. Set batch_size={saved.batch_size}, "
            f"accumulate_grad_batches={saved.accumulate_grad_batches} and train on {saved.world_size} ranks, as in the "
            "checkpoint"
        )
