"""InfoNCE, SigLIP and Barlow Twins losses over the pairs of all ranks.

No rank holds all embeddings or a matrix of all pairs. Embeddings pass from rank to rank in blocks
(`exchange.py`). Products of `block x block` pairs are computed, used and dropped, in forward and
again in backward (`pair_functions.py`). Sums follow one binary tree over blocks of the global
batch. Losses and gradients are therefore bit-identical on 1, 2, 4, ... ranks if `block` divides the
pairs of each rank into 2^k blocks.

The loss is that of the global batch, and is equal on all ranks. Its gradient with respect to a
rank's embeddings is multiplied by the number of ranks, because DistributedDataParallel takes the
mean over ranks. As a result, a parameter receives the gradient of the global loss.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid.checks import plain_value, require_number, require_whole
from lightning_hybrid.contrastive.exchange import Peers
from lightning_hybrid.contrastive.pair_functions import (
    Correlation,
    InfoNCEOfBlocks,
    LimitedExponential,
    SigLIPOfBlocks,
    Standardized,
    without_autocast,
)

_LARGEST_SCALE = 100.0
"""Upper limit of the learned scale, as in CLIP (Radford et al. 2021, section 2.5)."""


class PairLoss(nn.Module):
    """Base class of losses on two views, in which rows with the same index form a matching pair.

    The views have shape `"pairs features"`. Every rank must call the loss, with the same number of
    pairs. The loss is computed in fp32, or in fp64 if the first view is fp64, even under
    `torch.autocast` and in half precision.

    Args:
        block: Number of rows of a block. Memory grows with its square, and the rounding of the result depends on it.

    Raises:
        ValueError: Raised in forward, on every rank, if the views differ in shape, are not matrices, or have different
            shapes on different ranks.
    """

    # The gradients of the chunks' losses do not add up to the gradient of the batch's loss.
    couples_the_batch: bool = True
    spans_all_ranks: bool = True

    def __init__(self, *, block: int = 256) -> None:
        super().__init__()
        block = plain_value(block)
        require_whole(
            "block", block, "pairs are compared in blocks of this number of rows. Set block=256"
        )
        self.block = block
        self._peers: Peers | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_peers": None}  # process groups are valid only in this run

    def peers(self) -> Peers:
        """Return the ranks that take part in the loss, with their process group.

        The first call of a run is collective: every rank must make it, in the same order.
        """
        world = None
        if dist.is_available() and dist.is_initialized():
            world = dist.group.WORLD
        if self._peers is None or self._peers.world is not world:
            self._peers = Peers(world)
        return self._peers

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the loss of the global batch.

        Collective: every rank must call it, in the same order. The backward pass is collective as well.
        """
        is_pair = a.dim() == 2 and a.shape == b.shape and len(a) > 0
        sizes = tuple(a.shape) if is_pair else (0, 0)
        # This precedes any error of this rank, because the other ranks wait for this rank's shapes.
        self.peers().check_same(sizes, device=a.device)
        if not is_pair:
            raise ValueError(
                f"`a` and `b` (of shapes {tuple(a.shape)} and {tuple(b.shape)}) must be two matrices of the same "
                "shape (pairs x features), because row i of `a` and row i of `b` form a pair. Pass tensors with two "
                "dimensions."
            )
        dtype = torch.float64 if a.dtype is torch.float64 else torch.float32
        with without_autocast(a.device):
            return self.loss_of_views(a.to(dtype), b.to(dtype))

    def loss_of_views(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the loss of two views that are already in fp32 or fp64.

        Collective: every rank must call it, in the same order.
        """
        raise NotImplementedError


class InfoNCE(PairLoss):
    """InfoNCE loss with negatives from all ranks, as in CLIP or, with `both_views`, SimCLR's NT-Xent.

        z = (a, b), normalized;  l_ij = z_i . z_j / temperature;  p(i): the partner of i in the other view
        loss = mean over 2 N rows of  log sum_j exp(l_ij) - l_ip(i)
        j runs over the other view (N rows), or with `both_views` over both except for i itself (2 N - 1)

    This is the cross entropy for predicting each row's partner, averaged over both views. N is the
    number of pairs of all W ranks. A rank sends (W - 1) / W * N * (16 d + 8) bytes per step, for d
    features in fp32.

    Args:
        temperature: Number, or None for the parameter `logit_scale`, which is learned as in CLIP. The parameter is
            log(1 / temperature), starts at log(1 / 0.07), and its exponential is limited to 100. Above the limit, it
            receives only gradients that decrease it.
        both_views: Whether rows of the same view are also used as negatives.
        block: As in `PairLoss`.

    Source: van den Oord et al. 2018 (arXiv:1807.03748); Chen et al. 2020 (arXiv:2002.05709);
    Radford et al. 2021 (arXiv:2103.00020).

    >>> a = torch.eye(4)
    >>> round(float(InfoNCE(temperature=1.0)(a, a)), 4) == round(math.log(math.e + 3) - 1, 4)
    True
    """

    def __init__(
        self, temperature: float | None = 0.1, *, both_views: bool = False, block: int = 256
    ) -> None:
        super().__init__(block=block)
        temperature = plain_value(temperature)
        if temperature is None:
            self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        elif not 0 < temperature < math.inf:
            raise ValueError(
                f"`temperature` (={temperature}) must be a positive number, because similarities are divided by it. "
                "Set temperature=0.1, or None for a learned temperature."
            )
        self.temperature = temperature
        self.both_views = both_views

    def loss_of_views(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the InfoNCE loss of two views that are already in fp32 or fp64.

        Collective: every rank must call it, in the same order.
        """
        a = F.normalize(a, dim=1)
        b = F.normalize(b, dim=1)
        if self.temperature is None:
            scale = LimitedExponential.apply(self.logit_scale.to(a.dtype), _LARGEST_SCALE)
        else:
            scale = a.new_tensor(1 / self.temperature)
        return InfoNCEOfBlocks.apply(a, b, scale, self.peers(), self.block, self.both_views)


class SigLIP(PairLoss):
    """SigLIP loss, which classifies each of the N x N pairs of the global batch as matching or not.

        l_ij = exp(logit_scale) a_i . b_j + logit_bias;  y_ij = 1 for i = j, else -1
        loss = sum_ij log(1 + exp(-y_ij l_ij)) / N

    Views a and b are normalized. Scale and bias are parameters that start at log(10) and -10. A
    rank sends (W - 1) / W * N * 12 d bytes per step in fp32, with W ranks and d features.

    Source: Zhai et al. 2023 (arXiv:2303.15343).
    """

    def __init__(self, *, block: int = 256) -> None:
        super().__init__(block=block)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(10.0)))
        self.logit_bias = nn.Parameter(torch.tensor(-10.0))

    def loss_of_views(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the SigLIP loss of two views that are already in fp32 or fp64.

        Collective: every rank must call it, in the same order.
        """
        a = F.normalize(a, dim=1)
        b = F.normalize(b, dim=1)
        scale = self.logit_scale.to(a.dtype).exp()
        bias = self.logit_bias.to(a.dtype)
        return SigLIPOfBlocks.apply(a, b, scale, bias, self.peers(), self.block)


class BarlowTwins(PairLoss):
    """Barlow Twins loss, which drives the cross-correlation of two views towards the identity.

        c = standardized(a)^T standardized(b) / N        mean 0 and variance 1 over the global batch
        loss = sum_i (1 - c_ii)^2 + off_diagonal * sum_i!=j c_ij^2

    For d features, ranks exchange sums of d x d numbers, but no embeddings.

    Args:
        off_diagonal: Weight of the correlations between different features.
        eps: Number added to variances, as in the BatchNorm that the paper uses.
        block: As in `PairLoss`.

    Source: Zbontar et al. 2021 (arXiv:2103.03230).
    """

    def __init__(self, off_diagonal: float = 0.005, *, eps: float = 1e-5, block: int = 256) -> None:
        super().__init__(block=block)
        off_diagonal = plain_value(off_diagonal)
        eps = plain_value(eps)
        require_number(
            "off_diagonal",
            off_diagonal,
            "the off-diagonal terms of the loss are multiplied by it. Set off_diagonal=0.005",
        )
        require_number(
            "eps", eps, "with a negative value, the root of a variance may not exist. Set eps=1e-5"
        )
        self.off_diagonal = off_diagonal
        self.eps = eps

    def loss_of_views(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the Barlow Twins loss of two views that are already in fp32 or fp64.

        Collective: every rank must call it, in the same order.
        """
        peers = self.peers()
        a = Standardized.apply(a, peers, self.block, self.eps)
        b = Standardized.apply(b, peers, self.block, self.eps)
        c = Correlation.apply(a, b, peers, self.block)
        on_diagonal = (1 - c.diagonal()).square().sum()
        return on_diagonal + self.off_diagonal * (c.square().sum() - c.diagonal().square().sum())
