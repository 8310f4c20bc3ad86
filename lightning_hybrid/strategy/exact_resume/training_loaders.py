"""What becomes of loaders: those of a user resume exactly, and batches are on the device in time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hybrid.lightning_names import lightning_function, lightning_types
from lightning_hybrid.strategy.arguments import user_moves_batches

# Imported in functions: their package brings loaders of our own.
if TYPE_CHECKING:
    from lightning_hybrid.data.exact_loader import ExactLoader, Place

_KEY = "exact_resume"  # of a checkpoint; in Lightning's own place `ddp` would refuse states of loaders that have none


class TrainingLoaders:
    """The loaders of a strategy's fits; for `data.exact_loader`, who reads, and where a resumed fit goes on."""

    def __init__(self, exact_resume: bool) -> None:
        self._is_on = exact_resume
        self._trainer: Any = None
        self.rank = self.seed = 0
        self.world_size = 1
        self._states: list[dict[str, Any] | None] | None = None  # of the checkpoint, with None for loaders of others
        self._place: tuple[int, int] | None = None  # where the fit goes on, once counters are mended
        self._has_warned = False

    def begin(self, trainer: Any, share: Mapping[str, int]) -> None:
        """Note who reads what in this fit. Collective, where several ranks read the same."""
        self._trainer, self.seed, self._place, self._has_warned = trainer, torch.initial_seed(), None, False
        self.world_size, self.rank = share["num_replicas"], share["rank"]
        if trainer.world_size > self.world_size:
            seeds: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(seeds, (self.rank, self.seed))
            self.seed = next(seed for rank, seed in seeds if rank == self.rank)

    def after_optimizers(self, trainer: Any) -> None:
        """Let Lightning build loaders again that `configure_optimizers` made by `trainer.estimated_stepping_batches`.

        That was before the checkpoint's state for them was read, which Lightning 2.6 would drop.
        """
        if trainer.ckpt_path is not None:
            trainer.fit_loop._combined_loader = None

    def process(
        self,
        loader: Any,
        module: Any,
        device: torch.device,
        compute_dtype: torch.dtype | None,
        elastic: Any | None = None,
    ) -> Any:
        """Return what Lightning is to iterate over in place of `loader`; `elastic`: deals training's."""
        from lightning_hybrid.data.batch_counters import uncount_cut_epoch
        from lightning_hybrid.data.exact_loader import can_be_exact, exact
        from lightning_hybrid.data.prefetch import prefetch

        trainer = module.trainer
        if hasattr(loader, "bind_trainer"):  # one of `data`, which resumes where the trainer's counters are
            loader.bind_trainer(trainer)
        # Lightning looks for a DataLoader, which the prefetcher hides.
        lightning_function("fabric.utilities.data._auto_add_worker_init_fn")(loader, trainer.global_rank)
        is_of_fit = trainer.state.fn == "fit" and trainer.training
        if elastic is not None and is_of_fit:
            has_own = user_moves_batches(module)
            return elastic.deal(loader, self.seed, lambda one: one if has_own else prefetch(one, device, compute_dtype))
        if self._is_on and is_of_fit and can_be_exact(loader):
            uncount_cut_epoch(trainer)
            loader = exact(loader, self)
        # Users who move batches by hooks of their own get the host's.
        return loader if user_moves_batches(module) else prefetch(loader, device, compute_dtype)

    # ---- where a fit goes on ---------------------------------------------------------------------------------------

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches of a step."""
        return int(self._trainer.accumulate_grad_batches)

    @property
    def _exact(self) -> list[ExactLoader]:
        combined = self._trainer.fit_loop._combined_loader
        return [] if combined is None else [one.itself for one in combined.flattened if hasattr(one, "itself")]

    def _give_states(self) -> None:
        states, self._states = [one for one in self._states or () if one is not None], None
        if not self._trainer.fit_loop.is_resuming:
            return  # of a checkpoint that was validated
        if len(states) == len(self._exact):
            for loader, state in zip(self._exact, states, strict=True):
                loader.load_state_dict(state)
        elif states:
            rank_zero_warn(
                f"The checkpoint has {len(states)} states of training loaders, and there are {len(self._exact)}: none "
                "is used, and what they have left of the epoch may be other images."
            )

    @property
    def _accumulated_before(self) -> int:
        found = next((one.loaded for one in self._exact if one.loaded is not None), None)
        return self.accumulate_grad_batches if found is None else found["accumulate_grad_batches"]

    def place_of(self, loader: ExactLoader) -> Place:
        """Return where the iteration of `loader` that begins now is, by the counters of the loop."""
        from lightning_hybrid.data.batch_counters import place_to_go_on_from
        from lightning_hybrid.data.exact_loader import Place

        self._give_states()  # before `on_train_start` where a loader has no length
        loader.number = self._exact.index(loader)
        fit = self._trainer.fit_loop
        if not fit.is_resuming or loader.has_begun:
            is_new_epoch = fit._data_fetcher.fetched == 0
            return Place(fit.epoch_progress.current.processed, 0 if is_new_epoch else loader.place.cycle + 1)
        before, length, state = self._accumulated_before, _sized_len(loader), loader.loaded
        epoch, done = self._place or place_to_go_on_from(self._trainer, accumulate_grad_batches_before=before)
        if length:
            is_cycle = fit._combined_loader._mode == "max_size_cycle"
            return Place(epoch, *(divmod(done, length) if is_cycle else (0, min(done, length))))
        if state is None or state["epoch"] != epoch:
            return Place(epoch, 0, done)
        return Place(epoch, state["cycle"], state["batches"] - state["total"] + done)

    def on_train_start(self) -> None:
        """Mend the counters of a resumed fit, as loaders of `data` do, and say what is not exact."""
        from lightning_hybrid.data.batch_counters import goes_on_in_epoch, rewind_to_whole_steps

        trainer, loaders = self._trainer, self._exact
        fit = trainer.fit_loop
        if not (fit.is_resuming and loaders):
            return
        self._give_states()
        before, is_same_batch, done = self._accumulated_before, False, 0
        for one in loaders:
            is_same_batch |= one.loaded is not None and one.loaded["batch_size"] == one.batch_size
        if goes_on_in_epoch(trainer):
            for one in trainer.callbacks:
                # It acts where an epoch starts, and Lightning does not start this one again.
                if isinstance(one, lightning_types("pytorch.callbacks.GradientAccumulationScheduler")):
                    trainer.accumulate_grad_batches = one.get_accumulate_grad_batches(trainer.current_epoch)
            done = rewind_to_whole_steps(trainer, accumulate_grad_batches_before=before, is_same_batch=is_same_batch)
        self._place = epoch, _ = fit.epoch_progress.current.processed, done
        if (every := trainer.reload_dataloaders_every_n_epochs) > 1:  # it counts from the epoch in which a fit begins
            fit._last_train_dl_reload_epoch = epoch - epoch % every
        if done and any(one.loaded is None and not one.follows_from_epoch for one in loaders):
            rank_zero_warn(
                "The checkpoint has no state of the training loader, as `ddp` or exact_resume=False wrote it, and its "
                "order is not one that follows from the epoch alone: what is left of this epoch may be other images."
            )
        self._warn()

    def _warn(self) -> None:
        for text in () if self._has_warned else filter(None, (one.caveat for one in self._exact)):
            rank_zero_warn(f"The training loader is not resumed exactly, or not at once: {text}.")
        self._has_warned = True

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any], *, is_alone: bool) -> None:
        """Move the states of all ranks to a place of our own. Collective, unless this rank is alone."""
        if not self._is_on or self._trainer is None or "loops" not in checkpoint:
            return
        loop = checkpoint["loops"]["fit_loop"]["state_dict"]
        states = loop.pop("combined_loader", [])
        found = of_all_ranks(states, self.rank, is_alone=is_alone)
        if others := [state for state, own in zip(states, found, strict=True) if own is None]:
            loop["combined_loader"] = others
        if any(found):
            checkpoint[_KEY] = found
            self._warn()

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Take the states of a checkpoint; Lightning counts them where it restores those of others itself."""
        self._states = checkpoint.get(_KEY) if self._is_on else None
        loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if self._states and "combined_loader" in loop:
            others = iter(loop["combined_loader"])
            loop["combined_loader"] = [next(others) if one is None else one for one in self._states]


