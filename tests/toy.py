"""Small LightningModules and data for tests of strategy and precision. Every rank gets different data."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_hybrid  # noqa: F401  registers the strategies

NUM_FEATURES = 12
NUM_CLASSES = 3


class Blobs(Dataset):
    """Three Gaussian blobs. Sample ``i`` is a pure function of ``i``."""

    def __init__(self, num_samples: int = 64) -> None:
        generator = torch.Generator().manual_seed(7)
        self.targets = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
        centers = torch.randn(NUM_CLASSES, NUM_FEATURES, generator=generator)
        self.images = centers[self.targets] + 0.5 * torch.randn(
            num_samples, NUM_FEATURES, generator=generator
        )

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.targets[index]


class Net(nn.Sequential):
    """Network of convolution, batch norm, layer norm and linear layers, which covers each special kind of parameter."""

    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (1, NUM_FEATURES)),
            nn.Conv1d(1, 4, 3, padding=1),
            nn.BatchNorm1d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * NUM_FEATURES, 16),
            nn.LayerNorm(16),
            nn.ReLU(),
            nn.Linear(16, NUM_CLASSES),
        )


class Toy(pl.LightningModule):
    """Classifier of blobs that records its losses."""

    def __init__(self, seed: int = 0, lr: float = 0.1, optimizer: str = "SGD") -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = Net()
        self.lr = lr
        self.optimizer_name = optimizer
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        images, targets = batch
        return F.cross_entropy(self.net(images).float(), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "SGD":
            extra = {"momentum": 0.9}
        else:
            extra = {}
        return getattr(torch.optim, self.optimizer_name)(self.parameters(), lr=self.lr, **extra)


def loader(num_samples: int = 64, batch_size: int = 8) -> DataLoader:
    return DataLoader(Blobs(num_samples), batch_size=batch_size, shuffle=False)


def trainer(**settings: Any) -> pl.Trainer:
    """Return a quiet CPU trainer over the ranks of the default process group, or over one process without a group."""
    quiet = {
        "accelerator": "cpu",
        "devices": dist.get_world_size() if dist.is_initialized() else 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 2,
        "strategy": "hybrid_allreduce",
    }
    return pl.Trainer(**{**quiet, **settings})


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    if first.keys() != second.keys():
        return False
    return all(
        value.dtype is second[name].dtype and torch.equal(value, second[name])
        for name, value in first.items()
    )


def error_of(fn: Any, *args: Any, **kwargs: Any) -> str:
    """Return ``type: message`` of the error that ``fn`` raises, or an empty string. Ranks of a pool stay alive."""
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
