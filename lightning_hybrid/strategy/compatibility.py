"""What excludes what: one table, which makes the errors; the page of options and one test are compared with it."""

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

# Their step treats each element by itself, so a part of a tensor is as good as the whole.
ELEMENTWISE: tuple[type[Optimizer], ...] = tuple(
    getattr(torch.optim, name)
    for name in "SGD Adam AdamW NAdam RAdam RMSprop Adagrad Adadelta Adamax ASGD Rprop".split()
)

PRECISIONS = ("16-true", "bf16-true", "32-true")
"""Those of which parts of a model are proved to train what the whole trains."""

_MEAN = "write between_nodes=Mean()"

CURES = {
    # options
    "adasum": _MEAN,
    "local steps": _MEAN,
    "codec": "leave `between_nodes.dtype` out, or set it to float16",
    "error feedback": "leave `between_nodes.error_feedback` out",
    "shard update": "leave `shard_update` out",
    "world update": "write shard_update='node'",
    "node slices": "leave `node_slices` out",
    "algorithm": "leave `comm.algorithm` out",
    "planner": "leave `comm.plan` out",
    "extensions": "leave `extensions` out",
    "unused parameters": "leave `find_unused_parameters` out",
    "pipeline": "take strategy='hybrid_allreduce'",
    "Fabric": "take the Trainer's strategy",
    # the run
    "unequal nodes": "launch equal nodes",
    "precision": "in place of 16-mixed take 16-true, in place of bf16-mixed bf16-true",
    "double precision": "take 32-true",
    "gradient scaler": "take 16-true, whose scales ranks agree on, or bf16-mixed",
    "accumulation": "set `num_microbatches` to that many times what it is, and the batch of the loader too",
    "manual optimization": "return the loss from `training_step`",
    "manual steps": "take 32-true or bf16-true",
    "SyncBatchNorm": "leave `sync_batchnorm` out",
    "ModelPruning": "prune before or after training",
    "StochasticWeightAveraging": "take `MasterWeightAveraging` or Lightning's `EMAWeightAveraging`",
    "BaseFinetuning": "set `requires_grad`, and thaw between fits",
    "GradientAccumulationScheduler": "set `num_microbatches`",
    "whole tensors": 'take LARS with direction="momentum", LAMB or one of torch\'s that treat elements one by one '
    f"({', '.join(one.__name__ for one in ELEMENTWISE)})",
    "norm of all": "set `gradient_clip_val`, whose norm is over all stages",
    "two owners": "give each parameter to one optimizer",
    "global batch": "take a loss over fewer pairs (one rank's, or one micro-batch's)",
}
"""What options and runs may have, and how to do without it."""


class Exclusion(NamedTuple):
    """Two things that a run cannot have together."""

    one: str
    other: str
    why: str


_RULES = (
    "rules with norms, factors or line searches need whole tensors, and each rank would have a part"
)
_RULE_OF_SCALE = (
    "residuals follow the loss scale and its skipped steps, "
    "which Lightning's gradient scaler keeps to itself"
)
_SEVERAL = (
    "a sum may be used by several optimizers, of which some skip their step, and has one residual"
)
_PROVED = ", ".join(PRECISIONS)

EXCLUDED = tuple(
    Exclusion(*row)
    for row in (
        (
            "algorithm",
            "adasum",
            "the leaders of the nodes combine whole parameters, which is hierarchical",
        ),
        ("planner", "adasum", "a planner compares ways to sum, and this is no sum"),
        ("shard update", "local steps", "an average needs whole masters"),
        (
            "unused parameters",
            "local steps",
            "DDP asks all ranks in every step which parameters each has used",
        ),
        (
            "codec",
            "pipeline",
            "a codec numbers the blocks of a whole network, and a rank has that of its stages",
        ),
        ("planner", "pipeline", "a planner is asked about the gradients of a whole network"),
        ("adasum", "pipeline", "data ranks average the gradients of their stages"),
        ("local steps", "pipeline", "its stages may be on several nodes"),
        (
            "global batch",
            "pipeline",
            "a loss over all pairs of a step needs all embeddings, and a stage has a micro-batch's",
        ),
        ("extensions", "pipeline", "they are given the engine and the wrapper of a whole network"),
        (
            "local steps",
            "Fabric",
            "it counts no optimizer steps, and validates and saves where the user says",
        ),
        ("error feedback", "Fabric", "it is not known which sums an optimizer has used"),
        ("local steps", "node slices", "it averages weights that every rank has whole"),
        # with what the run has
        ("unequal nodes", "local steps", "each node counts as much in the average"),
        ("unequal nodes", "shard update", "the parts of a tensor are the same on every node"),
        ("unequal nodes", "node slices", "a slice is the same on every node"),
        ("precision", "shard update", f"the update is shared with {_PROVED}"),
        ("double precision", "shard update", f"the update is shared with {_PROVED}"),
        ("precision", "pipeline", f"{_PROVED} and 64-true alone are proved against accumulation"),
        ("gradient scaler", "local steps", "Lightning's loss scale would part between nodes"),
        ("gradient scaler", "error feedback", _RULE_OF_SCALE),
        ("manual steps", "error feedback", _SEVERAL),
        (
            "manual optimization",
            "pipeline",
            "the schedule runs forward and backward of all micro-batches together",
        ),
        ("accumulation", "pipeline", "micro-batches are its accumulation, bit for bit"),
        ("norm of all", "pipeline", "an optimizer has the gradients of its rank's stages"),
        (
            "SyncBatchNorm",
            "pipeline",
            "each micro-batch has its statistics, as batches of an accumulation have",
        ),
        (
            "SyncBatchNorm",
            "local steps",
            "it waits for all ranks in every forward; statistics are averaged with weights",
        ),
        ("ModelPruning", "local steps", "each node would prune by its own weights"),
        ("ModelPruning", "pipeline", "it ranks the weights of a whole network"),
        ("StochasticWeightAveraging", "pipeline", "it copies the weights of a whole network"),
        ("BaseFinetuning", "pipeline", "it hands layers of a whole network to the optimizer"),
        ("GradientAccumulationScheduler", "pipeline", "micro-batches are its accumulation"),
        ("whole tensors", "shard update", _RULES),
        ("whole tensors", "node slices", _RULES),
        ("two owners", "shard update", "a part of it can stand in one of them only"),
    )
)


