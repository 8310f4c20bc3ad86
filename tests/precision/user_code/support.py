"""User code under `ddp` in fp32 and under `hybrid_allreduce`, and the comparison of the outcomes.

A case is a LightningModule with user code in its hooks and callbacks, or a Fabric loop. It records its observations:

* `losses`, and `readings` such as gradients, agree within the bound of the precision.
* `facts` agree bit for bit. A boolean fact is a promise that `ddp` must keep as well.
* Weights agree within the bound, or bit for bit with `is_exact`, if only fp32 user code wrote them.
* Every rank has different data, and all ranks end with equal weights.
"""

import math
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lightning_hybrid import HybridAllReduceStrategy, MasterWeightPrecision
from lightning_hybrid.flavours.fabric import (
    HybridAllReduceStrategy as FabricHybridAllReduceStrategy,
)
from lightning_hybrid.precision.loss_scale import DynamicLossScale
from tests import toy
from tests.scenes import same, this_rank
from tests.toy import NUM_CLASSES, NUM_FEATURES

UNIT = {"32-true": 0.0, "16-true": 2.0**-11, "bf16-true": 2.0**-8}
"""Relative error of one rounding."""

ROUNDINGS = 4
"""Roundings of the largest loss that may add up: weight, input, activation and gradient."""

STEPS_CANCEL = 4
"""Steps cancel each other in part and their roundings do not, so weights and gradients may be this much further off."""

FIRST_SCALE = 2.0**8
"""Initial loss scale. The default of 65,536 would skip the first steps of a run this short."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Strategy and precision of a run, and the folder for its files."""

    strategy: str
    precision: str
    folder: str


@dataclass(kw_only=True)
class Outcome:
    """State of one rank at the end of a case."""

    error: str = ""
    losses: list[float] = field(default_factory=list)
    validation_losses: list[float] = field(default_factory=list)
    readings: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    facts: dict[str, Any] = field(default_factory=dict)
    start: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


# ---- cases -----------------------------------------------------------------------------------------------------------


def small_net() -> nn.Sequential:
    """Return a two-layer classifier with the same weights in every process.

    It is smooth, because a kink such as that of ReLU would turn the rounding error of an activation into another
    gradient.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.Tanh(), nn.Linear(16, NUM_CLASSES))


def num_ranks() -> int:
    """Return the number of ranks, which is one without a process group."""
    if dist.is_initialized():
        return dist.get_world_size()
    return 1


def is_on_last_rank() -> bool:
    """Return whether this is the last rank, which behaves differently from the others in some cases."""
    return this_rank() == num_ranks() - 1


class UserCode(pl.LightningModule):
    """Small classifier, to which each case adds user code."""

    epochs = 2
    num_batches = 3
    batch_size = 8
    settings: dict[str, Any] = {}
    ddp_options: dict[str, Any] = {}
    keep_fp32: tuple[type[nn.Module], ...] = ()
    ignored_warnings: tuple[str, ...] = ()
    is_exact = False
    raises = ""
    entry_point = "fit"  # or "validate", "test"

    def __init__(self) -> None:
        super().__init__()
        self.outcome = Outcome()
        self.build()

    def build(self) -> None:
        """Create the layers."""
        self.net = small_net()

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return self.net(images)

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        images, targets = batch
        return F.cross_entropy(self(images), targets)

    def noted_loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch, and record its value."""
        loss = self.loss(batch)
        self.outcome.losses.append(loss.item())
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss."""
        return self.noted_loss(batch)

    def configure_optimizers(self) -> Any:
        """Train all parameters with plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        """Return the loader. Lightning adds a sampler that gives each rank its own samples."""
        return toy.loader(self.num_batches * self.batch_size * num_ranks(), self.batch_size)


class Validated(UserCode):
    """Classifier with a validation batch in each epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Record the loss."""
        self.outcome.validation_losses.append(self.loss(batch).item())

    def val_dataloader(self) -> Any:
        """Return one batch for each rank."""
        return toy.loader(8 * num_ranks(), batch_size=8)


