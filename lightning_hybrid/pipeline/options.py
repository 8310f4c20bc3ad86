"""Validation of a pipeline's options, and discovery of the network's blocks."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.utils.data import BatchSampler

from lightning_hybrid.checks import require_whole
from lightning_hybrid.comm.health.diagnosis import differing
from lightning_hybrid.lightning_names import misconfiguration
from lightning_hybrid.pipeline.cuts import BlockProfile, Cuts, balanced_cuts
from lightning_hybrid.strategy.compatibility import in_callbacks, in_precision, refuse_excluded

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2}

_ASYNCHRONOUS = (
    "PipeDream updates weights between the forward and the backward of a batch and keeps one copy of the weights per "
    "batch in flight (weight stashing), so it does not compute the gradients of synchronous training "
    '(arXiv:1806.03377). schedule="1f1b" has the same order and memory, with a flush per step. For details, see '
    'lightning_hybrid/pipeline/README.md, "Limitations".'
)


def check_options(
    *, num_stages: int, num_microbatches: int, schedule: str, cuts: Cuts, of: str = "net"
) -> None:
    """Raise `ValueError` if a pipeline option that does not depend on the module is invalid.

    Raises:
        ValueError: An option is invalid. The message names it.

    >>> check_options(num_stages=4, num_microbatches=2, schedule="1f1b", cuts=None)
    Traceback (most recent call last):
    ValueError: `num_microbatches` (=2) must be at least `num_stages` (=4), because some stages would always be idle \
