"""Correction of Lightning's epoch and batch counters after a resume."""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning.pytorch as pl

_COUNTS = ("ready", "started", "processed", "completed")


class ResumedPlace(NamedTuple):
    """Position at which a resumed run continues, as an epoch and a number of finished batches.

    The number refers to the batch size of the interrupted run.
    """

    epoch: int
    batches_done: int
    is_epoch_done: bool


def uncount_cut_epoch(trainer: pl.Trainer) -> None:
    """Correct the epoch counters if Lightning counted an unfinished epoch as complete.

    An epoch may end early because of `max_steps` or a stop. Without the correction, a resumed run would skip the
    remaining samples of the epoch, and would end at once if it was the last epoch. The function may be called before or
    after Lightning has read the counters from the checkpoint, because loaders may be created early
    (`estimated_stepping_batches`).
    """
    fit = trainer.fit_loop
    if fit._data_fetcher is not None:  # the fit has begun
        return
    if fit.is_resuming:
        epochs = fit.epoch_progress.state_dict()
        _uncount(epochs, fit.epoch_loop.batch_progress.state_dict())
        fit.epoch_progress.load_state_dict(epochs)
        return
    loops = trainer._checkpoint_connector._loaded_checkpoint.get("loops")
    if loops:
        _uncount(
            loops["fit_loop"]["epoch_progress"], loops["fit_loop"]["epoch_loop.batch_progress"]
        )


def _uncount(epochs: dict[str, Any], batches: dict[str, Any]) -> None:
    is_counted = epochs["current"]["started"] == epochs["current"]["processed"]
    if is_counted and _num_done(batches) and not _is_epoch_done(batches):
        for counts in epochs.values():
            counts["processed"] -= 1
            counts["completed"] = counts["processed"]


def resumes_within_epoch(trainer: pl.Trainer) -> bool:
    """Correct Lightning's epoch counters, and return whether training resumes partway through an epoch.

    Otherwise, the next epoch begins. If `max_steps` is set and the checkpoint was saved at the end of an epoch,
    Lightning 2.6 ends this epoch a second time. As a result, it counts the epoch twice, skips the order of the next
    epoch, and ends the run an epoch early. Checkpoints that were saved after an epoch's last batch, or after an error
    at the beginning of an epoch, also have counters from which a run cannot be resumed twice.

    Call the function when Lightning sets the first epoch, after `FitLoop.reset`. A second call changes nothing.
    """
    fit = trainer.fit_loop
    loop = fit.epoch_loop
    epochs: Any = fit.epoch_progress
    batches: Any = loop.batch_progress
    goes_on = bool(epochs.current.started > epochs.current.processed)
    for counts in (epochs.current, epochs.total):
        counts.started = counts.processed + goes_on
        counts.ready = counts.started
        counts.completed = counts.processed
    if not goes_on:
        # The checkpoint was saved before Lightning counted the step.
        loop._batches_that_stepped += loop.restarted_on_train_batch_end
        _set_all(batches.total, batches.total.processed)

    # The attribute is set directly, because with `max_steps` the property's setter would always make it True.
    fit._restarting = goes_on
    loop.restarting = goes_on
    fit.update_restart_stage()
    # Lightning has not loaded the loader states if it created the loader before it read the
    # checkpoint (`estimated_stepping_batches`).
    fit._load_combined_loader_states()
    return goes_on


def resumed_place(trainer: pl.Trainer, *, accumulate_grad_batches_before: int) -> ResumedPlace:
    """Return the epoch and batch at which the resumed run will continue, without changing counters.

    `resumes_within_epoch` and `rewind_to_whole_steps` later set the counters to this position. The position is needed
    earlier, because Lightning requests the first batch of a loader without a length before `FitLoop.reset`.
    """
    epochs: Any = trainer.fit_loop.epoch_progress.current
    batches = trainer.fit_loop.epoch_loop.batch_progress.state_dict()
    if epochs.started == epochs.processed:
        return ResumedPlace(epochs.processed, 0, is_epoch_done=False)

    num_done = _num_done(batches)
    if not _is_epoch_done(batches):
        num_over = num_done % accumulate_grad_batches_before
        return ResumedPlace(epochs.processed, num_done - num_over, is_epoch_done=False)
    if batches["current"]["processed"] > batches["current"]["completed"]:
        # The checkpoint was saved by a hook at the end of the last batch.
        return ResumedPlace(epochs.processed + 1, 0, is_epoch_done=False)
    return ResumedPlace(epochs.processed, num_done, is_epoch_done=True)


def rewind_to_whole_steps(trainer: pl.Trainer, *, accumulate_grad_batches_before: int) -> int:
    """Rewind the batch counters to the last completed step, and return the number of finished batches.

    Batches of an unfinished step are read again, because checkpoints do not contain gradients.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    batches = loop.batch_progress
    num_done = _num_done(batches.state_dict())
    num_over = num_done % accumulate_grad_batches_before
    if _is_epoch_done(batches.state_dict()) or (
        num_over == 0 and batches.current.ready == num_done
    ):
        return num_done

    _set_all(
        batches.total, batches.total.completed + num_done - batches.current.completed - num_over
    )
    num_done -= num_over
    _set_all(batches.current, num_done)
    batches.is_last_batch = False
    loop.update_restart_stage()
    return num_done


def count_batches_as(trainer: pl.Trainer, num_before: int, num_now: int) -> None:
    """Convert the number of finished batches in this epoch to a different batch size.

    Lightning 2.6 uses its counters of finished batches to end an epoch and an accumulation, and restores them
    unchanged. The total over all epochs is not converted, because it counts batches that were processed. Call the
    function after `rewind_to_whole_steps`, even if the numbers are equal.

    Args:
        trainer: Trainer whose counters are changed.
        num_before: Number of finished batches in the interrupted run.
        num_now: Number of batches in this run with the same samples.
    """
    fit: Any = trainer.fit_loop
    loop = fit.epoch_loop
    current = loop.batch_progress.current
    # All counters change by the same number, because their differences tell Lightning in which hook the checkpoint was
    # written.
    for name in _COUNTS:
        setattr(current, name, getattr(current, name) + num_now - num_before)
    # If a validation is due here, Lightning skips it and counts the logging step even if it was already counted.
    if loop.restarted_on_last and loop._batches_that_stepped == trainer.global_step:
        loop._batches_that_stepped -= loop._should_check_val_fx(fit._data_fetcher)


def _set_all(counts: Any, number: int) -> None:
    for name in _COUNTS:
        setattr(counts, name, number)


def _num_done(batches: dict[str, Any]) -> int:
    """Return the number of finished batches in the current epoch.

    A checkpoint saved by a hook at the end of a batch does not count this batch as completed yet.
    """
    return int(max(batches["current"]["processed"], batches["current"]["completed"]))


def _is_epoch_done(batches: dict[str, Any]) -> bool:
    return bool(batches["is_last_batch"]) and batches["current"]["ready"] == _num_done(batches)


def share_of(trainer: pl.Trainer | None) -> dict[str, int]:
    """Return the number of ranks that read different data, and this rank's index among them.

    The ranks of a pipeline read the same batches. Without a trainer, there is a single rank, which reads all data.

    >>> share_of(None)
    {'world_size': 1, 'rank': 0}
    """
    if trainer is None:
        return {"world_size": 1, "rank": 0}
    # Single-device strategies have no sampler options.
    sampler_options = getattr(trainer, "distributed_sampler_kwargs", None)
    if sampler_options is None:
        return {"world_size": trainer.world_size, "rank": trainer.global_rank}
    return {"world_size": sampler_options["num_replicas"], "rank": sampler_options["rank"]}
