"""The `hybrid_elastic` strategy, which continues when a host is lost and lets hosts join.

Each host is launched separately, so Lightning's `world_size` and `global_rank` and torch's default process group cover
only one host. Collectives over all present hosts use process groups of this package.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_hybrid.checks import plain_value
from lightning_hybrid.comm import Topology
from lightning_hybrid.comm.engine.view_engine import ViewEngine
from lightning_hybrid.elastic.elastic_fit import ElasticFit
from lightning_hybrid.elastic.exclusions import (
    CURES_OF_ELASTIC,
    EXCLUDED_BY_ELASTIC,
    features_of_run,
)
from lightning_hybrid.elastic.held_loggers import HeldLoggers
from lightning_hybrid.elastic.loaders import ElasticLoaders
from lightning_hybrid.elastic.options import ElasticOptions
from lightning_hybrid.strategy.compatibility import refuse_excluded
from lightning_hybrid.strategy.hybrid_allreduce import HybridAllReduce
from lightning_hybrid.strategy.registration import ELASTIC_NAME

if TYPE_CHECKING:
    import lightning.pytorch as pl

MAX_HOSTS_VARIABLE = "HYBRID_ELASTIC_MAX_HOSTS"
MEET_VARIABLE = "HYBRID_ELASTIC_MEET"


class HybridElastic(HybridAllReduce):
    """Data-parallel strategy that continues when a host is lost, and lets hosts join during training.

        images of a step = batch size of a rank x `devices` x `max_hosts`         for any number of present hosts

    Each host is launched separately, with one node: `python train.py`, or `torchrun --nnodes=1`. Up to rounding, the
    weights equal those of a run in which all `max_hosts` hosts are always present.

    Args:
        max_hosts: Number of hosts that share a step when all are present. The default is the environment variable
            `HYBRID_ELASTIC_MAX_HOSTS`.
        meet: Addresses `"ip:port"` at which hosts find each other, in a list or separated by commas. If the network
            splits the hosts into two halves, the half with the host at the first address continues. The default is the
            environment variable `HYBRID_ELASTIC_MEET`.
        min_hosts: Minimum number of hosts. With fewer hosts, a run does not begin, and a run that has lost hosts waits.
        silent_s: Seconds without a heartbeat after which a host is considered lost.
        **options: As in `HybridAllReduceStrategy`. Options that need the same ranks throughout training raise an error.

    Raises:
        ValueError: An option is invalid. The error is raised before any process group is created.
    """

    registered_name = ELASTIC_NAME
    _strategy_features = MappingProxyType({"elastic": f"`strategy` (={ELASTIC_NAME!r})"})
    _loaders_type = ElasticLoaders
    _loaders: ElasticLoaders
    saves_residuals = False  # a host that joins starts with zero error-feedback residuals

    def __init__(
        self,
        max_hosts: int | None = None,
        meet: str | Sequence[str] | None = None,
        min_hosts: int = 1,
        silent_s: float = 2.0,
        **options: Any,
    ) -> None:
        self._elastic = ElasticOptions(
            max_hosts=plain_value(_value_or_variable(max_hosts, MAX_HOSTS_VARIABLE)),
            meet=plain_value(_value_or_variable(meet, MEET_VARIABLE)),
            min_hosts=plain_value(min_hosts),
            silent_s=plain_value(silent_s),
        )
        self._fit: ElasticFit | None = None
        self._held_loggers: HeldLoggers | None = None
        # Whether this rank is rank zero over all hosts, even after training. None before training.
        self._is_first: bool | None = None
        _refuse_own_buffers(options)
        # DDP's ranks are those of one host. All hosts share buffers at the end of a step, in `ElasticFit`.
        super().__init__(**{**options, _buffer_option(): False})
        refuse_excluded(self._options.features(), rows=EXCLUDED_BY_ELASTIC, cures=CURES_OF_ELASTIC)

    def _run_status_fields(self) -> dict[str, Any]:
        fields = super()._run_status_fields()
        if self._fit is not None:
            fields |= self._fit.status()
        return fields

    # ---- setup -----------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Set up the environment like `hybrid_allreduce`, and delay loggers until hosts are connected."""
        super().setup_environment()
        if self._module.trainer.state.fn == "fit":
            self._held_loggers = HeldLoggers(self._module.trainer.loggers)

    def _begin_communication(self) -> None:
        """Prepare communication for `max_hosts` hosts, and raise if a feature is not supported.

        Until the hosts have connected, this host is treated as the first host.
        """
        self._refuse_run()
        topology = Topology.from_ranks_per_node(
            rank=self.global_rank,
            world_size=self.world_size * self._elastic.max_hosts,
            ranks_per_node=self.world_size,
        )
        self._comm.begin(topology, self.root_device, self._timeout)
        self._comm.engine_type = ViewEngine
        assert self._timeout is not None
        self._fit = ElasticFit(
            self._elastic, self, comm=self._comm, failures=self._failures, timeout=self._timeout
        )
        self._comm.wrap_hook = self._fit.hook
        self._loaders.fit = self._fit
        self._is_first = self._comm.topology.local_rank == 0  # until hosts have met

    def _refuse_run(self) -> None:
        """Raise if the run uses a feature or a device that elastic training does not support.

        Raises:
            ValueError: The run needs the same ranks throughout training, or trains on an unsupported device.
        """
        features = self._options.features() | features_of_run(
            self._module, has_exact_resume=self._loaders.is_on
        )
        refuse_excluded(features, rows=EXCLUDED_BY_ELASTIC, cures=CURES_OF_ELASTIC)
        device = self.root_device
        if device.type == "cpu":
            return
        if device.type != "cuda" or not hasattr(dist.ProcessGroupNCCL.Options, "lazy_init"):
            raise ValueError(
                f"`strategy` (={ELASTIC_NAME!r}) supports only CPUs, and NVIDIA GPUs with torch 2.15 or "
                f"newer, but this rank trains on {device} with torch {torch.__version__}. Use "
                "strategy='hybrid_allreduce'."
            )
        rank_zero_warn(
            f"`strategy` (={ELASTIC_NAME!r}) has not been tested on GPUs yet. Check the results of this run "
            "carefully."
        )

    def _share_of_data(self) -> dict[str, Any]:
        """Return the `DistributedSampler` arguments of this rank for a run on `max_hosts` hosts.

        The shards of this rank are known only once hosts have connected.
        """
        return {"num_replicas": self._comm.topology.world_size, "rank": self.global_rank}

    @property
    def _sums_over_ranks(self) -> bool:
        """True if gradients may be all-reduced over several ranks, including those of hosts that join later."""
        return self._comm.topology.world_size > 1

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Create the optimizers, and record their options so that hosts can compare them."""
        super().setup_optimizers(trainer)
        if self._fit is not None:
            self._fit.note_optimizers(self.optimizers)

    # ---- step ------------------------------------------------------------------------------------------------------

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Repeat the closure until all gradients are averaged, then step the optimizer once."""
        if self._fit is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        step = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        return self._fit.optimizer_step(step, closure)

    def training_step(self, batch: Any, *args: Any) -> Any:
        """Run the user's `training_step` on one of this rank's data shards."""
        if self._fit is None:
            return super().training_step(batch, *args)
        return self._fit.training_step(super().training_step, batch, *args)

    def _flush_backward(self, closure_loss: torch.Tensor) -> None:
        super()._flush_backward(closure_loss)
        if self._fit is not None:
            self._fit.after_backward()

    def _refuse_backward_without_buckets(self, closure_loss: torch.Tensor) -> None:
        """Skip the base class's check that backward has filled DDP's buckets.

        In the first step of a membership view, gradients are averaged outside DDP's buckets.
        """

    def all_gather(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Gather a tensor from the ranks of this host, outside of training steps.

        Raises:
            RuntimeError: The call is in a training step, where other hosts would not take part.
        """
        if self._fit is not None:
            self._fit.refuse_gather_in_step()
        return super().all_gather(tensor, *args, **kwargs)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce a value over the ranks of this host.

        In a training step, the value is returned unchanged, because logged values are summed over all shards at the end
        of the step.
        """
        if self._fit is not None and self._fit.is_in_step:
            return tensor
        return super().reduce(tensor, *args, **kwargs)

    def barrier(self, name: str | None = None) -> None:
        """Synchronize the ranks of this host.

        The last barrier before the training loop also connects this host to the other hosts.
        """
        if self._held_loggers is not None:
            self._held_loggers.let_lightning_open()
        super().barrier(name)
        if self._fit is not None and name == "run-stage" and self._module.trainer.training:
            self._fit.meet_hosts()  # now checkpoints are restored, and the loop has not begun

    @property
    def is_global_zero(self) -> bool:
        """True on the only rank of all hosts that writes logs and checkpoints."""
        if self._is_first is None:
            return super().is_global_zero
        return self._is_first

    def enter_view(self, *, is_first: bool) -> None:
        """Record whether this rank is rank zero over all hosts in a new membership view.

        Args:
            is_first: Whether this rank is the first of all hosts.
        """
        self._is_first = is_first
        if self._held_loggers is not None:
            self._held_loggers.meet(is_first=is_first)

    def after_elastic_step(self) -> None:
        """Write delayed logger output after a completed step."""
        if self._held_loggers is not None:
            self._held_loggers.after_step()

    # ---- end -------------------------------------------------------------------------------------------------------

    def _close_communication(self) -> None:
        fit = self._fit
        loggers = self._held_loggers
        self._fit = None
        self._held_loggers = None
        self._loaders.fit = None
        try:
            if fit is not None:
                fit.end()
            if loggers is not None:
                loggers.end()
        finally:
            super()._close_communication()


def _value_or_variable(value: Any, variable: str) -> Any:
    if value is not None:
        return value
    return os.environ.get(variable)


def _refuse_own_buffers(options: dict[str, Any]) -> None:
    """Remove DDP's buffer-broadcast options from a dictionary, and raise if any of them is False.

    The ranks of an elastic run always synchronize their buffers.

    Raises:
        ValueError: One of the options is False.
    """
    for name in ("broadcast_buffers", "forward_sync_buffers"):
        if not options.pop(name, True):
            raise ValueError(
                f"`{name}` (=False) cannot be combined with strategy={ELASTIC_NAME!r}, because a joining host copies "
                f"the buffers of the other hosts, so buffers are always equal on all ranks. Leave `{name}` out."
            )


def _buffer_option() -> str:
    """Return the name of DDP's buffer-broadcast option in the installed version of torch.

    torch 2.15 warns about the old name.
    """
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        return "forward_sync_buffers"
    return "broadcast_buffers"
