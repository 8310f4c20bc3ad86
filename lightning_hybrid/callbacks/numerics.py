"""Callback that diagnoses overflow, non-finite losses and zero gradients, and saves the state."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_hybrid.callbacks.failure_snapshot import (
    LayerProbes,
    describe_batch,
    first_of,
    largest_gradients,
    save_state,
)
from lightning_hybrid.callbacks.training_metrics import is_logged_step
from lightning_hybrid.checks import plain_value, require_whole
from lightning_hybrid.comm.health.backend_errors import failed_wait
from lightning_hybrid.comm.topology import host_identity
from lightning_hybrid.optim.dtensor import is_dtensor
from lightning_hybrid.precision.skipped_steps import EndlessOverflowError
from lightning_hybrid.run_status import run_status

PROBE_AFTER = 20
"""Number of consecutive skipped steps after which layers are probed.

A dynamic loss scale that starts at 2**16 may need 16 skipped steps to settle.
"""

STEPS_AT_FLOOR = 200
"""Number of steps at the minimum loss scale after which to warn.

A short series of overflows ends earlier.
"""

NUM_SAVED = 8
MOST_NAMES = 5
NEVER = torch.iinfo(torch.int64).max


class NonFiniteLossError(RuntimeError):
    """Error raised for a non-finite loss, unless the precision plugin skips such steps.

    When the error is raised, the weights are already corrupted.
    """


class NumericsMonitor(Callback):
    """Callback that diagnoses repeated overflow, non-finite losses and zero gradients.

    ==============================================  ==================================================================
    40 consecutive skipped steps (the precision's   The error also names the ranks and hosts whose loss is not finite,
    own error, `EndlessOverflowError`)              the batches, the first layer whose output has inf or nan, and how
                                                    the loss scale developed.
    a loss that is not finite, if steps are not     Error at the next logged step, on every rank. It names the rank,
    skipped (`"32-true"`, `"bf16-true"`, ...)       the host, the step and the batch where it began.
    a loss that is not finite, if the step was      Warning at the next logged step, on the rank where it happened.
    skipped
    the loss scale at its floor for 200 steps       Warning that smaller gradients are lost.
    zero or missing gradients at `patience`         Warning that names the parameters: their layer died or is not
    consecutive logged steps                        used, or all gradients are zero.
    any other error in a batch, except errors of    A note on the error describes the batch, and the batch is saved.
    communication
    ==============================================  ==================================================================

    The host waits for the device only at logged steps. Layers are probed only after 20 consecutive
    skipped steps. *Every rank must have this callback.*

    Args:
        run_dir: Folder of the run. After a failure, rank zero and each affected rank save their
            state once in `<run_dir>/numbers`. Only rank zero saves the weights. If None, nothing
            is saved.
        patience: Number of consecutive logged steps with a zero gradient after which to warn.

    Raises:
        ValueError: `patience` is not a positive integer.
        NonFiniteLossError: During training, see above.
    """

    def __init__(self, run_dir: str | None = None, patience: int = 3) -> None:
        why = "a warning follows after this number of logged steps with a zero gradient. Set patience=3"
        patience = plain_value(patience)
        require_whole("patience", patience, why, unit="logged steps")
        self.folder = None if run_dir is None else Path(run_dir) / "numbers"
        self.patience = patience
        self._current_batch: tuple[Any, int] | None = None
        self._probes: LayerProbes | None = None
        self._reset(torch.device("cpu"), step=0)

    def _reset(self, device: torch.device, *, step: int) -> None:
        self._bad_losses = _BadLosses(device)
        self._last_step = step
        self._num_reported = 0
        self._floor_since: int | None = None  # step at which the loss scale reached its floor
        self._scale_history: list[tuple[int, float]] = []
        self._num_zero: dict[str, int] = {}  # consecutive logged steps with a zero gradient
        self._losses_of_ranks = ""  # describes the ranks with bad losses while steps are skipped
        self._has_saved = False
        self._has_warned_of_floor = False

    def reads_gradients(self, trainer: pl.Trainer) -> bool:
        """Return whether this callback reads `p.grad` after the current step."""
        return is_logged_step(trainer, is_next=True)

    # ---- per batch: the host waits for nothing -------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset all counters."""
        self._reset(pl_module.device, step=trainer.global_step)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep a reference to the batch, and probe the layers after many consecutive skipped steps."""
        self._current_batch = (batch, batch_idx)
        # The number of skipped steps is on the device. It is read only when the host waits for the
        # device anyway.
        is_free = _reads_are_free(pl_module.device) or is_logged_step(trainer, is_next=True)
        if is_free and _num_consecutive_skips(trainer) >= PROBE_AFTER:
            self._note_scale(trainer)
            if not self._losses_of_ranks:
                # If nodes train independently, the ranks of other nodes do not skip these steps and
                # would not take part in a collective over all ranks.
                group = run_status(trainer).verdict_group
                self._losses_of_ranks = self._describe_losses_of_ranks(trainer, group)
            self._probes = LayerProbes(pl_module)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count non-finite losses on the device, and run all checks at logged steps."""
        loss = None
        if isinstance(outputs, dict):
            loss = outputs.get("loss")
        if isinstance(loss, Tensor):
            self._bad_losses.count(loss, step=trainer.global_step, batch_idx=batch_idx)
        self._forget_batch()
        if trainer.global_step == self._last_step:  # gradients are being accumulated
            return
        self._last_step = trainer.global_step
        if is_logged_step(trainer):
            self._check(trainer, pl_module, batch, batch_idx)

    def _forget_batch(self) -> None:
        self._current_batch = None
        if self._probes is not None:
            self._probes.remove()
            self._probes = None

    # ---- at logged steps -----------------------------------------------------------------------

    def _check(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._note_scale(trainer)
        if _num_consecutive_skips(trainer) == 0:
            self._losses_of_ranks = ""
        status = run_status(trainer)
        if status.loss_scales or status.has_grad_scaler:  # steps with bad losses are skipped
            self._warn_of_skipped(trainer)
            self._warn_at_floor(trainer)
        else:
            self._raise_if_not_finite(trainer, batch, batch_idx)
        self._warn_of_zeros(trainer, pl_module)

    def _raise_if_not_finite(self, trainer: pl.Trainer, batch: Any, batch_idx: int) -> None:
        """Raise `NonFiniteLossError` on all ranks if any rank had an inf or nan loss.

        Collective: every rank must call it, in the same order.
        """
        # Step and rank are encoded in one integer, so that an all-reduce of 8 bytes finds the first
        # bad loss.
        world_size = trainer.world_size
        first_step = self._bad_losses.first_step
        first = torch.where(
            first_step == NEVER, NEVER, first_step * world_size + trainer.global_rank
        )
        if world_size > 1:
            dist.all_reduce(first, dist.ReduceOp.MIN)
        step_and_rank = int(first)
        if step_and_rank == NEVER:
            return

        step, rank = divmod(step_and_rank, world_size)
        error = (
            f"The loss has not been finite since step {step}, first on rank {rank}. The weights are corrupted, because "
            f"precision={trainer.precision_plugin.precision!r} does not skip such steps. "
            f"{self._describe_losses_of_ranks(trainer)} Check the learning rate and the data of that batch, and look "
            f"for a log of 0 or a division by 0 in the loss. Then resume from a checkpoint written before step {step}."
        )
        saved = self._save(trainer, error, batch, batch_idx, is_concerned=True)
        raise NonFiniteLossError(error + saved)

    def _warn_of_skipped(self, trainer: pl.Trainer) -> None:
        num_bad = int(self._bad_losses.number)
        if num_bad > self._num_reported:
            warnings.warn(
                f"The loss of {num_bad - self._num_reported} batches on {_name_rank(trainer)} was inf or nan (last: "
                f"{self._bad_losses.describe_last()}). Their steps were skipped.",
                stacklevel=2,
            )
        self._num_reported = num_bad

    def _warn_at_floor(self, trainer: pl.Trainer) -> None:
        values = []
        is_at_floor = False
        for scale in run_status(trainer).loss_scales:
            value = scale.value
            values.append(value)
            floor = getattr(scale, "min_scale", None)  # a fixed scale has no floor
            if floor is not None and value <= floor:
                is_at_floor = True
        if not is_at_floor:
            self._floor_since = None
            return

        if self._floor_since is None:
            self._floor_since = trainer.global_step
        num_steps = trainer.global_step - self._floor_since
        if num_steps >= STEPS_AT_FLOOR and not self._has_warned_of_floor and trainer.is_global_zero:
            self._has_warned_of_floor = True
            warnings.warn(
                f"`loss_scale` (={min(values):g}) has been at its minimum for {num_steps} steps: gradients "
                "below 2**-24 = 6e-8 are rounded to zero, but larger scales overflow repeatedly. Clip "
                "gradients, lower the learning rate, or use precision='bf16-true'. Recent scales: "
                f"{self._describe_scales()}.",
                stacklevel=2,
            )

    def _warn_of_zeros(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn on rank zero about gradients that were zero at the last `patience` logged steps.

        Collective if parameters are sharded: every rank must call it, in the same order.
        """
        elsewhere = set()  # parameters of other stages of a pipeline
        for name, parameter in pl_module.named_parameters():
            if parameter.is_meta:
                elsewhere.add(name)
        largest = largest_gradients(pl_module)
        for name in elsewhere:
            largest.pop(name, None)

        # Gradients are the same on every rank, so rank zero warns. If parameters are sharded, it
        # needs the gradients of all ranks.
        are_shards = any(is_dtensor(parameter) for parameter in pl_module.parameters())
        if not are_shards:
            # Manual optimization may have removed all gradients.
            has_gradients = any(value is not None for value in largest.values())
            if not trainer.is_global_zero or not has_gradients:
                return
        values = self._values_over_ranks(largest, pl_module.device, are_shards=are_shards)
        if not trainer.is_global_zero:
            return

        for name, value in zip(largest, values, strict=True):
            # A gradient may be zero by chance once, for example because of dropout or a rare branch.
            if value == 0:
                self._num_zero[name] = self._num_zero.get(name, 0) + 1
            else:
                self._num_zero[name] = 0
        dead = [name for name, num_steps in self._num_zero.items() if num_steps == self.patience]
        if dead:
            self._warn_of_dead(dead, num_parameters=len(largest), step=trainer.global_step)

    def _values_over_ranks(
        self, largest: Mapping[str, Tensor | None], device: torch.device, *, are_shards: bool
    ) -> list[float]:
        """Return the largest magnitude of each gradient, over all ranks if parameters are sharded.

        The host waits for the device.
        """
        zero = torch.zeros((), device=device)
        tensors = [zero]  # `torch.stack` needs a tensor even without parameters
        for value in largest.values():
            tensors.append(zero if value is None else value.float())
        stacked = torch.stack(tensors)
        if are_shards:
            dist.all_reduce(stacked, dist.ReduceOp.MAX)
        values: list[float] = stacked.tolist()
        return values[1:]

    def _warn_of_dead(self, dead: list[str], *, num_parameters: int, step: int) -> None:
        if len(dead) == num_parameters:
            subject = "All gradients were"
            cause = (
                "the model does not learn. Check whether the loss is detached, or whether the loss scale is so small "
                "that all gradients underflow."
            )
        else:
            names = first_of([f"`{name}`" for name in dead], MOST_NAMES)
            subject = f"The gradient of {names} ({len(dead)} of {num_parameters}) was"
            cause = (
                "these layers do not learn. Check whether they are used, and whether their activations are dead (ReLU "
                "inputs below 0 for every sample). Freeze them with requires_grad=False if this is intended."
            )
        warnings.warn(
            f"{subject} zero at {self.patience} consecutive logged steps up to step {step}, so {cause}",
            stacklevel=3,
        )

    # ---- at the end of a run that fails --------------------------------------------------------

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Add a description of the current batch to the error, and save the state.

        Communication errors are not changed.
        """
        if self._current_batch is None or not isinstance(exception, Exception):
            self._forget_batch()
            return
        batch, batch_idx = self._current_batch
        probes = self._probes
        self._forget_batch()
        # A `NonFiniteLossError` already has a description. A failed wait was caused by another
        # rank, not by this rank's batch.
        if isinstance(exception, NonFiniteLossError) or failed_wait(exception) is not None:
            return
        try:
            self._add_diagnosis(trainer, exception, batch, batch_idx, probes)
        except Exception as error:  # for example because the device no longer responds
            exception.add_note(f"The diagnosis failed: {type(error).__name__}: {error}")

    def _add_diagnosis(
        self,
        trainer: pl.Trainer,
        exception: Exception,
        batch: Any,
        batch_idx: int,
        probes: LayerProbes | None,
    ) -> None:
        description, is_bad_batch = describe_batch(batch)
        is_concerned = True
        if isinstance(exception, EndlessOverflowError):
            diagnosis = f"{self._losses_of_ranks}{_describe_layers(probes)} Recent scales: {self._describe_scales()}."
            exception.args = (f"{exception} {diagnosis}",)
            is_concerned = is_bad_batch or int(self._bad_losses.number) > 0
        saved = self._save(trainer, str(exception), batch, batch_idx, is_concerned=is_concerned)
        exception.add_note(
            f"The error occurred on {_name_rank(trainer)} in batch {batch_idx}. Content of the batch: "
            f"{description}.{saved}"
        )

    def _save(
        self, trainer: pl.Trainer, error: str, batch: Any, batch_idx: int, *, is_concerned: bool
    ) -> str:
        """Save the state at most once, and return a sentence that the error message should contain."""
        if self.folder is None or self._has_saved or not (is_concerned or trainer.is_global_zero):
            return ""
        self._has_saved = True
        try:
            path = save_state(
                self.folder,
                trainer,
                batch=batch,
                batch_idx=batch_idx,
                error=error,
                history=self._scale_history,
            )
        except (OSError, RuntimeError) as save_error:
            # A full disk, for example, must not hide the original error.
            reason = str(save_error).partition("\n")[0]
            return f" The state could not be saved for inspection: {reason}."
        return "" if path is None else f" The state was saved for inspection: {path}."

    # ---- descriptions --------------------------------------------------------------------------

    def _describe_losses_of_ranks(
        self, trainer: pl.Trainer, group: dist.ProcessGroup | None = None
    ) -> str:
        """Describe in one sentence which ranks recently had inf or nan losses.

        All ranks return the same text. Collective: every rank of `group` (None: WORLD) must call it, in the same order.
        """
        recent_losses = self._bad_losses.describe_last(since=trainer.global_step - PROBE_AFTER)
        rank_losses = (trainer.global_rank, host_identity()[0], recent_losses)
        losses = [rank_losses]
        if trainer.world_size > 1:
            losses *= dist.get_world_size(group)
            dist.all_gather_object(losses, rank_losses, group=group)

        bad_ranks = []
        for rank, host, recent in losses:
            if recent:
                bad_ranks.append(f"rank {rank} (host {host}) in {recent}")
        if not bad_ranks:
            if group is not None:
                return "The loss was finite on every rank of this node."
            return "The loss was finite on every rank."
        text = "; ".join(bad_ranks[:4])
        if len(bad_ranks) > 4:
            text += "; ..."
        return f"The loss was inf or nan on {len(bad_ranks)} of {len(losses)} ranks: {text}."

    def _note_scale(self, trainer: pl.Trainer) -> None:
        for scale in run_status(trainer).loss_scales[:1]:
            value = scale.value
            if not self._scale_history or self._scale_history[-1][1] != value:
                recent = self._scale_history[-2 * NUM_SAVED :]
                self._scale_history = [*recent, (trainer.global_step, value)]

    def _describe_scales(self) -> str:
        recent = self._scale_history[-NUM_SAVED:]
        return ", ".join(f"{value:g} at step {step}" for step, value in recent)


class _BadLosses:
    """Device-side counter of inf and nan losses.

    Counting does not make the host wait.

    Attributes:
        number: Number of inf and nan losses.
        first_step: Step of the first such loss, or `NEVER`.
    """

    def __init__(self, device: torch.device) -> None:
        self.number = torch.zeros((), dtype=torch.int64, device=device)
        self.first_step = torch.full((), NEVER, dtype=torch.int64, device=device)
        # Ring buffer of (step, batch index), in which the oldest entry is overwritten.
        self._last = torch.full((NUM_SAVED, 2), -1, dtype=torch.int64, device=device)
        self._rows = torch.arange(NUM_SAVED, device=device).unsqueeze(1)

    def count(self, loss: Tensor, *, step: int, batch_idx: int) -> None:
        """Count the loss if it is inf or nan.

        The host reads the counter only at logged steps, when `TrainingMetrics` waits for the device
        anyway.
        """
        is_bad = ~torch.isfinite(loss.detach()).all()
        # The device decides whether the entry is written.
        row = self.number % NUM_SAVED
        entry = torch.stack([torch.full_like(row, step), torch.full_like(row, batch_idx)])
        self._last = torch.where(is_bad & (self._rows == row), entry, self._last)
        self.number = self.number + is_bad
        self.first_step = torch.where(is_bad & (self.first_step == NEVER), step, self.first_step)

    def describe_last(self, since: int = 0) -> str:
        """List the batches and steps of the latest inf and nan losses, from step `since` on.

        The host waits for the device.
        """
        batches = []
        for step, batch_idx in sorted(self._last.tolist()):
            if step >= max(since, 0):
                batches.append(f"batch {batch_idx} (step {step})")
        return ", ".join(batches[-3:])


def _describe_layers(probes: LayerProbes | None) -> str:
    if probes is None or not probes.num_layers:
        return ""
    first = probes.first_not_finite()
    if first is None:
        return f" The outputs of all {probes.num_layers} layers were finite, so the loss or backward is the cause."
    return f" The first layer whose output had inf or nan was {first}."


def _reads_are_free(device: torch.device) -> bool:
    return device.type == "cpu"


def _name_rank(trainer: pl.Trainer) -> str:
    return f"rank {trainer.global_rank} (host {host_identity()[0]})"


def _num_consecutive_skips(trainer: pl.Trainer) -> int:
    steps = run_status(trainer).optimizer_steps
    return max((int(step.num_in_a_row) for step in steps), default=0)
