"""Autograd functions that compute contrastive losses over blocks of pairs.

Each function computes products of pairs block by block, in forward and in backward. The functions
take views in fp32 or fp64, and compute without autocast. Their gradients are scaled so that the
mean over ranks, which DistributedDataParallel takes, is the gradient of the global loss. They
cannot be differentiated twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.contrastive.exchange import Peers, TreeSum, tree_sum, tree_sums

Gradients = tuple[Tensor | None, ...]
"""Gradients of the inputs of a forward function, with None for inputs that need no gradient."""


def without_autocast(device: torch.device) -> torch.autocast:
    """Return a context in which autocast is disabled for a device."""
    return torch.autocast(device.type, enabled=False)


def refuse_second_derivatives(name: str) -> None:
    """Raise `RuntimeError` if backward runs with `create_graph=True`.

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
        class_name = backward.__qualname__.partition(".")[0]
        refuse_second_derivatives(class_name)
        with without_autocast(grad.device):
            return backward(ctx, grad)

    return run


def _sum_of_trees(trees: Iterable[TreeSum[Tensor]]) -> Tensor:
    return tree_sum(tree.total() for tree in trees)


def _joined(trees: Iterable[TreeSum[Tensor]]) -> Tensor:
    totals = [tree.total() for tree in trees]
    return torch.cat(totals)


