"""Error-feedback residuals, which carry a codec's rounding errors into the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hybrid.comm.codec.block_format import BLOCK, num_blocks_of
from lightning_hybrid.comm.codec.codec import Coder

_NAN_SCALE = 0x7FC0


@dataclass(eq=False)
class FeedbackStep:
    """Loss scale of one training step, and whether the optimizer skipped the step.

    Args:
        loss_scale: Loss scale of the step's gradients, a power of two, 0-dim. None means 1.
        is_skipped: Whether the optimizer skipped the step, 0-dim, on the device. None if this is not known yet.
    """

    loss_scale: Tensor | None = None
    is_skipped: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ResidualOptions:
    """Options shared by all error-feedback residuals of a bucket.

    Args:
        divisor: Number by which gradients were divided before the reduction.
        may_skip: Whether the optimizer may skip steps.
        on_cuda: Whether the tensors are on CUDA, so that the host must not wait for the device.
    """

    divisor: int
    may_skip: bool
    on_cuda: bool = False


class Residual:
    """Error-feedback residual (float32) of a range of blocks that this rank encodes.

    The values are scaled like the gradients of `step`. If steps may be skipped, the values before and after the last
    step are kept until it is known whether the step was skipped.

    Args:
        numbers: Numbers of the blocks, int64, on the CPU.
        values: Initial values, 256 for each block. The tensor is used without a copy.
        padding: Ranges (begin, end) of elements that do not belong to any gradient. They stay zero.
        step: Step by whose loss scale the initial values are scaled.
        options: Options shared by all residuals of the bucket.
    """

    def __init__(
        self,
        numbers: Tensor,
        values: Tensor,
        padding: Sequence[tuple[int, int]],
        *,
        step: FeedbackStep,
        options: ResidualOptions,
    ) -> None:
        self.numbers = numbers
        self._options = options
        self._step = step
        self._padding = padding
        self._values = values
        self._values_after: Tensor | None = None  # values if the optimizer does not skip `_step`
        self._is_undecided = False  # whether `_values_after` may still replace `_values`

    def encode(
        self, flat: Tensor, ids: Tensor, message: Tensor, coder: Coder, step: FeedbackStep
    ) -> None:
        """Encode gradients plus the residual into `message`, and store the rounding error as the residual.

        The computation works in place on the memory of the residual. If the step may be skipped, it works on a second
        buffer instead, so that `decided` can return to the old residual.
        """
        old_residual = self.rescaled_(step)[: flat.numel()]
        if self._options.may_skip:
            if self._values_after is None:
                self._values_after = torch.empty_like(self._values)
            new_residual = self._values_after[: flat.numel()]
            self._is_undecided = True
        else:
            new_residual = old_residual
        corrected = torch.add(old_residual, flat, out=new_residual)

        coder.encode_nearest(corrected, ids, message)
        decoded = torch.empty_like(corrected)
        coder.decode(message.view(-1, message.shape[-1]), decoded)
        new_residual.sub_(decoded)  # the buffer held the corrected gradients until here

        # The padding of rotated blocks holds noise, which does not belong to any gradient.
        if self._padding:
            torch._foreach_zero_([new_residual[begin:end] for begin, end in self._padding])
        # inf and nan turn their block into nan. Without a loss scale, no step is skipped, and the nan would stay in the
        # residual forever. On CUDA, nan is always replaced, because a check would make the host wait.
        if self._options.on_cuda or _has_nan_scale(message, new_residual.numel()):
            new_residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def decided(self) -> Tensor:
        """Return the residual, discarding the last step's update if the optimizer skipped that step.

        A step whose outcome is not known yet counts as skipped.
        """
        is_skipped = self._step.is_skipped
        if self._is_undecided and is_skipped is not None:
            assert self._values_after is not None
            self._is_undecided = False
            if self._options.on_cuda:
                _record_use(is_skipped)
                torch.where(is_skipped, self._values, self._values_after, out=self._values)
            elif not bool(is_skipped):
                self._values, self._values_after = self._values_after, self._values
        return self._values

    def rescaled_(self, step: FeedbackStep) -> Tensor:
        """Rescale the residual in place to the loss scale of a later step, and return the residual."""
        values = self.decided()
        earlier_scale = self._step.loss_scale
        later_scale = step.loss_scale
        self._step = step
        self._is_undecided = False  # A step without a known outcome counts as skipped.
        if earlier_scale is None or later_scale is None or earlier_scale is later_scale:
            return values

        if self._options.on_cuda:
            _record_use(earlier_scale, later_scale)
        ratio = later_scale / earlier_scale
        if self._options.on_cuda or float(ratio) != 1.0:
            values.mul_(ratio)
        return values

    def unscaled(self) -> Tensor:
        """Return the residual in units of unscaled gradients, with the loss scale and the divisor removed."""
        # Both are powers of two, so the result is exact.
        values = self.decided()
        loss_scale = self._step.loss_scale
        if loss_scale is None:
            return values * self._options.divisor
        return values * (self._options.divisor / loss_scale)

    def take(self, rows: Tensor, step: FeedbackStep) -> Tensor:
        """Remove blocks from this residual, and return the values of these blocks at the loss scale of `step`.

        Args:
            rows: Positions of the blocks in this residual, int64.
            step: Step by whose loss scale the returned values are scaled.
        """
        if self._options.on_cuda:
            _record_use(self._values)
            if self._values_after is not None:
                _record_use(self._values_after)
        values = self.rescaled_(step).view(-1, BLOCK)
        is_kept = torch.ones(len(self.numbers), dtype=torch.bool).index_fill_(0, rows, False)
        kept_rows = is_kept.nonzero().view(-1)
        self.numbers = self.numbers[kept_rows]
        self._values = values[kept_rows].view(-1)
        self._values_after = None
        return values[rows]


def _record_use(*tensors: Tensor) -> None:
    # The tensors were allocated on another stream. Without this, their memory could be reused before this stream has
    # read it.
    for tensor in tensors:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _has_nan_scale(message: Tensor, numel: int) -> bool:
    scales = message[: 2 * num_blocks_of(numel)].view(torch.int16)
    return bool((scales == _NAN_SCALE).any())
