"""Lightning's counters of epochs and batches after a resume: they are made to say what the run before had done."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

_COUNTS = ("ready", "started", "processed", "completed")


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
    elif loops := trainer._checkpoint_connector._loaded_checkpoint.get("loops"):
        _uncount(loops["fit_loop"]["epoch_progress"], loops["fit_loop"]["epoch_loop.batch_progress"])


def _uncount(epochs: dict[str, Any], batches: dict[str, Any]) -> None:
    is_counted = epochs["current"]["started"] == epochs["current"]["processed"]
    if is_counted and _num_done(batches) and not _is_epoch_done(batches):
        for counts in epochs.values():
            counts["processed"] -= 1
            counts["completed"] = counts["processed"]


def goes_on_in_epoch(trainer: pl.Trainer) -> bool:
    """Mend the counters of epochs; return whether the epoch of the checkpoint goes on. If not, the next one begins.

    With `max_steps` Lightning 2.6 ends an epoch that was saved at its end once more: it counts it twice, asks for the
    order of the epoch after the next, and the run ends an epoch early. Nor does a checkpoint of an epoch's last batch,
    or of an error at the start of an epoch, leave counters from which a run can be resumed twice.

    Call it when Lightning asks for the order of the first epoch, after `FitLoop.reset`. A second call changes nothing.
    """
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    epochs: Any = fit.epoch_progress
    batches: Any = loop.batch_progress
    goes_on = epochs.current.started > epochs.current.processed
    for counts in (epochs.current, epochs.total):
        counts.ready = counts.started = counts.processed + goes_on
        counts.completed = counts.processed
    if not goes_on:
        loop._batches_that_stepped += loop.restarted_on_train_batch_end  # saved before Lightning counted that step
        _set(batches.total, batches.total.processed)
    # Not by the setter of `fit`: with `max_steps` it makes True of everything.
    fit._restarting = loop.restarting = goes_on
    fit.update_restart_stage()
    # Lightning did not, if it had made the loader before it read the checkpoint (`estimated_stepping_batches`).
    fit._load_combined_loader_states()
    return goes_on


def place_to_go_on_from(trainer: pl.Trainer, *, accumulate_grad_batches_before: int) -> tuple[int, int]:
    """Return the epoch and its batches done to which the other functions are going to set the counters.

    Lightning asks a loader without a length for its first batch before `FitLoop.reset`.
    """
    epochs: Any = trainer.fit_loop.epoch_progress.current
    batches = trainer.fit_loop.epoch_loop.batch_progress.state_dict()
    num_done, is_done = _num_done(batches), _is_epoch_done(batches)
    if epochs.started == epochs.processed:
        return epochs.processed, 0
    if is_done and batches["current"]["processed"] > batches["current"]["completed"]:  # saved by a hook at its end
        return epochs.processed + 1, 0
    return epochs.processed, num_done if is_done else num_done - num_done % accumulate_grad_batches_before


def rewind_to_whole_steps(
    trainer: pl.Trainer, *, accumulate_grad_batches_before: int, is_same_batch: bool = False
) -> int:
    """Mend the counters of batches in the epoch that goes on; return how many of its batches are done.

    Batches of a step that was not made are read again: a checkpoint has no gradients. With another accumulation

        batches = steps done * accumulate_grad_batches

    as Lightning 2.6 ends an epoch and an accumulation by these counters, and restores them as they were saved; unless
    `is_same_batch`: batches are as large as before. The total over all epochs stays what it is: batches that ran.
    """
    fit: Any = trainer.fit_loop
    loop = fit.epoch_loop
    batches, num_done = loop.batch_progress, _num_done(loop.batch_progress.state_dict())
    num_steps, num_over = divmod(num_done, accumulate_grad_batches_before)
    if not _is_epoch_done(batches.state_dict()) and (num_over or batches.current.ready != num_done):
        _set(batches.total, batches.total.completed + num_done - batches.current.completed - num_over)
        num_done -= num_over
        _set(batches.current, num_done)
        batches.is_last_batch = False
        loop.update_restart_stage()
    shift = 0 if is_same_batch else num_steps * (trainer.accumulate_grad_batches - accumulate_grad_batches_before)
    # All move by the same number: their differences tell Lightning in which hook the checkpoint was written.
    for name in _COUNTS:
        setattr(batches.current, name, getattr(batches.current, name) + shift)
    # Lightning passes over a validation that is due here, and then counts the step for loggers: if it had not before.
    if loop.restarted_on_last and loop._batches_that_stepped == trainer.global_step:
        loop._batches_that_stepped -= loop._should_check_val_fx(fit._data_fetcher)
    return num_done + shift


def _set(counts: Any, number: int) -> None:
    for name in _COUNTS:
        setattr(counts, name, number)


def _num_done(batches: dict[str, Any]) -> int:
    # Batches of the epoch; one that was processed and not completed was saved by a hook at its end.
    return max(batches["current"]["processed"], batches["current"]["completed"])


def _is_epoch_done(batches: dict[str, Any]) -> bool:
    return batches["is_last_batch"] and batches["current"]["ready"] == _num_done(batches)


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
