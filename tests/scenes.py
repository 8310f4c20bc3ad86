"""Runner of one fit. The caller passes what a user would write, and each rank returns a frozen `Seen` with the results.

    def test_the_scale_changes_no_bit(two_ranks):
        unscaled = fit(two_ranks, precision="16-true", loss_scale=1)[0]
        scaled = fit(two_ranks, precision="16-true", loss_scale=1024)[0]
        assert same(scaled.weights, unscaled.weights)

* Without `ranks`, the fit runs in this process and returns one `Seen`. With `ranks`, a world of the pool, it returns a
  list of them in rank order.
* Keyword arguments that `Trainer` accepts are passed to it. All others are passed to the strategy class (`kind`).
* `at(hook=look)` is a callback that calls `look(trainer, module, ...)` and stores the return values in `Seen.looks`.
* All arguments are pickled to reach the ranks, so functions and classes must be defined at module level.
"""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.comm import CommSummary
from tests import toy
from tests.rank_pool import Ranks
from tests.toy import Toy

OF_TRAINER = set(inspect.signature(pl.Trainer.__init__).parameters)
DEFAULTS: dict[str, Any] = {
    "train": toy.loader,
    "val": None,
    "callbacks": [],
    "kind": HybridAllReduceStrategy,
    "call": "fit",
    "ckpt_path": None,
    "save_to": None,
    "raises": False,
    "warns": False,
}


class Columns:
    """Columns of the rows that a logger received."""

    rows: list[tuple[int, dict[str, float]]]

    def column(self, name: str) -> dict[int, float]:
        """Return the logged values of a metric by step."""
        return {step: row[name] for step, row in self.rows if name in row}


@dataclass(frozen=True, kw_only=True)
class Seen(Columns):
    """Result of a fit on one rank, with observations made during it.

    The rank is the first field, so that pytest shows it when an assertion on a value fails.
    """

    rank: int
    weights: dict[str, Tensor]  # empty for a pipeline that failed
    losses: list[float]  # only of a `Toy`
    states: list[dict[int, dict[str, Any]]]  # for each optimizer, by parameter index
    global_step: int
    num_skipped: int
    loss_scale: float | None
    sent: CommSummary | None  # total traffic of this rank
    error: str  # "Type: message", with notes on further lines; empty if nothing was raised
    warnings: list[str]
    # Logged rows, each with the number of completed steps.
    rows: list[tuple[int, dict[str, float]]]
    metrics: dict[str, float]  # last value of each metric
    looks: dict[str, list[Any]]  # return values of each `at` callback, by hook

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Return the weights that all ranks share, without the running statistics of each rank."""
        return {
            name: weight
            for name, weight in self.weights.items()
            if "running" not in name and "num_batches" not in name
        }


def fit(
    ranks: Ranks | None = None,
    module: Any = Toy,
    *,
    timeout_s: float = 60.0,
    raises: bool = False,
    warns: bool = False,
    **scene: Any,
) -> Any:
    """Fit two epochs of `toy.loader()` and return the observations of each rank.

    Args:
        ranks: World of the pool, or None for this process.
        module: LightningModule, or a function that creates one.
        timeout_s: Time limit of a run on `ranks`.
        raises: Record an error of the fit in `Seen.error` instead of failing the test.
        warns: Allow warnings instead of failing the test.
        **scene: `train`, `val`: loaders, or functions that create them; `ckpt_path`: checkpoint to resume from;
            `save_to`: path of a checkpoint to save at the end; `call`: another entry point of `Trainer`; `kind`:
            strategy
            class. All others are options of `Trainer` or of the strategy.
    """
    scene = {"module": module, "raises": raises, "warns": warns, **scene}
    if ranks is None:
        return play(scene)
    return ranks.run(play, scene, timeout_s=timeout_s)


def play(scene: dict[str, Any]) -> Seen:
    """Run the fit of a scene on this rank."""
    scene = {**DEFAULTS, "logger": Keeps(), **scene}
    module = build(scene.pop("module"))
    loaders = [build(scene.pop("train"))]
    val = build(scene.pop("val"))
    raises = scene.pop("raises")
    warns = scene.pop("warns")
    save_to = scene.pop("save_to")
    call = scene.pop("call")
    if call == "fit":
        loaders.append(val)
    arguments = {"ckpt_path": scene.pop("ckpt_path")}
    if call in ("validate", "test"):
        arguments["verbose"] = False
    last = _Last()
    settings = _settings_of(scene)
    callbacks = settings["callbacks"]

    error = ""
    with warnings.catch_warnings(record=warns) as caught:
        if warns:
            warnings.simplefilter("always")
        trainer = toy.trainer(**{**settings, "callbacks": [*callbacks, last]})
        try:
            getattr(trainer, call)(module, *loaders, **arguments)
        except Exception as raised:
            if not raises:
                raise
            notes = getattr(raised, "__notes__", [])
            error = "\n".join([f"{type(raised).__name__}: {raised}", *notes])
        if save_to is not None:
            trainer.save_checkpoint(save_to)

    scale = getattr(trainer.precision_plugin, "loss_scale", None)
    is_in_stages = hasattr(trainer.strategy, "num_stages")
    return Seen(
        rank=this_rank(),
        weights={} if error and is_in_stages else toy.weights(module),
        losses=list(getattr(module, "losses", [])),
        states=last.states,
        global_step=trainer.global_step,
        num_skipped=getattr(trainer.precision_plugin, "num_skipped_steps", 0),
        loss_scale=None if scale is None else scale.value,
        sent=last.sent,
        error=error,
        warnings=[str(warning.message) for warning in caught or []],
        rows=getattr(settings["logger"], "rows", []),
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        looks=_looks_of(callbacks),
    )


def _settings_of(scene: dict[str, Any]) -> dict[str, Any]:
    """Pop and return the trainer's settings, with a strategy and new callbacks. Strategy options stay in the scene."""
    kind = scene.pop("kind")
    settings = {name: scene.pop(name) for name in list(scene) if name in OF_TRAINER}
    if "strategy" not in settings:
        settings["strategy"] = kind(**scene)
    elif scene:
        raise TypeError(
            f"`strategy` (={settings['strategy']!r}) takes no options here: {sorted(scene)}"
        )

    callbacks = settings["callbacks"]
    if not isinstance(callbacks, list):
        callbacks = [callbacks]
    settings["callbacks"] = []
    for callback in callbacks:
        if isinstance(callback, Looks):
            fresh = _at(callback.looks)
        else:
            fresh = build(callback)
        settings["callbacks"].append(fresh)
    return settings


