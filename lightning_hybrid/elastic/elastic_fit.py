"""Elastic training on one rank, which retries each optimizer step until it succeeds.

A *membership view* is the set of hosts that train together at a given time. A *shard* is one of the `max_hosts` x
`devices` batches of a step.

optimizer_step      repeats the closure in new views until all gradients are averaged, and then updates the weights
attempt             forward and backward of this rank's shards -> all-reduce -> buffers of rank zero, logged values
view ends           all waits in its process groups end, hosts form a new view, and ranks that are behind receive the
                    state (host_changes.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from lightning_hybrid.comm import HookState, Topology
from lightning_hybrid.comm.health.consensus import software
from lightning_hybrid.data.random_streams import seed_streams
from lightning_hybrid.data.shard_loader import ShardLoader, shards_of
from lightning_hybrid.elastic.flat_buckets import BufferCopy, FlatBucket, flat_buckets
from lightning_hybrid.elastic.host_changes import MOST_VIEWS, Views, hash_of
from lightning_hybrid.elastic.options import ElasticOptions
from lightning_hybrid.elastic.step_logs import EpochLogs, StepLogs
from lightning_hybrid.lightning_names import lightning_function, lightning_types


class _StepReceived(Exception):  # noqa: N818  no error
    """Control-flow exception raised when this rank receives the result of a step from other ranks."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs


class _HostsStop(Exception):  # noqa: N818  no error
    """Control-flow exception that ends training before the current step, because a host has stopped."""


