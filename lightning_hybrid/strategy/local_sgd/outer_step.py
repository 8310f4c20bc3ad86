"""The step from one common point of the nodes' weights to the next.

    d = w - mean over nodes of w_n            w: the last common weights; w_n: those of node n after its local steps
    m <- momentum * m + d
    w <- w - lr * (d + momentum * m)          Nesterov's, as in `torch.optim.SGD`

With lr 1 and momentum 0 it is the mean. Source: Douillard et al. 2023 (arXiv:2311.08105), "DiLoCo", which takes 0.7
and 0.9.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class OuterStep:
    """The outer step of one run: the last common weights, and a momentum, as much memory as the weights each.

    >>> weights = [torch.tensor([1.0])]
    >>> outer = OuterStep(weights, lr=0.5, momentum=0.0)
    >>> _ = weights[0].fill_(3.0)                 # the mean over nodes
    >>> outer.step_(weights); weights             # half of the way
    [tensor([2.])]
    """

    def __init__(self, weights: Sequence[Tensor], *, lr: float, momentum: float) -> None:
        self.lr, self.momentum = lr, momentum
        self._common = [weight.detach().clone() for weight in weights]
        self.momenta = [torch.zeros_like(weight) for weight in self._common]

    @torch.no_grad()
    def step_(self, means: Sequence[Tensor]) -> None:
        """Turn the nodes' mean into the next common weights, in place."""
        moved = torch._foreach_sub(self._common, list(means))
        torch._foreach_mul_(self.momenta, self.momentum)
        torch._foreach_add_(self.momenta, moved)
        torch._foreach_add_(moved, self.momenta, alpha=self.momentum)
        torch._foreach_add_(self._common, moved, alpha=-self.lr)
        torch._foreach_copy_(list(means), self._common)
