"""Microbenchmarks of messages and all-reduces between the current ranks.

`calibrate` fits a cluster description to the measured times.

    ping        half a round trip between two ranks; the receiver is ready, so that Gloo needs no handshake
    exchange    two ranks send each other everything at once, and add: with Gloo's handshake
    flows       some ranks of every node send to the next node at the same time, to see whether one flow fills the link
    add         all ranks add two buffers at the same time
    codec       all ranks encode float32 at the same time, and decode and add two messages, as for two nodes
    sum         an all-reduce by each of our algorithms, or the backend's own: `gloo_ring` or `nccl`; `two_level_int8`
                is `two_level` through a codec

`inside` is between ranks 0 and 1 of the first node, `across` between the first ranks of the first
two nodes. Cases alternate in rounds. A sample repeats a call until it takes `min_sample_s`, and the
time of the slowest rank counts.

Collective: every rank of the world must call `measure`. Every wait is limited by the groups'
timeouts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.checks import require_number, require_positive, require_whole
from lightning_hybrid.comm.engine.engine import CommEngine
from lightning_hybrid.comm.plan import KIB, MIB, Algorithm, CommPlan
from lightning_hybrid.comm.topology import Topology
from lightning_hybrid.planning.calibration.codec_benchmark import (
    CODECS,
    CODED_SUMS,
    codec_call,
    coded_engines,
)

Kind = Literal["ping", "exchange", "flows", "add", "codec", "sum"]

MESSAGE_BYTES = (4, 256, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
EXCHANGE_BYTES = (4, 256, 4 * KIB)
SUM_BYTES = (4 * KIB, 64 * KIB, 512 * KIB, *(2**power * MIB for power in range(11)))
MOST_BYTES_ON_CPU = 64 * MIB  # for an all-reduce, because ranks may share a machine's memory
ALGORITHMS: tuple[Algorithm, ...] = ("flat", "parallel_flat", "hierarchical", "two_level")
BACKEND_NAMES = {"cpu": "gloo_ring", "cuda": "nccl"}
ADD_BYTES = 4 * MIB

# Fraction of the time limit that one call may take. Larger sizes are left out, so that each is measured repeatedly.
CALL_SHARE = 1 / 100
# Number of rounds that must fit into the limit. The costliest cases are left out until they do.
LEAST_ROUNDS = 7
MOST_CALLS = 200


@dataclass(frozen=True, kw_only=True, order=True)
class Microbenchmark:
    """Single benchmark case, defined by its kind, its variant and a number of bytes.

    `what` is the variant: the level (`ping`, `exchange`), the number of flows (`flows`), the dtype
    (`add`), the codec (`codec`) or the algorithm (`sum`).
    """

    kind: Kind
    what: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Measured times per call in seconds, for each benchmark case.

    The samples are in the order of measurement and the same on every rank. `took_s` is the total
    time.
    """

    times_s: dict[Microbenchmark, list[float]]
    took_s: float

    def of(self, kind: Kind, what: str) -> dict[int, list[float]]:
        """Return the measured times of one benchmark kind and variant, keyed by size in bytes."""
        return {
            case.num_bytes: times_s
            for case, times_s in sorted(self.times_s.items())
            if (case.kind, case.what) == (kind, what)
        }

    def whats(self, kind: Kind) -> list[str]:
        """Return the variants that were measured for one kind of benchmark, in the order of measurement."""
        return list(dict.fromkeys(case.what for case in self.times_s if case.kind == kind))


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Settings of the microbenchmarks.

    Args:
        limit_s: Total time in seconds. No call begins after it.
        num_rounds: Number of samples of each case, if there is time.
        min_sample_s: Minimum time of a sample in seconds. Shorter calls are repeated.
        max_bytes: Size of the largest message or all-reduce.
        dtype: Name of the torch dtype of the all-reduces, which is that of gradients on the wire.
        algorithms: Algorithms to time, in addition to the backend's own.
        timeout_s: Limit of every wait for another rank, including the first one, in which each rank imports torch.
    """

    limit_s: float = 120.0
    num_rounds: int = 15
    min_sample_s: float = 0.01
    max_bytes: int = 1024 * MIB
    dtype: str = "float16"
    algorithms: Sequence[Algorithm] = ALGORITHMS
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        require_positive(
            "limit_s",
            self.limit_s,
            "the measurement ends after this number of seconds. Set limit_s=120",
        )
        require_number(
            "timeout_s",
            self.timeout_s,
            "a rank waits for other ranks at most this number of seconds. Set timeout_s=300",
            above=True,
        )
        require_number(
            "min_sample_s",
            self.min_sample_s,
            "a sample takes at least this number of seconds. Set min_sample_s=0.01",
            above=True,
        )
        require_whole(
            "num_rounds",
            self.num_rounds,
            "confidence intervals need several samples of each case",
            least=3,
        )
        require_whole(
            "max_bytes", self.max_bytes, "fitting a line needs several sizes", least=16 * KIB
        )
        if self.dtype not in ("float16", "bfloat16", "float32"):
            raise ValueError(
                f"`dtype` (={self.dtype!r}) must be float16, bfloat16 or float32, because all-reduces are timed in "
                "this dtype. Set one of these."
            )
        for name in self.algorithms:
            CommPlan(algorithm=name)  # raises if the algorithm is unknown

    def cases(self, topology: Topology, backend: str) -> list[Microbenchmark]:
        """Return all benchmark cases for this topology, in ascending order of bytes."""
        messages = [size for size in MESSAGE_BYTES if size <= self.max_bytes]
        places = [
            level
            for level, present in zip(("inside", "across"), _levels(topology), strict=True)
            if present
        ]
        cases = [
            Microbenchmark(kind="add", what=name, num_bytes=ADD_BYTES)
            for name in ("float32", "float16")
        ]
        cases += [
            Microbenchmark(kind="ping", what=level, num_bytes=size)
            for level in places
            for size in messages
        ]
        cases += [
            Microbenchmark(kind="exchange", what=level, num_bytes=size)
            for level in places
            for size in EXCHANGE_BYTES
        ]
        if "across" in places:
            flows = _powers(topology.ranks_per_node or 1)
            cases += [
                Microbenchmark(kind="flows", what=str(n), num_bytes=size)
                for n in flows
                for size in messages[-4:]
            ]
            cases += [
                Microbenchmark(kind="codec", what=name, num_bytes=ADD_BYTES) for name in CODECS
            ]
            coded = [(what, size) for what, size in CODED_SUMS if size <= self.max_bytes]
            cases += [Microbenchmark(kind="sum", what=what, num_bytes=size) for what, size in coded]
        most = self.max_bytes if backend == "nccl" else min(self.max_bytes, MOST_BYTES_ON_CPU)
        sizes = [size for size in SUM_BYTES if size <= most]
        names = (backend, *self.algorithms)
        cases += [
            Microbenchmark(kind="sum", what=name, num_bytes=size)
            for name in names
            for size in sizes
        ]
        return sorted(cases, key=lambda case: case.num_bytes)


def measure(asked: Measurement, topology: Topology, device: torch.device) -> Measurements:
    """Measure all benchmark cases in up to `num_rounds` rounds, within the time limit.

    Collective: every rank of the world must call it with the same arguments. Ranks compare times
    over the default group.

    Raises:
        ValueError: Nodes differ in size, or there is one rank.
    """
    validate(topology)
    began_s = time.perf_counter()
    # A separate group, because its timeout limits every wait here, and it carries no messages of the user.
    group: Any = dist.new_group(
        timeout=timedelta(seconds=asked.timeout_s), group_desc="lightning_hybrid.probes"
    )
    try:
        with _engines(asked, topology, device) as engines:
            table = _Table(
                asked=asked,
                topology=topology,
                device=device,
                group=group,
                engines=engines,
                began_s=began_s,
            )
            return table.run()
    finally:
        dist.destroy_process_group(group)


def validate(topology: Topology) -> None:
    """Raise `ValueError` if the topology has only one rank, or nodes with different numbers of ranks."""
    if topology.world_size == 1:
        raise ValueError(
            "`world_size` (=1) must be 2 or more, because links between ranks are measured. Set world.devices=<ranks "
            "of a node>, or start torchrun on several nodes."
        )
    if topology.ranks_per_node is None:
        sizes = ", ".join(str(len(node)) for node in topology.nodes)
        raise ValueError(
            f"`nodes` (of {sizes} ranks) must have the same number of ranks on every node, because one cluster "
            "description covers all nodes. Set `--nproc-per-node` of torchrun or `--ntasks-per-node` of SLURM to "
            "the same number on every node."
        )


@dataclass(kw_only=True)
class _Table:
    asked: Measurement
    topology: Topology
    device: torch.device
    group: dist.ProcessGroup
    engines: dict[str, CommEngine]
    began_s: float
    times_s: dict[Microbenchmark, list[float]] = field(default_factory=dict)
    elapsed_s: float = 0.0

    def run(self) -> Measurements:
        calls = self._warm_up()
        order = list(calls)
        for turn in range(self.asked.num_rounds):
            # Use another permutation in each round, the same on every rank.
            shuffled = torch.randperm(
                len(order), generator=torch.Generator().manual_seed(turn)
            ).tolist()
            # Cases alternate, so that a slow minute does not affect only one case.
            for case in (order[index] for index in shuffled):
                last_s = calls[case] * (
                    self.times_s[case][-1] if case in self.times_s else self.asked.min_sample_s
                )
                if self.elapsed_s + 2 * last_s > self.asked.limit_s:
                    continue
                self.times_s.setdefault(case, []).append(self._sample(case, calls[case]))
        # A confidence interval needs at least three samples.
        enough = {case: times_s for case, times_s in self.times_s.items() if len(times_s) >= 3}
        return Measurements(times_s=enough, took_s=self.elapsed_s)

    def _warm_up(self) -> dict[Microbenchmark, int]:
        # Run every case once, which also connects all pairs. Return the calls per sample of cases that are fast enough.
        limit_s = self.asked.limit_s * CALL_SHARE
        sample_s: dict[Microbenchmark, float] = {}
        calls: dict[Microbenchmark, int] = {}
        slow: set[tuple[str, str]] = set()
        for case in self.asked.cases(self.topology, BACKEND_NAMES[self.device.type]):
            # The smallest sizes come first. If a size is too slow, larger sizes of the same kind are not tried.
            if (case.kind, case.what) in slow or self.elapsed_s > self.asked.limit_s / 3:
                continue
            call_s = self._sample(case, 1)
            if call_s > limit_s:
                slow.add((case.kind, case.what))
                continue
            calls[case] = max(1, min(MOST_CALLS, int(self.asked.min_sample_s / call_s)))
            sample_s[case] = (calls[case] + 1) * call_s * (2 if case.kind == "ping" else 1)
        while (
            sum(sample_s.values()) * LEAST_ROUNDS > self.asked.limit_s - self.elapsed_s
            and len(sample_s) > 1
        ):
            costliest = max(sample_s, key=lambda case: sample_s[case])
            del sample_s[costliest], calls[costliest]
        return calls

    def _sample(self, case: Microbenchmark, num_calls: int) -> float:
        call = self._call_of(case)
        taken_s = 0.0
        if call is not None:
            # This call is not counted. It makes the ranks start together.
            call(1)
            self._synchronize()
            began_s = time.perf_counter()
            call(num_calls)
            self._synchronize()
            taken_s = (time.perf_counter() - began_s) / num_calls
        # Every rank uses the slowest rank's times, so that all continue with the same cases.
        slowest = torch.tensor(
            [taken_s, time.perf_counter() - self.began_s], dtype=torch.float64, device=self.device
        )
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        taken_s, self.elapsed_s = slowest.tolist()
        return taken_s / 2 if case.kind == "ping" else taken_s

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _call_of(self, case: Microbenchmark) -> Callable[[int], None] | None:
        if case.kind == "add":
            first = self._values(case, case.what)
            second = self._values(case, case.what)
            return self._repeated(lambda: first.add_(second))
        if case.kind == "codec":
            return self._repeated(codec_call(case.what, case.num_bytes, self.device))
        if case.kind == "sum":
            return self._repeated(self._summer(case))
        if case.kind == "flows":
            return self._flow(case)
        pair = (
            self.topology.nodes[0][:2]
            if case.what == "inside"
            else [node[0] for node in self.topology.nodes[:2]]
        )
        if self.topology.rank not in pair:
            return None
        peer = next(rank for rank in pair if rank != self.topology.rank)
        if case.kind == "exchange":
            return self._repeated(self._exchanger(case, peer))
        return _ping(self.group, peer, self._bytes(case), leads=self.topology.rank == pair[0])

    def _repeated(self, once: Callable[[], object]) -> Callable[[int], None]:
        def call(num_calls: int) -> None:
            for _ in range(num_calls):
                once()

        return call

    def _bytes(self, case: Microbenchmark) -> Tensor:
        return torch.zeros(case.num_bytes, dtype=torch.uint8, device=self.device)

    def _values(self, case: Microbenchmark, dtype: str) -> Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        # Sums of zeros never overflow.
        return torch.zeros(max(1, case.num_bytes // kind.itemsize), dtype=kind, device=self.device)

    def _summer(self, case: Microbenchmark) -> Callable[[], object]:
        flat = self._values(case, self.asked.dtype)
        if case.what not in self.engines:
            return lambda: dist.all_reduce(flat, group=self.group)
        engine = self.engines[case.what]
        if engine.coder is None:
            return lambda: engine.submit(flat, bucket_index=0, is_last=True).wait()
        return lambda: engine.submit(flat.fill_(1.0), bucket_index=0, is_last=True).wait()

    def _exchanger(self, case: Microbenchmark, peer: int) -> Callable[[], object]:
        out, back, total = (self._values(case, self.asked.dtype) for _ in range(3))

        def exchange() -> None:
            _swap(self.group, out, peer, back, peer)
            torch.add(out, back, out=total)

        return exchange

    def _flow(self, case: Microbenchmark) -> Callable[[int], None] | None:
        # Send to the next node and receive from the previous one, on some ranks of each. The bytes are those of all
        # flows.
        num_flows = int(case.what)
        local_rank = self.topology.local_rank
        if local_rank >= num_flows:
            return None
        nodes = self.topology.nodes
        here = self.topology.nodes.index(self.topology.node)
        after = nodes[(here + 1) % len(nodes)][local_rank]
        before = nodes[here - 1][local_rank]
        out, back = (
            torch.zeros(max(1, case.num_bytes // num_flows), dtype=torch.uint8, device=self.device)
            for _ in "ab"
        )
        return self._repeated(lambda: _swap(self.group, out, after, back, before))


def _swap(group: dist.ProcessGroup, out: Tensor, to: int, back: Tensor, source: int) -> None:
    # Send and receive at the same time, because NCCL would run two single calls one after the other.
    if out.is_cuda:
        ops = [dist.P2POp(dist.irecv, back, source, group), dist.P2POp(dist.isend, out, to, group)]
        works = dist.batch_isend_irecv(ops)
    else:
        works = [group.recv([back], source, 0), group.send([out], to, 0)]
    for work in works:
        work.wait()


def _ping(
    group: dist.ProcessGroup, peer: int, buffer: Tensor, *, leads: bool
) -> Callable[[int], None]:
    # Over Gloo each rank posts its receive before the other sends, so that no send waits for a handshake.
    arrived = torch.zeros_like(buffer)

    def on_cpu(num_calls: int) -> None:
        arrival = group.recv([arrived], peer, 0)
        for turn in range(num_calls):
            if leads:
                group.send([buffer], peer, 0).wait()
            arrival.wait()
            if turn + 1 < num_calls:
                arrival = group.recv([arrived], peer, 0)
            if not leads:
                group.send([buffer], peer, 0).wait()

    def on_cuda(num_calls: int) -> None:
        for _ in range(num_calls):
            for sends in (leads, not leads):
                (group.send if sends else group.recv)([buffer], peer, 0).wait()

    return on_cuda if buffer.is_cuda else on_cpu


def _levels(topology: Topology) -> tuple[bool, bool]:
    return topology.world_size > topology.num_nodes, topology.num_nodes > 1


def _powers(most: int) -> list[int]:
    """Return the powers of two below `most`, and `most` itself.

    >>> _powers(6), _powers(1)
    ([1, 2, 4, 6], [1])
    """
    return sorted({*(2**k for k in range(most.bit_length()) if 2**k <= most), most})


@contextmanager
def _engines(
    asked: Measurement, topology: Topology, device: torch.device
) -> Iterator[dict[str, CommEngine]]:
    engines: dict[str, CommEngine] = {}
    ask: Any = {
        "topology": topology,
        "timeout": timedelta(seconds=asked.timeout_s),
        "device": device,
    }
    try:
        for name in asked.algorithms:
            engines[name] = CommEngine(plan=CommPlan(algorithm=name), **ask)
        if topology.num_nodes > 1:
            engines |= coded_engines(**ask)
        yield engines
    finally:
        for engine in engines.values():
            engine.close()
