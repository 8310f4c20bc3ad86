"""Training loaders of an elastic run: their batches are dealt to the hosts that are present."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_hybrid.strategy.evaluation import Evaluation
from lightning_hybrid.strategy.loaders import TrainingLoaders

if TYPE_CHECKING:
    from lightning_hybrid.elastic.elastic_fit import ElasticFit


class ElasticLoaders(TrainingLoaders):
    """Loaders of an elastic strategy's fits.

    Attributes:
        fit: The running fit, which deals the batches of its training loader.
    """

    def __init__(self, exact_resume: bool, evaluation: Evaluation) -> None:
        super().__init__(exact_resume, evaluation)
        self.fit: ElasticFit | None = None

    def _resumes_by_counters(self) -> bool:
        return False

    def _wrap_training_loader(
        self, loader: Any, trainer: Any, with_prefetcher: Callable[..., Any]
    ) -> Any:
        """Return a loader of this rank's shards. Loaders that are made later in the fit are those of callbacks."""
        from lightning_hybrid.data.batch_counters import uncount_cut_epoch

        if self.fit is None or not self.fit.deals_loaders:
            return super()._wrap_training_loader(loader, trainer, with_prefetcher)
        uncount_cut_epoch(trainer)
        return self.fit.deal(loader, self, with_prefetcher)
