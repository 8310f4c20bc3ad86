"""Memory of a planned run: what a rank needs, whether its device has it, and what to try where it has not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from recipes.cli.markdown import markdown_table
from recipes.planning.activations import has_checkpointing, step_bytes, with_checkpointing
from recipes.planning.blocks import Block, blocks_of
from recipes.planning.estimates.memory import HALF_PRECISIONS, USABLE_SHARE, MemoryNeed, StateBytes, memory_needs
from recipes.planning.layers import WithoutValues
from recipes.planning.parallelism import PipelineChoice
from recipes.planning.scenario import Scenario

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes of a rank.

    Args:
        needs: As asked for, and then what to try, in its order.
        memory_bytes: Of a device; None: unknown.
        batch_size_per_rank: That of the needs.
    """

    state: StateBytes
    blocks: tuple[Block, ...]
    needs: tuple[MemoryNeed, ...]
    memory_bytes: float | None
    batch_size_per_rank: int

    @classmethod
    def of(cls, scenario: Scenario, cfg: DictConfig) -> MemoryReport:
        """Measure the activations of a step on the meta device, and count the rest.

        With re-materialisation they are measured only where they do not fit without: torch imports its compiler for it.
        """
        with WithoutValues():
            model = instantiate(cfg.model)
        state = StateBytes.of(
            precision=cfg.precision,
            optimizer=cfg.optimizer,
            # On CUDA the fused LARS and LAMB are the default, on a CPU they are not.
            copies_gradients=cfg.precision in HALF_PRECISIONS
            and not (scenario.on_cuda and cfg.optimizer in ("lars", "lamb")),
        )
        shape, memory_bytes = list(cfg.image_shape), cfg.cluster.gpu_memory_bytes
        blocks = blocks_of(model, shape, precision=cfg.precision)
        measure = partial(
            step_bytes, image_shape=shape, batch_size=scenario.batch_size_per_rank, precision=cfg.precision
        )
        list_needs = partial(
            memory_needs,
            state,
            [numel for block in blocks for numel in block.numels],
            ranks_per_node=scenario.cluster.ranks_per_node,
            world_size=scenario.cluster.world_size,
            activation_bytes=measure(model),
            largest_block=max(sum(block.numels) for block in blocks),
        )
        needs = list_needs(checkpointed_bytes=None)
        can_checkpoint = has_checkpointing(model) and not model.checkpoint_activations
        if can_checkpoint and memory_bytes is not None and not needs[0].fits(memory_bytes):
            needs = list_needs(checkpointed_bytes=measure(with_checkpointing(model, is_on=True)))
        return cls(
            state=state,
            blocks=tuple(blocks),
            needs=tuple(needs),
            memory_bytes=memory_bytes,
            batch_size_per_rank=scenario.batch_size_per_rank,
        )

    @property
    def usable_bytes(self) -> float | None:
        """What of the device may be planned with; None: unknown."""
        return None if self.memory_bytes is None else USABLE_SHARE * self.memory_bytes

    @property
    def largest_batch(self) -> int | None:
        """The largest batch per rank that fits, as asked for; None: the device is unknown."""
        if self.usable_bytes is None:
            return None
        asked = self.needs[0]
        each = asked.activation_bytes / self.batch_size_per_rank
        return max(0, int((self.usable_bytes - asked.state_bytes) / each))

    @property
    def is_data_parallel_possible(self) -> bool:
        """Whether a rank that holds the whole network fits, with anything of what to try or a smaller batch."""
        if self.memory_bytes is None:
            return True
        return bool(self.largest_batch) or any(need.fits(self.memory_bytes) for need in self.needs)

    def sentence(self, pipelines: Sequence[PipelineChoice], device: str) -> str:
        """Say what is needed; where it does not fit, what to try first, and what of it is enough."""
        asked = self.needs[0]
        text = (
            f"A {device} needs {_gb(asked.total_bytes)} GB: {_gb(asked.state_bytes)} for "
            f"{self.num_parameters / 1e6:,.1f} million parameters, {_gb(asked.activation_bytes)} for activations"
        )
        if self.memory_bytes is None:
            return f"{text}. Whether that fits: give cluster.gpu_memory_bytes=<bytes>."
        room = f"{_gb(self.memory_bytes)} GB, of which a tenth stays free"
        if asked.fits(self.memory_bytes):
            return f"{text}. That fits into {room}; batch_size_per_rank up to {self.largest_batch:,} does."
        tried = []
        for need in self.needs[1:]:
            fits = need.fits(self.memory_bytes)
            end = f", fits: {need.cost}" if fits else ""
            tried.append(f"{' '.join(need.settings)} ({_gb(need.total_bytes)} GB{end})")
            if fits:
                break
        else:
            tried += [
                f"{' '.join(choice.settings)}, in batches of {choice.num_images:,} images "
                f"({_gb(choice.most_bytes)} GB, fits: the bubble is {choice.bubble:.1%})"
                for choice in pipelines[:1]
            ]
            if not pipelines:
                tried.append("a smaller network or larger GPUs, as no pipeline in a node fits either")
        smaller = ""
        if self.largest_batch:
            smaller = f" Or batch_size_per_rank={self.largest_batch}, and accumulate the rest of the global batch."
        return f"{text}. That does not fit into {room}. Try, in this order: {', '.join(tried)}.{smaller}"

    @property
    def num_parameters(self) -> int:
        """Parameters of the network."""
        return sum(sum(block.numels) for block in self.blocks)

    def table(self) -> str:
        """Format what was counted, as asked for and under each setting to try."""
        rows = []
        for need in self.needs:
            fits = "" if self.memory_bytes is None else "yes" if need.fits(self.memory_bytes) else "no"
            sizes = (need.state_bytes, need.activation_bytes, need.total_bytes)
            rows.append([" ".join(need.settings) or "as asked for", *map(_gb, sizes), fits, need.cost])
        return markdown_table(["memory of a rank", "state GB", "activations GB", "GB", "fits", "cost"], rows)

    def numbers(self) -> dict[str, Any]:
        """Return what is written to simulate.json."""
        return {
            "memory_bytes": self.memory_bytes,
            "largest_batch_size_per_rank": self.largest_batch,
            "needs": [
                {
                    "settings": list(need.settings),
                    "state_bytes": need.state_bytes,
                    "activation_bytes": need.activation_bytes,
                }
                for need in self.needs
            ],
        }


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:,.3g}"
