"""Report on the memory that a rank needs, and on settings to try if it does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from lightning_hybrid.formatting import markdown_table
from lightning_hybrid.planning.estimates.activations import (
    has_checkpointing,
    step_bytes,
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
    """Settings of a run that determine how much memory a rank needs.

    Args:
        precision: Lightning's name of the precision.
        image_shape: Shape of an image, or of the input that the network's own `example` takes.
        gathered_numels: Number of elements of each block that FSDP2 gathers at once.
        optimizer: Name of the optimizer, whose state is counted. None stands for LAMB with text and LARS otherwise.
        memory_bytes: Memory of a device. None if it is unknown.
    """

    precision: str
    image_shape: Sequence[int]
    gathered_numels: Sequence[int]
    optimizer: str | None = None
    memory_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Memory that a rank needs with the configured settings and with other settings.

    Args:
        state: The bytes per parameter.
        blocks: The blocks of the network.
        asked: The memory with the configured settings.
        alone: The memory with one changed setting each, in the order in which to try them. Empty if the run fits.
        fitting: Combinations of settings that fit, each with its largest batch. Those with the fewest settings come
            first, then those that take the least time.
        memory_bytes: Memory of a device. None if it is unknown.
        largest_batch: Largest batch per rank that fits with the configured settings. None if the memory is unknown.
        step_s: Time of a step with the settings of the run, in seconds.
    """

    state: StateBytes
    blocks: tuple[Block, ...]
    asked: MemoryNeed
    alone: tuple[MemoryNeed, ...]
    fitting: tuple[MemoryNeed, ...]
    memory_bytes: float | None
    largest_batch: int | None
    step_s: float

    @classmethod
    def of(
        cls, scenario: Scenario, network: nn.Module, settings: MemorySettings, *, step_s: float
    ) -> MemoryReport:
        """Measure the activations of a step on the meta device, and calculate the memory for training state.

        Other settings are measured only if the run does not fit without them, because torch imports its compiler for
        activation checkpointing.
        """
        asked_precision = settings.precision
        memory_bytes = settings.memory_bytes
        states = _states(scenario, network, settings)
        blocks = traced_blocks(network, settings.image_shape, precision=asked_precision)
        choices = _choices(scenario, network, settings, states=states, blocks=blocks)
        asked = choices.needs()[0]
        largest_batch = None
        if memory_bytes is not None:
            largest_batch = choices.largest_batch(memory_bytes)
        alone: Sequence[MemoryNeed] = ()
        fitting: Sequence[MemoryNeed] = (asked,)
        if memory_bytes is not None and not asked.fits(memory_bytes):
            choices = _with_other_activations(choices, network, settings)
            alone = choices.alone(memory_bytes)
            fitting = [
                need
                for need in largest_batches(choices.needs(), memory_bytes)
                if need.fits(memory_bytes)
            ]

        return cls(
            state=states[asked_precision],
            blocks=tuple(blocks),
            asked=asked,
            alone=tuple(alone),
            fitting=tuple(fitting),
            memory_bytes=memory_bytes,
            largest_batch=largest_batch,
            step_s=step_s,
        )

    @property
    def usable_bytes(self) -> float | None:
        """Device memory that a run may use, in bytes, or None if the device is unknown."""
        if self.memory_bytes is None:
            return None
        return USABLE_SHARE * self.memory_bytes

    @property
    def is_data_parallel_possible(self) -> bool:
        """True if data-parallel training fits into memory under some combination of settings."""
        return self.memory_bytes is None or bool(self.fitting)

    def sentence(self, pipelines: Sequence[PipelineChoice], device: str) -> str:
        """Return a description of the memory that a rank needs.

        If it does not fit, the text says what each setting saves and costs, and names the shortest
        list of settings that fits.
        """
        asked = self.asked
        text = (
            f"A {device} needs {_gb(asked.total_bytes)} GB: {_gb(asked.state_bytes)} for "
            f"{self.num_parameters / 1e6:,.1f} million parameters, {_gb(asked.activation_bytes)} for activations"
        )
        if self.memory_bytes is None:
            return f"{text}. To see whether that fits, set cluster.gpu_memory_bytes=<bytes>."
        room = f"{_gb(self.memory_bytes)} GB, of which a tenth stays free"
        if asked.fits(self.memory_bytes):
            return f"{text}. That fits into {room}, and so does any batch_size_per_rank up to {self.largest_batch:,}."
        sentences = [text]
        if self.alone:
            settings = ", ".join(self._saving(need, self.memory_bytes) for need in self.alone)
            sentences = [f"{text}. That does not fit into {room}. Try, in this order: {settings}."]
        if self.fitting:
            smallest = self.fitting[0]
            sentences.append(f"The shortest list of settings that fits: {self._list(smallest)}.")
            whole_batches = [need for need in self.fitting if need.batch_size == asked.batch_size]
            if whole_batches and whole_batches[0] != smallest:
                sentences.append(f"Without a smaller batch: {self._list(whole_batches[0])}.")
        elif pipelines:
            fastest = pipelines[0]
            sentences.append(
                f"No combination of these fits, but {' '.join(fastest.settings)}, in batches of {fastest.num_images:,} "
                f"images, does ({_gb(fastest.most_bytes)} GB, the bubble is {fastest.bubble:.1%})."
            )
        else:
            sentences.append(
                "Neither a combination of these nor a pipeline in a node fits. Use a smaller network or larger GPUs."
            )
        return " ".join(sentences)

    def _saving(self, need: MemoryNeed, memory_bytes: float) -> str:
        saved_bytes = self.asked.total_bytes - need.total_bytes
        facts = [f"saves {_gb(saved_bytes)} GB", self._time(need)]
        if need.fits(memory_bytes):
            facts.append("fits")
        return f"{' '.join(need.settings)} ({', '.join(facts)})"

    def _list(self, need: MemoryNeed) -> str:
        return f"{' '.join(need.settings)} ({_gb(need.total_bytes)} GB, {self._time(need)})"

    def _time(self, need: MemoryNeed) -> str:
        if not need.extra_s:
            return "no extra time"
        more_time = f"{need.extra_s / self.step_s:.1%} more time"
        # The time of the update on the host is not counted.
        if any("offload" in setting for setting in need.settings):
            return f"at least {more_time}"
        return more_time

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the network."""
        return sum(sum(block.numels) for block in self.blocks)

    def table(self) -> str:
        """Return a Markdown table of memory needs with the configured settings and with alternatives."""
        lists = [need for need in self.fitting if need != self.asked and need not in self.alone]
        header = ["memory of a rank", "state GB", "activations GB", "GB", "fits", "costs"]
        rows = [self._row(need) for need in (self.asked, *self.alone, *lists)]
        return markdown_table(header, rows)

    def _row(self, need: MemoryNeed) -> list[str]:
        sizes = [need.state_bytes, need.activation_bytes, need.total_bytes]
        fits = ""
        if self.memory_bytes is not None:
            fits = "yes" if need.fits(self.memory_bytes) else "no"
        name = " ".join(need.settings) or "as configured"
        return [name, *map(_gb, sizes), fits, self._time(need)]

    def numbers(self) -> dict[str, Any]:
        """Return the memory needs as a dictionary for `simulate.json`."""
        return {
            "memory_bytes": self.memory_bytes,
            "largest_batch_size_per_rank": self.largest_batch,
            "asked": [asdict(self.asked)],
            "alone": [asdict(need) for need in self.alone],
            "fitting": [asdict(need) for need in self.fitting],
        }


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:,.3g}"


def _states(
    scenario: Scenario, network: nn.Module, settings: MemorySettings
) -> dict[str, StateBytes]:
    # Bytes per parameter in the precision of the run, and also in half precision if the run is in fp32.
    optimizer = settings.optimizer
    if optimizer is None:
        optimizer = "lamb" if hasattr(network, "example") else "lars"
    precisions = [settings.precision]
    if settings.precision == "32-true":
        precisions.append("16-true")
    # The fused LARS and LAMB are the default on CUDA only.
    is_fused = scenario.on_cuda and optimizer in ("lars", "lamb")
    states: dict[str, StateBytes] = {}
    for precision in precisions:
        states[precision] = StateBytes.of(
            precision=precision,
            optimizer=optimizer,
            copies_gradients=precision in HALF_PRECISIONS and not is_fused,
        )
    return states


def _choices(
    scenario: Scenario,
    network: nn.Module,
    settings: MemorySettings,
    *,
    states: Mapping[str, StateBytes],
    blocks: Sequence[Block],
) -> MemoryChoices:
    # Return the choices, with measured activations of the configured run only.
    cluster = scenario.cluster
    precision = settings.precision
    weight_bytes = states[precision].weights * sum(sum(block.numels) for block in blocks)
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    num_outside_blocks = num_parameters - sum(settings.gathered_numels)
    batch_size = scenario.batch_size_per_rank
    activations = _activation_bytes(network, settings, precision, batch_size=batch_size)
    return MemoryChoices(
        states=states,
        activations={(precision, False): activations},
        batch_size=batch_size,
        numels=[numel for block in blocks for numel in block.numels],
        ranks_per_node=cluster.ranks_per_node,
        world_size=cluster.world_size,
        largest_block=max(settings.gathered_numels, default=0) + num_outside_blocks,
        forward_s=scenario.work().forward_s,
        gather_s=cluster.of(1).alone_s("flat", weight_bytes) / 2,
        gather_all_s=cluster.alone_s("flat", weight_bytes) / 2,
    )


def _with_other_activations(
    choices: MemoryChoices, network: nn.Module, settings: MemorySettings
) -> MemoryChoices:
    # Measure the activations in each precision, with and without activation checkpointing.
    variants = {False: network}
    if has_checkpointing(network) and not network.checkpoint_activations:
        variants[True] = with_checkpointing(network, is_on=True)
    activations: dict[tuple[str, bool], tuple[float, float]] = {}
    for precision in choices.states:
        for is_checkpointed, variant in variants.items():
            activations[precision, is_checkpointed] = _activation_bytes(
                variant, settings, precision, batch_size=choices.batch_size
            )
    return replace(choices, activations=activations)


def _activation_bytes(
    network: nn.Module, settings: MemorySettings, precision: str, *, batch_size: int
) -> tuple[float, float]:
    # The bytes with one image, and with the whole batch.
    shape = list(settings.image_shape)
    one_image = step_bytes(network, shape, batch_size=1, precision=precision)
    whole_batch = step_bytes(network, shape, batch_size=batch_size, precision=precision)
    return one_image, whole_batch
