"""Methods of the strategy, as module, callbacks and user code call them within a fit."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.battery.as_ddp.case import Plain, Run, loader
from tests.battery.as_ddp.trainers import property_of, state_of


def within_a_fit(look: Any) -> Any:
    """What `look(trainer, module)` sees after the second batch, in validation, and on one rank after the fit."""

    def behaviour(run: Run) -> Any:
        seen: list[Any] = []

        class Looks(pl.Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
                if batch_idx == 1:
                    seen.append(("train", look(trainer, module)))

            def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
                seen.append(("validation", look(trainer, module)))

        trainer = run.trainer(max_epochs=1, callbacks=[Looks()])
        trainer.fit(module := Plain(), loader(), loader())
        return [*seen, ("after", look(trainer, module))] if trainer.world_size == 1 else seen

    return behaviour


def _reduce(trainer: pl.Trainer, module: Plain) -> Any:
    reduce, rank = trainer.strategy.reduce, trainer.global_rank
    return [
        reduce(torch.tensor([1.5, 2.0]) + rank),
        reduce(torch.tensor([1.5]) + rank, reduce_op="sum"),
        reduce(torch.tensor([1]) + rank, reduce_op="sum"),
        reduce(torch.tensor([1.0]) + rank, reduce_op="mean"),
        reduce(torch.tensor(0.5) * rank, reduce_op="max"),
        reduce(rank),
        trainer.strategy.reduce_boolean_decision(rank == 0),
        trainer.strategy.reduce_boolean_decision(rank == 0, all=False),
    ]


def _gather(trainer: pl.Trainer, module: Plain) -> Any:
    rank, weight = trainer.global_rank, torch.ones(2, requires_grad=True)
    with torch.enable_grad():
        gathered = trainer.strategy.all_gather(weight * (rank + 1), sync_grads=True)
        if gathered.requires_grad:
            gathered.sum().backward()
    return [
        trainer.strategy.all_gather(torch.tensor([rank])),
        gathered.detach(),
        weight.grad,
        module.all_gather({"a": torch.tensor(float(rank)), "b": [torch.ones(2) * rank]}),
    ]


def _broadcast(trainer: pl.Trainer, module: Plain) -> Any:
    rank, strategy = trainer.global_rank, trainer.strategy
    strategy.barrier()
    strategy.barrier("by name")
    sources = range(trainer.world_size)
    return [strategy.broadcast(value, src=src) for src in sources for value in (f"of {rank}", {"a": [rank]}, None)]


def _state_dicts(trainer: pl.Trainer, module: Plain) -> Any:
    strategy = trainer.strategy
    return [
        strategy.lightning_module_state_dict(),
        [strategy.optimizer_state(optimizer) for optimizer in strategy.optimizers],
        strategy.precision_plugin.state_dict() if trainer.precision == "32-true" else None,
        [type(optimizer) for optimizer in strategy.optimizers],
    ]


def _loads(trainer: pl.Trainer, module: Plain) -> Any:
    strategy = trainer.strategy
    if not strategy.optimizers:
        return None
    state = {name: torch.ones_like(value) for name, value in strategy.lightning_module_state_dict().items()}
    strategy.load_model_state_dict({"state_dict": state}, strict=True)
    optimizer = strategy.optimizers[0].state_dict()
    strategy.load_optimizer_state_dict({"optimizer_states": [optimizer]})
    return strategy.lightning_module_state_dict(), strategy.optimizer_state(strategy.optimizers[0])


def _contexts(trainer: pl.Trainer, module: Plain) -> Any:
    strategy = trainer.strategy
    with strategy.tensor_init_context():
        made = torch.zeros(2)
    with strategy.model_sharded_context():
        other = torch.zeros(2)
    moved = strategy.batch_to_device({"a": torch.ones(1), "b": "text"})
    return made, other, moved, type(strategy.launcher), type(strategy.accelerator), type(strategy.cluster_environment)


def _properties(trainer: pl.Trainer, module: Plain) -> Any:
    names = [name for name, _ in inspect.getmembers(DDPStrategy, lambda one: isinstance(one, property))]
    return {name: property_of(trainer.strategy, name) for name in names if name != "model"}


def _hparams_and_module(trainer: pl.Trainer, module: Plain) -> Any:
    return [
        *[(name, tuple(value.shape), value.requires_grad) for name, value in module.named_parameters()],
        module.device,
        module.on_gpu,
        module.global_rank,
        module.local_rank,
        module.fabric,
        module.automatic_optimization,
        type(module.optimizers()),
        module.lr_schedulers(),
        module.example_input_array,
        module.strict_loading,
    ]


def signatures(run: Run) -> Any:
    """Every public method of `ddp` is there and takes what it takes there."""
    strategy = run.trainer().strategy
    missing = []
    for name, method in inspect.getmembers(DDPStrategy, inspect.isfunction):
        own = getattr(type(strategy), name, None)
        if name.startswith("_"):
            continue
        theirs, ours = (inspect.signature(each).parameters for each in (method, own))
        takes_all = any(each.kind is each.VAR_KEYWORD for each in ours.values())
        missing += [name for parameter in theirs if parameter not in ours and not takes_all]
    return missing


HOOKS = {
    "ddp_comm_hook": default_hooks.allreduce_hook,
    "ddp_comm_state": {},
    "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
    "model_averaging_period": 2,
}


def refused_arguments(run: Run) -> Any:
    """Which of its arguments `ddp` takes alone."""
    return _refused(run, HOOKS)


def defaults_spelt_out(run: Run) -> Any:
    """The same with the values that they have by default, as in configuration files."""
    return _refused(run, dict.fromkeys(HOOKS))


def _refused(run: Run, arguments: dict[str, Any]) -> list[str]:
    kind, refused = type(run.trainer().strategy), []
    for name, value in arguments.items():
        try:
            kind(**{name: value})
        except ValueError:
            refused.append(name)
    return refused


def made_with(name: str) -> Any:
    """A fit with an argument that both take."""

    def behaviour(run: Run) -> Any:
        kind = type(run.trainer().strategy)
        trainer = run.trainer(strategy=kind(**ARGUMENTS[name]), max_epochs=1)
        trainer.fit(module := Plain(), loader())
        return module.state_dict(), state_of(trainer)

    return behaviour


def ddp_keywords(run: Run) -> Any:
    """With which `DistributedDataParallel` is made."""
    trainer, seen = run.trainer(max_epochs=1), []

    class Looks(Plain):
        def on_fit_start(self) -> None:
            options = vars(self.trainer.model).items()
            seen.append({name: value for name, value in options if isinstance(value, bool | int | float)})

    trainer.fit(Looks(), loader(1))
    return seen


def names_in_the_registry(run: Run) -> Any:
    names = [name for name in StrategyRegistry.available_strategies() if name.startswith(run.strategy)]
    return sorted(name.removeprefix(run.strategy) for name in names)


def backward_is_not_synced(run: Run) -> Any:
    """`no_sync` of a loop by hand: gradients before and after the last batch."""

    class ByHand(Plain):
        automatic_optimization = False
        seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward(self.loss(batch, "loss"))
            self.seen.append(self.head.bias.grad.clone())
            self.manual_backward(self.loss(batch, "again"))
            self.seen.append(self.head.bias.grad.clone())
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()

    run.trainer(max_epochs=1).fit(module := ByHand(), loader(2))
    return module.seen, module.state_dict()


def toggled_optimizers(run: Run) -> Any:
    class Two(Plain):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            first = torch.optim.SGD(self.body.parameters(), lr=0.1)
            second = torch.optim.Adam(self.head.parameters(), lr=0.01)
            return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1)]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for optimizer in self.optimizers():
                self.toggle_optimizer(optimizer)
                self.manual_backward(self.loss(batch, "loss"))
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

        def on_train_epoch_end(self) -> None:
            self.lr_schedulers().step()

    run_settings = {"strategy": f"{run.strategy}_find_unused_parameters_true"}
    trainer = run.trainer(**run_settings)
    trainer.fit(module := Two(), loader(2))
    rates = [each.scheduler.get_last_lr() for each in trainer.lr_scheduler_configs]
    return module.state_dict(), trainer.global_step, rates


ARGUMENTS: dict[str, dict[str, Any]] = {
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "bucket_cap_mb": {"bucket_cap_mb": 1},
    "no_bucket_view": {"gradient_as_bucket_view": False},
    "no_broadcast_buffers": {"broadcast_buffers": False},
    "timeout": {"timeout": timedelta(seconds=100)},
    "process_group_backend": {"process_group_backend": "gloo"},
    "cluster_environment": {"cluster_environment": LightningEnvironment()},
    "checkpoint_io": {"checkpoint_io": TorchCheckpointIO()},
}
LOOKS = {
    "reduce": _reduce,
    "all_gather": _gather,
    "broadcast_and_barrier": _broadcast,
    "state_dicts": _state_dicts,
    "loading_within_a_fit": _loads,
    "contexts": _contexts,
    "properties_of_the_strategy": _properties,
    "properties_of_the_module": _hparams_and_module,
}
BEHAVIOURS = {name: within_a_fit(look) for name, look in LOOKS.items()}
BEHAVIOURS |= {
    each.__name__: each
    for each in (
        signatures,
        refused_arguments,
        defaults_spelt_out,
        ddp_keywords,
        names_in_the_registry,
        backward_is_not_synced,
        toggled_optimizers,
    )
}
BEHAVIOURS |= {f"made_with_{name}": made_with(name) for name in ARGUMENTS}
