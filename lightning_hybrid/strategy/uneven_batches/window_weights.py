"""Weights of the batches of one optimizer step, by the number of samples in each."""

from __future__ import annotations

from lightning_hybrid.strategy.uneven_batches.agreement import AgreedBatch


class WindowWeights:
    """Weights with which the average gradient of a step is the mean over all samples in it.

    A step has A batches on each rank (`accumulate_grad_batches`), the last one of an epoch perhaps fewer. Lightning
    divides the loss of each batch, a mean over its b samples, by A.

        loss of a rank      loss / A * factor               factor = b / unit
        hook                sum over ranks / num_terms      num_terms = (samples of the step on all ranks) / (A * unit)

    The samples of later batches are not known at the first backward. So the unit is chosen from the first batch, and
    the hook, which runs in the last backward, divides by the rest. If all batches have the same size, every factor is 1
    and the divisor is the world size: then no bit differs from a run without weights.

        unit    mean number of samples of the ranks in the first batch    the divisor is the world size for A = 1
                largest of them, with fp16 gradients                      no factor is above 1, so none overflows

    Args:
        world_size: The number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._accumulation = 1
        self._num_own = 0
        self._num_total = 0
        # The unit as a fraction, so that quotients of equal numbers are exact.
        self._unit_numerator = 1
        self._unit_denominator = 1

    def begin(self, batch: AgreedBatch, *, accumulation: int, limits_factors: bool) -> None:
        """Begin a step with its first batch.

        Args:
            batch: The numbers of samples.
            accumulation: The number by which Lightning divides the loss of each batch.
            limits_factors: Whether no factor of the first batch may be above 1.
        """
        self._accumulation = accumulation
        self._num_own = batch.num_own
        self._num_total = batch.num_total
        self._unit_numerator = batch.num_total
        self._unit_denominator = self._world_size
        if limits_factors:
            self._unit_numerator = batch.num_largest
            self._unit_denominator = 1
        if self._unit_numerator == 0:
            self._unit_numerator = 1
            self._unit_denominator = 1

    def add(self, batch: AgreedBatch) -> None:
        """Add the next batch of the step."""
        self._num_own = batch.num_own
        self._num_total += batch.num_total

    @property
    def factor(self) -> float:
        """The factor of this rank's loss in the current batch."""
        return self._num_own * self._unit_denominator / self._unit_numerator

    @property
    def num_terms(self) -> float:
        """The divisor of the sum over ranks, if the current batch is the last one of the step."""
        if self._num_total == 0:
            return float(self._world_size)  # all gradients are zero
        return (
            self._num_total * self._unit_denominator / (self._accumulation * self._unit_numerator)
        )
