"""InfoNCE, SigLIP and Barlow Twins over the pairs of all ranks: no rank holds all embeddings, or a matrix of all pairs.

Embeddings go from rank to rank in blocks (`exchange.py`); products of `block x block` pairs are made, used and dropped,
in forward and again in backward. Sums follow one binary tree over blocks of the global batch, so that losses and
gradients have the same bits on 1, 2, 4, ... ranks, where `block` divides each rank's share into 2^k blocks.

A loss is the global batch's, the same on all ranks. Its gradient at a rank's embeddings is multiplied by the number of
ranks, as DistributedDataParallel takes the mean over ranks: what a parameter gets is the gradient of the global loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid.contrastive.exchange import PairLoss, Peers, TreeSum


class InfoNCE(PairLoss):
    """Cross entropy of each row's partner among all rows, both ways (CLIP), or among both views (SimCLR's NT-Xent).

        z = (a, b), normalised;  l_ij = z_i . z_j / temperature;  p(i): the partner of i in the other view
        loss = mean over 2 N rows of  log sum_j exp(l_ij) - l_ip(i)
        j runs over the other view (N rows), or with `both_views` over both but i itself (2 N - 1)

    N: pairs of all W ranks. Sent by a rank, of d features in fp32: (W - 1) / W * N * (16 d + 8) bytes a step.

    Args:
        temperature: a number, or None: the parameter `logit_scale`, learnt as in CLIP, exp(logit_scale) = 1 /
            temperature, which begins at log(1 / 0.07) and counts as 100 at most.
        both_views: whether rows of the own view are negatives too.
        block: as in `PairLoss`.

    Source: van den Oord et al. 2018 (arXiv:1807.03748); Chen et al. 2020 (arXiv:2002.05709); Radford et al. 2021
    (arXiv:2103.00020).

    >>> a = torch.eye(4)
    >>> round(float(InfoNCE(temperature=1.0)(a, a)), 4) == round(math.log(math.e + 3) - 1, 4)
    True
    """

    def __init__(self, temperature: float | None = 0.1, *, both_views: bool = False, block: int = 256) -> None:
        super().__init__(block=block)
        if temperature is not None and temperature <= 0:
            raise ValueError(f"`temperature` (={temperature}) must be above 0, or None for one that is learnt.")
        self.temperature, self.both_views = temperature, both_views
        if temperature is None:
            self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the loss of the global batch. Collective, and so is its backward."""
        a, b = (F.normalize(view, dim=1) for view in self.checked(a, b))
        if self.temperature is None:
            scale = self.logit_scale.to(a.dtype).exp().clamp(max=100)
        else:
            scale = a.new_tensor(1 / self.temperature)
        return _InfoNCE.apply(a, b, scale, self.peers(), self.block, self.both_views)


