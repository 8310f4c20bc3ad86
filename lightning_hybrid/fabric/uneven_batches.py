"""Support for different numbers of batches per rank (`uneven_batches="join"`) in Fabric training loops.

A Trainer knows which iterator it uses for training. In a Fabric loop, the user marks the training loader with
`strategy.join_loader(loader)`:

    next batch          all ranks exchange their numbers of samples, and a rank without a batch repeats an earlier one
    fabric.backward     the loss is weighted by this rank's number of samples. A repeated batch adds zero gradients
    next batch          statistics of normalization layers that a repeated batch has changed are restored

See strategy/uneven_batches/README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.batch_rows import leaves
from lightning_hybrid.checks import require_whole
from lightning_hybrid.comm import CommEngine
from lightning_hybrid.comm.health.diagnosis import name_ranks
from lightning_hybrid.strategy.compatibility import in_module, refuse_excluded
from lightning_hybrid.strategy.uneven_batches.agreement import END, AgreedBatch, BatchAgreement
from lightning_hybrid.strategy.uneven_batches.repeated_batch import (
    RunningStatistics,
    zero_gradients,
)
from lightning_hybrid.strategy.uneven_batches.window_weights import WindowWeights

OPTION = "`uneven_batches` (='join')"
_FEATURES = {"uneven batches": OPTION}

# Key of the entry in a loader's saved state that says whether a rank's loader has ended in the saved epoch.
_HAS_ENDED = "has_ended"


class JoinedSteps:
    """Gradient weights of a Fabric training loop, and the state that is restored after a repeated batch.

    Args:
        world_size: Number of ranks.
        has_fp16_gradients: Whether gradients are averaged in fp16, whose range limits the weights.
    """

    def __init__(self, world_size: int, *, has_fp16_gradients: bool) -> None:
        self.is_within_batch = False
        self.repeats_batch = False
        self._world_size = world_size
        self._has_fp16_gradients = has_fp16_gradients
        self._weights = WindowWeights(world_size)
        self._is_training = False  # whether a joined loader is being iterated
        self._statistics: dict[int, RunningStatistics] = {}  # by the `id` of a module
        self._hooks: list[RemovableHandle] = []

    @contextmanager
    def one_loop(self) -> Iterator[None]:
        """Return a context in which one loader is iterated for training.

        Raises:
            ValueError: Another loader is being iterated.
        """
        if self._is_training:
            refuse_excluded(_FEATURES | {"several loaders": "A second training loader in a loop"})
        self._is_training = True
        try:
            yield
        finally:
            # This also runs after a `break`, when Python closes the iterator.
            self._is_training = False
            self.end_batch()

    def begin_batch(self, batch: AgreedBatch, modules: Iterable[nn.Module]) -> None:
        """Set the weight of this rank's gradients, and prepare the modules if the batch is repeated."""
        self.is_within_batch = True
        self.repeats_batch = batch.num_own == 0
        # Each batch is weighted like a step, because the loop does not say how many batches it accumulates.
        self._weights.begin(batch, accumulation=1, limits_factors=self._has_fp16_gradients)
        if self.repeats_batch:
            for module in modules:
                # The hook runs after DDP's broadcast from rank zero and before the forward.
                self._hooks.append(module.register_forward_pre_hook(self._save_statistics))

    def _save_statistics(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if id(module) not in self._statistics:
            self._statistics[id(module)] = RunningStatistics(module)

    def end_batch(self) -> None:
        """Restore the running statistics that a repeated batch has changed."""
        self.is_within_batch = False
        self.repeats_batch = False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._restore_statistics()
        self._statistics = {}

    def _restore_statistics(self) -> None:
        for statistics in self._statistics.values():
            statistics.restore()

    def backward(
        self,
        loss: Tensor,
        run: Callable[[Tensor], Any],
        *,
        engines: Sequence[CommEngine],
        wrappers: Iterable[DistributedDataParallel],
        tensors: Iterable[Tensor],
    ) -> Any:
        """Weight the loss by this rank's number of samples and run the backward pass.

        Args:
            loss: Mean loss of this rank's samples.
            run: Function that runs the backward pass.
            engines: Engines that average gradients.
            wrappers: DDP wrappers of the modules.
            tensors: Tensors whose gradients are zero if the batch is repeated.
        """
        if self._has_fp16_gradients:
            _refuse_local_sums(wrappers)
        for engine in engines:
            engine.num_terms = self._weights.num_terms
        try:
            if not self.repeats_batch:
                if self._weights.factor != 1:
                    loss = loss * self._weights.factor
                return run(loss)
            with zero_gradients(tensors):
                return run(loss)
        finally:
            for engine in engines:
                engine.num_terms = self._world_size
            # Activation checkpointing has run the layers again, and the loop may validate or save before the next
            # batch.
            self._restore_statistics()


class JoinedLoopLoader:
    """Loader that yields a batch in every step until the loaders of all ranks have ended.

    Each pass over the loader is an epoch of training. Every rank must begin it, and leave it at the same batch.

    Args:
        loader: Loader of this rank, from `fabric.setup_dataloaders`.
        agreement: Object with which ranks agree on each batch.
        steps: Gradient weights of the loop.
        modules: Modules that are trained.
    """

    def __init__(
        self,
        loader: Any,
        agreement: BatchAgreement,
        steps: JoinedSteps,
        modules: Iterable[nn.Module],
    ) -> None:
        self._loader = loader
        self._agreement = agreement
        self._steps = steps
        self._modules = modules
        self._has_ended = False  # whether this rank's loader has ended in this epoch
        self._own_length = _length_of(loader)
        self._length = agreement.longest(self._own_length)

    @property
    def repeats_batch(self) -> bool:
        """True if this rank repeats an earlier batch, which has weight zero."""
        return self._steps.repeats_batch

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("The training loader has no length on at least one rank.")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        with self._steps.one_loop():
            self._has_ended = False
            self._agreement.begin_epoch()
            batches = iter(self._loader)
            while True:
                batch = self._next_own_batch(batches)
                batch = self._agreement.next_batch(batch, has_ended=self._has_ended)
                if batch is END:
                    return
                if batch is None:  # this happens on all ranks or on none
                    continue
                self._steps.begin_batch(self._agreement.agreed.popleft(), self._modules)
                yield batch
                self._steps.end_batch()

    def _next_own_batch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch of this rank's loader, or None if the loader is exhausted."""
        if self._has_ended:
            return None
        batch = next(batches, END)
        if batch is END:
            self._has_ended = True
            return None
        return batch


class ResumableJoinedLoader(JoinedLoopLoader):
    """`JoinedLoopLoader` for loaders that can resume in the middle of an epoch.

    `fabric.save` gathers the states of all ranks.
    """

    @property
    def exact_resume(self) -> Any:
        """Exact resume of this rank's loader."""
        return self._loader.exact_resume

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's loader, including whether it has ended in this epoch."""
        state: dict[str, Any] = self.exact_resume.state_dict()
        has_ended = self._has_ended or state["own"]["is_over"]
        if self._own_length is not None and state["batches"] >= self._own_length:
            has_ended = True
        return {**state, "own": {**state["own"], _HAS_ENDED: has_ended}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of this rank's loader.

        If it had ended before the loaders of other ranks, the next pass has no batches of this rank.

        Raises:
            ValueError: The loaders of some ranks had ended, and the number of ranks has changed.
        """
        self.exact_resume.load_state_dict(state_dict)
        of_ranks: Mapping[int, Mapping[str, Any]] = state_dict.get("of_ranks", {})
        ended = [rank for rank, own in of_ranks.items() if own.get(_HAS_ENDED, False)]
        if not ended or len(ended) == len(of_ranks):
            return
        reader = self.exact_resume.reader
        if reader.world_size != state_dict["world_size"]:
            raise ValueError(
                f"{OPTION} needs the same number of ranks as the checkpoint (={state_dict['world_size']}, now "
                f"{reader.world_size}) to finish the epoch, because the loader of {name_ranks(ended)} had ended, but "
                f"other loaders had not. Resume on {state_dict['world_size']} ranks, or from a checkpoint that was "
                "saved at the end of an epoch."
            )
        reader.stays_in_epoch = reader.rank in ended


def refuse_unsupported(module: nn.Module) -> None:
    """Raise if a module cannot be combined with `uneven_batches="join"`.

    Raises:
        ValueError: The module has a layer such as `SyncBatchNorm`, which uses the samples of all ranks.
    """
    refuse_excluded(_FEATURES | in_module(module))


def refuse_gather_with_gradients() -> None:
    """Raise an error that explains why values with gradients cannot be gathered.

    Their gradients would include those of repeated batches.

    Raises:
        RuntimeError: This error is always raised.
    """
    gathering = {"gather with gradients": "`fabric.all_gather(sync_grads=True)`"}
    refuse_excluded(_FEATURES | gathering, error=RuntimeError)


def samples_in(batch: Any, count_samples: Callable[[Any], int] | None) -> int:
    """Return the number of samples in a batch.

    Args:
        batch: Batch of a training loader.
        count_samples: Function of the user that returns the number. The default is the length of the first tensor.

    Raises:
        ValueError: The batch contains no tensor, or the function does not return a whole number.
    """
    if count_samples is not None:
        number = count_samples(batch)
        why = "the gradients of a rank are weighted by this number. Return 0 for a batch that must not count"
        require_whole("count_samples(batch)", number, why, least=0, unit="samples")
        return number
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            return leaf.shape[0] if leaf.ndim > 0 else 1
    raise ValueError(
        f"{OPTION} weights ranks by their number of samples, but the number in a batch of type {type(batch).__name__} "
        "is unknown, because the batch contains no tensor. Pass a function that returns the number as "
        "join_loader(loader, count_samples=...)."
    )


def device_of(loader: Any) -> torch.device | None:
    """Return the device to which a Fabric loader moves batches, or None if it does not move them."""
    device: torch.device | None = getattr(loader, "device", None)
    return device


def _refuse_local_sums(wrappers: Iterable[DistributedDataParallel]) -> None:
    """Raise if fp16 gradients of several batches are accumulated before they are averaged.

    Raises:
        RuntimeError: The loop has disabled gradient averaging for this backward.
    """
    if any(not wrapper.require_backward_grad_sync for wrapper in wrappers):
        local_sums = {"local fp16 sums": "`fabric.no_backward_sync` with 16-true"}
        refuse_excluded(_FEATURES | local_sums, error=RuntimeError)


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
