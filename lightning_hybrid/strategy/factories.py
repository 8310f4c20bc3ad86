"""Which extensions a fit has, by the options of its strategy."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hybrid.strategy.compatibility import in_callbacks, in_module, refuse_excluded
from lightning_hybrid.strategy.extension import Extensions, FitContext, FitExtension

if TYPE_CHECKING:
    from lightning_hybrid.strategy.elastic.elastic_fit import ElasticFit
    from lightning_hybrid.strategy.elastic.held_loggers import HeldLoggers


def made_for(strategy: Any) -> Extensions | None:
    """Make what a strategy's options ask for, in the order of calls: ours, then the user's; None where that is nothing.

    Raises:
        ValueError: a constructor refuses the fit, or a factory makes something else.
    """
    comm, made = strategy._comm, list[FitExtension | None]()
    fit = FitContext(
        module=strategy.lightning_module,
        precision=strategy.precision_plugin,
        topology=getattr(strategy, "replicas", comm.topology),  # of a stage, in a pipeline
        device=strategy.root_device,
        timeout=strategy._timeout,
        ddp_options=strategy._ddp_kwargs,
        failures=strategy._failures,
    )
    options = strategy._options
    # Imported here: a fit without an option needs none of its modules.
    if any(getattr(one, "node_slices", ()) for one in fit.module.modules()):
        from lightning_hybrid.strategy.node_slices.extension import node_slices_for

        made.append(node_slices_for(fit, options.features()))
    if options.has_error_feedback:
        from lightning_hybrid.strategy.feedback_state import ErrorFeedbackExtension

        made.append(ErrorFeedbackExtension(fit, saves=options.elastic is None))
    if options.local_steps is not None:
        from lightning_hybrid.strategy.local_steps.extension import local_steps_for

        made.append(local_steps_for(fit, options.local_steps))
    if options.shard_update != "off":
        from lightning_hybrid.strategy.shard_update.extension import shard_update_for

        made.append(shard_update_for(fit, options.shard_update))
    for factory in options.extensions:
        made.append(one := factory(fit))
        if not isinstance(one, FitExtension):
            raise ValueError(
                f"`extensions` (={factory!r}) must be factories that take a `FitContext` and return a `FitExtension`, "
                f"and this one returned {type(one).__name__}. Derive its class from `FitExtension`."
            )
    some = [one for one in made if one is not None]
    return Extensions(fit, some) if some else None


def loggers_for(strategy: Any) -> HeldLoggers | None:
    """Hold the loggers of an elastic run; None where it is not one."""
    if strategy._options.elastic is None or strategy.lightning_module.trainer.state.fn != "fit":
        return None
    from lightning_hybrid.strategy.elastic.held_loggers import HeldLoggers

    return HeldLoggers(strategy)


def elastic_for(strategy: Any) -> ElasticFit | None:
    """Make what an elastic run has; None where it is not one.

    Raises:
        ValueError: the run has something that excludes it.
    """
    comm = strategy._comm
    module = strategy.lightning_module
    options = strategy._options
    if options.elastic is None:
        return None
    from lightning_hybrid.strategy.elastic.elastic_fit import ElasticFit

    found = options.features() | in_module(module) | in_callbacks(module.trainer.callbacks)
    if any(getattr(one, "node_slices", ()) for one in module.modules()):
        found["node slices"] = "`node_slices`"
    if not module.automatic_optimization:
        found["manual optimization"] = "`automatic_optimization` (=False)"
    trainer = module.trainer
    num_nodes = max(trainer.num_nodes, int(os.environ.get("GROUP_WORLD_SIZE", "1")))
    if num_nodes > 1:
        found["several nodes"] = f"`num_nodes` (={num_nodes})"
    if (epochs := trainer.reload_dataloaders_every_n_epochs) > 0:
        found["reloaded loaders"] = f"`reload_dataloaders_every_n_epochs` (={epochs})"
    if not strategy.has_exact_resume:
        found["inexact resume"] = "`exact_resume` (=False)"
    if (batches := module.trainer.accumulate_grad_batches) > 1:
        found["accumulation"] = f"`accumulate_grad_batches` (={batches})"
    refuse_excluded(found)
    if (device := strategy.root_device).type != "cpu":
        if device.type != "cuda" or not hasattr(dist.ProcessGroupNCCL.Options, "lazy_init"):
            raise ValueError(
                f"`elastic` (={options.elastic!r}) is for CPUs, and from torch 2.15 on for GPUs of NVIDIA's: this rank "
                f"trains on {device} with torch {torch.__version__}. Leave `elastic` out."
            )
        rank_zero_warn(f"`elastic` (={options.elastic!r}) has not been run on a GPU yet.")
    return ElasticFit(options.elastic, strategy, comm=comm, failures=strategy._failures, timeout=strategy._timeout)
