"""Simulation of intra-node pipeline parallelism, for comparison with data parallelism in a planned run."""

from __future__ import annotations

import itertools
import math
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

# Micro-batches per rank of a pipeline. With four the bubble is about a fifth of the step, with eight a ninth.
ROUNDS = (1, 2, 4, 8)

# Stages of a rank by schedule. GPipe's schedule takes the time of 1F1B and more memory, so it is left out.
STAGES_PER_RANK = {"1f1b": 1, "interleaved": 2}


@dataclass(frozen=True, kw_only=True)
class PipelineChoice:
    """Pipeline configuration for a planned run, with its simulated step.

    Args:
        schedule: Name of the schedule.
        num_ranks: Number of ranks of a pipeline, all on one node.
        stages_per_rank: Number of stages that each rank holds.
        num_images: Images per step of one pipeline, as many as the same number of data-parallel ranks would take.
        num_microbatches: Number of micro-batches in a step.
        recomputes: True if each block keeps only its input and runs forward again in backward.
        first_blocks: Name of the first block of each stage, except the first stage.
        step_s: Time of a step in seconds.
        bubble: Fraction of the step in which ranks wait for one another.
        rank_bytes: Memory of each rank in bytes.
        sent_bytes: Bytes that cross each cut in forward. Backward sends as many in the other direction.
        tasks: The tasks of each rank, with their times.
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
        """Largest memory need of any rank, in bytes."""
        return max(self.rank_bytes)

    @property
    def settings(self) -> tuple[str, ...]:
        """Command-line overrides that configure the pipeline."""
        overrides = [
            "strategy=pipeline",
            f"strategy.num_stages={self.num_ranks}",
            f"strategy.num_microbatches={self.num_microbatches}",
            f"strategy.schedule={self.schedule}",
        ]
        if self.recomputes:
            overrides.append("strategy.checkpoint_activations=true")
        return tuple(overrides)


def pipeline_choices(
    scenario: Scenario,
    blocks: Sequence[Block],
    state: StateBytes,
    *,
    usable_bytes: float | None,
    recomputes: bool = False,
) -> list[PipelineChoice]:
    """Simulate pipelines of 2 to 8 ranks within a node, and return them sorted by step time.

    A pipeline of S ranks takes the images of S data-parallel ranks. The time of a block is proportional to its FLOPs,
    however small the micro-batch is, and messages slow down no computation. Both assumptions favor pipelines.

    Args:
        scenario: The data-parallel run.
        blocks: The blocks of the network.
        state: The bytes per parameter.
        usable_bytes: Memory that each rank may use. Pipelines that need more are left out. None keeps all.
        recomputes: True if each block keeps only its input and runs forward again in backward.
    """
    cluster = scenario.cluster
    choices: list[PipelineChoice] = []
    for num_ranks, rounds, schedule in itertools.product(
        range(2, MOST_STAGES + 1), ROUNDS, STAGES_PER_RANK
    ):
        num_microbatches = num_ranks * rounds
        num_images = num_ranks * scenario.batch_size_per_rank
        fits_in_node = cluster.ranks_per_node % num_ranks == 0
        splits_evenly = num_images % num_microbatches == 0
        has_enough_blocks = num_ranks * STAGES_PER_RANK[schedule] <= len(blocks)
        if not (fits_in_node and splits_evenly and has_enough_blocks):
            continue
        pipeline = _Pipeline(
            scenario=scenario,
            blocks=tuple(blocks),
            state=state,
            recomputes=recomputes,
            schedule=schedule,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
        )
        choice = pipeline.choice(usable_bytes)
        if choice is not None:
            choices.append(choice)
    return sorted(choices, key=lambda choice: choice.step_s)


@dataclass(frozen=True, kw_only=True)
class _BlockLoad:
    # Cost of one block for one micro-batch. `held_bytes` are its weights and their state, during the whole run.
    forward_s: float
    backward_s: float
    kept_bytes: float
    held_bytes: float


@dataclass(frozen=True, kw_only=True)
class _Pipeline:
    scenario: Scenario
    blocks: tuple[Block, ...]
    state: StateBytes
    recomputes: bool
    schedule: str
    num_ranks: int
    num_microbatches: int

    def choice(self, usable_bytes: float | None) -> PipelineChoice | None:
        """Divide the network into pipeline stages, and simulate a step of the pipeline.

        Returns None if the stages do not fit into memory.
        """
        order = schedule_tasks(
            self.schedule,
            self.num_ranks,
            self.num_microbatches,
            stages_per_rank=self.stages_per_rank,
        )
        block_loads = self._block_loads()
        cuts = self._cuts(order, block_loads, usable_bytes)
        if cuts is None:
            return None
        stages = list(itertools.pairwise([0, *cuts, len(self.blocks)]))
        loads = [self._stage_load(block_loads, begin, end) for begin, end in stages]
        tasks = simulate_pipeline(order, loads)

        # Recomputed activations of a block are alive in addition to the inputs. Otherwise the kept bytes include
        # inputs.
        recomputed_bytes = 0.0
        if self.recomputes:
            recomputed_bytes = self.images_per_microbatch * max(
                block.kept_bytes for block in self.blocks
            )
        rank_bytes: list[float] = []
        for rank in range(self.num_ranks):
            held_bytes = sum(
                sum(load.held_bytes for load in block_loads[begin:end])
                for begin, end in stages[rank :: self.num_ranks]
            )
            rank_bytes.append(held_bytes + most_kept_bytes(order[rank], loads) + recomputed_bytes)
        if usable_bytes is not None and max(rank_bytes) > usable_bytes:
            return None

        images = self.images_per_microbatch
        return PipelineChoice(
            schedule=self.schedule,
            num_ranks=self.num_ranks,
            stages_per_rank=self.stages_per_rank,
            num_images=self.num_ranks * self.scenario.batch_size_per_rank,
            num_microbatches=self.num_microbatches,
            recomputes=self.recomputes,
            first_blocks=tuple(self.blocks[cut].name for cut in cuts),
            step_s=pipeline_step_s(tasks, loads) + self._tied_s() + self.scenario.update_s,
            bubble=waiting_share(tasks),
            rank_bytes=tuple(rank_bytes),
            sent_bytes=tuple(
                self.num_microbatches * images * self.blocks[cut].input_bytes for cut in cuts
            ),
            tasks=tuple(map(tuple, tasks)),
        )

    @property
    def stages_per_rank(self) -> int:
        """Number of stages that each rank holds."""
        return STAGES_PER_RANK[self.schedule]

    @property
    def images_per_microbatch(self) -> float:
        """Number of images in a micro-batch."""
        return self.num_ranks * self.scenario.batch_size_per_rank / self.num_microbatches

    def _block_loads(self) -> list[_BlockLoad]:
        scenario = self.scenario
        work = scenario.work()
        compute_s = scenario.cluster.slowdown * (work.forward_s + work.backward_s)
        image_s = compute_s / scenario.batch_size_per_rank
        images = self.images_per_microbatch
        flops = sum(block.forward_flops for block in self.blocks) or 1

        loads: list[_BlockLoad] = []
        for block in self.blocks:
            forward_s = FORWARD_SHARE * image_s * images * block.forward_flops / flops
            kept_bytes = block.input_bytes if self.recomputes else block.kept_bytes
            loads.append(
                _BlockLoad(
                    forward_s=forward_s,
                    backward_s=(1 / FORWARD_SHARE - 1 + self.recomputes) * forward_s,
                    kept_bytes=images * kept_bytes,
                    held_bytes=self.state.per_parameter() * _num_held(block),
                )
            )
        return loads

    def _cuts(
        self,
        order: Sequence[Sequence[PipelineTask]],
        block_loads: Sequence[_BlockLoad],
        usable_bytes: float | None,
    ) -> list[int] | None:
        # Return the first block of each stage except the first, or None if no cuts leave every stage enough memory.
        num_stages = self.num_ranks * self.stages_per_rank
        unit_load = StageLoad(forward_s=0.0, backward_s=0.0, kept_bytes=1.0)
        num_alive = [int(most_kept_bytes(tasks, [unit_load] * num_stages)) for tasks in order]
        # The cuts respect the memory of a stage. A rank with several stages is checked afterwards, by their sum.
        most_bytes = math.inf
        if usable_bytes is not None and self.stages_per_rank == 1:
            most_bytes = usable_bytes
        try:
            return balanced_cuts(
                [load.forward_s + load.backward_s for load in block_loads],
                [load.held_bytes for load in block_loads],
                num_stages,
                activation_bytes=[load.kept_bytes for load in block_loads],
                num_alive=num_alive * self.stages_per_rank,
                most_bytes=most_bytes,
            )
        except ValueError:
            return None

    def _stage_load(self, block_loads: Sequence[_BlockLoad], begin: int, end: int) -> StageLoad:
        stage = block_loads[begin:end]
        scenario = self.scenario
        send_s = 0.0
        if end < len(self.blocks):
            sent_bytes = self.images_per_microbatch * self.blocks[end].input_bytes
            send_s = scenario.cluster.inside.seconds(sent_bytes)
        num_held = sum(_num_held(block) for block in self.blocks[begin:end])
        return StageLoad(
            forward_s=sum(load.forward_s for load in stage),
            backward_s=sum(load.backward_s for load in stage),
            send_s=send_s,
            kept_bytes=sum(load.kept_bytes for load in stage),
            gradient_s=self.group.alone_s(
                scenario.algorithm or "flat", scenario.itemsize * num_held
            ),
        )

    def _tied_s(self) -> float:
        # Time in which the stages that share a weight all-reduce its gradients, once per step.
        num_tied = sum(block.num_tied for block in self.blocks)
        if not num_tied:
            return 0.0
        return self.scenario.cluster.inside.seconds(self.scenario.itemsize * num_tied)

    @property
    def group(self) -> Cluster:
        """Description of the cluster as seen by the ranks that hold the same pipeline stage.

        All such groups of a node share its network cards.
        """
        cluster = self.scenario.cluster
        across = replace(cluster.across, bytes_per_s=cluster.across.bytes_per_s / self.num_ranks)
        return replace(
            cluster, ranks_per_node=cluster.ranks_per_node // self.num_ranks, across=across
        )


def _num_held(block: Block) -> int:
    # A weight that blocks share is held by each of their stages.
    return sum(block.numels) + block.num_tied
