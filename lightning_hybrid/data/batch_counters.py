"""Lightning's batch counters after a resume with another accumulation, where a step is another number of batches."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl


def recount_batches(trainer: pl.Trainer, *, accumulate_grad_batches_before: int) -> None:
    """Set Lightning's counters of the current epoch as if the whole epoch had accumulated as it does now.

        batches = steps done * accumulate_grad_batches

    Lightning 2.6 ends an epoch and an accumulation by these counters, and restores them as they were saved: an epoch
    resumed with half the accumulation would end at once, with twice the accumulation last twice as long.

    Call it after Lightning restores the loops and before it runs them, as a loader's `load_state_dict` does.
    """
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    steps_done = batches.ready // accumulate_grad_batches_before
    shift = steps_done * (trainer.accumulate_grad_batches - accumulate_grad_batches_before)
    # All move by the same number: their differences tell Lightning in which hook the checkpoint was written. The total
    # over all epochs stays what it is: batches that ran.
    for name in ("ready", "started", "processed", "completed"):
        setattr(batches, name, getattr(batches, name) + shift)


def recounting(trainer: pl.Trainer | None) -> Callable[[int], None] | None:
    """Return the argument `on_other_accumulation` for a loader that `trainer` iterates."""
    if trainer is None:
        return None
    return lambda before: recount_batches(trainer, accumulate_grad_batches_before=before)


def share_of(trainer: pl.Trainer | None) -> dict[str, int]:
    """Return into how many shares a strategy deals the data, and which is this rank's; one share without a trainer.

    >>> share_of(None)
    {'world_size': 1, 'rank': 0}
    """
    if trainer is None:
        return {"world_size": 1, "rank": 0}
    # The ranks of a pipeline read the same batches. A strategy of one device asks for nothing.
    asked = getattr(trainer, "distributed_sampler_kwargs", None)
    if asked is None:
        return {"world_size": trainer.world_size, "rank": trainer.global_rank}
    return {"world_size": asked["num_replicas"], "rank": asked["rank"]}
