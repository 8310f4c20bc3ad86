"""Two claims on digits: BatchNorm's momentum under accumulation, and fp32 sums in softmax and normalisation.

`python -m recipes.benchmarks.article_claims momentum` (or `sums`, `softmax`, `norms`) prints a table of five seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from statistics import mean

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_hybrid.models.batch_norm import correct_momentum_
from recipes.benchmarks.staleness import spread
from recipes.cli.markdown import markdown_table
from recipes.datasets.digits import digits_split
from recipes.datasets.in_memory.loader import Normalize

SEEDS = (1, 2, 3, 4, 5)
SETS = digits_split()
NORMALIZE = Normalize.fitted_to(SETS["train"].images)


def batches(seed: int, *, size: int, num_epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield shuffled batches of training images."""
    images, labels = SETS["train"]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_epochs):
        for some in torch.randperm(len(labels), generator=generator).split(size)[: len(labels) // size]:
            yield NORMALIZE(images[some]), labels[some]


@torch.no_grad()
def tested(network: nn.Module) -> tuple[float, float]:
    """Return the accuracy on test images in %, and the loss, with running statistics."""
    images, labels = SETS["test"]
    logits = network.eval()(NORMALIZE(images))
    network.train()
    return 100 * (logits.argmax(1) == labels).float().mean().item(), cross_entropy(logits, labels).item()


def train(
    network: nn.Module,
    seed: int,
    *,
    num_epochs: int,
    num_micro: int = 1,
    rate: float,
    loss_of: Callable[..., Tensor] = cross_entropy,
) -> Iterator[float]:
    """Train with SGD in batches of 64, a rate that falls linearly, and yield the loss of each step."""
    num_steps = num_epochs * (len(SETS["train"].labels) // 64)
    optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9)
    for step, (images, labels) in enumerate(batches(seed, size=64, num_epochs=num_epochs)):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / num_steps)
        optimizer.zero_grad()
        total = 0.0
        for some, those in zip(images.chunk(num_micro), labels.chunk(num_micro), strict=True):
            loss = loss_of(network(some), those) / num_micro
            loss.backward()
            total += loss.item()
        optimizer.step()
        yield total


# ---- BatchNorm's momentum --------------------------------------------------------------------------------------------


def momentum_rows(num_micro: int) -> Iterator[list[str]]:
    """Train with so many micro-batches in 64 images; the weights do not depend on the running statistics."""
    found: dict[str, list[tuple[float, float, float]]] = {"unchanged, 0.1": [], "corrected": []}
    for seed in SEEDS:
        for name, results in found.items():
            torch.manual_seed(seed)
            norms = [nn.BatchNorm1d(64) for _ in range(3)]
            layers = [nn.Linear(256 if index == 0 else 64, 64, bias=False) for index in range(3)]
            inside = [each for layer, norm in zip(layers, norms, strict=True) for each in (layer, norm, nn.ReLU())]
            network = nn.Sequential(nn.Flatten(), *inside, nn.Linear(64, 10))
            if name == "corrected":
                correct_momentum_(network, accumulate_grad_batches=num_micro)
            ends = []
            for step, _ in enumerate(train(network, seed, num_epochs=30, num_micro=num_micro, rate=0.05)):
                if step % 19 == 18 and step >= 20 * 19:  # the last ten epochs
                    ends.append(tested(network))
            # the first layer's statistics against those of all training images
            with torch.no_grad():
                exact = layers[0](NORMALIZE(SETS["train"].images).flatten(1))
            off = (norms[0].running_mean - exact.mean(0)) / exact.std(0)
            results.append((*(mean(each) for each in zip(*ends, strict=True)), off.square().mean().sqrt().item()))
    for name, results in found.items():
        accuracy, loss, off = zip(*results, strict=True)
        plain, _, _ = zip(*found["unchanged, 0.1"], strict=True)
        difference = spread([a - b for a, b in zip(accuracy, plain, strict=True)])
        yield [str(num_micro), name, spread(accuracy), difference, f"{mean(loss):.3f}", f"{mean(off):.3f}"]


# ---- sums in fp16 ----------------------------------------------------------------------------------------------------


def one_by_one(values: Tensor) -> Tensor:
    """Sum two or more rows of fp16 values, each partial sum rounded to fp16."""
    # A single row NumPy would sum in fp32.
    return torch.from_numpy(np.add.reduce(np.ascontiguousarray(values.half().numpy().T), axis=0)).float()


