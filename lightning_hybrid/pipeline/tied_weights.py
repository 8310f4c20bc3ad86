"""Parameters that several stages hold, as the embedding and the head of a language model: one sum in each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.pipeline.rank_layout import PipelineGroups, PipelineRanks


class TiedWeights:
    """The parameters that are on several ranks of a pipeline; each rank updates its copy, from the same gradient.

        gradient = sum over ranks j that hold it of round(sum over micro-batches of the gradient in the stage of j)

    Accumulation adds the gradients of both uses before those of micro-batches, which would take a message as large as
    the parameter for each micro-batch: its sums are the same but for the order of additions.

    Collective: every rank of WORLD must make it.

    Args:
        stages: blocks of each stage.
        ranks: place of this rank.
        groups: of the pipeline, to which theirs are added.

    Raises:
        ValueError: a rank has two stages with the same parameter.
    """

    def __init__(self, stages: Sequence[Sequence[nn.Module]], ranks: PipelineRanks, groups: PipelineGroups) -> None:
        names, places = dict[Tensor, str](), dict[Tensor, list[int]]()
        for stage, blocks in enumerate(stages):
            # Each parameter of a stage once, whatever the names that it has there.
            for name, parameter in nn.ModuleList(blocks).named_parameters():
                names.setdefault(parameter, name)
                places.setdefault(parameter, []).append(stage)
        self._own = list[tuple[Tensor, Any]]()
        self.counted_elsewhere: set[int] = set()
        made = dict[tuple[int, ...], Any]()
        for parameter, found in places.items():
            positions = tuple(sorted(stage % ranks.num_ranks for stage in found))
            if len(set(positions)) < len(positions):
                raise ValueError(
                    f"A parameter (`{names[parameter]}`, of shape {tuple(parameter.shape)}) must not be in two stages "
                    f"of one rank (= stages {found}): gradients of its stages are averaged one by one. Set other "
                    'strategy.cuts, or schedule="1f1b", with one stage a rank.'
                )
            if len(positions) == 1 or not parameter.requires_grad:
                continue
            if positions not in made:
                alone = [p for p in range(ranks.num_ranks) if p not in positions]
                sets = [tuple(peers[p] for p in some) for peers in ranks.pipelines for some in (positions, *zip(alone))]
                made[positions] = groups.new(sets, "pipeline tied weights")
            if ranks.position in positions:
                self._own.append((parameter, made[positions]))
                if ranks.position > positions[0]:
                    self.counted_elsewhere.add(id(parameter))

    @torch.no_grad()
    def sum_gradients_(self) -> None:
        """Add up the gradients over the ranks that hold a parameter, in place. Collective over these ranks."""
        for parameter, group in self._own:
            if parameter.grad is None:  # another rank may have one
                parameter.grad = torch.zeros_like(parameter)
            message = parameter.grad.contiguous()
            dist.all_reduce(message, group=group)
            if message is not parameter.grad:
                parameter.grad.copy_(message)