def _logits(scale: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return scale * (rows @ columns.T)


def _add_in_order(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


# ---- InfoNCE ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogSum:
    """Logarithm of a sum of exponentials for each row of a matrix, in two parts that cannot overflow.

    Attributes:
        largest: Largest exponent of each row.
        total: Sum of the exponentials of each row, divided by the exponential of `largest`.
    """

    largest: Tensor
    total: Tensor

    @classmethod
    def of_rows(cls, logits: Tensor) -> LogSum:
        """Return the log-sum over each row of a matrix."""
        largest = logits.amax(1)
        exponentials = (logits - largest[:, None]).exp()
        return cls(largest, exponentials.sum(1))

    def plus(self, added: LogSum) -> LogSum:
        """Return the log-sum over the exponents of both log-sums."""
        largest = torch.maximum(self.largest, added.largest)
        total = self._total_below(largest) + added._total_below(largest)
        return LogSum(largest, total)

    def _total_below(self, largest: Tensor) -> Tensor:
        """Return the sum of exponentials divided by the exponential of a larger exponent."""
        return self.total * (self.largest - largest).exp()

    def value(self) -> Tensor:
        """Return the logarithm of the sum."""
        return self.largest + self.total.log()


def _log_sum_trees(count: int) -> list[TreeSum[LogSum]]:
    return [TreeSum(LogSum.plus) for _ in range(count)]


def _joined_log_sums(trees: Iterable[TreeSum[LogSum]]) -> Tensor:
    log_sums = []
    for tree in trees:
        log_sum = tree.total()
        log_sums.append(log_sum.value())
    return torch.cat(log_sums)


@dataclass(frozen=True)
class _Rows:
    """Rows of one view.

    Attributes:
        view: Index of the view, 0 or 1.
        z: Normalized embeddings.
        log_sums: Log-sum of each row's logits.
    """

    view: int
    z: Tensor
    log_sums: Tensor

    def split(self, block: int) -> list[_Rows]:
        """Split the rows into blocks."""
        z_blocks = self.z.split(block)
        log_sum_blocks = self.log_sums.split(block)
        blocks = []
        for z, log_sums in zip(z_blocks, log_sum_blocks, strict=True):
            blocks.append(_Rows(self.view, z, log_sums))
        return blocks


class InfoNCEOfBlocks(torch.autograd.Function):
    """Autograd function of the InfoNCE loss, given normalized views and the inverse temperature."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, scale: Tensor, peers: Peers, block: int, both_views: bool
    ) -> Tensor:
        """Return the InfoNCE loss of the global batch.

        Collective: every rank must call it, in the same order.
        """
        views = [a.split(block), b.split(block)]
        num_blocks = len(views[0])
        trees_a = _log_sum_trees(num_blocks)
        trees_b = _log_sum_trees(num_blocks)
        trees = [trees_a, trees_b]
        block_indices = range(num_blocks)
        for is_own, tensors in peers.rounds([a, b]):
            columns = [view.split(block) for view in tensors]
            for view, i, j in product((0, 1), block_indices, block_indices):
                rows = views[view][i]
                columns_of_partners = columns[1 - view][j]
                logits = _logits(scale, rows, columns_of_partners)
                if both_views:
                    columns_of_same_view = columns[view][j]
                    same_view = _logits(scale, rows, columns_of_same_view)
                    if is_own and i == j:
                        same_view.fill_diagonal_(-torch.inf)  # a row is not compared with itself
                    logits = torch.cat([logits, same_view], dim=1)
                log_sum = LogSum.of_rows(logits)
                trees[view][i].push(log_sum)

        log_sums_a = _joined_log_sums(trees_a)
        log_sums_b = _joined_log_sums(trees_b)
        products_of_partners = (a * b).sum(1)
        terms = log_sums_a + log_sums_b - 2 * scale * products_of_partners
        total = tree_sum(terms_of_block.sum() for terms_of_block in terms.split(block))

        ctx.save_for_backward(a, b, scale, log_sums_a, log_sums_b)
        ctx.peers = peers
        ctx.block = block
        ctx.both_views = both_views
        num_rows = 2 * len(a) * peers.size  # of both views and all ranks
        return peers.sum(total) / num_rows

    @staticmethod
    @_in_full_precision
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        """Return the gradients of the views and of the scale.

        Collective: every rank must call it, in the same order.
        """
        a, b, scale, log_sums_a, log_sums_b = ctx.saved_tensors
        peers = ctx.peers
        block = ctx.block
        rows_a = _Rows(0, a, log_sums_a).split(block)
        rows_b = _Rows(1, b, log_sums_b).split(block)
        num_blocks = len(rows_a)
        a_grads = tree_sums(num_blocks)
        b_grads = tree_sums(num_blocks)
        scale_grads = tree_sums(num_blocks)
        block_indices = range(num_blocks)
        sent = [a, b, log_sums_a, log_sums_b]
        for is_own, tensors in peers.rounds(sent):
            other_a, other_b, other_log_sums_a, other_log_sums_b = tensors
            columns_a = _Rows(0, other_a, other_log_sums_a).split(block)
            columns_b = _Rows(1, other_b, other_log_sums_b).split(block)
            for i, j in product(block_indices, block_indices):
                is_on_diagonal = is_own and i == j
                compared_with_a = [columns_b[j]]
                compared_with_b = [columns_a[j]]
                if ctx.both_views:
                    compared_with_a.append(columns_a[j])
                    compared_with_b.append(columns_b[j])

                a_terms = _infonce_terms(rows_a[i], compared_with_a, scale, is_on_diagonal)
                a_grads[i].push(a_terms.of_rows)
                b_terms = _infonce_terms(rows_b[i], compared_with_b, scale, is_on_diagonal)
                b_grads[i].push(b_terms.of_rows)
                scale_terms = a_terms.of_scale + b_terms.of_scale
                scale_grads[i].push(_add_in_order(scale_terms))

        # The mean over ranks is the gradient of the global loss.
        num_rows_of_this_rank = 2 * len(a)
        share = grad / num_rows_of_this_rank
        a_grad = share * scale * _joined(a_grads)
        b_grad = share * scale * _joined(b_grads)
        scale_grad = None
        if ctx.needs_input_grad[2]:
            # Compute the same value on all ranks. After multiplication by `scale`, a mean of the ranks' terms would be
            # rounded differently.
            sum_of_this_rank = _sum_of_trees(scale_grads)
            sum_over_ranks = peers.sum(sum_of_this_rank)
            scale_grad = share * sum_over_ranks / (2 * peers.size)
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


@dataclass(frozen=True)
class _InfoNCETerms:
    """Terms of InfoNCE's gradients in some blocks of pairs, without constant factors.

    Attributes:
        of_rows: Term of the gradient of the rows.
        of_scale: Terms of the gradient of the scale, one for each block of columns.
    """

    of_rows: Tensor
    of_scale: list[Tensor]


def _infonce_terms(
    rows: _Rows, blocks_of_columns: Sequence[_Rows], scale: Tensor, is_on_diagonal: bool
) -> _InfoNCETerms:
    """Return the terms of InfoNCE's gradients in some blocks of pairs, without constant factors.

        p_ij = z_i . z_j
        s_ij = exp(scale p_ij - L_i) + exp(scale p_ij - L_j)        L: log-sum of a row's logits
               minus 2 if i and j are partners; 0 if i = j in the same view
        terms of the gradients: sum_j s_ij z_j for the row z_i, sum_ij s_ij p_ij for the scale

    The logit of i and j is in the log-sums of both rows. Each of two partners subtracts it once from the loss.

    Args:
        rows: Block of this rank's rows.
        blocks_of_columns: Blocks of rows to compare them with.
        scale: Inverse temperature.
        is_on_diagonal: Whether `rows` and the columns have the same indices in the global batch.
    """
    row_terms = []
    scale_terms = []
    for columns in blocks_of_columns:
        products = rows.z @ columns.z.T
        logits = scale * products
        slope = _softmax(logits, rows.log_sums[:, None])
        slope += _softmax(logits, columns.log_sums[None])
        if is_on_diagonal and columns.view == rows.view:
            slope.diagonal().fill_(0)
        elif is_on_diagonal:
            slope.diagonal().sub_(2)
        row_terms.append(slope @ columns.z)
        scale_term = (slope * products).sum()
        scale_terms.append(scale_term)
    sum_of_row_terms = _add_in_order(row_terms)
    return _InfoNCETerms(of_rows=sum_of_row_terms, of_scale=scale_terms)


def _softmax(logits: Tensor, log_sums: Tensor) -> Tensor:
    return (logits - log_sums).exp()


# ---- SigLIP ----------------------------------------------------------------------------------------------------------


class SigLIPOfBlocks(torch.autograd.Function):
    """Autograd function of the SigLIP loss, given normalized views, scale and bias."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, scale: Tensor, bias: Tensor, peers: Peers, block: int
    ) -> Tensor:
        """Return the SigLIP loss of the global batch.

        Collective: every rank must call it, in the same order.
        """
        rows = a.split(block)
        block_indices = range(len(rows))
        trees = tree_sums(len(rows))
        for is_own, (other_b,) in peers.rounds([b]):
            columns = other_b.split(block)
            for i, j in product(block_indices, block_indices):
                logits = _logits(scale, rows[i], columns[j]) + bias
                if is_own and i == j:
                    logits.diagonal().neg_()  # matching pairs
                total_of_block = F.softplus(logits).sum()
                trees[i].push(total_of_block)
        ctx.save_for_backward(a, b, scale, bias)
        ctx.peers = peers
        ctx.block = block
        total = _sum_of_trees(trees)
        num_pairs = len(a) * peers.size
        return peers.sum(total) / num_pairs

    @staticmethod
    @_in_full_precision
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        """Return the gradients of the views, of the scale and of the bias.

        The slope of a pair's term with respect to its logit l is sigmoid(l), or sigmoid(l) - 1 if the pair matches.

        Collective: every rank must call it, in the same order.
        """
        a, b, scale, bias = ctx.saved_tensors
        peers = ctx.peers
        block = ctx.block
        views = [a.split(block), b.split(block)]
        num_blocks = len(views[0])
        block_indices = range(num_blocks)
        a_grads = tree_sums(num_blocks)
        b_grads = tree_sums(num_blocks)
        grads = [a_grads, b_grads]
        scale_grads = tree_sums(num_blocks)
        bias_grads = tree_sums(num_blocks)
        for is_own, tensors in peers.rounds([a, b]):
            columns = [view.split(block) for view in tensors]
            for view, i, j in product((0, 1), block_indices, block_indices):
                rows = views[view][i]
                columns_of_partners = columns[1 - view][j]
                products = rows @ columns_of_partners.T
                slope = torch.sigmoid(scale * products + bias)
                if is_own and i == j:
                    slope.diagonal().sub_(1)
                grads[view][i].push(slope @ columns_of_partners)
                if view == 0:  # the other view has the same pairs
                    scale_term = (slope * products).sum()
                    scale_grads[i].push(scale_term)
                    bias_grads[i].push(slope.sum())

        share = grad / len(a)  # as in `InfoNCEOfBlocks.backward`
        a_grad = share * scale * _joined(a_grads)
        b_grad = share * scale * _joined(b_grads)
        scale_sum = _sum_of_trees(scale_grads)
        bias_sum = _sum_of_trees(bias_grads)
        sums_of_this_rank = torch.stack([scale_sum, bias_sum])
        sums_over_ranks = peers.sum(sums_of_this_rank)
        parameter_grads = share * sums_over_ranks / peers.size
        scale_grad, bias_grad = parameter_grads
        return a_grad, b_grad, scale_grad, bias_grad, None, None


# ---- Barlow Twins ----------------------------------------------------------------------------------------------------


class Standardized(torch.autograd.Function):
    """Autograd function that standardizes each column, using the rows of all ranks.

    The result is `(x - mean) / sqrt(variance + eps)`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, block: int, eps: float) -> Tensor:
        """Return the standardized rows of this rank.

        Collective: every rank must call it, in the same order.
        """
        num_rows = len(x) * peers.size
        blocks = x.split(block)
        column_sums = tree_sum(rows.sum(0) for rows in blocks)
        mean = peers.sum(column_sums) / num_rows
        centered = x - mean
        centered_blocks = centered.split(block)
        square_sums = tree_sum(rows.square().sum(0) for rows in centered_blocks)
        variance = peers.sum(square_sums) / num_rows
        inverse_deviation = (variance + eps).rsqrt()
        y = centered * inverse_deviation
        ctx.save_for_backward(y, inverse_deviation)
        ctx.peers = peers
        ctx.block = block
        return y

    @staticmethod
    @_in_full_precision
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        """Return the gradient with respect to this rank's embeddings.

            x_grad = (grad - mean(grad) - y mean(grad y)) / sqrt(variance + eps)        means over the rows of all ranks

        Collective: every rank must call it, in the same order.
        """
        y, inverse_deviation = ctx.saved_tensors
        peers = ctx.peers
        num_rows = len(y) * peers.size
        both = torch.stack([grad, grad * y])
        blocks = both.split(ctx.block, dim=1)
        column_sums = tree_sum(rows.sum(1) for rows in blocks)
        means = peers.sum(column_sums) / num_rows
        mean_grad = means[0]
        mean_grad_y = means[1]
        projected_grad = grad - mean_grad - y * mean_grad_y
        x_grad = inverse_deviation * projected_grad
        return x_grad, None, None, None


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
        a_blocks = a.split(block)
        b_blocks = b.split(block)
        blocks = zip(a_blocks, b_blocks, strict=True)
        products = tree_sum(a_block.T @ b_block for a_block, b_block in blocks)
        num_rows = len(a) * peers.size
        return peers.sum(products) / num_rows

    @staticmethod
    @_in_full_precision
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        """Return the gradients of both views on this rank."""
        a, b = ctx.saved_tensors
        # The mean over ranks is the gradient of the global loss.
        a_grad = b @ grad.T / len(a)
        b_grad = a @ grad / len(a)
        return a_grad, b_grad, None, None
