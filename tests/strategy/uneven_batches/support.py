"""Small network on ranks with loaders of different lengths, and its gradients in float64 by hand.

batches of ranks   7, 5, 5, 3          of 4 samples, the last one of each rank smaller
"""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.run_status import run_status
from tests import toy

NUM_FEATURES = 6
NUM_CLASSES = 3
BATCH_SIZE = 4
NUM_SAMPLES = (27, 17, 20, 10)
NUM_BATCHES = (7, 5, 5, 3)


class Numbered(Dataset):
    """Samples of one rank with their indices."""

    def __init__(self, rank: int, num_samples: tuple[int, ...] = NUM_SAMPLES) -> None:
        self.first = sum(num_samples[:rank])
        self.length = num_samples[rank]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, Tensor, int]:
        return sample(self.first + index)


class Stream(IterableDataset):
    """Stream of the same samples without a length."""

    def __init__(self, rank: int) -> None:
        self.samples = Numbered(rank)

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in range(len(self.samples)))


def sample(number: int) -> tuple[int, Tensor, int]:
    generator = torch.Generator().manual_seed(number)
    features = torch.randn(NUM_FEATURES, generator=generator)
    return number, features, int(torch.randint(NUM_CLASSES, (), generator=generator))


def loader(kind: type = Numbered, **options: Any) -> DataLoader:
    return DataLoader(kind(dist.get_rank()), batch_size=BATCH_SIZE, **options)


class OwnLoader:
    """Loader of a user's class without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(loader())


class Unwatched(pl.LightningModule):
    """Classifier whose gradients no code reads."""

    def __init__(self, lr: float = 0.2) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = network()
        self.lr = lr
        self.numbers: list[int] = []  # indices of the samples since the last step
        self.steps: list[dict[str, Any]] = []
        self.batch_indices: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers, features, targets = batch
        self.batch_indices.append(batch_idx)
        if not run_status(self.trainer).repeats_batch:
            self.numbers += numbers.tolist()
        return F.cross_entropy(self.net(features).float(), targets)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Network(Unwatched):
    """Classifier that records the samples, weights and gradients of each step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps.append(
            {
                "numbers": self.numbers,
                "weights": copies(self.net.parameters()),
                "gradients": copies(parameter.grad for parameter in self.net.parameters()),
            }
        )
        self.numbers = []


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(NUM_FEATURES, 5), nn.Tanh(), nn.Linear(5, NUM_CLASSES))


def copies(tensors: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def fit(
    module: Any = Network, train: Any = loader, strategy: Any = None, **scene: Any
) -> dict[str, Any]:
    """Fit on this rank with `uneven_batches="join"`, and return the records of the module."""
    names = ("ckpt_path", "val", "callbacks")
    options = {name: scene.pop(name, None) for name in names}
    of_trainer = ("precision", "accumulate_grad_batches", "max_steps", "max_epochs", "logger")
    of_trainer += (
        "limit_train_batches",
        "log_every_n_steps",
        "sync_batchnorm",
        "gradient_clip_val",
    )
    settings = {name: scene.pop(name) for name in of_trainer if name in scene}
    if strategy is None:
        strategy = HybridAllReduceStrategy(**{"uneven_batches": "join", **scene})
    trainer = toy.trainer(
        strategy=strategy,
        use_distributed_sampler=False,
        callbacks=options["callbacks"],
        **{"max_epochs": 1, **settings},
    )
    network_of_rank = module()
    trainer.fit(network_of_rank, train(), options["val"], ckpt_path=options["ckpt_path"])
    return {
        "steps": network_of_rank.steps,
        "batch_indices": network_of_rank.batch_indices,
        "weights": toy.weights(network_of_rank),
        "global_step": trainer.global_step,
        "num_skipped": getattr(trainer.precision_plugin, "num_skipped_steps", 0),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def fits(ranks: Any, module: Any = Network, **scene: Any) -> list[dict[str, Any]]:
    return ranks.run(fit_scene, {"module": module, **scene}, timeout_s=120.0)


def fit_scene(scene: dict[str, Any]) -> dict[str, Any]:
    return fit(**scene)


def numbers_of(results: list[dict[str, Any]]) -> list[int]:
    """Return the indices of the samples that all ranks have trained on."""
    return [number for rank in results for step in rank["steps"] for number in step["numbers"]]


def mean_gradients(weights: list[Tensor], numbers: list[int]) -> list[Tensor]:
    """Return the gradients of the mean loss of these samples in float64."""
    exact = network().double()
    with torch.no_grad():
        for parameter, value in zip(exact.parameters(), weights, strict=True):
            parameter.copy_(value)
    samples = [sample(number) for number in numbers]
    features = torch.stack([features for _, features, _ in samples]).double()
    targets = torch.tensor([target for *_, target in samples])
    F.cross_entropy(exact(features), targets).backward()
    return [parameter.grad for parameter in exact.parameters()]


def largest_error(results: list[dict[str, Any]]) -> float:
    """Return the largest relative error of a step's gradients with respect to its global batch."""
    errors = []
    for steps in zip(*(rank["steps"] for rank in results), strict=True):
        numbers = [number for step in steps for number in step["numbers"]]
        exact = torch.cat([one.flatten() for one in mean_gradients(steps[0]["weights"], numbers)])
        for step in steps:
            gradient = torch.cat([one.flatten() for one in step["gradients"]]).double()
            errors.append(float((gradient - exact).norm() / exact.norm()))
    return max(errors)


def same_weights(results: list[dict[str, Any]]) -> bool:
    return all(toy.same_bits(rank["weights"], results[0]["weights"]) for rank in results)