otherwise. Set num_microbatches=16, with which ranks are idle for 16 % of a step.
    """
    _check_schedule(schedule)
    why = (
        "a pipeline with one stage is plain data parallelism, which strategy='hybrid_allreduce' provides. Set "
        "num_stages=2"
    )
    require_whole("num_stages", num_stages, why, least=2)
    _check_num_microbatches(num_microbatches, num_stages, schedule)
    if not isinstance(of, str):
        raise ValueError(
            f"`of` (={of!r}) must be the name of the attribute of the module that holds the network. Set of='net', "
            "for example."
        )
    if isinstance(cuts, BlockProfile):
        _check_profile(cuts, schedule)
    elif cuts is not None:
        _check_cuts(cuts, num_stages, schedule)


def _check_schedule(schedule: str) -> None:
    if schedule in get_args(Schedule):
        return
    name = str(schedule).lower()
    if "dream" in name:
        advice = _ASYNCHRONOUS
    elif re.search("zb|zero|dualpipe", name):
        advice = 'Use schedule="zero_bubble".'
    else:
        advice = 'Use schedule="1f1b", which needs the least memory.'
    raise ValueError(
        f"`schedule` (={schedule!r}) must be one of {', '.join(get_args(Schedule))}. {advice}"
    )


def _check_num_microbatches(num_microbatches: int, num_stages: int, schedule: str) -> None:
    require_whole(
        "num_microbatches",
        num_microbatches,
        "each batch is split into this number of micro-batches. Set num_microbatches=8",
    )
    if num_microbatches < num_stages:
        advised = 4 * num_stages
        waiting = (num_stages - 1) / (advised + num_stages - 1)
        raise ValueError(
            f"`num_microbatches` (={num_microbatches}) must be at least `num_stages` (={num_stages}), because some "
            f"stages would always be idle otherwise. Set num_microbatches={advised}, with which ranks are idle for "
            f"{100 * waiting:.0f} % of a step."
        )
    num_rounds = max(1, num_microbatches // num_stages)
    if STAGES_PER_RANK[schedule] > 1 and num_microbatches % num_rounds:
        raise ValueError(
            f"`num_microbatches` (={num_microbatches}) must be a multiple of the number of rounds (num_microbatches "
            f"// num_stages = {num_rounds}) in an interleaved schedule, because all rounds have the same number of "
            f"micro-batches. Set num_microbatches={num_stages * num_rounds}."
        )


def _check_profile(profile: BlockProfile, schedule: str) -> None:
    if STAGES_PER_RANK[schedule] > 1 and profile.most_bytes != math.inf:
        raise ValueError(
            f"`cuts.most_bytes` (={profile.most_bytes:g}) cannot be used with schedule={schedule!r}, because it "
            "limits one stage, but each rank has two stages in this schedule. Set schedule='1f1b', or leave "
            "`cuts.most_bytes` out."
        )


def _check_cuts(cuts: Sequence[int], num_stages: int, schedule: str) -> None:
    total = num_stages * STAGES_PER_RANK[schedule]
    are_places = isinstance(cuts, Sequence) and all(
        isinstance(cut, int) and cut >= 1 for cut in cuts
    )
    is_ascending = are_places and list(cuts) == sorted(set(cuts))
    if not is_ascending or len(cuts) != total - 1:
        raise ValueError(
            f"`cuts` (={cuts!r}) must contain the index of the first block of each stage except the first, in "
            f"ascending order ({total - 1} in all, because {num_stages} ranks have {total} stages). Leave `cuts` out "
            "to balance the stages."
        )


def check_ranks(
    *, num_stages: int, world_size: int, schedule: str = "1f1b", checkpoints: bool = False
) -> None:
    """Raise `ValueError` if the ranks cannot be divided into pipelines, or if they cannot run the schedule.

    Args:
        num_stages: Number of ranks of a pipeline.
        world_size: Number of all ranks.
        schedule: Name of the schedule.
        checkpoints: Whether activations are checkpointed.

    Raises:
        ValueError: The number of ranks is not a multiple of `num_stages`, or `"zero_bubble"` is
            used with several pipelines or with activation checkpointing.
    """
    if schedule == "zero_bubble" and (world_size > num_stages or checkpoints):
        raise ValueError(
            f"`schedule` (={schedule!r}) cannot be used with several pipelines (here, each has {num_stages} of "
            f"{world_size} ranks) or with `checkpoint_activations`, because torch adds weight gradients to `.grad` "
            "directly, where DistributedDataParallel does not see them. Set schedule='interleaved'."
        )
    if world_size % num_stages:
        raise ValueError(
            f"`num_stages` (={num_stages}) must divide the number of ranks (={world_size}), because each pipeline "
            f"needs one rank per stage, but {world_size % num_stages} ranks would be left over. Launch a multiple of "
            f"{num_stages} ranks, or change `num_stages`."
        )


def refuse_in_pipeline(
    trainer: Any, module: Any, precision: Any, *, is_setup: bool = False
) -> None:
    """Raise an error if the trainer, module, precision or an optimizer uses an option that pipelines do not support.

    Args:
        trainer: The trainer.
        module: The LightningModule.
        precision: The precision plugin.
        is_setup: Whether to check callbacks and loss layers too.

    Raises:
        MisconfigurationException: An option is not supported. The message names it.
    """
    features = {"pipeline": "a pipeline"} | in_precision(precision)
    if is_setup:
        features |= in_callbacks(trainer.callbacks)

    num_batches = trainer.accumulate_grad_batches
    if num_batches != 1:
        features["accumulation"] = f"`accumulate_grad_batches` (={num_batches})"
    if not module.automatic_optimization:
        features["manual optimization"] = "`automatic_optimization` (=False)"

    max_norms = set()
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            features["line search"] = f"`optimizer` (={type(optimizer).__name__})"
        for group in optimizer.param_groups:
            if group.get("max_grad_norm") is not None:
                max_norms.add(group["max_grad_norm"])
    if max_norms:
        features["norm of all"] = f"`max_grad_norm` (={min(max_norms)})"

    if trainer.strategy._layer_sync is not None:
        features["SyncBatchNorm"] = "`sync_batchnorm` (=True)"
    if is_setup:
        coupled = [layer for layer in module.modules() if hasattr(layer, "couples_the_batch")]
        if coupled:
            features["global batch"] = f"`{type(coupled[0]).__name__}`"
    refuse_excluded(features, error=misconfiguration)


def warn_of_last_batch(trainer: Any, num_microbatches: int) -> None:
    """Warn if the last batch of an epoch cannot be split into micro-batches.

    The batch itself raises an error, but only at the end of the first epoch, whose steps are lost then. This is not an
    error, because a `collate_fn` may change the number of rows.
    """
    if 0 <= trainer.max_steps < trainer.num_training_batches:
        return  # The run ends before the last batch of the first epoch.
    for loader in trainer.fit_loop._combined_loader.flattened:
        num_last = _num_last_samples(loader, trainer.num_training_batches)
        if num_last % num_microbatches:
            rank_zero_warn(
                f"The last batch of an epoch has {num_last} samples, which is not a multiple of `num_microbatches` "
                f"(={num_microbatches}), so training will stop there with an error. Set drop_last=True in the loader."
            )


def _num_last_samples(loader: Any, num_batches: float) -> int:
    """Return the number of samples in an incomplete last batch, or 0 if there is none or its size is unknown."""
    # Exact resume replaces the batch sampler of its loader.
    resume = getattr(loader, "exact_resume", None)
    batch_sampler = getattr(getattr(resume, "user_loader", loader), "batch_sampler", None)
    if type(batch_sampler) is not BatchSampler or batch_sampler.drop_last:
        return 0
    sampler: Any = batch_sampler.sampler
    try:
        num_samples = len(sampler)
    except (TypeError, NotImplementedError):  # a sampler may have no length
        return 0
    if len(batch_sampler) > num_batches:  # `limit_train_batches` leaves the last batch out
        return 0
    return num_samples % batch_sampler.batch_size


def compare_stages(blocks: Sequence[nn.Module], **settings: Any) -> None:
    """Raise `ValueError` if the network or the pipeline settings differ between ranks.

    Collective: every rank of WORLD must call it, in the same order.

    Raises:
        ValueError: Raised on every rank. The message names the setting that differs.
    """
    shapes = []
    for block in blocks:
        shapes.append(
            [(name, tuple(p.shape), str(p.dtype)) for name, p in block.named_parameters()]
        )
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:12]
    settings["blocks"] = f"{len(blocks)} of {digest}"

    settings_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(settings_by_rank, settings)
    difference = differing(settings_by_rank)
    if difference:
        raise ValueError(
            f"The ranks have different networks or pipeline options: {difference}. Their stages would send messages "
            "that other stages do not expect. Use the same `strategy` options and the same network on every rank."
        )


def blocks_of(module: nn.Module, of: str) -> list[nn.Module]:
    """Return the blocks of the network in the order in which they run.

    Each block takes the output of the previous block.

    Args:
        module: The LightningModule.
        of: Name of the network in the module.

    Raises:
        ValueError: There is no such network, it has no blocks, or parameters are outside of it.
    """
    net = _network_of(module, of)
    if callable(getattr(net, "pipeline_blocks", None)):
        blocks = list(net.pipeline_blocks())
    elif isinstance(net, nn.Sequential) and type(net).forward is nn.Sequential.forward:
        blocks = list(net)
    else:
        raise ValueError(
            f"`of` (={of!r}) must name an nn.Sequential, or a module with a method `pipeline_blocks()` that returns "
            f"its modules in order, where each module takes the output of the previous one. {type(net).__name__} is "
            "neither. Define the method `pipeline_blocks()`."
        )

    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    outside = [name for name, parameter in module.named_parameters() if id(parameter) not in inside]
    if outside:
        names = ", ".join(f"`{name}`" for name in outside[:3])
        raise ValueError(
            f"Parameters {names} ({len(outside)} in all) are outside the blocks of `of` (={of!r}), so they "
            "belong to no stage. Move them into a block."
        )
    return blocks


def _network_of(module: nn.Module, of: str) -> Any:
    try:
        net = module.get_submodule(of)
    except AttributeError:
        names = []
        for name, child in module.named_children():
            if list(child.parameters()):
                names.append(name)
        raise ValueError(
            f"`of` (={of!r}) must name the network to split into stages, but {type(module).__name__} has no such "
            f"attribute. Set `of` to one of its modules with parameters: {', '.join(names) or 'none'}."
        ) from None
    if getattr(net, "_compiled_call_impl", None) is not None or hasattr(net, "_orig_mod"):
        raise ValueError(
            f"`of` (={of!r}) names a network that is compiled as a whole, but its stages run separately. Compile the "
            "blocks instead, or leave torch.compile out."
        )
    return net


def cut_places(
    costs: Sequence[float],
    cuts: Cuts,
    num_stages: int,
    num_microbatches: int = 1,
    schedule: str = "1f1b",
) -> list[int]:
    """Return the index of each stage's first block, followed by the number of blocks.

    These are `num_stages + 1` ascending numbers.

    Args:
        costs: Cost of each block.
        cuts: First block of each stage after the first, a profile to balance by, or None to balance
            by `costs`.
        num_stages: Number of stages.
        num_microbatches: Number of micro-batches of a step.
        schedule: Name of the schedule, which decides how many micro-batches a stage keeps in
            memory.

    Raises:
        ValueError: There are fewer blocks than stages, a cut is beyond the last block, or a profile
            has another number of blocks or does not fit into memory.

    >>> cut_places([5, 1, 1, 1, 4], None, 2), cut_places([5, 1, 1, 1, 4], [1], 2)
    ([0, 2, 5], [0, 1, 5])
    """
    num_blocks = len(costs)
    if num_blocks < num_stages:
        raise ValueError(
            f"`num_stages` (={num_stages} in all) must not exceed the number of blocks (={num_blocks}), "
            "because every stage needs at least one block. Lower `num_stages`, or split the network "
            "into more blocks."
        )
    if isinstance(cuts, BlockProfile):
        if len(cuts.seconds) != num_blocks:
            raise ValueError(
                f"`cuts` is a profile of {len(cuts.seconds)} blocks, but the network has {num_blocks} blocks. "
                "Pass a profile with one number for each block."
            )
        places = _places_by_profile(cuts, num_stages, num_microbatches, schedule)
    elif cuts is None:
        places = balanced_cuts(costs, [0.0] * num_blocks, num_stages)
    else:
        places = list(cuts)
        if places and places[-1] >= num_blocks:
            raise ValueError(
                f"`cuts` (={places}) contains an index that is not below the number of blocks (={num_blocks}), so the "
                "last stage would be empty. Leave `cuts` out to balance the stages."
            )
    return [0, *places, num_blocks]


def _places_by_profile(
    profile: BlockProfile, num_stages: int, num_microbatches: int, schedule: str
) -> list[int]:
    num_alive = []
    for stage in range(num_stages):
        if schedule == "gpipe":
            num_alive.append(num_microbatches)
        else:
            num_alive.append(min(num_microbatches, num_stages - stage))
    return balanced_cuts(
        profile.seconds,
        profile.held_bytes or [0.0] * len(profile.seconds),
        num_stages,
        most_bytes=profile.most_bytes,
        activation_bytes=profile.activation_bytes,
        num_alive=num_alive,
    )
