"""Memory of activations, measured on the meta device: what is alive in a step of a network, tensor by tensor."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lightning_hybrid.precision.master_weights import MasterWeights
from recipes.planning.meta_shapes import flops_of, shapes_of

MOST_IMAGES = 2**16  # beyond, bytes are taken to grow with the batch: sizes of tensors must stay below 2^63
HALF = {"16-true": torch.float16, "bf16-true": torch.bfloat16}


class LiveBytes(TorchDispatchMode):
    """Count of the bytes of all tensors that are alive and were made within the context, and of its FLOPs.

    Views count once. FLOPs are those of products, by torch's own formulas.

    Args:
        known: Tensors that do not count.

    >>> with LiveBytes() as live:
    ...     kept = torch.empty(100, device="meta") + 1
    >>> live.now, live.peak
    (400, 800)
    """

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = self.flops = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self._known = list(known)  # so that no address is used again

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not: torch would import its compiler for that, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation; count its products, and the memory of its results until they are freed."""
        kwargs = kwargs or {}
        results = shapes_of(func, args, kwargs)
        self.flops += flops_of(func, args, kwargs, results)
        for result in tree_iter(results):
            if isinstance(result, Tensor):
                self._count(result.untyped_storage())
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._sizes:
            return
        self._sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, address: int) -> None:
        self.now -= self._sizes.pop(address)


@contextmanager
def meta_step(model: nn.Module, precision: str) -> Iterator[tuple[nn.Module, torch.dtype]]:
    """Yield a copy of the network on the meta device as a step of this precision sees it, and the dtype of its input.

    Gradients of parameters are dropped as soon as they are there: they live in the buckets, which others count.
    """
    shadow = copy.deepcopy(model).to("meta").train()
    for parameter in shadow.parameters():
        parameter.register_post_accumulate_grad_hook(_drop)
    if precision not in HALF:
        yield shadow, torch.float32
        return
    # The very conversion of a run: which layers stay fp32, and what they return.
    with MasterWeights(shadow, HALF[precision], on_meta=True).hooks.in_step():
        yield shadow, HALF[precision]


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def step_bytes(model: nn.Module, image_shape: Sequence[int], *, batch_size: int, precision: str) -> int:
    """Measure the most bytes that forward and backward of a batch hold at once, weights and their gradients aside.

    Counted are what forward keeps for backward, what both need for a moment, what re-materialisation makes again, and
    two batches of images, as the next one is loaded meanwhile. Not counted are workspaces of the device's libraries.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Sigmoid(), nn.Linear(5, 1))
    >>> images, hidden = 2 * 2 * 12 * 4, 2 * 5 * 4                 # two batches of two images
    >>> images + 2 * hidden < step_bytes(net, (3, 2, 2), batch_size=2, precision="32-true") < images + 6 * hidden + 300
    True
    """
    counted = min(batch_size, MOST_IMAGES)
    with meta_step(model, precision) as (shadow, dtype):
        images = torch.empty(counted, *image_shape, device="meta", dtype=dtype)
        with LiveBytes(known=[*shadow.parameters(), *shadow.buffers(), images]) as live:
            # Whatever the network returns; frozen networks have no backward. A product sums without SymPy.
            results = [value for value in tree_iter(shadow(images)) if isinstance(value, Tensor)]
            rows = [result.float().reshape(1, -1) for result in results if result.requires_grad]
            losses = [row.mm(row.new_empty(row.shape[1], 1)) for row in rows]
            del results, rows
            if losses:
                sum(losses[1:], losses[0]).backward()
    # The images themselves were not counted: their batch, and the next.
    return (live.peak + 2 * images.nbytes) * batch_size // counted


def has_checkpointing(model: nn.Module) -> bool:
    """Whether the network has the option `checkpoint_activations`, as those of this library."""
    return hasattr(model, "checkpoint_activations")


def with_checkpointing(model: nn.Module, *, is_on: bool) -> nn.Module:
    """Return a copy of the network that re-materialises its activations, or does not."""
    changed = copy.deepcopy(model)
    changed.checkpoint_activations = is_on  # type: ignore[assignment]
    return changed
