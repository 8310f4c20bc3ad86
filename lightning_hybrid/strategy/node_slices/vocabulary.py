"""The two ends of a language model, or of a classifier, cut by tokens or classes: embedding, head and its losses."""

from __future__ import annotations

from typing import ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid.strategy.node_slices.sliced_layers import ColumnLinear, Slice, SlicedLayer

# The target that counts as no loss, as in `torch.nn.functional.cross_entropy`.
IGNORED = -100


def token_losses(head: nn.Linear, features: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each target; of a head that is cut by classes, without sending its logits.

        loss_i = log sum_c exp(z_ic) - z_i,target(i)          z = W x + bias; fp32 at least

    Where `node_slices` cuts the head it is collective in training, with as many features on every rank of the node.

    Shapes: features `[b, ..., n]`, targets `[b, ...]` of int64 in 0 ... classes - 1, or -100 -> losses `[b, ...]`, as
    of `torch.nn.functional.cross_entropy(reduction="none")`: 0 for -100.

    >>> token_losses(nn.Linear(4, 3), torch.zeros(2, 5, 4), torch.full((2, 5), -100)).sum()
    tensor(0., grad_fn=<SumBackward0>)
    """
    sliced = vars(head).get("sliced")
    if sliced is not None and not sliced.ranks.is_whole:
        return cast("Tensor", sliced.losses_of(sliced.all_logits(features), targets))
    logits = head(features)
    rows = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(
        0, -2
    )  # classes are last
    return F.cross_entropy(rows, targets.flatten(), ignore_index=IGNORED, reduction="none").view(
        targets.shape
    )


class VocabularyEmbedding(SlicedLayer):
    """An embedding cut by tokens: numbers of tokens `[b, ...]` -> `[b, ..., n]`."""

    dims: ClassVar[dict[str, int]] = {"weight": 0}

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up this rank's tokens for all ranks."""
        self.ranks.refuse_unequal_batches(tokens)
        tokens = self.ranks.gather(tokens)
        place, is_here = _own_places(tokens, self.slices["weight"])
        rows = F.embedding(place, self.averaged("weight")).masked_fill(~is_here[..., None], 0)
        if self.layer.padding_idx is not None:  # takes no gradient
            rows = rows.detach().where((tokens == self.layer.padding_idx)[..., None], rows)
        return self.ranks.sum_to_own(rows)


class VocabularyHead(ColumnLinear):
    """A last layer cut by classes: `[b, ..., n]` -> logits `[b, ..., classes]`, or losses by `token_losses`."""

    def forward(self, features: Tensor) -> Tensor:
        """Compute the logits of this rank's images."""
        return self.ranks.own_logits(self.all_logits(features))[
            ..., : self.slices["weight"].shape[0]
        ]

    def all_logits(self, features: Tensor) -> Tensor:
        """Compute those of own classes, for all images; what fills up the last slice has no probability."""
        self.ranks.refuse_unequal_batches(features)
        logits = super().forward(self.ranks.gather(features))
        cut = self.slices["weight"]
        num = len(cut.index)
        return (
            logits
            if num == cut.length
            else F.pad(logits[..., :num], (0, cut.length - num), value=-torch.inf)
        )

    def losses_of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the cross-entropy of this rank's targets from logits of own classes, `[g b, ..., classes / g]`."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = wide.detach().amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.ranks.group)
        shifted = wide - largest
        place, is_here = _own_places(self.ranks.gather(targets), self.slices["weight"], but=IGNORED)
        chosen = torch.where(is_here, shifted.gather(-1, place[..., None])[..., 0], 0.0)
        sums, own = self.ranks.sum_to_own(torch.stack([shifted.exp().sum(-1), chosen], -1)).unbind(
            -1
        )
        return torch.where(targets != IGNORED, sums.log() - own, 0.0)


def _own_places(numbers: Tensor, cut: Slice, but: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the rows of tokens or classes in this rank's slice, 0 for others, and which they are.

    Raises:
        IndexError: on every rank of the node, for a number that there is not, save `but`.
    """
    is_known = (numbers >= 0) & (numbers < cut.shape[0])
    # On a CPU, as torch does; on CUDA the host would wait.
    if not numbers.is_cuda and not bool((is_known | (numbers == but)).all()):
        raise IndexError(
            f"`targets` or tokens (={numbers.min()} to {numbers.max()}) must be from 0 to {cut.shape[0] - 1}"
            f"{'' if but is None else f', or {but}, which counts as no loss'}. Check the labels."
        )
    own = numbers - cut.ranks.rank * cut.length
    is_here = is_known & (own >= 0) & (own < cut.length)
    return own.where(is_here, 0), is_here
