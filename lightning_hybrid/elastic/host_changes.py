"""Handling of hosts that join or are lost, including new process groups and transfer of training state."""

from __future__ import annotations

import io
import logging
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.optim import Optimizer

from lightning_hybrid.comm import Topology
from lightning_hybrid.comm.engine.view_engine import ViewEngine
from lightning_hybrid.comm.engine.view_groups import STORE_LIMIT, ViewGroups
from lightning_hybrid.comm.health.backend_errors import comes_from_others
from lightning_hybrid.comm.health.consensus import OrderError
from lightning_hybrid.comm.health.replica_difference import (
    ReplicaDriftError,
    first_difference,
    names_that_differ,
)
from lightning_hybrid.comm.health.tensor_hash import Fingerprint
from lightning_hybrid.elastic.host_vote import HostVote
from lightning_hybrid.elastic.membership.membership import Membership
from lightning_hybrid.elastic.membership.view import View
from lightning_hybrid.elastic.options import ElasticOptions, resolved, warn_of_loopback
from lightning_hybrid.elastic.step_logs import EpochLogs
from lightning_hybrid.precision.skipped_steps import SkipFlag
from lightning_hybrid.run_status import tensors_of_replica

log = logging.getLogger(__name__)

# Maximum number of consecutive views in which a step may fail. If it fails more often, the cause is not a lost host.
MOST_VIEWS = 20


