"""Error feedback: what rounding takes from a node's sum is added to its next one.

    e = g + r           g: the sum of a node's gradients, r: its residual, zeros at first; float32
    send Q(e)           each element to the nearest code
    r <- e - Q(e)       if the optimizer makes its step; one that is skipped leaves r as it was

So errors do not add up: the sum of all that was sent is that of all gradients, but for one residual. A node has one
residual, of which the rank that encodes a block holds that part. Which rank it is depends on algorithm, chunks and
buckets; where they change, residuals move to the rank that needs them. With more than two nodes the second rounding, of
the sum, stays stochastic: it has no bias, and so needs no state, which would belong to one node's part of the sum.

Between runs residuals are kept in the units of gradients that no loss scale and no divisor has changed, summed over
ranks. They are powers of two: nothing is rounded.

Source: Seide et al. 2014 (Interspeech); Karimireddy et al. 2019 (arXiv:1901.09847).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.comm.codec.block_format import BLOCK, num_blocks_of
from lightning_hybrid.comm.codec.codec import Coder
from lightning_hybrid.comm.codec.padded_bucket import PaddedBucket
from lightning_hybrid.comm.codec.residual import FeedbackStep, Residual


class BucketFeedback:
    """The residuals of one bucket, as long as it is made and cut in one way: one for each range that is encoded.

    `begin`: the residual of the node in all its blocks, float32; None: zeros. `options`: of each `Residual`.
    """

    def __init__(
        self, padded: PaddedBucket, cut: tuple[Any, ...], begin: Tensor | None, **options: Any
    ) -> None:
        self.padded = padded
        self.cut = cut
        self.begin = begin
        self.residuals: dict[int, Residual] = {}  # by the first block, counted in the bucket
        self.step = FeedbackStep()
        self.num_sum = 0  # in which sum of all gradients it was last used
        self._options = options  # of a `Residual`

    def encode(self, flat: Tensor, ids: Tensor, message: Tensor, coder: Coder) -> None:
        """Write `flat`, a range of the bucket, and its residual into `message`. `ids`: a view of the bucket's."""
        first = int(ids.storage_offset())
        if (residual := self.residuals.get(first)) is None:
            residual = self.residuals[first] = self._new(
                first, num_blocks_of(flat.numel()), flat.device
            )
        residual.encode(flat, ids, message, coder, self.step)

    def _new(self, first: int, num_blocks: int, device: torch.device) -> Residual:
        values = torch.zeros(num_blocks * BLOCK, device=device)
        if self.begin is not None:
            known = self.begin[first * BLOCK : (first + num_blocks) * BLOCK]
            values[: known.numel()] = known
        padding = [
            ((block - first) * BLOCK + numel, (block - first + 1) * BLOCK)
            for block, numel in self.padded.partial
            if first <= block < first + num_blocks
        ]
        return Residual(
            self.padded.numbers[first : first + num_blocks],
            values,
            padding,
            step=self.step,
            **self._options,
        )