class Manual(UserCode):
    """Classifier with manual optimization: one backward pass and one step in each batch."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Run backward and step."""
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.noted_loss(batch))
        optimizer.step()


class Frozen(UserCode):
    """Classifier with a learning rate of zero, so that only user code writes its weights."""

    is_exact = True

    def configure_optimizers(self) -> Any:
        """Return an optimizer that computes gradients and steps without an effect."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


def parameters_equal(module: nn.Module, values: dict[str, Tensor]) -> bool:
    """Return whether the parameters are fp32 and hold exactly these values."""
    return all(
        same(parameter.detach(), values[name]) for name, parameter in module.named_parameters()
    )


def dtypes_of_parameters(module: nn.Module) -> list[torch.dtype]:
    """Return the distinct dtypes of the parameters."""
    return sorted({parameter.dtype for parameter in module.parameters()}, key=str)


def dtypes_of_gradients(module: nn.Module) -> list[torch.dtype]:
    """Return the distinct dtypes of the gradients."""
    return sorted(
        {parameter.grad.dtype for parameter in module.parameters() if parameter.grad is not None},
        key=str,
    )


def copies_of_gradients(module: nn.Module) -> list[Tensor]:
    """Return copies of all gradients that are set."""
    return [
        parameter.grad.detach().clone()
        for parameter in module.parameters()
        if parameter.grad is not None
    ]


# ---- running them ----------------------------------------------------------------------------------------------------


def strategy_of(user_code: UserCode, setup: Setup) -> Any:
    """Return the Trainer's strategy with its defaults and the options of the case."""
    if setup.strategy == "ddp":
        return DDPStrategy(**user_code.ddp_options)
    if setup.precision == "16-true":
        loss_scale = DynamicLossScale(FIRST_SCALE)
    else:
        loss_scale = None
    if user_code.keep_fp32:
        plugin = MasterWeightPrecision(
            setup.precision, loss_scale=loss_scale, keep_fp32=user_code.keep_fp32
        )
        return HybridAllReduceStrategy(precision_plugin=plugin, **user_code.ddp_options)
    return HybridAllReduceStrategy(loss_scale=loss_scale, **user_code.ddp_options)


def trainer_of(user_code: UserCode, setup: Setup, **settings: Any) -> pl.Trainer:
    """Return a quiet trainer for a case."""
    settings = {
        "max_epochs": user_code.epochs,
        "num_sanity_val_steps": 0,
        "default_root_dir": setup.folder,
        **user_code.settings,
        **settings,
    }
    if not user_code.keep_fp32:
        settings["precision"] = setup.precision
    return toy.trainer(strategy=strategy_of(user_code, setup), **settings)


def class_of(case: Any) -> Any:
    """Return the class of a case, which may be a `partial` with constructor arguments."""
    return getattr(case, "func", case)


@contextmanager
def without_warnings(case: Any) -> Iterator[None]:
    """Ignore the warnings that a case also causes under `ddp`."""
    with warnings.catch_warnings():
        for message in class_of(case).ignored_warnings:
            warnings.filterwarnings("ignore", message)
        yield


def train(make_user_code: Callable[[], UserCode], setup: Setup) -> Outcome:
    """Fit a case on this rank and return the outcome, including an error."""
    torch.manual_seed(0)
    with without_warnings(make_user_code):
        user_code = make_user_code()
        outcome = user_code.outcome
        outcome.start = toy.weights(user_code)
        try:
            trainer = trainer_of(user_code, setup)
            torch.manual_seed(1 + this_rank())
            run(trainer, user_code)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            outcome.error = described(error)
            leave_the_group()
        outcome.weights = toy.weights(user_code)
    return outcome


