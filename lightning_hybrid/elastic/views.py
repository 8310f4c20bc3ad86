"""The views of an elastic fit: hosts meet, groups of theirs are made and cut, who is behind takes the state."""

from __future__ import annotations

import io
import logging
import socket
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_hybrid.comm import Topology
from lightning_hybrid.comm.engine.view_engine import ViewEngine
from lightning_hybrid.comm.engine.view_groups import STORE_LIMIT, ViewGroups
from lightning_hybrid.comm.health.consensus import OrderError
from lightning_hybrid.comm.health.replica_difference import (
    ReplicaDriftError,
    first_difference,
    names_that_differ,
)
from lightning_hybrid.comm.health.tensor_hash import Fingerprint
from lightning_hybrid.comm.health.watchdog import comes_from_others
from lightning_hybrid.elastic.host_vote import HostVote
from lightning_hybrid.elastic.membership.membership import Membership
from lightning_hybrid.elastic.membership.view import View
from lightning_hybrid.elastic.options import ElasticOptions, resolved, warn_of_loopback
from lightning_hybrid.elastic.step_logs import EpochLogs
from lightning_hybrid.precision.skipped_steps import SkipFlag
from lightning_hybrid.run_status import tensors_of_replica

log = logging.getLogger(__name__)

# Views in a row in which a step fails although no host is lost: then the cause is another.
MOST_VIEWS = 20


