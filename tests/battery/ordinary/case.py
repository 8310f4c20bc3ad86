"""How one row of the battery is run and judged.

A row is a class of its own: a LightningModule with data, written as users write theirs, that knows nothing of where it
runs. `Row` is the plainest of them; others say what they do otherwise:

    class Positional(Row):
        def build(self):
            super().build()
            self.position = nn.Parameter(torch.zeros(NUM_FEATURES))

        def forward(self, x):
            return self.net(x + self.position)

A row is run under Lightning's own `ddp` in fp32, which must learn, and under `hybrid_allreduce`. `judge` compares them.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import traceback
import warnings
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.precision.loss_scale import DynamicLossScale
from tests import toy
from tests.rank_pool import RankError, Ranks
from tests.toy import NUM_CLASSES, NUM_FEATURES

TABLES = ("models", "layers", "state", "optimizers", "loops", "loaders", "callbacks")
HALF = {"16-true": torch.float16, "bf16-true": torch.bfloat16}
MIXED = ("16-mixed", "bf16-mixed")

UNIT = {"16-true": 2.0**-11, "bf16-true": 2.0**-8, "16-mixed": 2.0**-11, "bf16-mixed": 2.0**-8}
"""The relative error of one rounding."""

HALF_SHOWS = dict.fromkeys(HALF, "keeps trained parameters in half precision")
"""What a row is refused with that needs a trained parameter in fp32; the words name a cure."""

FIRST_SCALE = 2.0**8
"""Of the loss, which then changes as ever. From the usual 65,536 down, the first steps of many rows would be skipped,
as they are under mixed precision: a curve that is late says nothing of what is looked for here."""

ROUNDINGS = 8
"""How many roundings of the largest loss may add up, all to one side: four (weight, input, activation, gradient) in
each of two layers. Most rows need one. Rows with more layers, or whose steps turn on a sign or a tie, say how many they
need. What is lost in silence (a gradient, a batch, a buffer) costs hundreds in fp16."""

WAY = 4
"""How many times as far, as part of their way, weights and buffers may be from those of fp32 as losses are: steps
cancel each other in part, their roundings do not, and optimizers that divide by a gradient's size make those of small
ones large."""


def samples() -> toy.Blobs:
    """32 samples for each rank: as many steps on one as on two."""
    return toy.Blobs(32 * (dist.get_world_size() if dist.is_initialized() else 1))


class Row(pl.LightningModule):
    """A small classifier of blobs. Subclasses say what is theirs."""

    epochs = 3
    lr = 0.1
    settings: ClassVar[dict[str, Any]] = {}  # of the Trainer, where `ddp` is given them too
    find_unused = False  # DDP's `find_unused_parameters`
    ignored_warnings: ClassVar[tuple[str, ...]] = ()  # that `ddp` gives as well
    worlds: ClassVar[tuple[int, ...]] = (1, 2)
    falls_to = 0.7  # the loss under `ddp`, from the mean of its first three to that of its last three
    roundings = ROUNDINGS
    refused: ClassVar[dict[str, str]] = {}  # precision -> words of the error with which it is refused
    different: ClassVar[dict[str, str]] = {}  # precision -> words of what is, on purpose, not as under `ddp`
    mixed_fails: ClassVar[dict[str, str]] = {}  # precision -> words of what is wrong under Lightning's mixed precision

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.facts: dict[str, Any] = {}  # what must be as under `ddp` in every precision, to the bit
        self.build()

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.ReLU(), nn.Linear(16, NUM_CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def note(self, loss: Tensor) -> Tensor:
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.note(self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def train_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=8)

    def after_fit(self) -> None:
        """Look at what is left when the fit has ended."""


class Manual(Row):
    """A loop by hand, with one backward and one step in each batch."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.note(self.loss(batch)))
        optimizer.step()


@dataclasses.dataclass(kw_only=True)
class Result:
    """What a run left on one rank."""

    error: str = ""
    losses: list[float] = dataclasses.field(default_factory=list)
    start: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    state: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    trained: list[str] = dataclasses.field(default_factory=list)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def rows(table: str) -> dict[str, type[Row]]:
    """The rows of a table by name, in the order of its file."""
    module = importlib.import_module(f"tests.battery.ordinary.{table}")
    return {
        name: kind
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and issubclass(kind, Row)
        and kind.__module__ == module.__name__
        and not name.startswith("_")
    }


