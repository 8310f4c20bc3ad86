"""Error feedback, which adds a codec's rounding errors to the next step's gradients.

    e = g + r           g: sum of a node's gradients, r: residual of the node, initially zero; float32
    send Q(e)           with each element rounded to the nearest code
    r <- e - Q(e)       if the optimizer takes the step; a skipped step leaves r unchanged

Errors therefore do not accumulate: the sum of all sent values equals the sum of all gradients, up to one residual. Each
node has one residual. The rank that encodes a block holds the residual of that block. The algorithm, the chunks and the
buckets determine this rank. When they change, residuals move to other ranks. With more than two nodes, the sum is
rounded a second time. The second rounding is stochastic, so it is unbiased and needs no state.

Checkpoints store residuals in units of the sum of all ranks' gradients, without loss scale and divisor. The conversion
is exact, because loss scale and divisor are powers of two.

Sources: Seide et al. 2014 (Interspeech); Karimireddy et al. 2019 (arXiv:1901.09847).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.comm.codec.block_format import BLOCK, num_blocks_of
from lightning_hybrid.comm.codec.codec import Coder
from lightning_hybrid.comm.codec.padded_bucket import PaddedBucket
from lightning_hybrid.comm.codec.residual import FeedbackStep, Residual, ResidualOptions


class BucketFeedback:
    """Error-feedback residuals of one bucket, with one residual for each range that this rank encodes.

    The object is used as long as neither the layout of the bucket nor `split_rule` changes.

    Args:
        padded: Bucket with padded gradients.
        split_rule: Values that determine which rank encodes which range. They are equal on all ranks of the node.
        initial_residual: Initial residual of the node in all blocks of the bucket, float32. None means zeros.
        options: Options of all residuals.
    """

    def __init__(
        self,
        padded: PaddedBucket,
        split_rule: tuple[Any, ...],
        initial_residual: Tensor | None,
        options: ResidualOptions,
    ) -> None:
        self.padded = padded
        self.split_rule = split_rule
        self.initial_residual = initial_residual
        self.residuals: dict[int, Residual] = {}  # by the index of the first block in the bucket
        self.step = FeedbackStep()
        self.num_sum = 0  # index of the last reduction of all gradients that used this object
        self._options = options

    def encode(self, flat: Tensor, ids: Tensor, message: Tensor, coder: Coder) -> None:
        """Add the residual to a range of the bucket, and encode the sum into `message`.

        Args:
            flat: Elements to encode, 1-D, float32.
            ids: Number of each block, a view of the bucket's block numbers.
            message: Encoded blocks, uint8.
            coder: Codec on the tensor's device.
        """
        first = int(ids.storage_offset())  # index of the first block in the bucket
        residual = self.residuals.get(first)
        if residual is None:
            num_blocks = num_blocks_of(flat.numel())
            residual = self._new_residual(first, num_blocks, flat.device)
            self.residuals[first] = residual
        residual.encode(flat, ids, message, coder, self.step)

    def is_for(self, padded: PaddedBucket, split_rule: tuple[Any, ...]) -> bool:
        """Return whether these residuals belong to a bucket whose ranges are still the same."""
        return self.padded is padded and self.split_rule == split_rule

    def _new_residual(self, first: int, num_blocks: int, device: torch.device) -> Residual:
        end = first + num_blocks
        values = torch.zeros(num_blocks * BLOCK, device=device)
        if self.initial_residual is not None:
            initial = self.initial_residual[first * BLOCK : end * BLOCK]
            values[: initial.numel()] = initial

        padding = []
        for block in self.padded.partial:
            if first <= block.index < end:
                block_begin = (block.index - first) * BLOCK
                gradient_end = block_begin + block.numel
                padding.append((gradient_end, block_begin + BLOCK))

        numbers = self.padded.numbers[first:end]
        return Residual(numbers, values, padding, step=self.step, options=self._options)


class ErrorFeedback:
    """Error-feedback residuals of all blocks that this rank encodes during a training run.

    If `add_up_` is given, `bucket` and `load` are collective: every rank of the node must call them, in the same order.

    Args:
        num_blocks: Number of blocks of all parameters, as counted by `BlockNumbers`.
        device: Device of the gradients.
        add_up_: Function that sums a float32 tensor over the ranks of the node, in place. None if each node has only
            one rank.
        is_leader: Whether this rank is the first rank of its node.

    Attributes:
        may_skip: Whether the optimizer may skip steps, in which case residuals take twice the memory. It must be set
            before the first reduction.
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
        self._sum_over_node_ = add_up_
        self._is_leader = is_leader
        self._step = FeedbackStep()
        self._buckets: dict[int, BucketFeedback] = {}
        # Residuals of buckets whose layout or split rule has changed.
        self._retired: list[Residual] = []
        # Residual of the node from `load`, until the next reduction.
        self._loaded: Tensor | None = None
        self._num_sums = 0

    def begin_step(self, loss_scale: Tensor | None) -> None:
        """Set the loss scale of the next step's gradients, or None if they are not scaled.

        The loss scale is a 0-dim tensor.
        """
        self._step = FeedbackStep(loss_scale=loss_scale)

    def end_step(self, is_skipped: Tensor) -> None:
        """Record whether the optimizer skipped the last step.

        `is_skipped` is a 0-dim bool tensor.
        """
        self._step.is_skipped = is_skipped

    def bucket(
        self,
        index: int,
        padded: PaddedBucket,
        *,
        split_rule: tuple[Any, ...],
        divisor: int,
        is_last: bool,
    ) -> BucketFeedback:
        """Return the residuals of a bucket for its next reduction.

        Args:
            index: Index of the bucket.
            padded: Bucket with padded gradients.
            split_rule: Values that determine which rank encodes which range. They are equal on all ranks of the node.
            divisor: Number by which gradients were divided before the reduction.
            is_last: Whether this is the last bucket of the step's gradients.
        """
        feedback = self._buckets.get(index)
        if feedback is not None and feedback.is_for(padded, split_rule):
            feedback.initial_residual = None  # every range has its own residual now
        else:
            new_feedback = self._new_feedback(padded, split_rule, divisor)
            if feedback is not None:
                self._retired += feedback.residuals.values()
            feedback = new_feedback
            self._buckets[index] = feedback

        feedback.step = self._step
        feedback.num_sum = self._num_sums
        if is_last:
            self._num_sums += 1
            self._loaded = None
            # Residuals whose blocks have all been taken by new buckets are dropped.
            self._retired = [residual for residual in self._retired if len(residual.numbers) > 0]
        return feedback

    def _new_feedback(
        self, padded: PaddedBucket, split_rule: tuple[Any, ...], divisor: int
    ) -> BucketFeedback:
        initial_residual = self._residual_of_node(padded.numbers, padded.ids.device, divisor)
        is_on_cuda = self._device.type == "cuda"
        options = ResidualOptions(divisor=divisor, may_skip=self.may_skip, on_cuda=is_on_cuda)
        return BucketFeedback(padded, split_rule, initial_residual, options)

    def _residual_of_node(
        self, numbers: Tensor, device: torch.device, divisor: int
    ) -> Tensor | None:
        """Return the node's residual of some blocks at this step's loss scale, or None if there is none.

        Collective within a node of several ranks, unless the residual comes from `load` or there is none.
        """
        if self._loaded is not None:
            blocks = self._loaded.view(-1, BLOCK)
            return self._scaled(blocks[numbers].to(device), divisor).flatten()
        if self._num_sums == 0:
            return None

        begin = self._take_residuals(numbers, device).view(-1)
        if self._sum_over_node_ is not None:
            # For each block, one rank has the residual and all other ranks have zeros.
            self._sum_over_node_(begin)
        return begin

    def _scaled(self, unscaled: Tensor, divisor: int) -> Tensor:
        """Convert residuals from the units of `share` to those of this step's gradients."""
        loss_scale = self._step.loss_scale
        if loss_scale is None:
            return unscaled / divisor
        return unscaled * (loss_scale / divisor)

    def _take_residuals(self, numbers: Tensor, device: torch.device) -> Tensor:
        """Take some blocks out of this rank's residuals, and return them as rows of a matrix.

        Blocks of other ranks are zero.
        """
        taken = torch.zeros(len(numbers), BLOCK, device=device)
        # The row of each block in `taken`, or -1 if the block is not requested.
        row_of_block = torch.full((self._num_blocks,), -1)
        row_of_block[numbers] = torch.arange(len(numbers))

        for residual in self._residuals_of_earlier_sums():
            target_rows = row_of_block[residual.numbers]
            is_requested = target_rows >= 0
            rows = is_requested.nonzero().view(-1)
            if len(rows) > 0:
                taken[target_rows[rows]] = residual.take(rows, self._step)
        return taken

    def _residuals_of_earlier_sums(self) -> Iterator[Residual]:
        # Residuals of the current reduction are left out, because they hold other blocks and are in use by threads.
        yield from self._retired
        for bucket in self._buckets.values():
            if bucket.num_sum < self._num_sums:
                yield from bucket.residuals.values()

    # ---- between runs ----------------------------------------------------------------------------------------------

    def share(self, begin: int, end: int, device: torch.device) -> Tensor:
        """Return this rank's residuals of a range of blocks, with zeros for blocks of other ranks.

        The sum over the ranks of a node is the residual of the node. Call this method only between two steps.

        Args:
            begin: Number of the first block.
            end: Number of the last block, plus one.
            device: Device of the gradients.
        """
        values = torch.zeros(end - begin, BLOCK, device=device)
        if self._loaded is not None:
            if self._is_leader:
                loaded_blocks = self._loaded.view(-1, BLOCK)
                values.copy_(loaded_blocks[begin:end])
            return values.view(-1)

        residuals = list(self._retired)
        for bucket in self._buckets.values():
            residuals.extend(bucket.residuals.values())
        for residual in residuals:
            numbers = residual.numbers
            is_in_range = (numbers >= begin) & (numbers < end)
            rows = is_in_range.nonzero().view(-1)
            if len(rows) > 0:
                unscaled = residual.unscaled().view(-1, BLOCK)
                target_rows = numbers[rows] - begin
                values[target_rows] = unscaled[rows]
        return values.view(-1)

    def load(self, values: Tensor | None) -> None:
        """Load a node's residual, for example from a checkpoint, in place of all current residuals.

        Args:
            values: Residual of all blocks with 256 elements each, float32, in the units of `share`. None means zeros.
        """
        self._buckets = {}
        self._retired = []
        self._num_sums = 0
        self._loaded = None
        if values is not None:
            self._loaded = values.cpu()

    def release_device(self) -> None:
        """Move this rank's residuals to the CPU at the end of training.

        `share` can still be called afterwards.
        """
        self._loaded = self.share(0, self._num_blocks, self._device).cpu()
        self._is_leader = True
        self._buckets = {}
        self._retired = []
