"""Table of options and features that cannot be combined, and checks that raise errors for such combinations.

A test compares the documentation page about options with the table.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_hybrid.comm import Topology
from lightning_hybrid.lightning_names import lightning_types
from lightning_hybrid.run_status import has_grad_scaler

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""Optimizers whose step treats each element separately, so that a rank can update a part of a tensor."""

_ELEMENTWISE_NAMES = ", ".join(optimizer_type.__name__ for optimizer_type in ELEMENTWISE)

PRECISIONS = ("16-true", "bf16-true", "32-true")
"""Precisions for which tests show that ranks with parts of a model train like one rank with the whole model."""

_MEAN = "set between_nodes=Mean()"

CURES = {
    # Options.
    "adasum": _MEAN,
    "local steps": _MEAN,
    "codec": "leave `between_nodes.dtype` out, or set it to float16",
    "error feedback": "leave `between_nodes.error_feedback` out",
    "shard update": "leave `shard_update` out",
    "world update": "set shard_update='node'",
    "node slices": "leave `node_slices` out",
    "algorithm": "leave `comm.algorithm` out",
    "planner": "leave `comm.plan` out",
    "extensions": "leave `extensions` out",
    "exact evaluation": "leave `exact_evaluation` out",
    "unused parameters": "leave `find_unused_parameters` out",
    "uneven batches": "leave `uneven_batches` out",
    "pipeline": "use strategy='hybrid_allreduce'",
    "Fabric": "use the Trainer with this strategy",
    # Features of the run.
    "unequal nodes": "launch the same number of ranks on every node",
    "precision": "use 16-true instead of 16-mixed, or bf16-true instead of bf16-mixed",
    "double precision": "set precision='32-true'",
    "gradient scaler": "use 16-true, whose loss scale is the same on all ranks, or bf16-mixed",
    "accumulation": "multiply `num_microbatches` and the batch size of the loader by this number instead",
    "manual optimization": "return the loss from `training_step`",
    "manual steps": "use 32-true or bf16-true",
    "SyncBatchNorm": "leave `sync_batchnorm` out",
    "ModelPruning": "prune before or after training",
    "StochasticWeightAveraging": "use `MasterWeightAveraging` or Lightning's `EMAWeightAveraging`",
    "BaseFinetuning": "set `requires_grad` before training, and unfreeze layers between two calls of `fit`",
    "GradientAccumulationScheduler": "set `num_microbatches`",
    "whole tensors": 'use LARS with direction="momentum", LAMB or an element-wise optimizer of torch '
    f"({_ELEMENTWISE_NAMES})",
    "norm of all": "set `gradient_clip_val`, which uses the norm over all stages",
    "line search": "use an optimizer that updates each tensor by itself, such as Adam",
    "two owners": "assign each parameter to a single optimizer",
    "several loaders": "return one training loader that contains the batches of the others",
    "dataloader_iter": "define `training_step(self, batch, batch_idx)`",
    "gather in a step": "call `all_gather` in a hook after the step",
    "gather with gradients": "compute the loss from the samples of one rank",
    "local fp16 sums": "average gradients in every backward, or use bf16-true",
    "global batch": "use a loss that compares only the samples of one rank or one micro-batch",
}
"""Features of options and runs, each with the change that removes it."""


class Exclusion(NamedTuple):
    """Pair of features that cannot be combined, and the reason why."""

    feature: str
    conflict: str
    reason: str


_RULES = "optimizers that use norms, factorization or a line search need full tensors, but each rank has only a shard"
_RULE_OF_SCALE = (
    "residuals must follow the loss scale and its skipped steps, "
    "but Lightning's gradient scaler does not expose them"
)
_SEVERAL = (
    "several optimizers may use the same all-reduced gradients and some may skip their step, but there is only one "
    "residual"
)
_PROVED = ", ".join(PRECISIONS)

