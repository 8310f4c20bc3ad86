"""Tensor-parallel embedding, output layer and cross-entropy, sliced over tokens or classes."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid.strategy.node_slices.sliced_layers import ColumnLinear, Slice, SlicedLayer

# Target whose loss is 0, as in `torch.nn.functional.cross_entropy`.
IGNORED = -100


def token_losses(head: nn.Linear, features: Tensor, targets: Tensor) -> Tensor:
    """Compute the cross-entropy of each target. If `head` is sliced, no logits are communicated.

        loss_i = log sum_c exp(z_ic) - z_i,target(i)          z = W x + bias, in fp32 at least

    If `node_slices` slices the head by classes, this is a collective in training: every rank of the node must call it,
    in the same order, with features of the same shape.

    Shapes: features `[b, ..., n]`; targets `[b, ...]` of int64 in 0 ... classes - 1, or -100; losses `[b, ...]`, as
    `torch.nn.functional.cross_entropy(reduction="none")` returns them. The loss of a target -100 is 0.

    >>> token_losses(nn.Linear(4, 3), torch.zeros(2, 5, 4), torch.full((2, 5), -100)).sum()
    tensor(0., grad_fn=<SumBackward0>)
    """
    sliced = vars(head).get("sliced")
    if isinstance(sliced, VocabularyHead) and not sliced.ranks.is_whole:
        logits = sliced.logits_of_slice(features)
        return sliced.losses_of(logits, targets)

    logits = head(features)
    wide_logits = _at_least_fp32(logits)
    rows = wide_logits.flatten(0, -2)  # the last dimension holds the classes
    flat_targets = targets.flatten()
    losses = F.cross_entropy(rows, flat_targets, ignore_index=IGNORED, reduction="none")
    return losses.view(targets.shape)


class VocabularyEmbedding(SlicedLayer):
    """Embedding layer sliced over its vocabulary, from tokens `[b, ...]` to vectors `[b, ..., n]`."""

    dims: ClassVar[dict[str, int]] = {"weight": 0}

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of this rank's tokens.

        Each rank looks up the tokens of all ranks of the node in its slice.
        """
        ranks = self.ranks
        ranks.refuse_unequal_batches(tokens)
        tokens = ranks.gather(tokens)
        indices, is_here = _rows_in_slice(tokens, self.slices["weight"])
        weight = self.averaged_parameter("weight")
        rows = F.embedding(indices, weight)
        is_elsewhere = ~is_here
        rows = rows.masked_fill(is_elsewhere[..., None], 0)

        padding = self.layer.padding_idx
        if padding is not None:
            # The padding token gets no gradient.
            is_padding = tokens == padding
            rows = rows.detach().where(is_padding[..., None], rows)
        return ranks.reduce_scatter(rows)


class VocabularyHead(ColumnLinear):
    """Output layer sliced over classes, from features `[b, ..., n]` to logits `[b, ..., classes]`."""

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of this rank's samples for all classes."""
        logits_of_slice = self.logits_of_slice(features)
        logits = self.ranks.exchange_logits(logits_of_slice)
        weight_slice = self.slices["weight"]
        num_classes = weight_slice.whole_shape[0]
        return logits[..., :num_classes]

    def logits_of_slice(self, features: Tensor) -> Tensor:
        """Return the logits of this rank's classes for all samples of the node, `[g b, ..., classes / g]`.

        The last slice may be padded to the length of the others. Padded classes have probability zero.
        """
        self.ranks.refuse_unequal_batches(features)
        features = self.ranks.gather(features)
        logits = super().forward(features)
        weight_slice = self.slices["weight"]
        num_classes = len(weight_slice.index)
        num_padded = weight_slice.length - num_classes
        if num_padded == 0:
            return logits
        logits = logits[..., :num_classes]
        return F.pad(logits, (0, num_padded), value=-torch.inf)

    def losses_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy of this rank's targets, given logits that are sliced over classes.

            loss_i = log sum_c exp(z_ic - max_i) - (z_i,target(i) - max_i)          max_i = max_c z_ic

        The maxima cancel, and keep the exponentials from overflowing. Maxima and sums are taken over the classes of
        all ranks of the node.

        Args:
            logits: Logits of all samples of the node for this rank's classes, `[g b, ..., classes / g]`.
            targets: Targets of this rank's samples, `[b, ...]`.
        """
        ranks = self.ranks
        wide_logits = _at_least_fp32(logits)
        largest = wide_logits.detach().amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=ranks.group)
        shifted = wide_logits - largest

        all_targets = ranks.gather(targets)
        indices, is_here = _rows_in_slice(all_targets, self.slices["weight"], ignored=IGNORED)
        class_indices = indices[..., None]
        target_logits = shifted.gather(-1, class_indices)[..., 0]
        target_logits_here = torch.where(is_here, target_logits, 0.0)
        exp_sums_here = shifted.exp().sum(-1)

        # Both sums over the ranks' classes are sent in one message.
        terms_here = torch.stack([exp_sums_here, target_logits_here], -1)
        terms = ranks.reduce_scatter(terms_here)
        exp_sums, target_logits = terms.unbind(-1)
        losses = exp_sums.log() - target_logits
        is_counted = targets != IGNORED
        return torch.where(is_counted, losses, 0.0)


def _at_least_fp32(logits: Tensor) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype)


def _rows_in_slice(
    numbers: Tensor, weight_slice: Slice, ignored: int | None = None
) -> tuple[Tensor, Tensor]:
    """Convert token or class numbers to indices in this rank's slice, and return a mask of the numbers in the slice.

    A number that another rank holds gets the index 0 and is not in the mask.

    Args:
        numbers: Tokens or classes, counted over the whole vocabulary.
        weight_slice: Slice of the weight that this rank holds.
        ignored: Number outside the vocabulary that is allowed. None: there is none.

    Raises:
        IndexError: A number is outside the vocabulary. Raised on every rank of the node.
    """
    num_rows = weight_slice.whole_shape[0]
    is_valid = (numbers >= 0) & (numbers < num_rows)
    # This is checked on a CPU only, as torch does. On CUDA the host would wait for the device.
    if not numbers.is_cuda:
        is_allowed = is_valid | (numbers == ignored)
        if not bool(is_allowed.all()):
            exception = ""
            if ignored is not None:
                exception = f", or {ignored} to be ignored in the loss"
            raise IndexError(
                f"`targets` or tokens (from {numbers.min()} to {numbers.max()}) must be from 0 to "
                f"{num_rows - 1}{exception}. Check the labels and the tokenizer."
            )

    first_row = weight_slice.ranks.rank * weight_slice.length
    indices = numbers - first_row
    is_here = is_valid & (indices >= 0) & (indices < weight_slice.length)
    return indices.where(is_here, 0), is_here
