"""The step from one common point of the nodes' weights to the next.

    d = mean over nodes of (w - w_n)          w: the last common weights; w_n: those of node n after its local steps
    m <- momentum * m + d
    w <- w - lr * (d + momentum * m)          Nesterov's, as in `torch.optim.SGD`

With lr 1 and momentum 0 it is the mean, of which a codec then carries only what has moved. Source: Douillard et al.
2023 (arXiv:2311.08105), "DiLoCo", which takes 0.7 and 0.9.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class OuterStep:
    """The outer step of one run: the last common weights, and a momentum if any, as much memory as the weights each.

    >>> weights = [torch.tensor([1.0])]
    >>> outer = OuterStep(weights, lr=0.5, momentum=0.0)
    >>> _ = weights[0].fill_(3.0)                 # after local steps
    >>> moved = outer.moved(weights); moved       # to be averaged over nodes
    [tensor([-2.])]
    >>> outer.step_(weights, moved); weights      # half of the way
    [tensor([2.])]
    """

    def __init__(self, weights: Sequence[Tensor], *, lr: float, momentum: float) -> None:
        self.lr, self.momentum = lr, momentum
        self._common = [weight.detach().clone() for weight in weights]
        self.momenta = [torch.zeros_like(weight) for weight in self._common] if momentum else []

    @torch.no_grad()
    def moved(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return w - w_n."""
        return list(torch._foreach_sub(self._common, list(weights)))

    @torch.no_grad()
    def step_(self, weights: Sequence[Tensor], moved: list[Tensor]) -> None:
        """Write the next common weights into `weights`. `moved`: the mean d, which is overwritten."""
        if self.momenta:
            torch._foreach_mul_(self.momenta, self.momentum)
            torch._foreach_add_(self.momenta, moved)
            torch._foreach_add_(moved, self.momenta, alpha=self.momentum)
        torch._foreach_add_(self._common, moved, alpha=-self.lr)
        torch._foreach_copy_(list(weights), self._common)
