"""When the plan of communication is tuned in a fit; how it is tuned is in `comm/tuning`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_hybrid.comm import CommEngine, CommPlan, Topology
from lightning_hybrid.comm.tuning.plan_trials import MOST_STEPS
from lightning_hybrid.comm.tuning.session import TuningSession

if TYPE_CHECKING:
    import lightning.pytorch as pl

# Steps that tuning needs, about: with fewer it would end before it has found much.
LEAST_STEPS = 100

# Share of a run's steps that tuning may take; a run shorter than `LEAST_STEPS / MOST_SHARE` is not tuned.
MOST_SHARE = 0.1


def why_not(tune: Literal["auto", "on", "off"], topology: Topology, *, on_cuda: bool, num_steps: float) -> str | None:
    """Return why the plan of a run of `num_steps` is not tuned; None where it is, empty where that goes without saying.

    >>> one, two = (Topology.from_ranks_per_node(rank=0, world_size=4, ranks_per_node=k) for k in (4, 2))
    >>> [why_not(tune, nodes, on_cuda=False, num_steps=10_000)
    ...  for tune, nodes in (("auto", one), ("on", one), ("auto", two), ("off", two))]
    ['', None, None, '']
    """
    if tune == "off" or topology.world_size == 1 or (on_cuda and (tune == "auto" or topology.num_nodes == 1)):
        return ""
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and another plan adds gradients in another order"
    if tune == "on":
        return None
    return None if topology.num_nodes > 1 and num_steps * MOST_SHARE >= LEAST_STEPS else ""


def tuning_of(
    engine: CommEngine, tune: Literal["auto", "on", "off"], trainer: pl.Trainer, *, on_plan: Callable[[CommPlan], None]
) -> TuningSession | None:
    """Make the tuning of an engine's plan in one fit, where that is worth it; arguments as in `TuningSession`.

    At the first batch: Lightning knows the number of steps only when the loaders are there.
    """
    num_steps = steps_to_come(trainer)
    reason = why_not(tune, engine.topology, on_cuda=engine.device.type == "cuda", num_steps=num_steps)
    if reason:
        rank_zero_info(f"comm: the plan is not tuned: {reason}")
    if reason is not None:
        return None
    # Tuning that was asked for may take its time; by itself it takes no more than a tenth of the run.
    most_steps = MOST_STEPS if tune == "on" else min(MOST_STEPS, int(num_steps * MOST_SHARE))
    return TuningSession(engine, most_steps=most_steps, report=rank_zero_info, on_plan=on_plan)


def steps_to_come(trainer: pl.Trainer) -> float:
    """Return the optimizer steps that a fit still makes, in its first batch; infinite where that is not known."""
    num_steps = trainer.estimated_stepping_batches
    return float("inf") if num_steps == -1 else float(num_steps) - trainer.global_step