class ElasticFit:
    """Controller of elastic training on one rank during one `Trainer.fit` call.

    Args:
        options: Validated options of elastic training.
        strategy: Strategy that runs one shard. Its methods call the methods of this class.
        comm: Communication of the strategy. Its `topology` describes `max_hosts` hosts, with this host as the first.
        failures: Record of failures, whose `ended_by` is the error that ends the run.
        timeout: Maximum duration of every wait for other ranks.
    """

    def __init__(
        self,
        options: ElasticOptions,
        strategy: Any,
        *,
        comm: Any,
        failures: Any,
        timeout: timedelta,
    ) -> None:
        self._failures = failures
        self._options = options
        self._strategy = strategy
        self._comm = comm
        self._timeout = timeout
        self._num_shards = comm.topology.world_size
        self._shards: list[int] = []
        # Arguments of `training_step` after the batch.
        self._step_arguments: tuple[Any, ...] = ()
        # Whether the shard is run by `_run` rather than by Lightning's closure.
        self._runs_shard = False
        self._loader: ShardLoader | None = None
        self._views: Views | None = None
        self._buckets: list[FlatBucket] = []
        self._buffers_before_attempt: BufferCopy
        self._buffers_after_first_shard: BufferCopy
        self._buffers_of_rank_zero: BufferCopy
        self._epoch_logs: EpochLogs
        self._average: Callable[[HookState, Any], Future[Tensor]]
        # In the first step of a view, gradients are averaged in `self._buckets` instead of DDP's buckets.
        self._averages_own_buckets = False
        # Set while a step is attempted.
        self._logs: StepLogs | None = None
        self._optimizer_description = ""
        # Callback that the trainer holds while `fit` runs.
        self._stop_callback: Any = None

    # ---- queries and hooks of the strategy ---------------------------------------------------------------------------

    def hook(
        self, average: Callable[[HookState, Any], Future[Tensor]]
    ) -> Callable[[HookState, Any], Future[Tensor]]:
        """Return a DDP communication hook that falls back to local gradients when a collective fails.

        The hook calls `average`. If the membership view has ended, the hook returns the local bucket. It does so as
        well in the first step of a view, because `after_backward` averages the gradients of this step. The hook does
        not raise when a collective fails, because an error would make DDP's reducer unusable.
        """
        self._average = average

        def average_or_keep(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  DDP compares them
            buffer = bucket.buffer()
            views = self._views
            if self._averages_own_buckets or views is None or views.ended:
                return _completed_future(buffer)
            try:
                return average(state, bucket).then(partial(self._average_or_local, buffer))
            except RuntimeError as error:
                views.note(error)
                return _completed_future(buffer)

        return average_or_keep

    def _average_or_local(self, buffer: Tensor, future: Future[Tensor]) -> Tensor:
        """Return the averaged gradients of a bucket, or the local gradients if the all-reduce failed."""
        try:
            return future.value()
        except RuntimeError as error:
            assert self._views is not None
            self._views.note(error)
            return buffer

    def deal(self, loader: Any, reader: Any, prepare: Callable[[Any], Any]) -> ShardLoader:
        """Wrap the training loader so that it yields the batches of this rank's data shards.

        The rank's shards change with the membership view. Lightning calls this method again if it creates the loaders
        again, for example after `trainer.estimated_stepping_batches`.
        """
        self._loader = ShardLoader(loader, reader, prepare)
        if self._shards:
            self._loader.use(self._shards)
        return self._loader

    @property
    def deals_loaders(self) -> bool:
        """True until the hosts connect, while newly created data loaders are training loaders.

        Loaders that are created later belong to callbacks.
        """
        return self._views is None

    def status(self) -> dict[str, Any]:
        """Return the fields of `RunStatus` that describe all hosts of the run."""
        if self._views is None:
            num_ranks = len(self._comm.topology.node)
        else:
            num_ranks = self._views.topology.world_size
        return {
            "num_shards": self._num_shards,
            "num_ranks": num_ranks,
            "gather_over_hosts": self.gather,
        }

    def note_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Store a description of the configured optimizers, before a checkpoint changes them.

        Hosts compare the descriptions before they train together.
        """
        self._optimizer_description = description_of_optimizers(optimizers)

    @property
    def is_in_step(self) -> bool:
        """True while an optimizer step is being attempted."""
        return self._logs is not None

    @property
    def num_hosts(self) -> int:
        """Number of hosts that currently train together, or 0 before the hosts have connected."""
        if self._views is None:
            return 0
        return self._views.topology.num_nodes

    @property
    def _module(self) -> Any:
        return self._strategy.lightning_module

    def end(self) -> None:
        """Leave the elastic run, and remove the callback that stops all hosts after the same step."""
        views = self._views
        self._views = None
        if self._stop_callback is not None:
            self._module.trainer.callbacks.remove(self._stop_callback)
            self._stop_callback = None
        if views is not None:
            views.leave(self._failures.ended_by)

    # ---- calls from the strategy's methods ---------------------------------------------------------------------------

    def meet_hosts(self) -> None:
        """Start a run with the other hosts, or join their run, just before the training loop.

        Collective: every rank of this host must call it, in the same order.
        """
        trainer = self._module.trainer
        parameters = [
            parameter for parameter in self._strategy.model.parameters() if parameter.requires_grad
        ]
        self._prepare_step(parameters)

        # Loaders are set up here, because hosts compare their data before they train together.
        trainer.fit_loop.setup_data()
        self._refuse_several_loaders()

        self._views = Views(
            self._options,
            self._strategy,
            engine=self._comm.engine,
            timeout=self._timeout,
            logs=self._epoch_logs,
            token=self._token(parameters),
        )
        # This must be the first callback, before callbacks that swap weights at the end of training.
        self._stop_callback = _callback_at_end(trainer, self._stop_with_others)
        trainer.callbacks.insert(0, self._stop_callback)

        self._views.enter(self._use_view)
        trainer.should_stop = trainer.should_stop or self._views.stops
        self._strategy._loaders.seed = self._views.seed

    def _prepare_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Create the gradient buckets, copies of the module's buffers and the logs of the epoch."""
        window = self._strategy.run_status.window
        opened = nullcontext()
        if window is not None:
            opened = window.opened()
        with opened:
            self._buckets = flat_buckets(parameters, self._comm.plan.bucket_bytes)
        self._buffers_before_attempt = BufferCopy(self._module)
        self._buffers_after_first_shard = BufferCopy(self._module)
        self._buffers_of_rank_zero = BufferCopy(self._module)
        self._epoch_logs = EpochLogs(self._module, is_first=self._comm.topology.local_rank == 0)

    def _stop_with_others(self, *_: Any) -> None:
        """Stop all hosts after the same step if this host stops early.

        Hosts decide about early stopping by their logged values or their own clocks, so the decisions may differ. The
        host that stops first ends the view. The other hosts are informed when they enter the next view. Therefore no
        step needs a vote.

        Collective: every rank of this host must call it, in the same order.
        """
        views = self._views
        trainer = self._module.trainer
        if views is None or not trainer.should_stop or views.stops:
            return
        # At `max_steps` or `max_epochs`, all hosts stop on their own, and some may have left already.
        if not _has_reached_its_end(trainer):
            views.stop(self._use_view)

    def gather(self, value: Any) -> list[Any] | None:
        """Gather a value from all ranks of all hosts, or return None if the set of hosts changes.

        Collective: every rank of the view must call it, in the same order. See `Views.gather`.
        """
        if self._views is None:
            return [value]
        return self._views.gather(value)

    def _refuse_several_loaders(self) -> None:
        """Raise if the trainer has more than one training data loader.

        Raises:
            ValueError: The trainer has several training data loaders.
        """
        combined = self._module.trainer.fit_loop._combined_loader
        num_loaders = 0
        if combined is not None:
            num_loaders = len(combined.flattened)
        if num_loaders > 1:
            raise ValueError(
                f"`train_dataloaders` contains {num_loaders} loaders, but an elastic run needs a single one, because "
                "its batches are divided among the current hosts. Combine the data sets, for example in a "
                "`ConcatDataset`."
            )

    def _token(self, parameters: Sequence[nn.Parameter]) -> str:
        """Return a string that encodes the run settings that must match on all hosts.

        A host with a different token is rejected before it can interrupt the collectives of the other hosts.
        """
        trainer = self._module.trainer
        shapes = [(tuple(parameter.shape), str(parameter.dtype)) for parameter in parameters]
        data = "none"
        if self._loader is not None:
            data = self._loader.description()
        settings = {
            "devices": len(self._comm.topology.node),
            "max_hosts": self._options.max_hosts,
            "software": software(),
            "plan": self._comm.plan.to_json(),
            "trained parameters": f"{len(shapes)} of hash {hash_of(shapes)}",
            "data": data,
            "optimizer": self._optimizer_description,
            "max_steps": trainer.max_steps,
            "max_epochs": trainer.max_epochs,
        }
        return "; ".join(f"{name}={value}" for name, value in settings.items())

    def optimizer_step(
        self, step: Callable[[Callable[[], Any]], Any], closure: Callable[[], Any]
    ) -> Any:
        """Run one optimizer step, repeating its closure until all gradients are averaged.

        Args:
            step: Function that runs the optimizer's step with a given closure.
            closure: Lightning's closure, which runs forward and backward of one shard.
        """
        views = self._views
        if views is None:
            return step(closure)
        is_taken = False
        try:
            outputs = step(partial(self._attempt_until_averaged, views, closure))
        except _StepReceived as received:
            outputs = received.outputs
            is_taken = True
        except _HostsStop:
            self._module.trainer.should_stop = True
            # This exception makes Lightning's loop end the epoch before the batch.
            raise StopIteration from None

        # In the view in which this rank received the step's result, a host may have stopped.
        if views.stops:
            self._module.trainer.should_stop = True
        views.commit(is_taken=is_taken)
        self._epoch_logs.commit()
        self._strategy.after_elastic_step()
        return outputs

    def training_step(self, step: Callable[..., Any], batch: Any, *args: Any) -> Any:
        """Run the user's `training_step` on the batch of one data shard.

        Args:
            step: Method of the strategy that runs the user's step.
            batch: Batch that Lightning has read. If the view has changed since, so that the batch no longer belongs to
                this rank's first shard, it is replaced.
            args: Arguments after the batch.

        Raises:
            RuntimeError: `training_step` returns None.
        """
        self._step_arguments = args
        is_from_closure = not self._runs_shard and bool(self._shards)
        if is_from_closure and self._loader is not None and self._loader.first != self._shards[0]:
            batch = self._batch_of(self._shards[0])

        output = step(batch, *args)
        # Without a backward pass, the other ranks would wait for this rank.
        if output is None:
            raise RuntimeError(
                "`training_step` returned None, but must return a loss in an elastic run, because every rank "
                "contributes to the averaged gradients. Return a loss of zero that depends on the parameters, or use "
                "strategy='hybrid_allreduce'."
            )
        return output

    def refuse_gather_in_step(self) -> None:
        """Raise if `all_gather` is called within a training step.

        Raises:
            RuntimeError: A step is being attempted.
        """
        if self.is_in_step:
            raise RuntimeError(
                "`all_gather` cannot be called in `training_step` with strategy='hybrid_elastic', because a rank "
                "may process several shards of a step while other hosts do not participate. Call `all_gather` in a "
                "hook, where it gathers only from the ranks of the same host."
            )

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _use_view(self, topology: Topology) -> None:
        """Assign this rank its data shards in a new membership view, and reset error feedback."""
        self._averages_own_buckets = True
        self._strategy.enter_view(is_first=topology.rank == 0)
        feedback = self._comm.hook_state.feedback
        if feedback is not None:
            # This also drops residuals of a failed attempt.
            feedback.load(None)
        self._shards = shards_of(topology.rank, topology.world_size, self._num_shards)
        # Checkpoints contain the checksum of the data order of this rank's first shard.
        self._strategy._loaders.rank = self._shards[0]
        if self._loader is not None:
            self._loader.use(self._shards)

    def _attempt_until_averaged(self, views: Views, closure: Callable[[], Any]) -> Any:
        """Attempt the step in successive membership views until all gradients are averaged.

        Returns:
            Outputs of Lightning's closure.

        Raises:
            _StepReceived: Other ranks completed the step, and this rank has received the result.
            _HostsStop: A host stops before this step.
            RuntimeError: The step failed in too many views.
        """
        outputs = None
        run_first_shard = closure
        self._buffers_before_attempt.take()
        logs = self._epoch_logs.step()
        self._logs = logs
        try:
            for _ in range(MOST_VIEWS):
                if views.begin():
                    outputs_of_attempt = self._attempt(views, run_first_shard, logs)
                    if run_first_shard is closure:
                        outputs = outputs_of_attempt
                    run_first_shard = self._run_first_shard

                # Ranks vote even without an attempt, because other ranks may not know yet that the view has ended.
                if self._is_whole(views):
                    return outputs

                self._buffers_before_attempt.put_back()
                logs.restore()
                if views.change(self._use_view):
                    raise _StepReceived(outputs)
                if views.stops:
                    raise _HostsStop
        finally:
            self._logs = None
        raise RuntimeError(
            f"elastic: step {views.committed} failed in {MOST_VIEWS} attempts, because the hosts changed during each "
            f"of them (last reason: {views.ended}). Check the network between the hosts, and restart the run."
        )

    def _is_whole(self, views: Views) -> bool:
        """Return whether all ranks of this host have received all averaged gradients.

        Either all ranks of a host complete a step, or none of them does. This is necessary because Lightning
        synchronizes them before the next batch, and because with `shard_update` each rank updates its own parameter
        shard. Other hosts do not take part in the vote.

        Collective: every rank of this host must call it, in the same order.
        """
        return views.agrees(
            views.hold(), "another rank of this host does not have all averaged gradients"
        )

    def _attempt(self, views: Views, run_first_shard: Callable[[], Any], logs: StepLogs) -> Any:
        """Run forward and backward on this rank's data shards, then synchronize buffers and logged values.

        Nothing is synchronized if the membership view has ended.
        """
        model = self._strategy.model
        shards = self._shards
        model.require_backward_grad_sync = len(shards) == 1
        coder = self._comm.engine.coder
        if coder is not None:
            # A failed attempt has also consumed random numbers for rounding.
            coder.turn = 0

        # The first batch is read before the shard's seed is set, because a loader may draw random numbers when it
        # starts.
        if self._loader is not None:
            self._loader.batch_of(shards[0])
        self._seed_for(views, shards[0])
        outputs = run_first_shard()
        logs.end_shard()
        if len(shards) > 1:
            self._buffers_after_first_shard.take()

        for shard in shards[1:]:
            model.require_backward_grad_sync = shard == shards[-1]
            batch = self._batch_of(shard)
            self._seed_for(views, shard)
            self._run(batch)
            logs.end_shard()

        # All ranks draw the same random numbers between two steps.
        self._seed_for(views, self._num_shards)
        model.require_backward_grad_sync = True
        # Buffers are updated by only one shard, as on a rank under `ddp`.
        if len(shards) > 1:
            self._buffers_after_first_shard.put_back()

        if not views.ended:
            try:
                self._share(views, logs)
            except RuntimeError as error:
                views.note(error)
        return outputs

    def _seed_for(self, views: Views, shard: int) -> None:
        """Seed all random number generators for a data shard of the current step."""
        seed_streams(views.seed % 2**64, views.committed, shard)
        if self._strategy.root_device.type == "cuda":
            # The GPU uses the seed that was just set on the CPU.
            torch.cuda.manual_seed(torch.initial_seed())

    def after_backward(self) -> None:
        """Average gradients without DDP, after the last backward of the first step in a membership view.

        The gradients are copied into the buckets of `flat_buckets`. In half-precision training, they are in half
        precision and multiplied by the loss scale, as in DDP's buckets. The averages are unscaled and checked for inf
        later.

        Collective in the first step of a view: every rank of the view must call it, in the same order.
        """
        views = self._views
        if not self._averages_own_buckets or views is None or views.ended:
            return
        if not self._strategy.model.require_backward_grad_sync:
            return
        try:
            for bucket in self._buckets:
                bucket.fill()
            futures = [self._average(self._comm.hook_state, bucket) for bucket in self._buckets]
            for future in futures:
                future.wait()
            for bucket in self._buckets:
                bucket.give_back()
        except RuntimeError as error:
            views.note(error)

    def _share(self, views: Views, logs: StepLogs) -> None:
        """Synchronize buffers and logged values over all hosts, and wait for averaged gradients.

        Collective: every rank of the view must call it, in the same order.
        """
        groups: Any = views.groups
        # All ranks get the buffers of rank zero, as under `ddp`.
        if groups.world is not None:
            self._buffers_of_rank_zero.share(groups.broadcast, is_source=views.topology.rank == 0)
        self._epoch_logs.warn_of(logs.not_added_up())
        logs.share(
            groups.add_up,
            num_shards=self._num_shards,
            is_first_of_host=views.topology.local_rank == 0,
        )
        self._comm.engine.wait()
        self._averages_own_buckets = False

    def _run_first_shard(self) -> None:
        """Repeat forward and backward on this rank's first data shard.

        Lightning's closure is not run again, because it zeroes gradients in a hook that users may override.
        """
        for parameter in self._strategy.model.parameters():
            parameter.grad = None
        self._run(self._batch_of(self._shards[0]))

    def _run(self, batch: Any) -> None:
        """Run forward and backward on one batch, as Lightning's closure does."""
        trainer = self._module.trainer
        call = lightning_function("pytorch.trainer.call._call_strategy_hook")
        self._runs_shard = True
        try:
            output = call(trainer, "training_step", batch, *self._step_arguments)
            loss = output
            if isinstance(output, dict):
                loss = output["loss"]
            call(trainer, "backward", loss, self._strategy.optimizers[0])
        finally:
            self._runs_shard = False

    def _batch_of(self, shard: int) -> Any:
        """Return the current batch of a data shard, moved to the device and converted to the precision."""
        assert self._loader is not None
        batch = self._strategy.precision_plugin.convert_input(self._loader.batch_of(shard))
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self._strategy.batch_to_device(batch, dataloader_idx=0)


def _callback_at_end(trainer: Any, on_train_end: Callable[..., None]) -> Any:
    """Return a Lightning callback that calls a given function at the end of training.

    The callback's class comes from the same Lightning package as the trainer.
    """
    trainer_types = lightning_types("pytorch.Trainer")
    callback_types = lightning_types("pytorch.callbacks.LambdaCallback")
    for trainer_type, callback_type in zip(trainer_types, callback_types, strict=True):
        if isinstance(trainer, trainer_type):
            return callback_type(on_train_end=on_train_end)
    raise TypeError(
        f"`trainer` (={type(trainer).__name__}) must be a Lightning `Trainer`. Pass the trainer of the run."
    )


def _has_reached_its_end(trainer: Any) -> bool:
    """Return whether training has reached `max_steps` or `max_epochs`."""
    fit = trainer.fit_loop
    has_all_steps = 0 <= fit.max_steps <= trainer.global_step
    has_all_epochs = (
        fit.max_epochs is not None and 0 <= fit.max_epochs <= fit.epoch_progress.current.processed
    )
    return has_all_steps or has_all_epochs


def description_of_optimizers(optimizers: Sequence[Optimizer]) -> str:
    """Describe each optimizer by its class, its learning rates and a hash of its options."""
    texts = []
    for optimizer in optimizers:
        options = []
        rates = set()
        for group in optimizer.param_groups:
            texts_of_group = {}
            for name, value in group.items():
                if name != "params":
                    texts_of_group[name] = _text_of_option(value)
            options.append(texts_of_group)
            if "lr" in group:
                rates.add(f"{float(group['lr']):g}")
        texts.append(
            f"{type(optimizer).__name__}(lr={' and '.join(sorted(rates))}, options {hash_of(options)})"
        )
    return ", ".join(texts)


def _text_of_option(value: Any) -> str:
    """Convert an option's value to text that does not vary between hosts.

    Objects are represented by their type, because their own text may contain a memory address.
    """
    if isinstance(value, Tensor):
        return str(value.tolist())
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple | list):
        return str([_text_of_option(entry) for entry in value])
    return type(value).__name__


def _completed_future(value: Tensor) -> Future[Tensor]:
    """Return a completed future with a tensor as its value."""
    future: Future[Tensor]
    if value.is_cuda:
        future = Future(devices=[value.device])
    else:
        future = Future()
    future.set_result(value)
    return future
