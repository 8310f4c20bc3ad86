"""Checks that train a small network, for convergence, exact buffers and resumption from checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.optim import LAMB, LARS
from recipes.gpu.runner import CheckRequest, Details

BATCH_SIZE = 16
NUM_BATCHES = 8
NUM_EPOCHS = 3
ONE_STEP = 2.0**-12  # lost in fp16 and bf16 if added to 1
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "lars": lambda params, fused: LARS(
        params, lr=0.5, trust_coefficient=0.02, weight_decay=1e-4, fused=fused
    ),
    "lamb": lambda params, fused: LAMB(params, lr=0.01, weight_decay=1e-4, foreach=fused),
    "orthogonal": lambda params, fused: LARS(params, lr=0.05, direction="orthogonal"),
    "sgd": lambda params, fused: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=fused),
}


class Small(pl.LightningModule):
    """Small test network with several layer types, memory formats and buffers.

    It has channels_last convolutions, three kinds of normalization, gradients at unaligned addresses and two buffers.
    """

    third: Tensor
    num_steps: Tensor

    def __init__(
        self,
        optimizer: str = "sgd",
        *,
        fused: bool = True,
        on_hidden: Callable[[Tensor], Any] | None = None,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            convolutions = (
                nn.Conv2d(3, 8, 3, bias=False),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.Conv2d(8, 13, 3, stride=2),
            )
            features = [*convolutions, nn.GroupNorm(1, 13), _Mean()]
            head = [
                nn.Linear(13, 37),
                nn.LayerNorm(37),
                nn.ReLU(),
                nn.Linear(37, 24),
                nn.ReLU(),
                nn.Linear(24, 10),
            ]
            self.net = nn.Sequential(*features, *head).to(memory_format=torch.channels_last)  # type: ignore[call-overload,unused-ignore]
        self.register_buffer("third", torch.full((5,), 1 / 3))
        self.register_buffer("num_steps", torch.ones(()))
        self.optimizer_name = optimizer
        self.fused = fused
        self.on_hidden = on_hidden
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the cross-entropy loss of a batch, without synchronizing with the device."""
        images, labels = batch
        self.num_steps += ONE_STEP
        features = self.net[:6]
        head = self.net[6:]
        hidden = features(images)
        if self.on_hidden is not None:
            hidden.register_hook(self.on_hidden)
        logits = head(hidden)
        loss = F.cross_entropy(logits.float(), labels)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Run a forward pass without computing a metric."""
        images, _ = batch
        self.net(images)

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create the optimizer that the constructor argument `optimizer` names."""
        create = OPTIMIZERS[self.optimizer_name]
        return create(self.parameters(), self.fused)