EXCLUDED = (
    Exclusion(
        "algorithm",
        "adasum",
        "node leaders combine whole parameters, which requires the hierarchical algorithm",
    ),
    Exclusion(
        "planner", "adasum", "a planner compares all-reduce algorithms, but Adasum is not a sum"
    ),
    Exclusion(
        "shard update", "local steps", "averaging needs the full fp32 master weights on every rank"
    ),
    Exclusion(
        "unused parameters",
        "local steps",
        "DDP communicates the used parameters between all ranks in every step",
    ),
    Exclusion(
        "codec",
        "pipeline",
        "a codec numbers the blocks of the whole network, but a rank has only the blocks of its stages",
    ),
    Exclusion("planner", "pipeline", "a planner needs the gradients of the whole network"),
    Exclusion("adasum", "pipeline", "ranks average only the gradients of their own stages"),
    Exclusion("local steps", "pipeline", "the stages of a pipeline may be on several nodes"),
    Exclusion(
        "global batch",
        "pipeline",
        "a loss over all pairs of a step needs all embeddings, but a stage has only those of one micro-batch",
    ),
    Exclusion(
        "extensions",
        "pipeline",
        "extensions receive the engine and the DDP wrapper of the whole network",
    ),
    Exclusion(
        "exact evaluation",
        "pipeline",
        "pipeline stages communicate in every evaluation batch, and collectives between batches require padding",
    ),
    Exclusion(
        "local steps",
        "Fabric",
        "Fabric does not count optimizer steps, and the user's loop decides when to validate and to save",
    ),
    Exclusion(
        "error feedback", "Fabric", "Fabric does not know which gradients an optimizer has used"
    ),
    Exclusion(
        "local steps", "node slices", "local steps average weights that every rank has in full"
    ),
    # Features of the run.
    Exclusion(
        "adasum",
        "uneven batches",
        "node leaders combine the averages of nodes, in which ranks without samples would count",
    ),
    Exclusion("local steps", "uneven batches", "each node has the same weight in the average"),
    Exclusion(
        "error feedback",
        "uneven batches",
        "residuals are scaled for an average over all ranks, but fewer ranks contribute to the last steps of an epoch",
    ),
    Exclusion(
        "node slices",
        "uneven batches",
        "the ranks of a node process each other's batches, which must have the same size",
    ),
    Exclusion(
        "uneven batches",
        "pipeline",
        "gradients are averaged over the number of micro-batches, not over the number of samples",
    ),
    Exclusion(
        "SyncBatchNorm",
        "uneven batches",
        "batch statistics would include the samples of repeated batches",
    ),
    Exclusion(
        "global batch",
        "uneven batches",
        "the loss would compare samples with those of repeated batches",
    ),
    Exclusion(
        "several loaders",
        "uneven batches",
        "the loaders of a rank may have different lengths, so it is unclear when its epoch ends",
    ),
    Exclusion(
        "dataloader_iter",
        "uneven batches",
        "ranks agree on a batch before the step, but this step fetches its batches itself",
    ),
    Exclusion(
        "gather in a step",
        "uneven batches",
        "a rank whose loader has ended would gather the values of a repeated batch",
    ),
    Exclusion(
        "gather with gradients",
        "uneven batches",
        "a rank whose loader has ended would gather the values of a repeated batch",
    ),
    Exclusion(
        "local fp16 sums",
        "uneven batches",
        "the gradients of each batch need their own divisor, but gradients that are summed on a rank can have only "
        "one",
    ),
    Exclusion("unequal nodes", "local steps", "each node has the same weight in the average"),
    Exclusion("unequal nodes", "shard update", "every node must have the same shards of a tensor"),
    Exclusion("unequal nodes", "node slices", "every node must have the same slices"),
    Exclusion("precision", "shard update", f"the sharded update supports only {_PROVED}"),
    Exclusion("double precision", "shard update", f"the sharded update supports only {_PROVED}"),
    Exclusion("precision", "pipeline", f"pipelines support only {_PROVED} and 64-true"),
    Exclusion(
        "gradient scaler", "local steps", "Lightning's loss scale would diverge between nodes"
    ),
    Exclusion("gradient scaler", "error feedback", _RULE_OF_SCALE),
    Exclusion("manual steps", "error feedback", _SEVERAL),
    Exclusion(
        "manual optimization",
        "pipeline",
        "the schedule runs forward and backward of all micro-batches together",
    ),
    Exclusion("accumulation", "pipeline", "micro-batches already accumulate gradients"),
    Exclusion(
        "norm of all", "pipeline", "an optimizer has only the gradients of its rank's stages"
    ),
    Exclusion(
        "line search",
        "pipeline",
        "a line search needs inner products of the gradients of the whole network, but a rank has only those of its "
        "stages",
    ),
    Exclusion(
        "SyncBatchNorm",
        "pipeline",
        "statistics are computed per micro-batch, as with gradient accumulation",
    ),
    Exclusion(
        "SyncBatchNorm",
        "local steps",
        "SyncBatchNorm waits for all ranks in every forward pass, and statistics are averaged together with the "
        "weights anyway",
    ),
    Exclusion("ModelPruning", "local steps", "each node would prune according to its own weights"),
    Exclusion("ModelPruning", "pipeline", "pruning compares the weights of the whole network"),
    Exclusion(
        "StochasticWeightAveraging",
        "pipeline",
        "weight averaging copies the weights of the whole network",
    ),
    Exclusion(
        "BaseFinetuning",
        "pipeline",
        "fine-tuning adds layers of the whole network to the optimizer",
    ),
    Exclusion(
        "GradientAccumulationScheduler", "pipeline", "micro-batches already accumulate gradients"
    ),
    Exclusion("whole tensors", "shard update", _RULES),
    Exclusion("whole tensors", "node slices", _RULES),
    Exclusion(
        "two owners", "shard update", "a shard of a parameter can belong to only one optimizer"
    ),
)


