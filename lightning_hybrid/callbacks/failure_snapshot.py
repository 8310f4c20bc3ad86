"""A snapshot of the moment at which numbers went wrong: the batch, the first layer, a file with the state."""

from __future__ import annotations

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

MOST_PLACES = 5


class LayerProbes:
    """Hooks that measure the largest magnitude of each layer's output in one forward, without a wait of the host."""

    def __init__(self, module: nn.Module) -> None:
        self._found: list[tuple[str, Tensor]] = []
        leaves = [
            (name, one) for name, one in module.named_modules() if name and not any(one.children())
        ]
        self._hooks = [one.register_forward_hook(partial(self._note, name)) for name, one in leaves]

    def _note(self, name: str, layer: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
            self._found.append((f"{name} ({type(layer).__name__})", _largest(output)))

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def first_not_finite(self) -> str | None:
        """Return the first layer, in the order they ran, whose output had inf or nan. Wait for the device."""
        if not self._found:
            return None
        finite = torch.isfinite(
            torch.stack([largest.float() for _, largest in self._found])
        ).tolist()
        return next(
            (
                name
                for (name, _), is_finite in zip(self._found, finite, strict=True)
                if not is_finite
            ),
            None,
        )

    @property
    def num_layers(self) -> int:
        """Number of layers that ran."""
        return len(self._found)


@torch.no_grad()
def largest_gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the largest magnitude in the gradient of each trained parameter; None where it has no gradient.

    Of a DTensor it is that of this rank's shard.
    """
    trained = {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    grads = {name: local_shard(parameter.grad) for name, parameter in trained.items()}
    return {
        name: None if grad is None or not grad.numel() else _largest(grad)
        for name, grad in grads.items()
    }


def describe_batch(batch: Any) -> tuple[str, bool]:
    """Describe each tensor of a batch, and say whether any holds inf or nan. Wait for the device.

    >>> words, is_bad = describe_batch([torch.tensor([[1.0], [float("nan")]]), torch.tensor([3, 12])])
    >>> print(words, is_bad)
    [0] float32 [2, 1]: 1 of 2 values not finite, in samples 1; [1] int64 [2]: from 3 to 12 True
    """
    parts = []
    is_bad = False
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if not isinstance(leaf, Tensor) or not leaf.numel():
            continue
        name = f"{keystr(path)} {str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
        bad = ~torch.isfinite(leaf)
        if bool(bad.any()):
            is_bad = True
            samples = (
                bad.reshape(len(leaf) if leaf.dim() else 1, -1).any(1).nonzero().view(-1).tolist()
            )
            some = ", ".join(map(str, samples[:MOST_PLACES])) + (
                ", ..." if len(samples) > MOST_PLACES else ""
            )
            parts.append(
                f"{name}: {int(bad.sum())} of {leaf.numel()} values not finite, in samples {some}"
            )
        else:
            parts.append(f"{name}: from {leaf.min().item():g} to {leaf.max().item():g}")
    return "; ".join(parts), is_bad


def save_state(
    folder: Path,
    trainer: pl.Trainer,
    *,
    batch: Any,
    batch_idx: int,
    error: str,
    history: list[tuple[int, float]],
) -> Path | None:
    """Save the state at the moment of failure as `step<s>_rank<r>.pt`; return None where there is one already."""
    # It loads with `torch.load(..., weights_only=True)`. fp32 weights are the same on all ranks: rank zero saves them.
    path = folder / f"step{trainer.global_step}_rank{trainer.global_rank}.pt"
    if (
        run_status(trainer).num_shards is not None
    ):  # ranks of several hosts have this number in an elastic run
        path = path.with_name(f"{path.stem}_{host_identity()[0]}.pt")
    if path.exists():
        return None
    snapshot: dict[str, Any] = {
        "error": error,
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batch_idx": batch_idx,
        "batch": tree_map(_plain, batch),
        "scale_history": [list(one) for one in history],
        "rng_state": torch.get_rng_state(),
    }
    device = trainer.strategy.root_device
    if device.type == "cuda":
        snapshot["cuda_rng_state"] = torch.cuda.get_rng_state(device)
    if trainer.is_global_zero:
        # Not the strategy's: where ranks share the update, that takes all of them.
        with run_status(trainer).own_state():
            snapshot["state_dict"] = trainer.lightning_module.state_dict()
        snapshot["precision"] = trainer.precision_plugin.state_dict()
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as part:
        torch.save(snapshot, part)
    return path


def _plain(leaf: Any) -> Any:
    # What `weights_only=True` loads: tensors and plain values, and the text of anything else.
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu()
    return leaf if isinstance(leaf, bool | int | float | str | None) else repr(leaf)


def _largest(tensor: Tensor) -> Tensor:
    # One pass over memory, and no copy of absolute values; nan where there is one.
    return torch.linalg.vector_norm(tensor.detach(), float("inf"))
