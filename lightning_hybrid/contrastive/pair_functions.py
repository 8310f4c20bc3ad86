"""Autograd functions that compute contrastive losses over blocks of pairs.

Each function computes products of pairs block by block, in forward and in backward. The functions
take views in fp32 or fp64, and compute without autocast. Their gradients are scaled so that the
mean over ranks, which DistributedDataParallel takes, is the gradient of the global loss. They
cannot be differentiated twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.contrastive.exchange import Peers, TreeSum, tree_sum, tree_sums


def without_autocast(device: torch.device) -> torch.autocast:
    """Return a context in which autocast is disabled for a device."""
    return torch.autocast(device.type, enabled=False)


def refuse_second_derivatives(name: str) -> None:
    """Raise if backward runs with `create_graph=True`.

    torch would treat some intermediate results of the backward as constants.

    Raises:
        RuntimeError: The backward runs with `create_graph=True`.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"`{name}` cannot be differentiated twice, but backward was called with `create_graph=True`. Leave "
            "`create_graph` out."
        )


def _in_full_precision(backward: Callable[..., Any]) -> Any:
    """Decorate a backward function so that it disables autocast and rejects second derivatives.

    Autocast may be active because user code calls backward under autocast.
    """

    @functools.wraps(backward)
    def run(ctx: Any, grad: Tensor) -> Any:
        refuse_second_derivatives(backward.__qualname__.partition(".")[0])
        with without_autocast(grad.device):
            return backward(ctx, grad)

    return run


def _sum_of_trees(trees: Iterable[TreeSum[Tensor]]) -> Tensor:
    return tree_sum(tree.total() for tree in trees)


def _joined(trees: Iterable[TreeSum[Tensor]]) -> Tensor:
    return torch.cat([tree.total() for tree in trees])


# ---- InfoNCE ---------------------------------------------------------------------------------------------------------


LogSum = tuple[Tensor, Tensor]
"""Sum of exponentials by rows: the largest exponent, and the sum divided by its exponential."""


def _add_log_sums(first: LogSum, second: LogSum) -> LogSum:
    largest = torch.maximum(first[0], second[0])
    total = first[1] * (first[0] - largest).exp() + second[1] * (second[0] - largest).exp()
    return largest, total


def _log_sum(logits: Tensor) -> LogSum:
    largest = logits.amax(1)
    return largest, (logits - largest[:, None]).exp().sum(1)


def _softmax(logits: Tensor, log_sum: Tensor) -> Tensor:
    return (logits - log_sum).exp()


def _correct_diagonal_(slope: Tensor, *, is_same_view: bool) -> None:
    if is_same_view:
        slope.diagonal().fill_(0)  # a row is not compared with itself
    else:
        slope.diagonal().sub_(2)  # partners, which occur in the sums of both rows and columns