class Views:
    """Participation of one rank in an elastic run, with the process groups of the current view.

    A membership view, or view, is the list of hosts that train together at a given time.

    Args:
        option: Validated options of elastic training.
        strategy: Strategy that holds the module, optimizers and precision plugin. Their state is sent to ranks that are
            behind.
        engine: Engine of the all-reduce over the current view.
        timeout: Maximum duration of every wait for other ranks.
        logs: Logged values of the epoch, which are also sent to hosts that are behind.
        token: Description of the run's settings that must be equal on all hosts.

    Attributes:
        ended: Reason why the current view has ended, or an empty string if it is active.
        may_cut: Whether the end of the view interrupts collectives at once.
        committed: Number of optimizer steps that this rank has completed or received.
        wants_stop: Whether this host ends training early (`trainer.should_stop`).
        stops: Whether a host of the current view ends training early. All hosts then end after the same step.
    """

    def __init__(
        self,
        option: ElasticOptions,
        strategy: Any,
        *,
        engine: ViewEngine,
        timeout: timedelta,
        logs: EpochLogs,
        token: str,
    ) -> None:
        self._strategy = strategy
        self._engine = engine
        self._timeout = timeout
        self._logs = logs
        self.topology = engine.topology
        self.seed = torch.initial_seed()
        self.ended = ""
        self.may_cut = False
        self.committed = strategy.lightning_module.trainer.global_step
        self.cause: BaseException | None = None
        self.wants_stop = False
        self.stops = False
        # Whether this rank has completed the latest step itself, in the current view.
        self._has_made_step = False
        self._hosts_before: tuple[str, ...] = ()
        self.groups: ViewGroups | None = None
        # Number of the latest view that this rank has left.
        self._left = -1
        # Whether this rank has the state after `committed` steps.
        self._has_state = True
        # Store of the current or the next view, on ranks that have opened one.
        self._server: dist.TCPStore | None = None
        self._next_server: dist.TCPStore | None = None
        self._lock = threading.Lock()

        addresses = resolved(option.meeting_points)
        warn_of_loopback(option, addresses)
        self._membership = Membership(
            host=_host_id(),
            local=self.topology.local_rank,
            ranks_per_host=len(self.topology.node),
            meet=addresses,
            min_hosts=option.min_hosts,
            max_hosts=option.max_hosts,
            token=token,
            silent_s=option.silent_s,
            on_change=self._on_change,
            make_store=self._open_store,
        )
        # The vote is created after the membership, which detects failed ranks.
        self._vote = HostVote(self.topology)

    # ---- from one view to the next -----------------------------------------------------------------------------------

    def enter(self, on_view: Callable[[Topology], None]) -> None:
        """Start a run with the other hosts, or join their run, just before the training loop.

        Collective: every rank of this host must call it, in the same order.
        """
        self._meet(self._membership.enter, on_view, is_in_step=False)

    def change(self, on_view: Callable[[Topology], None]) -> bool:
        """Leave the current membership view and enter the next view during the current step.

        Collective: every rank of this host must call it, in the same order.

        Returns:
            Whether this rank received the step's result from other ranks.
        """
        self.close()
        return self._meet(self._membership.next_view, on_view, is_in_step=True)

    def _meet(
        self,
        next_view: Callable[..., View],
        on_view: Callable[[Topology], None],
        *,
        is_in_step: bool,
    ) -> bool:
        """Try to enter membership views until all ranks of this host have entered the same view.

        Returns:
            Whether this rank received the step's result from other ranks in this view.

        Raises:
            RuntimeError: The ranks failed to enter `MOST_VIEWS` consecutive views.
        """
        for _ in range(MOST_VIEWS):
            self._begin_view_change()
            committed = -1
            if self._has_state:
                committed = self.committed
            view = next_view(
                committed, timeout_s=self._timeout.total_seconds(), on_wait=self._warn_of_wait
            )
            next_view = self._membership.next_view

            has_received_state = False
            try:
                self._enter(view)
                on_view(self.topology)
                has_received_state = self._share_state(view, is_in_step=is_in_step)
                self._compare_replicas(view)
            except RuntimeError as error:
                self.note(error)
            if self.agrees(not self.ended, "another rank of this host could not enter the view"):
                self._warn_of_ended_hosts(view)
                return has_received_state and is_in_step
            self.close()
        raise RuntimeError(
            f"elastic: the hosts could not all-reduce step {self.committed} in {MOST_VIEWS} attempts, although no "
            f"host failed ({self.ended}). Check the network between the hosts, and restart the run."
        ) from self.cause

    def _begin_view_change(self) -> None:
        """Reset all state that belongs to the previous membership view.

        Collectives of the next view may be interrupted.
        """
        with self._lock:
            self._left = -1
            if self.groups:
                self._left = self.groups.number
            self.ended = ""
            self.cause = None
            self.may_cut = True
        self._has_made_step = False

    def commit(self, *, is_taken: bool) -> None:
        """Count a completed optimizer step.

        Args:
            is_taken: Whether this rank received the step's result from other ranks instead of computing it.
        """
        self.committed += 1
        self._has_made_step = not is_taken

    def stop(self, on_view: Callable[[Topology], None]) -> None:
        """Stop training on all hosts after the step that this host has just completed.

        Collective: every rank of this host must call it, in the same order.
        """
        self.wants_stop = True
        self.change(on_view)

    def gather(self, value: Any) -> list[Any] | None:
        """Gather a value from all ranks of all hosts, or return None if the set of hosts changes.

        Use this method only for comparisons after a step, because some ranks may get the values while others get None.
        The result is also None if this rank received the step's result from other ranks, which have already compared
        their values in the previous view.

        Collective: every rank of the view must call it after the same step, in the same order.
        """
        if not self._has_made_step:
            return None
        if self.groups is None or self.groups.world is None:
            return [value]
        if not self.begin():
            return None
        values: list[Any] = [None] * self.topology.world_size
        try:
            self.groups.run(partial(dist.all_gather_object, values, value, group=self.groups.world))
        except RuntimeError as error:
            self.note(error)
            return None
        finally:
            self.hold()
        return values

    def _warn_of_wait(self, waited_s: float, awaited: str) -> None:
        """Log a warning that this host has been waiting for the next membership view for a long time.

        Each waiting host logs the warning itself, because global rank zero may not be waiting.
        """
        if self.topology.local_rank == 0:
            log.warning("elastic: this host has been waiting for %.0f s for %s.", waited_s, awaited)

    def _warn_of_ended_hosts(self, view: View) -> None:
        """Warn about hosts that have finished training normally while this host is still training.

        This happens if the stop criteria of these hosts differ from those of this host.
        """
        hosts_before = self._hosts_before
        self._hosts_before = view.hosts
        ended = []
        for host in hosts_before:
            # Reasons name hosts that were lost, silent or isolated.
            is_named = any(host in reason for reason in view.reasons)
            if host not in view.hosts and not is_named:
                ended.append(host)
        if ended and not self.stops and self.topology.local_rank == 0:
            log.warning(
                "elastic: hosts %s have finished training after step %d, but this host continues, with %d hosts "
                "in total. Use the same `max_steps`, `max_epochs`, `max_time` and callbacks on every host.",
                ", ".join(ended),
                view.target,
                len(view.hosts),
            )

    def _enter(self, view: View) -> None:
        """Create the process groups of a membership view, and set this process's rank in the view.

        Collective: every rank of the view must call it, in the same order.
        """
        rank = view.rank_of(self._membership.me.id)
        world_size = len(view.members)
        ranks_per_node = len(self.topology.node)
        self._server = self._next_server
        self.topology = Topology.from_ranks_per_node(
            rank=rank, world_size=world_size, ranks_per_node=ranks_per_node
        )
        groups = ViewGroups(
            topology=self.topology,
            store=view.store,
            number=view.number,
            timeout=self._timeout,
            device=self._engine.device,
        )
        # From here on, the thread that detects the end of the view can interrupt the groups.
        with self._lock:
            self.groups = groups
            ended = self.ended
        if ended:
            raise RuntimeError(f"comm: {ended}")
        groups.open()
        groups.run(partial(self._engine.enter, groups))
        # This decides which rank writes logs.
        vars(rank_zero_only)["rank"] = rank

    def _open_store(self) -> str:
        """Start a `TCPStore` server for the next membership view, and return its address."""
        ip = self._membership.me.address.rpartition(":")[0]
        # torch's own listener would listen on all addresses.
        listener = socket.create_server((ip, 0))
        port = listener.getsockname()[1]
        self._next_server = dist.TCPStore(
            ip,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=STORE_LIMIT,
        )
        return f"{ip}:{port}"

    def _on_change(self, number: int, reason: str) -> None:
        """Record the end of a membership view, and interrupt its collectives if that is allowed.

        `Membership` calls this method in a separate thread, possibly with a delay.
        """
        with self._lock:
            if number <= self._left:
                return
            self.ended = self.ended or reason
            may_cut = self.may_cut
            groups = self.groups
        # The groups of this view may not exist yet.
        if may_cut and groups is not None and groups.number == number:
            self._cut(groups)

    def note(self, error: BaseException) -> None:
        """Record an error of a collective if other ranks have caused it, otherwise raise it again."""
        if isinstance(error.__cause__ or error, OrderError) or not _is_of_other_ranks(error):
            raise error
        with self._lock:
            self.ended = self.ended or str(error)
            self.cause = self.cause or error

    def begin(self) -> bool:
        """Allow the interruption of collectives, and return whether the membership view is still active."""
        # Without the lock, the view could end in between, and its collectives would not be interrupted.
        with self._lock:
            self.may_cut = not self.ended
            return self.may_cut

    def hold(self) -> bool:
        """Forbid the interruption of collectives, and return whether the membership view is still active.

        This protects the weight update.
        """
        with self._lock:
            self.may_cut = False
            return not self.ended

    def agrees(self, has_succeeded: bool, reason: str) -> bool:
        """Vote on whether all ranks of this host have succeeded, and end the view if any rank has not.

        Args:
            has_succeeded: Vote of this rank.
            reason: Reason for the end of the view if another rank of this host has failed.

        Collective: every rank of this host must call it, in the same order.
        """
        if not has_succeeded:
            # Another rank of this host may wait for this rank, in a collective or for groups that do not exist yet.
            self._membership.end_view(
                f"an all-reduce failed on host {self._membership.me.host}: {self.ended}"
            )
            self._cut(self.groups)
        # The vote does not end with a view, so that no rank waits here for a rank that has already continued.
        have_all_succeeded = self._vote(has_succeeded)
        if has_succeeded and not have_all_succeeded:
            self.ended = self.ended or reason
        return have_all_succeeded

    def _cut(self, groups: ViewGroups | None) -> None:
        """Interrupt all running collectives of the all-reduce engine and of the given process groups."""
        self._engine.cut(f"comm: {self.ended}")
        if groups is not None:
            groups.cut()

    def close(self) -> None:
        """Interrupt all collectives of the current membership view, and destroy its process groups.

        Raises:
            RuntimeError: On CUDA, a collective did not end and could still overwrite gradients.
        """
        self._cut(self.groups)
        stuck_stages = self._engine.close()
        if self.groups is None:
            return
        # On the CPU, Gloo does not write any more, because its connections are closed.
        if stuck_stages and self._engine.device.type == "cuda":
            raise RuntimeError(
                f"elastic: all-reduce stages {stuck_stages} of the previous group of hosts did not terminate, so they "
                "could still overwrite gradients. Restart the run from a checkpoint."
            )
        self.groups.is_stuck |= bool(stuck_stages)
        self.groups.destroy()

    def leave(self, error: BaseException | None) -> None:
        """Leave the elastic run, and notify the other hosts if no error occurred.

        After an error, the other hosts treat this host as lost.
        """
        if error is None:
            # The ranks of this host leave together, because they may still need each other.
            with suppress(RuntimeError):
                dist.barrier()
            self._membership.say_goodbye()
        self._membership.close()

    # ---- state -------------------------------------------------------------------------------------------------------

    def _share_state(self, view: View, *, is_in_step: bool) -> bool:
        """Send the training state to ranks that are behind, and return whether this rank received it.

        In the first view of a run, all other hosts receive the state of the first host, although no rank is considered
        to be behind. In later views, a host that joins is considered to be behind.

        Collective: every rank of the view must call it, in the same order.
        """
        assert self.groups is not None
        me = self._membership.me
        source = next(member for member in view.members if member.id == view.donors[0])
        behind: Sequence[str] = view.behind
        if not is_in_step and not view.behind:
            behind = [member.id for member in view.members if member.host != source.host]
        if not behind or self.groups.world is None:
            return False

        joins = me.id in view.behind and not is_in_step
        self._has_state = not joins
        data = b""
        if me.host == source.host and me.id not in behind:
            # All ranks of the source's host participate, because with `shard_update` each has a shard of the state.
            trainer = self._strategy.lightning_module.trainer
            checkpoint = trainer._checkpoint_connector.dump_checkpoint()
            self._strategy._loaders.save(checkpoint, is_alone=True)
            if me.id == source.id:
                file = io.BytesIO()
                torch.save((self.seed, checkpoint, self._logs.collected()), file)
                data = file.getvalue()

        length = torch.tensor([len(data)])
        rank = view.rank_of(source.id)
        self.groups.broadcast(length, source=rank)
        flat = torch.frombuffer(bytearray(data or int(length)), dtype=torch.uint8)
        self.groups.broadcast(flat, source=rank)
        if me.id not in behind:
            return False

        file = io.BytesIO(flat.numpy().tobytes())
        # The state may contain objects, such as hyper-parameters. The hosts trust each other, because
        # `all_gather_object` in `_compare_replicas` also unpickles what other hosts send.
        self.seed, checkpoint, collected = torch.load(file, map_location="cpu", weights_only=False)
        self._load(checkpoint, with_place=joins)
        self._logs.take(collected)
        self.committed = view.target
        if is_in_step:
            # The state is the result of a step that the caller counts.
            self.committed -= 1
        self._has_state = True
        return True

    def _load(self, checkpoint: dict[str, Any], *, with_place: bool) -> None:
        """Load the training state that another host has sent.

        Args:
            checkpoint: Checkpoint of the other host.
            with_place: Whether to load the position in the data, the callbacks and the loops as well, because this host
                joins the run.
        """
        connector = self._strategy.lightning_module.trainer._checkpoint_connector
        connector._loaded_checkpoint = checkpoint
        try:
            if with_place:
                self._strategy._loaders.load(checkpoint)
                connector.restore_datamodule()
                connector.restore_model()
                connector.restore_callbacks()
                connector.restore_training_state()
            else:
                self._load_result_of_step(checkpoint, connector)
        finally:
            connector._loaded_checkpoint = {}

    def _load_result_of_step(self, checkpoint: dict[str, Any], connector: Any) -> None:
        """Load weights, loss scales and optimizer state of a host that has completed the current step.

        This rank keeps its position in the data, its learning rates and its loops.
        """
        strategy = self._strategy
        optimizer_steps = getattr(strategy.precision_plugin, "optimizer_steps", ())
        # Lightning's `WeightAveraging` saves the average as `state_dict`, and the weights as `current_model_state`.
        # This rank's own average is that of the previous step.
        checkpoint["state_dict"] = checkpoint.get("current_model_state", checkpoint["state_dict"])
        connector.restore_model()
        skipped = [int(optimizer_step.num_skipped) for optimizer_step in optimizer_steps]
        connector.restore_precision_plugin_state()

        # Learning rates follow this rank's schedules, which have not been stepped for the current step yet.
        options_before = [_options_of_groups(optimizer) for optimizer in strategy.optimizers]
        connector.restore_optimizers()
        for optimizer, options_of_groups in zip(strategy.optimizers, options_before, strict=True):
            for group, options in zip(optimizer.param_groups, options_of_groups, strict=True):
                group.update(options)
        for optimizer_step, skipped_before in zip(optimizer_steps, skipped, strict=True):
            optimizer_step.skip_flag = SkipFlag(int(optimizer_step.num_skipped) > skipped_before)

    def _compare_replicas(self, view: View) -> None:
        """Raise if model replicas differ between ranks, and record whether any host stops early.

        Collective: every rank of the view must call it, in the same order.

        Raises:
            ReplicaDriftError: Ranks hold different weights or state.
        """
        assert self.groups is not None
        trainer = self._strategy.lightning_module.trainer
        fingerprint = Fingerprint(self._engine.device)
        hashes = {name: int(fingerprint.of(tensor)) for name, tensor in tensors_of_replica(trainer)}
        gathered: list[Any] = [(hashes, self.wants_stop)] * len(view.members)
        if self.groups.world is not None:
            # A rank that stops early informs the other ranks here, so that no step needs a vote.
            self.groups.run(
                partial(dist.all_gather_object, gathered, gathered[0], group=self.groups.world)
            )

        hashes_by_rank: list[dict[str, int]] = []
        for hashes_of_rank, wants_stop in gathered:
            hashes_by_rank.append(hashes_of_rank)
            self.stops = self.stops or wants_stop
        if not names_that_differ(hashes_by_rank):
            return
        difference = first_difference(hashes_by_rank, [member.host for member in view.members])
        raise ReplicaDriftError(
            f"elastic: hosts have different models before step {view.target} (view {view.number}): {difference}. A "
            "joining host did not receive the state of the other hosts. Check that all hosts run the same code "
            "and library versions, and resume from a checkpoint."
        )


def hash_of(values: object) -> str:
    """Return a short hash of the `repr` of a value."""
    return uuid.uuid5(uuid.NAMESPACE_OID, repr(values)).hex[:12]


def _options_of_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group of an optimizer, without the parameters."""
    options_of_groups = []
    for group in optimizer.param_groups:
        options_of_groups.append({name: group[name] for name in group if name != "params"})
    return options_of_groups


def _is_of_other_ranks(error: BaseException) -> bool:
    """Return whether an error was caused by other ranks, for example by a closed connection."""
    return "comm: " in str(error) or comes_from_others(error)


def _host_id() -> str:
    """Return a unique identifier for this launch on this host, shared by all ranks of the host.

    A host that is restarted after a failure is therefore treated as a new host.

    Collective: every rank of this host must call it, in the same order.
    """
    names = [f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"]
    dist.broadcast_object_list(names, src=0)
    return names[0]
