"""One elastic fit on one rank: its view, the attempts of each step, and the state of ranks that are behind.

optimizer_step      the closure runs again in another view until a sum is whole; nothing after it does
attempt             shards of this rank forward and backward -> sums -> buffers of rank zero
view ends           sockets are shut, so every wait ends; all meet again, who is behind takes the state of who is not
"""

from __future__ import annotations

import io
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm import CommEngine, HookState, Topology
from lightning_hybrid.comm.engine.view_groups import STORE_LIMIT, ViewGroups
from lightning_hybrid.comm.health.consensus import OrderError
from lightning_hybrid.comm.health.watchdog import comes_from_others
from lightning_hybrid.comm.membership.membership import Membership
from lightning_hybrid.comm.membership.view import View
from lightning_hybrid.lightning_names import lightning_function
from lightning_hybrid.pipeline.microbatches import random_state
from lightning_hybrid.precision.skipped_steps import SkipFlag
from lightning_hybrid.strategy.elastic.flat_buckets import FlatBucket, flat_buckets
from lightning_hybrid.strategy.elastic.shard_loader import ShardLoader, shards_of
from lightning_hybrid.strategy.elastic.step_logs import StepLogs
from lightning_hybrid.strategy.options import Elastic

# Views in a row in which a step fails although no rank is lost: then the cause is another.
MOST_VIEWS_PER_STEP = 20


class _StepTaken(Exception):  # noqa: N818  no error
    # The step was made by others, and this rank has its outcome.
    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs


