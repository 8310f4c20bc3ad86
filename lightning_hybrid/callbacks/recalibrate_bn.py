"""Callback that recomputes BatchNorm statistics for the current weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.checks import plain_value, require_whole
from lightning_hybrid.lightning_names import misconfiguration
from lightning_hybrid.run_status import run_status


class RecalibrateBatchNorm(Callback):
    """Callback that recomputes BatchNorm statistics on training images before validation and test.

    Running statistics are a moving average over batches that were processed with earlier weights.
    If there are few updates and weights change fast, as with large batches, the statistics do not
    match the current weights. This distorts validation results. The callback runs some batches of
    the training loader, each normalized by its own statistics as in training. Over all elements x
    of a channel, it computes:

        mean = sum of x / n        variance = sum of (x - mean)^2 / (n - 1)

    The statistics stay in the module, so a checkpoint saved after validation contains the
    statistics that the validation used. An averaged model of `WeightAveraging`
    (`callbacks=[default,ema]`) gets its own statistics.

    The callback does not change training, which stays bit-identical. Layers that are in evaluation
    mode while the module trains are frozen and keep their statistics. The callback warns once about
    these layers. Dropout is disabled. The global random state is restored, and so are generators of
    torch and NumPy that are attributes of the loader and its samplers. Any other state of a data
    set or sampler advances by one pass.

    All ranks process the same number of batches and end with bit-identical statistics. Sums are
    float64, in the order of the batches. The statistics therefore do not depend on the number of
    ranks if the batch size of a rank is the same and the loader's batches do not depend on the
    number of ranks, as with the loaders of `data/`. SyncBatchNorm is treated as BatchNorm over one
    rank's batch.

    Args:
        num_images: Maximum number of training images over all ranks. It is rounded down to whole
            batches, with at least one batch per rank.
        forward: Function that runs the network on a batch, called as `forward(module, batch)`. If
            None, `module(batch)` is called, or `module(batch[0])` if a batch is a pair such as
            images and labels. With several training loaders, the batch is the one that
            `training_step` receives.

    Raises:
        ValueError: `num_images` is below 1.
        RuntimeError: The trainer has no training data, for example because `trainer.test` was
            called without a fit or a data module, or because the data module creates its training
            data only for a fit.

    Source: Wu & Johnson 2021 (arXiv:2105.07576), "precise BatchNorm".
    """

    def __init__(
        self,
        num_images: int = 2048,
        forward: Callable[[pl.LightningModule, Any], Any] | None = None,
    ) -> None:
        num_images = plain_value(num_images)
        require_whole(
            "num_images",
            num_images,
            "the statistics are computed from this number of images. Set num_images=2048",
        )
        self.num_images = num_images
        self.forward = forward or _forward_images
        self._has_warned = False

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Recalibrate the BatchNorm layers before the first batch, except in the sanity check.

        If a callback averages the weights, the module already holds the averaged weights here.
        """
        if batch_idx == dataloader_idx == 0 and not trainer.sanity_checking:
            self._recalibrate(trainer, pl_module)

    on_test_batch_start = on_validation_batch_start

    @torch.no_grad()
    def _recalibrate(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        if run_status(trainer).replica_group is not None:
            raise misconfiguration(
                "`RecalibrateBatchNorm` cannot be combined with strategy='hybrid_pipeline', because the callback "
                "runs the whole network outside of a training step, where each rank has only its own stages. "
                "Remove the callback."
            )
        layers = {}
        for name, layer in pl_module.named_modules():
            if isinstance(layer, _BatchNorm) and layer.track_running_stats:
                layers[name] = layer
        if not layers:
            rank_zero_warn(
                "`RecalibrateBatchNorm` has no effect, because the module has no BatchNorm with running statistics. "
                "Remove the callback."
            )
            return

        begin_s = time.perf_counter()
        with isolate_rng(), _normalizing_by_batch(trainer, pl_module, layers) as statistics:
            for batch in self._batches(trainer):
                with trainer.precision_plugin.forward_context():
                    self.forward(pl_module, batch)
                statistics.end_batch()
        statistics.write()
        self._warn_of_frozen(layers, statistics)
        if trainer.state.fn == "fit":
            _update_averages(trainer, pl_module)
        pl_module.log(
            m.RECALIBRATION_S,
            time.perf_counter() - begin_s,
            on_epoch=True,
            sync_dist=True,
            reduce_fx="max",
        )

    def _warn_of_frozen(self, layers: dict[str, _BatchNorm], statistics: _Statistics) -> None:
        if not statistics.frozen or self._has_warned:
            return
        self._has_warned = True
        frozen = [f"`{name}`" for name, layer in layers.items() if layer in statistics.frozen]
        rank_zero_warn(
            f"`RecalibrateBatchNorm` does not update the statistics of {', '.join(frozen)}, because these "
            "layers are in evaluation mode during training."
        )

    def _batches(self, trainer: pl.Trainer) -> Iterator[Any]:
        """Yield batches of a new training loader, moved to the device."""
        loader: Any = new_train_loader(trainer, asked_by="RecalibrateBatchNorm")
        with generators_kept(loader):
            batches = iter(_processed(trainer, loader))
            first = next(batches)
            global_batch_size = extract_batch_size(first) * trainer.world_size
            num_batches = max(1, self.num_images // global_batch_size)
            try:
                yield _to_device(trainer, first)
                for batch in islice(batches, num_batches - 1):
                    yield _to_device(trainer, batch)
            finally:
                if hasattr(batches, "close"):
                    batches.close()


class _Statistics:
    """Per-batch statistics of the inputs of BatchNorm layers.

    The count, mean and sum of squared deviations of a batch are stored in a float64 tensor of shape
    [3, channels of all layers].

    Args:
        layers: All layers. Frozen layers are included, so that all ranks gather tensors of the same
            size.
        frozen: Layers that keep their statistics.
    """

    def __init__(self, layers: Sequence[_BatchNorm], frozen: Sequence[_BatchNorm] = ()) -> None:
        self.layers = layers
        self.frozen = frozen
        self._of_batches: list[Tensor] = []
        self._of_layers: dict[_BatchNorm, Tensor] = {}  # statistics of the current batch

    def note(self, layer: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
        """Add the input of a layer to the statistics of the current batch."""
        x = inputs[0].detach().float()
        dims = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = torch.var_mean(x, dim=dims, correction=0)
        count = torch.full_like(mean, x.numel() // x.shape[1])
        statistics = torch.stack([count, mean, variance * count]).double()
        if layer in self._of_layers:  # a shared layer is called more than once
            statistics = _merged(self._of_layers[layer], statistics)
        self._of_layers[layer] = statistics

    def end_batch(self) -> None:
        """Store the statistics of the current batch, and start the next batch.

        A layer that was not called in the batch has a count of zero.
        """
        assert self.layers[0].running_mean is not None
        # Ranks exchange the statistics, which must be on the device even if no layer was called.
        device = self.layers[0].running_mean.device
        columns = []
        for layer in self.layers:
            if layer in self._of_layers:
                columns.append(self._of_layers[layer].to(device))
            else:
                columns.append(
                    torch.zeros(3, layer.num_features, dtype=torch.float64, device=device)
                )
        self._of_batches.append(torch.cat(columns, dim=1))
        self._of_layers = {}

    def write(self) -> None:
        """Combine the statistics of all batches and ranks, and write them into the layers.

        Collective: every rank of WORLD must call it, in the same order.
        """
        local = torch.stack(self._of_batches)
        of_ranks = [local]
        if dist.is_initialized() and dist.get_world_size() > 1:
            # The loader may be shorter on some ranks. Batches that not all ranks have are dropped.
            num_batches = torch.tensor(len(local), device=local.device)
            dist.all_reduce(num_batches, dist.ReduceOp.MIN)
            local = local[: int(num_batches)]
            of_ranks = [torch.empty_like(local) for _ in range(dist.get_world_size())]
            dist.all_gather(of_ranks, local)

        # Merge by batch, then by rank. This is the order of the loader's images for any number of
        # ranks.
        total = torch.zeros_like(of_ranks[0][0])
        for batch_statistics in torch.stack(of_ranks, dim=1).flatten(0, 1):
            total = _merged(total, batch_statistics)

        num_channels = [layer.num_features for layer in self.layers]
        totals = total.split(num_channels, dim=1)
        for layer, (count, mean, squares) in zip(self.layers, totals, strict=True):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            if layer not in self.frozen and bool(count[0] > 0):
                layer.running_mean.copy_(mean)
                layer.running_var.copy_(squares / (count - 1).clamp(min=1))


def _merged(first: Tensor, second: Tensor) -> Tensor:
    """Merge the counts, means and sums of squared deviations of two sets of values (Chan et al. 1979)."""
    first_count, first_mean, first_squares = first
    second_count, second_mean, second_squares = second
    count = first_count + second_count
    share = second_count / count.clamp(min=1)
    delta = second_mean - first_mean
    mean = first_mean + delta * share
    squares = first_squares + second_squares + delta.square() * first_count * share
    return torch.stack([count, mean, squares])


@contextmanager
def generators_kept(loader: Any) -> Iterator[None]:
    """Restore the random number generators of a loader and its samplers when the context exits."""
    loaders = [loader]
    if isinstance(loader, SeveralLoaders):
        loaders = loader.combined.flattened
    holders = []
    for single_loader in loaders:
        batch_sampler = getattr(single_loader, "batch_sampler", None)
        holders += [
            single_loader,
            getattr(single_loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        ]
    torch_states = []
    numpy_states = []
    for holder in holders:
        for value in getattr(holder, "__dict__", {}).values():
            if isinstance(value, torch.Generator):
                torch_states.append((value, value.get_state()))
            elif isinstance(value, np.random.Generator):
                numpy_states.append((value.bit_generator, value.bit_generator.state))
    try:
        yield
    finally:
        for generator, torch_state in torch_states:
            generator.set_state(torch_state)
        for bit_generator, numpy_state in numpy_states:
            bit_generator.state = numpy_state


@contextmanager
def _normalizing_by_batch(
    trainer: pl.Trainer, module: nn.Module, layers: dict[str, _BatchNorm]
) -> Iterator[_Statistics]:
    """Temporarily set BatchNorm layers to training mode, and all other layers to evaluation mode.

    Frozen BatchNorm layers stay in evaluation mode. Hooks collect statistics in the object that is
    yielded.
    """
    training_modes = {submodule: submodule.training for submodule in module.modules()}
    # These are the modes that Lightning restores after the evaluation.
    modes = trainer._evaluation_loop._module_mode.mode
    is_fit = trainer.state.fn == "fit"
    frozen = []
    for name, layer in layers.items():
        if not modes[name] and (is_fit or modes[""]):
            frozen.append(layer)
    if not is_fit:
        # The module may never have been trained. Its `train` method determines which layers are
        # frozen.
        module.train()
        frozen += [layer for layer in layers.values() if not layer.training]

    statistics = _Statistics(list(layers.values()), frozen)
    counters = []
    for layer in layers.values():
        if layer.num_batches_tracked is not None:
            counters.append((layer.num_batches_tracked, layer.num_batches_tracked.clone()))
    handles = [layer.register_forward_pre_hook(statistics.note) for layer in layers.values()]
    module.eval()
    for layer in layers.values():
        layer.training = layer not in frozen
    try:
        yield statistics
    finally:
        for handle in handles:
            handle.remove()
        for submodule, is_training in training_modes.items():
            submodule.training = is_training
        for counter, count in counters:
            counter.copy_(count)


class SeveralLoaders:
    """Loader that combines the batches of several training loaders in the same way as in training.

    Args:
        combined: Combination of the loaders, over which nothing else iterates.
    """

    def __init__(self, combined: CombinedLoader) -> None:
        self.combined = combined

    def __iter__(self) -> Iterator[Any]:
        for batch, _, _ in self.combined:
            yield batch


def new_train_loader(trainer: Any, *, asked_by: str) -> Any:
    """Create a second training loader, so that the one in use keeps its position in the epoch.

    If there are several training loaders, the result is a `SeveralLoaders`.

    Args:
        trainer: The trainer.
        asked_by: Name of the callback, for the error message.

    Raises:
        RuntimeError: The trainer has no source of training data, or the source cannot create a
            loader without a fit.
    """
    fit_source = trainer.fit_loop._data_source
    source = trainer.datamodule
    if not source:
        source = fit_source.instance if fit_source.is_defined() else None
    if source is None:
        raise _no_training_data("none", asked_by)
    is_module = isinstance(source, pl.LightningModule | pl.LightningDataModule)
    loaders = source
    if is_module:
        loaders = _requested_loaders(trainer, source, asked_by)

    user_loader_of = run_status(trainer).user_loader_of
    if isinstance(loaders, CombinedLoader):
        combined = copy(loaders)
    else:
        combined = CombinedLoader(loaders, "max_size_cycle")
    new_loaders = []
    for loader in combined.flattened:
        user_loader = loader
        if user_loader_of is not None:
            # The user's `CombinedLoader` may hold the loaders that training iterates over.
            user_loader = user_loader_of(loader)
        if hasattr(user_loader, "state_dict") and not is_module:
            kind = type(user_loader).__name__
            raise _no_training_data(
                f"a `{kind}`, whose position in the epoch would be lost", asked_by
            )
        # This adds a DistributedSampler where Lightning would add one.
        new_loader = trainer._data_connector._prepare_dataloader(
            user_loader, shuffle=True, mode=RunningStage.TRAINING
        )
        new_loaders.append(new_loader)
    if combined.iterables is combined.flattened[0]:
        return new_loaders[0]
    combined.flattened = new_loaders
    return SeveralLoaders(combined)


def _no_training_data(description: str, asked_by: str) -> RuntimeError:
    return RuntimeError(
        f"`{asked_by}` needs training data to create a loader from, but found {description}. Pass a "
        "data module to `trainer.fit` and `trainer.test`."
    )


def _requested_loaders(trainer: Any, source: Any, asked_by: str) -> Any:
    """Return the training loaders of a module or data module.

    Raises:
        RuntimeError: The source has no training data, because Lightning has not set it up for a
            fit.
    """
    try:
        return source.train_dataloader()
    except Exception as error:
        if trainer.state.fn == "fit":
            raise
        stage = trainer.state.fn.value
        raise RuntimeError(
            f"`{asked_by}` needs training data, but `{type(source).__name__}.train_dataloader` raised "
            f"{type(error).__name__}: {error}. `trainer.{stage}` calls only `setup(stage={stage!r})`. Create the "
            f"training data set in every stage of `setup`, or call `trainer.{stage}` without `{asked_by}`."
        ) from error


def _processed(trainer: pl.Trainer, loader: Any) -> Any:
    """Return a loader whose batches the strategy moves to the device in advance."""
    if isinstance(loader, SeveralLoaders):
        combined = loader.combined
        combined.flattened = [_processed(trainer, single) for single in combined.flattened]
        return loader
    if isinstance(loader, DataLoader):
        loader = copy(loader)
        loader._iterator = None  # the persistent workers are in the middle of the epoch
    process = run_status(trainer).process_second_loader
    if process is None:
        process = trainer.strategy.process_dataloader
    return process(loader)


def _to_device(trainer: pl.Trainer, batch: Any) -> Any:
    batch = trainer.precision_plugin.convert_input(batch)
    return trainer.strategy.batch_to_device(batch)


def _forward_images(module: pl.LightningModule, batch: Any) -> Any:
    if type(module).forward is nn.Module.forward:
        raise RuntimeError(
            f"`{type(module).__name__}.forward` is not defined, so `RecalibrateBatchNorm` cannot run the network. "
            "Define `forward`, or set `RecalibrateBatchNorm(forward=lambda module, batch: module.net(batch[0]))`."
        )
    if isinstance(batch, tuple | list):
        return module(batch[0])
    try:
        return module(batch)
    except Exception as error:
        error.add_note(
            f"`RecalibrateBatchNorm` called `forward` with a whole batch, which is a {type(batch).__name__}. If "
            "`forward` takes only a part of it, set `RecalibrateBatchNorm(forward=lambda module, batch: "
            "module(batch[...]))`."
        )
        raise


def _update_averages(trainer: pl.Trainer, module: nn.Module) -> None:
    """Copy the running statistics to the averaged models of all `WeightAveraging` callbacks.

    During validation the module holds the averaged weights, so the new statistics match these
    weights.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, WeightAveraging):
            continue
        average = getattr(callback, "_average_model", None)
        if average is not None:
            _copy_statistics(module, average.module)


def _copy_statistics(source: nn.Module, target: nn.Module) -> None:
    """Copy BatchNorm running statistics from one copy of a module to another."""
    for layer, average_layer in zip(source.modules(), target.modules(), strict=True):
        if isinstance(layer, _BatchNorm) and layer.track_running_stats:
            for name in ("running_mean", "running_var"):
                getattr(average_layer, name).copy_(getattr(layer, name))
