"""Rank layout and process groups of a pipeline, and handling of parameters that other ranks hold or share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.comm.engine.process_groups import end_group, own_group


@dataclass(frozen=True, kw_only=True)
class PipelineRanks:
    """Position of one rank among the pipelines and their stages.

        rank = data_rank * num_ranks + position

    The rank at position p holds the stages p, p + num_ranks, p + 2 num_ranks and so on.

    >>> ranks = PipelineRanks(rank=5, world_size=8, num_ranks=4, stages_per_rank=2)
    >>> ranks.data_rank, ranks.position, ranks.stages, ranks.pipelines[1], ranks.replicas[1]
    (1, 1, (1, 5), (4, 5, 6, 7), (1, 5))
    """

    rank: int
    world_size: int
    num_ranks: int
    stages_per_rank: int = 1

    @property
    def num_stages(self) -> int:
        """Number of stages of a pipeline."""
        return self.num_ranks * self.stages_per_rank

    @property
    def num_data_ranks(self) -> int:
        """Number of pipelines, each of which reads different batches."""
        return self.world_size // self.num_ranks

    @property
    def data_rank(self) -> int:
        """Index of this rank's pipeline."""
        return self.rank // self.num_ranks

    @property
    def position(self) -> int:
        """Index of this rank within its pipeline."""
        return self.rank % self.num_ranks

    @property
    def stages(self) -> tuple[int, ...]:
        """Indices of the stages that this rank holds, in ascending order."""
        return tuple(range(self.position, self.num_stages, self.num_ranks))

    @property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each pipeline, in the order of stages."""
        pipelines = []
        for first_rank in range(0, self.num_data_ranks * self.num_ranks, self.num_ranks):
            pipelines.append(tuple(range(first_rank, first_rank + self.num_ranks)))
        return tuple(pipelines)

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks of this rank's pipeline, in the order of stages."""
        return self.pipelines[self.data_rank]

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that hold the same stages, one group per position in a pipeline."""
        replicas = []
        for position in range(self.num_ranks):
            replicas.append(tuple(range(position, self.world_size, self.num_ranks)))
        return tuple(replicas)

    @property
    def is_first(self) -> bool:
        """True if this rank holds the first stage."""
        return self.position == 0


class PipelineGroups:
    """Process groups of a pipeline, for messages, comparisons and data-parallel averages.

    Collective: every rank of WORLD must create them, in the same order.

    Attributes:
        pipe: The ranks of this pipeline, for messages between stages.
        agree: The same ranks with the Gloo backend, to compare and gather Python objects.
        data: The ranks that hold the same stages.
    """

    def __init__(self, ranks: PipelineRanks, *, timeout: timedelta) -> None:
        self._timeout = timeout
        self._groups: list[Any] = []
        # Messages have their own group, because Gloo matches them by order of arrival.
        self.pipe = self.new_group(ranks.pipelines, "pipeline stages")
        self.agree = self.new_group(ranks.pipelines, "pipeline agreement", backend="gloo")
        # The group exists even if only one rank holds each stage, so that torchmetrics reduce over that rank
        # only.
        self.data = self.new_group(ranks.replicas, "pipeline data")

    def new_group(self, rank_sets: Sequence[Sequence[int]], desc: str, **options: Any) -> Any:
        """Create a process group for each set of ranks, and return the group of this rank.

        Collective: every rank of WORLD must call it, in the same order. The sets partition the
        world.
        """
        group = own_group(rank_sets, timeout=self._timeout, desc=desc, **options)
        self._groups.append(group)
        return group

    def destroy(self, *, are_aborted: bool = False) -> None:
        """Destroy the process groups of the pipeline.

        Ranks that still wait in a group get an error. Aborted groups are not waited for.
        """
        for group in self._groups:
            # The group for agreement is over host memory, which an abort does not reach.
            is_aborted = are_aborted and group is not self.agree
            end_group(group, is_aborted=is_aborted)


class TiedWeights:
    """Parameters that several pipeline ranks share, with the all-reduce of their gradients.

    Each rank updates its copy from the same gradient.

        gradient = sum over ranks j that hold it of round(sum over micro-batches of the gradient in the stage of j)

    Gradient accumulation without a pipeline adds the gradients of both uses before it adds
    micro-batches. Here that would take a message as large as the parameter for each micro-batch.
    The sums differ only in the order of additions.

    Collective: every rank of WORLD must create it, in the same order.

    Args:
        stages: Blocks of each stage.
        ranks: Position of this rank.
        groups: Groups of the pipeline, to which the groups of tied parameters are added.

    Attributes:
        counted_elsewhere: `id` of each tied parameter whose gradient norm another rank contributes.

    Raises:
        ValueError: A rank has two stages with the same parameter.
    """

    def __init__(
        self, stages: Sequence[Sequence[nn.Module]], ranks: PipelineRanks, groups: PipelineGroups
    ) -> None:
        self.counted_elsewhere: set[int] = set()
        self._local: list[tuple[Tensor, Any]] = []  # tied parameters of this rank, with their group
        parameter: Tensor
        names: dict[Tensor, str] = {}
        stages_of: dict[Tensor, list[int]] = {}
        for stage, blocks in enumerate(stages):
            # A parameter that has several names in a stage is listed once.
            for name, parameter in nn.ModuleList(blocks).named_parameters():
                names.setdefault(parameter, name)
                stages_of.setdefault(parameter, []).append(stage)

        group_of_positions: dict[tuple[int, ...], Any] = {}
        for parameter, its_stages in stages_of.items():
            positions = tuple(sorted(stage % ranks.num_ranks for stage in its_stages))
            if len(set(positions)) < len(positions):
                raise ValueError(
                    f"The parameter `{names[parameter]}` (of shape {tuple(parameter.shape)}) is in the stages "
                    f"{its_stages} of one rank, but cannot be in several of them, because gradients are averaged for "
                    "each stage separately. Change `cuts`, or set schedule='1f1b', which has one stage per rank."
                )
            if len(positions) == 1 or not parameter.requires_grad:
                continue
            if positions not in group_of_positions:
                rank_sets = _sets_with_positions(ranks, positions)
                group_of_positions[positions] = groups.new_group(rank_sets, "pipeline tied weights")
            if ranks.position in positions:
                self._local.append((parameter, group_of_positions[positions]))
                if ranks.position > positions[0]:
                    self.counted_elsewhere.add(id(parameter))

    @torch.no_grad()
    def sum_gradients_(self) -> None:
        """All-reduce the gradients of tied parameters over the ranks that hold them, in place.

        Collective: every rank of the pipeline must call it, in the same order.
        """
        for parameter, group in self._local:
            if parameter.grad is None:  # another rank may have a gradient
                parameter.grad = torch.zeros_like(parameter)
            message = parameter.grad.contiguous()
            dist.all_reduce(message, group=group)
            if message is not parameter.grad:
                parameter.grad.copy_(message)


def _sets_with_positions(ranks: PipelineRanks, positions: Sequence[int]) -> list[tuple[int, ...]]:
    """Divide the ranks of each pipeline into one set of the ranks at `positions` and one set for each other rank."""
    rank_sets = []
    for peers in ranks.pipelines:
        rank_sets.append(tuple(peers[position] for position in positions))
        for position in range(ranks.num_ranks):
            if position not in positions:
                rank_sets.append((peers[position],))
    return rank_sets


class _TableEntry(NamedTuple):
    """Entry of a module's `_parameters` or `_buffers` dictionary."""

    table: dict[str, Any]
    name: str
    tensor: Tensor


