"""The loss of a run's first micro-batch, in stages and by `training_step` with the whole network: they must agree.

What does not go from stage to stage, as what `forward` does besides its blocks or features that a hook keeps, would be
left out of training in silence. The rank of the first stage, whose inputs count, holds the whole network for a moment.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.comm.health.watchdog import short
from lightning_hybrid.module_state import put_back


def free_bytes(device: torch.device) -> float:
    """Return how much memory is free on a device; a host has held the network before it was cut."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf


def loss_of_whole(
    module: nn.Module,
    net: nn.Module,
    whole: AbstractContextManager[None],
    run: Callable[[], Tensor],
    *,
    eps: float,
) -> float | str:
    """Return the loss that `run` returns, with what it moves put back; or why it is not known.

    `whole`: inside, the network is here. `eps`: of its dtype. NaN: the loss depends on what it moves in the module.
    """
    try:
        with whole:
            if any(
                getattr(each, "_compiled_call_impl", None) or hasattr(each, "_orig_mod")
                for each in net.modules()
            ):
                return "its blocks are compiled"
            with put_back(module):
                with put_back(net):
                    loss = float(run())
                later = float(run())  # with what the first one left outside of the network
            if is_close(loss, later, eps):
                return loss if math.isfinite(loss) else math.inf
            with put_back(module):
                again = float(run())
    except Exception as error:  # as for want of memory, or of what another rank has
        return short(error)
    return (
        math.nan
        if is_close(loss, again, eps)
        else f"it is {loss:g} and {again:g} for the same micro-batch"
    )


def check_loss(whole: float, in_stages: float, *, net: nn.Module, eps: float) -> None:
    """Check that the loss of a micro-batch in stages is that with the whole network.

    Raises:
        ValueError: it is another one, or depends on what each micro-batch moves in the module.
    """
    if math.isnan(whole):
        raise ValueError(
            "The loss of `training_step` must not depend on what it moves in the module (attributes, buffers, a "
            "generator): the first and the last stage run it for each micro-batch, and every rank for the whole batch. "
            "Move that in `on_train_batch_end`, and draw random numbers from the default generators."
        )
    if not is_close(whole, in_stages, eps):
        hooked = [
            name
            for name, each in net.named_modules()
            if each._forward_hooks or each._forward_pre_hooks
        ]
        raise ValueError(
            f"The loss of the first micro-batch in stages (={in_stages:g}) must be that of `training_step` with the "
            f"whole network (={whole:g}): what it needs besides does not go from stage to stage. Does `forward` do "
            "more than its blocks? Make it a block. Does a block, or a forward hook (there are some on "
            f"{', '.join(hooked[:4]) or 'none'}), keep a tensor for the loss? Return it from the last block. Does the "
            "loss depend on images that each rank augments at random? Draw from the number of the sample, alike on all "
            "ranks."
        )


def is_close(one: float, other: float, eps: float) -> bool:
    """Whether two losses are equal but for rounding, as of sums in another order; two that are not finite are.

    >>> is_close(1.0, 1.00001, 1e-7), is_close(1.0, 1.001, 1e-7), is_close(math.inf, math.nan, 1e-7)
    (True, False, True)
    """
    tolerance = max(1e-4, 8 * eps)
    are_finite = {math.isfinite(one), math.isfinite(other)}
    return are_finite == {False} or math.isclose(
        one, other, rel_tol=tolerance, abs_tol=tolerance / 100
    )


@contextmanager
def in_stages(
    net: nn.Module,
    blocks: Sequence[nn.Module],
    places: Sequence[int],
    draws: Callable[[int], AbstractContextManager[Any]],
) -> Iterator[None]:
    """Let the blocks of a stage, where the whole network runs, draw inside of `draws(stage)`. `places`: its first.

    A `forward` of its own may call the layers of a block and not the block: the first that one stage alone has counts.
    """
    number, reached = 0, -1  # of the next block; stage
    homes: dict[nn.Module, set[int]] = {}
    for index, block in enumerate(blocks):
        for each in block.modules():
            homes.setdefault(each, set()).add(bisect_right(places, index) - 1)
    with ExitStack() as handles, ExitStack() as current:

        def before(layer: nn.Module, *_: Any) -> None:
            nonlocal number, reached
            stages = homes[layer]
            if number < len(blocks) and layer is blocks[number]:
                stages = {bisect_right(places, number) - 1}
                number += 1
            if len(stages) == 1 and max(stages) > reached:
                (reached,) = stages
                current.close()
                current.enter_context(draws(reached))

        for layer in homes:
            handles.callback(layer.register_forward_pre_hook(before, prepend=True).remove)
        handles.callback(net.register_forward_hook(lambda *_: current.close(), prepend=True).remove)
        yield