class SigLIP(PairLoss):
    """Of all pairs, whether they belong together: a logistic loss for each of N x N.

        l_ij = exp(logit_scale) a_i . b_j + logit_bias;  y_ij = 1 for i = j, else -1
        loss = sum_ij log(1 + exp(-y_ij l_ij)) / N

    a and b are normalised; both scalars are parameters, and begin at log(10) and -10. Sent by a rank:
    (W - 1) / W * N * 12 d bytes a step in fp32.

    Source: Zhai et al. 2023 (arXiv:2303.15343).
    """

    def __init__(self, *, block: int = 256) -> None:
        super().__init__(block=block)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(10.0)))
        self.logit_bias = nn.Parameter(torch.tensor(-10.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the loss of the global batch. Collective, and so is its backward."""
        a, b = (F.normalize(view, dim=1) for view in self.checked(a, b))
        scale, bias = self.logit_scale.to(a.dtype).exp(), self.logit_bias.to(a.dtype)
        return _SigLIP.apply(a, b, scale, bias, self.peers(), self.block)


class BarlowTwins(PairLoss):
    """The cross-correlation of two views over the global batch, drawn to the identity.

        c = standardised(a)^T standardised(b) / N        mean 0 and variance 1 over the global batch
        loss = sum_i (1 - c_ii)^2 + off_diagonal * sum_i!=j c_ij^2

    Sums of d x d numbers go over ranks, and no embeddings. `eps` is that of BatchNorm, which the paper standardises by.

    Source: Zbontar et al. 2021 (arXiv:2103.03230).
    """

    def __init__(self, off_diagonal: float = 0.005, *, eps: float = 1e-5, block: int = 256) -> None:
        super().__init__(block=block)
        self.off_diagonal, self.eps = off_diagonal, eps

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the loss of the global batch. Collective, and so is its backward."""
        peers = self.peers()
        a, b = self.checked(a, b)
        a, b = (_Standardised.apply(view, peers, self.block, self.eps) for view in (a, b))
        c = _Correlation.apply(a, b, peers, self.block)
        on_diagonal = (1 - c.diagonal()).square().sum()
        return on_diagonal + self.off_diagonal * (c.square().sum() - c.diagonal().square().sum())


# ---- blocks of pairs -------------------------------------------------------------------------------------------------


def _add_log_sums(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Add two sums of exponentials, each a largest exponent and a sum that is divided by its exponential."""
    largest = torch.maximum(one[0], other[0])
    return largest, one[1] * (one[0] - largest).exp() + other[1] * (other[0] - largest).exp()


def _trees(count: int) -> list[TreeSum[Tensor]]:
    return [TreeSum[Tensor](torch.add) for _ in range(count)]


def _total(trees: Iterable[TreeSum[Tensor]]) -> Tensor:
    return _tree_sum(tree.total() for tree in trees)


def _tree_sum(terms: Iterable[Tensor]) -> Tensor:
    tree = TreeSum[Tensor](torch.add)
    for term in terms:
        tree.push(term)
    return tree.total()


class _InfoNCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: Tensor, peers: Peers, block: int, both_views: bool) -> Tensor:
        own = [view.split(block) for view in (a, b)]
        sums = [[TreeSum(_add_log_sums) for _ in blocks] for blocks in own]
        for is_own, theirs in peers.rounds([a, b]):
            blocks = [view.split(block) for view in theirs]
            for view, i, j in product((0, 1), range(len(own[0])), range(len(blocks[0]))):
                is_diagonal = is_own and i == j
                sums[view][i].push(_log_sums(own[view][i], blocks, j, view, scale, both_views, is_diagonal))
        log_sums = [torch.cat([m + s.log() for m, s in (tree.total() for tree in trees)]) for trees in sums]
        terms = (log_sums[0] + log_sums[1] - 2 * scale * (a * b).sum(1)).split(block)
        loss = peers.sum(_tree_sum(term.sum() for term in terms)) / (2 * len(a) * peers.size)
        ctx.save_for_backward(a, b, scale, *log_sums)
        ctx.peers, ctx.block, ctx.both_views = peers, block, both_views
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, scale, *log_sums = ctx.saved_tensors
        peers, block = ctx.peers, ctx.block
        own, own_sums = [view.split(block) for view in (a, b)], [total.split(block) for total in log_sums]
        grads, of_scale = [_trees(len(blocks)) for blocks in own], _trees(len(own[0]))
        for is_own, theirs in peers.rounds([a, b, *log_sums]):
            blocks = [view.split(block) for view in theirs[:2]]
            sums = [total.split(block) for total in theirs[2:]]
            for i, j in product(range(len(own[0])), range(len(blocks[0]))):
                slopes = []
                for view in (0, 1):
                    terms = []
                    for other in (1 - view, view) if ctx.both_views else (1 - view,):
                        products = own[view][i] @ blocks[other][j].T
                        logits = scale * products
                        p = (logits - own_sums[view][i][:, None]).exp() + (logits - sums[other][j][None]).exp()
                        if is_own and i == j:
                            p.diagonal().fill_(0) if other == view else p.diagonal().sub_(2)
                        terms.append(p @ blocks[other][j])
                        slopes.append((p * products).sum())
                    grads[view][i].push(sum(terms[1:], terms[0]))
                of_scale[i].push(sum(slopes[1:], slopes[0]))
        # Of the mean over ranks, that DistributedDataParallel takes, this is the gradient of the global loss.
        share = grad / (2 * len(a))
        a_grad, b_grad = (share * scale * torch.cat([tree.total() for tree in trees]) for trees in grads)
        return a_grad, b_grad, share * _total(of_scale) / 2, None, None, None


def _log_sums(
    z: Tensor, blocks: list[tuple[Tensor, ...]], j: int, view: int, scale: Tensor, both_views: bool, is_diagonal: bool
) -> tuple[Tensor, Tensor]:
    logits = scale * (z @ blocks[1 - view][j].T)
    if both_views:
        same = scale * (z @ blocks[view][j].T)
        if is_diagonal:
            same.fill_diagonal_(-torch.inf)
        logits = torch.cat([logits, same], dim=1)
    largest = logits.amax(1)
    return largest, (logits - largest[:, None]).exp().sum(1)


class _SigLIP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: Tensor, bias: Tensor, peers: Peers, block: int) -> Tensor:
        own = a.split(block)
        rows = _trees(len(own))
        for is_own, (theirs,) in peers.rounds([b]):
            for j, other in enumerate(theirs.split(block)):
                for i, z in enumerate(own):
                    logits = scale * (z @ other.T) + bias
                    if is_own and i == j:
                        logits.diagonal().neg_()
                    rows[i].push(F.softplus(logits).sum())
        ctx.save_for_backward(a, b, scale, bias)
        ctx.peers, ctx.block = peers, block
        return peers.sum(_total(rows)) / (len(a) * peers.size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, scale, bias = ctx.saved_tensors
        own = [view.split(ctx.block) for view in (a, b)]
        grads, of_scale, of_bias = [_trees(len(blocks)) for blocks in own], _trees(len(own[0])), _trees(len(own[0]))
        for is_own, theirs in ctx.peers.rounds([a, b]):
            blocks = [view.split(ctx.block) for view in theirs]
            for view, i, j in product((0, 1), range(len(own[0])), range(len(blocks[0]))):
                products = own[view][i] @ blocks[1 - view][j].T
                slope = torch.sigmoid(scale * products + bias)
                if is_own and i == j:
                    slope.diagonal().sub_(1)
                grads[view][i].push(slope @ blocks[1 - view][j])
                if view == 0:
                    of_scale[i].push((slope * products).sum())
                    of_bias[i].push(slope.sum())
        share = grad / len(a)  # as in `_InfoNCE.backward`
        a_grad, b_grad = (share * scale * torch.cat([tree.total() for tree in trees]) for trees in grads)
        return a_grad, b_grad, share * _total(of_scale), share * _total(of_bias), None, None


class _Standardised(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) of each column, over all ranks' rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, block: int, eps: float) -> Tensor:
        num_rows = len(x) * peers.size
        mean = peers.sum(_tree_sum(part.sum(0) for part in x.split(block))) / num_rows
        centred = x - mean
        variance = peers.sum(_tree_sum(part.square().sum(0) for part in centred.split(block))) / num_rows
        rstd = (variance + eps).rsqrt()
        y = centred * rstd
        ctx.save_for_backward(y, rstd)
        ctx.peers, ctx.block = peers, block
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, rstd = ctx.saved_tensors
        num_rows = len(y) * ctx.peers.size
        both = torch.stack([grad, grad * y])
        means = ctx.peers.sum(_tree_sum(part.sum(1) for part in both.split(ctx.block, dim=1))) / num_rows
        return rstd * (grad - means[0] - y * means[1]), None, None, None


class _Correlation(torch.autograd.Function):
    """a^T b / N over all ranks' rows; the gradient for the mean over ranks."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, peers: Peers, block: int) -> Tensor:
        ctx.save_for_backward(a, b)
        products = (x.T @ y for x, y in zip(a.split(block), b.split(block), strict=True))
        return peers.sum(_tree_sum(products)) / (len(a) * peers.size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        return b @ grad.T / len(a), a @ grad / len(a), None, None
