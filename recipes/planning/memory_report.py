"""Memory of a planned run: what a rank needs, whether its device has it, and what to try where it has not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn

from recipes.cli.markdown import markdown_table
from recipes.planning.activations import has_checkpointing, step_bytes, tracked_bytes, with_checkpointing
from recipes.planning.blocks import Block, blocks_of
from recipes.planning.estimates.memory import (
    HALF_PRECISIONS,
    USABLE_SHARE,
    MemoryChoices,
    MemoryNeed,
    StateBytes,
    largest_batches,
)
from recipes.planning.layers import WithoutValues
from recipes.planning.parallelism import PipelineChoice
from recipes.planning.scenario import Scenario
from recipes.training.fully_sharded import gathered_alone

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes of a rank.

    Args:
        asked: What was asked for.
        alone: What else may be set, one at a time, in the order in which to try it; of devices that have no room.
        fitting: Combinations that fit, in the largest batch: the fewest settings first, then the least time.
        memory_bytes: Of a device; None: unknown.
        step_s: Of a step as asked for.
        tracked: Bytes of activations by torch's tracker, by `kind` and `batch_size` of a need.
    """

    state: StateBytes
    blocks: tuple[Block, ...]
    asked: MemoryNeed
    alone: tuple[MemoryNeed, ...]
    fitting: tuple[MemoryNeed, ...]
    memory_bytes: float | None
    step_s: float
    tracked: Mapping[tuple[tuple[str, bool], int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, scenario: Scenario, cfg: DictConfig, *, step_s: float) -> MemoryReport:
        """Measure the activations of a step on the meta device, and count the rest.

        Other settings are measured only where it does not fit without: torch imports its compiler for
        re-materialisation.
        """
        with WithoutValues():
            model = instantiate(cfg.model)
        optimizer = cfg.optimizer or ("lamb" if hasattr(model, "example") else "lars")
        states = {
            precision: StateBytes.of(
                precision=precision,
                optimizer=optimizer,
                # On CUDA the fused LARS and LAMB are the default, on a CPU they are not.
                copies_gradients=precision in HALF_PRECISIONS
                and not (scenario.on_cuda and optimizer in ("lars", "lamb")),
            )
            for precision in dict.fromkeys([cfg.precision, *(["16-true"] if cfg.precision == "32-true" else [])])
        }
        shape, memory_bytes = list(cfg.image_shape), cfg.cluster.gpu_memory_bytes
        blocks = blocks_of(model, shape, precision=cfg.precision)
        cluster, weight_bytes = scenario.cluster, states[cfg.precision].weights * sum(sum(b.numels) for b in blocks)
        batch_size = scenario.batch_size_per_rank

        def measured(network: nn.Module, precision: str) -> tuple[float, float]:
            one, whole = (step_bytes(network, shape, batch_size=n, precision=precision) for n in (1, batch_size))
            return one, whole

        in_blocks = [sum(map(torch.numel, block.parameters())) for block in gathered_alone(model)]
        choices = MemoryChoices(
            states=states,
            activations={(cfg.precision, False): measured(model, cfg.precision)},
            batch_size=batch_size,
            numels=[numel for block in blocks for numel in block.numels],
            ranks_per_node=cluster.ranks_per_node,
            world_size=cluster.world_size,
            largest_block=max(in_blocks, default=0) + sum(map(torch.numel, model.parameters())) - sum(in_blocks),
            forward_s=scenario.work().forward_s,
            gather_s=cluster.of(1).alone_s("flat", weight_bytes) / 2,
            gather_all_s=cluster.alone_s("flat", weight_bytes) / 2,
        )
        asked = choices.needs()[0]
        alone, fitting = [], [asked]
        if memory_bytes is not None and not asked.fits(memory_bytes):
            can_checkpoint = has_checkpointing(model) and not model.checkpoint_activations
            networks = {False: model} | ({True: with_checkpointing(model, is_on=True)} if can_checkpoint else {})
            found = {(each, again): measured(one, each) for each in states for again, one in networks.items()}
            choices = replace(choices, activations=found)
            alone = choices.alone(memory_bytes)
            fitting = [one for one in largest_batches(choices.needs(), memory_bytes) if one.fits(memory_bytes)]
        tracked = dict[tuple[tuple[str, bool], int], int]()
        for need in (asked, *alone, *fitting):
            if cfg.track_memory and (need.kind, need.batch_size) not in tracked:
                precision, again = need.kind
                network = with_checkpointing(model, is_on=True) if again else model
                tracked[need.kind, need.batch_size] = tracked_bytes(
                    network, shape, batch_size=need.batch_size, precision=precision
                )
        return cls(
            state=states[cfg.precision],
            blocks=tuple(blocks),
            asked=asked,
            alone=tuple(alone),
            fitting=tuple(fitting),
            memory_bytes=memory_bytes,
            step_s=step_s,
            tracked=tracked,
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
        each = self.asked.activation_bytes / self.asked.batch_size
        return max(0, int((self.usable_bytes - self.asked.state_bytes) / each))

    @property
    def is_data_parallel_possible(self) -> bool:
        """Whether a rank that holds the whole network fits, with anything of what to try."""
        return self.memory_bytes is None or bool(self.fitting)

    def sentence(self, pipelines: Sequence[PipelineChoice], device: str) -> str:
        """Say what is needed; where it does not fit, what each setting saves and costs, and the smallest list."""
        asked = self.asked
        text = (
            f"A {device} needs {_gb(asked.total_bytes)} GB: {_gb(asked.state_bytes)} for "
            f"{self.num_parameters / 1e6:,.1f} million parameters, {_gb(asked.activation_bytes)} for activations"
        )
        if self.memory_bytes is None:
            return f"{text}. Whether that fits: give cluster.gpu_memory_bytes=<bytes>."
        room = f"{_gb(self.memory_bytes)} GB, of which a tenth stays free"
        if asked.fits(self.memory_bytes):
            return f"{text}. That fits into {room}; batch_size_per_rank up to {self.largest_batch:,} does."
        tried = [
            f"{' '.join(need.settings)} (saves {_gb(asked.total_bytes - need.total_bytes)} GB, {self._time(need)}"
            f"{', fits' if need.fits(self.memory_bytes) else ''})"
            for need in self.alone
        ]
        words = [f"{text}. That does not fit into {room}. Try, in this order: {', '.join(tried)}."] if tried else [text]
        if self.fitting:
            words.append(f"The smallest list that fits: {self._list(self.fitting[0])}.")
            whole = next((need for need in self.fitting if need.batch_size == asked.batch_size), None)
            if whole not in (None, self.fitting[0]):
                words.append(f"With the batch at once: {self._list(whole)}.")
        elif pipelines:
            words.append(
                f"No list of these fits; {' '.join(pipelines[0].settings)}, in batches of {pipelines[0].num_images:,} "
                f"images, does ({_gb(pipelines[0].most_bytes)} GB, the bubble is {pipelines[0].bubble:.1%})."
            )
        else:
            words.append("No list of these fits, nor a pipeline in a node: take a smaller network or larger GPUs.")
        return " ".join(words)

    def _list(self, need: MemoryNeed) -> str:
        return f"{' '.join(need.settings)} ({_gb(need.total_bytes)} GB, {self._time(need)})"

    def _time(self, need: MemoryNeed) -> str:
        least = "at least " if any("offload" in each for each in need.settings) else ""  # the host's update
        return f"{least}{need.extra_s / self.step_s:.1%} more time" if need.extra_s else "no more time"

    @property
    def num_parameters(self) -> int:
        """Parameters of the network."""
        return sum(sum(block.numels) for block in self.blocks)

    def table(self) -> str:
        """Format what was counted: as asked for, with each setting alone, and all lists that fit."""
        rows = []
        lists = [need for need in self.fitting if need != self.asked and need not in self.alone]
        for need in (self.asked, *self.alone, *lists):
            fits = "" if self.memory_bytes is None else "yes" if need.fits(self.memory_bytes) else "no"
            sizes = [need.state_bytes, need.activation_bytes, need.total_bytes]
            sizes += [need.state_bytes + self.tracked[need.kind, need.batch_size]] if self.tracked else []
            rows.append([" ".join(need.settings) or "as asked for", *map(_gb, sizes), fits, self._time(need)])
        header = ["memory of a rank", "state GB", "activations GB", "GB", *(["tracked GB"] if self.tracked else [])]
        return markdown_table([*header, "fits", "costs"], rows)

    def numbers(self) -> dict[str, Any]:
        """Return what is written to simulate.json."""
        lists = {"asked": (self.asked,), "alone": self.alone, "fitting": self.fitting}
        return {
            "memory_bytes": self.memory_bytes,
            "largest_batch_size_per_rank": self.largest_batch,
            **{name: [self._numbers(one) for one in needs] for name, needs in lists.items()},
        }

    def _numbers(self, need: MemoryNeed) -> dict[str, Any]:
        return asdict(need) | {"tracked_activation_bytes": self.tracked.get((need.kind, need.batch_size))}


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:,.3g}"
