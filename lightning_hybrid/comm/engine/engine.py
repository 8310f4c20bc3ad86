"""Runs the stages of successive all-reduces at the same time, in one order on every rank.

    submit(bucket 0), submit(bucket 1), ...                                 caller: enqueues and returns
        -> [reduce]     bucket 2        one queue, one thread
        -> [ring]       bucket 1        and one process group                stage_threads.py
        -> [broadcast]  bucket 0        for every stage and column
        -> finish -> future

Large buckets go in chunks (in_flight.py). What must be equal on all ranks is checked: the plan when the engine is made,
each bucket's contents when they are first seen, the order of everything once per step (order_check.py). What fails on
one rank fails on all (health/watchdog.py). On CUDA torch does it, or side streams (cuda_carrier.py).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_hybrid.comm.adasum.combine import check_adasum_bucket
from lightning_hybrid.comm.bucket_layout import Exchange, is_exchange
from lightning_hybrid.comm.codec.codec import Codec, Coder
from lightning_hybrid.comm.codec.encoder import Blocks
from lightning_hybrid.comm.codec.error_feedback import BucketFeedback
from lightning_hybrid.comm.engine.in_flight import FailureLatch, InFlightBucket
from lightning_hybrid.comm.engine.job import Job
from lightning_hybrid.comm.engine.order_check import BucketOrder
from lightning_hybrid.comm.engine.process_groups import CommGroups
from lightning_hybrid.comm.engine.stages import EXCHANGES, stage_scopes
from lightning_hybrid.comm.health.consensus import compare_plans
from lightning_hybrid.comm.health.thread_place import place_of_error
from lightning_hybrid.comm.health.watchdog import Watchdog, private_store, short
from lightning_hybrid.comm.plan import BucketPlan, CommPlan
from lightning_hybrid.comm.stats.link_bytes import Traffic, traffic_of
from lightning_hybrid.comm.stats.trace import CommTrace
from lightning_hybrid.comm.topology import ReplicaSets, Topology

if TYPE_CHECKING:
    from lightning_hybrid.comm.engine.cuda_carrier import CudaCarrier
    from lightning_hybrid.comm.engine.stage_threads import StageThreads

# After a failure, how long closing waits for stages that may hang until their group's timeout.
FAILED_CLOSE_LIMIT_S = 5.0

# Of the timeout: on CUDA a bucket in flight for longer is a failure, before torch's watchdog makes it its own.
GIVE_UP_AT = 0.9


class CommEngine:
    """Sums flat tensors over all ranks in the background.

    Collective: every rank of WORLD must construct it, in the same order, with the same plan, and submit tensors of the
    same sizes in the same order. Warns once, on rank 0, where the plan cannot be followed to the letter on this
    topology.

    Args:
        topology: seen from this rank.
        plan: chooses the algorithm of each tensor by its bytes, and its chunks.
        timeout: of every collective; a rank that waits longer for the others fails.
        device: where tensors will be. `cuda`: torch's own sums or side streams carry them; else threads do.
        trace: counts what is submitted; None makes one.
        dtype_across_nodes: that in which sums travel between nodes, where it is narrower than the tensor's, or the
            codec through which they do; inside the node they keep their own. None: their own everywhere.
        shares_update: the ranks whose exchanges in the update `submit` is to carry, too: `"node"`, `"world"`; or None.
        replicas: where each of several sets of ranks has an engine of its own: all sets. `topology` is then that of the
            own set. None: all ranks average together.
        group: the ranks of the own set; None: WORLD.
        compared: further settings that must be equal on all ranks, by name.
        num_terms: gradients in a sum; None: one of each rank.

    Raises:
        ValueError: on every rank, if plan or topology differ between ranks.
    """

    def __init__(
        self,
        *,
        topology: Topology,
        plan: CommPlan,
        timeout: timedelta,
        device: torch.device,
        trace: CommTrace | None = None,
        dtype_across_nodes: torch.dtype | Codec | None = None,
        shares_update: Literal["node", "world"] | None = None,
        replicas: ReplicaSets | None = None,
        group: dist.ProcessGroup | None = None,
        compared: Mapping[str, object] | None = None,
        num_terms: int | None = None,
    ) -> None:
        self.topology = topology
        self.plan = plan
        self.device = device
        self.trace = CommTrace() if trace is None else trace
        self.dtype_across_nodes = dtype_across_nodes
        self.num_terms = num_terms or topology.world_size
        self.update_scope: Literal["node", "world"] = shares_update or "node"
        self._exchanging = {
            shares_update,
            "node" if getattr(dtype_across_nodes, "error_feedback", False) else None,
        }
        self._timeout = timeout
        self._is_closed = False
        self._turn = (
            threading.RLock()
        )  # to submit: what is put on streams comes there in the order that is recorded
        fallback = plan.fallback(topology)
        if fallback is not None and topology.rank == 0:
            warnings.warn(fallback, stacklevel=2)
        self.coder = self._new_coder()
        self._begin(compared, replicas=replicas, group=group)

    def _begin(
        self, compared: Any, *, replicas: Any = None, group: Any = None, groups: Any = None
    ) -> None:
        self._close_limit_s: float | None = None
        self._buckets: dict[tuple[Any, ...], tuple[BucketPlan, Traffic]] = {}
        self._order = BucketOrder()
        self._latch = FailureLatch(self._order)
        # Before any group is made: ranks with different plans would make different groups, and wait for each other.
        topology = self.topology
        on_cuda = self._on_cuda
        dtype = self.dtype_across_nodes
        alone = topology.world_size == 1
        found = (
            ("", [], [])
            if alone
            else compare_plans(self.plan, topology, self.device, dtype, group, compared)
        )
        self._watchdog = self._new_watchdog(*found)
        across = None if isinstance(dtype, Codec) else dtype
        self._new_job = partial(Job, topology=topology, dtype_across=across, by_backend=on_cuda)
        self._groups = groups or CommGroups(
            topology=replicas or topology, timeout=self._timeout, share=on_cuda
        )
        self._carrier = self._new_carrier()
        self._prepare()
        self._watchdog.start()  # after all groups are made, as they need the store and its client serves one at a time

    def _new_watchdog(self, token: str, hosts: list[str], addresses: list[list[str]]) -> Any:
        rank = self.topology.rank
        size = self.topology.world_size
        store = dist.HashStore() if size == 1 else private_store(f"lightning_hybrid/{token}")
        limit_s = GIVE_UP_AT * self._timeout.total_seconds() if self._on_cuda else None
        options: Any = {"hosts": hosts, "addresses": addresses, "give_up_after_s": limit_s}
        return Watchdog(store=store, rank=rank, world_size=size, watched=self._latch, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> CommEngine:
        # Threads and process groups are there once: what user code copies in a fit, such as the trainer, shares them.
        return self

    def _new_carrier(self) -> StageThreads | CudaCarrier:
        shared: Any = {
            "groups": self._groups,
            "trace": self.trace,
            "latch": self._latch,
            "watchdog": self._watchdog,
        }
        if self._on_cuda:
            from lightning_hybrid.comm.engine.cuda_carrier import CudaCarrier

            return CudaCarrier(device=self.device, **shared)
        from lightning_hybrid.comm.engine.stage_threads import StageThreads

        return StageThreads(**shared)

    def _new_coder(self) -> Coder | None:
        codec = self.dtype_across_nodes
        topology = self.topology
        if not isinstance(codec, Codec):
            return None
        if topology.num_nodes > 1:
            return Coder(codec, self.device, self.trace.count_rounding)
        if topology.rank == 0:
            warnings.warn(
                f"`between_nodes.dtype` (='int{codec.bits}') has nothing to do: all ranks are on one node, where "
                "sums keep their dtype",
                stacklevel=3,
            )
        return None

    @property
    def _on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def _prepare(self) -> None:
        columns: dict[Any, int] = dict(self.plan.columns(self.topology, on_cuda=self._on_cuda))
        columns |= {name: 1 for name in EXCHANGES if name.partition("_")[0] in self._exchanging}
        self._groups.add(stage_scopes(columns))
        self._carrier.use(columns)

    def submit(
        self,
        flat: Tensor,
        *,
        bucket_index: int,
        is_last: bool = False,
        adasum_numels: tuple[int, ...] = (),
        finish: Callable[[Tensor], Tensor] = lambda flat: flat,
        exchange: Exchange | None = None,
        keeps_shard: bool = False,
        block_ids: Tensor | None = None,
        feedback: BucketFeedback | None = None,
        is_in_update: bool | None = False,
        is_exact: bool = False,
    ) -> Future[Tensor]:
        """Sum `flat` (1-D, contiguous) in place over all ranks, soon. Returns at once.

        The future holds `finish(flat)`, computed where the last stage ran. `bucket_index` names the tensor in
        errors, `is_last` marks the end of a step: with it the order of everything so far is compared over ranks.
        `exchange`: what ranks that share the update do with `flat` instead of an all-reduce, see `node_exchange`.
        `keeps_shard`: of each chunk this rank gets its own of the sharers' equal shards alone; only with `two_level`.
        `block_ids` numbers the blocks of 256 elements for a codec (int32, on the device of `flat`); None: from zero on.
        `feedback`: the residuals of these blocks; None: the codec rounds by chance.
        `is_in_update`: it holds no gradients, and the step waits for it, as for an `exchange`; None: it does not wait.
        `is_exact`: between nodes, too, it travels in its own dtype.

        Where a stage fails on any rank, or ranks submit different tensors, die or come to a halt, on every rank the
        future of every tensor in flight raises one `RuntimeError` that names rank, bucket, stage, algorithm and cause,
        and so does every later call. On CUDA a future only orders streams, and the next call raises.

        With `adasum_numels`, the elements of each tensor in `flat`, it is summed inside nodes only, and its tensors are
        combined over nodes by Adasum (adasum.py).

        Raises:
            ValueError: if `flat` has another shape, or Adasum cannot combine it.
        """
        if flat.dim() != 1 or not flat.is_contiguous():
            raise ValueError(
                f"`flat` (of shape {tuple(flat.shape)}, strides {flat.stride()}) must be one-dimensional and "
                "contiguous: it is summed in place. Pass a bucket's buffer or `tensor.view(-1)`."
            )
        plan, traffic = self._planned(bucket_index, flat.numel(), flat.dtype, exchange, is_exact)
        bucket = InFlightBucket(
            flat=flat, plan=plan, traffic=traffic, finish=finish, is_last=is_last
        )
        bucket.is_in_update = (
            is_in_update if is_in_update is None else is_in_update or exchange is not None
        )
        bucket.is_coded = self.coder is not None and exchange is None and not is_exact
        new_job = self._jobs_of(bucket, block_ids, feedback) if bucket.is_coded else self._new_job
        if keeps_shard:
            bucket.num_owners = owners = len(self.topology.sharers(self.update_scope))
            bucket.traffic = traffic.without_gather(self.update_scope)
            new_job = partial(self._new_job, num_owners=owners)
        new_job = partial(self._new_job, dtype_across=None) if is_exact else new_job
        if self._on_cuda:
            self._carrier.look()  # type: ignore[union-attr]
        if adasum_numels:
            check_adasum_bucket(plan, self.topology, self.dtype_across_nodes)
            bucket.adasum_numels = adasum_numels
        with self._turn:
            with self._latch.lock:  # counts, queues and closing see submits in one order
                if self._latch.error or self._is_closed:
                    self._raise_as_unusable()
                self._carrier.accept(bucket, new_job, self._record(bucket))
                self._latch.in_flight[bucket] = (
                    None  # it fails or ends under this lock, so not before
                )
            return self._carrier.carry(bucket)  # without the lock: on CUDA it may report a failure

    def _jobs_of(
        self, bucket: InFlightBucket, block_ids: Tensor | None, feedback: BucketFeedback | None
    ) -> Callable[[Tensor], Job]:
        assert self.coder is not None
        flat = bucket.flat
        new_job = self._new_job
        blocks = Blocks.of(self.coder, bucket.flat, block_ids, feedback)
        self.coder.turn += int(bucket.is_last)  # a step may have several sums of all gradients

        def job(part: Tensor) -> Job:
            # The empty part is that of the checksum, which is exact: it travels as it is.
            begin = int(part.storage_offset() - flat.storage_offset())
            return new_job(part, blocks=blocks.since(begin) if part.numel() else None)

        return job

    def _record(self, bucket: InFlightBucket) -> int | None:
        # Returns the checksum of the order, of a step's last bucket. One with a new record gets `contents` to compare.
        reduction = (
            f", Adasum of {len(bucket.adasum_numels)} tensors" if bucket.adasum_numels else ""
        )
        record = self._order.add(bucket.plan, is_last=bucket.is_last, reduction=reduction)
        if self.topology.world_size == 1:
            return None
        is_checked = bucket.is_last and self.plan.check_order
        text = f"{self._order.recent[-1]}; all so far: {self._order.value:016x}"
        contents = f"order/{self._order.num_submitted}", text
        if record is not None:
            bucket.contents = contents
        elif self._on_cuda and is_checked and self._order.is_step_to_compare:
            bucket.contents_of_step = contents
        return self._order.value if is_checked else None

    def planned(self, bucket_index: int, numel: int, dtype: torch.dtype) -> BucketPlan:
        """Return how a tensor would be carried."""
        return self._planned(bucket_index, numel, dtype)[0]

    def _planned(
        self,
        index: int,
        numel: int,
        dtype: torch.dtype,
        exchange: Exchange | None = None,
        is_exact: bool = False,
    ) -> tuple[BucketPlan, Traffic]:
        # Decided once: it runs in every step, in the thread of backward.
        key = (index, numel, dtype, exchange, is_exact)
        if key not in self._buckets:
            num_bytes = numel * dtype.itemsize
            topology = self.topology
            narrow = None if is_exact else self.dtype_across_nodes
            name = str(dtype).removeprefix("torch.")
            plan = self.plan.bucket(
                index=index,
                numel=numel,
                dtype=name,
                num_bytes=num_bytes,
                topology=topology,
                on_cuda=self._on_cuda,
            )
            if exchange is not None:
                plan = replace(plan, algorithm=exchange, num_chunks=1)  # type: ignore[arg-type]
            is_coded = isinstance(narrow, Codec)
            if isinstance(narrow, Codec):
                across = narrow.message_bytes(numel)
            else:
                across = num_bytes if narrow is None else min(num_bytes, numel * narrow.itemsize)
            traffic = traffic_of(
                plan.algorithm, topology, num_bytes, num_bytes_across=across, is_ring=not is_coded
            )
            self._buckets[key] = plan, traffic
        return self._buckets[key]

    @property
    def buckets(self) -> tuple[BucketPlan, ...]:
        """Every bucket of gradients that was submitted so far, by contents."""
        plans = (plan for plan, _ in self._buckets.values() if not is_exchange(plan.algorithm))
        return tuple(sorted(plans, key=lambda plan: (plan.index, plan.numel, plan.dtype)))

    @property
    def failure(self) -> str:
        """The error of all ranks, empty while there is none."""
        return self._latch.error

    def raise_if_failed(self) -> None:
        """Raise the error of all ranks, if any. Never waits: on CUDA what the device has yet to do is not known."""
        if self._on_cuda:
            self._carrier.look()  # type: ignore[union-attr]
        self._latch.raise_if_tripped()

    def abort(self, reason: str) -> None:
        """Fail on every rank with `reason`, unless failed or closed: for errors of the caller on this rank."""
        with self._latch.lock:
            if self._latch.error or self._is_closed:
                return
        self._latch.trip(
            self._watchdog.raise_alarm(f"comm: rank {self.topology.rank} gave up: {reason}")
        )

    def explain(self, error: BaseException) -> str:
        """Say which rank is the cause of a foreign collective that failed here, then `error`. Fail on every rank."""
        if not self._latch.error and not self._is_closed:
            self._latch.waited = place_of_error(error)
            noticed = f"rank {self.topology.rank} failed in a collective that averages no gradients: {short(error)}"
            self._latch.trip(self._watchdog.collect_status(noticed), error)
        failure = self.failure
        return (
            str(error)
            if failure in str(error)
            else f"{failure} Seen here as {type(error).__name__}: {error}"
        )

    def close(self) -> list[str]:
        """End the threads, after the buckets in flight if all is well, and free the groups.

        Return stages that would not end.
        """
        # After a failure it waits `FAILED_CLOSE_LIMIT_S` for stages to come back; one still inside a collective then is
        # left there with its group, and warned of. On CUDA it waits for nothing: all communicators are aborted.
        with self._latch.lock:
            if self._is_closed:
                return []
            self._is_closed = True
        healthy_until_s = monotonic() + self._timeout.total_seconds() + FAILED_CLOSE_LIMIT_S

        # From a failure on the short limit counts.
        def limit_s() -> float:
            if self._latch.error and self._close_limit_s is None:
                self._close_limit_s = monotonic() + FAILED_CLOSE_LIMIT_S
            return (
                healthy_until_s if self._close_limit_s is None else self._close_limit_s
            ) - monotonic()

        stuck = self._carrier.end(
            limit_s=limit_s
        )  # before leaving: until then others can ask for our status
        self._watchdog.leave()
        if stuck:
            warnings.warn(
                f"comm: rank {self.topology.rank} closed while stages {stuck} were still waiting for other ranks: "
                "their process groups are left as they are",
                stacklevel=2,
            )
        return stuck

    def _raise_as_unusable(self) -> None:
        self._latch.raise_if_tripped()
        raise RuntimeError(
            "the engine is closed: a bucket was handed over after the strategy's teardown"
        )
