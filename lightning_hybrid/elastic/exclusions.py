"""Features that elastic training does not support, with a reason and a remedy for each."""

from __future__ import annotations

import os
from typing import Any

from lightning_hybrid.strategy.compatibility import CURES, Exclusion, in_callbacks, in_module

EXCLUDED_BY_ELASTIC = (
    Exclusion(
        "adasum",
        "elastic",
        "Adasum needs a power of two as the number of hosts, but a host may fail",
    ),
    Exclusion(
        "local steps",
        "elastic",
        "hosts that train independently have no common weights to restart from",
    ),
    Exclusion(
        "unused parameters",
        "elastic",
        "DDP checks the used parameters only on the ranks of one host",
    ),
    Exclusion(
        "node slices",
        "elastic",
        "slices are exchanged in process groups that end when a host fails",
    ),
    Exclusion(
        "world update",
        "elastic",
        "the fp32 master weights and optimizer state of a failed host would be lost",
    ),
    Exclusion(
        "extensions", "elastic", "extensions rely on process groups and ranks that do not change"
    ),
    Exclusion(
        "ranks per node",
        "elastic",
        "each host is one node, which contains all ranks that are launched on the host",
    ),
    Exclusion(
        "inexact resume",
        "elastic",
        "a joining host takes its position in the data from the other hosts",
    ),
    Exclusion(
        "several nodes",
        "elastic",
        "each host is a separate launch, and a launch over several hosts would fail as a whole",
    ),
    Exclusion(
        "reloaded loaders",
        "elastic",
        "a host that joins in the middle of an epoch could not load the data of the other hosts",
    ),
    Exclusion(
        "manual optimization", "elastic", "the closure of a step is repeated when the hosts change"
    ),
    Exclusion(
        "accumulation",
        "elastic",
        "a step always has max_hosts x devices batches",
    ),
    Exclusion(
        "global batch",
        "elastic",
        "the loss compares the pairs of all ranks, but the set of ranks changes",
    ),
    Exclusion(
        "uneven batches",
        "elastic",
        "the batches of a step are divided among the current hosts, which need equal numbers of batches",
    ),
    Exclusion(
        "SyncBatchNorm",
        "elastic",
        "SyncBatchNorm waits for other ranks in the middle of the forward pass",
    ),
    Exclusion("GradientAccumulationScheduler", "elastic", "a step has max_hosts x devices batches"),
)

CURES_OF_ELASTIC = {
    **CURES,
    "elastic": "use strategy='hybrid_allreduce'",
    "ranks per node": "leave `ranks_per_node` out",
    "several nodes": "launch each host separately, with Trainer(num_nodes=1) and torchrun --nnodes=1",
    "reloaded loaders": "leave `reload_dataloaders_every_n_epochs` out, and change the data set in a hook",
    "inexact resume": "leave `exact_resume` out",
    "accumulation": "leave `accumulate_grad_batches` out, and increase the batch size of the loader",
    "GradientAccumulationScheduler": "remove the callback, and increase the batch size of the loader",
}


def features_of_run(module: Any, *, has_exact_resume: bool) -> dict[str, str]:
    """Find the features of a run that elastic training may not support.

    Keys are names in `CURES_OF_ELASTIC`. Values are texts for error messages.
    """
    trainer = module.trainer
    features = in_module(module) | in_callbacks(trainer.callbacks)
    if any(getattr(layer, "node_slices", ()) for layer in module.modules()):
        features["node slices"] = "`node_slices`"
    if not module.automatic_optimization:
        features["manual optimization"] = "`automatic_optimization` (=False)"
    num_nodes = max(trainer.num_nodes, int(os.environ.get("GROUP_WORLD_SIZE", "1")))
    if num_nodes > 1:
        features["several nodes"] = f"`num_nodes` (={num_nodes})"
    num_epochs = trainer.reload_dataloaders_every_n_epochs
    if num_epochs > 0:
        features["reloaded loaders"] = f"`reload_dataloaders_every_n_epochs` (={num_epochs})"
    if not has_exact_resume:
        features["inexact resume"] = "`exact_resume` (=False)"
    if trainer.accumulate_grad_batches > 1:
        features["accumulation"] = f"`accumulate_grad_batches` (={trainer.accumulate_grad_batches})"
    return features
