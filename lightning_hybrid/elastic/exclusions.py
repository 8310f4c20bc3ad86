"""Features that cannot be combined with elastic training, with a reason and a remedy for each."""

from __future__ import annotations

import os
from typing import Any

from lightning_hybrid.strategy.compatibility import CURES, Exclusion, in_callbacks, in_module

EXCLUDED_BY_ELASTIC = (
    Exclusion("adasum", "elastic", "it needs an even number of hosts, and one may be lost"),
    Exclusion(
        "local steps",
        "elastic",
        "hosts that train by themselves have no common weights to go back to",
    ),
    Exclusion(
        "unused parameters", "elastic", "DDP asks its own ranks alone, which are those of one host"
    ),
    Exclusion("node slices", "elastic", "slices are exchanged by groups that end with a lost host"),
    Exclusion(
        "world update",
        "elastic",
        "a lost host takes its parts of masters and optimizer state with it",
    ),
    Exclusion("extensions", "elastic", "they are given groups and ranks that stay"),
    Exclusion("ranks per node", "elastic", "a node is a host, which has the ranks of its launch"),
    Exclusion(
        "inexact resume", "elastic", "a host that joins takes its place in the data from the others"
    ),
    Exclusion(
        "several nodes",
        "elastic",
        "each host is a launch of its own, and a launch over several is lost as a whole",
    ),
    Exclusion(
        "reloaded loaders",
        "elastic",
        "a host that joins in mid-epoch could not load what the others have",
    ),
    Exclusion("manual optimization", "elastic", "the closure of a step is what is run again"),
    Exclusion(
        "accumulation",
        "elastic",
        "a step has max_hosts x devices batches, whatever hosts there are",
    ),
    Exclusion(
        "global batch",
        "elastic",
        "it compares the pairs of all ranks that were launched, and these change",
    ),
    Exclusion(
        "uneven batches",
        "elastic",
        "the batches of a step are dealt to the hosts that are there, and all have as many",
    ),
    Exclusion("SyncBatchNorm", "elastic", "it waits for ranks in the middle of a forward"),
    Exclusion("GradientAccumulationScheduler", "elastic", "a step has max_hosts x devices batches"),
)

CURES_OF_ELASTIC = {
    **CURES,
    "elastic": "take strategy='hybrid_allreduce'",
    "ranks per node": "leave `ranks_per_node` out",
    "several nodes": "launch each host by itself, with Trainer(num_nodes=1) and torchrun --nnodes=1",
    "reloaded loaders": "leave `reload_dataloaders_every_n_epochs` out, and let the data set change in a hook",
    "inexact resume": "leave `exact_resume` out",
    "accumulation": "leave `accumulate_grad_batches` out, and give the loader a larger batch",
    "GradientAccumulationScheduler": "leave the callback out, and give the loader a larger batch",
}


def features_of_run(module: Any, *, has_exact_resume: bool) -> dict[str, str]:
    """Return the features of a run that elastic training may not support.

    Keys are names as in `CURES_OF_ELASTIC`. Values are texts for error messages.
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