def names() -> list[str]:
    """Of all rows, such as `models.Plain`."""
    return [f"{table}.{name}" for table in TABLES for name in rows(table)]


def row(name: str) -> type[Row]:
    """The row of a name such as `models.Plain`."""
    table, _, kind = name.partition(".")
    return rows(table)[kind]


def run(name: str, strategy: str, precision: str) -> Result:
    """Train a row; on every rank. An error is part of the result: the ranks of the pool live on."""
    kind, result = row(name), Result()
    rank = dist.get_rank() if dist.is_initialized() else 0
    with warnings.catch_warnings():
        for message in kind.ignored_warnings:
            warnings.filterwarnings("ignore", message)
        if kind.find_unused:
            warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        try:
            torch.manual_seed(0)
            module = kind()
            result.start = toy.weights(module)
            result.trained = [n for n, p in module.named_parameters() if p.requires_grad]
            settings = {"max_epochs": kind.epochs, **precision_settings(precision), **kind.settings}
            trainer = toy.trainer(strategy=strategy_of(strategy, precision, kind.find_unused), **settings)
            torch.manual_seed(1 + rank)
            trainer.fit(module)
            module.after_fit()
            result.losses, result.facts, result.state = module.losses, module.facts, toy.weights(module)
        except Exception as error:
            own = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
            place = f"{own[-1].filename.rsplit('/', 1)[-1]}:{own[-1].lineno}"
            result.error = f"{type(error).__name__}: {error} [{place}] {' '.join(getattr(error, '__notes__', []))}"
            # The other ranks may wait for this one in a collective: they learn of it by the connection that ends, and
            # the pool makes a new group.
            if dist.is_initialized():
                dist.destroy_process_group()
    return result


def strategy_of(name: str, precision: str, find_unused: bool) -> Strategy:
    """Lightning's or ours, with nothing but defaults, and the first loss scale of `FIRST_SCALE`."""
    if name == "ddp":
        return DDPStrategy(find_unused_parameters=find_unused)
    scale = DynamicLossScale(FIRST_SCALE) if precision == "16-true" else None
    return HybridAllReduceStrategy(loss_scale=scale, find_unused_parameters=find_unused)


def precision_settings(precision: str) -> dict[str, Any]:
    """`precision=`, but for fp16 by autocast: on a CPU Lightning would make it bf16."""
    if precision != "16-mixed":
        return {"precision": precision}
    scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


def run_on(ranks: Ranks, name: str, strategy: str, precision: str) -> list[Result]:
    """The same, on ranks of a pool; that they hang or die is part of the result too."""
    try:
        return ranks.run(run, name, strategy, precision)
    except RankError as error:
        return [Result(error=str(error)) for _ in range(ranks.world_size)]


# ---- judging -------------------------------------------------------------------------------------------------------


def judge(name: str, precision: str, reference: list[Result], ours: list[Result]) -> tuple[str, list[str]]:
    """How it went, one of `tally.OUTCOMES`, and what is wrong, if it fails."""
    kind = row(name)
    refused = kind.refused.get(precision)
    if refused is not None:
        is_told = any(refused in result.error for result in ours) and all(result.error for result in ours)
        told = errors_of(ours) or ["nothing: it trains"]
        return ("refused in words", []) if is_told else ("fails", [f"must be refused with {refused!r}, not {told}"])
    bits = bits_that_differ(reference, ours)
    faults = bits if precision == "32-true" or not bits else what_is_not_close(kind, precision, reference, ours)
    different = kind.different.get(precision)
    if different is not None:
        others = [fault for fault in faults if different not in fault] if faults else [f"nothing has {different!r}"]
        return ("fails", others) if others else ("deliberately different", [])
    if not bits:
        return "bit-equal", []
    return ("fails", faults) if faults else ("close", [])


def roundings_between(precision: str, reference: list[Result], ours: list[Result]) -> float:
    """The largest distance of losses, in roundings of the largest loss."""
    unit = UNIT[precision] * max(abs(loss) for result in reference for loss in result.losses)
    return max(gap_of(one, other) for one, other in zip(reference, ours, strict=True)) / unit


def fault_of_reference(kind: type[Row], reference: list[Result]) -> str:
    """Why nothing can be said with this reference; empty if all is well."""
    for rank, result in enumerate(reference):
        if result.error:
            return f"ddp does not train it: {result.error}"
        first, last = mean(result.losses[:3]), mean(result.losses[-3:])
        if not last < kind.falls_to * first:
            return f"ddp learns nothing on rank {rank}: the loss goes from {first:.4g} to {last:.4g}"
    if len(reference) > 1 and reference[0].losses == reference[1].losses:
        return "ranks must see different data"
    return ""