class _Mean(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.mean(dim=(2, 3))


def loader(seed: int = 0) -> DataLoader:
    """Return a loader of synthetic images, whose ten classes differ in the brightness of two channels."""
    generator = torch.Generator().manual_seed(seed)
    num_images = BATCH_SIZE * NUM_BATCHES
    labels = torch.randint(10, (num_images,), generator=generator)
    images = 0.3 * torch.randn(num_images, 3, 17, 17, generator=generator)
    broadcast_labels = labels[:, None, None]
    images[:, 0] += broadcast_labels / 5
    images[:, 1] -= broadcast_labels % 3
    dataset = TensorDataset(images, labels)
    return DataLoader(dataset, batch_size=BATCH_SIZE, pin_memory=torch.cuda.is_available())


def trainer_for(request: CheckRequest, precision: Any, **settings: Any) -> pl.Trainer:
    """Create a deterministic `Trainer` without logger, checkpoints and progress bar."""
    accelerator = "gpu" if request.on_cuda else "cpu"
    loss_scale = 2.0**10 if precision == "16-true" else None
    defaults: dict[str, Any] = {
        "accelerator": accelerator,
        "devices": 1,
        "strategy": HybridAllReduceStrategy(loss_scale=loss_scale),
        "max_epochs": NUM_EPOCHS,
        "deterministic": True,
        "log_every_n_steps": 1000,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "precision": precision,
    }
    return pl.Trainer(**{**defaults, **settings})


def short_fit(
    request: CheckRequest, module: Small, precision: Any, **settings: Any
) -> dict[str, Tensor]:
    """Train a module, and return copies of its weights and buffers on the CPU.

    Errors of `Trainer.fit` are raised.
    """
    data = settings.pop("data", None)
    ckpt_path = settings.pop("ckpt_path", None)
    trainer = trainer_for(request, precision, **settings)
    if data is None:
        data = loader()
    trainer.fit(module, data, ckpt_path=ckpt_path)
    state = module.state_dict()
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


# ---- ends, exact buffers, resume -------------------------------------------------------------------------------------


def ends(precision: str, optimizer: str, request: CheckRequest) -> Details:
    """Check that the loss decreases, that weights are fp32 after training, and that buffers are exact.

    Training with fused and unfused updates, or with grouped and single tensors, must give similar weights.
    """
    weights = []
    messages = []
    for fused in (False, True):
        module = Small(optimizer, fused=fused)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            weights.append(short_fit(request, module, precision))
        for warning in caught:
            messages.append(str(warning.message))
        _assert_as_before(module)
        _assert_loss_fell(module.losses)

    if precision == "16-true" and optimizer == "lars":
        for stage in ("validate", "test", "predict"):
            trainer = trainer_for(request, precision)
            run_stage = getattr(trainer, stage)
            run_stage(module, loader())
            _assert_as_before(module)

    unfused_weights, fused_weights = weights
    distances = [apart(value, fused_weights[name]) for name, value in unfused_weights.items()]
    distance = max(distances)
    # Both updates agree to 2e-6 of a weight's norm. Half precision then rounds the next gradient to 2**-11 or 2**-8.
    bound = {"32-true": 1e-3, "16-true": 2e-2, "bf16-true": 1e-1}[precision]
    assert distance < bound, (
        f"The weights of both kinds of updates differ by {distance:.2g} of their norm, more than {bound}."
    )
    different_messages = list(dict.fromkeys(messages))
    return {
        "message": f"Both kinds of updates differ by {distance:.1e}.",
        "warnings": different_messages,
    }


def _assert_loss_fell(losses: list[Tensor]) -> None:
    first = torch.stack(losses[:4]).mean()
    last = torch.stack(losses[-4:]).mean()
    assert last < 0.9 * first, f"The loss must decrease, but went from {first:.3f} to {last:.3f}."


def _assert_as_before(module: Small) -> None:
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            assert tensor.dtype is torch.float32, (
                f"`{name}` must be fp32 after training, but is {tensor.dtype}."
            )
            assert tensor.isfinite().all(), f"`{name}` contains values that are not finite."
    assert (module.third == 1 / 3).all(), (
        f"The buffer `third` must remain 1/3, but is {module.third[0].item()!r}."
    )
    expected = 1 + ONE_STEP * NUM_BATCHES * NUM_EPOCHS
    num_steps = module.num_steps.item()
    assert num_steps == expected, (
        f"The buffer `num_steps` must be exactly {expected}, but is {num_steps!r}."
    )


def apart(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference between two tensors, relative to the norm of the second tensor."""
    norm = other.double().norm().item()
    difference = one.double() - other.double()
    distance = difference.norm().item()
    if norm == 0:
        return distance
    return distance / norm


class _SavesOnce(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def resumes(request: CheckRequest) -> Details:
    """Check that a run resumed after its first epoch is bit-identical to an uninterrupted one."""
    path = request.folder / "first.ckpt"
    for optimizer in ("lars", "lamb"):
        saves = _SavesOnce(path)
        whole = short_fit(request, Small(optimizer), "16-true", callbacks=[saves])
        resumed = short_fit(request, Small(optimizer), "16-true", ckpt_path=path)
        same_bits(resumed, whole, f"After a resume with {optimizer}")
    return {"message": "Resumed runs with LARS and LAMB in 16-true are bit-identical."}


class _Noisy(TensorDataset):
    """Dataset that simulates augmentation by adding random noise to each image when it is read."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        image, label = super().__getitem__(index)
        noise = 0.1 * torch.randn(image.shape)
        return image + noise, label


def _shuffled_and_noisy() -> DataLoader:
    images_and_labels = loader().dataset.tensors  # type: ignore[attr-defined]
    dataset = _Noisy(*images_and_labels)
    return DataLoader(dataset, BATCH_SIZE, shuffle=True, pin_memory=torch.cuda.is_available())


class _SavesAt(pl.Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def resumes_within_epoch(request: CheckRequest) -> Details:
    """Check that a run resumed in the middle of an epoch is bit-identical to an uninterrupted one.

    The loader shuffles and pins memory, and the images get random noise when they are read.
    """
    path = request.folder / "within.ckpt"
    pl.seed_everything(7)
    saves = _SavesAt(path, NUM_BATCHES + 3)
    whole = short_fit(
        request,
        Small("lars"),
        "16-true",
        data=_shuffled_and_noisy(),
        callbacks=[saves],
        max_epochs=2,
    )
    pl.seed_everything(7)
    resumed = short_fit(
        request, Small("lars"), "16-true", data=_shuffled_and_noisy(), max_epochs=2, ckpt_path=path
    )
    same_bits(resumed, whole, "After a resume within an epoch")
    return {
        "message": f"The run resumed after {NUM_BATCHES + 3} of {2 * NUM_BATCHES} steps is bit-identical."
    }


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    differing = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not differing, (
        f"{what}, {len(differing)} of {len(expected)} tensors differ, the first of which is {differing[0]}."
    )
