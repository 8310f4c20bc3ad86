"""What stale gradients cost: an asynchronous parameter server and PipeDream, simulated in one process.

    w[t+1] = w[t] - rate * gradient of batch t at (w_1[t - d_1], ..., w_S[t - d_S])          block j, its delay d_j

    server           the same delay for all blocks: each gradient is overtaken by d others
    PipeDream-2BW    a delay of 1 for all (Narayanan et al. 2021, arXiv:2006.09503): the server's arithmetic
    PipeDream        S - 1 - j in stage j, with weight stashing: backward takes the weights that forward saw; without
                     stashing it takes the newest. With vertical sync it is the server's arithmetic of S - 1 steps
                     (Harlap et al. 2018, arXiv:1806.03377)

`python -m recipes.benchmarks.staleness runs/stale` trains on digits and on text; it goes on where `rows.jsonl` ends.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_hybrid.callbacks.run_report.figure import write_svg
from recipes.cli.markdown import markdown_table
from recipes.datasets.digits import digits_split
from recipes.datasets.in_memory.loader import Normalize, shifted
from recipes.datasets.text import VALIDATION_SEED, Sequences
from recipes.datasets.text_packing import INDEX_NAME, TextPacking
from recipes.networks.bert import Bert

TUNING_SEED = 101  # no test's
T_95 = {3: 2.920, 5: 2.132}  # Student's t, one-sided, by the number of pairs
NUM_STAGES, WIDTH = 8, 64


def train_stale(
    blocks: Sequence[tuple[nn.Module, int]],
    losses: Iterable[Callable[[], Tensor]],
    optimizer: Optimizer,
    *,
    is_stashed: bool = True,
) -> Iterator[float]:
    """Train one step for each loss, and yield it; steps before the first take the first weights.

    Args:
        blocks: Those of the network, each with the age of its weights in forward, in steps; together all parameters.
        losses: Each computes the loss of a batch by the network as it then is.
        optimizer: Of the newest weights.
        is_stashed: Whether backward takes the weights of forward, or the newest.
    """
    aged = [(parameter, delay) for block, delay in blocks for parameter in block.parameters()]
    kept = deque[list[Tensor]](maxlen=1 + max(delay for _, delay in aged))

    def place(ages: Sequence[int]) -> None:  # through `.data`: what forward saves for backward are these very tensors
        for index, ((parameter, _), age) in enumerate(zip(aged, ages, strict=True)):
            parameter.data.copy_(kept[max(0, len(kept) - 1 - age)][index])

    newest, of_forward = [0] * len(aged), [delay for _, delay in aged]
    for compute in losses:
        kept.append([parameter.detach().clone() for parameter, _ in aged])
        place(of_forward)
        loss = compute()
        if not is_stashed:
            place(newest)
        optimizer.zero_grad()
        loss.backward()
        place(newest)
        optimizer.step()
        yield loss.item()


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training: who is late by how much, at which rate, from which seed.

    Args:
        delays: Of each block, the first one's first; one number: of all.
        rate: Peak; it grows over a tenth of the steps, then falls linearly to 0.
        momentum: Of SGD, or AdamW's first beta.
    """

    job: str
    arm: str
    delays: tuple[int, ...]
    is_stashed: bool
    rate: float
    momentum: float
    seed: int

    def run(self) -> dict[str, float]:
        """Train; return what validation and test data then show. A loss that is not finite ends it."""
        torch.manual_seed(self.seed)
        job = JOBS[self.job]()
        optimizer = job.optimizer(self.rate, self.momentum)
        shares = (
            min(10 * (step + 1) / job.num_steps, (1 - step / job.num_steps) / 0.9) for step in range(job.num_steps + 1)
        )
        schedule = LambdaLR(optimizer, lambda _: next(shares))
        blocks = list(zip(job.blocks, self.delays * (len(job.blocks) // len(self.delays)), strict=True))
        for loss in train_stale(blocks, job.losses(self.seed), optimizer, is_stashed=self.is_stashed):
            schedule.step()
            if not math.isfinite(loss):
                return {"val_loss": math.inf, "test_loss": math.inf, "test_accuracy": job.chance}
        (val_loss, _), (test_loss, accuracy) = job.evaluate("val"), job.evaluate("test")
        return {"val_loss": val_loss, "test_loss": test_loss, "test_accuracy": accuracy}


class _Digits:
    """Handwritten digits, 30 epochs of batches of 64, by eight fully connected layers: SGD."""

    num_steps, chance = 30 * 19, 0.1
    seeds = (1, 2, 3, 4, 5)
    points = tuple((2.0**-power, 0.9) for power in range(3, 13)) + tuple((2.0**-power, 0.0) for power in range(10))

    def __init__(self) -> None:
        sets = digits_split()
        self._sets, self._normalize = sets, Normalize.fitted_to(sets["train"].images)
        widths = [16 * 16, *[WIDTH] * (NUM_STAGES - 1), 10]
        layers = [nn.Linear(*each) for each in itertools.pairwise(widths)]
        for layer in layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        self.blocks: list[nn.Module] = [nn.Sequential(layer, nn.ReLU()) for layer in layers[:-1]] + [layers[-1]]
        self._network = nn.Sequential(nn.Flatten(), *self.blocks)

    def optimizer(self, rate: float, momentum: float) -> Optimizer:
        return SGD(self._network.parameters(), lr=rate, momentum=momentum, weight_decay=5e-4)

    def losses(self, seed: int) -> Iterator[Callable[[], Tensor]]:
        images, labels = self._sets["train"]
        generator = torch.Generator().manual_seed(seed)
        for _ in range(30):
            order = torch.randperm(len(labels), generator=generator)
            moved = shifted(images, torch.randint(-1, 2, (len(labels), 2), generator=generator))
            for some in order.split(64)[:19]:
                yield lambda some=some, moved=moved: self._loss(moved[some], labels[some])  # type: ignore[misc]

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self._network(self._normalize(images)), labels)

    @torch.no_grad()
    def evaluate(self, split: str) -> tuple[float, float]:
        images, labels = self._sets[split]
        logits = self._network(self._normalize(images))
        return cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()


class _Text:
    """Masked text, 20 epochs of 20 of 400 sequences of 32, by a BERT of two layers: AdamW.

    Embedding and head share a weight, so that it is one block: all are late by as much.
    """

    num_steps, chance = 400, 0.0
    seeds = (1, 2, 3)
    points = ((5e-4, 0.9), (1e-3, 0.9), (2e-3, 0.9), (4e-3, 0.9))

    def __init__(self) -> None:
        folder = Path(tempfile.gettempdir()) / "staleness_text"
        if not (folder / INDEX_NAME).exists():
            list(TextPacking(root=None, out=str(folder), vocab_size=300, max_chars=400_000).run())
        self._sets = {name: Sequences(folder, name, 32) for name in ("train", "val", "test")}
        self._network = Bert(
            num_classes=300,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=256,
            max_position_embeddings=64,
            dropout=0.0,
        )
        self.blocks: list[nn.Module] = [self._network]

    def optimizer(self, rate: float, momentum: float) -> Optimizer:
        return AdamW(self._network.parameters(), lr=rate, betas=(momentum, 0.999), weight_decay=0.01)

    def losses(self, seed: int) -> Iterator[Callable[[], Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for epoch in range(20):
            for some in torch.randperm(400, generator=generator).split(20):
                text, targets = self._sets["train"].batch(some.numpy(), seed, epoch)
                yield lambda text=text, targets=targets: cross_entropy(self._network(text), targets.flatten())  # type: ignore[misc]

    @torch.no_grad()
    def evaluate(self, split: str) -> tuple[float, float]:
        some = self._sets[split]
        text, targets = some.batch(torch.arange(min(len(some), 500)).numpy(), VALIDATION_SEED, 0)
        logits, targets = self._network(text), targets.flatten()
        return cross_entropy(logits, targets).item(), (logits.argmax(1) == targets).float().mean().item()


JOBS: dict[str, Any] = {"digits": _Digits, "text": _Text}
ARMS: dict[str, dict[str, tuple[tuple[int, ...], bool]]] = {  # delays, and whether weights are stashed
    "digits": {
        **{f"server, {delay} steps late": ((delay,), True) for delay in (0, 1, 4, 16)},
        "PipeDream, 8 stages": (tuple(range(NUM_STAGES))[::-1], True),
        "PipeDream, 8 stages, no stashing": (tuple(range(NUM_STAGES))[::-1], False),
        "PipeDream, 8 stages, vertical sync": ((NUM_STAGES - 1,), True),
    },
    "text": {f"server, {delay} steps late": ((delay,), True) for delay in (0, 1, 4, 16)},
}


class Study:
    """All trials of a job: each arm tuned on one seed, then five others at its own rate and at that of delay 0."""

    def __init__(self, job: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._job, self._path = job, folder / "rows.jsonl"
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._done = {json.dumps(row["trial"]): row["found"] for row in map(json.loads, lines)}

    def found(self, arm: str, point: tuple[float, float], seed: int) -> dict[str, float]:
        """Return what a trial found, which is run if it was not."""
        (delays, is_stashed), (rate, momentum) = ARMS[self._job][arm], point
        trial = Trial(
            job=self._job, arm=arm, delays=delays, is_stashed=is_stashed, rate=rate, momentum=momentum, seed=seed
        )
        key = json.dumps(asdict(trial))
        if key not in self._done:
            self._done[key] = trial.run()
            with self._path.open("a") as file:
                file.write(json.dumps({"trial": asdict(trial), "found": self._done[key]}) + "\n")
        return self._done[key]

    def best(self, arm: str) -> tuple[float, float]:
        """Return the rate and momentum of the least validation loss."""
        points: list[tuple[float, float]] = JOBS[self._job].points
        return min(points, key=lambda point: self.found(arm, point, TUNING_SEED)["val_loss"])

    def values(self, arm: str, point: tuple[float, float]) -> list[float]:
        """Return the test accuracies in %, or the test losses of text, of all seeds."""
        name, unit = ("test_accuracy", 100) if self._job == "digits" else ("test_loss", 1)
        return [unit * self.found(arm, point, seed)[name] for seed in JOBS[self._job].seeds]

    def table(self) -> str:
        """Format a row for each arm: at the point of the first, and at its own, with the paired 90 % intervals."""
        arms = list(ARMS[self._job])
        same = self.best(arms[0])
        reference, rows = self.values(arms[0], same), []
        for arm in arms:
            own = self.best(arm)
            row = [arm]
            for point in (same, own):
                values = self.values(arm, point)
                row += [spread(values), spread([a - b for a, b in zip(values, reference, strict=True)])]
            rows.append([*row, f"{own[0]:.3g}, {own[1]:g}"])
        header = ["arm", f"rate {same[0]:.3g}, momentum {same[1]:g}", "difference", "its own", "difference", "these"]
        return markdown_table(header, rows)

    def draw(self, axes: Axes) -> None:
        """Draw results over the delay of the server."""
        arms = [arm for arm in ARMS[self._job] if arm.startswith("server")]
        what = "test accuracy on digits, %" if self._job == "digits" else "test loss on text"
        axes.set_title(f"Late gradients: {what}")
        points = {"own rate": [self.best(arm) for arm in arms], "same rate": [self.best(arms[0])] * len(arms)}
        for name, each in points.items():
            results = [mean(self.values(arm, point)) for arm, point in zip(arms, each, strict=True)]
            axes.plot([ARMS[self._job][arm][0][0] for arm in arms], results, marker="o", label=name)
        axes.set_xlabel("steps by which each gradient is late")


def spread(values: Sequence[float]) -> str:
    """Format mean and half of the 90 % interval (Student's t)."""
    half = T_95[len(values)] * stdev(values) / math.sqrt(len(values))
    return f"{mean(values):.2f} ± {half:.2f}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    studies = [Study(job, folder) for job in ARMS]
    print("\n\n".join(study.table() for study in studies))
    write_svg(folder / "staleness.svg", [(study.draw, 220) for study in studies])
