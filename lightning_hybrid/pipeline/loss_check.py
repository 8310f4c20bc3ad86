"""Check that the pipeline and the whole network compute the same loss for the first micro-batch.

Some code is not part of any stage, such as operations in `forward` outside of the blocks, or features that a hook
stores. A pipeline would silently leave this code out of training. Therefore the rank of the first stage loads the
whole network for one forward pass, and both losses must agree.
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
    """Return the free memory of a device in bytes.

    The result is infinite for a CPU, whose memory held the whole network before it was divided into stages.
    """
    if device.type != "cuda":
        return math.inf
    return torch.cuda.mem_get_info(device)[0]


def loss_of_whole(
    module: nn.Module,
    net: nn.Module,
    whole_network: AbstractContextManager[None],
    compute_loss: Callable[[], Tensor],
    *,
    eps: float,
) -> float | str:
    """Compute the loss with the whole network, and restore the module state that this computation changes.

    Args:
        module: The LightningModule.
        net: The network of the module.
        whole_network: Context in which this rank holds the whole network.
        compute_loss: Function that computes the loss.
        eps: Machine epsilon of the network's dtype.

    Returns:
        The loss, or the reason why it is unknown. NaN if the loss depends on state that the
        computation changes in the module.
    """
    try:
        with whole_network:
            if any(_is_compiled(submodule) for submodule in net.modules()):
                return "the blocks of the network are compiled"

            with put_back(module):
                with put_back(net):
                    loss = float(compute_loss())
                # The second computation starts from the state that the first one left outside of the network.
                later_loss = float(compute_loss())
            if is_close(loss, later_loss, eps):
                return loss if math.isfinite(loss) else math.inf

            with put_back(module):
                repeated_loss = float(compute_loss())
    except Exception as error:  # such as too little memory, or state that only another rank has
        return short(error)

    if is_close(loss, repeated_loss, eps):
        return math.nan
    return (
        f"the whole network's loss is {loss:g} and then {repeated_loss:g} for the same micro-batch"
    )


def _is_compiled(module: nn.Module) -> bool:
    return bool(getattr(module, "_compiled_call_impl", None)) or hasattr(module, "_orig_mod")


def check_loss(whole_loss: float, stage_loss: float, *, net: nn.Module, eps: float) -> None:
    """Raise `ValueError` if the pipeline and the whole network compute different losses for a micro-batch.

    Raises:
        ValueError: The losses differ, or the loss depends on module state that each micro-batch changes.
    """
    if math.isnan(whole_loss):
        raise ValueError(
            "The loss of `training_step` must not depend on module state that it changes (attributes, buffers, "
            "generators), because the first and the last stage run it for each micro-batch, and every rank runs it "
            "for the whole batch. Change this state in `on_train_batch_end`, and draw random numbers from the default "
            "generators."
        )
    if is_close(whole_loss, stage_loss, eps):
        return

    hooked = []
    for name, submodule in net.named_modules():
        if submodule._forward_hooks or submodule._forward_pre_hooks:
            hooked.append(name)
    hooked_names = ", ".join(hooked[:4]) or "none"
    raise ValueError(
        f"The loss of the first micro-batch is {stage_loss:g} in the pipeline, but {whole_loss:g} with the whole "
        "network. If `forward` computes something outside its blocks, move it into a block. If a block or a forward "
        f"hook (modules with hooks: {hooked_names}) stores a tensor for the loss, return the tensor from the last "
        "block. If ranks augment images differently, seed the augmentation by the index of the sample."
    )


def is_close(first_loss: float, second_loss: float, eps: float) -> bool:
    """Return whether two losses are equal up to rounding.

    Rounding differs, for example, if values are added in another order.

    Two losses that are both not finite count as equal.

    >>> is_close(1.0, 1.00001, 1e-7), is_close(1.0, 1.001, 1e-7), is_close(math.inf, math.nan, 1e-7)
    (True, False, True)
    """
    if not math.isfinite(first_loss) and not math.isfinite(second_loss):
        return True
    tolerance = max(1e-4, 8 * eps)
    return math.isclose(first_loss, second_loss, rel_tol=tolerance, abs_tol=tolerance / 100)


@contextmanager
def in_stages(
    net: nn.Module,
    blocks: Sequence[nn.Module],
    places: Sequence[int],
    random_state_of: Callable[[int], AbstractContextManager[Any]],
) -> Iterator[None]:
    """Temporarily make the whole network draw the same random numbers as its pipeline stages.

    A user's `forward` may call the layers of a block instead of the block itself. Therefore a stage
    also begins at the first call of a layer that only this stage contains.

    Args:
        net: The network.
        blocks: Blocks of the network, in order.
        places: Index of each stage's first block, followed by the number of blocks.
        random_state_of: Function that returns the context with the random numbers of a stage.
    """
    next_block = 0
    current_stage = -1
    stages_of: dict[nn.Module, set[int]] = {}
    for index, block in enumerate(blocks):
        for layer in block.modules():
            stages_of.setdefault(layer, set()).add(bisect_right(places, index) - 1)

    with ExitStack() as hooks, ExitStack() as current_state:

        def enter_stage(layer: nn.Module, *_: Any) -> None:
            nonlocal next_block, current_stage
            stages = stages_of[layer]
            if next_block < len(blocks) and layer is blocks[next_block]:
                stages = {bisect_right(places, next_block) - 1}
                next_block += 1
            if len(stages) == 1 and max(stages) > current_stage:
                current_stage = max(stages)
                current_state.close()
                current_state.enter_context(random_state_of(current_stage))

        def leave_stages(*_: Any) -> None:
            current_state.close()

        for layer in stages_of:
            hooks.callback(layer.register_forward_pre_hook(enter_stage, prepend=True).remove)
        hooks.callback(net.register_forward_hook(leave_stages, prepend=True).remove)
        yield
