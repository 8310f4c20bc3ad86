"""Optimizers of torch, of this package and of users. Each row of the first table is one line."""

from collections import defaultdict

import torch
from torch import nn, optim

from lightning_hybrid.optim import LAMB, LARS
from tests.battery.case import HALF, Row, row
from tests.battery.ordinary.layers import embedded
from tests.toy import NUM_CLASSES


class Lookahead(optim.Optimizer):
    """Lookahead optimizer: k steps forward, one back (Zhang et al. 2019).

    It wraps another optimizer. Its constructor clones the parameters as slow weights, which would be half-precision if
    the parameters were half-precision by then.
    """

    def __init__(self, base, k=2, alpha=0.5):
        self.base = base
        self.k = k
        self.alpha = alpha
        self.num_steps = 0
        self.param_groups = base.param_groups
        self.defaults = base.defaults
        self.state = defaultdict(dict)
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.base.step(closure)
        self.num_steps += 1
        if self.num_steps % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, s in zip(group["params"], slow, strict=True):
                    s.add_(p - s, alpha=self.alpha)
                    p.copy_(s)
        return loss


class ByParameter(optim.Optimizer):
    """Optimizer that calls `closure` as torch's optimizers do, and updates one parameter after the other."""

    def __init__(self, params, lr, **defaults):
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, self.state[p], group)
        return loss


class Lion(ByParameter):
    def move(self, p, state, group):
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        p.sub_(torch.sign(momentum.lerp(p.grad, 1 - 0.9)), alpha=group["lr"])
        momentum.lerp_(p.grad, 1 - 0.99)


class DataSgd(ByParameter):
    """Optimizer in an old style, which does everything through `.data`."""

    def move(self, p, state, group):
        buffer = state.setdefault("buffer", torch.zeros_like(p.data))
        buffer.mul_(0.9).add_(p.grad.data)
        p.data.add_(buffer, alpha=-group["lr"])


class _Made(Row):
    def configure_optimizers(self):
        return self.make(list(self.parameters()))

    def after_fit(self):
        """Check that the state has the dtypes of a run in fp32, so no digit is lost between steps."""
        (optimizer,) = self.trainer.optimizers
        kept = [value for state in optimizer.state.values() for value in state.values()]
        kept += [weight for group in getattr(optimizer, "slow", ()) for weight in group]
        self.facts["state"] = sorted({str(value.dtype) for value in kept if torch.is_tensor(value)})


MAKE = {
    "Sgd": lambda p: optim.SGD(p, lr=0.3),
    "SgdNesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "SgdFused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=1e-2),
    "AdamAmsgrad": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=1e-2),
    "AdamForeach": lambda p: optim.Adam(p, lr=1e-2, foreach=True),
    "AdamFused": lambda p: optim.Adam(p, lr=1e-2, fused=True),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2),
    "RAdam": lambda p: optim.RAdam(p, lr=0.2),
    "Adagrad": lambda p: optim.Adagrad(p, lr=5e-2),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, lr=3e-3, momentum=0.9, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-2),
    "Lars": lambda p: LARS(p, lr=2.0, trust_coefficient=0.02),
    "LarsFused": lambda p: LARS(p, lr=2.0, trust_coefficient=0.02, fused=True),
    "Lamb": lambda p: LAMB(p, lr=8e-2),
    "LambFused": lambda p: LAMB(p, lr=8e-2, fused=True),
    "LookaheadOutside": lambda p: Lookahead(optim.SGD(p, lr=0.1, momentum=0.9)),
    "LionByHand": lambda p: Lion(p, lr=1e-2),
    "ThroughData": lambda p: DataSgd(p, lr=0.1),
}
# A step depends only on signs, which small gradients change, and its size depends on signs as well.
ROUNDINGS = {
    "Rprop": 48,
    "LionByHand": 16,
}
ROWS = {
    name: row(_Made, make=staticmethod(make), roundings=ROUNDINGS.get(name, _Made.roundings))
    for name, make in MAKE.items()
}


def build_sparse(self):
    Row.build(self)
    self.embedding = nn.Embedding(8, 8, sparse=True)
    self.head = nn.Linear(96, NUM_CLASSES).requires_grad_(False)


ROWS["Sparse"] = embedded(  # gradients are sparse
    lambda: nn.Embedding(8, 8, padding_idx=0),
    build=build_sparse,
    configure_optimizers=lambda self: optim.SparseAdam(self.embedding.parameters(), lr=0.1),
    refused=dict.fromkeys(
        ("32-true", *HALF), "cannot average sparse or complex gradients. Set `sparse=False`"
    ),
)
