"""Activation checkpointing that counts each batch once in BatchNorm's running statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import _get_current_function_mode_stack  # as torch's own checkpoint reads it
from torch.utils._device import DeviceContext
from torch.utils.checkpoint import checkpoint


def checkpointed(
    stage: Callable[..., Any], *xs: Tensor, norms: nn.Module, preserve_rng_state: bool = False
) -> Any:
    """Compute `stage(*xs)` without storing its activations for backward, which computes them again.

    Values and gradients are those of `stage(*xs)` bit for bit, if its kernels are deterministic and draw no random
    numbers: with `preserve_rng_state` they may (dropout), which costs a copy of the random state. Running statistics of
    the normalisation layers in `norms` move once, in forward. Shapes and dtypes are those of `stage`; without autograd
    (`torch.no_grad`) it runs once, as always.

    Source: Chen et al. 2016, arXiv:1604.06174.
    """
    # Without reentry, the only way that takes a `context_fn`.
    options: Any = {
        "use_reentrant": False,
        "context_fn": lambda: (nullcontext(), second_pass(norms)),
    }
    return checkpoint(stage, *xs, preserve_rng_state=preserve_rng_state, **options)


def second_pass(norms: nn.Module) -> AbstractContextManager[None]:
    """Return a context for the second pass of what runs now: modes as now, running statistics of `norms` stay."""
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
    """Return the modes that change the results of torch's functions now, to be entered again for a second pass."""
    # Such as the emulated fp16 of precision="16-true" on a CPU: backward must see the numbers of forward. torch's
    # checkpoint restores only the innermost DeviceContext.
    return [
        mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)
    ]


@contextmanager
def _copies_of_running_statistics(norms: nn.Module) -> Iterator[None]:
    # Otherwise each batch would count twice in the running statistics, and in `num_batches_tracked` too.
    # Not `track_running_stats=False`: checkpoint requires that both passes save as many tensors, these included.
    originals = [
        (module, name, buffer)
        for module in norms.modules()
        if isinstance(module, _NormBase)
        for name, buffer in module.named_buffers(recurse=False)
    ]
    for module, name, buffer in originals:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        for module, name, buffer in originals:
            setattr(module, name, buffer)
