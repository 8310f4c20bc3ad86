"""Estimates of the memory that a rank needs for training, and of settings that reduce it.

    parameters    weights, fp32 master weights, gradients, optimizer state: bytes per parameter, by dtype alone
    activations   tensors that forward keeps for backward, with or without checkpointing: measured by the caller
    free          `1 - USABLE_SHARE` of the device, which is not counted

The bytes per parameter hold between two steps, as measured in recipes/records/memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_hybrid.checks import require_choice, require_whole
from lightning_hybrid.placement import BLOCK, is_split

HALF_PRECISIONS = ("16-true", "bf16-true")
STATE_BYTES = {"sgd": 4, "lars": 4, "adamw": 8, "lamb": 8}
"""Bytes of optimizer state per parameter: fp32 momentum for SGD and LARS, two fp32 moments for AdamW and LAMB."""

REST_BYTES = 0.1
"""Bytes of the engine's buffers per parameter, which are 0.06 to 0.11 in recipes/records/memory."""

USABLE_SHARE = 0.9
"""Fraction of a device's memory that training may use, leaving room for the context, workspaces and fragments."""

HOST_LINK_BYTES_PER_S = 15.75e9
"""Bandwidth between device and host memory in each direction, which is that of PCI Express 3.0 with 16 lanes."""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes per parameter that a rank stores between steps, for each kind of training state.

    With Psi parameters, and the fraction of each kind that a rank holds:

        bytes = (weights weight_share + gradients gradient_share + (masters + optimizer) state_share + rest) Psi

    ZeRO's stages 1, 2, 3 over N ranks hold 1/N of the state, then also of gradients, then also of weights
    (Rajbhandari et al. 2019, arXiv:1910.02054). Master weights and moments are its K = 12.

    >>> adam_fp16 = StateBytes(weights=2, gradients=2, masters=4, optimizer=8, rest=0)
    >>> adam_fp16.per_parameter(), adam_fp16.per_parameter(state_share=1 / 64)
    (16.0, 4.1875)
    """

    weights: float
    gradients: float
    masters: float
    optimizer: float
    rest: float = REST_BYTES

    @classmethod
    def of(cls, *, precision: str, optimizer: str, copies_gradients: bool) -> StateBytes:
        """Return the bytes per parameter that training with `HybridAllReduceStrategy` needs between steps.

        Args:
            precision: Precision of the trainer. With `"16-true"` and `"bf16-true"` master weights are fp32.
            optimizer: One of `STATE_BYTES`.
            copies_gradients: Whether the optimizer needs fp32 gradients in half precision, in addition to those in the
                buckets. LARS and LAMB need none on CUDA, and none on a CPU with `fused=True`.

        Raises:
            ValueError: `precision` or `optimizer` is unknown.

        >>> fused = StateBytes.of(precision="16-true", optimizer="lars", copies_gradients=False)
        >>> round(fused.per_parameter(), 1), round(fused.per_parameter(state_share=1 / 2), 1)
        (12.1, 8.1)
        """
        require_choice(
            "precision",
            precision,
            (*HALF_PRECISIONS, "32-true"),
            "memory was measured only for these precisions",
        )
        require_choice(
            "optimizer",
            optimizer,
            tuple(STATE_BYTES),
            "the state size is known only for these optimizers",
        )
        state = STATE_BYTES[optimizer]
        if precision == "32-true":
            return cls(weights=4, gradients=4, masters=0, optimizer=state)
        return cls(
            weights=2, gradients=2 + (4 if copies_gradients else 0), masters=4, optimizer=state
        )

    def per_parameter(
        self, *, weight_share: float = 1.0, gradient_share: float = 1.0, state_share: float = 1.0
    ) -> float:
        """Return the total bytes per parameter if a rank holds the given fractions of each kind of state."""
        state = self.masters + self.optimizer
        return (
            self.weights * weight_share
            + self.gradients * gradient_share
            + state * state_share
            + self.rest
        )

    def fully_sharded(self, num_ranks: int) -> float:
        """Return the bytes per parameter with torch's `fully_shard` (FSDP2), between steps.

        Weights, gradients and state are fp32, and each rank holds 1 / N of them. Parameters
        gathered for a block come on top. The result is calculated, not measured.
        """
        return (4 + 4 + self.optimizer) / num_ranks


def shared_share(numels: Sequence[int], num_ranks: int, *, is_world: bool = False) -> float:
    """Return the fraction of master weights and optimizer state that each rank holds if updates are sharded.

        sigma / k + 1 - sigma          sigma: fraction of elements in tensors of at least k shards (world: two shards)

    Smaller tensors stay whole on each rank.

    >>> shared_share([8 * 2**14], 8), shared_share([7 * 2**14], 8), shared_share([7 * 2**14], 8, is_world=True)
    (0.125, 1.0, 0.125)
    """
    require_whole("num_ranks", num_ranks, "updates are divided among this number of ranks")
    split = sum(numel for numel in numels if is_split(numel, 2 if is_world else num_ranks, BLOCK))
    sigma = split / max(1, sum(numels))
    return sigma / num_ranks + 1 - sigma


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Memory that a rank needs with given settings.

    Args:
        settings: Settings for the command line that differ from the configured ones. Empty: as configured.
        state_bytes: Bytes of weights, master weights, gradients, optimizer state and communication buffers.
        activation_bytes: Peak bytes of a step in addition, kept for backward or temporary.
        batch_size: Number of images that a rank processes at a time.
        kind: Precision, and whether activations are checkpointed.
        extra_s: Additional time of a step of the whole batch, in seconds.
    """

    settings: tuple[str, ...]
    state_bytes: float
    activation_bytes: float
    batch_size: int = 1
    kind: tuple[str, bool] = ("16-true", False)
    extra_s: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Total memory in bytes, for training state and activations."""
        return self.state_bytes + self.activation_bytes

    def fits(self, memory_bytes: float) -> bool:
        """Return whether the memory need fits into the usable memory of a device."""
        return self.total_bytes <= USABLE_SHARE * memory_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryChoices:
    """Combinations of settings that reduce the memory of a data-parallel rank.

        activations = constant + slope * batch         by a step of one image and one of the batch

    There are about a hundred combinations, so no solver is needed.

    Args:
        states: Bytes per parameter in each precision. The configured precision comes first.
        activations: Bytes of a step of one image and of the whole batch, by precision and by whether activations are
            checkpointed. Entries with checkpointing exist if the network supports it.
        batch_size: Number of images of a rank in a step. Smaller batches accumulate gradients, which is assumed to
            take no more time.
        numels: Number of elements of each parameter.
        ranks_per_node: Number of ranks that may share the update inside a node.
        world_size: Number of ranks over which everything may be sharded.
        largest_block: Number of elements of the largest block of the network that `fully_shard` gathers at once.
        forward_s: Time of a step's forward pass, which activation checkpointing repeats.
        gather_s: Time to all-gather all weights in a node, after a sharded update.
        gather_all_s: Time to all-gather all weights over all ranks. `fully_shard` gathers twice and reduce-scatters
            once, while an all-reduce costs two of them. With an update sharded over the world, forward hides the
            gather as long as forward lasts.
    """

    states: Mapping[str, StateBytes]
    activations: Mapping[tuple[str, bool], tuple[float, float]]
    batch_size: int
    numels: Sequence[int]
    ranks_per_node: int = 1
    world_size: int = 1
    largest_block: int = 0
    forward_s: float = 0.0
    gather_s: float = 0.0
    gather_all_s: float = 0.0

    def need(
        self,
        precision: str,
        batch_size: int,
        *,
        again: bool = False,
        sharing: Literal["", "node", "world", "fsdp2", "host"] = "",
    ) -> MemoryNeed:
        """Return the memory that a rank needs with one combination of settings.

        `again` switches activation checkpointing on. `sharing` is where updates or parameters are
        sharded: `""` (nowhere), `"node"`, `"world"`, `"fsdp2"` or `"host"` (FSDP2 with offload).
        """
        state = self.states[precision]
        total = sum(self.numels)
        first, whole = self.activations[precision, again]
        slope = (whole - first) / max(1, self.batch_size - 1)
        activation_bytes = whole - slope * (self.batch_size - batch_size)
        bytes_each = state.per_parameter()
        if sharing == "node":
            bytes_each = state.per_parameter(
                state_share=shared_share(self.numels, self.ranks_per_node)
            )
        elif sharing == "world":
            share = shared_share(self.numels, self.world_size, is_world=True)
            # Gathered weights are freed as activations grow, so the larger of the two counts.
            bytes_each = state.per_parameter(state_share=share) + max(
                0.0, state.weights - activation_bytes / max(1, total)
            )
        elif sharing:
            # Two gathered blocks, the current and the next, and the fp32 gradients of the current block.
            bytes_each = (3 * state.weights + 4) * self.largest_block / max(1, total)
            bytes_each += state.fully_sharded(self.world_size) if sharing == "fsdp2" else 0.0
        settings = {
            f"precision={precision}": precision != next(iter(self.states)),
            f"batch_size_per_rank={batch_size}": batch_size != self.batch_size,
            f"strategy.shard_update={sharing}": sharing in ("node", "world"),
            "strategy=fsdp2": sharing == "fsdp2",
            "strategy=fsdp2 strategy.offload=true": sharing == "host",
            "model.checkpoint_activations=true": again,
        }
        extra_s = {"": 0.0, "node": self.gather_s, "fsdp2": self.gather_all_s}
        # Each gather copies fp32 shards to the device, and gradients back. The time of the update on the host is
        # unknown.
        extra_s["host"] = (
            self.gather_all_s + 3 * 4 * total / self.world_size / HOST_LINK_BYTES_PER_S
        )
        extra_s["world"] = max(0.0, self.gather_all_s - self.forward_s)
        return MemoryNeed(
            settings=tuple(name for name, is_on in settings.items() if is_on),
            state_bytes=bytes_each * total,
            activation_bytes=activation_bytes,
            batch_size=batch_size,
            kind=(precision, again),
            extra_s=again * self.forward_s + extra_s[sharing],
        )

    def largest_batch(self, memory_bytes: float) -> int:
        """Return the largest batch per rank that fits into a device's memory with the configured settings.

        0 means that even a batch of one image does not fit.
        """
        precision = next(iter(self.states))
        first, whole = self.activations[precision, False]
        slope = (whole - first) / max(1, self.batch_size - 1)
        constant = first - slope
        if self.batch_size == 1:
            # The two parts cannot be told apart, so all bytes are taken to grow with the batch.
            slope = whole
            constant = 0.0
        state_bytes = self.need(precision, self.batch_size).state_bytes
        usable_bytes = USABLE_SHARE * memory_bytes
        return max(0, int((usable_bytes - state_bytes - constant) / slope))

    def needs(self) -> list[MemoryNeed]:
        """Return the memory needs of all combinations of settings.

        The configured settings come first. Other combinations are sorted by number of settings, time and
        descending batch size.
        """
        sizes = [self.batch_size >> halvings for halvings in range(self.batch_size.bit_length())]
        sizes = [size for size in sizes if self.batch_size % size == 0]
        of_all = ["world", "fsdp2"] if self.world_size > 1 else []
        sharings = ["", *(["node"] if self.ranks_per_node > 1 else []), *of_all, "host"]
        needs = [
            self.need(precision, size, again=again, sharing=sharing)  # type: ignore[arg-type]
            for (precision, again), size, sharing in itertools.product(
                self.activations, sizes, sharings
            )
        ]
        return sorted(needs, key=lambda need: (len(need.settings), need.extra_s, -need.batch_size))

    def alone(self, memory_bytes: float) -> list[MemoryNeed]:
        """Return the memory need for each change of a single setting, in the order in which to try the changes.

        They are sorted by additional time per byte saved. Among settings that take no additional time, the one that
        saves the most memory comes first.
        """
        asked, *single_needs = [need for need in self.needs() if len(need.settings) < 2]
        single = [
            need
            for need in largest_batches(single_needs, memory_bytes)
            if need.total_bytes < asked.total_bytes
        ]

        def price(need: MemoryNeed) -> tuple[float, float]:
            saved = asked.total_bytes - need.total_bytes
            return need.extra_s / saved, -saved

        return sorted(single, key=price)


def largest_batches(needs: Sequence[MemoryNeed], memory_bytes: float) -> list[MemoryNeed]:
    """Return the memory need at the largest batch size that fits, for each combination of the remaining settings.

    The needs of each combination must be in descending order of batch size. If none of them fits, the last one is
    returned.
    """
    kinds: dict[tuple[str, ...], list[MemoryNeed]] = {}
    for need in needs:
        kinds.setdefault(
            tuple(setting.rstrip("0123456789") for setting in need.settings), []
        ).append(need)
    return [
        next((one for one in some if one.fits(memory_bytes)), some[-1]) for some in kinds.values()
    ]
