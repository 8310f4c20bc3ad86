"""Calculations of the number of ranks and of the batch size per rank, made before the ranks start."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from recipes.cli.preflight import check_place, whole_number

if TYPE_CHECKING:
    import lightning.pytorch as pl


def slurm_started_us() -> bool:
    """Return whether this process is a task of a SLURM job step, not counting interactive shells."""
    return "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in (
        "bash",
        "interactive",
    )


def num_ranks(devices: Any, num_nodes: int, accelerator: str = "auto") -> int:
    """Return the number of ranks that the trainer arguments `devices` and `num_nodes` request.

    >>> num_ranks(4, 2), num_ranks([0, 3], 1), num_ranks("0,1,2", 1), num_ranks("auto", 2, "cpu")
    (8, 2, 3, 2)

    Raises:
        ValueError: `devices` is not a number of devices.
    """
    if isinstance(devices, str) and "," in devices:
        devices = [part for part in devices.split(",") if part.strip()]
    if not isinstance(devices, int | str):
        return len(devices) * num_nodes
    if devices in ("auto", -1, "-1"):
        if accelerator == "cpu":
            devices = 1
        else:
            devices = torch.cuda.device_count() or 1
    try:
        return int(devices) * num_nodes
    except ValueError:
        raise ValueError(
            f"`trainer.devices` (={devices!r}) must be a number of devices, a list of devices or "
            "auto. For example, set trainer.devices=2 to start two processes."
        ) from None


def world_from_launcher(what: str, otherwise: int | str) -> int | str:
    """Read the number of ranks per node, or the number of nodes, from the launcher's environment.

    `what` is `"devices"` for the ranks per node, or `"num_nodes"`.

    The launcher is torchrun or SLURM. Without one, the result is `otherwise`. As in Lightning, SLURM counts only in a
    job step that is not an interactive shell.
    """
    names = {
        "devices": ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"),
        "num_nodes": ("GROUP_WORLD_SIZE", "SLURM_NNODES"),
    }
    of_torchrun, of_slurm = names[what]
    if of_torchrun in os.environ:
        return whole_number(of_torchrun)
    if slurm_started_us() and of_slurm in os.environ:
        return whole_number(of_slurm)
    return otherwise


def steps_between_questions(accelerator: str, accumulate_grad_batches: int) -> int:
    """Return the number of steps between two checks of whether any rank has received a stop signal.

    On GPUs the host has to wait for the answer, which costs most if steps are short. Steps with gradient accumulation
    take seconds, and the job has 30 seconds to react to the signal.

    >>> steps_between_questions("gpu", 1), steps_between_questions("gpu", 64), steps_between_questions("cpu", 1)
    (20, 1, 1)
    """
    has_gpu = accelerator in ("gpu", "cuda") or (
        accelerator == "auto" and torch.cuda.is_available()
    )
    if has_gpu and accumulate_grad_batches == 1:
        return 20
    return 1


def check_world(trainer: pl.Trainer) -> None:
    """Raise if the launcher's ranks do not match the trainer's devices and nodes.

    Raises:
        ValueError: The settings of the launcher and the trainer differ, or this rank is outside of the trainer's world.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is None:
        return
    size = {"num_devices": trainer.num_devices, "num_nodes": trainer.num_nodes}
    environment.validate_settings(**size)
    check_place(local_rank=environment.local_rank(), node_rank=environment.node_rank(), **size)


