"""Encoding of tensors for reductions between nodes, with stochastic rounding or error feedback."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_hybrid.comm.codec.block_format import BLOCK, OF_A_SUM, NoiseKey, num_blocks_of
from lightning_hybrid.comm.codec.codec import Coder
from lightning_hybrid.comm.codec.error_feedback import BucketFeedback

_MASK = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Block numbers and rounding options with which a tensor is encoded for a reduction.

    Args:
        coder: Codec on the tensor's device.
        ids: Number of each block, int32.
        step: Training step.
        turn: Number of times that all gradients were reduced in this step before.
        feedback: Residuals to add before a node's sum is rounded, or None without error feedback.
    """

    coder: Coder
    ids: Tensor
    step: int
    turn: int
    feedback: BucketFeedback | None = None

    @classmethod
    def of(
        cls,
        coder: Coder,
        flat: Tensor,
        ids: Tensor | None = None,
        feedback: BucketFeedback | None = None,
    ) -> Blocks:
        """Create the block numbers and options of a tensor for the coder's current step.

        Args:
            coder: Codec on the tensor's device.
            flat: Tensor to sum, 1-D.
            ids: Number of each block, int32, on the tensor's device. If None, blocks are numbered from zero.
            feedback: Residuals to add before a node's sum is rounded, or None without error feedback.
        """
        if ids is None:
            ids = torch.arange(num_blocks_of(flat.numel()), dtype=torch.int32, device=flat.device)
        return cls(coder=coder, ids=ids, step=coder.step, turn=coder.turn, feedback=feedback)

    def since(self, begin: int) -> Blocks:
        """Return the blocks from element `begin` onwards, where `begin` must be a multiple of 256."""
        if begin == 0:
            return self
        return replace(self, ids=self.ids[begin // BLOCK :])

    def encode(self, flat: Tensor, message: Tensor, *, sender: int) -> None:
        """Encode a float32 tensor into `message`, with error feedback if it is enabled.

        Args:
            flat: Elements to encode, 1-D, float32. They begin with the first of these blocks.
            message: Encoded blocks, uint8. Each row of a matrix holds as many blocks as fit, and the last row may hold
                fewer.
            sender: Number on which the rounding noise depends.
        """
        if self.feedback is not None and sender != OF_A_SUM and len(self.ids) > 0:
            self.feedback.encode(flat, self.ids, message, self.coder)
            return

        # Shards of equal size may extend beyond the tensor. The elements there are zeros, which are encoded exactly.
        ids = self.ids
        num_missing = num_blocks_of(flat.numel()) - len(ids)
        if num_missing > 0:
            ids = torch.nn.functional.pad(ids, (0, num_missing))
        key: NoiseKey = (
            self.coder.codec.seed & _MASK,
            self.step & _MASK,
            sender,
            self.turn & _MASK,
        )
        self.coder.encode(flat, ids, key, message)
