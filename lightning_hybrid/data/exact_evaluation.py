"""Evaluation loaders that count every sample once, without the padding of `DistributedSampler`.

    N samples, W ranks          DistributedSampler gives each rank ceil(N / W) samples. Some are repeats.
    full rank: rank < N mod W   has ceil(N / W) samples without a repeat
    short rank: all others      has one sample less, and a repeat as its last sample

All batches before the last batch have the same size on every rank. On short ranks, the last batch is smaller, or
missing if it would contain only the repeat. However, if user code called collectives between the earlier batches, they
may need batches of equal size, and the last batch stays padded. A short rank therefore loads its last batch both with
and without the repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_hybrid.data.plain_pass import copy_of_loader
from lightning_hybrid.lightning_names import lightning_types

_WRAPPER = "fabric.utilities.distributed.DistributedSamplerWrapper"
_WITHOUT_REPEATS = "pytorch.overrides.distributed.UnrepeatedDistributedSampler"
# torchdata's loader has a batch sampler of the same name.
_LIBRARIES = ("torch.", "torchdata.")
_INDEX_RECORDER = "pytorch.overrides.distributed._IndexBatchSamplerWrapper"


@dataclass(frozen=True, kw_only=True)
class EvaluationShare:
    """Batch sizes of one rank in evaluation, with and without its repeated sample.

    Args:
        num_samples: Number of samples in the data set.
        num_ranks: Number of ranks over which the samples are distributed.
        rank: Index of this rank.
        batch_size: Maximum number of samples in a batch.

    >>> full, short = (EvaluationShare(num_samples=7, num_ranks=2, rank=rank, batch_size=3) for rank in (0, 1))
    >>> full.is_short, short.is_short, full.num_repeats
    (False, True, 1)
    >>> full.num_samples_before_last, full.last_batch_size, full.num_batches
    (2, 2, 2)
    """

    num_samples: int
    num_ranks: int
    rank: int
    batch_size: int

    @property
    def num_samples_per_rank(self) -> int:
        """Number of samples of each rank, including repeats."""
        return -(-self.num_samples // self.num_ranks)

    @property
    def num_repeats(self) -> int:
        """Number of samples that are repeated to give all ranks the same number of samples."""
        return self.num_samples_per_rank * self.num_ranks - self.num_samples

    @property
    def is_short(self) -> bool:
        """True if the last sample of this rank is a repeat."""
        return self.num_repeats > 0 and self.rank >= self.num_samples % self.num_ranks

    @property
    def last_batch_size(self) -> int:
        """Number of samples in the last batch, including repeats.

        The number is at least 2 if possible, so that short ranks also have a last batch. If possible, there is another
        batch before it, which shows whether user code calls collectives.
        """
        size = self.num_samples_per_rank % self.batch_size or self.batch_size
        is_only_batch = size == self.num_samples_per_rank
        if size > 1 and not is_only_batch:
            return size
        if self.batch_size > 1 and self.num_samples_per_rank > 2:
            return 2
        return 1

    @property
    def num_samples_before_last(self) -> int:
        """Number of this rank's samples before its last batch."""
        return self.num_samples_per_rank - self.last_batch_size

    @property
    def num_batches(self) -> int:
        """Number of batches of a rank without a repeated sample.

        A rank with a repeated sample has the same number of batches, or one fewer.
        """
        return -(-self.num_samples_before_last // self.batch_size) + 1


def evaluation_share(loader: DataLoader[Any]) -> EvaluationShare | None:
    """Return this rank's batch sizes under the loader's `DistributedSampler`.

    The result is None if the loader has no such sampler, or has Lightning's sampler that does not repeat samples.
    """
    sampler = _sampler_of(loader)
    if not isinstance(sampler, DistributedSampler):
        return None
    if isinstance(sampler, lightning_types(_WITHOUT_REPEATS)):
        return None
    return EvaluationShare(
        num_samples=len(sampler.dataset),  # type: ignore[arg-type]
        num_ranks=sampler.num_replicas,
        rank=sampler.rank,
        batch_size=getattr(loader.batch_sampler, "batch_size", None) or 1,
    )


@dataclass(frozen=True)
class Obstacle:
    """Reason why a loader keeps its padding, with a change that would remove the padding."""

    reason: str
    cure: str


def obstacle_of(loader: DataLoader[Any], share: EvaluationShare) -> Obstacle | None:
    """Return the reason why a loader must keep its repeated samples, or None if they can be omitted.

    Args:
        loader: Loader with a `DistributedSampler`.
        share: Batch sizes of this rank.
    """
    sampler = _sampler_of(loader)
    if not _is_plain(sampler):
        kind = type(sampler).__name__
        return Obstacle(
            f"`{kind}` selects samples in its own way", "Use torch's `DistributedSampler`"
        )
    if sampler.drop_last or getattr(loader.batch_sampler, "drop_last", False):
        return Obstacle("`drop_last=True` leaves samples out", "Leave `drop_last` out")
    if share.num_samples < share.num_ranks:
        return Obstacle(
            f"it has {share.num_samples} samples for {share.num_ranks} ranks, but every rank needs one",
            f"Launch {share.num_samples} ranks",
        )
    if loader.batch_sampler is None:
        return Obstacle("it has `batch_size=None`", "Set `batch_size`")
    if not _makes_plain_batches(loader.batch_sampler):
        kind = type(loader.batch_sampler).__name__
        return Obstacle(
            f"`{kind}` forms batches in its own way", "Set `batch_size` instead of `batch_sampler`"
        )
    if not type(loader).__iter__.__module__.startswith(_LIBRARIES):
        kind = type(loader).__name__
        return Obstacle(f"`{kind}` defines its own `__iter__`", "Use torch's `DataLoader`")
    if not getattr(loader, "in_order", True):
        return Obstacle("`in_order=False` changes the order of its batches", "Leave `in_order` out")
    return None


def _sampler_of(loader: DataLoader[Any]) -> Any:
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _is_plain(sampler: DistributedSampler[Any]) -> bool:
    """Return whether a sampler distributes samples exactly like torch's or Lightning's sampler."""
    for plain_type in (DistributedSampler, *lightning_types(_WRAPPER)):
        if type(sampler).__iter__ is plain_type.__iter__:
            return True
    return False


def _makes_plain_batches(batch_sampler: Any) -> bool:
    """Return whether a batch sampler is the plain `BatchSampler` of torch or torchdata."""
    if isinstance(batch_sampler, lightning_types(_INDEX_RECORDER)):
        batch_sampler = batch_sampler._batch_sampler
    kind = type(batch_sampler)
    return kind.__name__ == "BatchSampler" and kind.__module__.startswith(_LIBRARIES)


class ExactBatchSampler(BatchSampler):
    """Batch sampler that yields a rank's last batch twice, without and with the repeated sample.

    If the last batch has no repeated sample, or only this sample, it is yielded once.

    Args:
        sampler: `DistributedSampler` that pads with repeated samples.
        share: Batch sizes of this rank under the sampler.

    >>> sampler = DistributedSampler(range(7), num_replicas=2, rank=1, shuffle=False)
    >>> list(ExactBatchSampler(sampler, evaluation_share(DataLoader(range(7), batch_size=3, sampler=sampler))))
    [[1, 3], [5], [5, 0]]
    """

    def __init__(self, sampler: DistributedSampler[Any], share: EvaluationShare) -> None:
        super().__init__(sampler, share.batch_size, drop_last=False)
        self.share = share

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        end = self.share.num_samples_before_last
        for start in range(0, end, self.batch_size):
            yield indices[start : min(start + self.batch_size, end)]
        last_batch = indices[end:]
        if self.share.is_short and len(last_batch) > 1:
            yield last_batch[:-1]
        yield last_batch

    def __len__(self) -> int:
        return self.share.num_batches


def with_exact_batches(loader: DataLoader[Any], share: EvaluationShare) -> DataLoader[Any]:
    """Return a copy of a loader that uses an `ExactBatchSampler`.

    The copy has the same class. The user's own object is not changed.
    """
    copied: DataLoader[Any] = copy_of_loader(loader)
    batch_sampler: Any = ExactBatchSampler(_sampler_of(loader), share)
    if isinstance(loader.batch_sampler, lightning_types(_INDEX_RECORDER)):
        # `BasePredictionWriter` receives the indices that it records.
        batch_sampler = type(loader.batch_sampler)(batch_sampler)
    # `DataLoader` does not allow setting this attribute.
    object.__setattr__(copied, "batch_sampler", batch_sampler)
    return copied


class CollectiveWatch(Protocol):
    """Interface of a counter of the collectives that user code calls between batches."""

    def num_collectives(self) -> int:
        """Return the number of collectives that user code has called in this process."""

    def num_before_step(self) -> int:
        """Return the number of collectives that user code had called before the last evaluation step."""

    def note_padding(self, share: EvaluationShare) -> None:
        """Record that the last batch stays padded because user code calls collectives."""


_OWN_ATTRIBUTES = ("_batches", "_share", "_watch")


class ExactEvaluationLoader:
    """Evaluation loader that omits a rank's repeated sample unless user code calls collectives.

    The form of the last batch is chosen only when the batch is requested. All attributes are read from and written to
    the inner loader.

    Args:
        batches: Loader that `with_exact_batches` returned, or a prefetcher around it.
        share: Batch sizes of this rank.
        watch: Counter of the collectives that user code calls.
    """

    def __init__(
        self, batches: Iterable[Any], share: EvaluationShare, watch: CollectiveWatch
    ) -> None:
        self._batches = batches
        self._share = share
        self._watch = watch

    def __iter__(self) -> Iterator[Any]:
        return _ExactIterator(self)

    def __len__(self) -> int:
        # The length is equal on all ranks, so that user code that compares it with `batch_idx` behaves the same.
        return self._share.num_batches

    def __getattr__(self, name: str) -> Any:
        # During copying and unpickling, attributes are read before the inner loader is set.
        if name in _OWN_ATTRIBUTES:
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN_ATTRIBUTES:
            object.__setattr__(self, name, value)
        else:
            setattr(self._batches, name, value)

    def forget_recorded_form(self) -> None:
        """Delete the indices of the unpadded last batch from those that Lightning records in prediction."""
        recorded = getattr(self.batch_sampler, "seen_batch_indices", None)
        if recorded:
            del recorded[self._share.num_batches - 1]


class _ExactIterator(Iterator[Any]):
    """Iterator of an `ExactEvaluationLoader`.

    This is a class and not a generator, because it must be possible to copy objects that hold it during training, such
    as the trainer. A copy starts from the first batch, just as Lightning does not copy iterators of torch's loaders.
    """

    def __init__(self, loader: ExactEvaluationLoader) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        self._num_given = 0
        # Number of collectives before the user's first step with this loader.
        self._num_collectives_before_first_step = 0
        self._is_over = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": None, "_num_given": 0, "_is_over": False}

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        loader = self._loader
        if self._batches is None:
            self._batches = iter(loader._batches)
            self._num_collectives_before_first_step = loader._watch.num_collectives()
        self._num_given += 1
        if self._num_given == 2:
            # Once Lightning has the first batch of a loader, it reduces the values logged for the previous loader.
            num_before_step = loader._watch.num_before_step()
            self._num_collectives_before_first_step = max(
                self._num_collectives_before_first_step, num_before_step
            )
        if self._num_given < loader._share.num_batches:
            return next(self._batches)

        batches = self._batches
        self._batches = None  # allows workers to exit
        self._is_over = True
        return self._last_batch(batches)

    def _last_batch(self, batches: Iterator[Any]) -> Any:
        """Return the last batch, with the repeated sample only if user code called collectives.

        Raises:
            StopIteration: The batch would contain only the repeat.
        """
        share = self._loader._share
        watch = self._loader._watch
        is_padded = watch.num_collectives() > self._num_collectives_before_first_step
        if is_padded:
            watch.note_padding(share)
        if not share.is_short:
            return next(batches)
        if share.last_batch_size > 1:
            smaller_batch = next(batches)
            if not is_padded:
                return smaller_batch
            self._loader.forget_recorded_form()
        elif not is_padded:
            raise StopIteration
        return next(batches)
