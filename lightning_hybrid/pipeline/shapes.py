"""Shape, dtype and layout of what goes from stage to stage, from fake tensors: no memory, no arithmetic, no message.

Gloo takes a shorter message, or one of another dtype, without a word, and trains on. torch's own way to find shapes
runs a real forward, which counts in BatchNorm's running statistics. Backends send memory as it lies: of a channels_last
tensor Gloo refuses it, and NCCL would have its elements arrive in another order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.func import functional_call


@dataclass(frozen=True)
class Boundary:
    """What goes from one stage to the next: a tensor of one micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None  # without gaps; None: of a contiguous tensor
    has_gradient: bool = False  # in training: one goes back for it

    def empty(self, device: torch.device | str, *, requires_grad: bool = False) -> Tensor:
        """Make such a tensor."""
        made = torch.empty(self.shape, dtype=self.dtype, device=device)
        made = made if self.stride is None else made.as_strided(self.shape, self.stride)
        return made.requires_grad_(requires_grad)

    def has_layout_of(self, tensor: Tensor) -> bool:
        """Whether the elements of a tensor of this shape lie in memory as agreed on."""
        if self.stride is None:
            return tensor.is_contiguous()
        return all(
            size == 1 or own == other
            for size, own, other in zip(self.shape, self.stride, tensor.stride(), strict=True)
        )

    def message(self, tensor: Tensor) -> Tensor:
        """Return the elements of a tensor of this shape in the order that was agreed on, one after the other.

        It shares the tensor's memory where that lies so already; a receiver's tensor comes from `empty`, so that its
        message is its memory.

        >>> turned = torch.arange(6.0).view(2, 3).t()
        >>> boundary_of(turned).message(turned), Boundary((3, 2), turned.dtype).message(turned)
        (tensor([0., 1., 2., 3., 4., 5.]), tensor([0., 3., 1., 4., 2., 5.]))
        """
        tensor = tensor.detach()
        if not self.has_layout_of(tensor):
            tensor = self.empty(tensor.device).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))


def check(boundaries: Sequence[Boundary], value: object, what: str) -> None:
    """Raise `RuntimeError` unless `what`, a tensor or a tuple, is tensors of these shapes and dtypes."""
    agreed = [(one.shape, one.dtype) for one in boundaries]
    found = [
        (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x) for x in as_arguments(value)
    ]
    if found != agreed:
        raise RuntimeError(
            f"Shapes and dtypes of {what} (={found}) must be those of the fake tensors that ran before (={agreed}): "
            "the next rank would take the message for something else. A block must not choose its shapes by values."
        )


def as_arguments(value: Any) -> tuple[Any, ...]:
    """Return what a block gives the next one as arguments: the entries of a tuple, or the one value."""
    return value if isinstance(value, tuple) else (value,)


def boundary_of(tensor: Tensor) -> Boundary:
    """Return shape, dtype and layout of a tensor; of one with gaps, as an expanded one, the layout of its copy.

    >>> boundary_of(torch.ones(2, 3).t()).stride, boundary_of(torch.ones(2, 3)).stride
    ((1, 3), None)
    """
    stride = (
        None if tensor.is_contiguous() else tuple(torch.empty_like(tensor, device="meta").stride())
    )
    return Boundary(tuple(tensor.shape), tensor.dtype, stride, tensor.requires_grad)


def output_of(
    blocks: Sequence[nn.Module], given: Sequence[Boundary], device: torch.device
) -> tuple[Boundary, ...]:
    """Return what `blocks` make of `given`, in the modes of the moment (autocast, gradients); blocks stay as they are.

    Raises:
        ValueError: a block returns other things than tensors, or integers alone, or its shapes depend on values.

    >>> output_of([nn.Conv2d(3, 8, 3), nn.Flatten()], [Boundary((2, 3, 8, 8), torch.float32)], torch.device("cpu"))
    (Boundary(shape=(2, 288), dtype=torch.float32, stride=None, has_gradient=True),)
    """
    doubles = [_double_of(block) for block in blocks]
    # Tensors that are plain attributes of a block are real ones.
    with FakeTensorMode(allow_non_fake_inputs=True):
        # Clones, as a block may begin with an operation in place.
        value = tuple(one.empty(device, requires_grad=one.has_gradient).clone() for one in given)
        for block in doubles:
            fake = {
                name: torch.empty_strided(
                    tensor.shape,
                    tensor.stride(),
                    dtype=tensor.dtype,
                    device=device,
                    requires_grad=tensor.requires_grad,
                )
                for name, tensor in [*block.named_parameters(), *block.named_buffers()]
            }
            try:
                value = as_arguments(functional_call(block, fake, value))
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise ValueError(
                    f"The output of block {type(block).__name__} must have a shape that does not depend on values: "
                    "stages agree on shapes before they compute. Move what depends on values out of the network."
                ) from error
            if not all(isinstance(one, Tensor) for one in value) or not any(
                map(torch.is_floating_point, value)
            ):
                kinds = ", ".join(type(one).__name__ for one in value)
                raise ValueError(
                    f"Block {type(block).__name__} (returned {kinds}) must return a floating-point tensor or a tuple "
                    "of tensors with one, the arguments of the next block. Keep other things as attributes of blocks."
                )
        found = tuple(map(boundary_of, value))
    if any(one.has_gradient for one in found):
        return found
    # All before is frozen, or nothing is trained: torch's schedules take one gradient back at least.
    return tuple(replace(one, has_gradient=one.dtype.is_floating_point) for one in found)


def _double_of(block: nn.Module) -> nn.Module:
    """Copy a block without its tensors: one that keeps a table from its first forward must not keep a fake one."""
    attributes = [item for module in block.modules() for item in vars(module).items()]
    tensors = [
        *block.parameters(),
        *block.buffers(),
        *(value for _, value in attributes if isinstance(value, Tensor)),
    ]
    # A hook may belong to anything, as the trainer.
    hooks = [value for name, value in attributes if name.endswith("_hooks")]
    try:
        return copy.deepcopy(block, {id(each): each for each in (*tensors, *hooks)})
    except Exception:  # as of a lock
        return block


def costs_of(blocks: Sequence[nn.Module], example: object) -> list[float]:
    """Return what each block costs: operations of a forward on `example`, or its parameters where it is no tensors.

    One operation for each element that a block returns is added, so that none is free.

    >>> costs_of([nn.Linear(3, 5), nn.ReLU()], torch.zeros(2, 3)), costs_of([nn.Linear(3, 5), nn.ReLU()], None)
    ([70.0, 10.0], [20.0, 0.0])
    """
    arguments = as_arguments(example)
    if not all(isinstance(one, Tensor) for one in arguments):
        return [
            float(sum(parameter.numel() for parameter in block.parameters())) for block in blocks
        ]
    from torch.utils.flop_counter import (
        FlopCounterMode,
    )  # here: it imports Triton, which takes half a second

    costs = list[float]()
    given = tuple(map(boundary_of, arguments))
    for block in blocks:
        with FlopCounterMode(display=False) as counter:
            given = output_of([block], given, torch.device("cpu"))
        costs.append(float(counter.get_total_flops() + sum(math.prod(one.shape) for one in given)))
    return costs
