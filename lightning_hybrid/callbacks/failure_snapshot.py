"""Diagnostics for numerical failures: batch description, first non-finite layer, and saved state."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from lightning_hybrid.atomic_file import atomic_path
from lightning_hybrid.comm.topology import host_identity
from lightning_hybrid.optim.dtensor import local_shard
from lightning_hybrid.run_status import run_status

MOST_SAMPLES = 5
"""Maximum number of samples listed in a description."""


class LayerProbes:
    """Hooks that measure the largest magnitude of each layer's output in a forward pass.

    The hooks do not wait for the device.
    """

    def __init__(self, module: nn.Module) -> None:
        self._magnitudes: list[tuple[str, Tensor]] = []  # per layer, in execution order
        self._hooks = []
        for name, layer in module.named_modules():
            if name and not any(layer.children()):
                hook = layer.register_forward_hook(partial(self._note_output, name))
                self._hooks.append(hook)

    def _note_output(self, name: str, layer: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
            self._magnitudes.append((f"{name} ({type(layer).__name__})", _largest(output)))

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def first_not_finite(self) -> str | None:
        """Return the name of the first layer whose output contained inf or nan, or None.

        Layers are checked in execution order. The host waits for the device.
        """
        if not self._magnitudes:
            return None
        magnitudes = torch.stack([largest.float() for _, largest in self._magnitudes])
        are_finite = torch.isfinite(magnitudes).tolist()
        for (name, _), is_finite in zip(self._magnitudes, are_finite, strict=True):
            if not is_finite:
                return name
        return None

    @property
    def num_layers(self) -> int:
        """Number of layer outputs that were measured."""
        return len(self._magnitudes)


@torch.no_grad()
def largest_gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the largest absolute gradient value of each trained parameter by name.

    The value is None if a parameter has no gradient. For a DTensor, only this rank's shard is
    measured.
    """
    largest: dict[str, Tensor | None] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = local_shard(parameter.grad)
        largest[name] = None
        if gradient is not None and gradient.numel():
            largest[name] = _largest(gradient)
    return largest


def describe_batch(batch: Any) -> tuple[str, bool]:
    """Describe the tensors in a batch, and return whether any value is inf or nan.

    The host waits for the device.

    >>> text, is_bad = describe_batch([torch.tensor([[1.0], [float("nan")]]), torch.tensor([3, 12])])
    >>> print(text, is_bad)
    [0] float32 [2, 1]: 1 of 2 values not finite, in samples 1; [1] int64 [2]: from 3 to 12 True
    """
    descriptions = []
    has_bad_values = False
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if not isinstance(leaf, Tensor) or not leaf.numel():
            continue
        name = f"{keystr(path)} {str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
        is_bad = ~torch.isfinite(leaf)
        if bool(is_bad.any()):
            has_bad_values = True
            num_samples = len(leaf) if leaf.dim() else 1
            bad_samples = is_bad.reshape(num_samples, -1).any(1).nonzero().view(-1).tolist()
            num_bad = int(is_bad.sum())
            descriptions.append(
                f"{name}: {num_bad} of {leaf.numel()} values not finite, in samples "
                f"{first_of(bad_samples, MOST_SAMPLES)}"
            )
        else:
            lowest = leaf.min().item()
            highest = leaf.max().item()
            descriptions.append(f"{name}: from {lowest:g} to {highest:g}")
    return "; ".join(descriptions), has_bad_values


def first_of(values: Iterable[object], limit: int) -> str:
    """Join the first `limit` values with commas, followed by an ellipsis if there are more.

    >>> first_of([1, 2, 3], 2), first_of([1, 2], 2)
    ('1, 2, ...', '1, 2')
    """
    texts = [str(value) for value in values]
    if len(texts) > limit:
        texts = [*texts[:limit], "..."]
    return ", ".join(texts)


def save_state(
    folder: Path,
    trainer: pl.Trainer,
    *,
    batch: Any,
    batch_idx: int,
    error: str,
    history: list[tuple[int, float]],
) -> Path | None:
    """Save the batch and the training state to `step<s>_rank<r>.pt` after a failure.

    The file can be loaded by `torch.load` with `weights_only=True`.

    Args:
        folder: Folder for the file.
        trainer: The trainer.
        batch: Batch that was processed when the failure occurred.
        batch_idx: Index of the batch.
        error: Text of the error.
        history: Loss scales over time, as (first step, loss scale) pairs.

    Returns:
        The path, or None if the file already exists.
    """
    path = folder / f"step{trainer.global_step}_rank{trainer.global_rank}.pt"
    if run_status(trainer).num_shards is not None:
        # In an elastic run, ranks on different hosts can have the same number.
        path = path.with_name(f"{path.stem}_{host_identity()[0]}.pt")
    if path.exists():
        return None

    snapshot = {
        "error": error,
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batch_idx": batch_idx,
        "batch": tree_map(_to_plain, batch),
        "scale_history": [[step, value] for step, value in history],
        **_state_of(trainer),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as part:
        torch.save(snapshot, part)
    return path


def _state_of(trainer: pl.Trainer) -> dict[str, Any]:
    """Collect random number generator states and, on rank zero, weights and precision state.

    Weights are the same on all ranks, so one copy is enough.
    """
    state: dict[str, Any] = {"rng_state": torch.get_rng_state()}
    device = trainer.strategy.root_device
    if device.type == "cuda":
        state["cuda_rng_state"] = torch.cuda.get_rng_state(device)
    if trainer.is_global_zero:
        # If ranks share the optimizer update, the regular state dict would need all ranks.
        with run_status(trainer).own_state():
            state["state_dict"] = trainer.lightning_module.state_dict()
        state["precision"] = trainer.precision_plugin.state_dict()
    return state


def _to_plain(leaf: Any) -> Any:
    """Convert a value to a form that `torch.load` reads with `weights_only=True`.

    Tensors are moved to the CPU, plain values are unchanged, and any other value is replaced by its
    `repr`.
    """
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu()
    if isinstance(leaf, bool | int | float | str | None):
        return leaf
    return repr(leaf)


def _largest(tensor: Tensor) -> Tensor:
    # The norm reads the tensor once and does not copy it, unlike abs().max(). If any value is nan,
    # so is the result.
    return torch.linalg.vector_norm(tensor.detach(), float("inf"))