def in_pairs(values: Tensor) -> Tensor:
    """Sum rows of fp16 values as a tree, each partial sum rounded to fp16."""
    values = values.half()
    while values.shape[1] > 1:
        if values.shape[1] % 2:
            values = torch.cat([values, torch.zeros_like(values[:, :1])], 1)
        values = values[:, ::2] + values[:, 1::2]
    return values[:, 0].float()


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp32": lambda values: values.half().float().sum(1),
    "fp16, in pairs": in_pairs,
    "fp16, one by one": one_by_one,
}


def sum_rows() -> Iterator[list[str]]:
    """Measure errors of softmax's sum over classes, and of a variance over the values of a channel."""
    torch.manual_seed(0)
    for what, number in (("softmax", 300), ("softmax", 30_522), ("variance", 768), ("variance", 64 * 56 * 56)):
        values = torch.randn(16, number)
        values = (values - values.amax(1, keepdim=True)).exp() if what == "softmax" else values.square()
        exact = values.half().double().sum(1)
        errors = [((add(values) - exact) / exact).abs().max().item() for add in SUMS.values()]
        yield [f"{what} of {number:,}", *(f"{error:.1e}" for error in errors)]


class Norm(nn.BatchNorm2d):
    """BatchNorm whose sums are `add`'s; backward is that of the exact ones."""

    def __init__(self, channels: int, add: Callable[[Tensor], Tensor]) -> None:
        super().__init__(channels)
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a batch."""
        if not self.training:
            return super().forward(x)
        rows, size = x.transpose(0, 1).flatten(1), x.numel() // x.shape[1]
        with torch.no_grad():
            found_mean = self.add(rows) / size
            found_var = self.add((rows - found_mean[:, None]).square()) / size
            for running, found in ((self.running_mean, found_mean), (self.running_var, found_var)):
                assert running is not None
                running.lerp_(found, 0.1)
        mean_, var = rows.mean(1), rows.var(1, correction=0)
        mean_, var = mean_ + (found_mean - mean_).detach(), var + (found_var - var).detach()
        scale = self.weight / (var + self.eps).sqrt()
        return x * scale[:, None, None] + (self.bias - mean_ * scale)[:, None, None]


def softmax_loss(add: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the cross-entropy whose softmax, and so its gradient, is divided by `add`'s sums."""

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        most = logits.detach().amax(1, keepdim=True)
        parts = (logits - most).exp()
        sums = add(parts.detach())
        slope = parts.sum(1) / sums  # its gradient is the softmax that these sums make
        value = sums.log() + most[:, 0]
        return (slope + (value - slope).detach() - logits.gather(1, labels[:, None])[:, 0]).mean()

    return loss_of


def fit_rows(
    make: Callable[[Callable[[Tensor], Tensor]], tuple[nn.Module, Callable[..., Tensor]]],
    *,
    rate: float,
    num_epochs: int,
) -> Iterator[list[str]]:
    """Train with each kind of sums, five paired seeds."""
    reference: list[float] = []
    for name, add in SUMS.items():
        results, losses = [], []
        for seed in SEEDS:
            torch.manual_seed(seed)
            network, loss_of = make(add)
            for loss in train(network, seed, num_epochs=num_epochs, rate=rate, loss_of=loss_of):
                if not np.isfinite(loss):
                    break
            results.append(tested(network)[0])
            losses.append(tested(network)[1])
        reference = reference or results
        yield [
            name,
            " ".join(f"{each:.1f}" for each in results),
            spread(results),
            spread([a - b for a, b in zip(results, reference, strict=True)]),
            f"{mean(losses):.3f}",
        ]


def normalised(add: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Make two convolutions whose BatchNorm sums 16,384 and 4,096 values a channel."""
    convs = [nn.Conv2d(1, 8, 3, padding=1), Norm(8, add), nn.ReLU(), nn.MaxPool2d(2)]
    convs += [nn.Conv2d(8, 16, 3, padding=1), Norm(16, add), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(256, 10)), cross_entropy


def many_classes(add: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Make a network with as many classes as BERT has tokens, of which ten occur."""
    layers = [nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 30_522)]
    return nn.Sequential(*layers), softmax_loss(add)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "momentum":
        header = ["micro-batches", "momentum", "accuracy", "difference", "loss", "mean's error, deviations"]
        print(markdown_table(header, [row for num_micro in (4, 16) for row in momentum_rows(num_micro)]))
    elif sys.argv[1] == "sums":
        print(markdown_table(["largest relative error", *SUMS], list(sum_rows())))
    elif sys.argv[1] == "softmax":
        rows = list(fit_rows(many_classes, rate=0.05, num_epochs=5))
        print(markdown_table(["sums", "each seed", "accuracy", "difference", "loss"], rows))
    else:
        rows = list(fit_rows(normalised, rate=0.05, num_epochs=5))
        print(markdown_table(["sums", "each seed", "accuracy", "difference", "loss"], rows))
