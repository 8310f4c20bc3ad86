"""Checks of what a user gives a pipeline, and the blocks that it is made of."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import nn

from lightning_hybrid.checks import require_whole
from lightning_hybrid.comm.health.diagnosis import differing
from lightning_hybrid.lightning_names import misconfiguration
from lightning_hybrid.pipeline.cuts import BlockProfile, Cuts, balanced_cuts
from lightning_hybrid.strategy.compatibility import in_callbacks, in_precision, refuse_excluded

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2}

_ASYNCHRONOUS = (
    "PipeDream's own form updates weights between the forward and the backward of a batch and keeps one copy of them "
    "per batch in flight (weight stashing), so it trains another function than the one you tune (arXiv:1806.03377). "
    'schedule="1f1b" has its order and its memory, with a flush per step. lightning_hybrid/pipeline/README.md, '
    '"Refused", has more.'
)


def check_options(
    *, num_stages: int, num_microbatches: int, schedule: str, cuts: Cuts, of: str = "net"
) -> None:
    """Check the options of a pipeline that need no module.

    Raises:
        ValueError: names the option.

    >>> check_options(num_stages=4, num_microbatches=2, schedule="1f1b", cuts=None)
    Traceback (most recent call last):
    ValueError: `num_microbatches` (=2) must be at least `num_stages` (=4): with fewer, some stages always wait. Write \
