"""Extension for `uneven_batches="join"`, which weights ranks by samples and handles repeated batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.checks import require_whole
from lightning_hybrid.comm import CommPlan
from lightning_hybrid.data.place import IteratorsOfTraining
from lightning_hybrid.lightning_names import lightning_function, lightning_types
from lightning_hybrid.strategy.compatibility import in_module, refuse_excluded
from lightning_hybrid.strategy.extension import FitContext, FitExtension, RunningFit
from lightning_hybrid.strategy.uneven_batches.agreement import BatchAgreement
from lightning_hybrid.strategy.uneven_batches.joined_loader import joined
from lightning_hybrid.strategy.uneven_batches.repeated_batch import (
    EpochSums,
    RunningStatistics,
    gradient_leaves,
    zero_gradients,
)
from lightning_hybrid.strategy.uneven_batches.window_weights import WindowWeights
from lightning_hybrid.strategy.user_code_checks import user_moves_batches

_OPTION = "`uneven_batches` (='join')"
_FEATURES = {"uneven batches": _OPTION}

# Name of the method of a user's module that returns the number of samples in a batch.
_COUNT = "count_samples"


class UnevenBatchesExtension(FitExtension):
    """Extension that lets ranks without batches join the remaining steps of an epoch.

    Gradients of the ranks are weighted by their numbers of samples.

    Args:
        fit: Description of the training run that is about to start.

    Raises:
        ValueError: The module cannot be combined with `uneven_batches`.
    """

    def __init__(self, fit: FitContext) -> None:
        refuse_excluded(_FEATURES | _in_run(fit))
        device: torch.device | None = fit.device
        if user_moves_batches(fit.module):
            device = None
        self._module = fit.module
        self._agreement = BatchAgreement(
            rank=fit.topology.rank,
            world_size=fit.topology.world_size,
            timeout=fit.timeout,
            device=device,
            count_samples=self._count_samples,
        )
        self._weights = WindowWeights(fit.topology.world_size)
        self._has_fp16_gradients = fit.precision.precision == "16-true"
        self._is_repeated = False
        self._is_in_step = False
        # State to restore after a repeated batch.
        self._statistics: RunningStatistics | None = None
        self._sums: EpochSums | None = None
        self._forward_hook: RemovableHandle | None = None

    def _count_samples(self, batch: Any) -> int:
        """Return the number of samples in a batch.

        It is the result of the module's `count_samples`, or the batch size that Lightning infers for logging.

        Raises:
            ValueError: The number is not known or is not a whole number.
        """
        count = getattr(self._module, _COUNT, None)
        if callable(count):
            number: int = count(batch)
            why = "the gradients of a rank are weighted by this number. Return 0 for a batch that must not count"
            require_whole(f"{_COUNT}(batch)", number, why, least=0, unit="samples")
            return number
        misconfigured = lightning_types("fabric.utilities.exceptions.MisconfigurationException")
        try:
            number = lightning_function("pytorch.utilities.data.extract_batch_size")(batch)
        except (RecursionError, *misconfigured) as error:
            raise ValueError(
                f"{_OPTION} weights ranks by their number of samples, but the number in a batch of type "
                f"{type(batch).__name__} is unknown, because the batch contains no tensor. Add a method "
                f"`{_COUNT}(self, batch)` to {type(self._module).__name__} that returns the number."
            ) from error
        return number

    # ---- setup -------------------------------------------------------------------------------

    def before_optimizers(self, fit: FitContext) -> None:
        """Raise if the module cannot be combined with uneven batches.

        Lightning may have replaced layers since the constructor made the same check.
        """
        refuse_excluded(_FEATURES | _in_run(fit))

    def engine_options(self, fit: FitContext, plan: CommPlan) -> Mapping[str, Any]:
        """Return the value of `uneven_batches`, which the engine compares between ranks."""
        return {"compared": {"uneven_batches": "join"}}

    def training_loader(self, fit: FitContext, loader: Any) -> Any:
        """Return a loader whose epoch ends on all ranks after the same number of batches.

        Collective: every rank must call it, in the same order.
        """
        own_length: int | None = lightning_function("fabric.utilities.data.sized_len")(loader)
        length = self._agreement.longest(own_length)
        return joined(
            loader,
            self._agreement,
            length=length,
            is_training=IteratorsOfTraining(fit.trainer),
            num_fetched=self._num_fetched,
        )

    def _num_fetched(self) -> int:
        """Return the number of batches that the training loop has fetched in this epoch.

        Batches fetched before a resume are counted as well.
        """
        fetcher = self._module.trainer.fit_loop._data_fetcher
        assert fetcher is not None
        return fetcher.fetched

    # ---- a step ------------------------------------------------------------------------------

    def before_batch(self, fit: RunningFit, batch_idx: int) -> None:
        """Set this rank's loss weight for the batch from the numbers of samples on all ranks."""
        trainer = fit.trainer
        refuse_excluded(_FEATURES | _in_loaders(trainer))
        batch = self._agreement.agreed.popleft()
        self._is_repeated = batch.num_own == 0
        # In manual optimization it is 1, so each batch is weighted like a step.
        accumulation = trainer.accumulate_grad_batches
        if batch_idx % accumulation == 0:
            self._weights.begin(
                batch, accumulation=accumulation, limits_factors=self._has_fp16_gradients
            )
        else:
            self._weights.add(batch)

    def before_training_step(
        self, fit: RunningFit, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Save the state that a training step on a repeated batch must not change."""
        self._is_in_step = True
        self._statistics = None
        if self._is_repeated:
            self._sums = EpochSums(fit.module)
            # BatchNorm statistics are saved in a hook, after DDP's broadcast from rank zero and before the forward.
            self._forward_hook = fit.module.register_forward_pre_hook(self._save_statistics)

    def _save_statistics(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._statistics is None:
            self._statistics = RunningStatistics(module)

    def after_training_step(self, fit: RunningFit, output: Any) -> None:
        """Restore the state that a training step on a repeated batch has changed."""
        self._is_in_step = False
        self._remove_hook()
        if self._sums is not None:
            self._sums.restore()
            self._sums = None
        if self._statistics is not None:
            self._statistics.restore()

    def _remove_hook(self) -> None:
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None

    def before_all_gather(self, fit: RunningFit) -> None:
        """Raise if `all_gather` is called in a training step, because it could gather repeated batches.

        Raises:
            RuntimeError: A training step is running.
        """
        if self._is_in_step:
            gathering = {"gather in a step": "`all_gather` in `training_step`"}
            refuse_excluded(_FEATURES | gathering, error=RuntimeError)

    def backward(self, fit: RunningFit, loss: Tensor, run: Callable[[Tensor], Any]) -> Any:
        """Weight the loss by this rank's number of samples and run the backward pass.

        The backward pass of a repeated batch adds zeros to the gradients.
        """
        self._refuse_local_sums(fit)
        fit.engine.num_terms = self._weights.num_terms
        context: AbstractContextManager[None] = nullcontext()
        if self._is_repeated:
            context = zero_gradients(gradient_leaves(fit.module, fit.precision))
        elif self._weights.factor != 1:
            if loss.dtype.itemsize < 4:
                loss = loss.float()
            loss = loss * self._weights.factor
        with context:
            result = run(loss)
        if self._statistics is not None:
            # Activation checkpointing has run the layers again, which updated their statistics.
            self._statistics.restore()
        return result

    def _refuse_local_sums(self, fit: RunningFit) -> None:
        """Raise if manual optimization accumulates fp16 gradients of several batches before averaging.

        Batches have different divisors then. With Lightning's accumulation they have one divisor, and with other dtypes
        the divisor is always the world size.

        Raises:
            RuntimeError: The loop has disabled gradient averaging for this backward.
        """
        is_local = not fit.wrapped.require_backward_grad_sync
        if is_local and self._has_fp16_gradients and not fit.module.automatic_optimization:
            local_sums = {"local fp16 sums": "`require_backward_grad_sync` (=False) with 16-true"}
            refuse_excluded(_FEATURES | local_sums, error=RuntimeError)

    def status(self) -> Mapping[str, Any]:
        """Return the `RunStatus` fields on uneven batches."""
        return {"repeats_batch": self._is_repeated, "has_uneven_batches": True}

    # ---- end ---------------------------------------------------------------------------------

    def end(self, fit: RunningFit, error: BaseException | None) -> None:
        """Destroy the process group that exchanges batch sizes.

        After an error of this rank, ranks that wait for its batch raise an error as well.
        """
        self._agreement.close(has_failed=error is not None)

    def put_back(self, fit: FitContext, error: BaseException | None) -> None:
        """Remove the forward hook that a failed training step has left in the module.

        Also destroy the process group, because `end` is not called for a run that failed before it began.
        """
        self._remove_hook()
        self._agreement.close(has_failed=error is not None)


def _in_run(fit: FitContext) -> dict[str, str]:
    """Return the properties of the module and training step that `uneven_batches` does not support."""
    features = in_module(fit.module)
    if any(getattr(layer, "node_slices", ()) for layer in fit.module.modules()):
        features["node slices"] = "`node_slices`"
    takes_iterator = lightning_function(
        "pytorch.utilities.signature_utils.is_param_in_hook_signature"
    )
    if takes_iterator(fit.module.training_step, "dataloader_iter", explicit=True):
        features["dataloader_iter"] = "`training_step(dataloader_iter)`"
    return features


def _in_loaders(trainer: Any) -> dict[str, str]:
    """Return the properties of the training loaders that `uneven_batches` does not support."""
    num_loaders = len(trainer.fit_loop._combined_loader.flattened)
    if num_loaders > 1:
        return {"several loaders": f"{num_loaders} training loaders"}
    return {}
