"""Shapes, dtypes and memory layouts of tensors that stages exchange, determined with fake tensors.

Fake tensors take no memory, do no arithmetic and send no messages. Shapes must be known before
the first message, for these reasons:

* Gloo accepts a shorter message, or one of another dtype, without an error, and training continues
  on wrong values.
* torch's own shape inference runs a real forward pass, which changes BatchNorm's running statistics.
* Backends send elements in memory order. Gloo rejects a channels_last tensor, and NCCL would deliver its
  elements in another order.
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
    """Specification of a tensor that one pipeline stage sends to the next for each micro-batch.

    Attributes:
        shape: Shape of the tensor.
        dtype: Data type of the tensor.
        stride: Strides of a tensor without gaps, or None for a contiguous one.
        has_gradient: In training, whether a gradient is sent back for the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None
    has_gradient: bool = False

    def empty(self, device: torch.device | str, *, requires_grad: bool = False) -> Tensor:
        """Return an uninitialized tensor of the specified shape, dtype and layout."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device=device)
        if self.stride is not None:
            tensor = tensor.as_strided(self.shape, self.stride)
        return tensor.requires_grad_(requires_grad)

    def has_layout_of(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the specified shape has the specified memory layout."""
        if self.stride is None:
            return tensor.is_contiguous()
        # The stride of a dimension of size 1 has no effect.
        dims = [dim for dim, size in enumerate(self.shape) if size != 1]
        return all(self.stride[dim] == tensor.stride(dim) for dim in dims)

    def message(self, tensor: Tensor) -> Tensor:
        """Return the elements of `tensor` as a 1-D tensor, in the order of the specified memory layout.

        `tensor` must have the specified shape. The result shares its memory if the tensor already has the specified
        layout. A tensor from `empty` has that layout, so a receiver always receives into its own memory.

        >>> turned = torch.arange(6.0).view(2, 3).t()
        >>> boundary_of(turned).message(turned), Boundary((3, 2), turned.dtype).message(turned)
        (tensor([0., 1., 2., 3., 4., 5.]), tensor([0., 3., 1., 4., 2., 5.]))
        """
        tensor = tensor.detach()
        if not self.has_layout_of(tensor):
            tensor = self.empty(tensor.device).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))


Boundaries = tuple[Boundary, ...]
"""Specifications of all inputs or all outputs of a stage."""


def check_shapes(boundaries: Sequence[Boundary], value: object, subject: str) -> None:
    """Raise `RuntimeError` if a tensor, or a tuple of tensors, does not have the agreed shapes and dtypes.

    Args:
        boundaries: The agreed specifications.
        value: The tensor or tuple to check.
        subject: Name of the value in the error.

    Raises:
        RuntimeError: A shape, a dtype or the number of tensors differs.
    """
    agreed = [(boundary.shape, boundary.dtype) for boundary in boundaries]
    actual: list[Any] = []
    for argument in as_arguments(value):
        if isinstance(argument, Tensor):
            actual.append((tuple(argument.shape), argument.dtype))
        else:
            actual.append(type(argument))
    if actual != agreed:
        raise RuntimeError(
            f"The shapes and dtypes of {subject} are {actual}, but were {agreed} in the dry run with fake tensors, so "
            "the next rank would misread the message. Return outputs whose shapes do not depend on tensor values."
        )


def as_arguments(value: Any) -> tuple[Any, ...]:
    """Return a block's output as a tuple of arguments for the next block.

    A tuple stays as it is, and any other value is put into a tuple.
    """
    return value if isinstance(value, tuple) else (value,)


def boundary_of(tensor: Tensor) -> Boundary:
    """Return the shape, dtype, memory layout and gradient flag of a tensor as a `Boundary`.

    A tensor with gaps in memory, such as an expanded one, gets the layout of its copy.

    >>> boundary_of(torch.ones(2, 3).t()).stride, boundary_of(torch.ones(2, 3)).stride
    ((1, 3), None)
    """
    stride = None
    if not tensor.is_contiguous():
        stride = tuple(torch.empty_like(tensor, device="meta").stride())
    return Boundary(tuple(tensor.shape), tensor.dtype, stride, tensor.requires_grad)


