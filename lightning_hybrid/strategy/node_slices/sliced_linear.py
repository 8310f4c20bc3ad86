"""Fully connected layers cut over the ranks of a node, between convolutions that every rank has whole.

    ColumnSlicedLinear    gathers the images of the group -> this rank's output features of all of them
    RowSlicedLinear       this rank's input features      -> sums over the group; each rank gets its own images back
    SlicedHead            gathers, this rank's classes    -> logits of its own images, or their cross-entropy, for which
                                                             no logits are sent

Between the first two stand operations on single elements (ReLU, dropout). With g ranks, b images on each, and layers of
n_in x n x n_out, a rank sends 2 (g - 1) b (n_in + n_out) elements in a step, forward and backward, where gradients of
whole layers are 2 (g - 1) / g of all weights: fewer up to b = weights / (g (n_in + n_out)), 512 images for AlexNet on 8
ranks. A head of n_in x c sends 2 (g - 1) b (n_in + c / g), or 2 (g - 1) b n_in and few numbers for its cross-entropy. A
rank holds 1 / g of the weights. Between nodes nothing changes: each slice travels once per node.

Parameters stand under the names that `nn.Linear` gives them, and state dicts hold whole tensors; to take one is
collective. The gradient of a slice is the average over its group; averaged over nodes it is what DDP makes of whole
ones. Forward alone divides by g, so that a penalty on weights in the loss counts as much as on whole layers.

Under `hybrid_allreduce` a network says by an attribute which of its `nn.Linear` are cut over the ranks of each node for
the time of a fit: names of two are a pair, of one a head. ::

    self.node_slices = (("fc6", "fc7"), ("fc8",))

Source: Krizhevsky 2014 (arXiv:1404.5997), whose scheme (a) this is; Shoeybi et al. 2019 (arXiv:1909.08053) for the pair
and the cross-entropy.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.strategy.node_slices.slice_exchange import (
    class_parallel_cross_entropy,
    gather_images,
    gathered_rows,
    own_logits,
    refuse_unequal_batches,
    sum_to_own_images,
)


class SlicedLinear(nn.Module):
    """A linear layer of which each rank of a group has a slice. Abstract."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    slice_group: dist.ProcessGroup
    sliced: tuple[str, ...]  # parameters that are cut
    dim: int  # in which the weight is cut
    is_own_state: bool = False  # whether state dicts hold this rank's slices, and to take one is not collective
    numbers: RankNumbers | None = None  # random ones, from the first layer of a pair to the second
    gathered: tuple[Tensor, Tensor | None] | None = None  # whole weight and bias, while `forward` shall use them

    @classmethod
    @torch.no_grad()
    def cut_(cls, layer: nn.Linear, *, group: dist.ProcessGroup) -> SlicedLinear:
        """Cut an `nn.Linear`, which has the same values on every rank; return what is to stand in its place.

        Both share their attributes: parameters and hooks stay the same objects, and who calls the old layer, which may
        be in a list of the user's, calls this one.

        Args:
            layer: The whole layer.
            group: The ranks that share it; those of a node.

        Raises:
            ValueError: The features do not divide.
        """
        if (features := layer.weight.shape[cls.dim]) % (size := dist.get_world_size(group)):
            raise ValueError(
                f"`{('out_features', 'in_features')[cls.dim]}` (={features}) must be a multiple of the {size} ranks "
                f"of the group: each holds as many. The next that fits is {-(-features // size) * size}."
            )
        cut = cls.__new__(cls)
        object.__setattr__(cut, "__dict__", vars(layer))
        cut.slice_group = group
        vars(cut)["forward"] = cut.forward
        for name, parameter in cut._slices():
            parameter.data = cut.own_of(name, parameter.detach())
        return cut

    @torch.no_grad()
    def make_whole_(self) -> None:
        """Make the parameters whole, for the layer that was cut. In place, collective."""
        for name, parameter in self._slices():
            parameter.data = self.whole_of(name, parameter.detach())
        for name in ("forward", "slice_group", "numbers", "gathered", "is_own_state"):
            vars(self).pop(name, None)

    def _slices(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name in self.sliced if (parameter := getattr(self, name)) is not None)

    def own_of(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's slice of a tensor as large as a parameter; all of it where that is not cut."""
        if name not in self.sliced:
            return whole.clone()
        # Contiguous: steps and messages run over memory.
        own = whole.chunk(dist.get_world_size(self.slice_group), self.dim)[dist.get_rank(self.slice_group)]
        return own.clone(memory_format=torch.contiguous_format)

    def whole_of(self, name: str, own: Tensor) -> Tensor:
        """Return the whole of a tensor of which each rank has a slice as of a parameter. Collective."""
        if name not in self.sliced:
            return own
        own = own.transpose(0, self.dim).contiguous()  # ranks' slices come one behind the other
        return gathered_rows(own, self.slice_group).transpose(0, self.dim).contiguous()

    def _averaged(self, name: str) -> Any:
        # A parameter whose gradient from here is the average over the ranks' images, and not their sum.
        parameter = getattr(self, name)
        if parameter is None or name not in self.sliced:
            return parameter
        return _AverageGradient.apply(parameter, dist.get_world_size(self.slice_group))

    @torch.no_grad()
    def gather(self) -> None:
        """Compute with whole weights, each rank by itself, until `drop`. Collective; `forward` then is not."""
        weight, bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        self.gathered = self.whole_of("weight", weight), None if bias is None else self.whole_of("bias", bias)

    def drop(self) -> None:
        """Forget the whole weights."""
        self.gathered = None

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state with whole tensors. Collective."""
        # Not by a hook: those of the state dict, which may put other values in, come before.
        state, prefix = super().state_dict(*args, **kwargs), kwargs.get("prefix", "")
        for name, _ in () if self.is_own_state else self._slices():
            state[prefix + name] = self.whole_of(name, state[prefix + name].detach())
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        own = {
            prefix + name: self.own_of(name, state_dict[prefix + name])
            for name in self.sliced
            if prefix + name in state_dict
        }
        super()._load_from_state_dict({**state_dict, **own}, prefix, *arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> SlicedLinear:
        memo[id(self.slice_group)] = self.slice_group  # there once: a copy is cut over the same ranks
        copied: SlicedLinear = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied

    def extra_repr(self) -> str:
        """Describe the whole layer, and how many ranks share it."""
        ranks = dist.get_world_size(self.slice_group)
        return f"in_features={self.in_features}, out_features={self.out_features}, a slice of {ranks}"


class ColumnSlicedLinear(SlicedLinear):
    """A linear layer cut by output features: `[b, n_in]` on each of g ranks -> `[g b, n / g]`, images in rank order.

    Collective: every rank of the group must call it, and backward, with as many images.

    Raises:
        ValueError: A rank has another number of images.
    """

    sliced, dim = ("weight", "bias"), 0

    def forward(self, images: Tensor) -> Tensor:
        """Compute this rank's features of all images of the group."""
        if self.gathered is not None:
            return nn.functional.linear(images, *self.gathered)
        refuse_unequal_batches(images, self.slice_group)
        features = nn.functional.linear(
            gather_images(images, self.slice_group), self._averaged("weight"), self._averaged("bias")
        )
        if self.numbers is not None and self.training:
            self.numbers.begin(features.device, dist.get_rank(self.slice_group))
        return features


class RowSlicedLinear(SlicedLinear):
    """A linear layer cut by input features: `[g b, n / g]` on each of g ranks -> `[b, n_out]`, the rank's own images.

    Sums over the group are added in fp32 at least and rounded once. The bias is whole on every rank. Collective, as
    `ColumnSlicedLinear`.
    """

    sliced, dim = ("weight",), 1

    def forward(self, features: Tensor) -> Tensor:
        """Compute all features of this rank's images."""
        if self.gathered is not None:
            return nn.functional.linear(features, *self.gathered)
        if self.numbers is not None:
            self.numbers.end()
        own = sum_to_own_images(nn.functional.linear(features, self._averaged("weight")), self.slice_group)
        return own if self.bias is None else own + self.bias


class SlicedHead(SlicedLinear):
    """A last layer cut by classes: features of b images -> their logits, or with targets their cross-entropy.

        loss_i = log sum_c exp(z_ic) - z_i,target(i)          z = W x + bias; fp32 at least

    For losses it sends the features of images, and three numbers for each, but no logits. Collective, as
    `ColumnSlicedLinear`.

    Shapes: features `[b, ..., n_in]` -> logits `[b, ..., classes]`, in the features' dtype; with targets `[b, ...]` of
    int64 in 0 ... classes - 1, or -100 -> losses `[b, ...]`, fp32 or fp64, as of
    `torch.nn.functional.cross_entropy(reduction="none")`: 0 for -100.
    """

    sliced, dim = ("weight", "bias"), 0

    def forward(self, features: Tensor, targets: Tensor | None = None) -> Tensor:
        """Compute the logits of this rank's images, or the cross-entropy of each."""
        if self.gathered is not None:
            logits = nn.functional.linear(features, *self.gathered)
            if targets is None:
                return logits
            wide = torch.promote_types(logits.dtype, torch.float32)
            rows, labels = logits.to(wide).flatten(0, -2), targets.flatten()  # classes are last, also of tokens
            return nn.functional.cross_entropy(rows, labels, reduction="none").view(targets.shape)
        refuse_unequal_batches(features, self.slice_group)
        logits = nn.functional.linear(
            gather_images(features, self.slice_group), self._averaged("weight"), self._averaged("bias")
        )
        if targets is None:
            return own_logits(logits, self.slice_group)
        return class_parallel_cross_entropy(logits, targets, self.slice_group)


class _AverageGradient(torch.autograd.Function):
    """The parameter itself; backward divides the gradient, exactly where ranks are a power of two and none underflows.

    Here and not on `parameter.grad`, which also has what this rank alone adds: a penalty on weights in its loss.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, size: int) -> Tensor:
        ctx.size = size
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.size, None  # not in place: a bias can have the gradient of another tensor


class RankNumbers:
    """Random numbers of each rank's own, between the two layers of a pair.

    There each rank has other features: with one stream on all ranks, dropout would take the same places out of each
    slice. The stream outside goes on behind the pair as it was, so that ranks which agree on it still do.
    """

    def __init__(self) -> None:
        self._outside: tuple[torch.Generator, Tensor] | None = None

    def begin(self, device: torch.device, rank: int) -> None:
        """Draw from now on what `rank` alone draws, by a seed from the stream so far."""
        on_cuda = device.type == "cuda"
        generator = torch.cuda.default_generators[device.index] if on_cuda else torch.default_generator
        seed = int(torch.randint(2**31, ()))
        self._outside = generator, generator.get_state()
        generator.manual_seed(seed + rank)

    def end(self) -> None:
        """Go on with the stream from before."""
        outside, self._outside = self._outside, None
        if outside is not None:
            generator, state = outside
            generator.set_state(state)