num_microbatches=16: with four times as many, 16 % of a step are waiting.
    """
    if schedule not in get_args(Schedule):
        name = str(schedule).lower()
        why = 'Use schedule="1f1b", which needs the least memory.'
        why = 'Use schedule="zero_bubble".' if re.search("zb|zero|dualpipe", name) else why
        why = _ASYNCHRONOUS if "dream" in name else why
        raise ValueError(
            f"`schedule` (={schedule!r}) must be one of {', '.join(get_args(Schedule))}: {why}"
        )
    why = "one stage is no pipeline, and needs no more than strategy='hybrid_allreduce'. Write num_stages=2"
    require_whole("num_stages", num_stages, why, least=2)
    require_whole(
        "num_microbatches", num_microbatches, "they are counted. Write num_microbatches=8"
    )
    if num_microbatches < num_stages:
        most = 4 * num_stages
        waiting = (num_stages - 1) / (most + num_stages - 1)
        raise ValueError(
            f"`num_microbatches` (={num_microbatches}) must be at least `num_stages` (={num_stages}): with fewer, some "
            f"stages always wait. Write num_microbatches={most}: with four times as many, {100 * waiting:.0f} % "
            "of a step are waiting."
        )
    rounds = max(1, num_microbatches // num_stages)
    if STAGES_PER_RANK[schedule] > 1 and num_microbatches % rounds:
        raise ValueError(
            f"`num_microbatches` (={num_microbatches}) must be a multiple of the number of rounds "
            f"(=num_microbatches // num_stages = {rounds}) in an interleaved schedule, which takes them in rounds of "
            f"equal size. Write num_microbatches={num_stages * rounds}."
        )
    if not isinstance(of, str):
        raise ValueError(
            f"`of` (={of!r}) must be the name of the network in the module: write of='net'."
        )
    if isinstance(cuts, BlockProfile):
        if STAGES_PER_RANK[schedule] == 1 or cuts.most_bytes == math.inf:
            return
        raise ValueError(
            f"`cuts.most_bytes` (={cuts.most_bytes:g}) must be left out with schedule={schedule!r}: it limits one "
            'stage, and there a rank has two. Set schedule="1f1b", or leave it out.'
        )
    total = num_stages * STAGES_PER_RANK[schedule]
    numbers: Sequence[Any] = cuts if isinstance(cuts, Sequence) else ["none"]
    is_right = all(isinstance(one, int) and one >= 1 for one in numbers) and list(
        numbers
    ) == sorted(set(numbers))
    if cuts is not None and not (is_right and len(cuts) == total - 1):
        raise ValueError(
            f"`cuts` (={cuts!r}) must be {total - 1} ascending places, the first block of each stage after the "
            f"first: {num_stages} ranks hold {total} stages. Leave `cuts` out to balance them."
        )


def check_ranks(
    *, num_stages: int, world_size: int, schedule: str = "1f1b", checkpoints: bool = False
) -> None:
    """Check that the ranks divide into pipelines, and what a schedule asks of them; `checkpoints`: of activations.

    Raises:
        ValueError: they do not.
    """
    if schedule == "zero_bubble" and (world_size > num_stages or checkpoints):
        raise ValueError(
            f"`schedule` (={schedule!r}) must have one pipeline (here {num_stages} of {world_size} ranks) and no "
            "`checkpoint_activations`: torch computes gradients of weights apart, by a graph that it stores, and adds "
            "them to `.grad` itself, where DistributedDataParallel does not see them. Set schedule='interleaved'."
        )
    if world_size % num_stages:
        raise ValueError(
            f"`num_stages` (={num_stages}) must divide the number of ranks (={world_size}): each pipeline has one rank "
            f"per stage, and here {world_size % num_stages} would be left over. Launch a multiple of {num_stages}, or "
            "change `num_stages`."
        )


def refuse_in_pipeline(
    trainer: Any, module: Any, precision: Any, *, is_setup: bool = False
) -> None:
    """Check what a pipeline cannot carry out: how a step is made, precision; in the setup callbacks and losses.

    Raises:
        MisconfigurationException: names the option.
    """
    found = (
        {"pipeline": "a pipeline"}
        | in_precision(precision)
        | in_callbacks(trainer.callbacks if is_setup else ())
    )
    if (num := trainer.accumulate_grad_batches) != 1:
        found["accumulation"] = f"`accumulate_grad_batches` (={num})"
    if not module.automatic_optimization:
        found["manual optimization"] = "`automatic_optimization` (=False)"
    if bounds := {
        group.get("max_grad_norm") for each in trainer.optimizers for group in each.param_groups
    } - {None}:
        found["norm of all"] = f"`max_grad_norm` (={min(bounds)})"
    if trainer.strategy._layer_sync is not None:
        found["SyncBatchNorm"] = "`sync_batchnorm` (=True)"
    if is_setup and (
        losses := [one for one in module.modules() if hasattr(one, "couples_the_batch")]
    ):
        found["global batch"] = f"`{type(losses[0]).__name__}`"
    refuse_excluded(found, error=misconfiguration)


def compare_stages(blocks: Sequence[nn.Module], **own: Any) -> None:
    """Compare what makes up a pipeline over all ranks. Collective: every rank of WORLD.

    Raises:
        ValueError: on every rank, with what differs.
    """
    shapes = [
        [(name, tuple(p.shape), str(p.dtype)) for name, p in block.named_parameters()]
        for block in blocks
    ]
    own["blocks"] = f"{len(blocks)} of {hashlib.sha256(repr(shapes).encode()).hexdigest()[:12]}"
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    if difference := differing(found):
        raise ValueError(
            f"The plan of a pipeline must be the same on all ranks: {difference}. Stages would send what others do "
            "not expect. Give every rank the same `strategy` options and the same network."
        )


def blocks_of(module: nn.Module, of: str) -> list[nn.Module]:
    """Return the blocks of the network `of` of a module, of which each takes what the one before returns.

    Raises:
        ValueError: there is no such network, it has no blocks, or parameters are outside it.
    """
    try:
        net: Any = module.get_submodule(of)
    except AttributeError:
        children = [
            name for name, child in module.named_children() if any(True for _ in child.parameters())
        ]
        raise ValueError(
            f"`of` (={of!r}) must name the network that is cut into stages, and {type(module).__name__} has no such "
            f"attribute: those with parameters are {', '.join(children) or 'none'}. Set `of` to one of them."
        ) from None
    if getattr(net, "_compiled_call_impl", None) is not None or hasattr(net, "_orig_mod"):
        raise ValueError(
            f"`of` (={of!r}) must not be compiled as a whole: its stages run one by one. Compile its blocks, or leave "
            "torch.compile out."
        )
    if callable(getattr(net, "pipeline_blocks", None)):
        blocks = list(net.pipeline_blocks())
    elif isinstance(net, nn.Sequential) and type(net).forward is nn.Sequential.forward:
        blocks = list(net)
    else:
        raise ValueError(
            f"`of` (={of!r}) must be an nn.Sequential, or have a method `pipeline_blocks()` that returns modules in "
            f"order, each taking what the one before returns; {type(net).__name__} is neither. Give it one."
        )
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    outside = [name for name, parameter in module.named_parameters() if id(parameter) not in inside]
    if outside:
        raise ValueError(
            f"Parameters {', '.join(f'`{name}`' for name in outside[:3])} ({len(outside)} in all) must be in a block "
            f"of `of` (={of!r}): what is outside belongs to no stage. Make them part of the network."
        )
    return blocks


def cut_places(
    costs: Sequence[float],
    cuts: Cuts,
    num_stages: int,
    num_microbatches: int = 1,
    schedule: str = "1f1b",
) -> list[int]:
    """Return where each stage begins, and the end: `num_stages + 1` ascending block numbers; `costs`: of the blocks.

    Raises:
        ValueError: there are fewer blocks than stages, a cut is behind the last block, or a profile is of other blocks
            or does not fit.

    >>> cut_places([5, 1, 1, 1, 4], None, 2), cut_places([5, 1, 1, 1, 4], [1], 2)
    ([0, 2, 5], [0, 1, 5])
    """
    num_blocks = len(costs)
    if num_blocks < num_stages:
        raise ValueError(
            f"`num_stages` (={num_stages} in all) must be at most the number of blocks (={num_blocks}): a stage is "
            "one block at least. Lower `num_stages`, or make more blocks of the network."
        )
    if isinstance(cuts, BlockProfile):
        if len(cuts.seconds) != num_blocks:
            raise ValueError(
                f"`cuts` (=a profile of {len(cuts.seconds)} blocks) must have one number for each of the {num_blocks} "
                "blocks of the network. Measure these: BlockProfile.measured(blocks, example)."
            )
        gpipe = schedule == "gpipe"
        held = cuts.held_bytes or [0.0] * num_blocks
        alive = [
            num_microbatches if gpipe else min(num_microbatches, num_stages - j)
            for j in range(num_stages)
        ]
        limits: Any = {
            "most_bytes": cuts.most_bytes,
            "activation_bytes": cuts.activation_bytes,
            "num_alive": alive,
        }
        return [0, *balanced_cuts(cuts.seconds, held, num_stages, **limits), num_blocks]
    if cuts and cuts[-1] >= num_blocks:
        raise ValueError(
            f"`cuts` (={list(cuts)}) must be below the number of blocks (={num_blocks}): the last stage would be "
            "empty. Leave `cuts` out to balance them."
        )
    places = balanced_cuts(costs, [0.0] * num_blocks, num_stages) if cuts is None else list(cuts)
    return [0, *places, num_blocks]