def refuse_excluded(
    found: Mapping[str, str],
    *,
    rows: Iterable[Exclusion] = EXCLUDED,
    cures: Mapping[str, str] = CURES,
    error: Callable[[str], BaseException] = ValueError,
) -> None:
    """Check that nothing found in options and run excludes another; `found`: `name` (=value) by the names of `CURES`.

    Raises:
        ValueError: or `error`: with both, the reason and how to do without either.

    >>> refuse_excluded({"planner": "`comm.plan` (=a Cluster)", "adasum": "`between_nodes` (=Adasum())"})
    Traceback (most recent call last):
    ValueError: `comm.plan` (=a Cluster) and `between_nodes` (=Adasum()) exclude each other: a planner compares ways \
to sum, and this is no sum. Leave `comm.plan` out, or write between_nodes=Mean().
    """
    for one, other, why in rows:
        if one in found and other in found:
            cure = f"{cures[one][0].upper()}{cures[one][1:]}, or {cures[other]}"
            raise error(f"{found[one]} and {found[other]} exclude each other: {why}. {cure}.")


def in_nodes(topology: Topology) -> dict[str, str]:
    """Return what of the nodes excludes options."""
    sizes = ", ".join(str(len(node)) for node in topology.nodes)
    return (
        {}
        if topology.ranks_per_node
        else {"unequal nodes": f"Nodes of different size (={sizes} ranks)"}
    )


def in_precision(plugin: Any) -> dict[str, str]:
    """Return what of the precision excludes options."""
    text = f"`precision` (={plugin.precision!r})"
    kind = "double precision" if plugin.precision == "64-true" else "precision"
    found = {} if plugin.precision in PRECISIONS else {kind: text}
    return found | ({"gradient scaler": text} if has_grad_scaler(plugin) else {})


def in_module(module: nn.Module) -> dict[str, str]:
    """Return what of the layers excludes options."""
    found = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            found["SyncBatchNorm"] = f"`{name or 'the module'}` (={type(layer).__name__})"
        if getattr(layer, "spans_all_ranks", False):
            found["global batch"] = f"`{name or 'the module'}` (={type(layer).__name__})"
    return found


def in_callbacks(callbacks: Iterable[Any]) -> dict[str, str]:
    """Return what callbacks do that excludes options."""
    found = {}
    for callback in callbacks:
        text = f"`callbacks` (={type(callback).__name__})"
        for name in (
            "ModelPruning",
            "StochasticWeightAveraging",
            "BaseFinetuning",
            "GradientAccumulationScheduler",
        ):
            if isinstance(callback, lightning_types(f"pytorch.callbacks.{name}")):
                found[name] = text
    return found


def in_optimizers(
    optimizers: Iterable[Optimizer], *, of: Container[int] | None = None
) -> dict[str, str]:
    """Return what of optimizers excludes options; `of`: parameters by `id`, None for all."""
    found, owners = dict[str, str](), dict[int, int]()
    for place, optimizer in enumerate(optimizers):
        groups = [
            group
            for group in optimizer.param_groups
            if of is None or any(id(p) in of for p in group["params"])
        ]
        # By the exact type: a subclass may look at norms.
        if groups and type(optimizer) not in ELEMENTWISE and not hasattr(optimizer, "parts"):
            found.setdefault("whole tensors", f"`optimizer` (={type(optimizer).__name__})")
        if any(group.get("direction") == "orthogonal" for group in groups):
            found["whole tensors"] = '`direction` (="orthogonal")'
        for parameter in (one for group in groups for one in group["params"]):
            if (first := owners.setdefault(id(parameter), place)) != place:
                shape = tuple(parameter.shape)
                found["two owners"] = (
                    f"A parameter (of shape {shape}) in the optimizers {first} and {place}"
                )
    return found


# Of lightly, open_clip and pytorch-metric-learning; those of `contrastive` say it themselves.
COUPLED = (
    "BarlowTwinsLoss ClipLoss DCLLoss DCLWLoss NTXentLoss SigLipLoss SupConLoss VICRegLoss".split()
)


def warn_of_coupled_batches(module: nn.Module, accumulate_grad_batches: int) -> None:
    """Warn where gradients of batches are added up whose loss compares the samples of a batch with one another."""

    def kinds_in(one: nn.Module) -> list[type]:
        couples = getattr(one, "couples_the_batch", None)
        if couples is False:  # a `GlobalBatch`, whatever loss it has
            return []
        own = [type(one)] if couples or type(one).__name__ in COUPLED else []
        return own + [kind for child in one.children() for kind in kinds_in(child)]

    if accumulate_grad_batches > 1 and (kinds := kinds_in(module)):
        rank_zero_warn(
            f"`accumulate_grad_batches` (={accumulate_grad_batches}) adds up gradients of `{kinds[0].__name__}` of one "
            f"batch each: a sample is compared with those of its own batch, not with the {accumulate_grad_batches} "
            "times as many of the step. For these take `lightning_hybrid.contrastive.GlobalBatch`, a larger batch and "
            "no accumulation."
        )
