"""Pipelines in the nodes of a planned run, at the number of images of its data parallelism."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hybrid.pipeline.cuts import balanced_cuts
from lightning_hybrid.planning.estimates.blocks import Block
from lightning_hybrid.planning.estimates.layers import FORWARD_SHARE
from lightning_hybrid.planning.estimates.memory import StateBytes
from lightning_hybrid.planning.estimates.pipeline_cost import (
    PipelineTask,
    StageLoad,
    most_kept_bytes,
    pipeline_step_s,
    schedule_tasks,
    simulate_pipeline,
    waiting_share,
)
from lightning_hybrid.planning.estimates.scenario import Scenario
from lightning_hybrid.planning.model.cluster import Cluster

MOST_STAGES = 8
ROUNDS = (
    1,
    2,
    4,
    8,
)  # micro-batches per stage: at four the bubble is about a fifth, at eight a ninth
PER_RANK = {"1f1b": 1, "interleaved": 2}  # GPipe's schedule takes the time of 1F1B, and more memory


@dataclass(frozen=True, kw_only=True)
class PipelineChoice:
    """Pipeline of a planned run.

    Args:
        num_ranks: Ranks of a pipeline, all on one node.
        num_images: Images of a pipeline in a step: those of as many data-parallel ranks.
        first_blocks: Names of the blocks with which stages begin, the first stage aside.
        step_s: Time of a step.
        bubble: Share of the step in which ranks wait for one another.
        rank_bytes: Memory of each rank of a pipeline.
        sent_bytes: What crosses each cut in a step, one way; as much comes back.
        tasks: Each rank's work, with its times.
    """

    schedule: str
    num_ranks: int
    stages_per_rank: int
    num_images: int
    num_microbatches: int
    recomputes: bool
    first_blocks: tuple[str, ...]
    step_s: float
    bubble: float
    rank_bytes: tuple[float, ...]
    sent_bytes: tuple[float, ...]
    tasks: tuple[tuple[PipelineTask, ...], ...]

    @property
    def most_bytes(self) -> float:
        """Memory of the rank that needs most."""
        return max(self.rank_bytes)

    @property
    def settings(self) -> tuple[str, ...]:
        """The overrides for the command line."""
        overrides = ["strategy=pipeline", f"strategy.num_stages={self.num_ranks}"]
        overrides += [
            f"strategy.num_microbatches={self.num_microbatches}",
            f"strategy.schedule={self.schedule}",
        ]
        return (*overrides, *(["strategy.checkpoint_activations=true"] if self.recomputes else []))


def pipeline_choices(
    scenario: Scenario,
    blocks: Sequence[Block],
    state: StateBytes,
    *,
    usable_bytes: float | None,
    recomputes: bool = False,
) -> list[PipelineChoice]:
    """Simulate pipelines of 2 to 8 ranks in a node, with the images of the run, the fastest first.

    A pipeline of S ranks takes the images of S data-parallel ranks. Blocks take time by their FLOPs, whatever the size
    of a micro-batch, and messages disturb nothing: both are kind to pipelines.

    Args:
        scenario: The data-parallel run.
        blocks: The network's.
        state: Bytes per parameter.
        usable_bytes: Memory that each rank may use; pipelines that need more are left out. None: all stay.
        recomputes: Blocks keep their inputs alone, and run forward again in backward.
    """
    choices: list[PipelineChoice] = []
    for num_ranks, rounds, schedule in itertools.product(
        range(2, MOST_STAGES + 1), ROUNDS, PER_RANK
    ):
        num_micro = num_ranks * rounds
        per_rank = PER_RANK[schedule]
        images = num_ranks * scenario.batch_size_per_rank
        if (
            scenario.cluster.ranks_per_node % num_ranks
            or images % num_micro
            or num_ranks * per_rank > len(blocks)
        ):
            continue
        pipeline = _Pipeline(
            scenario=scenario,
            blocks=tuple(blocks),
            state=state,
            recomputes=recomputes,
            schedule=schedule,
            num_ranks=num_ranks,
            num_micro=num_micro,
        )
        choice = pipeline.choice(usable_bytes)
        if choice is not None:
            choices.append(choice)
    return sorted(choices, key=lambda choice: choice.step_s)


@dataclass(frozen=True, kw_only=True)
class _Pipeline:
    scenario: Scenario
    blocks: tuple[Block, ...]
    state: StateBytes
    recomputes: bool
    schedule: str
    num_ranks: int
    num_micro: int

    def choice(self, usable_bytes: float | None) -> PipelineChoice | None:
        """Cut and simulate. None: it does not fit."""
        scenario = self.scenario
        per_rank = PER_RANK[self.schedule]
        order = schedule_tasks(
            self.schedule, self.num_ranks, self.num_micro, stages_per_rank=per_rank
        )
        work = scenario.work()
        num_stages = self.num_ranks * per_rank
        images = self.num_ranks * scenario.batch_size_per_rank / self.num_micro
        image_s = (
            scenario.cluster.slowdown
            * (work.forward_s + work.backward_s)
            / scenario.batch_size_per_rank
        )
        flops = sum(block.forward_flops for block in self.blocks) or 1
        forwards_s = [
            FORWARD_SHARE * image_s * images * block.forward_flops / flops for block in self.blocks
        ]
        backwards_s = [
            (1 / FORWARD_SHARE - 1 + self.recomputes) * forward_s for forward_s in forwards_s
        ]
        kept = [
            images * (block.input_bytes if self.recomputes else block.kept_bytes)
            for block in self.blocks
        ]
        # A weight that blocks share is held by each of their stages, which add up its gradients once a step.
        num_held = [sum(block.numels) + block.num_tied for block in self.blocks]
        held = [self.state.per_parameter() * numel for numel in num_held]
        unit_load = StageLoad(forward_s=0.0, backward_s=0.0, kept_bytes=1.0)
        # With one stage a rank the cuts heed memory; with several, the rank's sum is checked afterwards.
        alive = [
            int(most_kept_bytes(tasks, [unit_load] * num_stages)) for tasks in order
        ] * per_rank
        limit = {} if usable_bytes is None or per_rank > 1 else {"most_bytes": usable_bytes}
        seconds = [f + b for f, b in zip(forwards_s, backwards_s, strict=True)]
        try:
            cuts = balanced_cuts(
                seconds, held, num_stages, activation_bytes=kept, num_alive=alive, **limit
            )
        except ValueError:
            return None
        parts = list(itertools.pairwise([0, *cuts, len(self.blocks)]))
        near = scenario.cluster.inside
        group = self.group
        loads = [
            StageLoad(
                forward_s=sum(forwards_s[a:b]),
                backward_s=sum(backwards_s[a:b]),
                send_s=near.seconds(images * self.blocks[b].input_bytes)
                if b < len(self.blocks)
                else 0.0,
                kept_bytes=sum(kept[a:b]),
                gradient_s=group.alone_s(
                    scenario.algorithm or "flat",
                    scenario.itemsize * sum(num_held[a:b]),
                ),
            )
            for a, b in parts
        ]
        tasks = simulate_pipeline(order, loads)
        num_tied = sum(block.num_tied for block in self.blocks)
        tied_s = near.seconds(scenario.itemsize * num_tied) if num_tied else 0.0
        # What a block computes again is alive next to the inputs; without it, the inputs are among what is kept.
        working = (
            max(images * block.kept_bytes for block in self.blocks) if self.recomputes else 0.0
        )
        rank_bytes = tuple(
            sum(sum(held[a:b]) for a, b in parts[rank :: self.num_ranks])
            + most_kept_bytes(order[rank], loads)
            + working
            for rank in range(self.num_ranks)
        )
        if usable_bytes is not None and max(rank_bytes) > usable_bytes:
            return None
        return PipelineChoice(
            schedule=self.schedule,
            num_ranks=self.num_ranks,
            stages_per_rank=per_rank,
            num_images=self.num_ranks * scenario.batch_size_per_rank,
            num_microbatches=self.num_micro,
            recomputes=self.recomputes,
            first_blocks=tuple(self.blocks[cut].name for cut in cuts),
            step_s=pipeline_step_s(tasks, loads) + tied_s + scenario.update_s,
            bubble=waiting_share(tasks),
            rank_bytes=rank_bytes,
            sent_bytes=tuple(
                self.num_micro * images * self.blocks[cut].input_bytes for cut in cuts
            ),
            tasks=tuple(map(tuple, tasks)),
        )

    @property
    def group(self) -> Cluster:
        """The ranks with the same stage: fewer in each node, and all such groups share its network cards."""
        cluster = self.scenario.cluster
        across = replace(cluster.across, bytes_per_s=cluster.across.bytes_per_s / self.num_ranks)
        return replace(
            cluster, ranks_per_node=cluster.ranks_per_node // self.num_ranks, across=across
        )
