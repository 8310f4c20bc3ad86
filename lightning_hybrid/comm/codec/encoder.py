"""How a tensor between nodes is encoded: with stochastic rounding, or to the nearest code with error feedback."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_hybrid.comm.codec.block_format import BLOCK, OF_A_SUM, num_blocks_of
from lightning_hybrid.comm.codec.codec import Coder
from lightning_hybrid.comm.codec.error_feedback import BucketFeedback

_MASK = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The blocks of a tensor on its way between nodes, and the place in the training at which it was submitted.

    `feedback`: the residuals that are added before a node's sum is rounded; None: there are none.
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
        """Return the blocks of a tensor to sum now. `ids`: their numbers, int32, on its device; None: from zero on."""
        if ids is None:
            ids = torch.arange(num_blocks_of(flat.numel()), dtype=torch.int32, device=flat.device)
        return cls(coder=coder, ids=ids, step=coder.step, turn=coder.turn, feedback=feedback)

    def since(self, begin: int) -> Blocks:
        """Return the blocks from element `begin` on, a multiple of 256."""
        return replace(self, ids=self.ids[begin // BLOCK :]) if begin else self

    def encode(self, flat: Tensor, message: Tensor, *, sender: int) -> None:
        """Write `flat` (1-D, float32), which begins with the first of these blocks, into `message` (uint8).

        A matrix holds in each row the message of as many blocks as have room there, of the last fewer.
        """
        if self.feedback is not None and sender != OF_A_SUM and len(self.ids) > 0:
            self.feedback.encode(flat, self.ids, message, self.coder)
            return
        missing = num_blocks_of(flat.numel()) - len(self.ids)
        # Shards of equal size may go beyond the tensor: what is there are zeros, which every noise leaves zeros.
        ids = torch.nn.functional.pad(self.ids, (0, missing)) if missing > 0 else self.ids
        key = self.coder.codec.seed & _MASK, self.step & _MASK, sender, self.turn & _MASK
        self.coder.encode(flat, ids, key, message)
