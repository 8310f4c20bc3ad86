"""Activation checkpointing that counts each batch once in BatchNorm's running statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import _get_current_function_mode_stack  # torch's checkpoint uses it too
from torch.utils._device import DeviceContext
from torch.utils.checkpoint import checkpoint


def checkpointed(
    stage: Callable[..., Any], *xs: Tensor, norms: nn.Module, preserve_rng_state: bool = False
) -> Any:
    """Compute `stage(*xs)` without storing its activations, which backward computes again.

    Values and gradients equal those of `stage(*xs)` bit for bit, if its kernels are deterministic and draw no random
    numbers. Running statistics of the normalisation layers in `norms` are updated once, in forward. Without autograd
    (`torch.no_grad`) the stage runs only once.

    Args:
        stage: Function to compute.
        *xs: Its arguments.
        norms: Module whose normalisation layers the stage uses.
        preserve_rng_state: Whether both passes draw the same random numbers (dropout), which costs a copy of the random
            state.

    Source: Chen et al. 2016, arXiv:1604.06174.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), second_pass(norms)

    # Only the implementation without reentry accepts a `context_fn`.
    return checkpoint(
        stage,
        *xs,
        preserve_rng_state=preserve_rng_state,
        use_reentrant=False,
        context_fn=contexts,
    )


def second_pass(norms: nn.Module) -> AbstractContextManager[None]:
    """Return a context for a second pass, with the current function modes and without updates of running statistics.

    Args:
        norms: Module whose normalisation layers keep their running statistics.
    """
    modes = current_function_modes()

    @contextmanager
    def context() -> Iterator[None]:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            stack.enter_context(_copies_of_running_statistics(norms))
            yield

    return context()


def current_function_modes() -> list[Any]:
    """Return the active modes that change the results of torch functions, to be entered again for a second pass."""
    # An example is the emulated fp16 of precision="16-true" on a CPU: backward must see the numbers of forward. torch's
    # checkpoint restores only the innermost DeviceContext.
    modes = _get_current_function_mode_stack()
    return [mode for mode in modes if not isinstance(mode, DeviceContext)]


@contextmanager
def _copies_of_running_statistics(norms: nn.Module) -> Iterator[None]:
    # Otherwise each batch would count twice in the running statistics, and also in `num_batches_tracked`.
    # `track_running_stats=False` is no alternative: both passes must save equally many tensors, including these.
    originals = []
    for module in norms.modules():
        if isinstance(module, _NormBase):
            for name, buffer in module.named_buffers(recurse=False):
                originals.append((module, name, buffer))
    for module, name, buffer in originals:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        for module, name, buffer in originals:
            setattr(module, name, buffer)