def of_all_ranks(states: list[dict[str, Any]], rank: int, *, is_alone: bool) -> list[dict[str, Any] | None]:
    """Return what a checkpoint holds of these states, None for those of others. Collective, unless `is_alone`."""
    found: list[Any] = [(rank, [state.get("own") for state in states])]
    if not is_alone and dist.is_initialized() and dist.get_world_size() > 1:
        own, found = found[0], [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
    return [
        {**state, "own": None, "of_ranks": {rank: own[place] for rank, own in found}} if "own" in state else None
        for place, state in enumerate(states)
    ]


def _sized_len(loader: object) -> Any:
    return lightning_function("fabric.utilities.data.sized_len")(loader)


@dataclass
class LoopReader:
    """Who reads in a user's own loop: each iteration is an epoch, and the first goes on from the loaded state."""

    rank: int
    world_size: int
    seed: int
    accumulate_grad_batches: int = 1

    def place_of(self, loader: ExactLoader) -> Place:
        """Return the next epoch, or the rest of the one that was saved."""
        from lightning_hybrid.data.exact_loader import Place

        state = loader.loaded or {"epoch": loader.place.epoch, "is_over": True}
        is_over = state["is_over"] or state["batches"] == _sized_len(loader)
        return Place(state["epoch"] + 1) if is_over else Place(state["epoch"], 0, state["batches"])


class LoopLoaders:
    """The loaders of a Fabric, and what of them stands in the states that it saves."""

    def __init__(self, exact_resume: bool) -> None:
        self._is_on, self._num_made = exact_resume, 0

    def process(self, loader: Any, rank: int, world_size: int) -> Any:
        """Return what a user is to iterate over in place of `loader`."""
        from lightning_hybrid.data.exact_loader import can_be_exact, exact

        if not self._is_on or not can_be_exact(loader):
            return loader
        made = exact(loader, LoopReader(rank, world_size, torch.initial_seed()))
        made.number, self._num_made = self._num_made, self._num_made + 1
        return made

    def with_states(self, state: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """Return a state with that of all ranks in the place of each loader. Collective, where there is one."""
        return {
            name: of_all_ranks([one.state_dict()], rank, is_alone=False)[0] if hasattr(one, "itself") else one
            for name, one in state.items()
        }
