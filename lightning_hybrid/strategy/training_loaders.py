"""What becomes of loaders: those of a user resume exactly, and batches are on the device in time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hybrid.lightning_names import lightning_function, lightning_types
from lightning_hybrid.strategy.arguments import user_moves_batches

if TYPE_CHECKING:
    from lightning_hybrid.data.exact_loader import ExactLoader, Place

_KEY = "exact_resume"  # of a checkpoint; in Lightning's own place `ddp` would refuse states of loaders that have none
_AT = ("loops", "fit_loop", "state_dict", "combined_loader")  # is Lightning's own place


class TrainingLoaders:
    """The loaders of a strategy's fits, and where they go on after a resume: the `Reader` of `data.exact_loader`."""

    rank, world_size, seed = 0, 1, 0

    def __init__(self, exact_resume: bool) -> None:
        self._is_on = exact_resume
        self._trainer: Any = None
        self._states: list[dict[str, Any] | None] | None = None  # of the checkpoint; None where it has none
        self._place: tuple[int, int] | None = None  # where the fit goes on, once counters are mended
        self._has_warned = False

    def begin(self, trainer: Any, share: Mapping[str, int]) -> None:
        """Note who reads what in this fit. Collective, where several ranks read the same."""
        self._trainer, self.seed = trainer, torch.initial_seed()
        self.world_size, self.rank = share["num_replicas"], share["rank"]
        self._place, self._has_warned = None, False
        if trainer.world_size > self.world_size:
            seeds: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(seeds, (self.rank, self.seed))
            self.seed = next(seed for rank, seed in seeds if rank == self.rank)

    def process(self, loader: Any, module: Any, device: torch.device, compute_dtype: torch.dtype | None) -> Any:
        """Return what Lightning is to iterate over in place of `loader`."""
        from lightning_hybrid.data.batch_counters import uncount_cut_epoch  # here: its package brings loaders of ours
        from lightning_hybrid.data.exact_loader import can_be_exact, exact
        from lightning_hybrid.data.prefetch import prefetch

        trainer = module.trainer
        if hasattr(loader, "bind_trainer"):  # one of `data`, which resumes where the trainer's counters are
            loader.bind_trainer(trainer)
        # Lightning looks for a DataLoader, which the prefetcher hides.
        lightning_function("fabric.utilities.data._auto_add_worker_init_fn")(loader, trainer.global_rank)
        if self._is_on and trainer.state.fn == "fit" and trainer.training and can_be_exact(loader):
            uncount_cut_epoch(trainer)
            loader = exact(loader, self)
        return loader if user_moves_batches(module) else prefetch(loader, device, compute_dtype)

    # ---- where a fit goes on ---------------------------------------------------------------------------------------

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches of a step."""
        return int(self._trainer.accumulate_grad_batches)

    @property
    def _exact(self) -> list[Any]:
        combined = self._trainer.fit_loop._combined_loader
        return [] if combined is None else [one for one in combined.flattened if hasattr(one, "has_begun")]

    @property
    def _accumulated_before(self) -> int:
        states = [one.loaded for one in self._exact if one.loaded is not None]
        return states[0]["accumulate_grad_batches"] if states else self.accumulate_grad_batches

    def _give_states(self) -> None:
        from lightning_hybrid.data.exact_loader import NotExactError

        loaders, fit = self._exact, self._trainer.fit_loop
        if self._states is None or not fit.is_resuming:
            return
        states, self._states = [one for one in self._states if one is not None], None
        if len(states) == len(loaders):
            for loader, state in zip(loaders, states, strict=True):
                loader.load_state_dict(state)
        elif fit.epoch_progress.current.started > fit.epoch_progress.current.processed:
            raise NotExactError(
                f"The number of training loaders (={len(loaders)}) must be that of the checkpoint (={len(states)}) to "
                "resume in mid-epoch. Give the loaders of the interrupted run, or set strategy.exact_resume=false."
            )

    def place_of(self, loader: ExactLoader) -> Place:
        """Return where the iteration of `loader` that begins now is, by the counters of the loop."""
        from lightning_hybrid.data.batch_counters import place_to_go_on_from
        from lightning_hybrid.data.exact_loader import Place, length_of

        self._give_states()
        fit = self._trainer.fit_loop
        if not fit.is_resuming or loader.has_begun:
            is_new_epoch = fit._data_fetcher.fetched == 0
            return Place(fit.epoch_progress.current.processed, 0 if is_new_epoch else loader.place.cycle + 1)
        before = self._accumulated_before
        epoch, done = self._place or place_to_go_on_from(self._trainer, accumulate_grad_batches_before=before)
        length, state = length_of(loader), loader.loaded
        if length is not None:
            cycles = fit._combined_loader._mode == "max_size_cycle"
            return Place(epoch, *(divmod(done, length) if cycles and length else (0, min(done, length))))
        if state is None or state["epoch"] != epoch:
            return Place(epoch, 0, done)
        return Place(epoch, state["cycle"], state["batches"] - (state["total"] - done))

    def on_train_start(self) -> None:
        """Mend the counters of a resumed fit, as loaders of `data` do, and say what is not exact."""
        from lightning_hybrid.data.batch_counters import goes_on_in_epoch, rewind_to_whole_steps

        trainer = self._trainer
        fit, loaders, has_none = trainer.fit_loop, self._exact, self._states is None
        if not (fit.is_resuming and loaders):
            return
        self._give_states()
        before, done = self._accumulated_before, 0
        if goes_on := goes_on_in_epoch(trainer):
            for one in trainer.callbacks:  # they set it where an epoch starts
                if isinstance(one, lightning_types("pytorch.callbacks.GradientAccumulationScheduler")):
                    trainer.accumulate_grad_batches = one.get_accumulate_grad_batches(trainer.current_epoch)
            is_same = any(one.loaded and one.loaded["batch_size"] == one.batch_size for one in loaders)
            done = rewind_to_whole_steps(
                trainer, accumulate_grad_batches_before=before, is_same_batch=is_same
            )
        epoch = fit.epoch_progress.current.processed
        self._place = (epoch, done)
        if (every := trainer.reload_dataloaders_every_n_epochs) > 1:  # it counts from the epoch in which a fit begins
            fit._last_train_dl_reload_epoch = epoch - epoch % every
        uncertain = [one for one in loaders if not one.follows_from_epoch]
        if has_none and goes_on and done and uncertain:
            rank_zero_warn(
                "The checkpoint has no state of the training loaders, as `ddp` or exact_resume=False has written it: "
                "their order is not known to be a function of the epoch, and the rest of this epoch may have other "
                "images."
            )
        self._warn(loaders)

    def _warn(self, loaders: list[Any]) -> None:
        for text in () if self._has_warned else filter(None, (one.caveat for one in loaders)):
            rank_zero_warn(f"`exact_resume` (=True) of the training loader: {text}.")
        self._has_warned = True

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any], *, is_alone: bool) -> None:
        """Move the states of all ranks to a place of ours. Collective, unless this rank is alone."""
        if not self._is_on or self._trainer is None or "loops" not in checkpoint:
            return
        loop = checkpoint["loops"]["fit_loop"]["state_dict"]
        states = loop.pop("combined_loader", [])
        own = [state.get("own") for state in states]
        of_ranks = [(self.rank, own)]
        if not is_alone and dist.is_initialized() and dist.get_world_size() > 1:
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, (self.rank, own))
            of_ranks = gathered
        if others := [state for state in states if "own" not in state]:
            loop["combined_loader"] = others
        if any(own):
            checkpoint[_KEY] = [
                state | {"own": None, "of_ranks": {rank: every[number] for rank, every in of_ranks}} if own[number] else None
                for number, state in enumerate(states)
            ]
            self._warn(self._exact)

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Take the states of a checkpoint; Lightning counts them among those that it restores itself."""
        self._states = checkpoint.get(_KEY) if self._is_on else None
        loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if self._states and "combined_loader" in loop:
            others = iter(loop["combined_loader"])
            loop["combined_loader"] = [next(others) if one is None else one for one in self._states]
