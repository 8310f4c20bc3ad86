"""Data loaders of an elastic run, with training batches divided among the present hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_hybrid.strategy.evaluation import Evaluation
from lightning_hybrid.strategy.loaders import TrainingLoaders

if TYPE_CHECKING:
    from lightning_hybrid.elastic.elastic_fit import ElasticFit


class ElasticLoaders(TrainingLoaders):
    """Data loaders of the elastic strategy, with training batches divided among the present hosts.

    Attributes:
        fit: Controller of the current training run, which assigns the batches of the training loader to ranks. None if
            no run is active.
    """

    def __init__(self, exact_resume: bool, evaluation: Evaluation) -> None:
        super().__init__(exact_resume, evaluation)
        self.fit: ElasticFit | None = None

    def _resumes_by_counters(self) -> bool:
        return False

    def _wrap_training_loader(
        self, loader: Any, trainer: Any, with_prefetcher: Callable[..., Any]
    ) -> Any:
        """Wrap a training loader so that it yields the batches of this rank's data shards.

        Loaders that are created after hosts have connected belong to callbacks, and are wrapped as in the base class.
        """
        from lightning_hybrid.data.batch_counters import uncount_cut_epoch

        if self.fit is None or not self.fit.deals_loaders:
            return super()._wrap_training_loader(loader, trainer, with_prefetcher)
        uncount_cut_epoch(trainer)
        return self.fit.deal(loader, self, with_prefetcher)
