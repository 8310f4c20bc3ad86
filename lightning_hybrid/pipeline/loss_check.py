"""The loss of a run's first micro-batch, in stages and by `training_step` with the whole network: they must agree.

What does not go from stage to stage, as what `forward` does besides its blocks or features that a hook keeps, would be
left out of training in silence. The rank of the first stage, whose inputs count, holds the whole network for a moment.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

# Relative, beside rounding: kernels on CUDA may add in another order each time.
_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class WholeLoss:
    """The loss with the whole network; NaN, and why, where it is not known. `moved`: attributes it depends on."""

    value: float = math.nan
    unknown_as: str = ""
    moved: Sequence[str] = ()


def loss_of_whole(
    module: nn.Module, net: nn.Module, whole: AbstractContextManager[None], run: Callable[[], Tensor], *, eps: float
) -> WholeLoss:
    """Return the loss that `run` returns, with what it moves put back.

    `whole`: inside, the network is here. `eps`: of its dtype.
    """
    if any(getattr(each, "_compiled_call_impl", None) or hasattr(each, "_orig_mod") for each in net.modules()):
        return WholeLoss(unknown_as="its blocks are compiled")
    try:
        with whole:
            with put_back(module):
                before = marks_outside(module, net, attributes=True)
                with put_back(net):
                    value = float(run())
                names = moved(before, marks_outside(module, net, attributes=True))
                again = float(run())  # with what the first one left outside of the network
            if is_close(value, again, eps):
                return WholeLoss(value=value)
            with put_back(module):
                again = float(run())
    except Exception as error:  # as for want of memory, or of what only another rank has
        return WholeLoss(unknown_as=f"{type(error).__name__}: {error}")
    if not is_close(value, again, eps):
        return WholeLoss(unknown_as=f"`training_step` returned {value:g} and {again:g} for the same micro-batch")
    return WholeLoss(value=value, moved=names or ["a list, dictionary or generator"])


def check_loss(whole: WholeLoss, in_stages: float, *, net: nn.Module, eps: float) -> None:
    """Check that the loss of a micro-batch in stages is that with the whole network.

    Raises:
        ValueError: it is another one, or depends on what each micro-batch moves in the module.
    """
    if whole.moved:
        raise ValueError(
            f"The loss of `training_step` must not depend on what it moves in the module (here {', '.join(whole.moved)} "
            "change): the first and the last stage run it for each micro-batch, and every rank for the whole batch. "
            "Move it in `on_train_batch_end`, and draw random numbers from the default generators."
        )
    if whole.unknown_as or is_close(whole.value, in_stages, eps):
        return
    hooked = [name for name, each in net.named_modules() if each._forward_hooks or each._forward_pre_hooks]
    raise ValueError(
        f"The loss of the first micro-batch in stages (={in_stages:g}) must be that of `training_step` with the whole "
        f"network (={whole.value:g}): something that it needs does not go from stage to stage, and a pipeline would "
        f"train without it. What can be: its `forward` does something between the blocks; a forward hook (of "
        f"{', '.join(hooked[:4]) or 'none'}) or a block keeps a tensor for `training_step`, on another rank; the loss "
        "depends on values of the batch that differ between ranks, as images augmented at random do: draw from the "
        "number of the sample, alike on all ranks. Let each block take what the one before returns, and compute the "
        "loss of the batch and of what the last one returns."
    )


def free_bytes(device: torch.device) -> float:
    """Return how much memory is free on a device; a host has held the network before it was cut."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf


def is_close(one: float, other: float, eps: float) -> bool:
    """Whether two losses are equal but for rounding; two that are not finite are.

    >>> is_close(1.0, 1.00001, 1e-7), is_close(1.0, 1.001, 1e-7), is_close(math.inf, math.nan, 1e-7)
    (True, False, True)
    """
    tolerance = max(_TOLERANCE, 8 * eps)
    both = math.isfinite(one) + math.isfinite(other)
    return both == 0 or (both == 2 and math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance / 100))


@contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Put back in the end what a step moves in a module.

    Tensors but parameters, attributes, entries of lists, dictionaries, sets and deques, and torch's generators. Not what
    is inside of other objects, and what is outside of the module, as a file or a global counter.
    """
    spaces = [(vars(each), dict(vars(each))) for each in module.modules()]
    values = [value for _, space in spaces for value in space.values()]
    kinds = (dict, OrderedDict, list, set, deque)
    entries: list[tuple[Any, Any]] = [(value, copy.copy(value)) for value in values if type(value) in kinds]
    generators = [(each, each.get_state()) for each in values if isinstance(each, torch.Generator)]
    own = {id(each): each for each in (*module.buffers(), *values) if isinstance(each, Tensor)}
    tensors = [(each, each.detach().clone()) for each in own.values()]
    try:
        yield
    finally:
        for now, before in (*spaces, *entries):
            now.clear()
            (now.extend if isinstance(now, list | deque) else now.update)(before)
        for generator, state in generators:
            generator.set_state(state)
        for tensor, value in tensors:
            tensor.detach().copy_(value)


def marks_outside(module: nn.Module, net: nn.Module, *, attributes: bool = False) -> dict[str, tuple[Any, int]]:
    """Return the buffers of a module that are not in `net` by name, with counts of writes; `attributes`: those too."""
    inside = {id(each) for each in net.modules()}
    outside = [(name, each) for name, each in module.named_modules() if id(each) not in inside]
    return {
        f"{prefix}.{name}".lstrip("."): (value, _num_writes(value))
        for prefix, each in outside
        if not isinstance(each, Metric | MetricCollection)
        for name, value in (*(vars(each).items() if attributes else ()), *each._buffers.items())
    }


def moved(before: Mapping[str, tuple[Any, int]], now: Mapping[str, tuple[Any, int]]) -> list[str]:
    """Return the names that are new, or of another object, or of a tensor that was written to."""
    old: tuple[Any, int] = (None, -1)
    return [
        name for name, (value, num) in now.items() if before.get(name, old)[0] is not value or before[name][1] != num
    ]


def _num_writes(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


@contextmanager
def in_stages(
    net: nn.Module,
    blocks: Sequence[nn.Module],
    places: Sequence[int],
    draws: Callable[[int], AbstractContextManager[Any]],
) -> Iterator[None]:
    """Let the blocks of each stage draw inside of `draws(stage)`, where the whole network runs. `places`: see there."""
    number = 0  # of the next block
    with ExitStack() as handles, ExitStack() as current:

        def before_block(block: nn.Module, *_: Any) -> None:
            nonlocal number
            if number < len(blocks) and block is blocks[number]:
                if number in places:
                    current.close()
                    current.enter_context(draws(places.index(number)))
                number += 1

        def after_net(*_: Any) -> None:
            current.close()

        for block in {id(each): each for each in blocks}.values():
            handles.callback(block.register_forward_pre_hook(before_block, prepend=True).remove)
        handles.callback(net.register_forward_hook(after_net, prepend=True).remove)
        yield