class ElasticFit:
    """What a strategy has of an elastic run, from `setup` to `teardown`.

    Args:
        option: as the user gave it.
        strategy: runs `training_step` and `backward` of one shard.
        comm: its communication; `topology` is that of the largest view, as if this host were its first.
        precision: its plugin.
        timeout: of every wait for others.
    """

    def __init__(self, option: Elastic, strategy: Any, *, comm: Any, precision: Any, timeout: timedelta) -> None:
        self._option, self._strategy, self._comm, self._timeout = option, strategy, comm, timeout
        self._precision, self._seed = precision, torch.initial_seed()
        self.num_shards, self._ranks_per_host = comm.topology.world_size, len(comm.topology.node)
        self._local = comm.topology.local_rank
        self._shards = shards_of(self._local, self.num_shards, self.num_shards)
        self._rest: tuple[Any, ...] = ()  # arguments of `training_step` after the batch
        self._is_running_shard = False  # by `_run`, and not by Lightning's closure
        self.is_first = self._local == 0  # of the view
        self.committed = 0
        self._loader: ShardLoader | None = None
        self._membership: Membership | None = None
        self._groups: ViewGroups | None = None
        self._buckets: list[FlatBucket] = []
        self._average: Callable[[HookState, Any], Future[Tensor]]
        self._lock = threading.Lock()
        self._ended = ""  # the view, and why
        self._cause: BaseException | None = None
        self._may_cut = self._sums_apart = False
        self._has_state = True  # of the step `committed`
        self._logs: StepLogs | None = None  # while a step is attempted

    # ---- what it is given ------------------------------------------------------------------------------------------

    def hook(self, average: Callable[[HookState, Any], Future[Tensor]]) -> Callable[[HookState, Any], Future[Tensor]]:
        """Return DDP's hook: `average`, which gives the local bucket back where the view has ended.

        An error would leave DDP's reducer unusable.
        """
        self._average = average

        def average_or_keep(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  DDP compares them
            buffer = bucket.buffer()
            if self._sums_apart or self._ended:
                return _done(buffer)
            try:
                return average(state, bucket).then(partial(self._or_local, buffer))
            except RuntimeError as error:
                self._note(error)
                return _done(buffer)

        return average_or_keep

    def _or_local(self, buffer: Tensor, future: Future[Tensor]) -> Tensor:
        try:
            return future.value()
        except RuntimeError as error:
            self._note(error)
            return buffer

    def deal(self, loader: Any, seed: int, prepare: Callable[[Any], Any]) -> ShardLoader:
        """Return what gives this rank the shards that it has in each view."""
        self._loader = ShardLoader(loader, self.num_shards, seed, prepare)
        return self._loader

    @property
    def _engine(self) -> CommEngine:
        engine: CommEngine = self._comm.engine
        return engine

    @property
    def _module(self) -> Any:
        return self._strategy.lightning_module

    # ---- views -----------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Meet other hosts, or join them where they run already. Right before the loop begins."""
        trainer = self._module.trainer
        self.committed = trainer.global_step
        parameters = [one for one in self._strategy.model.parameters() if one.requires_grad]
        self._buckets = flat_buckets(parameters, self._engine.plan.bucket_bytes)
        layout = [(tuple(one.shape), str(one.dtype)) for one in parameters]
        self._membership = Membership(
            host=_host_id(),
            local=self._local,
            ranks_per_host=self._ranks_per_host,
            meet=self._option.meeting_points,
            min_hosts=self._option.min_hosts,
            max_hosts=self._option.max_hosts,
            token=f"{self._ranks_per_host} x {self._option.max_hosts}; {layout}",
            silent_s=self._option.silent_s,
            on_change=self._on_change,
            make_store=self._open_store,
        )
        self._meet(self._membership.enter, is_in_step=False)

    def _open_store(self) -> str:
        # Listening on one address. The server of the view before ends here.
        assert self._membership is not None
        ip = self._membership.me.address.rpartition(":")[0]
        listener = socket.create_server((ip, 0))
        port = listener.getsockname()[1]
        self._server = dist.TCPStore(
            ip, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=STORE_LIMIT
        )
        return f"{ip}:{port}"

    def _meet(self, next_view: Callable[..., View], *, is_in_step: bool) -> bool:
        # Returns whether this rank was behind, and has taken the state of another.
        assert self._membership is not None
        for _ in range(MOST_VIEWS_PER_STEP):
            self._ended, self._cause, self._may_cut = "", None, True
            view = next_view(self.committed if self._has_state else -1, timeout_s=self._timeout.total_seconds())
            next_view = self._membership.next_view
            try:
                return self._enter(view, is_in_step=is_in_step)
            except RuntimeError as error:
                self._note(error)
                self._close()
        raise RuntimeError(
            f"elastic: {MOST_VIEWS_PER_STEP} times in a row the hosts could not sum step {self.committed} although "
            f"none was lost: {self._ended}"
        ) from self._cause

    def _enter(self, view: View, *, is_in_step: bool) -> bool:
        assert self._membership is not None
        rank, world_size = view.rank_of(self._membership.me.id), len(view.members)
        topology = Topology.from_ranks_per_node(rank=rank, world_size=world_size, ranks_per_node=self._ranks_per_host)
        self._groups = ViewGroups(
            topology=topology,
            store=view.store,
            number=view.number,
            timeout=self._timeout,
            spared=self._membership.fds,
        )
        self._groups.open()
        self._engine.enter(self._groups)
        self.is_first, self._sums_apart = rank == 0, True
        vars(rank_zero_only)["rank"] = rank  # who writes logs
        if self._loader is not None:
            self._loader.use(shards_of(rank, world_size, self.num_shards))
        self._shards = shards_of(rank, world_size, self.num_shards)
        is_behind = self._share_state(view, is_in_step=is_in_step)
        if self._ended:
            raise RuntimeError(self._ended)
        return is_behind and is_in_step

    def _on_change(self, reason: str) -> None:
        # In a thread of the membership.
        with self._lock:
            self._ended = self._ended or reason
            may_cut = self._may_cut
        if may_cut:
            self._cut()

    def _note(self, error: BaseException) -> None:
        if (not comes_from_others(error) and "comm: " not in str(error)) or isinstance(error.__cause__, OrderError):  # type: ignore[arg-type]
            raise error
        with self._lock:
            self._ended, self._cause = self._ended or str(error), self._cause or error

    def _cut(self) -> None:
        self._engine.cut(f"comm: {self._ended}")
        if self._groups is not None:
            self._groups.cut()

    def _close(self) -> None:
        self._cut()
        if stuck := self._engine.close():
            raise RuntimeError(f"elastic: stages {stuck} of the former view do not end, and may write into gradients")
        if self._groups is not None:
            self._groups.destroy()

    # ---- a step ----------------------------------------------------------------------------------------------------

    def step(self, run: Callable[[Callable[[], Any]], Any], closure: Callable[[], Any]) -> Any:
        """Run an optimizer's step, whose closure is run again where the view ends; return its outputs."""
        try:
            outputs = run(partial(self._whole_sum, closure))
        except _StepTaken as taken:
            outputs = taken.outputs
        self.committed += 1
        return outputs

    @property
    def is_in_attempt(self) -> bool:
        """Whether shards run: what is logged is added up over ranks at their end."""
        return self._logs is not None

    def _whole_sum(self, closure: Callable[[], Any]) -> Any:
        buffers, outputs, is_first = [buffer.clone() for buffer in self._module.buffers()], None, True
        self._logs = StepLogs(self._module)
        try:
            for _ in range(MOST_VIEWS_PER_STEP):
                if self._ended:
                    self._put_buffers(buffers)
                    self._close()
                    assert self._membership is not None
                    if self._meet(self._membership.next_view, is_in_step=True):
                        raise _StepTaken(outputs)
                    self._logs.restore()
                self._may_cut = True
                made = self._attempt(closure if is_first else None, self._logs)
                outputs, is_first = made if is_first else outputs, False
                if self._is_whole():
                    return outputs
        finally:
            self._logs = None
        raise RuntimeError(f"elastic: step {self.committed} failed in {MOST_VIEWS_PER_STEP} views: {self._ended}")

    def _is_whole(self) -> bool:
        with self._lock:  # from here on a view that ends waits until the update is made
            is_whole, self._may_cut = not self._ended, False
        if self._ranks_per_host > 1:
            # All ranks of a host make a step or none: Lightning has them wait for each other before the next batch, and
            # with `shard_update` each updates a part. Other hosts are not asked.
            vote = torch.tensor([float(is_whole)])
            dist.all_reduce(vote, dist.ReduceOp.MIN)
            if is_whole and not vote:
                self._ended = self._ended or "another rank of this host has no whole sum"
            is_whole = bool(vote)
        return is_whole

    def _attempt(self, closure: Callable[[], Any] | None, logs: StepLogs) -> Any:
        strategy, shards, outputs = self._strategy, self._shards, None
        strategy.model.require_backward_grad_sync = len(shards) == 1
        if closure is None:
            self._drop_gradients()
            self._run(shards[0])
        else:
            with self._drawing(shards[0]):
                outputs = closure()
        logs.end_shard()
        after_first = [buffer.clone() for buffer in self._module.buffers()] if len(shards) > 1 else []
        for shard in shards[1:]:
            strategy.model.require_backward_grad_sync = shard == shards[-1]
            self._run(shard)
            logs.end_shard()
        strategy.model.require_backward_grad_sync = True
        self._put_buffers(after_first)  # as under `ddp`, where each rank sees one shard
        if not self._ended:
            try:
                self._share(logs)
            except RuntimeError as error:
                self._note(error)
        return outputs

    @torch.no_grad()
    def _put_buffers(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self._module.buffers(), values, strict=bool(values)):
            buffer.copy_(value)

    def _share(self, logs: StepLogs) -> None:
        if self._sums_apart:
            for bucket in self._buckets:
                bucket.fill()
            for future in [self._average(self._comm.hook_state, bucket) for bucket in self._buckets]:
                future.wait()
            for bucket in self._buckets:
                bucket.give_back()
        world, buffers = None if self._groups is None else self._groups.world, list(self._module.buffers())
        if buffers and world is not None:  # those of rank zero, as under `ddp`
            dist._broadcast_coalesced(world, [one.detach() for one in buffers], 1 << 28, 0)
        logs.share(world, num_shards=self.num_shards, is_first_of_host=self._local == 0)
        self._sums_apart = False

    def _run(self, shard: int) -> None:
        # As Lightning's closure runs the first shard.
        strategy, trainer = self._strategy, self._module.trainer
        batch = self._batch_of(shard)  # before random numbers are those of the shard: a loader may draw as it starts
        self._is_running_shard = True
        try:
            with self._drawing(shard):
                output = _call_hook()(trainer, "training_step", batch, *self._rest)
                loss = output["loss"] if isinstance(output, dict) else output
                _call_hook()(trainer, "backward", loss, strategy.optimizers[0])
        finally:
            self._is_running_shard = False

    def _batch_of(self, shard: int) -> Any:
        assert self._loader is not None
        batch = self._precision.convert_input(self._loader.batch_of(shard))
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self._strategy.batch_to_device(batch, dataloader_idx=0)

    def batch_for(self, batch: Any, rest: tuple[Any, ...]) -> Any:
        """Return the batch for `training_step`: Lightning has read that of a shard which is another rank's by now."""
        self._rest = rest
        is_read = self._is_running_shard or self._loader is None or self._loader.first == self._shards[0]
        return batch if is_read else self._batch_of(self._shards[0])

    @contextmanager
    def _drawing(self, shard: int) -> Iterator[None]:
        with random_state((self._seed, self.committed, shard), self._strategy.root_device):
            yield

    def _drop_gradients(self) -> None:
        for one in self._strategy.model.parameters():
            one.grad = None
        if (masters := getattr(self._precision, "masters", None)) is not None:
            masters.drop_sums()

    # ---- state -----------------------------------------------------------------------------------------------------

    def _share_state(self, view: View, *, is_in_step: bool) -> bool:
        # Returns whether this rank has taken a state. In a first view all take that of the first host: nobody is behind
        # in it, and who joins a run is.
        assert self._membership is not None
        assert self._groups is not None
        me, source = self._membership.me, next(one for one in view.members if one.id == view.donors[0])
        is_first_view = not (is_in_step or view.behind)
        behind = [one.id for one in view.members if one.host != source.host] if is_first_view else view.behind
        if not behind or self._groups.world is None:
            return False
        joins = me.id in view.behind and not is_in_step
        self._has_state = not joins
        data = b""
        if me.host == source.host and me.id not in behind:
            checkpoint = self._module.trainer._checkpoint_connector.dump_checkpoint()
            if me.id == source.id:
                file = io.BytesIO()
                torch.save((self._seed, checkpoint), file)
                data = file.getvalue()
        data = _broadcast(data, self._groups.world, source=view.rank_of(source.id))
        if me.id not in behind:
            return False
        self._seed, checkpoint = torch.load(io.BytesIO(data), weights_only=False)
        self._load(checkpoint, with_place=joins)
        self.committed = view.target - is_in_step  # `step` counts the one whose outcome this is
        self._has_state = True
        return True

    def _load(self, checkpoint: dict[str, Any], *, with_place: bool) -> None:
        strategy, connector = self._strategy, self._module.trainer._checkpoint_connector
        steps = getattr(self._precision, "optimizer_steps", ())
        connector._loaded_checkpoint = checkpoint
        try:
            if with_place:
                connector.restore_datamodule()
                connector.restore_model()
                connector.restore_callbacks()
                connector.restore_training_state()
                return
            connector.restore_model()
            skipped = [int(state.num_skipped) for state in steps]
            connector.restore_precision_plugin_state()
            # Rates are those of this rank's schedules, which are at the step itself, and not behind it.
            rates = [[_without(group, "params") for group in one.param_groups] for one in strategy.optimizers]
            connector.restore_optimizers()
            for optimizer, groups in zip(strategy.optimizers, rates, strict=True):
                for group, values in zip(optimizer.param_groups, groups, strict=True):
                    group.update(values)
            for state, before in zip(steps, skipped, strict=True):
                state.skip_flag = SkipFlag(int(state.num_skipped) > before)
        finally:
            connector._loaded_checkpoint = {}

    # ---- end -------------------------------------------------------------------------------------------------------

    def leave(self, error: BaseException | None) -> None:
        """Leave the view; others go on without this host, if there is an error."""
        membership, self._membership = self._membership, None
        if membership is not None:
            if error is None:
                membership.say_goodbye()
            membership.close()


def _done(value: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(value)
    return future


def _broadcast(data: bytes, group: dist.ProcessGroup, *, source: int) -> bytes:
    options = dist.BroadcastOptions()
    options.rootRank = source
    length = torch.tensor([len(data)])
    group.broadcast([length], options).wait()
    flat = torch.empty(int(length), dtype=torch.uint8)
    if data:
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    group.broadcast([flat], options).wait()
    return flat.numpy().tobytes()


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def _call_hook() -> Callable[..., Any]:
    return lightning_function("pytorch.trainer.call._call_strategy_hook")


def _host_id() -> str:
    # Of this launch: a host that comes again is another one.
    found = [f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"]
    dist.broadcast_object_list(found, src=0)
    return found[0]
