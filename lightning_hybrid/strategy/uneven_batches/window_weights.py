"""Loss weights for batches that contain different numbers of samples."""

from __future__ import annotations

from lightning_hybrid.strategy.uneven_batches.agreement import AgreedBatch


class WindowWeights:
    """Loss weights that make the gradient of an optimizer step the mean over all its samples.

    A step has A batches on each rank (`accumulate_grad_batches`). The last step of an epoch may have fewer. Lightning
    divides the loss of each batch, a mean over its b samples, by A.

        loss of a rank      loss / A * factor               factor = b / unit
        hook                sum over ranks / num_terms      num_terms = (samples of the step on all ranks) / (A * unit)

    At the first backward the numbers of samples in later batches are not known. The unit is therefore chosen from the
    first batch, and the hook, which runs in the last backward, divides by the rest. If all batches have the same size,
    every factor is 1 and the divisor is the world size, so the result is bit-identical to a run without weights.

        unit    mean number of samples of the ranks in the first batch    the divisor is the world size for A = 1
                largest of them, with fp16 gradients                      its factors are at most 1, so none overflows

    Args:
        world_size: Number of ranks.
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
        """Begin a new optimizer step with the sample counts of its first batch.

        Args:
            batch: Numbers of samples of the batch.
            accumulation: Number by which Lightning divides the loss of each batch.
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
        """Add the sample counts of a further batch of the same optimizer step."""
        self._num_own = batch.num_own
        self._num_total += batch.num_total

    @property
    def factor(self) -> float:
        """Factor by which this rank's loss of the current batch is multiplied."""
        return self._num_own * self._unit_denominator / self._unit_numerator

    @property
    def num_terms(self) -> float:
        """Number by which the gradient sum over ranks is divided after the last batch of the step."""
        if self._num_total == 0:
            return float(self._world_size)  # all gradients are zero
        return (
            self._num_total * self._unit_denominator / (self._accumulation * self._unit_numerator)
        )