def run(trainer: pl.Trainer, user_code: UserCode) -> None:
    """Call the entry point of the case."""
    if user_code.entry_point == "fit":
        trainer.fit(user_code)
    if user_code.entry_point == "validate":
        trainer.validate(user_code, verbose=False)
    if user_code.entry_point == "test":
        trainer.test(user_code, verbose=False)


class FabricLoop:
    """Base class of Fabric loops. Subclasses write `run`, which trains `self.net`."""

    epochs = 2
    num_batches = 3
    ddp_options: dict[str, Any] = {}
    ignored_warnings: tuple[str, ...] = ()
    is_exact = False
    raises = ""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self.net = small_net()
        self.folder = ""

    def run(self, fabric: Fabric) -> None:
        """Train with a user's loop."""
        raise NotImplementedError

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return the batches of this rank for all epochs."""
        samples = toy.Blobs(self.num_batches * 8 * num_ranks())
        own_samples = Subset(samples, range(this_rank(), len(samples), num_ranks()))
        return list(DataLoader(own_samples, batch_size=8)) * self.epochs

    def noted(self, loss: Tensor) -> Tensor:
        """Return the loss, and record its value."""
        self.outcome.losses.append(loss.item())
        return loss


def fabric_of(loop: FabricLoop, setup: Setup) -> Fabric:
    """Return a launched Fabric."""
    if setup.strategy == "ddp":
        strategy = FabricDDPStrategy(**loop.ddp_options)
    else:
        if setup.precision == "16-true":
            loss_scale = DynamicLossScale(FIRST_SCALE)
        else:
            loss_scale = None
        strategy = FabricHybridAllReduceStrategy(loss_scale=loss_scale, **loop.ddp_options)
    fabric = Fabric(
        strategy=strategy, precision=setup.precision, accelerator="cpu", devices=num_ranks()
    )
    fabric.launch()
    return fabric


def run_loop(make_loop: Callable[[], FabricLoop], setup: Setup) -> Outcome:
    """Run a Fabric loop on this rank and return the outcome, including an error."""
    loop = make_loop()
    loop.folder = setup.folder
    outcome = loop.outcome
    outcome.start = toy.weights(loop.net)
    fabric = fabric_of(loop, setup)
    with without_warnings(make_loop):
        try:
            loop.run(fabric)
        except Exception as error:
            outcome.error = described(error)
        outcome.weights = toy.weights(loop.net)
        fabric.strategy.teardown()
    if outcome.error:
        leave_the_group()
    return outcome


def described(error: BaseException) -> str:
    """Return type, message, notes and location of an error."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
    ]
    notes = " ".join(getattr(error, "__notes__", []))
    file_name = frames[-1].filename.rpartition("/")[2]
    return f"{type(error).__name__}: {error} {notes} [{file_name}:{frames[-1].lineno}]"


def leave_the_group() -> None:
    """Close the connections of this rank, so that ranks that wait in a collective get an error."""
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- judging them ----------------------------------------------------------------------------------------------------


def faults_of_reference(case: Any, outcomes: list[Outcome]) -> list[str]:
    """Return the reasons why `ddp` in fp32 cannot be the reference for this case."""
    faults = []
    for rank, outcome in enumerate(outcomes):
        if not is_expected_error(case, outcome):
            faults.append(f"ddp, rank {rank}: {outcome.error or 'no error'}")
        broken = [name for name, value in outcome.facts.items() if value is False]
        if broken:
            faults.append(f"ddp, rank {rank}: not true: {broken}")
        is_unchanged = all(
            torch.equal(outcome.start[name], value) for name, value in outcome.weights.items()
        )
        if is_unchanged and not case.is_exact:
            faults.append(f"ddp, rank {rank}: no weight has changed")
    if len(outcomes) > 1:
        if outcomes[0].losses and outcomes[0].losses == outcomes[1].losses:
            faults.append("ddp: ranks must see different data")
        faults += differences_between_ranks(outcomes)
    return faults


