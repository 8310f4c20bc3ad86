"""Fully connected layers cut over the ranks of a node, between convolutions that every rank has whole.

    ColumnSlicedLinear    gathers the images of the group -> this rank's output features of all of them
    RowSlicedLinear       this rank's input features      -> sums over the group; each rank gets its own images back
    SlicedHead            gathers, this rank's classes    -> cross-entropy of its own images, with no logits sent

Between the first two stand operations on single elements (ReLU, dropout). With g ranks, b images on each, and layers of
n_in x n x n_out, a rank sends 2 (g - 1) b (n_in + n_out) elements in a step, forward and backward, where gradients of
whole layers are 2 (g - 1) / g of all weights: fewer up to b = weights / (g (n_in + n_out)), 512 images for AlexNet on 8
ranks. It holds 1 / g of the weights. Between nodes nothing changes: each slice travels once per node.

Parameters stand under the names that `nn.Linear` gives them, and state dicts hold whole tensors; to take one is
collective. The gradient of a slice is the sum over its group; `average_slices` makes it what DDP makes of others. For
loops of one's own, with fp32 and an optimizer whose rule is by element: `hybrid_allreduce` refuses slices. There, not
yet built: one verdict of overflow in a node, trust ratios of whole tensors, whole optimizer state in checkpoints. ::

    net.fc6, net.fc7 = sliced_pair(net.fc6, net.fc7, group=node)
    net.fc8 = SlicedHead(net.fc8, group=node)                        loss = net.fc8(features, targets).mean()
    slices = dict(slices_of(net))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, list(slices))
    ...
    loss.backward()
    average_slices(slices.values(), across=across, world_size=dist.get_world_size())
    optimizer.step()

Source: Krizhevsky 2014 (arXiv:1404.5997), whose scheme (a) this is; Shoeybi et al. 2019 (arXiv:1909.08053) for the pair
and the cross-entropy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# torch 2.13 renames `all_gather_into_tensor` and warns at every call by the old name; 2.11 and 2.12 know only that one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Sliced(nn.Module):
    """A linear layer of which each rank of a group has a slice."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    sliced: tuple[str, ...]  # parameters that are cut
    dim: int  # in which the weight is cut

    def __init__(self, whole: nn.Linear, *, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.slice_group = group
        self.in_features, self.out_features = whole.in_features, whole.out_features
        size, features = dist.get_world_size(group), whole.weight.shape[self.dim]
        if features % size:
            raise ValueError(
                f"`{('out_features', 'in_features')[self.dim]}` (={features}) must be a multiple of the {size} ranks "
                f"of the group: each holds as many. The next that fits is {-(-features // size) * size}."
            )
        for name, parameter in whole.named_parameters():
            own = self._own(parameter.detach(), name)
            self.register_parameter(name, nn.Parameter(own, requires_grad=parameter.requires_grad))
        if whole.bias is None:
            self.register_parameter("bias", None)

    def _own(self, whole: Tensor, name: str) -> Tensor:
        if name not in self.sliced:
            return whole.clone()
        return whole.chunk(dist.get_world_size(self.slice_group), self.dim)[dist.get_rank(self.slice_group)].clone()

    def _whole(self, own: Tensor) -> Tensor:
        own = own.transpose(0, self.dim).contiguous()  # ranks' slices come one behind the other
        return _gathered(own, self.slice_group).transpose(0, self.dim).contiguous()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, parameter in self.named_parameters():
            own = parameter if keep_vars else parameter.detach()
            destination[prefix + name] = self._whole(own.detach()) if name in self.sliced else own

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        own = {
            prefix + name: self._own(state_dict[prefix + name], name)
            for name in self.sliced
            if prefix + name in state_dict
        }
        super()._load_from_state_dict({**state_dict, **own}, prefix, *arguments)

    def extra_repr(self) -> str:
        """Describe the whole layer, and how many ranks share it."""
        ranks = dist.get_world_size(self.slice_group)
        return f"in_features={self.in_features}, out_features={self.out_features}, a slice of {ranks}"


class ColumnSlicedLinear(_Sliced):
    """A linear layer cut by output features: `[b, n_in]` on each of g ranks -> `[g b, n / g]`, images in rank order.

    Collective: every rank of the group must call it, and backward, with as many images.

    Args:
        whole: The layer, with the same values on every rank; weights and bias are copied from it.
        group: The ranks that share it; those of a node.

    Raises:
        ValueError: The features do not divide, or a rank has another number of images.
    """

    sliced, dim = ("weight", "bias"), 0

    def forward(self, images: Tensor) -> Tensor:
        """Compute this rank's features of all images of the group."""
        _refuse_unequal_batches(images, self.slice_group)
        return nn.functional.linear(_GatherImages.apply(images, self.slice_group), self.weight, self.bias)


class RowSlicedLinear(_Sliced):
    """A linear layer cut by input features: `[g b, n / g]` on each of g ranks -> `[b, n_out]`, the rank's own images.

    Sums over the group are added in fp32 at least and rounded once. The bias is whole on every rank. Collective, as
    `ColumnSlicedLinear`, whose arguments it has.
    """

    sliced, dim = ("weight",), 1

    def forward(self, features: Tensor) -> Tensor:
        """Compute all features of this rank's images."""
        own = _SumToOwnImages.apply(nn.functional.linear(features, self.weight), self.slice_group)
        return own if self.bias is None else own + self.bias


class SlicedHead(_Sliced):
    """A last layer and its cross-entropy, cut by classes: features and targets of b images -> their b losses.

        loss_i = log sum_c exp(z_ic) - z_i,target(i)          z = W x + bias; fp32 at least

    It sends the features of images, and three numbers for each, but no logits. Collective, as `ColumnSlicedLinear`,
    whose arguments it has.

    Shapes: features `[b, n_in]`, targets `[b]` of int64 in 0 ... classes - 1 -> losses `[b]`, fp32 or fp64, whose mean
    is `torch.nn.functional.cross_entropy`.
    """

    sliced, dim = ("weight", "bias"), 0

    def forward(self, features: Tensor, targets: Tensor) -> Tensor:
        """Compute the cross-entropy of each of this rank's images."""
        _refuse_unequal_batches(features, self.slice_group)
        logits = nn.functional.linear(_GatherImages.apply(features, self.slice_group), self.weight, self.bias)
        return _ClassParallelCrossEntropy.apply(logits, targets, self.slice_group)


def sliced_pair(first: nn.Linear, second: nn.Linear, *, group: dist.ProcessGroup) -> tuple[nn.Module, nn.Module]:
    """Return both layers cut over a group, to be put where they were; raises as `ColumnSlicedLinear`."""
    if first.out_features != second.in_features:
        raise ValueError(
            f"`out_features` of the first (={first.out_features}) must be `in_features` of the second "
            f"(={second.in_features}): each rank computes on with the features that it has."
        )
    return ColumnSlicedLinear(first, group=group), RowSlicedLinear(second, group=group)


def slices_of(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters, by name, of which each rank of a group has another slice.

    DistributedDataParallel must not average them over all ranks: give it their names before it wraps the module, by
    `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)`.
    """
    for prefix, layer in module.named_modules():
        if isinstance(layer, _Sliced):
            for name in layer.sliced:
                parameter = getattr(layer, name)
                if parameter is not None:
                    yield f"{prefix}.{name}" if prefix else name, parameter


def average_slices(slices: Iterable[nn.Parameter], *, across: dist.ProcessGroup | None, world_size: int) -> None:
    """Make the gradient of each slice what DDP makes of a whole one: the average over all ranks, in place.

        grad <- (sum over `across` of grad) / world_size

    Collective: every rank must call it after backward, with the same slices. `across`: the ranks with the same place in
    other nodes, which hold the same slices; None on one node.
    """
    for parameter in slices:
        if parameter.grad is not None:
            parameter.grad.div_(world_size)  # before the sum, which fp16 might not hold
            if across is not None:
                dist.all_reduce(parameter.grad, group=across)


def _refuse_unequal_batches(images: Tensor, group: dist.ProcessGroup) -> None:
    # Gloo takes a shorter message for a longer one in silence, or ends the process. On CUDA the host would wait.
    if images.is_cuda:
        return
    sizes = _gathered(torch.tensor([images.shape[0]]), group).tolist()
    if len(set(sizes)) > 1:
        raise ValueError(
            f"the batch (={images.shape[0]} images here) must have the same size on all ranks that share a layer, and "
            f"they have {sizes}: images are gathered. Set drop_last=True in the DataLoader."
        )


class _GatherImages(torch.autograd.Function):
    """Images of all ranks, in rank order; backward sums their gradients and returns those of the own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(own.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _own_sum(gradient.contiguous(), ctx.group), None


class _SumToOwnImages(torch.autograd.Function):
    """The sum over ranks of the own images; backward gathers the gradients of all images."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_sum(parts.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient.contiguous(), ctx.group), None


class _ClassParallelCrossEntropy(torch.autograd.Function):
    """Losses of the own images from logits `[g b, classes / g]` of all; backward: softmax minus one at the target."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:
        rank, (num_images, num_classes) = dist.get_rank(group), logits.shape
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        targets = _gathered(targets, group)
        largest = wide.amax(1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        exponentials = (wide - largest[:, None]).exp_()
        own_class = targets - rank * num_classes
        is_here = (own_class >= 0) & (own_class < num_classes)
        own_class = own_class.clamp(0, num_classes - 1)
        chosen = torch.where(is_here, wide.gather(1, own_class[:, None])[:, 0] - largest, 0.0)
        sums = torch.stack([exponentials.sum(1), chosen])
        dist.all_reduce(sums, group=group)
        ctx.group, ctx.dtype = group, logits.dtype
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), own_class, is_here)
        num_own = num_images // dist.get_world_size(group)
        return (sums[0].log() - sums[1])[rank * num_own : (rank + 1) * num_own]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        softmax, own_class, is_here = ctx.saved_tensors
        of_all = _gathered(gradient.contiguous(), ctx.group)
        result = softmax * of_all[:, None]
        result.scatter_add_(1, own_class[:, None], -(of_all * is_here)[:, None])
        return result.to(ctx.dtype), None, None


def _gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    # Rows of all ranks, in rank order.
    size = dist.get_world_size(group)
    whole = own.new_empty(size * own.shape[0], *own.shape[1:])
    _all_gather(whole, own, group=group)
    return whole


def _own_sum(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    # The sum over ranks of this rank's rows: each sends every other its rows and no more, and adds in fp32 at least.
    size = dist.get_world_size(group)
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=group)
    wide = torch.promote_types(parts.dtype, torch.float32)
    return arrived.view(size, -1, *parts.shape[1:]).sum(0, dtype=wide).to(parts.dtype)