class Views:
    """The membership of one rank, and the groups of its present view.

    Args:
        option: as the user gave it.
        strategy: has module, optimizers and precision, which a rank that is behind takes from another.
        engine: sums over the present view.
        timeout: of every wait for others.
        logs: of the epoch, which a host that is behind takes, too.
        token: what must be equal on all hosts.

    Attributes:
        ended: why the present view has ended; empty while it has not. `may_cut`: whether sums are then ended at once.
        committed: optimizer steps that this rank has.
        wants_stop: whether this host ends its fit early, as `trainer.should_stop` says.
        stops: whether a host of the present view does, so that all end their fits after the same step.
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
        self._has_made_step = False  # in the present view, and not taken from others
        self._hosts_before: tuple[str, ...] = ()
        self.groups: ViewGroups | None = None
        self._left = -1  # number of the latest view that this rank has left
        self._has_state = True  # of the step `committed`
        self._lock = threading.Lock()
        ranks = len(self.topology.node)
        addresses = resolved(option.meeting_points)
        warn_of_loopback(option, addresses)
        self._membership = Membership(
            host=_host_id(),
            local=self.topology.local_rank,
            ranks_per_host=ranks,
            meet=addresses,
            min_hosts=option.min_hosts,
            max_hosts=option.max_hosts,
            token=token,
            silent_s=option.silent_s,
            on_change=self._on_change,
            make_store=self._open_store,
        )
        self._vote = HostVote(self.topology)  # now that a rank that is lost is seen

    # ---- from one view to the next -----------------------------------------------------------------------------------

    def enter(self, on_view: Callable[[Topology], None]) -> None:
        """Meet other hosts, or join them where they run already. Right before the loop begins."""
        self._meet(self._membership.enter, on_view, is_in_step=False)

    def change(self, on_view: Callable[[Topology], None]) -> bool:
        """Enter the next view within a step. Return whether this rank took the step's outcome from others."""
        self.close()
        return self._meet(self._membership.next_view, on_view, is_in_step=True)

    def _meet(
        self,
        next_view: Callable[..., View],
        on_view: Callable[[Topology], None],
        *,
        is_in_step: bool,
    ) -> bool:
        for _ in range(MOST_VIEWS):
            with self._lock:
                self._left = self.groups.number if self.groups else -1
                self.ended = ""
                self.cause = None
                self.may_cut = True
            self._has_made_step = False
            view = next_view(
                self.committed if self._has_state else -1,
                timeout_s=self._timeout.total_seconds(),
                on_wait=self._say_what_is_waited_for,
            )
            next_view = self._membership.next_view
            has_taken = False
            try:
                self._enter(view)
                on_view(self.topology)
                has_taken = self._share_state(view, is_in_step=is_in_step)
                self._compare_replicas(view)
            except RuntimeError as error:
                self.note(error)
            if self.agrees(not self.ended, "another rank of this host could not enter the view"):
                self._say_who_ended(view)
                return has_taken and is_in_step
            self.close()
        raise RuntimeError(
            f"elastic: {MOST_VIEWS} times in a row the hosts could not sum step {self.committed} although none was "
            f"lost: {self.ended}"
        ) from self.cause

    def commit(self, *, is_taken: bool) -> None:
        """Count a step, which this rank has made, or taken from others."""
        self.committed += 1
        self._has_made_step = not is_taken

    def stop(self, on_view: Callable[[Topology], None]) -> None:
        """Have all hosts end their fits after the step that this host has made last. Collective among its ranks."""
        self.wants_stop = True
        self.change(on_view)

    def gather(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks of the view, None where it ends meanwhile.

        For comparisons after a step, from which nothing follows: of two ranks one may get values, and the other None.
        Collective among all ranks of the view, after the same step. It is not done after a step that this rank has
        taken from others, which have compared in the former view.
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

    def _say_what_is_waited_for(self, waited_s: float, what: str) -> None:
        if self.topology.local_rank == 0:
            # On each host, as the one that waits for others may not be the one that writes.
            log.warning("elastic: has waited for %.0f s: %s", waited_s, what)

    def _say_who_ended(self, view: View) -> None:
        """Warn of hosts that have ended their fits as planned while others go on: they stop by other rules."""
        before = self._hosts_before
        self._hosts_before = view.hosts
        ended = []
        for host in before:
            is_named = any(host in reason for reason in view.reasons)  # lost, silent or isolated
            if host not in view.hosts and not is_named:
                ended.append(host)
        if ended and not self.stops and self.topology.local_rank == 0:
            log.warning(
                "elastic: hosts %s have ended their fits after step %d, and this host goes on with %d in all. Give "
                "every host the same `max_steps`, `max_epochs`, `max_time` and callbacks.",
                ", ".join(ended),
                view.target,
                len(view.hosts),
            )

    def _enter(self, view: View) -> None:
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
        with self._lock:  # who ends the view from here on finds them
            self.groups = groups
            ended = self.ended
        if ended:
            raise RuntimeError(f"comm: {ended}")
        groups.open()
        groups.run(partial(self._engine.enter, groups))
        vars(rank_zero_only)["rank"] = rank  # who writes logs

    _server: Any = None  # of this view's store, where this rank has made it
    _next_server: Any = None

    def _open_store(self) -> str:
        ip = self._membership.me.address.rpartition(":")[0]
        listener = socket.create_server((ip, 0))  # by hand: torch's would listen on all addresses
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
        # In a thread of the membership, which may come late.
        with self._lock:
            if number <= self._left:
                return
            self.ended = self.ended or reason
            may_cut = self.may_cut
            groups = self.groups
        if (
            may_cut and groups is not None and groups.number == number
        ):  # else they are yet to be made
            self._cut(groups)

    def note(self, error: BaseException) -> None:
        """Note that a sum failed because of other ranks. Re-raise an error that is this rank's own."""
        if isinstance(error.__cause__ or error, OrderError) or not _is_of_others(error):
            raise error
        with self._lock:
            self.ended = self.ended or str(error)
            self.cause = self.cause or error

    def begin(self) -> bool:
        """Let the end of the view cut sums from now on. Return False if it has ended already."""
        with self._lock:  # else it could end in between: nothing would cut its sums
            self.may_cut = not self.ended
            return self.may_cut

    def hold(self) -> bool:
        """Let the end of the view wait from now on, because weights are updated. Return whether it has not ended."""
        with self._lock:
            self.may_cut = False
            return not self.ended

    def agrees(self, is_so: bool, otherwise: str) -> bool:
        """Return whether all ranks of this host agree. If one does not, the view ends. Collective among them."""
        if not is_so:
            # Another rank of this host may wait for this one, in a sum or for groups of which there is nothing to cut.
            self._membership.end_view(
                f"a sum broke on host {self._membership.me.host}: {self.ended}"
            )
            self._cut(self.groups)
        # By what ends with no view: else one would wait here for another that has gone on.
        is_so_on_all = self._vote(is_so)
        if is_so and not is_so_on_all:
            self.ended = self.ended or otherwise
        return is_so_on_all

    def _cut(self, groups: ViewGroups | None) -> None:
        self._engine.cut(f"comm: {self.ended}")
        if groups is not None:
            groups.cut()

    def close(self) -> None:
        """End all sums of the view, and its groups."""
        self._cut(self.groups)
        stuck = self._engine.close()
        if self.groups is not None:
            if (
                stuck and self._engine.device.type == "cuda"
            ):  # Gloo's write nothing more: their connections are closed
                raise RuntimeError(
                    f"elastic: stages {stuck} of the former view do not end: gradients may change"
                )
            self.groups.is_stuck |= bool(stuck)
            self.groups.destroy()

    def leave(self, error: BaseException | None) -> None:
        """Leave the run. After an error the others take this host for lost."""
        if error is None:
            with suppress(
                RuntimeError
            ):  # together with the ranks of this host, which may still need each other
                dist.barrier()
            self._membership.say_goodbye()
        self._membership.close()

    # ---- state -------------------------------------------------------------------------------------------------------

    def _share_state(self, view: View, *, is_in_step: bool) -> bool:
        # Returns whether this rank has taken a state. In a first view all take that of the first host: no rank is
        # behind in it, and one that joins a run is.
        assert self.groups is not None
        me = self._membership.me
        source = next(one for one in view.members if one.id == view.donors[0])
        is_first_view = not (is_in_step or view.behind)
        behind = (
            [one.id for one in view.members if one.host != source.host]
            if is_first_view
            else view.behind
        )
        if not behind or self.groups.world is None:
            return False
        joins = me.id in view.behind and not is_in_step
        self._has_state = not joins
        data = b""
        if me.host == source.host and me.id not in behind:
            # By all ranks of the host: with `shard_update` each has a part.
            checkpoint = (
                self._strategy.lightning_module.trainer._checkpoint_connector.dump_checkpoint()
            )
            self._strategy._loaders.save(checkpoint, is_alone=True)
            if me.id == source.id:
                torch.save((self.seed, checkpoint, self._logs.collected()), file := io.BytesIO())
                data = file.getvalue()
        length = torch.tensor([len(data)])
        rank = view.rank_of(source.id)
        self.groups.broadcast(length, source=rank)
        flat = torch.frombuffer(bytearray(data or int(length)), dtype=torch.uint8)
        self.groups.broadcast(flat, source=rank)
        if me.id not in behind:
            return False
        file = io.BytesIO(flat.numpy().tobytes())
        self.seed, checkpoint, collected = torch.load(file, map_location="cpu", weights_only=True)
        self._load(checkpoint, with_place=joins)
        self._logs.take(collected)
        self.committed = view.target - is_in_step  # who steps counts the step whose outcome this is
        self._has_state = True
        return True

    def _load(self, checkpoint: dict[str, Any], *, with_place: bool) -> None:
        strategy = self._strategy
        connector = self._strategy.lightning_module.trainer._checkpoint_connector
        steps = getattr(strategy.precision_plugin, "optimizer_steps", ())
        connector._loaded_checkpoint = checkpoint
        try:
            if with_place:
                strategy._loaders.load(checkpoint)
                connector.restore_datamodule()
                connector.restore_model()
                connector.restore_callbacks()
                connector.restore_training_state()
                return
            # Lightning's `WeightAveraging` puts the average in their place; its own is at the step before.
            checkpoint["state_dict"] = checkpoint.get(
                "current_model_state", checkpoint["state_dict"]
            )
            connector.restore_model()
            skipped = [int(state.num_skipped) for state in steps]
            connector.restore_precision_plugin_state()
            # Rates are those of this rank's schedules, which are at the step itself, and not behind it.
            rates = [
                [{**group, "params": None} for group in one.param_groups]
                for one in strategy.optimizers
            ]
            connector.restore_optimizers()
            for optimizer, groups in zip(strategy.optimizers, rates, strict=True):
                for group, values in zip(optimizer.param_groups, groups, strict=True):
                    group.update({key: value for key, value in values.items() if key != "params"})
            for state, before in zip(steps, skipped, strict=True):
                state.skip_flag = SkipFlag(int(state.num_skipped) > before)
        finally:
            connector._loaded_checkpoint = {}

    def _compare_replicas(self, view: View) -> None:
        assert self.groups is not None
        trainer = self._strategy.lightning_module.trainer
        fingerprint = Fingerprint(self._engine.device)
        own = {name: int(fingerprint.of(one)) for name, one in tensors_of_replica(trainer)}
        gathered: list[Any] = [(own, self.wants_stop)] * len(view.members)
        if self.groups.world is not None:
            # A rank that stops early says it here: no step needs a vote of its own.
            self.groups.run(
                partial(dist.all_gather_object, gathered, gathered[0], group=self.groups.world)
            )
        values: list[dict[str, int]] = []
        for values_of_rank, wants_stop in gathered:
            values.append(values_of_rank)
            self.stops = self.stops or wants_stop
        if not names_that_differ(values):
            return
        raise ReplicaDriftError(
            f"elastic: the hosts of view {view.number} do not hold the same model before step {view.target}: "
            f"{first_difference(values, [one.host for one in view.members])}. A host that joined has not got what the "
            "others have. Give every host the same code and libraries, and resume from a checkpoint."
        )


def hash_of(values: object) -> str:
    """Return a short hash of what a text shows."""
    return uuid.uuid5(uuid.NAMESPACE_OID, repr(values)).hex[:12]


def _is_of_others(error: BaseException) -> bool:
    return "comm: " in str(error) or (isinstance(error, Exception) and comes_from_others(error))


def _host_id() -> str:
    # Of this launch: a host that comes again is another one.
    found = [f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"]
    dist.broadcast_object_list(found, src=0)
    return found[0]
