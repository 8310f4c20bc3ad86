"""The residual of some blocks: what rounding has taken from a node's sums, and the next one is to have back."""

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
    """A step of the training, as residuals see it.

    `loss_scale`: of its gradients, 0-dim, a power of two; None: 1. `is_skipped`: whether the optimizer left it out,
    0-dim on the device; None: not known, or not yet.
    """

    loss_scale: Tensor | None = None
    is_skipped: Tensor | None = None


class Residual:
    """The residual of blocks that this rank encodes, in the units of the gradients of `step`; float32.

    Where steps may be skipped it is there twice, before and after the last step, until it is known which one counts.

    Args:
        numbers: of the blocks, int64, on the CPU.
        values: with which it begins, 256 for each block; kept, not copied.
        padding: elements from begin to end that belong to no gradient, which stay zeros.
        divisor: by which gradients were divided before the sum.
        may_skip: whether steps may be skipped.
        on_cuda: whether the host runs ahead of the device, and must not ask it.
    """

    def __init__(
        self,
        numbers: Tensor,
        values: Tensor,
        padding: Sequence[tuple[int, int]],
        *,
        step: FeedbackStep,
        divisor: int,
        may_skip: bool,
        on_cuda: bool = False,
    ) -> None:
        self.numbers = numbers
        self.divisor = divisor
        self._step = step
        self._may_skip = may_skip
        self._padding = padding
        self._on_cuda = on_cuda
        self._values = values
        self._after: Tensor | None = None  # the values after `_step`, if that counts
        self._is_open = False  # whether `_after` is to be decided on

    def encode(
        self, flat: Tensor, ids: Tensor, message: Tensor, coder: Coder, step: FeedbackStep
    ) -> None:
        """Write `flat` plus the residual into `message`, to the nearest code; the rest is the residual after `step`."""
        values = self.rescaled_(step)[: flat.numel()]
        if self._may_skip:
            if self._after is None:
                self._after = torch.empty_like(self._values)
            rest = torch.add(values, flat, out=self._after[: flat.numel()])
            self._is_open = True
        else:
            rest = values.add_(flat)
        coder.encode_nearest(rest, ids, message)
        decoded = torch.empty_like(rest)
        coder.decode(message.view(-1, message.shape[-1]), decoded)
        rest.sub_(decoded)
        # Rotated blocks have noise in what fills them up, which is sent and belongs to no gradient.
        if self._padding:
            torch._foreach_zero_([rest[begin:end] for begin, end in self._padding])
        # inf and nan make their block nan: without a loss scale nothing skips the step, and they would stay for ever.
        if self._on_cuda or bool((_scales(message, rest.numel()) == _NAN_SCALE).any()):
            rest.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def decided(self) -> Tensor:
        """Return the values before a step that was skipped, or has no outcome yet; those after any other step."""
        skipped = self._step.is_skipped
        if self._is_open and skipped is not None:
            assert self._after is not None
            self._is_open = False
            if self._on_cuda:
                _keep(skipped)
                torch.where(skipped, self._values, self._after, out=self._values)
            elif not bool(skipped):
                self._values, self._after = self._after, self._values
        return self._values

    def rescaled_(self, step: FeedbackStep) -> Tensor:
        """Return the values in the units of a later step's gradients, which they have from now on."""
        values = self.decided()
        then = self._step.loss_scale
        self._step, self._is_open = (
            step,
            False,
        )  # an outcome that never came is that of a skipped step
        if then is not None and step.loss_scale is not None and then is not step.loss_scale:
            if self._on_cuda:
                _keep(then, step.loss_scale)
            ratio = step.loss_scale / then
            if self._on_cuda or float(ratio) != 1.0:
                values.mul_(ratio)
        return values

    def unscaled(self) -> Tensor:
        """Return the values in the units of gradients that neither the loss scale nor the divisor has changed."""
        # Powers of two both: exact.
        values = self.decided()
        scale = self._step.loss_scale
        return values * self.divisor if scale is None else values * (self.divisor / scale)

    def take(self, rows: Tensor, step: FeedbackStep) -> Tensor:
        """Return the values of these blocks (int64, their places here), which are not here any more."""
        if self._on_cuda:
            _keep(self._values, *(() if self._after is None else (self._after,)))
        values = self.rescaled_(step).view(-1, BLOCK)
        others = (
            torch.ones(len(self.numbers), dtype=torch.bool)
            .index_fill_(0, rows, False)
            .nonzero()
            .view(-1)
        )
        self.numbers = self.numbers[others]
        self._values = values[others].view(-1)
        self._after = None
        return values[rows]


def _keep(*tensors: Tensor) -> None:
    # Another stream has made them, and would write to their memory before this one has read it.
    for tensor in tensors:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _scales(message: Tensor, numel: int) -> Tensor:
    return message[: 2 * num_blocks_of(numel)].view(torch.int16)
