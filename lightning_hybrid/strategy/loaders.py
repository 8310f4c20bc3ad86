"""Preparation of data loaders by a strategy, with prefetching and exact resume."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hybrid.lightning_names import lightning_function, lightning_types
from lightning_hybrid.strategy.evaluation import Evaluation
from lightning_hybrid.strategy.exact_resume.epoch_start_hooks import warn_of_skipped_epoch_start
from lightning_hybrid.strategy.exact_resume.rank_states import states_of_all_ranks
from lightning_hybrid.strategy.user_code_checks import user_moves_batches

# These are imported in functions at run time, because their package also imports the loaders of this project.
if TYPE_CHECKING:
    from lightning_hybrid.data.batch_counters import ResumedPlace
    from lightning_hybrid.data.exact_resume import ExactResume
    from lightning_hybrid.data.place import IteratorsOfTraining, Place

# Key in a checkpoint. If the states were in Lightning's own entry, `ddp` would reject them for loaders without a state.
_KEY = "exact_resume"


class TrainingLoaders:
    """Manager of a strategy's training loaders, which determines where a resumed run continues.

    It implements the interface `Reader`, which tells exact loaders the position in training.

    Args:
        exact_resume: Whether a user's own `DataLoader` resumes exactly.
        evaluation: Object that wraps the loaders of validation, test and prediction.

    Attributes:
        rank: The index of this rank among the ranks that read different data.
        world_size: The number of ranks that read different data.
        seed: The seed of the random numbers that loaders draw.
        is_on: Whether a user's own `DataLoader` resumes exactly.
    """

    sets_epochs = False  # Lightning's training loop sets the epochs of samplers.
    reads_to_end = False  # It fetches as many batches as the loader's length.

    def __init__(self, exact_resume: bool, evaluation: Evaluation) -> None:
        self.rank = 0
        self.world_size = 1
        self.seed = 0
        self.is_on = exact_resume
        self._evaluation = evaluation
        self._trainer: Any = None
        # Function through which extensions replace a prepared training loader.
        self._replace: Callable[[Any], Any] = _unchanged
        # The states in the checkpoint, with None for loaders that save their own state through Lightning.
        self._states: list[dict[str, Any] | None] | None = None
        # The training loaders that `process` has returned, kept until training starts to detect replaced loaders.
        self._processed: list[Any] = []
        self._start: Place | None = None
        self._accumulated_before = 1
        self._has_loader_of_data = False
        self._has_started = False
        self._has_warned = False

    def begin(
        self,
        trainer: Any,
        share: Mapping[str, int],
        replace: Callable[[Any], Any] | None = None,
    ) -> None:
        """Reset the state for a new training run, and choose the random seed of the loaders.

        Collective if several ranks read the same data: every rank must call it.

        Args:
            trainer: The trainer.
            share: The number of ranks that read different data, `num_replicas`, and this rank's index, `rank`.
            replace: Function that returns the loader that training iterates over in place of a prepared one. None: the
                loader itself.
        """
        self._trainer = trainer
        self._replace = replace if replace is not None else _unchanged
        self.rank = share["rank"]
        self.world_size = share["num_replicas"]
        self.seed = torch.initial_seed()
        self._processed = []
        self._start = None
        self._has_loader_of_data = False
        self._has_started = False
        self._has_warned = False
        self._separate_combined_loader()
        if trainer.world_size > self.world_size:
            # Ranks that read the same data use the seed of the first rank among them.
            seeds: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(seeds, (self.rank, self.seed))
            self.seed = next(seed for rank, seed in seeds if rank == self.rank)

    def _separate_combined_loader(self) -> None:
        """Replace the user's `CombinedLoader` by a copy, so that user code can still iterate over the original.

        Lightning stores the iterators of training in the loader, and iterating over it would replace them.
        """
        source = self._trainer.fit_loop._data_source
        if isinstance(
            source.instance, lightning_types("pytorch.utilities.combined_loader.CombinedLoader")
        ):
            source.instance = copy.copy(source.instance)

    def after_optimizers(self, trainer: Any) -> None:
        """Discard loaders that `configure_optimizers` has created, so that Lightning rebuilds them on resume.

        `trainer.estimated_stepping_batches` creates loaders before their state in the checkpoint is read, and Lightning
        2.6 would drop that state.
        """
        if trainer.ckpt_path is not None:
            trainer.fit_loop._combined_loader = None

    def process(
        self, loader: Any, module: Any, device: torch.device, compute_dtype: torch.dtype | None
    ) -> Any:
        """Prepare a user's loader, and return the loader that Lightning iterates over instead.

        A training loader resumes exactly in the middle of an epoch. Other loaders can yield every sample once, see
        `evaluation.py`. All loaders move batches to the device in advance.

        Args:
            loader: The user's loader.
            module: The user's module.
            device: The device of this rank.
            compute_dtype: The dtype of forward and backward in half precision, or None.
        """
        from lightning_hybrid.data.prefetch import unwrapped

        trainer = module.trainer
        is_of_training = trainer.state.fn == "fit" and trainer.training
        with_prefetcher = _prefetcher_for(module, device, compute_dtype)
        if is_of_training:
            loader = unwrapped(loader)
        # Loaders of `lightning_hybrid.data` resume at the trainer's counters.
        if _bind_trainer(loader, trainer):
            self._has_loader_of_data = is_of_training and self._resumes_by_counters()
        # Lightning looks for a `DataLoader`, which the prefetcher will hide.
        lightning_function("fabric.utilities.data._auto_add_worker_init_fn")(
            loader, trainer.global_rank
        )
        if not is_of_training:
            return self._evaluation.wrap(loader, trainer, with_prefetcher)
        return self._wrap_training_loader(loader, trainer, with_prefetcher)

    def process_second(
        self, loader: Any, module: Any, device: torch.device, compute_dtype: torch.dtype | None
    ) -> Any:
        """Prepare a loader that a callback reads in addition to Lightning's own loaders.

        The loader yields its batches unchanged in every stage, even if evaluation is exact. It moves them to the device
        in advance.

        Args:
            loader: The loader of the callback.
            module: The user's module.
            device: The device of this rank.
            compute_dtype: The dtype of forward and backward in half precision, or None.
        """
        trainer = module.trainer
        _bind_trainer(loader, trainer)
        lightning_function("fabric.utilities.data._auto_add_worker_init_fn")(
            loader, trainer.global_rank
        )
        return _prefetcher_for(module, device, compute_dtype)(loader)

    def user_loader_of(self, loader: Any) -> Any:
        """Return the user's loader behind a training loader that `process` returned."""
        from lightning_hybrid.data.prefetch import unwrapped

        return unwrapped(loader)

    def _resumes_by_counters(self) -> bool:
        """Return whether loaders of `lightning_hybrid.data` resume from the trainer's batch counters."""
        return True

    def _wrap_training_loader(
        self, loader: Any, trainer: Any, with_prefetcher: Callable[..., Any]
    ) -> Any:
        """Add prefetching to a training loader, and exact resume if it is enabled and supported.

        The user's loader is wrapped in this order:

        1. `exact` adds exact resume. Before that, `uncount_cut_epoch` corrects the trainer's epoch counters if the
           checkpoint's last epoch ended early, for example because of `max_steps`. Lightning counts such an epoch as
           finished, so a resumed run would skip its remaining samples.
        2. The prefetcher moves batches to the device in advance, unless user code moves them.
        3. `_replace` lets extensions replace the loader, for example to join uneven batches.

        Until training starts, the result is also stored in `_processed`. `_refuse_replaced_loaders` then checks that
        training uses these loaders and not others that user code has put in their place, whose positions are unknown.
        """
        from lightning_hybrid.data.batch_counters import uncount_cut_epoch
        from lightning_hybrid.data.exact_loader import can_be_exact, exact
        from lightning_hybrid.data.place import IteratorsOfTraining

        if self.is_on and can_be_exact(loader):
            uncount_cut_epoch(trainer)
            loader = exact(loader, self)
        loader = self._replace(with_prefetcher(loader, IteratorsOfTraining(trainer)))
        # Loaders that Lightning reloads after the start of training are not checked.
        if not self._has_started:
            self._processed.append(loader)
        return loader

    # ---- reader ------------------------------------------------------------------------------

    @property
    def accumulate_grad_batches(self) -> int:
        """Number of batches per optimizer step."""
        return int(self._trainer.accumulate_grad_batches)

    def is_reading(self, holder: Iterator[Any]) -> bool:
        """Return whether an iterator belongs to the training loop rather than to user code."""
        from lightning_hybrid.data.place import is_held_by_training

        return is_held_by_training(self._trainer, holder)

    def is_within_training(self) -> bool:
        """Return whether the training loop has started to read its loaders."""
        return self._trainer.fit_loop._data_fetcher is not None

    @property
    def _resumes(self) -> list[ExactResume]:
        resumes: list[ExactResume] = []
        for loader in self._training_loaders():
            if hasattr(loader, "exact_resume"):
                resumes.append(loader.exact_resume)
        return resumes

    def _training_loaders(self) -> list[Any]:
        combined_loader = self._trainer.fit_loop._combined_loader
        if combined_loader is None:
            return []
        return list(combined_loader.flattened)

    # ---- start of a run ----------------------------------------------------------------------

    def place_of(self, resume: ExactResume) -> Place:
        """Return the epoch and batch at which the next training pass over a loader starts.

        Both are computed from the counters of the training loop.
        """
        from lightning_hybrid.data.place import Place

        self._load_states()  # This runs before `on_train_start` if a loader has no length.
        resume.number = self._resumes.index(resume)
        fit = self._trainer.fit_loop
        if not fit.is_resuming or resume.has_begun:
            return self._next_place(resume)

        start = self._resumed_start()
        length = resume.length
        if length:
            if self._repeats_shorter_loaders():
                cycle, batches = divmod(start.batches, length)
                return Place(start.epoch, cycle, batches)
            return Place(start.epoch, 0, min(start.batches, length))
        state = resume.loaded
        if state is None or state["epoch"] != start.epoch:
            return start
        return Place(start.epoch, state["cycle"], state["batches"] - state["total"] + start.batches)

    def _repeats_shorter_loaders(self) -> bool:
        """Return whether shorter loaders restart within an epoch, as in the mode `max_size_cycle`."""
        combined_loader = self._trainer.fit_loop._combined_loader
        has_several = len(combined_loader.flattened) > 1
        return has_several and combined_loader._mode == "max_size_cycle"

    def _next_place(self, resume: ExactResume) -> Place:
        """Return the position of the next epoch, or of the next pass over a loader within the epoch."""
        from lightning_hybrid.data.place import Place

        fit = self._trainer.fit_loop
        epoch = fit.epoch_progress.current.processed
        if fit._data_fetcher.fetched == 0:
            return Place(epoch)
        resume.refuse_second_reader()
        return Place(epoch, resume.current.place.cycle + 1)

    def _load_states(self) -> None:
        """Restore the loader states of a checkpoint in the existing training loaders."""
        states = [state for state in self._states or () if state is not None]
        self._states = None
        if not self._trainer.fit_loop.is_resuming:
            return  # The states belong to a checkpoint that was only validated.
        resumes = self._resumes
        if len(states) == len(resumes):
            for resume, state in zip(resumes, states, strict=True):
                resume.load_state_dict(state)
        elif states:
            rank_zero_warn(
                f"The number of training loaders (={len(resumes)}) differs from the number in the checkpoint "
                f"(={len(states)}). The loader states of the checkpoint are ignored, so the rest of the epoch may have "
                "different samples. To resume exactly, use as many training loaders as the interrupted run."
            )

    def _resumed_start(self) -> Place:
        """Return the epoch in which a resumed run continues, and its number of finished batches.

        The batches are counted in the batch size of this run.

        Raises:
            NotExactError: The samples of a step would differ from the interrupted run.
        """
        from lightning_hybrid.data.batch_counters import resumed_place
        from lightning_hybrid.data.place import Place

        if self._start is None:
            self._accumulated_before = self.accumulate_grad_batches
            for resume in self._resumes:
                if resume.loaded is not None:
                    self._accumulated_before = int(resume.loaded["accumulate_grad_batches"])
            resumed = resumed_place(
                self._trainer, accumulate_grad_batches_before=self._accumulated_before
            )
            self._set_accumulation_of(resumed.epoch)
            self._start = Place(resumed.epoch, batches=self._batches_after(resumed))
        return self._start

    def _set_accumulation_of(self, epoch: int) -> None:
        """Set the number of accumulated batches for an epoch, as `GradientAccumulationScheduler` does.

        The callback itself acts only at the start of an epoch, which a resumed run may skip.
        """
        for callback in self._trainer.callbacks:
            if isinstance(
                callback, lightning_types("pytorch.callbacks.GradientAccumulationScheduler")
            ):
                self._trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(epoch)

    def _batches_after(self, resumed: ResumedPlace) -> int:
        """Return the number of finished batches of the epoch, converted to this run's batch size."""
        num_done = resumed.batches_done
        if num_done == 0:
            return 0
        if resumed.is_epoch_done:
            return self._length_of_finished_epoch(num_done)
        numbers = [resume.batches_after(num_done) for resume in self._resumes]
        for resume, number in zip(self._resumes, numbers, strict=True):
            if number != numbers[0]:
                raise resume.error(
                    f"this loader would continue after {number} batches, but another loader would continue after "
                    f"{numbers[0]}. Resume all loaders with the ranks and batch sizes of the checkpoint, or scale all "
                    "batch sizes by the same factor"
                )
        if not numbers:
            return num_done
        return numbers[0]

    def _length_of_finished_epoch(self, num_done: int) -> int:
        """Return the number of batches in an already finished epoch, converted to this run's batch size.

        With another batch size, the last step of the epoch may have a different number of batches.
        """
        max_batches = self._trainer.fit_loop.max_batches
        has_other_batches = any(resume.has_other_batches() for resume in self._resumes)
        if has_other_batches and max_batches < float("inf"):
            return int(max_batches)
        return num_done

    def on_train_start(self) -> None:
        """Correct the batch counters of a resumed run, and warn if the resume is inexact.

        Loaders of `lightning_hybrid.data` correct the counters in the same way.
        """
        from lightning_hybrid.data.batch_counters import (
            count_batches_as,
            resumes_within_epoch,
            rewind_to_whole_steps,
        )

        trainer = self._trainer
        fit = trainer.fit_loop
        if self.is_on:
            self._refuse_replaced_loaders()
        self._has_started = True
        self._processed = []
        if not fit.is_resuming:
            return

        self._load_states()
        if self._resumes:
            start = self._resumed_start()
            if resumes_within_epoch(trainer):
                num_before = rewind_to_whole_steps(
                    trainer, accumulate_grad_batches_before=self._accumulated_before
                )
                count_batches_as(trainer, num_before, start.batches)
            reload_period = trainer.reload_dataloaders_every_n_epochs
            if reload_period > 1:  # Lightning counts from the epoch in which a run begins.
                fit._last_train_dl_reload_epoch = start.epoch - start.epoch % reload_period
            self._warn_without_state(start)
            self._warn_of_caveats()
        elif self._has_loader_of_data:
            resumes_within_epoch(trainer)
        if self.is_on:
            warn_of_skipped_epoch_start(trainer)

    def _refuse_replaced_loaders(self) -> None:
        """Raise if user code has replaced a training loader that `process` returned.

        The position of such a loader's iterators is unknown.

        Raises:
            RuntimeError: A training loader was replaced.
        """
        fit = self._trainer.fit_loop
        for loader in self._training_loaders():
            if self._processed and not any(loader is processed for processed in self._processed):
                raise RuntimeError(
                    f"The training loader (={type(loader).__name__}) is not the one that the strategy's "
                    "`process_dataloader` returned, so its position is not tracked. Wrap the loader before you pass "
                    "it to `Trainer.fit`, or set exact_resume=False."
                )
        for resume in self._resumes:
            if resume.has_begun and fit._data_fetcher.fetched == 0:
                resume.refuse_second_reader()

    def _warn_without_state(self, start: Place) -> None:
        stateless = [resume for resume in self._resumes if not resume.has_state]
        if not start.batches or not stateless:
            return
        text = (
            "The checkpoint has no state of the training loader, because it was written with `ddp` or "
            "exact_resume=False"
        )
        if all(resume.traits.follows_from_epoch for resume in stateless):
            rank_zero_warn(
                f"{text}. Training resumes after {start.batches} batches of the epoch, which is exact only with the "
                "number of ranks, the batch size and the gradient accumulation of the interrupted run."
            )
        else:
            rank_zero_warn(
                f"{text}, but its order does not depend on the epoch alone. The rest of this epoch may have "
                "different samples."
            )

    def _warn_of_caveats(self) -> None:
        """Warn once about training loaders whose state is restored inexactly or slowly."""
        if self._has_warned:
            return
        self._has_warned = True
        for resume in self._resumes:
            caveat = resume.caveat()
            if caveat:
                rank_zero_warn(f"The training loader may resume inexactly or slowly: {caveat}.")

    # ---- checkpoints -------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any], *, is_alone: bool) -> None:
        """Move the loader states in a checkpoint to a separate entry, which holds the states of all ranks.

        Collective, unless `is_alone`: every rank must call it.

        Args:
            checkpoint: The checkpoint, which is changed.
            is_alone: Whether this rank saves without the other ranks.
        """
        if not self.is_on or self._trainer is None or "loops" not in checkpoint:
            return
        loop = checkpoint["loops"]["fit_loop"]["state_dict"]
        states = loop.pop("combined_loader", [])
        gathered = states_of_all_ranks(states, self.rank, is_alone=is_alone)
        # States of loaders that save themselves through Lightning stay in Lightning's entry.
        states_for_lightning: list[Any] = []
        for state, gathered_state in zip(states, gathered, strict=True):
            if gathered_state is None:
                states_for_lightning.append(state)
        if states_for_lightning:
            loop["combined_loader"] = states_for_lightning
        if any(gathered):
            checkpoint[_KEY] = gathered
            self._warn_of_caveats()

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Store the loader states of a checkpoint, and restore Lightning's own list of these states."""
        self._states = None
        if self.is_on:
            self._states = checkpoint.get(_KEY)
        loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if not self._states or "combined_loader" not in loop:
            return
        states_for_lightning = iter(loop["combined_loader"])
        states: list[Any] = []
        for state in self._states:
            if state is None:
                state = next(states_for_lightning)
            states.append(state)
        loop["combined_loader"] = states


def _bind_trainer(loader: Any, trainer: Any) -> bool:
    """Set the trainer of a loader of `lightning_hybrid.data`, and return whether it is one."""
    bind_trainer = getattr(loader, "bind_trainer", None)
    if not callable(bind_trainer):
        return False
    bind_trainer(trainer)
    return True


def _prefetcher_for(
    module: Any, device: torch.device, compute_dtype: torch.dtype | None
) -> Callable[..., Any]:
    """Return a function that wraps a loader in a prefetcher, unless hooks of the module move batches."""
    from lightning_hybrid.data.prefetch import prefetch

    moves_batches = user_moves_batches(module)

    def with_prefetcher(inner: Any, is_training: IteratorsOfTraining | None = None) -> Any:
        # The user's hooks that move batches expect them in host memory.
        if moves_batches:
            return inner
        return prefetch(inner, device, compute_dtype, is_training)

    return with_prefetcher


def _unchanged(loader: Any) -> Any:
    return loader