def refuse_excluded(
    features: Mapping[str, str],
    *,
    rows: Iterable[Exclusion] = EXCLUDED,
    cures: Mapping[str, str] = CURES,
    error: Callable[[str], BaseException] = ValueError,
) -> None:
    """Raise if the options and the run contain two features that cannot be combined.

    Args:
        features: The text ``name` (=value)` of each feature, by the names of `CURES`.
        rows: The pairs that cannot be combined.
        cures: For each feature, the change that removes it.
        error: Function that creates the error from its message.

    Raises:
        ValueError: Two features cannot be combined. If `error` is given, the error that it creates is raised instead.
            The message names both features, the reason and the cures.

    >>> refuse_excluded({"planner": "`comm.plan` (=a Cluster)", "adasum": "`between_nodes` (=Adasum())"})
    Traceback (most recent call last):
    ValueError: `comm.plan` (=a Cluster) and `between_nodes` (=Adasum()) cannot be combined: a planner compares \
all-reduce algorithms, but Adasum is not a sum. Leave `comm.plan` out, or set between_nodes=Mean().
    """
    for feature, conflict, reason in rows:
        if feature in features and conflict in features:
            first_cure = cures[feature]
            cure = f"{first_cure[0].upper()}{first_cure[1:]}, or {cures[conflict]}"
            raise error(
                f"{features[feature]} and {features[conflict]} cannot be combined: {reason}. {cure}."
            )


def in_nodes(topology: Topology) -> dict[str, str]:
    """Return the properties of a topology that some options do not support, such as unequal nodes."""
    if topology.ranks_per_node:
        return {}
    sizes = ", ".join(str(len(node)) for node in topology.nodes)
    return {"unequal nodes": f"Nodes with different numbers of ranks (={sizes})"}


def in_precision(plugin: Any) -> dict[str, str]:
    """Return the properties of a precision plugin that some options do not support, such as `64-true`."""
    text = f"`precision` (={plugin.precision!r})"
    features: dict[str, str] = {}
    if plugin.precision == "64-true":
        features["double precision"] = text
    elif plugin.precision not in PRECISIONS:
        features["precision"] = text
    if has_grad_scaler(plugin):
        features["gradient scaler"] = text
    return features


