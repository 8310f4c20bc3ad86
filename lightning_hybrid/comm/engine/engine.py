"""Asynchronous all-reduce engine that overlaps the stages of successive buckets.

    submit(bucket 0), submit(bucket 1), ...                                 caller: enqueues and returns
        -> [reduce]     bucket 2        one queue, one thread
        -> [ring]       bucket 1        and one process group                stage_threads.py
        -> [broadcast]  bucket 0        for every stage and column
        -> finish -> future

Large buckets are split into chunks (in_flight.py). The engine checks that ranks agree: on the plan when it is created,
on a bucket's contents when it is new, and on the order of all buckets once per step (order_check.py). A failure on one
rank raises the same error on all ranks (health/watchdog.py). On CUDA, torch's all-reduce or side streams replace the
threads (cuda_carrier.py).
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
from lightning_hybrid.comm.codec.codec import Codec, Coder
from lightning_hybrid.comm.codec.encoder import Blocks
from lightning_hybrid.comm.codec.error_feedback import BucketFeedback
from lightning_hybrid.comm.collective_names import Exchange, is_exchange
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

# Seconds for which `close` waits, after a failure, for stages that may hang until their group's timeout.
FAILED_CLOSE_LIMIT_S = 5.0

# Fraction of the timeout after which a bucket in flight on CUDA is considered failed. It is below 1, so that our error
# is raised before torch's watchdog raises its own error.
GIVE_UP_AT = 0.9


class CommEngine:
    """Asynchronous all-reduce engine for flat tensors such as gradient buckets.

    Collective: every rank of WORLD must construct it, in the same order and with the same plan. Every rank must submit
    tensors of the same sizes in the same order. If the plan does not fit the topology, rank 0 warns once.

    Args:
        topology: Topology, seen from this rank.
        plan: Plan that chooses the algorithm and the number of chunks of each tensor by its size.
        timeout: Time limit of every collective. A rank that waits longer for other ranks fails.
        device: Device of the tensors. On CUDA, they are reduced by torch's all-reduce or on side streams, otherwise by
            threads.
        trace: Trace that counts the tensors. If None, a new trace is created.
        dtype_across_nodes: Dtype of reductions between nodes, if it is narrower than the tensor's dtype, or their
            codec. Inside the node, a tensor keeps its dtype, unless `flat` or `parallel_flat` reduces it in one stage
            over all ranks. If None, tensors keep their dtype everywhere.
        shares_update: Ranks that share the optimizer update, whose collectives `submit` can run: `"node"` or
            `"world"`. None if the update is not shared.
        replicas: All sets of ranks, if each set has its own engine. `topology` is then that of this rank's set. None
            if all ranks average together.
        group: Process group of this rank's set. None means WORLD.
        compared: Further settings that must be equal on all ranks, by name.
        num_terms: Number of gradients that are averaged, by which the hook divides. The default is one per rank. The
            attribute may be changed between backward passes, to the same number on all ranks. If gradients have
            weights, it need not be an integer.

    Attributes:
        order_note: Description of the current step's gradients that is compared with the order of buckets. Ranks with
            different descriptions raise an error.

    Raises:
        ValueError: The plan or the topology differs between ranks. The error is raised on every rank.
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
        self.num_terms: float = num_terms or topology.world_size
        self.order_note = ""
        self.update_scope: Literal["node", "world"] = shares_update or "node"
        self._exchange_scopes: set[str] = set()
        if shares_update is not None:
            self._exchange_scopes.add(shares_update)
        if getattr(dtype_across_nodes, "error_feedback", False):
            self._exchange_scopes.add("node")
        self._timeout = timeout
        self._is_closed = False
        # Held while a bucket is submitted, so that buckets are enqueued in the recorded order.
        self._turn = threading.RLock()
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
        topology = self.topology
        on_cuda = self._on_cuda
        dtype = self.dtype_across_nodes

        # Plans are compared before any group is created, because ranks with different plans would create different
        # groups and wait for each other.
        token = ""
        hosts: list[str] = []
        addresses: list[list[str]] = []
        if topology.world_size > 1:
            token, hosts, addresses = compare_plans(
                self.plan, topology, self.device, dtype, group, compared
            )
        self._watchdog = self._new_watchdog(token, hosts, addresses)
        dtype_across = None
        if not isinstance(dtype, Codec):
            dtype_across = dtype
        self._new_job = partial(
            Job, topology=topology, dtype_across=dtype_across, by_backend=on_cuda
        )
        self._groups = groups or CommGroups(
            topology=replicas or topology, timeout=self._timeout, share=on_cuda
        )
        self._carrier = self._new_carrier()
        self._prepare()
        # The watchdog starts last, because creating groups needs the store, whose client serves one thread at a time.
        self._watchdog.start()

    def _new_watchdog(self, token: str, hosts: list[str], addresses: list[list[str]]) -> Any:
        world_size = self.topology.world_size
        store: dist.Store = dist.HashStore()
        if world_size > 1:
            store = private_store(f"lightning_hybrid/{token}")
        give_up_after_s = None
        if self._on_cuda:
            give_up_after_s = GIVE_UP_AT * self._timeout.total_seconds()
        return Watchdog(
            store=store,
            rank=self.topology.rank,
            world_size=world_size,
            watched=self._latch,
            give_up_after_s=give_up_after_s,
            hosts=hosts,
            addresses=addresses,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> CommEngine:
        # Threads and process groups cannot be copied. If user code copies the trainer, for example, the copies share
        # the engine.
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
                f"`between_nodes.dtype` (='int{codec.bits}') has no effect, because all ranks are on one node, "
                "where gradients are summed in their own dtype. Leave `between_nodes.dtype` out, or use several "
                "nodes.",
                stacklevel=3,
            )
        return None

    @property
    def _on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def _prepare(self) -> None:
        columns: dict[Any, int] = dict(self.plan.columns(self.topology, on_cuda=self._on_cuda))
        for name in EXCHANGES:
            if name.partition("_")[0] in self._exchange_scopes:
                columns[name] = 1
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
        """Start an in-place all-reduce of a flat tensor over all ranks, and return a future of the sum.

        If a stage fails on any rank, or if ranks submit different tensors, exit or hang, all ranks raise the same
        `RuntimeError`. It is raised by the futures of all tensors in flight, and by every later call. The error names
        the rank, bucket, stage, algorithm and cause. On CUDA, a future only orders streams, so the next call raises the
        error.

        Args:
            flat: Tensor to reduce, 1-D and contiguous.
            bucket_index: Index that names the tensor in errors.
            is_last: Whether this is the last tensor of a step. If so, ranks compare the order of all tensors.
            adasum_numels: Number of elements of each tensor in `flat`. If given, `flat` is summed only inside nodes,
                and Adasum combines its tensors over nodes.
            finish: Function applied to the sum after the last stage. Its result is the future's value.
            exchange: Collective of a sharded update that replaces the all-reduce (see `node_exchange`), or None.
            keeps_shard: Whether this rank gets only its own shard of each chunk. Requires `two_level`.
            block_ids: Number of each block of 256 elements for a codec, int32, on the device of `flat`. If None, blocks
                are numbered from zero.
            feedback: Residuals of these blocks. If None, the codec rounds stochastically.
            is_in_update: True if `flat` holds no gradients and the optimizer step waits for the result, which an
                `exchange` implies. None if it holds no gradients and the step does not wait.
            is_exact: Whether `flat` keeps its dtype between nodes as well.

        Raises:
            ValueError: `flat` is not 1-D and contiguous, or Adasum cannot combine it.
        """
        if flat.dim() != 1 or not flat.is_contiguous():
            raise ValueError(
                f"`flat` (of shape {tuple(flat.shape)}, strides {flat.stride()}) must be one-dimensional and "
                "contiguous, because the tensor is all-reduced in place. Pass a bucket's buffer or "
                "`tensor.view(-1)`."
            )
        plan, traffic = self._planned(bucket_index, flat.numel(), flat.dtype, exchange, is_exact)
        bucket = InFlightBucket(
            flat=flat, plan=plan, traffic=traffic, finish=finish, is_last=is_last
        )
        bucket.is_in_update = is_in_update
        if is_in_update is not None and exchange is not None:
            bucket.is_in_update = True
        bucket.is_coded = self.coder is not None and exchange is None and not is_exact
        new_job: Callable[[Tensor], Job] = self._new_job
        if bucket.is_coded:
            new_job = self._new_coded_job(bucket, block_ids, feedback)
        if keeps_shard:
            bucket.num_owners = len(self.topology.sharers(self.update_scope))
            bucket.traffic = traffic.without_gather(self.update_scope)
            new_job = partial(self._new_job, num_owners=bucket.num_owners)
        if is_exact:
            new_job = partial(self._new_job, dtype_across=None)
        if self._on_cuda:
            self._carrier.look()  # type: ignore[union-attr]
        if adasum_numels:
            check_adasum_bucket(plan, self.topology, self.dtype_across_nodes)
            bucket.adasum_numels = adasum_numels
        with self._turn:
            # With the lock held, counters, queues and `close` see submissions in the same order.
            with self._latch.lock:
                if self._latch.error or self._is_closed:
                    self._raise_as_unusable()
                self._carrier.accept(bucket, new_job, self._record(bucket))
                self._latch.in_flight[bucket] = None
            # The lock must not be held here, because on CUDA the carrier may report a failure.
            return self._carrier.carry(bucket)

    def _new_coded_job(
        self, bucket: InFlightBucket, block_ids: Tensor | None, feedback: BucketFeedback | None
    ) -> Callable[[Tensor], Job]:
        """Return a function that creates the all-reduce job of a chunk from the chunk's elements."""
        assert self.coder is not None
        flat = bucket.flat
        new_job = self._new_job
        all_blocks = Blocks.of(self.coder, bucket.flat, block_ids, feedback)
        # A step may have several reductions of all gradients.
        self.coder.turn += int(bucket.is_last)

        def job(part: Tensor) -> Job:
            # The checksum's chunk has no elements of the bucket. It is not encoded, because it must be exact.
            blocks = None
            if part.numel() > 0:
                begin = int(part.storage_offset() - flat.storage_offset())
                blocks = all_blocks.since(begin)
            return new_job(part, blocks=blocks)

        return job

    def _record(self, bucket: InFlightBucket) -> int | None:
        """Record the submission of a bucket, and choose how ranks check that all of them submit the same bucket.

        Returns:
            The checksum of the order if this is a step's last bucket, otherwise None.
        """
        reduction = ""
        if bucket.adasum_numels:
            reduction = f", Adasum of {len(bucket.adasum_numels)} tensors"
        if bucket.is_in_update is False:
            reduction += self.order_note
        record = self._order.add(bucket.plan, is_last=bucket.is_last, reduction=reduction)
        if self.topology.world_size == 1:
            return None
        is_checked = bucket.is_last and self.plan.check_order
        text = f"{self._order.recent[-1]}; all so far: {self._order.value:016x}"
        contents = (f"order/{self._order.num_submitted}", text)
        if record is not None:
            bucket.contents = contents
        elif self._on_cuda and is_checked and self._order.is_step_to_compare:
            bucket.contents_of_step = contents
        if is_checked:
            return self._order.value
        return None

    def planned(self, bucket_index: int, numel: int, dtype: torch.dtype) -> BucketPlan:
        """Return the communication plan for a gradient bucket of a given size and dtype."""
        return self._planned(bucket_index, numel, dtype)[0]

    def _planned(
        self,
        index: int,
        numel: int,
        dtype: torch.dtype,
        exchange: Exchange | None = None,
        is_exact: bool = False,
    ) -> tuple[BucketPlan, Traffic]:
        # Cached, because this runs in every step, in the thread of backward.
        key = (index, numel, dtype, exchange, is_exact)
        if key not in self._buckets:
            num_bytes = numel * dtype.itemsize
            topology = self.topology
            dtype_across = None
            if not is_exact:
                dtype_across = self.dtype_across_nodes
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
            is_coded = isinstance(dtype_across, Codec)
            num_bytes_across = num_bytes
            if isinstance(dtype_across, Codec):
                num_bytes_across = dtype_across.message_bytes(numel)
            elif dtype_across is not None:
                num_bytes_across = min(num_bytes, numel * dtype_across.itemsize)
            traffic = traffic_of(
                plan.algorithm,
                topology,
                num_bytes,
                num_bytes_across=num_bytes_across,
                is_ring=not is_coded,
            )
            self._buckets[key] = (plan, traffic)
        return self._buckets[key]

    @property
    def buckets(self) -> tuple[BucketPlan, ...]:
        """Communication plans of all distinct gradient buckets submitted so far."""
        plans = (plan for plan, _ in self._buckets.values() if not is_exchange(plan.algorithm))
        return tuple(sorted(plans, key=lambda plan: (plan.index, plan.numel, plan.dtype)))

    @property
    def failure(self) -> str:
        """Error message of the failure that all ranks raise, or an empty string if there was none."""
        return self._latch.error

    def raise_if_failed(self) -> None:
        """Raise the error shared by all ranks if communication has failed on any rank.

        The call never waits. On CUDA, it therefore does not detect failures in work that the device has not reached.
        """
        if self._on_cuda:
            self._carrier.look()  # type: ignore[union-attr]
        self._latch.raise_if_tripped()

    def abort(self, reason: str) -> None:
        """Make communication fail on every rank, because an error has occurred on this rank.

        If the engine has already failed or is closed, nothing happens.
        """
        with self._latch.lock:
            if self._latch.error or self._is_closed:
                return
        self._latch.trip(
            self._watchdog.raise_alarm(f"comm: rank {self.topology.rank} gave up: {reason}")
        )

    def explain(self, error: BaseException) -> str:
        """Diagnose a failed collective that the engine did not run, and return a message that names the rank at fault.

        The engine then fails on every rank.

        Args:
            error: Error of the collective, such as one of Lightning's or the user's.
        """
        if not self._latch.error and not self._is_closed:
            self._latch.waited = place_of_error(error)
            noticed = f"rank {self.topology.rank} failed in a collective other than gradient averaging: {short(error)}"
            self._latch.trip(self._watchdog.collect_status(noticed), error)
        failure = self.failure
        if failure in str(error):
            return str(error)
        return f"{failure} Seen here as {type(error).__name__}: {error}"

    def close(self) -> list[str]:
        """Shut down the engine, and return the names of stages that did not stop in time.

        Without a failure, the buckets in flight are finished first. After a failure, stages have
        `FAILED_CLOSE_LIMIT_S` seconds to return. A stage that is still inside a collective after this time keeps its
        group, and a warning names the stage. On CUDA, the engine does not wait after a failure, because all
        communicators are aborted.
        """
        with self._latch.lock:
            if self._is_closed:
                return []
            self._is_closed = True
        healthy_until_s = monotonic() + self._timeout.total_seconds() + FAILED_CLOSE_LIMIT_S

        def limit_s() -> float:
            # A failure may happen at any time, and starts the shorter time limit.
            if self._latch.error and self._close_limit_s is None:
                self._close_limit_s = monotonic() + FAILED_CLOSE_LIMIT_S
            if self._close_limit_s is not None:
                return self._close_limit_s - monotonic()
            return healthy_until_s - monotonic()

        # The watchdog is stopped last, so that other ranks can ask for this rank's status until then.
        stuck = self._carrier.end(limit_s=limit_s)
        self._watchdog.leave()
        if stuck:
            warnings.warn(
                f"comm: rank {self.topology.rank} closed its communication engine while the all-reduce stages "
                f"{stuck} were still waiting for other ranks. The process groups of these stages stay open until this "
                "process exits.",
                stacklevel=2,
            )
        return stuck

    def _raise_as_unusable(self) -> None:
        self._latch.raise_if_tripped()
        raise RuntimeError(
            "Gradients cannot be all-reduced after the strategy was torn down, because the communication engine "
            "is closed. Run backward only during training."
        )
