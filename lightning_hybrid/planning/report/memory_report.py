"""Memory of a planned run: what a rank needs, whether its device has it, and what to try where it has not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from lightning_hybrid.formatting import markdown_table
from lightning_hybrid.planning.estimates.activations import (
    has_checkpointing,
    step_bytes,
    tracked_bytes,
    with_checkpointing,
)
from lightning_hybrid.planning.estimates.blocks import Block, traced_blocks
from lightning_hybrid.planning.estimates.memory import (
    HALF_PRECISIONS,
    USABLE_SHARE,
    MemoryChoices,
    MemoryNeed,
    StateBytes,
    largest_batches,
)
from lightning_hybrid.planning.estimates.parallelism import PipelineChoice
from lightning_hybrid.planning.estimates.scenario import Scenario

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Settings of a run on which the memory of a rank depends, and the device.

    Args:
        precision: Lightning's name of it.
        optimizer: Its state is counted; None: LAMB for text, otherwise LARS.
        image_shape: Shape of an image, or of what the network's own `example` takes.
        gathered_numels: Number of elements of each block that FSDP2 gathers on its own.
        memory_bytes: Of a device; None: unknown.
        is_tracked: Torch's memory tracker measures each need too, which takes seconds.
    """

    precision: str
    image_shape: Sequence[int]
    gathered_numels: Sequence[int]
    optimizer: str | None = None
    memory_bytes: float | None = None
    is_tracked: bool = False


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
    def of(
        cls, scenario: Scenario, network: nn.Module, settings: MemorySettings, *, step_s: float
    ) -> MemoryReport:
        """Measure the activations of a step on the meta device, and count the rest.

        Other settings are measured only where it does not fit without: torch imports its compiler for
        re-materialisation.
        """
        asked_precision = settings.precision
        shape = list(settings.image_shape)
        memory_bytes = settings.memory_bytes
        optimizer = settings.optimizer
        if optimizer is None:
            optimizer = "lamb" if hasattr(network, "example") else "lars"
        precisions = [asked_precision]
        if asked_precision == "32-true":
            precisions.append("16-true")
        states = {
            precision: StateBytes.of(
                precision=precision,
                optimizer=optimizer,
                # On CUDA the fused LARS and LAMB are the default, on a CPU they are not.
                copies_gradients=precision in HALF_PRECISIONS
                and not (scenario.on_cuda and optimizer in ("lars", "lamb")),
            )
            for precision in precisions
        }
        blocks = traced_blocks(network, shape, precision=asked_precision)
        cluster = scenario.cluster
        weight_bytes = states[asked_precision].weights * sum(sum(block.numels) for block in blocks)
        batch_size = scenario.batch_size_per_rank

        def measured(variant: nn.Module, precision: str) -> tuple[float, float]:
            one_image = step_bytes(variant, shape, batch_size=1, precision=precision)
            whole_batch = step_bytes(variant, shape, batch_size=batch_size, precision=precision)
            return one_image, whole_batch

        num_parameters = sum(parameter.numel() for parameter in network.parameters())
        num_left = num_parameters - sum(settings.gathered_numels)
        choices = MemoryChoices(
            states=states,
            activations={(asked_precision, False): measured(network, asked_precision)},
            batch_size=batch_size,
            numels=[numel for block in blocks for numel in block.numels],
            ranks_per_node=cluster.ranks_per_node,
            world_size=cluster.world_size,
            largest_block=max(settings.gathered_numels, default=0) + num_left,
            forward_s=scenario.work().forward_s,
            gather_s=cluster.of(1).alone_s("flat", weight_bytes) / 2,
            gather_all_s=cluster.alone_s("flat", weight_bytes) / 2,
        )
        asked = choices.needs()[0]
        alone = []
        fitting = [asked]
        if memory_bytes is not None and not asked.fits(memory_bytes):
            variants = {False: network}
            if has_checkpointing(network) and not network.checkpoint_activations:
                variants[True] = with_checkpointing(network, is_on=True)
            activations = {}
            for precision in states:
                for is_checkpointed, variant in variants.items():
                    activations[precision, is_checkpointed] = measured(variant, precision)
            choices = replace(choices, activations=activations)
            alone = choices.alone(memory_bytes)
            fitting = [
                need
                for need in largest_batches(choices.needs(), memory_bytes)
                if need.fits(memory_bytes)
            ]
        tracked = dict[tuple[tuple[str, bool], int], int]()
        for need in (asked, *alone, *fitting):
            if settings.is_tracked and (need.kind, need.batch_size) not in tracked:
                precision, is_checkpointed = need.kind
                variant = with_checkpointing(network, is_on=True) if is_checkpointed else network
                tracked[need.kind, need.batch_size] = tracked_bytes(
                    variant, shape, batch_size=need.batch_size, precision=precision
                )
        return cls(
            state=states[asked_precision],
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
        """The bytes of the device that a plan may use. None: unknown."""
        return None if self.memory_bytes is None else USABLE_SHARE * self.memory_bytes

    @property
    def largest_batch(self) -> int | None:
        """The largest batch per rank that fits, as asked for. None: the device is unknown."""
        if self.usable_bytes is None:
            return None
        each = self.asked.activation_bytes / self.asked.batch_size
        return max(0, int((self.usable_bytes - self.asked.state_bytes) / each))

    @property
    def is_data_parallel_possible(self) -> bool:
        """True if a rank that holds the whole network fits under some of the settings."""
        return self.memory_bytes is None or bool(self.fitting)

    def sentence(self, pipelines: Sequence[PipelineChoice], device: str) -> str:
        """Say what is needed. Where it does not fit, what each setting saves and costs, and the smallest list."""
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
        words = (
            [f"{text}. That does not fit into {room}. Try, in this order: {', '.join(tried)}."]
            if tried
            else [text]
        )
        if self.fitting:
            words.append(f"The smallest list that fits: {self._list(self.fitting[0])}.")
            whole = next(
                (need for need in self.fitting if need.batch_size == asked.batch_size), None
            )
            if whole not in (None, self.fitting[0]):
                words.append(f"With the batch at once: {self._list(whole)}.")
        elif pipelines:
            words.append(
                f"No list of these fits; {' '.join(pipelines[0].settings)}, in batches of {pipelines[0].num_images:,} "
                f"images, does ({_gb(pipelines[0].most_bytes)} GB, the bubble is {pipelines[0].bubble:.1%})."
            )
        else:
            words.append(
                "No list of these fits, nor a pipeline in a node: take a smaller network or larger GPUs."
            )
        return " ".join(words)

    def _list(self, need: MemoryNeed) -> str:
        return f"{' '.join(need.settings)} ({_gb(need.total_bytes)} GB, {self._time(need)})"

    def _time(self, need: MemoryNeed) -> str:
        least = (
            "at least " if any("offload" in each for each in need.settings) else ""
        )  # the host's update
        return (
            f"{least}{need.extra_s / self.step_s:.1%} more time" if need.extra_s else "no more time"
        )

    @property
    def num_parameters(self) -> int:
        """Parameters of the network."""
        return sum(sum(block.numels) for block in self.blocks)

    def table(self) -> str:
        """Format what was counted: as asked for, with each setting alone, and all lists that fit."""
        rows = []
        lists = [need for need in self.fitting if need != self.asked and need not in self.alone]
        for need in (self.asked, *self.alone, *lists):
            fits = (
                "" if self.memory_bytes is None else "yes" if need.fits(self.memory_bytes) else "no"
            )
            sizes = [need.state_bytes, need.activation_bytes, need.total_bytes]
            sizes += (
                [need.state_bytes + self.tracked[need.kind, need.batch_size]]
                if self.tracked
                else []
            )
            rows.append(
                [
                    " ".join(need.settings) or "as asked for",
                    *map(_gb, sizes),
                    fits,
                    self._time(need),
                ]
            )
        header = [
            "memory of a rank",
            "state GB",
            "activations GB",
            "GB",
            *(["tracked GB"] if self.tracked else []),
        ]
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
        return asdict(need) | {
            "tracked_activation_bytes": self.tracked.get((need.kind, need.batch_size))
        }


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:,.3g}"
