"""Activation checkpointing that updates BatchNorm's running statistics once per batch."""

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
    """Compute `stage(*xs)` with activation checkpointing, so that backward recomputes activations.

    Values and gradients are bitwise equal to those of `stage(*xs)` if its kernels are deterministic and use no random
    numbers. Running statistics of the normalization layers in `norms` are updated only once, in forward. Without
    autograd (`torch.no_grad`), the stage runs only once.

    Args:
        stage: Function to compute.
        *xs: Arguments of the function.
        norms: Module whose normalization layers the stage uses.
        preserve_rng_state: Whether the recomputation uses the same random numbers, for example for dropout. This needs
            a copy of the random state.

    Source: Chen et al. 2016, arXiv:1604.06174.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), second_pass(norms)

    # Only the non-reentrant implementation accepts a `context_fn`.
    return checkpoint(
        stage,
        *xs,
        preserve_rng_state=preserve_rng_state,
        use_reentrant=False,
        context_fn=contexts,
    )


def second_pass(norms: nn.Module) -> AbstractContextManager[None]:
    """Return a context manager for recomputation that leaves running statistics unchanged.

    The context manager also enters the torch function modes that are active when this function is called.

    Args:
        norms: Module whose normalization layers must not update their running statistics.
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
    """Return the active torch function modes that a recomputation must enter again."""
    # An example is the emulated fp16 of precision="16-true" on a CPU, where a recomputation must reproduce the results
    # of forward. torch's checkpoint restores only the innermost DeviceContext.
    modes = _get_current_function_mode_stack()
    return [mode for mode in modes if not isinstance(mode, DeviceContext)]


@contextmanager
def _copies_of_running_statistics(norms: nn.Module) -> Iterator[None]:
    # Without these copies, each batch would count twice in the running statistics and in `num_batches_tracked`.
    # `track_running_stats=False` cannot be used, because both passes must save the same number of tensors.
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