class InfoNCEOfBlocks(torch.autograd.Function):
    """Autograd function of the InfoNCE loss, given normalised views and the inverse temperature."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, scale: Tensor, peers: Peers, block: int, both_views: bool
    ) -> Tensor:
        """Return the InfoNCE loss of the global batch.

        Collective: every rank must call it, in the same order.
        """
        views = [view.split(block) for view in (a, b)]
        num_blocks = len(views[0])
        trees = [[TreeSum(_add_log_sums) for _ in range(num_blocks)] for _ in views]
        for is_own, tensors in peers.rounds([a, b]):
            columns = [view.split(block) for view in tensors]
            for view, i, j in product((0, 1), range(num_blocks), range(num_blocks)):
                rows = views[view][i]
                logits = scale * (rows @ columns[1 - view][j].T)
                if both_views:
                    same_view = scale * (rows @ columns[view][j].T)
                    if is_own and i == j:
                        same_view.fill_diagonal_(-torch.inf)
                    logits = torch.cat([logits, same_view], dim=1)
                trees[view][i].push(_log_sum(logits))

        log_sums = []
        for trees_of_view in trees:
            totals = [tree.total() for tree in trees_of_view]
            log_sums.append(torch.cat([largest + total.log() for largest, total in totals]))
        terms = log_sums[0] + log_sums[1] - 2 * scale * (a * b).sum(1)
        total = tree_sum(terms_of_block.sum() for terms_of_block in terms.split(block))
        ctx.save_for_backward(a, b, scale, *log_sums)
        ctx.peers = peers
        ctx.block = block
        ctx.both_views = both_views
        return peers.sum(total) / (2 * len(a) * peers.size)

    @staticmethod
    @_in_full_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the views and of the scale.

        Collective: every rank must call it, in the same order.
        """
        a, b, scale, *log_sums = ctx.saved_tensors
        block = ctx.block
        views = [view.split(block) for view in (a, b)]
        log_sums_of_rows = [log_sum.split(block) for log_sum in log_sums]
        num_blocks = len(views[0])
        grads = [tree_sums(num_blocks) for _ in views]
        scale_grads = tree_sums(num_blocks)
        for is_own, tensors in ctx.peers.rounds([a, b, *log_sums]):
            columns = [view.split(block) for view in tensors[:2]]
            log_sums_of_columns = [log_sum.split(block) for log_sum in tensors[2:]]
            for i, j in product(range(num_blocks), range(num_blocks)):
                scale_terms = []
                for view in (0, 1):
                    row_terms = []
                    column_views = [1 - view, view] if ctx.both_views else [1 - view]
                    for column_view in column_views:
                        products = views[view][i] @ columns[column_view][j].T
                        logits = scale * products
                        slope = _softmax(logits, log_sums_of_rows[view][i][:, None])
                        slope += _softmax(logits, log_sums_of_columns[column_view][j][None])
                        if is_own and i == j:
                            _correct_diagonal_(slope, is_same_view=column_view == view)
                        row_terms.append(slope @ columns[column_view][j])
                        scale_terms.append((slope * products).sum())
                    grads[view][i].push(sum(row_terms[1:], row_terms[0]))
                scale_grads[i].push(sum(scale_terms[1:], scale_terms[0]))

        # The mean over ranks is the gradient of the global loss.
        share = grad / (2 * len(a))
        a_grad = share * scale * _joined(grads[0])
        b_grad = share * scale * _joined(grads[1])
        scale_grad = None
        if ctx.needs_input_grad[2]:
            # Compute the same value on all ranks. After multiplication by `scale`, a mean of the ranks' terms would be
            # rounded differently.
            scale_grad = share * ctx.peers.sum(_sum_of_trees(scale_grads)) / (2 * ctx.peers.size)
        return a_grad, b_grad, scale_grad, None, None, None


