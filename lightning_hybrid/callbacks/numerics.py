"""Diagnosis of numbers that go wrong: which rank, which batch, which layer; and a snapshot of the state."""

from __future__ import annotations

import warnings
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
    largest_gradients,
    save_state,
)
from lightning_hybrid.callbacks.training_metrics import is_logged_step
from lightning_hybrid.checks import plain_value, require_whole
from lightning_hybrid.comm.health.watchdog import failed_wait
from lightning_hybrid.comm.topology import host_identity
from lightning_hybrid.optim.dtensor import is_dtensor
from lightning_hybrid.precision.skipped_steps import EndlessOverflowError
from lightning_hybrid.run_status import run_status

# Skipped steps in a row after which layers are probed. A dynamic scale may need 16 to settle from 2**16.
PROBE_AFTER = 20

# Steps at the least loss scale before a warning: a short burst of overflows would be over by then.
STEPS_AT_FLOOR = 200

NUM_SAVED = 8
MOST_NAMES = 5
NEVER = torch.iinfo(torch.int64).max


class NonFiniteLossError(RuntimeError):
    """A loss of inf or nan in a precision that skips no step: it is in the weights."""


class NumericsMonitor(Callback):
    """A monitor of endless overflow, losses that are not finite, and gradients that are zero, with their causes.

    ==============================================  ==================================================================
    40 steps skipped in a row (the precision's own  the error also says on which ranks and hosts the loss is not
    error, `EndlessOverflowError`)                  finite, in which batches, which layer is the first to put out inf
                                                    or nan, and how the scale got where it is
    a loss that is not finite, where no step is     error at the next logged step, on every rank: rank, host, step and
    skipped (`"32-true"`, `"bf16-true"`, ...)       batch at which it began
    the same, where the step was skipped            warning at the next logged step, on the rank that it happened on
    the loss scale at its floor for 200 steps       warning: smaller gradients are lost
    gradients of zeros, or none, at `patience`      warning that names the parameters: a layer that died, or is not
    logged steps in a row                           used; or all of them
    any error in a batch, but communication's       the batch is described in a note, and saved
    ==============================================  ==================================================================

    The host waits for the device at logged steps only. Layers are probed only after 20 skipped steps in a row. *Every
    rank must have this callback.*

    Args:
        run_dir: the state at the failure is saved in `<run_dir>/numbers`, once: by each rank whose own numbers are bad,
            and by rank zero, with the weights. None: nowhere.
        patience: logged steps in a row at which a gradient must be zero for the warning.

    Raises:
        ValueError: `patience` is not a whole number above zero.
        NonFiniteLossError: in training, see above.
    """

    def __init__(self, run_dir: str | None = None, patience: int = 3) -> None:
        why = "so often a gradient must be found zero. Write patience=3"
        patience = plain_value(patience)
        require_whole("patience", patience, why, unit="logged steps")
        self.folder = None if run_dir is None else Path(run_dir) / "numbers"
        self.patience = patience
        self._batch: tuple[Any, int] | None = None
        self._probes: LayerProbes | None = None

    def reads_gradients(self, trainer: pl.Trainer) -> bool:
        """Return whether `p.grad` is read after the step in progress."""
        return is_logged_step(trainer, is_next=True)

    # ---- per batch: nothing waits ------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset what was seen."""
        device = pl_module.device
        self._num_bad = torch.zeros((), dtype=torch.int64, device=device)
        # (step, batch), oldest overwritten
        self._bad = torch.full((NUM_SAVED, 2), -1, dtype=torch.int64, device=device)
        self._places = torch.arange(NUM_SAVED, device=device).unsqueeze(1)
        self._first_bad = torch.full((), NEVER, dtype=torch.int64, device=device)
        self._last_step = trainer.global_step
        self._num_reported = 0
        self._floor_since = -1
        self._history: list[tuple[int, float]] = []
        self._num_zero: dict[str, int] = {}
        self._on_others: str = ""
        self._has_saved = self._has_warned_of_floor = False

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remember the batch while it is worked on; where every step is skipped, probe its layers."""
        self._batch = (batch, batch_idx)
        # The count of skipped steps is on the device: it is read only where that makes the host wait for nothing more.
        is_free = _reads_are_free(pl_module.device) or is_logged_step(trainer, is_next=True)
        if is_free and _num_in_a_row(trainer) >= PROBE_AFTER:
            self._note_scale(trainer)
            if not self._on_others:
                # Not of all ranks: while nodes take steps of their own, those of another skip none.
                self._on_others = self._ask_others(trainer, run_status(trainer).verdict_group)
            self._probes = LayerProbes(pl_module)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count losses that are not finite, on the device; look at a logged step."""
        if isinstance(outputs, dict) and isinstance(loss := outputs.get("loss"), Tensor):
            self._count(loss, step=trainer.global_step, batch_idx=batch_idx)
        self._forget()
        if trainer.global_step == self._last_step:  # accumulating gradients
            return
        self._last_step = trainer.global_step
        if is_logged_step(trainer):
            self._look(trainer, pl_module, batch, batch_idx)

    def _count(self, loss: Tensor, *, step: int, batch_idx: int) -> None:
        # The answer stays on the device; the host reads it at logged steps, where `TrainingMetrics` reads anyway.
        bad = ~torch.isfinite(loss.detach()).all()
        # A ring buffer on the device: only bad losses are written, which is decided there, so the host never waits.
        place = self._num_bad % NUM_SAVED
        entry = torch.stack([torch.full_like(place, step), torch.full_like(place, batch_idx)])
        self._bad = torch.where(bad & (self._places == place), entry, self._bad)
        self._num_bad = self._num_bad + bad
        self._first_bad = torch.where(bad & (self._first_bad == NEVER), step, self._first_bad)

    def _forget(self) -> None:
        self._batch = None
        if self._probes is not None:
            self._probes.remove()
            self._probes = None

    # ---- at logged steps ---------------------------------------------------------------------------------------------

    def _look(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._note_scale(trainer)
        if _num_in_a_row(trainer) == 0:
            self._on_others = ""
        status = run_status(trainer)
        if status.loss_scales or status.has_grad_scaler:  # then such a step is skipped
            self._warn_of_skipped(trainer)
            self._warn_at_floor(trainer)
        else:
            self._raise_if_not_finite(trainer, batch, batch_idx)
        self._warn_of_zeros(trainer, pl_module)

    def _raise_if_not_finite(self, trainer: pl.Trainer, batch: Any, batch_idx: int) -> None:
        # On every rank what any rank has seen first: (step, rank) in one number, so the minimum is one of 8 bytes.
        world = trainer.world_size
        key = torch.where(
            self._first_bad == NEVER, NEVER, self._first_bad * world + trainer.global_rank
        )
        if world > 1:
            dist.all_reduce(key, dist.ReduceOp.MIN)
        if (found := int(key)) == NEVER:
            return
        step, rank = divmod(found, world)
        error = (
            f"The loss is not finite since step {step}, on rank {rank} first, and precision="
            f"{trainer.precision_plugin.precision!r} skips no step: the weights are lost. {self._ask_others(trainer)} "
            "Look at the learning rate, at the data of that batch, and for a log or division of 0 in the loss; resume "
            f"from a checkpoint written before step {step}."
        )
        raise NonFiniteLossError(
            error + self._save(trainer, error, batch, batch_idx, is_concerned=True)
        )

    def _warn_of_skipped(self, trainer: pl.Trainer) -> None:
        num_bad = int(self._num_bad)
        if num_bad > self._num_reported:
            warnings.warn(
                f"The loss of {num_bad - self._num_reported} batches on {_here(trainer)} was inf or nan, the last: "
                f"{self._recent()}. Their steps were skipped.",
                stacklevel=2,
            )
        self._num_reported = num_bad

    def _warn_at_floor(self, trainer: pl.Trainer) -> None:
        scales = [
            (scale.value, getattr(scale, "min_scale", None))
            for scale in run_status(trainer).loss_scales
        ]
        # A fixed scale has no floor.
        if not any(floor is not None and value <= floor for value, floor in scales):
            self._floor_since = -1
            return
        self._floor_since = trainer.global_step if self._floor_since < 0 else self._floor_since
        num_steps = trainer.global_step - self._floor_since
        if num_steps >= STEPS_AT_FLOOR and not self._has_warned_of_floor and trainer.is_global_zero:
            self._has_warned_of_floor = True
            value = min(value for value, _ in scales)
            warnings.warn(
                f"`loss_scale` (={value:g}) has been at its floor for {num_steps} steps: gradients below 2**-24 = 6e-8 "
                "are lost. Larger ones overflow again and again, so clip gradients, lower the learning rate, or use "
                f"precision='bf16-true'. The scale: {self._scales()}.",
                stacklevel=2,
            )

    def _warn_of_zeros(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Gradients are the same on every rank, so rank zero warns; but of shards it asks the others.
        elsewhere = {
            name for name, parameter in pl_module.named_parameters() if parameter.is_meta
        }  # other stages
        found = {
            name: one for name, one in largest_gradients(pl_module).items() if name not in elsewhere
        }
        are_shards = any(map(is_dtensor, pl_module.parameters()))
        if not are_shards and (
            not trainer.is_global_zero or all(one is None for one in found.values())
        ):
            return  # manual loops may have removed them
        device = pl_module.device
        nothing = torch.zeros((), device=device)
        values = torch.stack(
            [nothing, *(nothing if one is None else one.float() for one in found.values())]
        )
        if are_shards:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        _, *largest = values.tolist()
        if not trainer.is_global_zero:
            return
        for name, value in zip(found, largest, strict=True):
            # One zero may be chance, such as a layer that dropout or a rare branch left out.
            self._num_zero[name] = self._num_zero.get(name, 0) + 1 if value == 0 else 0
        dead = [name for name, num in self._num_zero.items() if num == self.patience]
        if dead:
            whole = len(dead) == len(found)
            few = ", ".join(f"`{name}`" for name in dead[:MOST_NAMES]) + (
                ", ..." if len(dead) > MOST_NAMES else ""
            )
            cause = (
                "nothing is learned: is the loss detached, or the loss scale so small that all gradients underflow?"
                if whole
                else "these layers do not learn: are they used, and do their activations die (ReLU below 0 for every "
                "input)? Freeze them with requires_grad=False if that is wanted."
            )
            warnings.warn(
                f"{'All gradients are' if whole else f'The gradient of {few} ({len(dead)} of {len(found)}) is'} zero, "
                f"at {self.patience} logged steps in a row up to step {trainer.global_step}: {cause}",
                stacklevel=2,
            )

    # ---- at the end of a run that fails ------------------------------------------------------------------------------

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Add what is known of the batch, and save the state; not for errors of communication."""
        if self._batch is None or not isinstance(exception, Exception):
            self._forget()
            return
        (batch, batch_idx) = self._batch
        probes = self._probes
        self._forget()
        # These say all there is to say, and another rank's failure has no cause in this rank's batch.
        if isinstance(exception, NonFiniteLossError) or failed_wait(exception) is not None:
            return
        try:
            words, is_bad = describe_batch(batch)
            if isinstance(exception, EndlessOverflowError):
                why = f"{self._on_others}{self._of_layers(probes)} The scale: {self._scales()}."
                exception.args = (f"{exception} {why}",)
            own = (
                is_bad or not isinstance(exception, EndlessOverflowError) or int(self._num_bad) > 0
            )
            saved = self._save(trainer, str(exception), batch, batch_idx, is_concerned=own)
            exception.add_note(f"On {_here(trainer)}, in batch {batch_idx}: {words}.{saved}")
        except Exception as error:  # such as a device that answers nothing any more
            exception.add_note(f"Nothing more could be found out: {type(error).__name__}: {error}")

    def _of_layers(self, probes: LayerProbes | None) -> str:
        if probes is None or not probes.num_layers:
            return ""
        first = probes.first_not_finite()
        if first is None:
            return f" The outputs of all {probes.num_layers} layers were finite: it is in the loss, or in backward."
        return f" The first layer to put out inf or nan was {first}."

    def _save(
        self, trainer: pl.Trainer, error: str, batch: Any, batch_idx: int, *, is_concerned: bool
    ) -> str:
        if self.folder is None or self._has_saved or not (is_concerned or trainer.is_global_zero):
            return ""
        self._has_saved = True
        state: dict[str, Any] = {
            "batch": batch,
            "batch_idx": batch_idx,
            "error": error,
            "history": self._history,
        }
        try:
            path = save_state(self.folder, trainer, **state)
        except (
            OSError,
            RuntimeError,
        ) as trouble:  # such as a full disk: it must not hide what went wrong before
            return f" The state was not saved for a look: {str(trouble).partition(chr(10))[0]}."
        return "" if path is None else f" Saved for a look: {path}."

    # ---- words -------------------------------------------------------------------------------------------------------

    def _ask_others(self, trainer: pl.Trainer, group: dist.ProcessGroup | None = None) -> str:
        # Collective; the same text on all ranks of the group (None: WORLD).
        own = (
            trainer.global_rank,
            host_identity()[0],
            self._recent(since=trainer.global_step - PROBE_AFTER),
        )
        ranks = [own]
        if trainer.world_size > 1:
            ranks *= dist.get_world_size(group)
            dist.all_gather_object(ranks, own, group=group)
        bad = [one for one in ranks if one[2]]
        if not bad:
            return f"The loss was finite on every rank{'' if group is None else ' of this node'}."
        few = "; ".join(f"rank {rank} (host {host}) in {recent}" for rank, host, recent in bad[:4])
        return f"The loss was inf or nan on {len(bad)} of {len(ranks)} ranks: {few}{'; ...' if len(bad) > 4 else ''}."

    def _recent(self, since: int = 0) -> str:
        places = [
            f"batch {batch} (step {step})"
            for step, batch in sorted(self._bad.tolist())
            if step >= max(since, 0)
        ]
        return ", ".join(places[-3:])

    def _note_scale(self, trainer: pl.Trainer) -> None:
        for scale in run_status(trainer).loss_scales[:1]:
            value = scale.value
            if not self._history or self._history[-1][1] != value:
                self._history = [*self._history[-2 * NUM_SAVED :], (trainer.global_step, value)]

    def _scales(self) -> str:
        return ", ".join(f"{value:g} at step {step}" for step, value in self._history[-NUM_SAVED:])


def _reads_are_free(device: torch.device) -> bool:
    return device.type == "cpu"


def _here(trainer: pl.Trainer) -> str:
    return f"rank {trainer.global_rank} (host {host_identity()[0]})"


def _num_in_a_row(trainer: pl.Trainer) -> int:
    return max((int(one.num_in_a_row) for one in run_status(trainer).optimizer_steps), default=0)
