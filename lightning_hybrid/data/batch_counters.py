"""Lightning's counters of epochs and batches after a resume, corrected to what the interrupted run had done."""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning.pytorch as pl

_COUNTS = ("ready", "started", "processed", "completed")


class ResumedPlace(NamedTuple):
    """Place at which a resumed fit continues, in batches of the interrupted run."""

    epoch: int
    batches_done: int
    is_epoch_done: bool


def uncount_cut_epoch(trainer: pl.Trainer) -> None:
    """Take back an epoch that Lightning counted as processed although `max_steps` or a stop ended it before its end.

    Otherwise a resumed run leaves out the rest of its images, and ends at once where `max_epochs` is reached. A loader
    may be made before Lightning has read the counters from the checkpoint (`estimated_stepping_batches`), or after.
    """
    fit = trainer.fit_loop
    if fit._data_fetcher is not None:
        return  # the fit has begun
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


def goes_on_in_epoch(trainer: pl.Trainer) -> bool:
    """Correct the counters of epochs. Return True if the checkpoint's epoch continues, False if the next one begins.

    With `max_steps` Lightning 2.6 ends an epoch that was saved at its end once more: it counts it twice, asks for the
    order of the epoch after the next, and the run ends an epoch early. Nor does a checkpoint of an epoch's last batch,
    or of an error at the start of an epoch, leave counters from which a run can be resumed twice.

    Call it when Lightning asks for the order of the first epoch, after `FitLoop.reset`. A second call changes nothing.
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
        # Saved before Lightning counted that step.
        loop._batches_that_stepped += loop.restarted_on_train_batch_end
        _set_all(batches.total, batches.total.processed)

    # Not by the setter of `fit`: with `max_steps` it makes True of everything.
    fit._restarting = goes_on
    loop.restarting = goes_on
    fit.update_restart_stage()
    # Lightning did not, if it had made the loader before it read the checkpoint (`estimated_stepping_batches`).
    fit._load_combined_loader_states()
    return goes_on


def resumed_place(trainer: pl.Trainer, *, accumulate_grad_batches_before: int) -> ResumedPlace:
    """Return the epoch and its batches done to which `goes_on_in_epoch` and `rewind_to_whole_steps` set the counters.

    It changes nothing. Lightning asks a loader without a length for its first batch before `FitLoop.reset`.
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
        # Saved by a hook at the end of its last batch.
        return ResumedPlace(epochs.processed + 1, 0, is_epoch_done=False)
    return ResumedPlace(epochs.processed, num_done, is_epoch_done=True)


def rewind_to_whole_steps(trainer: pl.Trainer, *, accumulate_grad_batches_before: int) -> int:
    """Correct the counters of batches in the epoch that continues. Return how many of its batches are done.

    Batches of a step that was not made are read again, because a checkpoint has no gradients.
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
    """Count the `num_before` batches that are done in this epoch as `num_now` batches of another size.

    Lightning 2.6 ends an epoch and an accumulation by these counters, and restores them as they were saved. The total
    over all epochs stays what it is: batches that ran. Call it after `rewind_to_whole_steps`, also for equal numbers.
    """
    fit: Any = trainer.fit_loop
    loop = fit.epoch_loop
    current = loop.batch_progress.current
    # All move by the same number: their differences tell Lightning in which hook the checkpoint was written.
    for name in _COUNTS:
        setattr(current, name, getattr(current, name) + num_now - num_before)
    # Lightning passes over a validation that is due here, and then counts the step for loggers: if it had not before.
    if loop.restarted_on_last and loop._batches_that_stepped == trainer.global_step:
        loop._batches_that_stepped -= loop._should_check_val_fx(fit._data_fetcher)


def _set_all(counts: Any, number: int) -> None:
    for name in _COUNTS:
        setattr(counts, name, number)


def _num_done(batches: dict[str, Any]) -> int:
    """Return the number of finished batches of the epoch.

    A hook at the end of a batch saves it before it is complete.
    """
    return int(max(batches["current"]["processed"], batches["current"]["completed"]))


def _is_epoch_done(batches: dict[str, Any]) -> bool:
    return bool(batches["is_last_batch"]) and batches["current"]["ready"] == _num_done(batches)


def share_of(trainer: pl.Trainer | None) -> dict[str, int]:
    """Return the number of ranks that read different data, and this rank's place among them.

    The ranks of a pipeline read the same batches. Without a trainer, one rank reads everything.

    >>> share_of(None)
    {'world_size': 1, 'rank': 0}
    """
    if trainer is None:
        return {"world_size": 1, "rank": 0}
    # A strategy of one device has none.
    sampler_options = getattr(trainer, "distributed_sampler_kwargs", None)
    if sampler_options is None:
        return {"world_size": trainer.world_size, "rank": trainer.global_rank}
    return {"world_size": sampler_options["num_replicas"], "rank": sampler_options["rank"]}
