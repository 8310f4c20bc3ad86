"""BatchNorm statistics of the present weights, in place of a moving average over past ones."""

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
from lightning.pytorch.utilities import rank_zero_warn
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
    """A callback that recomputes BatchNorm's statistics on training images, before each validation and test.

    Running statistics are a moving average over batches of past weights. Where weights move fast and updates are few,
    as with large batches, they belong to no network that ever was, and validation measures that. Here, with B batches
    of the training loader, each normalised by itself as in training, and over all their elements x of a channel:

        mean = sum of x / n        variance = sum of (x - mean)^2 / (n - 1)

    The statistics stay in the module, so that checkpoints saved after a validation hold those that it used. An averaged
    model of `WeightAveraging` (`callbacks=[default,ema]`) gets its own.

    Training keeps its bits. Layers that are in evaluation mode while the module trains, and so normalise by statistics
    of other data, keep them: their names are warned of once. Dropout is off. The global random state is put back, and
    so are torch's and NumPy's generators that are attributes of the loader and its samplers; what else a data set or
    sampler counts or draws from moves on by a pass.

    All ranks do the same number of batches and end with the same bits. With a loader whose batches do not depend on the
    number of ranks (those of `data/`), so do the statistics, as long as a batch of one rank has the same size: sums are
    float64, in the order of the batches. SyncBatchNorm counts as BatchNorm of one rank's batch.

    Args:
        num_images: At most so many training images over all ranks, in whole batches, at least one a rank.
        forward: Runs the network on a batch, as `forward(module, batch)`. None: `module(batch)`, or `module(batch[0])`
            where a batch is a pair such as images and labels.

    Raises:
        ValueError: `num_images` is below 1.
        RuntimeError: The trainer knows no training data: `trainer.test` without a fit or a data module.

    Source: Wu & Johnson 2021 (arXiv:2105.07576), "precise BatchNorm".
    """

    def __init__(
        self,
        num_images: int = 2048,
        forward: Callable[[pl.LightningModule, Any], Any] | None = None,
    ) -> None:
        num_images = plain_value(num_images)
        require_whole("num_images", num_images, "statistics need images. Write num_images=2048")
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
        """Recalibrate before the first batch: by then an average of weights has taken its place in the module."""
        if batch_idx == dataloader_idx == 0 and not trainer.sanity_checking:
            self._recalibrate(trainer, pl_module)

    on_test_batch_start = on_validation_batch_start

    @torch.no_grad()
    def _recalibrate(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        if run_status(trainer).replica_group is not None:
            raise misconfiguration(
                "`RecalibrateBatchNorm` cannot be combined with strategy='hybrid_pipeline': it runs the network "
                "outside of a step, where each rank has its own stages alone. Leave it out."
            )
        layers = {
            name: layer
            for name, layer in pl_module.named_modules()
            if isinstance(layer, _BatchNorm) and layer.track_running_stats
        }
        if not layers:
            rank_zero_warn(
                "`RecalibrateBatchNorm`: the module has no BatchNorm with running statistics."
            )
            return
        begin = time.perf_counter()
        with isolate_rng(), _normalizing_by_batch(trainer, pl_module, layers) as statistics:
            for batch in self._batches(trainer):
                with trainer.precision_plugin.forward_context():
                    self.forward(pl_module, batch)
                statistics.end_batch()
        statistics.write()
        if statistics.frozen and not self._has_warned:
            self._has_warned = True
            names = ", ".join(
                f"`{name}`" for name, layer in layers.items() if layer in statistics.frozen
            )
            rank_zero_warn(
                f"`RecalibrateBatchNorm`: {names} keep their statistics, as they are in evaluation mode while the "
                "module trains."
            )
        for callback in trainer.callbacks:
            # During a validation the module shows the average's values: these statistics are the average's.
            average = (
                getattr(callback, "_average_model", None)
                if isinstance(callback, WeightAveraging)
                else None
            )
            if average is not None and trainer.state.fn == "fit":
                _copy_statistics(pl_module, average.module)
        pl_module.log(
            m.RECALIBRATION_S,
            time.perf_counter() - begin,
            on_epoch=True,
            sync_dist=True,
            reduce_fx="max",
        )

    def _batches(self, trainer: pl.Trainer) -> Iterator[Any]:
        loader: Any = new_train_loader(trainer, asked_by="RecalibrateBatchNorm")
        if isinstance(loader, DataLoader):
            loader = copy(loader)
            loader._iterator = None  # workers that persist are in the middle of the epoch
        with generators_kept(loader):
            loader = trainer.strategy.process_dataloader(loader)
            batches = iter(loader)
            first = next(batches)
            num_batches = max(
                1, self.num_images // (extract_batch_size(first) * trainer.world_size)
            )
            try:
                yield _on_device(trainer, first)
                for batch in islice(batches, num_batches - 1):
                    yield _on_device(trainer, batch)
            finally:
                if hasattr(batches, "close"):
                    batches.close()


class _Statistics:
    """Count, mean and sum of squared deviations of the inputs of layers, `[3, channels of all layers]` for a batch."""

    def __init__(self, layers: Sequence[_BatchNorm], frozen: Sequence[_BatchNorm] = ()) -> None:
        self.layers, self.frozen = (
            layers,
            frozen,
        )  # all are noted: ranks gather as much, whatever each has frozen
        self._of_batches: list[Tensor] = []
        self._now: dict[_BatchNorm, Tensor] = {}

    def note(self, layer: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
        """Take what a layer is about to normalise."""
        x = inputs[0].detach().float()
        variance, mean = torch.var_mean(
            x, dim=[dim for dim in range(x.dim()) if dim != 1], correction=0
        )
        count = torch.full_like(mean, x.numel() // x.shape[1])
        found = torch.stack([count, mean, variance * count]).double()
        self._now[layer] = (
            _merged(self._now[layer], found) if layer in self._now else found
        )  # called twice: shared

    def end_batch(self) -> None:
        """Close a batch; a layer that was not called counts nothing."""
        assert self.layers[0].running_mean is not None
        device = self.layers[
            0
        ].running_mean.device  # also where no layer was called: ranks send it to one another
        of_layers = []
        for layer in self.layers:
            if layer in self._now:
                of_layers.append(self._now[layer].to(device))
            else:
                of_layers.append(
                    torch.zeros(3, layer.num_features, dtype=torch.float64, device=device)
                )
        self._of_batches.append(torch.cat(of_layers, dim=1))
        self._now = {}

    def write(self) -> None:
        """Put the statistics of all ranks' batches into the layers."""
        own = torch.stack(self._of_batches)
        of_ranks = [own]
        if dist.is_initialized() and dist.get_world_size() > 1:
            # A loader may be shorter on one rank: what all have counts.
            num_batches = torch.tensor(len(own), device=own.device)
            dist.all_reduce(num_batches, dist.ReduceOp.MIN)
            own = own[: int(num_batches)]
            of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(of_ranks, own)
        # In the order of the loader's images: batch by batch, and rank by rank within, whatever the number of ranks.
        total = torch.zeros_like(of_ranks[0][0])
        for of_batch in torch.stack(of_ranks, dim=1).flatten(0, 1):
            total = _merged(total, of_batch)
        sizes = [layer.num_features for layer in self.layers]
        for layer, (count, mean, squares) in zip(
            self.layers, total.split(sizes, dim=1), strict=True
        ):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            if layer not in self.frozen and bool(count[0] > 0):
                layer.running_mean.copy_(mean)
                layer.running_var.copy_(squares / (count - 1).clamp(min=1))


def _merged(one: Tensor, other: Tensor) -> Tensor:
    """Merge counts, means and sums of squared deviations of two sets (Chan et al. 1979)."""
    count = one[0] + other[0]
    share = other[0] / count.clamp(min=1)
    delta = other[1] - one[1]
    return torch.stack(
        [count, one[1] + delta * share, one[2] + other[2] + delta.square() * one[0] * share]
    )


@contextmanager
def generators_kept(loader: Any) -> Iterator[None]:
    """Put the states of generators that a loader and its samplers hold back at the end."""
    samplers = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    samplers.append(getattr(samplers[1], "sampler", None))
    held = [
        value for each in (loader, *samplers) for value in getattr(each, "__dict__", {}).values()
    ]
    of_torch = [(each, each.get_state()) for each in held if isinstance(each, torch.Generator)]
    of_numpy = [
        (each.bit_generator, each.bit_generator.state)
        for each in held
        if isinstance(each, np.random.Generator)
    ]
    try:
        yield
    finally:
        for generator, state in of_torch:
            generator.set_state(state)
        for bits, place in of_numpy:
            bits.state = place


@contextmanager
def _normalizing_by_batch(
    trainer: pl.Trainer, module: nn.Module, layers: dict[str, _BatchNorm]
) -> Iterator[_Statistics]:
    """Let the layers that train with the module, and nothing else of it, behave as in training."""
    was_training = {each: each.training for each in module.modules()}
    modes = trainer._evaluation_loop._module_mode.mode  # those that come back after the evaluation
    is_fit = trainer.state.fn == "fit"
    frozen = [layer for name, layer in layers.items() if not modes[name] and (is_fit or modes[""])]
    if not is_fit:
        module.train()  # it may never have trained: its own `train` says which layers do not
        frozen += [layer for layer in layers.values() if not layer.training]
    statistics = _Statistics(list(layers.values()), frozen)
    tracked = [
        layer.num_batches_tracked
        for layer in layers.values()
        if layer.num_batches_tracked is not None
    ]
    counts = [each.clone() for each in tracked]
    handles = [layer.register_forward_pre_hook(statistics.note) for layer in layers.values()]
    module.eval()
    for layer in layers.values():
        layer.training = layer not in frozen
    try:
        yield statistics
    finally:
        for handle in handles:
            handle.remove()
        for each, is_training in was_training.items():
            each.training = is_training
        for now, before in zip(tracked, counts, strict=True):
            now.copy_(before)


def new_train_loader(trainer: Any, *, asked_by: str) -> Any:
    """Make a training loader of its own: the one in use keeps its place."""
    given = trainer.fit_loop._data_source
    source = trainer.datamodule or (given.instance if given.is_defined() else None)
    is_module = isinstance(source, pl.LightningModule | pl.LightningDataModule)
    if source is None or (hasattr(source, "state_dict") and not is_module):
        found = (
            "none"
            if source is None
            else f"a `{type(source).__name__}`, whose place in the epoch would be lost"
        )
        raise RuntimeError(
            f"`{asked_by}` needs training data of which it can make a loader, and found {found}. Give "
            "`trainer.fit` and `trainer.test` a data module."
        )
    loader = source.train_dataloader() if is_module else source
    # With a DistributedSampler where Lightning would put one.
    return trainer._data_connector._prepare_dataloader(
        loader, shuffle=True, mode=RunningStage.TRAINING
    )


def _on_device(trainer: pl.Trainer, batch: Any) -> Any:
    batch = trainer.precision_plugin.convert_input(batch)
    return trainer.strategy.batch_to_device(batch)


def _forward_images(module: pl.LightningModule, batch: Any) -> Any:
    if type(module).forward is nn.Module.forward:
        raise RuntimeError(
            f"`{type(module).__name__}.forward` is not defined: `RecalibrateBatchNorm` cannot run the "
            "network. Define it, or give `RecalibrateBatchNorm(forward=lambda module, batch: module.net(batch[0]))`."
        )
    return module(batch[0] if isinstance(batch, tuple | list) else batch)


def _copy_statistics(source: nn.Module, target: nn.Module) -> None:
    """Copy running statistics to the layers of the same place in an average of the module."""
    pairs = zip(source.modules(), target.modules(), strict=True)
    for one, other in pairs:
        if isinstance(one, _BatchNorm) and one.track_running_stats:
            for name in ("running_mean", "running_var"):
                getattr(other, name).copy_(getattr(one, name))
