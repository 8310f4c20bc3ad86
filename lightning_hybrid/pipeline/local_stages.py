"""The stages of this rank, and what connects them with those of others: agreement, and forward through all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.batch_rows import count_rows
from lightning_hybrid.pipeline.microbatches import digest_of, microbatches, only_tensors
from lightning_hybrid.pipeline.pipeline_watchdog import PipelineWatchdog
from lightning_hybrid.pipeline.rank_layout import PipelineGroups, PipelineRanks, TiedWeights
from lightning_hybrid.pipeline.shapes import Boundary, as_arguments, boundary_of, check, output_of


@dataclass(kw_only=True)
class Stages:
    """The stages of this rank, and what connects them with those of others."""

    module: Any  # the LightningModule
    net: nn.Module
    bodies: Mapping[int, Any]  # `StageBody` by number of stage
    wrapped: Mapping[
        int, nn.Module
    ]  # the same in DistributedDataParallel, where other ranks have replicas
    ranks: PipelineRanks
    groups: PipelineGroups
    tied: TiedWeights
    watchdog: PipelineWatchdog
    device: torch.device
    num_microbatches: int
    whole: Callable[
        [], AbstractContextManager[None]
    ]  # inside, layers that are cut over ranks are whole. Collective
    require_backward_grad_sync = (
        False  # whether the backward under way is a stage's last of its step, as DDP names it
    )

    def __post_init__(self) -> None:
        self._boundaries: dict[Any, list[tuple[Boundary, ...]]] = {}

    def agree(self, what: str, digest: int, described: Callable[[], Any]) -> None:
        """Compare a digest over the pipeline before any message is sent. Collective.

        Raises:
            ValueError: on every rank, with what each of them has, as `described` says it.
        """
        own = torch.tensor([digest])
        found = [torch.empty_like(own) for _ in range(self.ranks.num_ranks)]
        self.watchdog.wait_for(lambda: dist.all_gather(found, own, group=self.groups.agree))
        if len({int(each) for each in found}) > 1:
            peers = self.ranks.pipelines[self.ranks.data_rank]
            words = self.told(described())
            all_words = "; ".join(
                f"rank {rank}: {each}" for rank, each in zip(peers, words, strict=True)
            )
            raise ValueError(
                f"{what} must be the same on all ranks of a pipeline ({all_words}): the first stage takes the images "
                "and the last one the labels. Shuffle by a sampler that Lightning may replace, or give each rank the "
                "sampler, or the part of an IterableDataset, that `trainer.strategy.distributed_sampler_kwargs` asks "
                "for."
            )

    def agree_on_batch(self, batch: Any, *, with_values: bool = True) -> None:
        """Compare shapes and labels of a batch over the pipeline. Collective.

        Raises:
            ValueError: on every rank, they differ.
        """
        digest = digest_of(batch, with_values=with_values)
        self.agree(
            "The batch",
            digest,
            lambda: f"{count_rows(batch)} samples, labels and shapes {digest:x}",
        )

    def told(self, own: Any) -> list[Any]:
        """Return what each rank of the pipeline gives here. Collective."""
        found: list[Any] = [None] * self.ranks.num_ranks
        self.watchdog.wait_for(lambda: dist.all_gather_object(found, own, group=self.groups.agree))
        return found

    def largest(self, found_inf: Tensor) -> Tensor:
        """Return the largest of all stages' verdicts on overflow; in place. Collective."""
        self.watchdog.wait_for(
            lambda: dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=self.groups.pipe)
        )
        return found_inf

    def boundaries(
        self, key: Any, given: Callable[[], tuple[Tensor, ...]]
    ) -> list[tuple[Boundary, ...]]:
        """Return the inputs of every stage and the output of the last. Collective where the key is new.

        `given` is asked on the first stage only. What one rank cannot find out is an error on all of them.
        """
        if key not in self._boundaries:
            with self.whole():
                self._boundaries[key] = self._new_boundaries(given)
        return self._boundaries[key]

    def _new_boundaries(
        self, given: Callable[[], tuple[Tensor, ...]]
    ) -> list[tuple[Boundary, ...]]:
        peers = self.ranks.pipelines[self.ranks.data_rank]
        found = list[tuple[Boundary, ...]]()
        for stage in range(-1, self.ranks.num_stages):
            owner = peers[max(stage, 0) % self.ranks.num_ranks]
            answer: list[Any] = [None]
            if owner == self.ranks.rank:
                try:
                    if stage < 0:
                        answer = [tuple(map(boundary_of, given()))]
                    else:
                        answer = [output_of(self.bodies[stage].blocks, found[-1], self.device)]
                    if stage + 1 == self.ranks.num_stages and len(answer[0]) != 1:
                        answer = [
                            f"the last block must return one tensor (returned {len(answer[0])})"
                        ]
                except Exception as error:
                    answer = [f"{type(error).__name__}: {error}"]
            dist.broadcast_object_list(answer, src=owner, group=self.groups.agree)
            if isinstance(answer[0], str):
                raise ValueError(
                    f"On rank {owner}, {f'stage {stage}' if stage >= 0 else 'its input'}: {answer[0]}"
                )
            found.append(answer[0])
        return found

    def evaluate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the network's output, for `net.forward`, on every rank of the pipeline. Collective."""
        xs = only_tensors(args, kwargs)
        given = tuple(
            (tuple(x.shape), x.dtype) for x in xs
        )  # not their layout: the first stage's is taken
        digest = digest_of(xs, with_values=False)
        self.agree(
            "The input of the network",
            digest,
            lambda: ", ".join("{} of {}".format(*one) for one in given),
        )
        # Several parts keep all stages busy; where a rank has two stages, NCCL would need another order of messages.
        divides = count_rows(xs) % self.num_microbatches == 0
        num = self.num_microbatches if self.ranks.stages_per_rank == 1 and divides else 1
        parts = microbatches(xs, num)
        boundaries = self.boundaries((given, num), lambda: parts[0])
        with self.watchdog.in_schedule():
            return self.shared_output(
                self._forward(parts, boundaries), len(parts), boundaries[-1][0]
            )

    def _forward(
        self, parts: Sequence[tuple[Tensor, ...]], boundaries: Sequence[tuple[Boundary, ...]]
    ) -> Tensor | None:
        # Collective, with as many parts on every rank. The outputs of all of them on the last stage, None elsewhere.
        peers = self.ranks.pipelines[self.ranks.data_rank]
        num_ranks = self.ranks.num_ranks
        sent: list[tuple[dist.Work | None, Tensor]] = []
        outputs: list[Tensor] = []
        for stage in self.ranks.stages:
            for number, part in enumerate(parts):
                if stage > 0:
                    self.watchdog.note(
                        f"waiting for part {number} of the batch on stage {stage}", is_waiting=True
                    )
                    part = tuple(one.empty(self.device) for one in boundaries[stage])
                    source = peers[(stage - 1) % num_ranks]
                    for one, tensor in zip(boundaries[stage], part, strict=True):
                        receive = partial(
                            dist.recv, one.message(tensor), src=source, group=self.groups.pipe
                        )
                        self.watchdog.wait_for(receive)
                self.watchdog.note(f"in forward of part {number} of the batch on stage {stage}")
                output = self.bodies[stage](*part)
                check(boundaries[stage + 1], output, f"the output of stage {stage}")
                if stage + 1 == self.ranks.num_stages:
                    outputs.append(output)
                    continue
                target = peers[(stage + 1) % num_ranks]
                for one, tensor in zip(boundaries[stage + 1], as_arguments(output), strict=True):
                    message = one.message(tensor)
                    sent.append((dist.isend(message, dst=target, group=self.groups.pipe), message))
        self.watchdog.note("waiting for the outputs of the last stage", is_waiting=True)
        for work, _ in sent:
            if work is not None:
                self.watchdog.wait_for(work.wait)
        return torch.cat(outputs) if outputs else None

    def shared_output(self, output: Tensor | None, num_parts: int, boundary: Boundary) -> Tensor:
        """Give every rank of the pipeline the last stage's outputs (`output` there, None elsewhere). Collective."""
        if output is None:
            shape = (num_parts * boundary.shape[0], *boundary.shape[1:])
            output = torch.empty(shape, dtype=boundary.dtype, device=self.device)
        shared = output.detach().contiguous()
        last = self.ranks.pipelines[self.ranks.data_rank][-1]
        self.watchdog.wait_for(lambda: dist.broadcast(shared, src=last, group=self.groups.pipe))
        return shared