def _looks_of(callbacks: list[pl.Callback]) -> dict[str, list[Any]]:
    """Return the values that all `at` callbacks stored, by hook."""
    looks = {}
    for callback in callbacks:
        if isinstance(callback, Looks):
            looks |= callback.kept
    return looks


def build(item: Any) -> Any:
    """Call a function and return its result. Return anything else, including modules, unchanged."""
    if callable(item) and not isinstance(item, nn.Module):
        return item()
    return item


def same(first: Any, second: Any) -> bool:
    """Return whether two trees of tensors hold the same bits."""
    if isinstance(first, Tensor):
        if not isinstance(second, Tensor) or first.dtype is not second.dtype:
            return False
        return torch.equal(first, second)
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return False
        return all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


class Looks(pl.Callback):
    """Callback that stores the return values of functions by hook, except None."""

    def __init__(self, looks: dict[str, Callable[..., Any]]) -> None:
        self.looks = looks
        self.kept = {hook: [] for hook in looks}

    def __reduce__(self) -> tuple[Any, ...]:
        return _at, (self.looks,)


def _at(looks: dict[str, Callable[..., Any]]) -> Looks:
    def hook(name: str) -> Callable[..., None]:
        def called(self: Looks, *args: Any, **kwargs: Any) -> None:
            value = self.looks[name](*args, **kwargs)
            if value is not None:
                self.kept[name].append(value)

        return called

    # The hooks must be methods, because Lightning looks them up on the class.
    return type("At", (Looks,), {name: hook(name) for name in looks})(looks)


def at(**looks: Callable[..., Any]) -> Looks:
    """Return a callback whose hooks are these functions, to observe a fit or to act as a user's callback would."""
    return _at(looks)


class Saves(pl.Callback):
    """Callback that saves a checkpoint after a given step, or at the end of a given epoch."""

    def __init__(self, path: Any, *, step: int | None = None, epoch: int | None = None) -> None:
        self.path = str(path)
        self.step = step
        self.epoch = epoch

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class Keeps(Columns, Logger):
    """Logger that keeps the rows that it receives."""

    name = version = "keeps"

    def __init__(self) -> None:
        super().__init__()
        self.rows = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append(((step or 0) + 1, metrics))


class _Last(pl.Callback):
    """Callback that stores values that teardown discards."""

    sent: CommSummary | None = None

    def __init__(self) -> None:
        self.states: list[dict[int, dict[str, Any]]] = []

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trace = getattr(trainer.strategy, "comm_trace", None)
        self.sent = None if trace is None else trace.total()

    def teardown(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        self.states = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]


class Spoiled(Toy):
    """Toy whose loss is multiplied by `factor` on one rank, or on all ranks (None), in given batches or steps."""

    def __init__(self, batches=(), steps=(), factor=float("inf"), rank=1, **options):
        super().__init__(**options)
        self.batches = batches
        self.steps = steps
        self.factor = factor
        self.rank = rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        is_now = batch_idx in self.batches or self.trainer.global_step in self.steps
        if is_now and self.rank in (None, this_rank()):
            return loss * self.factor
        return loss


def this_rank() -> int:
    """Return this process's rank, or 0 if there is no process group."""
    if dist.is_initialized():
        return dist.get_rank()
    return 0


def gradients(trainer: pl.Trainer, module: nn.Module, *args: Any) -> dict[str, Tensor]:
    """Return copies of the current gradients by parameter name."""
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