class OtherStages:
    """Parameters and buffers of other ranks' blocks, on the meta device until `restore` is called.

    The user's tensors stay the same objects. This object holds them without memory, and `restore`
    fills them with values again.

    Args:
        modules: Modules of the blocks on other ranks.
        needed: Tensors that this rank needs too, such as a mask that all blocks share. They keep
            their values.
    """

    def __init__(self, modules: Sequence[nn.Module], *, needed: Sequence[Tensor] = ()) -> None:
        self._user_entries: list[_TableEntry] = []
        needed_ids = {id(tensor) for tensor in needed}
        meta_tensors: dict[int, Tensor] = {}
        for module in modules:
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in table.items():
                    if tensor is None or id(tensor) in needed_ids:
                        continue
                    if id(tensor) not in meta_tensors:
                        meta_tensors[id(tensor)] = _on_meta(tensor)
                    self._user_entries.append(_TableEntry(table, name, tensor))

        for table, name, tensor in self._user_entries:
            table[name] = meta_tensors[id(tensor)]
            tensor.grad = None
            tensor.data = tensor.data.new_empty(0)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Temporarily remove the meta tensors from their modules.

        A module with tensors on the meta device cannot be moved to another device.
        """
        with self._replaced(lambda meta: None):
            yield

    @contextmanager
    def filled(self, values: Mapping[int, Tensor], device: torch.device) -> Iterator[None]:
        """Temporarily replace the meta tensors in the modules by tensors with values.

        Args:
            values: Values, by `id` of the meta tensor that is currently in a module.
            device: Device to which the values are moved.
        """
        tensors: dict[int, Tensor] = {}
        for meta in self.tensors:
            if id(meta) not in values:
                continue
            value = values[id(meta)].to(device)
            if isinstance(meta, nn.Parameter):
                value = nn.Parameter(value, meta.requires_grad)
            tensors[id(meta)] = value
        with self._replaced(lambda meta: tensors.get(id(meta), meta)):
            yield

    @contextmanager
    def _replaced(self, replacement_of: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
        entries = self._meta_entries()
        try:
            for table, name, meta in entries:
                table[name] = replacement_of(meta)
            yield
        finally:
            for table, name, meta in entries:
                table[name] = meta

    def restore(self, values: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> None:
        """Restore the user's tensor objects in modules and optimizers, with new values.

        Args:
            values: Values in the order of `tensors`.
            optimizers: Optimizers whose groups hold the meta tensors.
        """
        value_of = {id(meta): value for meta, value in zip(self.tensors, values, strict=True)}
        user_tensors: dict[int, Tensor] = {}
        for table, name, tensor in self._user_entries:
            meta_id = id(table[name])
            tensor.data = value_of[meta_id]
            table[name] = tensor
            user_tensors[meta_id] = tensor

        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [
                    user_tensors.get(id(parameter), parameter) for parameter in group["params"]
                ]
        self._user_entries.clear()

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors on the meta device, each listed once."""
        unique = {id(entry.tensor): entry.tensor for entry in self._meta_entries()}
        return list(unique.values())

    def _meta_entries(self) -> list[_TableEntry]:
        # The modules are read again each time because `module.double()` creates new buffers.
        entries = []
        for table, name, _ in self._user_entries:
            entries.append(_TableEntry(table, name, table[name]))
        return entries


def _on_meta(tensor: Tensor) -> Tensor:
    meta = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(meta, requires_grad=tensor.requires_grad)
    return meta
