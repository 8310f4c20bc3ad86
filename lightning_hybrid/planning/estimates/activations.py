"""Memory of activations, measured on the meta device: what is alive in a step of a network, tensor by tensor."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lightning_hybrid.precision.window import HalfPrecisionWindow

MOST_IMAGES = (
    2**16
)  # beyond, bytes are taken to grow with the batch: sizes of tensors must stay below 2^63
aten = torch.ops.aten
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
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
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


def example_of(
    model: nn.Module, num_samples: int, shape: Sequence[int], *, dtype: torch.dtype = torch.float32
) -> Any:
    """Return an input on the meta device: images of this shape, or what the network's own `example` makes of it."""
    if (example := getattr(model, "example", None)) is not None:
        return example(num_samples, *shape, device="meta")
    return torch.empty(num_samples, *shape, device="meta", dtype=dtype)


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
    with HalfPrecisionWindow(shadow, HALF[precision], on_meta=True).opened():
        yield shadow, HALF[precision]


def _logarithms(result: Tensor) -> Tensor:
    # The loss of a classifier keeps them, as large as the logits.
    return F.log_softmax(result, 1) if result.dim() == 2 else result


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def step_bytes(
    model: nn.Module, image_shape: Sequence[int], *, batch_size: int, precision: str
) -> int:
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
            _forward_and_backward(shadow, images)
    # The images themselves were not counted: their batch, and the next.
    return (live.peak + 2 * sum(each.nbytes for each in inputs)) * batch_size // counted


def tracked_bytes(
    model: nn.Module, image_shape: Sequence[int], *, batch_size: int, precision: str
) -> int:
    """Measure what `step_bytes` does by torch's `MemTracker`; that takes seconds for a large network."""
    from torch.distributed._tools.mem_tracker import MemTracker  # here: it imports torch's compiler

    with meta_step(model, precision) as (shadow, dtype), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of gradients that are None
        images = example_of(shadow, batch_size, image_shape, dtype=dtype)
        tracker = MemTracker()
        inputs = list(tree_iter(images))
        tracker.track_external(shadow, *inputs)
        with tracker:
            _forward_and_backward(shadow, images)
        known = sum(each.nbytes for each in (*shadow.parameters(), *shadow.buffers(), *inputs))
        peak: int = tracker.get_tracker_snapshot("peak")[torch.device("meta")]["Total"]
    return peak - known + 2 * sum(each.nbytes for each in inputs)


def _forward_and_backward(network: nn.Module, images: Any) -> None:
    # Whatever the network returns; frozen networks have no backward. A product sums without SymPy.
    results = [value for value in tree_iter(network(images)) if isinstance(value, Tensor)]
    rows = [
        _logarithms(result.float()).reshape(1, -1) for result in results if result.requires_grad
    ]
    losses = [row.mm(row.new_empty(row.shape[1], 1)) for row in rows]
    del results, rows
    if losses:
        sum(losses[1:], losses[0]).backward()


def has_checkpointing(model: nn.Module) -> bool:
    """Whether the network has the option `checkpoint_activations`, as those of this library."""
    return hasattr(model, "checkpoint_activations")


def with_checkpointing(model: nn.Module, *, is_on: bool) -> nn.Module:
    """Return a copy of the network that re-materialises its activations, or does not."""
    changed = copy.deepcopy(model)
    changed.checkpoint_activations = is_on  # type: ignore[assignment]
    return changed


# ---- shapes on the meta device --------------------------------------------------------------------------------------