def in_module(module: nn.Module) -> dict[str, str]:
    """Return the layers of a module that some options do not support, such as `SyncBatchNorm`."""
    features: dict[str, str] = {}
    for name, layer in module.named_modules():
        text = f"`{name or 'the module'}` (={type(layer).__name__})"
        if isinstance(layer, nn.SyncBatchNorm):
            features["SyncBatchNorm"] = text
        if getattr(layer, "spans_all_ranks", False):
            features["global batch"] = text
    return features


_EXCLUDING_CALLBACKS = (
    "ModelPruning",
    "StochasticWeightAveraging",
    "BaseFinetuning",
    "GradientAccumulationScheduler",
)


def in_callbacks(callbacks: Iterable[Any]) -> dict[str, str]:
    """Return the callbacks that some options do not support, such as `ModelPruning`."""
    features: dict[str, str] = {}
    for callback in callbacks:
        for name in _EXCLUDING_CALLBACKS:
            if isinstance(callback, lightning_types(f"pytorch.callbacks.{name}")):
                features[name] = f"`callbacks` (={type(callback).__name__})"
    return features


def in_optimizers(
    optimizers: Iterable[Optimizer], *, of: Container[int] | None = None
) -> dict[str, str]:
    """Return the properties of optimizers that some options do not support, such as shared parameters.

    Args:
        optimizers: Optimizers to inspect.
        of: The `id`s of parameters. Only parameter groups with one of these parameters count. None: all groups count.
    """
    features: dict[str, str] = {}
    owners: dict[int, int] = {}
    for index, optimizer in enumerate(optimizers):
        groups = _groups_with(optimizer, of)
        # The exact type is compared, because a subclass may compute norms.
        is_elementwise = type(optimizer) in ELEMENTWISE or hasattr(optimizer, "parts")
        if groups and not is_elementwise:
            features.setdefault("whole tensors", f"`optimizer` (={type(optimizer).__name__})")
        for group in groups:
            if group.get("direction") == "orthogonal":
                features["whole tensors"] = '`direction` (="orthogonal")'
            for parameter in group["params"]:
                first_owner = owners.setdefault(id(parameter), index)
                if first_owner != index:
                    shape = tuple(parameter.shape)
                    features["two owners"] = (
                        f"A parameter (of shape {shape}) in the optimizers {first_owner} and {index}"
                    )
    return features


def _groups_with(optimizer: Optimizer, parameters: Container[int] | None) -> list[dict[str, Any]]:
    if parameters is None:
        return list(optimizer.param_groups)
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        if any(id(parameter) in parameters for parameter in group["params"]):
            groups.append(group)
    return groups


COUPLED = (
    "BarlowTwinsLoss",
    "ClipLoss",
    "DCLLoss",
    "DCLWLoss",
    "NTXentLoss",
    "SigLipLoss",
    "SupConLoss",
    "VICRegLoss",
)
"""Losses of lightly, open_clip and pytorch-metric-learning that compare the samples of a batch.

Losses of `lightning_hybrid.contrastive` have the attribute `couples_the_batch`.
"""


def warn_of_coupled_batches(module: nn.Module, accumulate_grad_batches: int) -> None:
    """Warn if gradients are accumulated with a loss that compares the samples of a batch with each other."""
    if accumulate_grad_batches <= 1:
        return
    coupled_types = _coupled_types(module)
    if coupled_types:
        rank_zero_warn(
            f"`accumulate_grad_batches` (={accumulate_grad_batches}) accumulates gradients of "
            f"`{coupled_types[0].__name__}`, which compares the samples of one batch, not of the "
            f"{accumulate_grad_batches} batches of a step. To compare all samples of a step, use "
            "`lightning_hybrid.contrastive.GlobalBatch` with a larger batch and without accumulation."
        )


def _coupled_types(layer: nn.Module) -> list[type]:
    """Return the types of all loss layers that compare the samples of a batch with each other."""
    couples = getattr(layer, "couples_the_batch", None)
    if couples is False:  # a `GlobalBatch`, with any loss
        return []
    coupled_types: list[type] = []
    if couples or type(layer).__name__ in COUPLED:
        coupled_types.append(type(layer))
    for child in layer.children():
        coupled_types += _coupled_types(child)
    return coupled_types
