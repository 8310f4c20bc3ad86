"""Methods of the strategy, called by module, callbacks and user code within a fit."""

import functools
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.battery.as_ddp.trainers import properties, property_of, state_of
from tests.battery.case import Plain, Run, behavior, loader, plain_with


def within_a_fit(look: Any) -> Any:
    """Return a behavior that calls `look(trainer, module)` after the second batch and in validation.

    In a run with a single rank, it also calls `look` after the fit.
    """

    def seen_by(run: Run) -> Any:
        seen: list[Any] = []

        class Looks(pl.Callback):
            def on_train_batch_end(
                self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
            ) -> None:
                if batch_idx == 1:
                    seen.append(("train", look(trainer, module)))

            def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
                seen.append(("validation", look(trainer, module)))

        trainer, module = run.fit(None, loader(), loader(), max_epochs=1, callbacks=[Looks()])
        if trainer.world_size == 1:
            return [*seen, ("after", look(trainer, module))]
        return seen

    return behavior(seen_by, name=look.__name__)


@within_a_fit
def broadcast_and_barrier(trainer: pl.Trainer, module: Plain) -> Any:
    rank = trainer.global_rank
    strategy = trainer.strategy
    strategy.barrier()
    strategy.barrier("by name")
    sources = range(trainer.world_size)
    return [
        strategy.broadcast(value, src=src)
        for src in sources
        for value in (f"of {rank}", {"a": [rank]}, None)
    ]


@within_a_fit
def state_dicts(trainer: pl.Trainer, module: Plain) -> Any:
    strategy = trainer.strategy
    return [
        strategy.lightning_module_state_dict(),
        [strategy.optimizer_state(optimizer) for optimizer in strategy.optimizers],
        strategy.precision_plugin.state_dict() if trainer.precision == "32-true" else None,
        [type(optimizer) for optimizer in strategy.optimizers],
    ]


@within_a_fit
def loading_within_a_fit(trainer: pl.Trainer, module: Plain) -> Any:
    strategy = trainer.strategy
    if not strategy.optimizers:
        return None
    state = {
        name: torch.ones_like(value)
        for name, value in strategy.lightning_module_state_dict().items()
    }
    strategy.load_model_state_dict({"state_dict": state}, strict=True)
    optimizer = strategy.optimizers[0].state_dict()
    strategy.load_optimizer_state_dict({"optimizer_states": [optimizer]})
    return strategy.lightning_module_state_dict(), strategy.optimizer_state(strategy.optimizers[0])


@within_a_fit
def properties_of_the_strategy(trainer: pl.Trainer, module: Plain) -> Any:
    values = {}
    for name in properties(DDPStrategy):
        if name != "model":
            values[name] = property_of(trainer.strategy, name)
    return values


HOOKS = {
    "ddp_comm_hook": default_hooks.allreduce_hook,
    "ddp_comm_state": {},
    "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
    "model_averaging_period": 2,
}


@behavior
def refused_arguments(run: Run) -> Any:
    return _refused(run, HOOKS)


@behavior
def defaults_spelt_out(run: Run) -> Any:
    """Pass the default values explicitly, as configuration files do."""
    return _refused(run, dict.fromkeys(HOOKS))


def _refused(run: Run, arguments: dict[str, Any]) -> list[str]:
    kind = type(run.trainer().strategy)
    refused = []
    for name, value in arguments.items():
        try:
            kind(**{name: value})
        except ValueError:
            refused.append(name)
    return refused


def made_with(arguments: dict[str, Any], run: Run) -> Any:
    trainer, module = run.fit(strategy=type(run.trainer().strategy)(**arguments), max_epochs=1)
    return module.state_dict(), state_of(trainer)


@behavior
def ddp_keywords(run: Run) -> Any:
    seen: list[Any] = []

    def look(self: Any) -> None:
        options = vars(self.trainer.model).items()
        seen.append(
            {name: value for name, value in options if isinstance(value, bool | int | float)}
        )

    run.fit(plain_with(on_fit_start=look), loader(1), max_epochs=1)
    return seen


ARGUMENTS: dict[str, dict[str, Any]] = {
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "bucket_cap_mb": {"bucket_cap_mb": 1},
    "timeout": {"timeout": timedelta(seconds=100)},
    "process_group_backend": {"process_group_backend": "gloo"},
    "cluster_environment": {"cluster_environment": LightningEnvironment()},
    "checkpoint_io": {"checkpoint_io": TorchCheckpointIO()},
}
for _name, _arguments in ARGUMENTS.items():
    behavior(functools.partial(made_with, _arguments), name=f"made_with_{_name}")
