"""One fit, and what was seen of it: what a user writes goes in, a frozen `Seen` of each rank comes out.

    def test_the_scale_changes_no_bit(two_ranks):
        unscaled = fit(two_ranks, precision="16-true", loss_scale=1)[0]
        scaled = fit(two_ranks, precision="16-true", loss_scale=1024)[0]
        assert same(scaled.weights, unscaled.weights)

* Without `ranks`, a world of the pool, it runs in this process: then there is one `Seen`, else a list of them by rank.
* Keywords that `Trainer` knows go to it, all others to the strategy's class (`kind`).
* `at(hook=look)` is a callback that does `look(trainer, module, ...)` and keeps what it returns in `Seen.looks`.
* All crosses to the ranks by pickle: what is given stands at the top of a file.
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
        """Logged values of a name, by step."""
        return {step: row[name] for step, row in self.rows if name in row}


@dataclass(frozen=True, kw_only=True)
class Seen(Columns):
    """Result of a fit on one rank, and observations during it.

    The rank stands first, so that pytest shows it where an assertion on a value fails.
    """

    rank: int
    weights: dict[str, Tensor]  # none of a pipeline that failed
    losses: list[float]  # of a `Toy`
    states: list[dict[int, dict[str, Any]]]  # of each optimizer, by number of the parameter
    global_step: int
    num_skipped: int
    loss_scale: float | None
    sent: CommSummary | None  # by this rank, in all
    error: str  # "Type: message", notes as further lines; empty where there was none
    warnings: list[str]
    # what was logged, with the number of steps made by then
    rows: list[tuple[int, dict[str, float]]]
    metrics: dict[str, float]  # the last of each
    looks: dict[str, list[Any]]  # of each `at`, by hook

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
        ranks: World of the pool; None: this process.
        module: LightningModule, or a function that makes one.
        timeout_s: Limit on ranks.
        raises: An error of the fit is seen, where it would fail the test.
        warns: So is a warning.
        **scene: `train`, `val`: loaders, or functions that make them; `ckpt_path`: checkpoint to go on from; `save_to`:
            where to save one in the end; `call`: another entry point of `Trainer`; `kind`: the strategy's class. All
            others are options of `Trainer`, or of the strategy.
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
    """Return the trainer's settings, with a strategy and fresh callbacks. What is left are the strategy's options."""
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
    """Return the values that every `at` kept, by hook."""
    looks = {}
    for callback in callbacks:
        if isinstance(callback, Looks):
            looks |= callback.kept
    return looks


def build(item: Any) -> Any:
    """Call a function and return its result. Anything else is returned as it is, modules too."""
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
    """Keeps, by hook, what functions returned there. None is not kept."""

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

    # a method: Lightning asks the class
    return type("At", (Looks,), {name: hook(name) for name in looks})(looks)


def at(**looks: Callable[..., Any]) -> Looks:
    """A callback whose hooks are these functions, with the hook's arguments: to look, or to do as a user's would."""
    return _at(looks)


class Saves(pl.Callback):
    """Saves a checkpoint after so many steps, or at the end of an epoch."""

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
    """A logger that keeps what it is given."""

    name = version = "keeps"

    def __init__(self) -> None:
        super().__init__()
        self.rows = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append(((step or 0) + 1, metrics))


class _Last(pl.Callback):
    """Keeper of values that teardown drops."""

    sent: CommSummary | None = None

    def __init__(self) -> None:
        self.states: list[dict[int, dict[str, Any]]] = []

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trace = getattr(trainer.strategy, "comm_trace", None)
        self.sent = None if trace is None else trace.total()

    def teardown(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        self.states = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]


class Spoiled(Toy):
    """Its loss is multiplied on one rank, or on all (None), in some batches of an epoch, or steps of the fit."""

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
    """This rank. 0 where there is no group."""
    if dist.is_initialized():
        return dist.get_rank()
    return 0


def gradients(trainer: pl.Trainer, module: nn.Module, *args: Any) -> dict[str, Tensor]:
    """The gradients of the moment, by name."""
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
