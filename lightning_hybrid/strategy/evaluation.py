"""Exact evaluation: validation, test and prediction that count every sample once (`exact_evaluation=True`).

Ranks then have unequal numbers of samples. The following rules keep ranks from waiting for each other in vain:

    number of batches       is equal on all ranks, or one less if the last batch would contain only a repeated sample.
                            Each rank has at least one batch
    DDP's buffers           are broadcast in the first batch of an evaluation, which every rank has
    user's collectives      between batches need equal batches, so the last batch stays padded. `self.all_gather` of
                            unequal shapes raises an error on all ranks
    `self.log` at the end   reduces the same names on every rank. Batch sizes are averaged without rounding
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

# These are imported in functions at run time, because their package also imports the loaders of this project.
if TYPE_CHECKING:
    from lightning_hybrid.data.exact_evaluation import EvaluationShare, Obstacle


class Evaluation:
    """Manager of exact evaluation, which handles the data loaders and collectives of evaluation loops.

    Args:
        is_exact: Whether every sample counts once. False: as in `ddp`, which repeats some samples.

    Attributes:
        is_exact: The argument `is_exact`.
    """

    def __init__(self, is_exact: bool) -> None:
        self.is_exact = is_exact
        self._trainer: Any = None
        # Number of collectives that DDP has called in evaluation steps to broadcast its buffers.
        self._num_of_ddp = 0
        self._num_before_step = 0
        self._warnings: set[str] = set()

    # ---- loaders -----------------------------------------------------------------------------

    def wrap(self, loader: Any, trainer: Any, with_prefetcher: Callable[[Any], Any]) -> Any:
        """Prepare a user's evaluation loader, and return the loader that Lightning iterates over instead.

        Args:
            loader: The user's loader, with the sampler that Lightning has added.
            trainer: The trainer.
            with_prefetcher: Function that wraps a loader in a prefetcher.
        """
        if not self.is_exact:
            return with_prefetcher(loader)

        from lightning_hybrid.data.exact_evaluation import (
            ExactEvaluationLoader,
            evaluation_share,
            with_exact_batches,
        )

        self._trainer = trainer
        # An earlier evaluation may have wrapped the loader.
        if isinstance(loader, ExactEvaluationLoader):
            return loader
        share = None
        if isinstance(loader, DataLoader):
            share = evaluation_share(loader)
        if share is None or share.num_samples % share.num_ranks == 0:
            return with_prefetcher(loader)

        obstacle = self._obstacle_of(loader, share)
        if obstacle is not None:
            self._warn_of_obstacle(obstacle, share)
        elif self._runs_all(share.num_batches):
            batches = with_prefetcher(with_exact_batches(loader, share))
            return ExactEvaluationLoader(batches, share, self)
        # The limit ends the evaluation before the batch with repeats.
        return with_prefetcher(loader)

    def _obstacle_of(self, loader: DataLoader[Any], share: EvaluationShare) -> Obstacle | None:
        """Return the reason why repeated samples of a loader cannot be skipped, or None if they can."""
        from lightning_hybrid.data.exact_evaluation import Obstacle, obstacle_of

        obstacle = obstacle_of(loader, share)
        if obstacle is not None:
            return obstacle
        # A step that calls collectives keeps the repeated samples, so such calls must be detectable.
        if not _can_count():
            return Obstacle("the backend does not count collectives", "Use Gloo or NCCL")
        # Skipping repeated samples may split one batch into two. The limit must not cut the second one off.
        if self._runs_all(len(loader)) and not self._runs_all(share.num_batches):
            name = f"limit_{self._stage}_batches"
            return Obstacle(
                f"`{name}` (={self._limit}) allows one batch, which would be split into two",
                f"Set `{name}=2`, or a smaller `batch_size`",
            )
        return None

    @property
    def _stage(self) -> str:
        """Name of the evaluation stage as it appears in hooks and options: val, test or predict."""
        return str(self._trainer.state.stage.dataloader_prefix)

    @property
    def _limit(self) -> int | float:
        limit: int | float = getattr(self._trainer, f"limit_{self._stage}_batches")
        return limit

    def _runs_all(self, num_batches: int) -> bool:
        """Return whether `limit_<stage>_batches` is high enough to run all `num_batches` batches."""
        if isinstance(self._limit, int):
            return self._limit >= num_batches
        return int(num_batches * self._limit) == num_batches

    # ---- user code that calls collectives ----------------------------------------------------

    def num_collectives(self) -> int:
        """Return how many collectives this process has called, not counting DDP's buffer broadcasts.

        DDP calls collectives in evaluation steps to broadcast its buffers.
        """
        return _num_collectives() - self._num_of_ddp

    def num_before_step(self) -> int:
        """Return how many collectives this process had called when the latest evaluation step began."""
        return self._num_before_step

    @contextmanager
    def step(self, model: Any) -> Iterator[None]:
        """Return a context for an evaluation step, in which DDP's buffer broadcasts are not counted.

        Args:
            model: The module, wrapped in DDP during `Trainer.fit`.
        """
        if not self.is_exact:
            yield
            return
        self._num_before_step = self.num_collectives()
        is_ddp = isinstance(model, DistributedDataParallel)
        if not is_ddp or not model.will_sync_module_buffers():
            yield
            return
        num_before = _num_collectives()

        def note_broadcasts(*_: Any) -> None:
            # DDP has broadcast its buffers, and the user's step is about to begin.
            handle.remove()
            self._num_of_ddp += _num_collectives() - num_before

        handle = model.module.register_forward_pre_hook(note_broadcasts)
        try:
            yield
        finally:
            handle.remove()

    def note_padding(self, share: EvaluationShare) -> None:
        """Warn once that samples in the last batch are repeated because user code calls collectives."""
        step = f"{self._stage}_step"
        if self._stage == "val":
            step = "validation_step"
        self._warn_once(
            f"`exact_evaluation` (=True): `{step}` or a hook calls collectives between batches, which may require "
            f"equal batches on all ranks. The last batch is padded as in `ddp`, so {_repeats(share)}. Reduce after "
            "the last batch, for example with torchmetrics or `self.log(..., sync_dist=True, on_step=False)`."
        )

    def refuse_unequal_shapes(self, tensor: Any, group: Any) -> None:
        """Raise if the tensors to gather have different shapes on different ranks.

        torch's all-gather needs equal shapes.

        Collective during an exact evaluation: every rank of the group must call it, in the same order.

        Raises:
            ValueError: The shapes differ. Raised on every rank, with the shapes.
        """
        if not self._is_running() or not isinstance(tensor, Tensor) or not dist.is_initialized():
            return
        shapes: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(shapes, tuple(tensor.shape), group=group)
        if len(set(shapes)) > 1:
            raise ValueError(
                f"`self.all_gather` requires tensors of the same shape, but the ranks have {shapes}. With "
                "`exact_evaluation` (=True), some ranks evaluate one sample less. Use "
                "`torchmetrics.utilities.distributed.gather_all_tensors`, which accepts unequal shapes, or leave "
                "`exact_evaluation` out."
            )

    # ---- self.log ----------------------------------------------------------------------------

    def to_reduce(self, tensor: Any, reduce_op: Any) -> Any:
        """Convert an integer tensor to floating point if it is to be averaged during exact evaluation.

        Lightning divides an averaged sum by the averaged number of samples. Without the conversion, that number would
        be rounded to an integer. Any other tensor is returned unchanged.
        """
        is_mean = reduce_op in ("mean", "avg")
        if not self._is_running() or not is_mean or not isinstance(tensor, Tensor):
            return tensor
        if tensor.is_floating_point():
            return tensor
        return tensor.to(torch.get_default_dtype())

    # ---- shared ------------------------------------------------------------------------------

    def _is_running(self) -> bool:
        """Return whether an exact evaluation is in progress."""
        if not self.is_exact or self._trainer is None:
            return False
        return bool(self._trainer.evaluating or self._trainer.predicting)

    def _warn_of_obstacle(self, obstacle: Obstacle, share: EvaluationShare) -> None:
        effect = _repeats(share)
        if "drop_last" in obstacle.reason:
            effect = "not every sample counts once"
        self._warn_once(
            f"`exact_evaluation` (=True) has no effect on a loader of `{self._stage}_dataloader`, because "
            f"{obstacle.reason}, so {effect}. {obstacle.cure}."
        )

    def _warn_once(self, message: str) -> None:
        if message not in self._warnings:
            self._warnings.add(message)
            rank_zero_warn(message)


def _num_collectives() -> int:
    """Return how many collectives this process has called in all its process groups."""
    total = 0
    for group in dist.distributed_c10d._world.pg_map:
        for device_type in group._device_types:
            backend: Any = group._get_backend(device_type)
            total += backend._get_sequence_number_for_group()
    return total


def _can_count() -> bool:
    """Return whether the backends of all process groups count collectives, as Gloo and NCCL do."""
    try:
        _num_collectives()
    except RuntimeError:
        return False
    return True


def _repeats(share: EvaluationShare) -> str:
    """Return a clause for a warning that says how many samples count more than once."""
    if share.num_repeats == 1:
        return f"1 sample of {share.num_samples} counts twice"
    if share.num_repeats <= share.num_samples:
        return f"{share.num_repeats} samples of {share.num_samples} count twice"
    most = -(-share.num_ranks // share.num_samples)
    return f"{share.num_samples} samples count up to {most} times"
