"""Place of training in a user's `DataLoader` whose shards several ranks read, saved as any other run saves it."""

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
    """Place in a loader whose order Lightning's `DistributedSampler` deals to the shards of a step.

    It keeps and restores the place. The loaders of shards read the data.

    Args:
        loader: The loader of shard 0.
        reader: The run's, whose `world_size` is the number of shards.
    """

    def __init__(self, loader: DataLoader[Any], reader: Any) -> None:
        super().__init__(copy_of_loader(loader), loader, reader)
        # Shard 0 stands for all, whichever this rank has.
        self.traits = SamplerTraits(loader, reader.world_size, 0)

    def _take_sampler_seeds(self, seeds: list[int | None]) -> None:
        # The samplers of all shards are made of the user's sampler, so that the seed of one cannot change.
        return

    def begin(self) -> Place:
        """Return the place at which training begins to iterate now, and note it.

        Raises:
            NotExactError: The rest of the epoch cannot be that of the interrupted run.
        """
        place = self.reader.place_of(self)
        if place.cycle and not self.has_begun and self.length is not None:
            place = Place(place.epoch, 0, self.length)  # the epoch is over
        state = self.loaded
        self.loaded = None
        if state is not None and place.batches:
            self._refuse_other_seed(state)
        if state is not None and place.batches and state["dealt"] != self.traits.dealt:
            raise self.error(
                f"another order dealt its images (number of images, seed, shuffle, drop_last: {state['dealt']}, here "
                f"{self.traits.dealt}). Give it the data set and the sampler of the interrupted run"
            )
        self.has_begun = True
        self.current = TrainingPass(place)
        dataset = self.user_loader.dataset
        if (
            state is not None
            and state["epoch"] == place.epoch
            and state["dataset_epoch"] is not None
        ):
            # The user's hooks have set it in the interrupted run, and do not run again in mid-epoch.
            dataset.set_epoch(state["dataset_epoch"])  # type: ignore[attr-defined]
        return place

    def state_after(self, loader_of_shard: DataLoader[Any]) -> dict[str, Any]:
        """Return the state after the last batch of training, with the checksum of one shard's order.

        Args:
            loader_of_shard: The loader of this rank's first shard.
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