def output_of(
    blocks: Sequence[nn.Module], inputs: Sequence[Boundary], device: torch.device
) -> Boundaries:
    """Return the shapes, dtypes and layouts of the outputs of `blocks`, determined with fake tensors.

    The current autocast and gradient modes apply.

    The blocks stay unchanged.

    Raises:
        ValueError: A block returns something other than tensors, or only integers, or its shapes
            depend on values.

    >>> output_of([nn.Conv2d(3, 8, 3), nn.Flatten()], [Boundary((2, 3, 8, 8), torch.float32)], torch.device("cpu"))
    (Boundary(shape=(2, 288), dtype=torch.float32, stride=None, has_gradient=True),)
    """
    scratch_blocks = [_copy_without_tensors(block) for block in blocks]

    # Tensors that are plain attributes of a block are real tensors.
    with FakeTensorMode(allow_non_fake_inputs=True):
        # Blocks get clones, because one may begin with an operation in place.
        value = tuple(
            boundary.empty(device, requires_grad=boundary.has_gradient).clone()
            for boundary in inputs
        )
        for block in scratch_blocks:
            value = _fake_output(block, value, device)
        outputs = tuple(boundary_of(tensor) for tensor in value)

    if any(boundary.has_gradient for boundary in outputs):
        return outputs
    # All earlier parameters are frozen, or nothing is trained. torch's schedules need at least one
    # gradient.
    return tuple(
        replace(boundary, has_gradient=boundary.dtype.is_floating_point) for boundary in outputs
    )


def _fake_output(
    block: nn.Module, arguments: tuple[Tensor, ...], device: torch.device
) -> tuple[Tensor, ...]:
    """Run `block` with fake parameters and buffers on fake `arguments`."""
    fake_state = {}
    for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
        fake_state[name] = torch.empty_strided(
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device=device,
            requires_grad=tensor.requires_grad,
        )

    try:
        outputs = as_arguments(functional_call(block, fake_state, arguments))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"The output of block {type(block).__name__} must have a shape that does not depend on tensor values, "
            "because stages agree on shapes before they compute. Move computations with value-dependent shapes out of "
            "the network."
        ) from error

    are_tensors = all(isinstance(output, Tensor) for output in outputs)
    if not are_tensors or not any(torch.is_floating_point(output) for output in outputs):
        kinds = ", ".join(type(output).__name__ for output in outputs)
        raise ValueError(
            f"Block {type(block).__name__} returned {kinds}, but must return a floating-point tensor, or a tuple of "
            "tensors of which at least one is floating-point, because the output becomes the arguments of the next "
            "block. Store other values as attributes."
        )
    return outputs


def _copy_without_tensors(block: nn.Module) -> nn.Module:
    """Copy a block without copying its tensors.

    The copy protects the block: a block may cache a table in its first forward, and must not keep a
    fake one.
    """
    shared: list[Any] = [*block.parameters(), *block.buffers()]
    for module in block.modules():
        for name, value in vars(module).items():
            # A hook may belong to any object, such as the trainer.
            if isinstance(value, Tensor) or name.endswith("_hooks"):
                shared.append(value)

    try:
        return copy.deepcopy(block, {id(value): value for value in shared})
    except Exception:  # some attributes, such as locks, cannot be copied
        return block


def costs_of(blocks: Sequence[nn.Module], example: object) -> list[float]:
    """Estimate the cost of each block's forward pass by counting operations or parameters.

    Operations are counted in a forward pass on `example`. Parameters are counted if `example` is not a
    tensor or a tuple of tensors. One operation for each element that a block returns is added, so
    that no block has zero operations.

    >>> costs_of([nn.Linear(3, 5), nn.ReLU()], torch.zeros(2, 3)), costs_of([nn.Linear(3, 5), nn.ReLU()], None)
    ([70.0, 10.0], [20.0, 0.0])
    """
    arguments = as_arguments(example)
    costs = list[float]()
    if not all(isinstance(argument, Tensor) for argument in arguments):
        for block in blocks:
            costs.append(float(sum(parameter.numel() for parameter in block.parameters())))
        return costs

    # Imported here because it imports Triton, which takes half a second.
    from torch.utils.flop_counter import FlopCounterMode

    boundaries = tuple(boundary_of(argument) for argument in arguments)
    for block in blocks:
        with FlopCounterMode(display=False) as counter:
            boundaries = output_of([block], boundaries, torch.device("cpu"))
        num_elements = sum(math.prod(boundary.shape) for boundary in boundaries)
        costs.append(float(counter.get_total_flops() + num_elements))
    return costs
