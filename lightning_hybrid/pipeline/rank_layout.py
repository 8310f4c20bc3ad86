"""Which ranks hold which stage, the groups in which they talk, and parameters on other ranks, or on several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.comm.engine.process_groups import end_group, own_group


@dataclass(frozen=True, kw_only=True)
class PipelineRanks:
    """The place of one rank: rank = data_rank * num_ranks + position in its pipeline.

    With several stages on each rank, rank position p holds the stages p, p + num_ranks, p + 2 num_ranks, ...

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
        """Number of pipelines, each with batches of its own."""
        return self.world_size // self.num_ranks

    @property
    def data_rank(self) -> int:
        """Which pipeline."""
        return self.rank // self.num_ranks

    @property
    def position(self) -> int:
        """Place in it."""
        return self.rank % self.num_ranks

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that this rank holds, ascending."""
        return tuple(range(self.position, self.num_stages, self.num_ranks))

    @property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each pipeline, in the order of stages."""
        return tuple(
            tuple(range(d * self.num_ranks, (d + 1) * self.num_ranks))
            for d in range(self.num_data_ranks)
        )

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold the same stages, by position."""
        return tuple(
            tuple(range(p, self.world_size, self.num_ranks)) for p in range(self.num_ranks)
        )

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage."""
        return self.position == 0


class PipelineGroups:
    """The process groups of a pipeline: `pipe` for messages between stages, `agree` for words, `data` for replicas.

    Collective: every rank of WORLD must make them, in the same order.
    """

    def __init__(self, ranks: PipelineRanks, *, timeout: timedelta) -> None:
        self._timeout = timeout
        self._made = list[Any]()
        # Messages have a group of their own: Gloo matches by order of arrival.
        self.pipe = self.new(ranks.pipelines, "pipeline stages")
        self.agree = self.new(ranks.pipelines, "pipeline agreement", backend="gloo")
        # Made also where each stage has one rank: a torchmetric then counts over that one rank alone.
        self.data = self.new(ranks.replicas, "pipeline data")

    def new(self, sets: Sequence[Sequence[int]], desc: str, **options: Any) -> Any:
        """Make a group for each of these sets, which divide the world; return that of this rank. Collective."""
        self._made.append(own_group(sets, timeout=self._timeout, desc=desc, **options))
        return self._made[-1]

    def destroy(self, *, are_aborted: bool = False) -> None:
        """Free the groups; ranks that still wait in one learn of it by an error. Aborted ones are not waited for."""
        for group in self._made:
            end_group(
                group, is_aborted=are_aborted and group is not self.agree
            )  # which is over host memory


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

    def __init__(
        self, stages: Sequence[Sequence[nn.Module]], ranks: PipelineRanks, groups: PipelineGroups
    ) -> None:
        names = dict[Tensor, str]()
        places = dict[Tensor, list[int]]()
        for stage, blocks in enumerate(stages):
            # Each parameter of a stage once, whatever the names that it has there.
            for name, one in nn.ModuleList(blocks).named_parameters():
                names.setdefault(one, name)
                places.setdefault(one, []).append(stage)
        self._own = list[tuple[Tensor, Any]]()
        self.counted_elsewhere: set[int] = set()
        made = dict[tuple[int, ...], Any]()
        for parameter, found in places.items():
            positions = tuple(sorted(stage % ranks.num_ranks for stage in found))
            if len(set(positions)) < len(positions):
                raise ValueError(
                    f"A parameter (`{names[parameter]}`, of shape {tuple(parameter.shape)}) must not be in two stages "
                    f"of one rank (= stages {found}): gradients of its stages are averaged one by one. Give other "
                    '`cuts`, or schedule="1f1b", with one stage a rank.'
                )
            if len(positions) == 1 or not parameter.requires_grad:
                continue
            if positions not in made:
                alone = [p for p in range(ranks.num_ranks) if p not in positions]
                sets = [
                    tuple(peers[p] for p in some)
                    for peers in ranks.pipelines
                    for some in (positions, *zip(alone))
                ]
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


class OtherStages:
    """Parameters and buffers of blocks that are on other ranks: on the meta device, until `restore`.

    Those of the user stay the same objects: they are put aside, empty, and get their values back in the end. Those
    that are in `needed` too, as a mask that all blocks share, stay as they are.
    """

    def __init__(self, modules: Sequence[nn.Module], *, needed: Sequence[Tensor] = ()) -> None:
        stays = set(map(id, needed))
        self._kept: list[tuple[dict[str, Any], str, Tensor]] = []
        replaced: dict[int, Tensor] = {}
        for module in modules:
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in table.items():
                    if tensor is None or id(tensor) in stays:
                        continue
                    if id(tensor) not in replaced:
                        replaced[id(tensor)] = _on_meta(tensor)
                    self._kept.append((table, name, tensor))
        for table, name, tensor in self._kept:
            table[name] = replaced[id(tensor)]
            tensor.grad = None
            tensor.data = tensor.data.new_empty(0)

    def hidden(self) -> AbstractContextManager[None]:
        """Take them out of their modules: a module with tensors on the meta device cannot be moved."""
        return self._replaced(lambda meta: None)

    @contextmanager
    def filled(self, values: Mapping[int, Tensor], device: torch.device) -> Iterator[None]:
        """Hold values inside: by id of the tensor that is in a module now."""
        made: dict[int, Tensor] = {}
        for meta in self.tensors:
            if id(meta) in values:
                value = values[id(meta)].to(device)
                made[id(meta)] = (
                    nn.Parameter(value, meta.requires_grad)
                    if isinstance(meta, nn.Parameter)
                    else value
                )
        with self._replaced(lambda meta: made.get(id(meta), meta)):
            yield

    @contextmanager
    def _replaced(self, instead_of: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
        before = self._now()
        try:
            for table, name, meta in before:
                table[name] = instead_of(meta)
            yield
        finally:
            for table, name, meta in before:
                table[name] = meta

    def restore(self, values: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> None:
        """Put the users' own tensors back, with these values, in the order of `tensors`."""
        given = dict(zip(map(id, self.tensors), values, strict=True))
        own: dict[int, Tensor] = {}
        for table, name, tensor in self._kept:
            meta = table[name]
            tensor.data = given[id(meta)]
            table[name] = own[id(meta)] = tensor
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [
                    own.get(id(parameter), parameter) for parameter in group["params"]
                ]
        self._kept.clear()

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors on the meta device, each once."""
        return list({id(meta): meta for _, _, meta in self._now()}.values())

    def _now(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        # Not those made here: `module.double()` makes other buffers.
        return [(table, name, table[name]) for table, name, _ in self._kept]


def _on_meta(tensor: Tensor) -> Tensor:
    meta = torch.empty_like(tensor, device="meta")
    return (
        nn.Parameter(meta, requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else meta
    )
