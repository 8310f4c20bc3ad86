"""Bytes that a rank needs for training, by owner, and what to change where they are more than its device has.

    parameters    weights, fp32 masters, gradients, optimizer state: bytes per parameter, by dtype alone
    activations   what forward keeps for backward, with or without re-materialisation: measured by the caller
    left          `1 - USABLE_SHARE` of the device, which is not counted

Bytes per parameter are those between two steps that recipes/records/memory measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hybrid.checks import require_choice, require_whole
from lightning_hybrid.placement import is_split

HALF_PRECISIONS = ("16-true", "bf16-true")
STATE_BYTES = {"sgd": 4, "lars": 4, "adamw": 8, "lamb": 8}
"""Optimizer state per parameter: fp32 momentum, or two fp32 moments. SGD and LARS with momentum."""

REST_BYTES = 0.1
"""The engine's buffers per parameter: 0.06 to 0.11 in recipes/records/memory."""

USABLE_SHARE = 0.9
"""Of a device's memory; our choice. The rest is for its context, workspaces of convolutions and fragments."""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes per parameter between two steps, by owner.

    With Psi parameters and the shares of them that a rank holds:

        bytes = (weights weight_share + gradients gradient_share + (masters + optimizer) state_share + rest) Psi

    ZeRO's stages 1, 2, 3 over N ranks are 1/N for state, then gradients, then weights (Rajbhandari et al. 2019,
    arXiv:1910.02054; masters and moments are its K = 12).

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
        """Return what `HybridAllReduceStrategy` holds.

        Args:
            precision: The trainer's; with `"16-true"` and `"bf16-true"` masters are fp32.
            optimizer: One of `STATE_BYTES`.
            copies_gradients: In half precision the optimizer takes fp32 gradients, next to those in the buckets. LARS
                and LAMB take none on CUDA, and on a CPU none with `fused=True`.

        Raises:
            ValueError: `precision` or `optimizer` is unknown.

        >>> fused = StateBytes.of(precision="16-true", optimizer="lars", copies_gradients=False)
        >>> round(fused.per_parameter(), 1), round(fused.per_parameter(state_share=1 / 2), 1)
        (12.1, 8.1)
        """
        require_choice("precision", precision, (*HALF_PRECISIONS, "32-true"), "of others nothing was measured")
        require_choice("optimizer", optimizer, tuple(STATE_BYTES), "the state of others is not known here")
        state = STATE_BYTES[optimizer]
        if precision == "32-true":
            return cls(weights=4, gradients=4, masters=0, optimizer=state)
        return cls(weights=2, gradients=2 + (4 if copies_gradients else 0), masters=4, optimizer=state)

    def per_parameter(
        self, *, weight_share: float = 1.0, gradient_share: float = 1.0, state_share: float = 1.0
    ) -> float:
        """Compute the bytes per parameter of a rank that holds these shares."""
        state = self.masters + self.optimizer
        return self.weights * weight_share + self.gradients * gradient_share + state * state_share + self.rest

    def fully_sharded(self, num_ranks: int) -> float:
        """Compute the bytes per parameter with torch's `fully_shard` (FSDP2), between steps; counted, not measured.

        Weights, gradients and state are fp32 there, each rank with 1 / N of all; what a block gathers comes on top.
        """
        return (4 + 4 + self.optimizer) / num_ranks


def shared_share(numels: Sequence[int], num_ranks: int) -> float:
    """Compute the part of masters and optimizer state that a rank holds where `num_ranks` of a node share them.

        sigma / k + 1 - sigma          sigma -> share of elements in tensors of at least k parts

    Smaller tensors stay whole on each rank.

    >>> shared_share([8 * 2**14], 8), shared_share([7 * 2**14], 8)
    (0.125, 1.0)
    """
    require_whole("num_ranks", num_ranks, "ranks of a node are counted")
    split = sum(numel for numel in numels if is_split(numel, num_ranks))
    sigma = split / max(1, sum(numels))
    return sigma / num_ranks + 1 - sigma


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """What a rank needs under some settings.

    Args:
        settings: What to give on the command line; empty: what was asked for.
        state_bytes: Weights, masters, gradients, optimizer state, engine.
        activation_bytes: The most that a step needs on top: kept for backward, and in work.
        cost: What it costs, in words.
    """

    settings: tuple[str, ...]
    state_bytes: float
    activation_bytes: float
    cost: str

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return self.state_bytes + self.activation_bytes

    def fits(self, memory_bytes: float) -> bool:
        """Whether a device of this memory has room for it."""
        return self.total_bytes <= USABLE_SHARE * memory_bytes


def memory_needs(
    state: StateBytes,
    numels: Sequence[int],
    *,
    ranks_per_node: int,
    world_size: int,
    activation_bytes: float,
    checkpointed_bytes: float | None,
    largest_block: int,
) -> list[MemoryNeed]:
    """List what a data-parallel rank needs: as asked for, then with what to try, in the order in which to try it.

    `shard_update=node` costs next to nothing; activation checkpointing costs a second forward; `fully_shard` moves all
    weights twice more, over all links. A pipeline (`pipeline_cost`) is the last thing to try.

    Args:
        state: Bytes per parameter.
        numels: Elements of each parameter.
        ranks_per_node: Ranks that may share the update.
        world_size: Ranks that may share everything.
        activation_bytes: Of a step of one rank, without re-materialisation.
        checkpointed_bytes: The same with it; None: the network has no such option.
        largest_block: Elements of the largest part of the network that `fully_shard` gathers at once.
    """
    total = sum(numels)

    def need(settings: tuple[str, ...], bytes_each: float, activations: float, cost: str) -> MemoryNeed:
        return MemoryNeed(settings=settings, state_bytes=bytes_each * total, activation_bytes=activations, cost=cost)

    whole = need((), state.per_parameter(), activation_bytes, "")
    found = [whole]
    if ranks_per_node > 1:
        each = state.per_parameter(state_share=shared_share(numels, ranks_per_node))
        gathers = "weights are gathered in the node after the update"
        found.append(need(("strategy.shard_update=node",), each, activation_bytes, gathers))
    if checkpointed_bytes is not None:
        again = "forward runs twice: about a third more arithmetic"
        # With the update shared too, should neither be enough.
        found += [
            replace(
                one,
                settings=(*one.settings, "model.checkpoint_activations=true"),
                activation_bytes=checkpointed_bytes,
                cost=again,
            )
            for one in (whole, *found[1:])
        ]
    if world_size > 1:
        least = activation_bytes if checkpointed_bytes is None else checkpointed_bytes
        options = ("strategy=fsdp2", *(() if checkpointed_bytes is None else ("model.checkpoint_activations=true",)))
        # Two blocks gathered in half precision, this one and the next, and the gradients of this one.
        gathered = 3 * 2 * largest_block
        bytes_each = state.fully_sharded(world_size) + gathered / max(1, total)
        found.append(need(options, bytes_each, least, "each block's weights are gathered twice a step by all ranks"))
    return found
