"""Training position in a user's `DataLoader` whose data shards are read by several ranks.

The state has the same format as in runs that are not elastic.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from lightning_hybrid.data.exact_resume import ExactResume
from lightning_hybrid.data.index_lists import SamplerTraits, checksum_of_index_lists, epoch_of
from lightning_hybrid.data.place import Place
from lightning_hybrid.data.plain_pass import copy_of_loader
from lightning_hybrid.data.training_pass import TrainingPass


class ShardedPlace(ExactResume):
    """Training position in a `DataLoader` whose order is divided into data shards.

    A `DistributedSampler` divides the order. This class only stores and restores the position. The loaders of the
    shards read the data.

    Args:
        loader: Loader of shard 0.
        reader: Reader of the run, whose `world_size` is the number of shards.
    """

    def __init__(self, loader: DataLoader[Any], reader: Any) -> None:
        super().__init__(copy_of_loader(loader), loader, reader)
        # Shard 0 represents all shards, even if this rank reads other shards.
        self.traits = SamplerTraits(loader, reader.world_size, 0)

    def _take_sampler_seeds(self, seeds: list[int | None]) -> None:
        # The samplers of all shards are created from the user's sampler, so the seed of a single shard cannot change.
        return

    def begin(self) -> Place:
        """Return the position at which the training loop begins to iterate, and store it.

        Raises:
            NotExactError: The run would repeat or skip samples of the interrupted epoch.
        """
        place = self.reader.place_of(self)
        if place.cycle and not self.has_begun and self.length is not None:
            place = Place(place.epoch, 0, self.length)  # The epoch has ended.
        state = self.loaded
        self.loaded = None
        if state is not None and place.batches:
            self._refuse_other_seed(state)
        if state is not None and place.batches and state["dealt"] != self.traits.dealt:
            raise self.error(
                "the data order (number of samples, seed, shuffle, drop_last of sampler and loader) is "
                f"{self.traits.dealt}, but was {state['dealt']} in the checkpoint. Use the data set, the sampler and "
                "the seed of the checkpoint"
            )
        self.has_begun = True
        self.current = TrainingPass(place)
        dataset = self.user_loader.dataset
        if (
            state is not None
            and state["epoch"] == place.epoch
            and state["dataset_epoch"] is not None
        ):
            # The user's hooks, which set this epoch in the interrupted run, do not run again in the middle of an epoch.
            dataset.set_epoch(state["dataset_epoch"])  # type: ignore[attr-defined]
        return place

    def state_after(self, loader_of_shard: DataLoader[Any]) -> dict[str, Any]:
        """Return the loader's state after the last training batch, with the checksum of one shard.

        Args:
            loader_of_shard: Loader of this rank's first shard.
        """
        current = self.current
        sampler: Any = loader_of_shard.batch_sampler
        if sampler is None:
            sampler = loader_of_shard.sampler
        image_sampler: Any = getattr(sampler, "sampler", sampler)
        image_sampler.set_epoch(max(current.place.epoch, 0))
        current.checksum = checksum_of_index_lists(islice(sampler, current.batches_done))
        self._batches_of_epoch = current.batches_done
        current.sampler_epochs = [current.place.epoch for _ in self.traits.samplers]
        current.dataset_epoch = epoch_of(self.user_loader.dataset)
        return {**super().state_dict(), "accumulate_grad_batches": 1}
