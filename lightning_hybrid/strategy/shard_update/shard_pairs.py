"""A rank's part of a large parameter, which takes the parameter's place in the optimizer for the time of a step.

    parameter        forward, backward                        whole on every rank
    `master`         the optimizer's parameter, its state     elements begin ... end - 1 in the order of memory

Two kinds: the part of an fp32 master behind a half-precision parameter, which is memory of its own, and a part of an
fp32 parameter, which is the parameter's own memory: there optimizer state alone is shared.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_hybrid.placement import Part, flattened
from lightning_hybrid.precision.master_weights import MasterPair, MasterWeights


class _Shard(MasterPair):
    # The common part of both kinds.

    def __init__(self, low: Tensor, master: nn.Parameter, original_dtype: torch.dtype) -> None:
        super().__init__(low=low, master=master, original_dtype=original_dtype)
        self.spans: list[tuple[int, int]] = []  # by sharer, in the order of `Topology.sharers`
        self.local_rank = 0
        self._view: Tensor | None = None

    @property
    def part(self) -> Part:
        """The elements that this rank holds."""
        begin, end = self.spans[self.local_rank]
        return Part(numel=self.low.numel(), begin=begin, end=end)

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return this rank's elements of `tensor`, which is as large as `low`: 1-D, a view where memory allows."""
        begin, end = self.spans[self.local_rank]
        if tensor is not self.low:
            return flattened(tensor, self.low)[begin:end]
        # One object for all steps: fused optimizers look at identities.
        if self._view is None or self._view.data_ptr() != tensor.data_ptr() + begin * tensor.element_size():
            self._view = flattened(tensor, tensor)[begin:end]
        return self._view


class MasterShard(_Shard):
    """A half-precision parameter, and a part of its fp32 master.

    `collected`: the whole master in fp32, while the parts are brought together.
    """

    def __init__(self, pair: MasterPair, spans: list[tuple[int, int]], local_rank: int) -> None:
        super().__init__(low=pair.low, master=pair.master, original_dtype=pair.original_dtype)  # type: ignore[arg-type]
        self.spans, self.local_rank = spans, local_rank
        self.collected: Tensor | None = None
        pair.absorb_outside_writes_()
        self.master = nn.Parameter(self.part_of(pair.master).clone(), requires_grad=pair.master.requires_grad)
        self.master.grad_dtype = None  # an optimizer may be handed half gradients
        if hasattr(self.low, "value"):
            self.low.value = self  # tracked: copies and pickles ask here for the value

    def whole(self) -> Tensor:
        """Return the master where its parts were brought together, else the parameter in fp32: rounded."""
        return self.low.detach().float() if self.collected is None else self.collected

    @torch.no_grad()
    def load_(self, value: Tensor) -> None:
        """Take this rank's elements of a state dict; one that has the rounded values of `whole` changes nothing."""
        if not torch.equal(self.part_of(value).to(self.low.device), self.part_of(self.low).float()):
            self.take_(value)


class WeightShard(_Shard):
    """A parameter that keeps its dtype, and the part that this rank updates: a parameter in the same memory."""

    def __init__(self, parameter: Tensor, spans: list[tuple[int, int]], local_rank: int) -> None:
        super().__init__(low=parameter, master=nn.Parameter(parameter.new_empty(0)), original_dtype=parameter.dtype)
        self.spans, self.local_rank = spans, local_rank
        self.absorb_outside_writes_()

    def whole(self) -> Tensor:
        """Return the parameter."""
        return self.low.detach()

    def take_(self, value: Tensor) -> None:
        """Do nothing: the parameter itself takes it."""

    def absorb_outside_writes_(self) -> None:
        """Follow the parameter where `p.data = ...` has moved it; what was written, this part has."""
        if self.master.data_ptr() != self.part_of(self.low).data_ptr() or self.master.numel() == 0:
            self.master.data = self.part_of(self.low)

    def mark_clean(self) -> None:
        """Do nothing: there is one memory."""


class WeightShards(MasterWeights):
    """The parts of a module's parameters where it has no masters."""

    def __init__(self) -> None:
        # Nothing is converted, so nothing else of the base is needed.
        self.pairs = {}
        self.gather_ = None