class LimitedExponential(torch.autograd.Function):
    """Autograd function of an exponential that is limited from above, but can return below the limit.

    A plain `clamp` has no gradient above the limit, so an exponent that a large step has moved there would stay there
    for the rest of the training. Here, only gradients that would increase the exponent further are zero.
    """

    @staticmethod
    def forward(ctx: Any, exponent: Tensor, largest: float) -> Tensor:
        """Return the exponential, or `largest` if the exponential is above it."""
        exponential = exponent.exp()
        limited = exponential.clamp(max=largest)
        ctx.save_for_backward(limited, exponential > largest)
        return limited

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the exponent, without a gradient that would increase it above the limit."""
        limited, is_above = ctx.saved_tensors
        grad = grad * limited
        # Optimizers move against the gradient.
        return torch.where(is_above, grad.clamp(min=0), grad), None


# ---- SigLIP ----------------------------------------------------------------------------------------------------------


class SigLIPOfBlocks(torch.autograd.Function):
    """Autograd function of the SigLIP loss, given normalised views, scale and bias."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, scale: Tensor, bias: Tensor, peers: Peers, block: int
    ) -> Tensor:
        """Return the SigLIP loss of the global batch.

        Collective: every rank must call it, in the same order.
        """
        rows = a.split(block)
        trees = tree_sums(len(rows))
        for is_own, (other_b,) in peers.rounds([b]):
            columns = other_b.split(block)
            for i, j in product(range(len(rows)), range(len(rows))):
                logits = scale * (rows[i] @ columns[j].T) + bias
                if is_own and i == j:
                    logits.diagonal().neg_()
                trees[i].push(F.softplus(logits).sum())
        ctx.save_for_backward(a, b, scale, bias)
        ctx.peers = peers
        ctx.block = block
        return peers.sum(_sum_of_trees(trees)) / (len(a) * peers.size)

    @staticmethod
    @_in_full_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the views, of the scale and of the bias.

        Collective: every rank must call it, in the same order.
        """
        a, b, scale, bias = ctx.saved_tensors
        views = [view.split(ctx.block) for view in (a, b)]
        num_blocks = len(views[0])
        grads = [tree_sums(num_blocks) for _ in views]
        scale_grads = tree_sums(num_blocks)
        bias_grads = tree_sums(num_blocks)
        for is_own, tensors in ctx.peers.rounds([a, b]):
            columns = [view.split(ctx.block) for view in tensors]
            for view, i, j in product((0, 1), range(num_blocks), range(num_blocks)):
                products = views[view][i] @ columns[1 - view][j].T
                slope = torch.sigmoid(scale * products + bias)
                if is_own and i == j:
                    slope.diagonal().sub_(1)
                grads[view][i].push(slope @ columns[1 - view][j])
                if view == 0:
                    scale_grads[i].push((slope * products).sum())
                    bias_grads[i].push(slope.sum())

        share = grad / len(a)  # as in `InfoNCEOfBlocks.backward`
        a_grad = share * scale * _joined(grads[0])
        b_grad = share * scale * _joined(grads[1])
        sums = torch.stack([_sum_of_trees(scale_grads), _sum_of_trees(bias_grads)])
        scale_grad, bias_grad = share * ctx.peers.sum(sums) / ctx.peers.size
        return a_grad, b_grad, scale_grad, bias_grad, None, None


# ---- Barlow Twins ----------------------------------------------------------------------------------------------------


class Standardised(torch.autograd.Function):
    """Autograd function that standardises each column, using the rows of all ranks.

    The result is `(x - mean) / sqrt(variance + eps)`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, block: int, eps: float) -> Tensor:
        """Return the standardised rows of this rank.

        Collective: every rank must call it, in the same order.
        """
        num_rows = len(x) * peers.size
        mean = peers.sum(tree_sum(rows.sum(0) for rows in x.split(block))) / num_rows
        centred = x - mean
        variance = (
            peers.sum(tree_sum(rows.square().sum(0) for rows in centred.split(block))) / num_rows
        )
        inverse_deviation = (variance + eps).rsqrt()
        y = centred * inverse_deviation
        ctx.save_for_backward(y, inverse_deviation)
        ctx.peers = peers
        ctx.block = block
        return y

    @staticmethod
    @_in_full_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient with respect to this rank's embeddings.

        Collective: every rank must call it, in the same order.
        """
        y, inverse_deviation = ctx.saved_tensors
        num_rows = len(y) * ctx.peers.size
        both = torch.stack([grad, grad * y])
        means = (
            ctx.peers.sum(tree_sum(rows.sum(1) for rows in both.split(ctx.block, dim=1))) / num_rows
        )
        return inverse_deviation * (grad - means[0] - y * means[1]), None, None, None


class Correlation(torch.autograd.Function):
    """Autograd function of the cross-correlation matrix of two views, using the rows of all ranks.

    The result is `a^T b / N` for N rows of all ranks.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, peers: Peers, block: int) -> Tensor:
        """Return the cross-correlation matrix of the global batch.

        Collective: every rank must call it, in the same order.
        """
        ctx.save_for_backward(a, b)
        blocks = zip(a.split(block), b.split(block), strict=True)
        return peers.sum(tree_sum(x.T @ y for x, y in blocks)) / (len(a) * peers.size)

    @staticmethod
    @_in_full_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of both views on this rank."""
        a, b = ctx.saved_tensors
        return b @ grad.T / len(a), a @ grad / len(a), None, None
