"""Memory of activations, measured on the meta device: what is alive in a step of a network, tensor by tensor."""

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

from lightning_hybrid.precision.master_weights import MasterWeights
from recipes.planning.layers import example_of

MOST_IMAGES = 2**16  # beyond, bytes are taken to grow with the batch: sizes of tensors must stay below 2^63
HALF = {"16-true": torch.float16, "bf16-true": torch.bfloat16}


class LiveBytes(TorchDispatchMode):
    """Count of the bytes of all tensors that are alive and were made within the context; views count once.

    Args:
        known: Tensors that do not count.

    >>> with LiveBytes() as live:
    ...     kept = torch.empty(100, device="meta") + 1
    >>> live.now, live.peak
    (400, 800)
    """

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self._known = list(known)  # so that no address is used again

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation; count the memory of its results until they are freed."""
        results = func(*args, **(kwargs or {}))
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


def _loss(result: Tensor) -> Tensor:
    # Of logits that of a classifier: it keeps their logarithms, as large as they are.
    labels = torch.zeros(len(result), dtype=torch.int64, device="meta") if result.dim() == 2 else None
    return result.mean() if labels is None else F.cross_entropy(result, labels)


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
        images = example_of(shadow, counted, image_shape, dtype=dtype)
        inputs = list(tree_iter(images))
        with LiveBytes(known=[*shadow.parameters(), *shadow.buffers(), *inputs]) as live:
            # Whatever the network returns; frozen networks have no backward.
            results = [value for value in tree_iter(shadow(images)) if isinstance(value, Tensor)]
            losses = [_loss(result.float()) for result in results if result.requires_grad]
            del results
            if losses:
                torch.stack(losses).sum().backward()
    # The images themselves were not counted: their batch, and the next.
    return (live.peak + 2 * sum(each.nbytes for each in inputs)) * batch_size // counted


def has_checkpointing(model: nn.Module) -> bool:
    """Whether the network has the option `checkpoint_activations`, as those of this library."""
    return hasattr(model, "checkpoint_activations")


def with_checkpointing(model: nn.Module, *, is_on: bool) -> nn.Module:
    """Return a copy of the network that re-materialises its activations, or does not."""
    changed = copy.deepcopy(model)
    changed.checkpoint_activations = is_on  # type: ignore[assignment]
    return changed
