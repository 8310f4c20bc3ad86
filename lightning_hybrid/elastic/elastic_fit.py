"""One elastic fit on one rank: the attempts of each step, in one view after the other.

optimizer_step      the closure runs again in another view until a sum is whole; nothing after it does
attempt             shards of this rank forward and backward -> sums -> buffers of rank zero, logs
view ends           every wait in its groups ends; hosts meet again, and who is behind takes the state (views.py)
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
from lightning_hybrid.elastic.options import ElasticOptions
from lightning_hybrid.elastic.step_logs import EpochLogs, StepLogs
from lightning_hybrid.elastic.views import MOST_VIEWS, Views, hash_of
from lightning_hybrid.lightning_names import lightning_function, lightning_types


class _StepTaken(Exception):  # noqa: N818  no error
    # The step was made by others, and this rank has its outcome.
    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs


class _HostsStop(Exception):  # noqa: N818  no error
    # Another host ends its fit before this step, and with it all.
    pass


class ElasticFit:
    """State of one elastic fit, from `setup` to `teardown`.

    Args:
        options: as the user gave them.
        strategy: runs one shard, and calls the methods below in its own.
        comm: its communication; `topology` is that of the largest view, as if this host were its first.
        failures: `ended_by`: the error that ends the run.
        timeout: of every wait for others.
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
        self._rest: tuple[Any, ...] = ()  # arguments of `training_step` after the batch
        self._runs_shard = False  # by `_run`, and not by Lightning's closure
        self._loader: ShardLoader | None = None
        self._views: Views | None = None
        self._buckets: list[FlatBucket] = []
        self._before: BufferCopy  # of before an attempt
        self._after_first: BufferCopy  # of this rank's shards
        self._of_first_rank: BufferCopy
        self._epoch_logs: EpochLogs
        self._average: Callable[[HookState, Any], Future[Tensor]]
        self._sums_apart = False  # from DDP's buckets, in the first step of a view
        self._logs: StepLogs | None = None  # while a step is attempted
        self._optimizers = ""  # in words
        self._stop_callback: Any = None  # of the trainer, while a fit runs

    # ---- what a strategy asks for ------------------------------------------------------------------------------------

    def hook(
        self, average: Callable[[HookState, Any], Future[Tensor]]
    ) -> Callable[[HookState, Any], Future[Tensor]]:
        """Return DDP's hook: `average`, which gives the local bucket back where the view has ended.

        An error would leave DDP's reducer unusable.
        """
        self._average = average

        def average_or_keep(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  DDP compares them
            buffer = bucket.buffer()
            views = self._views
            if self._sums_apart or views is None or views.ended:
                return _done(buffer)
            try:
                return average(state, bucket).then(partial(self._or_local, buffer))
            except RuntimeError as error:
                views.note(error)
                return _done(buffer)

        return average_or_keep

    def _or_local(self, buffer: Tensor, future: Future[Tensor]) -> Tensor:
        try:
            return future.value()
        except RuntimeError as error:
            assert self._views is not None
            self._views.note(error)
            return buffer

    def deal(self, loader: Any, reader: Any, prepare: Callable[[Any], Any]) -> ShardLoader:
        """Return what gives this rank the shards that it has in each view.

        Lightning asks again where it makes loaders again, as after `trainer.estimated_stepping_batches`.
        """
        self._loader = ShardLoader(loader, reader, prepare)
        if self._shards:
            self._loader.use(self._shards)
        return self._loader

    @property
    def deals_loaders(self) -> bool:
        """True until hosts have met: loaders that are processed later belong to callbacks, and not to training."""
        return self._views is None

    def status(self) -> dict[str, Any]:
        """Return fields of the strategy's `RunStatus`: numbers of the run, where the trainer has those of a launch."""
        num_ranks = (
            len(self._comm.topology.node)
            if self._views is None
            else self._views.topology.world_size
        )
        return {
            "num_shards": self._num_shards,
            "num_ranks": num_ranks,
            "gather_over_hosts": self.gather,
        }

    def note_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Note optimizers as the user made them, before a checkpoint changes their rates: hosts compare them."""
        self._optimizers = description_of_optimizers(optimizers)

    @property
    def is_in_step(self) -> bool:
        """True while a step is being attempted."""
        return self._logs is not None

    @property
    def num_hosts(self) -> int:
        """Hosts of the present view."""
        return 0 if self._views is None else self._views.topology.num_nodes

    @property
    def _module(self) -> Any:
        return self._strategy.lightning_module

    def end(self) -> None:
        """Leave the run."""
        views = self._views
        self._views = None
        if self._stop_callback is not None:
            self._module.trainer.callbacks.remove(self._stop_callback)
            self._stop_callback = None
        if views is not None:
            views.leave(self._failures.ended_by)

    # ---- what the strategy's methods do in a fit ---------------------------------------------------------------------

    def meet_hosts(self) -> None:
        """Meet the other hosts, or join their run. Collective among the ranks of this host, right before the loop."""
        trainer = self._module.trainer
        parameters = [
            parameter for parameter in self._strategy.model.parameters() if parameter.requires_grad
        ]
        window = self._strategy.run_status.window
        with nullcontext() if window is None else window.opened():
            self._buckets = flat_buckets(parameters, self._comm.plan.bucket_bytes)
        self._before = BufferCopy(self._module)
        self._after_first = BufferCopy(self._module)
        self._of_first_rank = BufferCopy(self._module)
        self._epoch_logs = EpochLogs(self._module, is_first=self._comm.topology.local_rank == 0)
        trainer.fit_loop.setup_data()  # now, as hosts compare what they read before they train together
        self._refuse_several_loaders()
        self._views = Views(
            self._options,
            self._strategy,
            engine=self._comm.engine,
            timeout=self._timeout,
            logs=self._epoch_logs,
            token=self._token(parameters),
        )
        self._stop_callback = _callback_at_end(trainer, self._stop_with_others)
        trainer.callbacks.insert(
            0, self._stop_callback
        )  # before those that exchange weights at the end
        self._views.enter(self._use)
        trainer.should_stop = trainer.should_stop or self._views.stops
        self._strategy._loaders.seed = self._views.seed

    def _stop_with_others(self, *_: Any) -> None:
        """Have all hosts stop after the same step, where this one stops early. Collective among its ranks.

        Hosts decide on early stopping by what they have logged, or by their own clocks, and may differ. The one that
        stops first ends the view, and the others learn of it as they enter the next: no step needs a vote.
        """
        views = self._views
        trainer = self._module.trainer
        # At `max_steps` or `max_epochs` all hosts end by themselves, and may have left.
        if (
            views is not None
            and trainer.should_stop
            and not views.stops
            and not _has_reached_its_end(trainer)
        ):
            views.stop(self._use)

    def gather(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks of the present view, or None if it ends meanwhile. See `Views.gather`."""
        return [value] if self._views is None else self._views.gather(value)

    def _refuse_several_loaders(self) -> None:
        combined = self._module.trainer.fit_loop._combined_loader
        num_loaders = 0 if combined is None else len(combined.flattened)
        if num_loaders > 1:
            raise ValueError(
                f"`train_dataloaders` (={num_loaders} loaders) must be one loader in an elastic run, which deals its "
                "batches to the hosts that there are. Give one, such as a loader over a `ConcatDataset`."
            )

    def _token(self, parameters: Sequence[nn.Parameter]) -> str:
        """Return what must be equal on all hosts: one with another token is refused before it can end others' sums."""
        trainer = self._module.trainer
        shapes = [(tuple(parameter.shape), str(parameter.dtype)) for parameter in parameters]
        data = "none" if self._loader is None else self._loader.description()
        parts = {
            "devices": len(self._comm.topology.node),
            "max_hosts": self._options.max_hosts,
            "software": software(),
            "plan": self._comm.plan.to_json(),
            "trained parameters": f"{len(shapes)} of hash {hash_of(shapes)}",
            "data": data,
            "optimizer": self._optimizers,
            "max_steps": trainer.max_steps,
            "max_epochs": trainer.max_epochs,
        }
        return "; ".join(f"{name}={value}" for name, value in parts.items())

    def optimizer_step(
        self, step: Callable[[Callable[[], Any]], Any], closure: Callable[[], Any]
    ) -> Any:
        """Step once, after as many attempts at the closure as the hosts need for a whole sum.

        Args:
            step: makes the optimizer's step with the closure that it is given.
            closure: Lightning's own, which runs one shard forward and backward.
        """
        views = self._views
        if views is None:
            return step(closure)
        is_taken = False
        try:
            outputs = step(partial(self._whole_sum, views, closure))
        except _StepTaken as taken:
            outputs = taken.outputs
            is_taken = True
        except _HostsStop:
            self._module.trainer.should_stop = True
            raise StopIteration from None  # with which Lightning's loop ends an epoch before a batch
        if views.stops:  # with the step that this rank has taken
            self._module.trainer.should_stop = True
        views.commit(is_taken=is_taken)
        self._epoch_logs.commit()
        self._strategy.after_elastic_step()
        return outputs

    def training_step(self, step: Callable[..., Any], batch: Any, *args: Any) -> Any:
        """Run the user's step on the batch of a shard.

        Args:
            step: the strategy's method.
            batch: as Lightning has read it, which is that of another rank's shard by now if the view has changed.
            args: what follows the batch.

        Raises:
            RuntimeError: the step returns no loss.
        """
        self._rest = args
        loader = self._loader
        if (
            not self._runs_shard
            and loader is not None
            and self._shards
            and loader.first != self._shards[0]
        ):
            batch = self._batch_of(self._shards[0])
        output = step(batch, *args)
        if output is None:  # without a backward the others would wait for this rank
            raise RuntimeError(
                "`training_step` (returned None) must return a loss in an elastic run, as every rank adds its part to "
                "a sum. Return a loss of zero that depends on the parameters, or take strategy='hybrid_allreduce'."
            )
        return output

    def refuse_gather_in_step(self) -> None:
        """Check that no step is being attempted.

        Raises:
            RuntimeError: one is.
        """
        if self.is_in_step:
            raise RuntimeError(
                "`all_gather` cannot be called in `training_step` with strategy='hybrid_elastic': a rank may have "
                "several shards of a step, and other hosts are not asked. Gather in a hook, over the ranks of the host."
            )

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _use(self, topology: Topology) -> None:
        self._sums_apart = True
        self._strategy.enter_view(is_first=topology.rank == 0)
        if (feedback := self._comm.hook_state.feedback) is not None:
            feedback.load(None)  # also what an attempt that failed has left
        self._shards = shards_of(topology.rank, topology.world_size, self._num_shards)
        self._strategy._loaders.rank = self._shards[
            0
        ]  # whose order a checkpoint has the checksum of
        if self._loader is not None:
            self._loader.use(self._shards)

    def _whole_sum(self, views: Views, closure: Callable[[], Any]) -> Any:
        outputs = None
        run_first = closure
        self._before.take()
        self._logs = logs = self._epoch_logs.step()
        try:
            for _ in range(MOST_VIEWS):
                if views.begin():
                    made = self._attempt(views, run_first, logs)
                    outputs = made if run_first is closure else outputs
                    run_first = self._run_first
                if self._is_whole(
                    views
                ):  # also without an attempt: other ranks of this host may not know yet
                    return outputs
                self._before.put_back()
                logs.restore()
                if views.change(self._use):
                    raise _StepTaken(outputs)
                if views.stops:
                    raise _HostsStop
        finally:
            self._logs = None
        raise RuntimeError(
            f"elastic: step {views.committed} failed in {MOST_VIEWS} views: {views.ended}"
        )

    def _is_whole(self, views: Views) -> bool:
        # All ranks of a host make a step or none: Lightning has them wait for each other before the next batch, and
        # with `shard_update` each updates a part. Other hosts are not asked.
        return views.agrees(views.hold(), "another rank of this host has no whole sum")

    def _attempt(self, views: Views, run_first: Callable[[], Any], logs: StepLogs) -> Any:
        model = self._strategy.model
        shards = self._shards
        model.require_backward_grad_sync = len(shards) == 1
        if (coder := self._comm.engine.coder) is not None:
            coder.turn = 0  # an attempt that failed has drawn noise, too
        if self._loader is not None:
            self._loader.batch_of(
                shards[0]
            )  # before random numbers are the shard's: a loader may draw as it starts
        self._seed_for(views, shards[0])
        outputs = run_first()
        logs.end_shard()
        if len(shards) > 1:
            self._after_first.take()
        for shard in shards[1:]:
            model.require_backward_grad_sync = shard == shards[-1]
            batch = self._batch_of(shard)
            self._seed_for(views, shard)
            self._run(batch)
            logs.end_shard()
        self._seed_for(views, self._num_shards)  # between two steps all ranks draw the same
        model.require_backward_grad_sync = True
        if len(shards) > 1:  # as under `ddp`, where each rank sees one shard
            self._after_first.put_back()
        if not views.ended:
            try:
                self._share(views, logs)
            except RuntimeError as error:
                views.note(error)
        return outputs

    def _seed_for(self, views: Views, shard: int) -> None:
        seed_streams(views.seed % 2**64, views.committed, shard)
        if self._strategy.root_device.type == "cuda":
            torch.cuda.manual_seed(torch.initial_seed())  # the one that was set for the CPU

    def after_backward(self) -> None:
        """Average gradients apart from DDP's buckets, after the last backward of a view's first step. Collective then.

        With half precision they are half and scaled still, as in DDP's buckets: unscaled, and looked through for inf,
        are the averages.
        """
        views = self._views
        if not self._sums_apart or views is None or views.ended:
            return
        if not self._strategy.model.require_backward_grad_sync:
            return
        try:
            for bucket in self._buckets:
                bucket.fill()
            for future in [
                self._average(self._comm.hook_state, bucket) for bucket in self._buckets
            ]:
                future.wait()
            for bucket in self._buckets:
                bucket.give_back()
        except RuntimeError as error:
            views.note(error)

    def _share(self, views: Views, logs: StepLogs) -> None:
        groups: Any = views.groups
        if groups.world is not None:  # as under `ddp`, those of rank zero
            self._of_first_rank.share(groups.broadcast, is_source=views.topology.rank == 0)
        self._epoch_logs.warn_of(logs.not_added_up())
        logs.share(
            groups.add_up,
            num_shards=self._num_shards,
            is_first_of_host=views.topology.local_rank == 0,
        )
        self._comm.engine.wait()
        self._sums_apart = False

    def _run_first(self) -> None:
        # Lightning's closure has run already, and zeroed gradients in a hook of the user's.
        for one in self._strategy.model.parameters():
            one.grad = None
        self._run(self._batch_of(self._shards[0]))

    def _run(self, batch: Any) -> None:
        # As Lightning's closure does.
        trainer = self._module.trainer
        call = lightning_function("pytorch.trainer.call._call_strategy_hook")
        self._runs_shard = True
        try:
            output = call(trainer, "training_step", batch, *self._rest)
            loss = output["loss"] if isinstance(output, dict) else output
            call(trainer, "backward", loss, self._strategy.optimizers[0])
        finally:
            self._runs_shard = False

    def _batch_of(self, shard: int) -> Any:
        assert self._loader is not None
        batch = self._strategy.precision_plugin.convert_input(self._loader.batch_of(shard))
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self._strategy.batch_to_device(batch, dataloader_idx=0)


def _callback_at_end(trainer: Any, on_train_end: Callable[..., None]) -> Any:
    """Return a callback of the trainer's Lightning that runs this function at the end of training."""
    trainer_types = lightning_types("pytorch.Trainer")
    callback_types = lightning_types("pytorch.callbacks.LambdaCallback")
    for trainer_type, callback_type in zip(trainer_types, callback_types, strict=True):
        if isinstance(trainer, trainer_type):
            return callback_type(on_train_end=on_train_end)
    raise TypeError(f"`trainer` (={type(trainer).__name__}) must be a Trainer of Lightning's.")


def _has_reached_its_end(trainer: Any) -> bool:
    """Return whether a fit has made all its steps or epochs."""
    fit = trainer.fit_loop
    has_all_steps = 0 <= fit.max_steps <= trainer.global_step
    has_all_epochs = (
        fit.max_epochs is not None and 0 <= fit.max_epochs <= fit.epoch_progress.current.processed
    )
    return has_all_steps or has_all_epochs


def description_of_optimizers(optimizers: Sequence[Optimizer]) -> str:
    """Return classes, learning rates and a hash of the other options of optimizers, in words."""
    texts = []
    for optimizer in optimizers:
        options = []
        for group in optimizer.param_groups:
            options.append(
                {name: _in_words(value) for name, value in group.items() if name != "params"}
            )
        rates = sorted(
            {f"{float(group['lr']):g}" for group in optimizer.param_groups if "lr" in group}
        )
        texts.append(
            f"{type(optimizer).__name__}(lr={' and '.join(rates)}, options {hash_of(options)})"
        )
    return ", ".join(texts)


def _in_words(value: Any) -> str:
    """Return what an option is on every host: objects are named by their types, as their texts hold addresses."""
    if isinstance(value, Tensor):
        return str(value.tolist())
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple | list):
        return str([_in_words(entry) for entry in value])
    return type(value).__name__


def _done(value: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future(devices=[value.device] if value.is_cuda else None)
    future.set_result(value)
    return future