def accumulation(
    global_batch_size: int,
    batch_size_per_rank: int | None,
    max_batch_size_per_rank: int | None,
    devices: Any,
    num_nodes: int,
    accelerator: str = "auto",
) -> int:
    """Return the number of gradient accumulation steps for a global batch size.

    The number is `global_batch_size / (ranks * batch_size_per_rank)`. Without `batch_size_per_rank`, it is the smallest
    number of equal batches with at most `max_batch_size_per_rank` images each. Without either limit, it is 1.

    Raises:
        ValueError: The result is not an integer, an argument is not one, or the smallest number of equal batches is
            more than twice the number that the limit requires.

    >>> accumulation(256, 32, None, 4, 1), accumulation(256, None, None, 4, 1)
    (2, 1)
    >>> accumulation(65536, None, 128, 8, 256), accumulation(65536, None, 128, 1, 1), accumulation(96, None, 10, 2, 1)
    (1, 512, 6)
    """
    world_size = num_ranks(devices, num_nodes, accelerator)
    if world_size < 1 or not isinstance(global_batch_size, int):
        return 1  # the trainer rejects a world without ranks, and `check` rejects the batch size
    share = global_batch_size / world_size
    if batch_size_per_rank is None:
        if max_batch_size_per_rank is None:
            return 1
        _check_batch(
            "max_batch_size_per_rank", max_batch_size_per_rank, share, why="null for no limit"
        )
        if share % 1 or share <= max_batch_size_per_rank:
            return 1  # a batch that does not divide among the ranks is rejected when the data module is built
        return _fewest_rounds(int(share), max_batch_size_per_rank, world_size)
    _check_batch(
        "batch_size_per_rank", batch_size_per_rank, share, why="null to use all images of a rank"
    )
    together = world_size * batch_size_per_rank
    if global_batch_size < 1 or global_batch_size % together:
        nearest = _nearest(global_batch_size, together)
        raise ValueError(
            f"`global_batch_size` (={global_batch_size}) must be a multiple of `world_size * "
            f"batch_size_per_rank` (={world_size} * {batch_size_per_rank}), because an optimizer step would "
            f"otherwise consist of {global_batch_size / together:.2f} accumulation steps. Set "
            f"global_batch_size={nearest}."
        )
    return global_batch_size // together


def batch_line(
    global_batch_size: int, world_size: int, accumulate_grad_batches: int, *, unit: str = "images"
) -> str:
    """Format a line that states how the global batch is divided among ranks and accumulation steps.

    Raises:
        ValueError: The global batch size is not divisible.

    >>> batch_line(65536, 256, 2)
    'Global batch size 65536: 256 ranks x 2 batches x 128 images.'
    >>> batch_line(20, 2, 1, unit="sequences")
    'Global batch size 20: 2 ranks x 10 sequences, no gradient accumulation.'
    """
    # Imported here because it imports Lightning, which not every command needs.
    from lightning_hybrid.data import (
        batch_size_per_rank,
    )

    parts = {"world_size": world_size, "accumulate_grad_batches": accumulate_grad_batches}
    share = batch_size_per_rank(global_batch_size=global_batch_size, **parts)
    if world_size == 1:
        ranks = "1 rank"
    else:
        ranks = f"{world_size} ranks"
    if accumulate_grad_batches == 1:
        return f"Global batch size {global_batch_size}: {ranks} x {share} {unit}, no gradient accumulation."
    return f"Global batch size {global_batch_size}: {ranks} x {accumulate_grad_batches} batches x {share} {unit}."


def _fewest_rounds(share: int, max_batch_size: int, world_size: int) -> int:
    """Return the smallest number of equal accumulation steps with at most `max_batch_size` images each.

    The number may be at most twice what the limit requires. Without this bound, a rank with twice a prime number of
    images would be trained two images at a time.

    Raises:
        ValueError: No such number exists.
    """
    fewest = -(-share // max_batch_size)
    # Beyond twice the minimum, batches would be less than half of what the device can hold.
    for rounds in range(fewest, 2 * fewest + 1):
        if share % rounds == 0:
            return rounds
    nearest = _nearest(share * world_size, world_size * max_batch_size)
    raise ValueError(
        f"`global_batch_size` (={share * world_size}) cannot be split into equal batches, because the "
        f"{share} images of each of {world_size} ranks have no divisor from "
        f"{-(-share // (2 * fewest))} to `max_batch_size_per_rank` (={max_batch_size}). Set "
        f"global_batch_size={nearest}, or use another number of ranks."
    )


def _nearest(global_batch_size: int, part: int) -> str:
    below = max(global_batch_size, 0) // part * part
    if below:
        return f"{below} or {below + part}"
    return str(part)


def _check_batch(name: str, value: Any, share: float, *, why: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"`{name}` (={value}) must be a whole number of images above zero, or {why}. Each "
            f"rank has {share:g} images per step. Set {name}=null, for example."
        )