def differences(
    case: Any, precision: str, reference: list[Outcome], outcomes: list[Outcome]
) -> list[str]:
    """Return the differences from `ddp` in fp32 beyond rounding, and the differences between ranks."""
    faults = []
    for rank, outcome in enumerate(outcomes):
        if not is_expected_error(case, outcome):
            faults.append(f"rank {rank}: {outcome.error or 'no error'}")
    if faults:
        return faults
    for rank, (expected, outcome) in enumerate(zip(reference, outcomes, strict=True)):
        faults += [f"rank {rank}: {fault}" for fault in differences_of_facts(expected, outcome)]
        faults += [
            f"rank {rank}: {fault}" for fault in differences_of_losses(precision, expected, outcome)
        ]
        faults += [
            f"rank {rank}: {fault}"
            for fault in differences_of_readings(precision, expected, outcome)
        ]
        faults += [
            f"rank {rank}: {fault}"
            for fault in differences_of_weights(case, precision, expected, outcome)
        ]
    return faults + differences_between_ranks(outcomes)


def is_expected_error(case: Any, outcome: Outcome) -> bool:
    """Return whether the outcome has the expected error of the case, or no error if none is expected."""
    if case.raises:
        return case.raises in outcome.error
    return not outcome.error


def differences_of_facts(expected: Outcome, outcome: Outcome) -> list[str]:
    """Return the facts that are not equal bit for bit."""
    faults = []
    for name in sorted(expected.facts.keys() | outcome.facts.keys()):
        fact = outcome.facts.get(name)
        if not same(expected.facts.get(name), fact):
            faults.append(
                f"{name}: {shortened(fact)}, under ddp {shortened(expected.facts.get(name))}"
            )
    return faults


def differences_of_losses(precision: str, expected: Outcome, outcome: Outcome) -> list[str]:
    """Return a description of losses that differ by more than `ROUNDINGS` of the largest one."""
    faults = []
    for name in ("losses", "validation_losses"):
        theirs = torch.tensor(getattr(expected, name), dtype=torch.float64)
        ours = torch.tensor(getattr(outcome, name), dtype=torch.float64)
        if ours.shape != theirs.shape:
            faults.append(f"{name}: {len(ours)} of them, under ddp {len(theirs)}")
        elif len(theirs) > 0:
            bound = ROUNDINGS * UNIT[precision] * float(theirs.abs().max())
            gap = float((ours - theirs).abs().max())
            if not gap <= bound:  # also true for nan
                faults.append(
                    f"{name}: {gap:.3g} from those of ddp, allowed {bound:.3g}: {ours.tolist()}"
                )
    return faults


def differences_of_readings(precision: str, expected: Outcome, outcome: Outcome) -> list[str]:
    """Return the readings with another dtype, or whose distance from `ddp` is too large for their norm."""
    faults = []
    for name in sorted(expected.readings.keys() | outcome.readings.keys()):
        theirs = expected.readings.get(name, [])
        ours = outcome.readings.get(name, [])
        if len(theirs) != len(ours):
            faults.append(f"{name}: {len(ours)} of them, under ddp {len(theirs)}")
            continue
        for number, (their, our) in enumerate(zip(theirs, ours, strict=True)):
            if their.dtype is not our.dtype:
                faults.append(f"{name}[{number}]: {our.dtype}, under ddp {their.dtype}")
            bound = STEPS_CANCEL * ROUNDINGS * UNIT[precision] * norm(their) + 1e-6
            gap = norm(their.double() - our.double())
            if not gap <= bound:
                faults.append(f"{name}[{number}]: {gap:.3g} from that of ddp, allowed {bound:.3g}")
    return faults[:4]


