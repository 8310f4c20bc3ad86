"""Activation memory and FLOPs of a training step, measured on the meta device."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lightning_hybrid.planning.estimates.meta_operations import flops_of, shapes_of
from lightning_hybrid.precision.half_window import HalfPrecisionWindow

# Larger batches are extrapolated in proportion, because tensor sizes must stay below 2^63.
MOST_IMAGES = 2**16
HALF = {"16-true": torch.float16, "bf16-true": torch.bfloat16}


class LiveBytes(TorchDispatchMode):
    """Context manager that counts FLOPs and the bytes of live tensors created inside it.

    A tensor and its views count once. FLOPs include only products, by torch's own formulas.

    Args:
        known: Tensors that do not count.

    >>> with LiveBytes() as live:
    ...     kept = torch.empty(100, device="meta") + 1
    >>> live.now, live.peak
    (400, 800)
    """

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self.flops = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        # References keep these tensors alive, so that no new tensor reuses one of their addresses.
        self._known = list(known)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False to keep torch from importing its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, count its FLOPs, and track the memory of its results until they are freed."""
        kwargs = kwargs or {}
        results = shapes_of(func, args, kwargs)
        self.flops += flops_of(func, args, kwargs, results)
        for result in tree_iter(results):
            if isinstance(result, Tensor):
                self._count(result.untyped_storage())
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self._sizes:
            return
        num_bytes = storage.nbytes()
        self._sizes[address] = num_bytes
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, address)

    def _free(self, address: int) -> None:
        self.now -= self._sizes.pop(address)


def example_of(
    model: nn.Module, num_samples: int, shape: Sequence[int], *, dtype: torch.dtype = torch.float32
) -> Any:
    """Return an example input of the network on the meta device.

    The network's own `example` method creates it if there is one. Otherwise it is a batch of images
    of this shape.
    """
    example = getattr(model, "example", None)
    if example is not None:
        return example(num_samples, *shape, device="meta")
    return torch.empty(num_samples, *shape, device="meta", dtype=dtype)


@contextmanager
def meta_step(model: nn.Module, precision: str) -> Iterator[tuple[nn.Module, torch.dtype]]:
    """Yield a copy of the network on the meta device, in a given precision, and the dtype of its input.

    Gradients of parameters are dropped as soon as they are computed, because they are part of the
    buckets, whose memory is counted elsewhere.
    """
    shadow = copy.deepcopy(model).to("meta").train()
    for parameter in shadow.parameters():
        parameter.register_post_accumulate_grad_hook(_drop)
    half_dtype = HALF.get(precision)
    if half_dtype is None:
        yield shadow, torch.float32
        return
    # A run uses the same conversion, which decides the layers that stay fp32 and their output dtype.
    window = HalfPrecisionWindow(shadow, half_dtype, on_meta=True)
    with window.opened():
        yield shadow, half_dtype


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def step_bytes(
    model: nn.Module, image_shape: Sequence[int], *, batch_size: int, precision: str
) -> int:
    """Return the peak memory of a forward and backward pass in bytes, without parameters and their gradients.

    The peak includes activations saved for the backward pass, temporary tensors of both passes,
    recomputed activations, and two batches of images, because the next batch is loaded during
    the step. It does not include workspaces of the device's libraries.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Sigmoid(), nn.Linear(5, 1))
    >>> images, hidden = 2 * 2 * 12 * 4, 2 * 5 * 4                 # two batches of two images
    >>> images + 2 * hidden < step_bytes(net, (3, 2, 2), batch_size=2, precision="32-true") < images + 6 * hidden + 300
    True
    """
    num_counted = min(batch_size, MOST_IMAGES)
    with meta_step(model, precision) as (shadow, dtype):
        images = example_of(shadow, num_counted, image_shape, dtype=dtype)
        inputs = list(tree_iter(images))
        known = [*shadow.parameters(), *shadow.buffers(), *inputs]
        with LiveBytes(known) as live:
            _forward_and_backward(shadow, images)
    # `LiveBytes` did not count the images, so add this batch and the next.
    input_bytes = sum(tensor.nbytes for tensor in inputs)
    counted_bytes = live.peak + 2 * input_bytes
    return counted_bytes * batch_size // num_counted


def _forward_and_backward(network: nn.Module, images: Any) -> None:
    """Run a forward pass, and a backward pass from the sum of all outputs.

    Backward frees tensors as in training, so no local variable refers to one that it could free.
    """
    # A network may return any structure of tensors. A frozen one has no backward.
    outputs = [value for value in tree_iter(network(images)) if isinstance(value, Tensor)]
    rows = [_loss_row(output) for output in outputs if output.requires_grad]
    losses = [_sum_of(row) for row in rows]
    del outputs, rows
    if losses:
        sum(losses[1:], losses[0]).backward()


def _loss_row(output: Tensor) -> Tensor:
    """Return the tensor that a loss function keeps for backward, as a matrix with one row."""
    values = output.float()
    # A classifier's loss keeps its log-probabilities, which are as large as the logits.
    if values.dim() == 2:
        values = F.log_softmax(values, 1)
    return values.reshape(1, -1)


def _sum_of(row: Tensor) -> Tensor:
    # A matrix product, because torch's own sum imports SymPy on the meta device.
    column = row.new_empty(row.shape[1], 1)
    return row.mm(column)


def has_checkpointing(model: nn.Module) -> bool:
    """Return whether the network has the option `checkpoint_activations`.

    Networks of this library have it.
    """
    return hasattr(model, "checkpoint_activations")


def with_checkpointing(model: nn.Module, *, is_on: bool) -> nn.Module:
    """Return a copy of the network with activation checkpointing switched on or off."""
    changed = copy.deepcopy(model)
    changed.checkpoint_activations = is_on  # type: ignore[assignment]
    return changed