def bits_that_differ(reference: list[Result], ours: list[Result]) -> list[str]:
    """What is not, to the bit, as under `ddp`."""
    found = []
    for rank, (one, other) in enumerate(zip(reference, ours, strict=True)):
        if other.error:
            return errors_of(ours)
        if one.losses != other.losses:
            found.append(f"rank {rank}: losses {shown(other.losses)} for {shown(one.losses)}")
        names = [n for n in one.state if n not in other.state or not same(one.state[n], other.state[n])]
        if names or one.state.keys() != other.state.keys():
            found.append(f"rank {rank}: state of {names or one.state.keys() ^ other.state.keys()}")
        found += facts_that_differ(rank, one, other)
    return found


def what_is_not_close(kind: type[Row], precision: str, reference: list[Result], ours: list[Result]) -> list[str]:
    """What is farther from `ddp` in fp32 than rounding explains, or of another dtype, or differs between ranks."""
    found = []
    for rank, (one, other) in enumerate(zip(reference, ours, strict=True)):
        if other.error:
            return errors_of(ours)
        bound = kind.roundings * UNIT[precision] * max(map(abs, one.losses))
        if not (gap := gap_of(one, other)) <= bound:  # also where it is nan
            found.append(f"rank {rank}: gap {gap:.3g} > {bound:.3g}: {shown(other.losses)} for {shown(one.losses)}")
        if one.state.keys() != other.state.keys():
            found.append(f"rank {rank}: state of {one.state.keys() ^ other.state.keys()}")
            continue
        dtypes = {n: other.state[n].dtype for n in one.state if one.state[n].dtype is not other.state[n].dtype}
        if dtypes:
            found.append(f"rank {rank}: {dtypes}")
        others = [[n] for n in one.start.keys() & one.state.keys() - set(one.trained) if has_digits(one.state[n])]
        for names in [[n for n in one.trained if n in one.start and n in one.state], *others]:
            way, gap = way_between(one.start, one.state, names), way_between(one.state, other.state, names)
            if not gap <= WAY * kind.roundings * UNIT[precision] * way + 1e-6:
                found.append(f"rank {rank}: weights {names[:4]}: {gap:.3g} from those of ddp, which went {way:.3g}")
        found += facts_that_differ(rank, one, other)
    if not found and len(ours) > 1:
        names = [n for n in ours[0].trained if parts(ours, n) and not parts(reference, n)]
        found += [f"ranks differ in {names}"] if names else []
    return found


def errors_of(results: list[Result]) -> list[str]:
    """Each once; those of ranks that only lost the others come last."""
    errors = {result.error: "onnection closed" in result.error for result in results if result.error}
    return sorted(errors, key=lambda error: errors[error])


def parts(results: list[Result], name: str) -> bool:
    """Whether two ranks end with other values of this parameter."""
    one, other = (result.state.get(name) for result in results)
    return one is None or other is None or not same(one, other)


def gap_of(one: Result, other: Result) -> float:
    """The largest distance of two loss curves; inf if they have different lengths or one is not finite."""
    if len(one.losses) != len(other.losses) or not all(map(math.isfinite, other.losses)):
        return math.inf
    return max((abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)), default=0.0)


def facts_that_differ(rank: int, one: Result, other: Result) -> list[str]:
    keys = one.facts.keys() | other.facts.keys()
    pairs = {key: (other.facts.get(key), one.facts.get(key)) for key in sorted(keys)}
    return [
        f"rank {rank}: {key} is {ours!r}, not {theirs!r}" for key, (ours, theirs) in pairs.items() if ours != theirs
    ]


def way_between(start: dict[str, Tensor], end: dict[str, Tensor], names: list[str]) -> float:
    pairs = [(start[n], end[n]) for n in names if start[n].shape == end[n].shape]
    return math.sqrt(sum(float((a.cdouble() - b.cdouble()).abs().square().sum()) for a, b in pairs))


def has_digits(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def shown(losses: list[float]) -> str:
    text = [f"{loss:.4g}" for loss in losses]
    return " ".join(text if len(text) < 9 else [*text[:4], "..", *text[-4:]])