def shapes_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation, by shapes alone where all tensors are on the meta device."""
    is_plain = func in SHAPES and not kwargs.keys() - {"pin_memory", "memory_format"}
    is_meta = all(not isinstance(each, Tensor) or each.is_meta for each in args)
    result = SHAPES[func](*args) if is_plain and is_meta else None
    return func(*args, **kwargs) if result is None else result


def _elementwise(first: Tensor, second: Any, *_: Any) -> Tensor:
    shape = np.broadcast_shapes(
        first.shape, getattr(second, "shape", ())
    )  # those of torch import SymPy
    return first.new_empty(shape, dtype=torch.result_type(first, second))


def _reduced(tensor: Tensor, dims: Sequence[int] | None, keepdim: bool = False) -> Tensor:
    gone = {dim % tensor.dim() for dim in dims or range(tensor.dim())}
    left = [
        1 if dim in gone else size
        for dim, size in enumerate(tensor.shape)
        if keepdim or dim not in gone
    ]
    return tensor.new_empty(left)


def _product(first: Tensor, second: Tensor) -> Tensor | None:
    return (
        first.new_empty(first.shape[0], second.shape[1])
        if first.shape[1] == second.shape[0]
        else None
    )


def _batch_norm(images: Tensor, *more: Any) -> tuple[Tensor, ...] | None:
    if any(each is not None and each.shape != images.shape[1:2] for each in more[:4]):
        return None
    num_statistics = images.shape[1] * more[4]  # none in evaluation
    return images.new_empty(images.shape), *(
        images.new_empty(num_statistics, dtype=torch.float32) for _ in range(2)
    )


def _gradients(
    gradient: Tensor, images: Tensor, weight: Tensor, *more: Any
) -> tuple[Tensor | None, ...]:
    # Of a convolution or a normalisation, whose third parameter is a bias.
    likes = ((images, images.shape), (weight, weight.shape), (weight, gradient.shape[1:2]))
    return tuple(
        like.new_empty(shape) if wanted else None
        for (like, shape), wanted in zip(likes, more[-1], strict=True)
    )


def _places(images: Tensor, *, kernel: Any, stride: Any, padding: Any, dilation: Any) -> list[int]:
    sizes = zip(images.shape[2:], kernel, stride, padding, dilation, strict=True)
    return [
        (size + 2 * pad - apart * (width - 1) - 1) // step + 1
        for size, width, step, pad, apart in sizes
    ]


def _convolution(images: Tensor, weight: Tensor, bias: Tensor | None, *more: Any) -> Tensor | None:
    if more[3] or images.dim() != weight.dim() or images.shape[1] != more[5] * weight.shape[1]:
        return None
    places = _places(
        images, kernel=weight.shape[2:], stride=more[0], padding=more[1], dilation=more[2]
    )
    return images.new_empty(images.shape[0], weight.shape[0], *places) if min(places) > 0 else None


def _max_pool(images: Tensor, kernel: Any, *more: Any) -> tuple[Tensor, Tensor] | None:
    if len(more) != 2 or images.dim() != 4 or not all(len(each) == 2 for each in (kernel, *more)):
        return None
    places = _places(images, kernel=kernel, stride=more[0], padding=more[1], dilation=(1, 1))
    shape = (*images.shape[:2], *places)
    return (
        (images.new_empty(shape), images.new_empty(shape, dtype=torch.int64))
        if min(places) > 0
        else None
    )


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Count the products of an operation, two for each pair; 0 of what is none."""
    if func in PRODUCTS and not (func is aten.convolution.default and args[6]):
        return PRODUCTS[func](result, *args)
    if "attention" not in func.name() and func not in (
        aten.convolution.default,
        aten.baddbmm.default,
    ):
        return 0
    from torch.utils.flop_counter import flop_registry  # here: it imports Triton

    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else formula(*args, **kwargs, out_val=result)


PRODUCTS: dict[Any, Callable[..., int]] = {
    aten.convolution.default: lambda result, images, weight, *_: (
        2 * result.numel() * weight[0].numel()
    ),
    aten.mm.default: lambda result, first, second: 2 * result.numel() * first.shape[-1],
    aten.bmm.default: lambda result, first, second: 2 * result.numel() * first.shape[-1],
    aten.addmm.default: lambda result, bias, first, second: 2 * result.numel() * first.shape[-1],
}
# Of what most networks consist of: torch takes these apart on the meta device, and imports its compiler and SymPy for
# that, which takes seconds. The results have the same bytes. None: arguments that torch has to look at, or refuse.
SHAPES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (aten.add.Tensor, aten.mul.Tensor, aten.div.Scalar, aten.threshold_backward.default),
        _elementwise,
    ),
    **dict.fromkeys(
        (aten.empty_like.default, aten.ones_like.default), lambda like: like.new_empty(like.shape)
    ),
    aten._log_softmax.default: lambda tensor, *_: tensor.new_empty(tensor.shape),
    aten._log_softmax_backward_data.default: lambda gradient, *_: gradient.new_empty(
        gradient.shape
    ),
    aten.div_.Scalar: lambda tensor, _: tensor,
    aten.mm.default: _product,
    aten.addmm.default: lambda bias, first, second: _product(first, second),
    **dict.fromkeys((aten.mean.dim, aten.sum.dim_IntList), _reduced),
    aten.convolution.default: _convolution,
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.native_batch_norm.default: _batch_norm,
    **dict.fromkeys(
        (aten.native_batch_norm_backward.default, aten.convolution_backward.default), _gradients
    ),
    aten.max_pool2d_with_indices_backward.default: lambda gradient, images, *_: images.new_empty(
        images.shape
    ),
}