class ErrorFeedback:
    """The residuals of what this rank encodes, over the steps of a fit.

    Collective where `add_up_` is: every rank must call `bucket` and `load`, in the same order.

    Args:
        num_blocks: of all parameters, numbered as `BlockNumbers` does.
        device: of the gradients.
        add_up_: adds a float32 tensor up over the ranks of the node, in place; None: every node has one rank.
        is_leader: whether this rank is the first of its node.

    Attributes:
        may_skip: whether the optimizer skips steps; residuals then take twice the memory. To be set before the first.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        device: torch.device,
        add_up_: Callable[[Tensor], object] | None,
        is_leader: bool,
    ) -> None:
        self.may_skip = False
        self._num_blocks = num_blocks
        self._device = device
        self._add_up_ = add_up_
        self._is_leader = is_leader
        self._step = FeedbackStep()
        self._buckets: dict[int, BucketFeedback] = {}
        self._left: list[Residual] = []  # of buckets that are made or cut otherwise now
        self._loaded: Tensor | None = None  # of the whole node, until the next sum
        self._num_sums = 0

    def begin_step(self, loss_scale: Tensor | None) -> None:
        """Say by what the gradients of the next sum are multiplied (0-dim); None: by nothing."""
        self._step = FeedbackStep(loss_scale=loss_scale)

    def end_step(self, is_skipped: Tensor) -> None:
        """Say whether the optimizer has skipped the step of the last sum; 0-dim, bool."""
        self._step.is_skipped = is_skipped

    def bucket(
        self, index: int, padded: PaddedBucket, *, cut: tuple[Any, ...], divisor: int, is_last: bool
    ) -> BucketFeedback:
        """Return the residuals of a bucket of the sum that is being submitted.

        `cut`: what says, equally on every rank of the node, which rank encodes what of it.
        """
        found = self._buckets.get(index)
        if found is None or found.padded is not padded or found.cut != cut:
            begin = self._of_node(padded.numbers, padded.ids.device, divisor)
            if found is not None:
                self._left += found.residuals.values()
            options = {
                "divisor": divisor,
                "may_skip": self.may_skip,
                "on_cuda": self._device.type == "cuda",
            }
            found = self._buckets[index] = BucketFeedback(padded, cut, begin, **options)
        else:
            found.begin = None  # every range has its own by now
        found.step = self._step
        found.num_sum = self._num_sums
        if is_last:
            self._num_sums += 1
            self._loaded = None
            self._left = [one for one in self._left if len(one.numbers)]
        return found

    def _of_node(self, numbers: Tensor, device: torch.device, divisor: int) -> Tensor | None:
        # The residual of the node in these blocks, on every rank, in units of this step; None: there is none yet.
        if self._loaded is not None:
            rows = self._loaded.view(-1, BLOCK)[numbers].to(device)
            scale = self._step.loss_scale
            return (rows / divisor if scale is None else rows * (scale / divisor)).flatten()
        if self._num_sums == 0:
            return None
        begin = torch.zeros(len(numbers), BLOCK, device=device)
        place = torch.full((self._num_blocks,), -1)
        place[numbers] = torch.arange(len(numbers))
        for residual in self._of_earlier_sums():
            at = place[residual.numbers]
            if len(rows := (at >= 0).nonzero().view(-1)):
                begin[at[rows]] = residual.take(rows, self._step)
        if self._add_up_ is not None:
            self._add_up_(
                begin.view(-1)
            )  # of each block one rank has the residual, and the others zeros
        return begin.view(-1)

    def _of_earlier_sums(self) -> Iterator[Residual]:
        # Others of this sum are being encoded by threads, and hold other blocks.
        yield from self._left
        for bucket in self._buckets.values():
            if bucket.num_sum < self._num_sums:
                yield from bucket.residuals.values()

    # ---- between runs ----------------------------------------------------------------------------------------------

    def share(self, begin: int, end: int, device: torch.device) -> Tensor:
        """Return the residuals of the blocks from `begin` to `end`, 256 elements each; zeros where others hold them.

        `device`: that of the gradients.

        Added up over the ranks of the node it is the residual of the node. Only between two steps.
        """
        found = torch.zeros(end - begin, BLOCK, device=device)
        if self._loaded is not None:
            if self._is_leader:
                found.copy_(self._loaded.view(-1, BLOCK)[begin:end])
            return found.view(-1)
        for residual in (
            *self._left,
            *(one for some in self._buckets.values() for one in some.residuals.values()),
        ):
            rows = ((residual.numbers >= begin) & (residual.numbers < end)).nonzero().view(-1)
            if len(rows):
                found[residual.numbers[rows] - begin] = residual.unscaled().view(-1, BLOCK)[rows]
        return found.view(-1)

    def load(self, values: Tensor | None) -> None:
        """Go on with the residual of the node: 256 elements for each block, float32, in the units of `share`.

        None: zeros.
        """
        self._buckets = {}
        self._left = []
        self._num_sums = 0
        self._loaded = None if values is None else values.cpu()

    def release_device(self) -> None:
        """Keep this rank's share on the CPU, for `share`: the fit is over."""
        self._loaded = self.share(0, self._num_blocks, self._device).cpu()
        self._is_leader = True
        self._buckets = {}
        self._left = []