def differences_of_weights(
    case: Any, precision: str, expected: Outcome, outcome: Outcome
) -> list[str]:
    """Return the weights with another dtype, or whose distance from `ddp` is too large for the distance trained."""
    if expected.weights.keys() != outcome.weights.keys():
        return [
            f"weights: {sorted(expected.weights.keys() ^ outcome.weights.keys())} under one strategy only"
        ]
    bound = 0.0
    if not case.is_exact and precision != "32-true":
        bound = (
            STEPS_CANCEL * ROUNDINGS * UNIT[precision] * distance(expected.start, expected.weights)
            + 1e-6
        )
    faults = []
    for name, theirs in expected.weights.items():
        ours = outcome.weights[name]
        gap = norm(theirs.double() - ours.double())
        if ours.dtype is not theirs.dtype:
            faults.append(f"{name}: {ours.dtype}, under ddp {theirs.dtype}")
        elif not gap <= bound:
            faults.append(f"{name}: {gap:.3g} from that of ddp, allowed {bound:.3g}")
    return faults


def distance(start: dict[str, Tensor], end: dict[str, Tensor]) -> float:
    """Return the Euclidean distance of all weights between two states."""
    names = [name for name in start if name in end and start[name].shape == end[name].shape]
    return math.sqrt(sum(norm(end[name].double() - start[name].double()) ** 2 for name in names))


def differences_between_ranks(outcomes: list[Outcome]) -> list[str]:
    """Return the weights that are not equal on all ranks."""
    faults = []
    for name, value in outcomes[0].weights.items():
        if not all(same(value, outcome.weights.get(name)) for outcome in outcomes):
            faults.append(f"ranks have different {name}")
    return faults


def norm(tensor: Tensor) -> float:
    """Return the Euclidean norm in float64."""
    return float(tensor.double().norm())


def shortened(value: Any) -> str:
    """Return a representation of at most a line or two."""
    text = repr(value)
    if len(text) < 300:
        return text
    return f"{text[:300]} ..."


# ---- for the tests ---------------------------------------------------------------------------------------------------

LONG = [pytest.mark.long, pytest.mark.battery]
SETUPS = [(1, "16-true"), (1, "bf16-true"), (2, "16-true"), (2, "bf16-true")]


def in_half_precision(
    *,
    usual_world_size: int = 1,
    world_sizes: tuple[int, ...] = (1, 2),
    precisions: tuple[str, ...] = ("16-true", "bf16-true"),
) -> pytest.MarkDecorator:
    """Return a mark that runs a test in both half precisions, on one rank and on two.

    Args:
        usual_world_size: Number of ranks of the fp16 run that is not marked long. Use two if ranks have to agree on
            something. The bf16 run that is not marked long has the smallest world size.
        world_sizes: Numbers of ranks for which the case makes sense.
        precisions: Precisions in which the case makes sense.
    """
    usual = {(usual_world_size, "16-true"), (min(world_sizes), "bf16-true")}
    setups = []
    for world_size, precision in SETUPS:
        if world_size in world_sizes and precision in precisions:
            if (world_size, precision) in usual:
                marks = []
            else:
                marks = LONG
            setups.append(
                pytest.param(world_size, precision, marks=marks, id=f"{world_size}-{precision}")
            )
    return pytest.mark.parametrize(("world_size", "precision"), setups)


def in_every_precision() -> pytest.MarkDecorator:
    """Return a mark that also runs a test in fp32, for promises that do not concern half precision."""
    setups = [
        pytest.param(2, "32-true", id="2-32-true"),
        *in_half_precision(usual_world_size=2).args[1],
    ]
    return pytest.mark.parametrize(("world_size", "precision"), setups)


def code_of_users(*cases: Any) -> pytest.MarkDecorator:
    """Return a mark that runs a test for each of these cases."""
    return pytest.mark.parametrize(
        "user_code", [pytest.param(case, id=name_of(case)) for case in cases]
    )


def name_of(case: Any) -> str:
    """Return the name of a class, with the arguments of a `partial`."""
    if isinstance(case, partial):
        arguments = [*case.args, *case.keywords.values()]
        return "-".join(
            [case.func.__name__, *[getattr(value, "__name__", str(value)) for value in arguments]]
        )
    return case.__name__
