"""Time model of NCCL's collectives, based on the model that NCCL uses to choose its algorithms.

    time = launch + base latency + hops * latency per hop + bytes / bandwidth + filling

The constants come from NCCL's source, see `nccl_tables`. LL sends a flag with every 4 bytes, LL128 with every 120, and
Simple waits for whole chunks. Between nodes, the bandwidth is that of the links, or that of the channels if it is
lower.

    ring        2 (P - 1) hops, of which 2 (N - 1) between nodes        2 (P - 1) / P S through the slowest link
    tree        2 ((k - 1) + log2 N) hops                               2 S; between two nodes S
    nvls        one hop through the switch of the node                  (1 + 1 / k) S
    nvls_tree   one hop and 2 log2 N between nodes                      2 S between nodes; between two S

`filling` is not in NCCL's model. On each edge up and down a tree, a round of chunks passes before the last edge is
busy. That takes 2 log2 N x (channels x chunk) / rate of a node, and likewise inside nodes. NCCL's choice ignores it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_hybrid.checks import require_number, require_share, require_whole
from lightning_hybrid.planning.model import nccl_tables as tables
from lightning_hybrid.planning.model.cost import Cost, Link
from lightning_hybrid.planning.model.nccl_tables import US, Fabric, Generation, NcclJob, Plugin

NcclAlgorithm = Literal["ring", "tree", "nvls", "nvls_tree"]
Protocol = Literal["ll", "ll128", "simple"]

SHARE_OF_PROTOCOL = (0.5, 0.92, 1.0)
SHARE_OF_TREE = 0.92
SHARE_OF_PROTOCOL_OF_TREE = (1 / 3.8, 120 / 128, 1.0)
# Payload as a fraction of the line rate: 192 of 200 GB/s (NVIDIA/nccl issue 812), 46 to 48 of 50 (NVIDIA/nccl-tests
# issue 290).
PAYLOAD_SHARE = 0.94
# Bandwidth of a card and latency of a hop with kernel TCP, fitted to Polaris over sockets
# (github.com/argonne-lcf/alcf-nccl-tests).
TCP_BYTES_PER_S = 3.25e9
TCP_HOP_S = 20 * US
# If there are fewer channels than this and their cards are faster than this, NCCL doubles the channels.
MANY_CHANNELS, BYTES_PER_S_OF_CHANNEL = (
    16,
    45e9,
)


@dataclass(frozen=True, kw_only=True)
class Nccl:
    """Cost model of NCCL's collectives on given hardware.

    Args:
        inside: Connection of the GPUs of a node: `nvlink` or `pci`.
        generation: Generation of the GPUs.
        fabric: Network between nodes. None: unknown, and treated as InfiniBand.
        plugin: Plug-in whose choice of algorithms replaces NCCL's on nodes of 8 GPUs.
        version: Version of NCCL. Trees need 2.4, NVLS 2.17 and NVLS trees 2.18.
        algorithms: Algorithms to choose from. None: those that the version and the generation have.
        protocols: Protocols to choose from. LL128 needs NVLink and Volta or newer.
        ll_up_to_bytes: Size up to which LL is used, with Simple above: 16384 before NCCL 2.5. None: the fastest
            protocol by the model, as in NCCL 2.5 or newer.
        channels: Number of channels of NCCL's graph, which a log with NCCL_DEBUG=INFO shows. None: one per GPU that
            has a network card.
        cpu: Processors of the nodes.
        payload_share: Payload of a network card as a fraction of its line rate. 1 if a measured rate is given.
        launch_s: Seconds per collective in addition to NCCL's model. 0 if collectives are queued ahead.
    """

    inside: Literal["nvlink", "pci"]
    generation: Generation = "ampere"
    fabric: Fabric | None = None
    plugin: Plugin | None = None
    version: str = "2.27"
    algorithms: Sequence[NcclAlgorithm] | None = None
    protocols: Sequence[Protocol] = ("ll", "ll128", "simple")
    ll_up_to_bytes: int | None = None
    channels: int | None = None
    cpu: Literal["intel", "amd", "arm"] = "intel"
    payload_share: float = PAYLOAD_SHARE
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        require_number("launch_s", self.launch_s, "a time cannot be negative. Set 0 for none")
        require_share(
            "payload_share",
            self.payload_share,
            "payload uses this fraction of a card's line rate. Set 1 if a measured rate is given",
        )
        require_whole(
            "ll_up_to_bytes",
            self.ll_up_to_bytes or 0,
            "protocol LL is used up to this message size in bytes. Set None for NCCL's own choice",
            least=0,
        )
        require_whole(
            "channels",
            self.channels or 1,
            "NCCL needs at least one channel. Set None for one per GPU with a network card",
        )
        if not re.fullmatch(r"\d+\.\d+(\.\d+)?", self.version):
            raise ValueError(
                f"`version` (={self.version!r}) must be an NCCL version such as '2.27', because the version "
                "determines which algorithms are modeled."
            )
        for name, values, allowed in (
            ("inside", [self.inside], ["nvlink", "pci"]),
            ("generation", [self.generation], get_args(Generation)),
            ("fabric", [self.fabric], [*get_args(Fabric), None]),
            ("plugin", [self.plugin], [*get_args(Plugin), None]),
            ("cpu", [self.cpu], ["intel", "amd", "arm"]),
            ("algorithms", list(self.available), get_args(NcclAlgorithm)),
            ("protocols", list(self.protocols), get_args(Protocol)),
        ):
            if not values or any(value not in allowed for value in values):
                raise ValueError(
                    f"`{name}` (={values}) must be one or more of {', '.join(map(str, allowed))}, because it "
                    "determines what NCCL supports on this hardware."
                )
        if self.generation not in tables.NVLS_SHARE and any(
            kind.startswith("nvls") for kind in self.available
        ):
            raise ValueError(
                f"`algorithms` (={list(self.available)}) must not contain nvls with `generation` "
                f"(={self.generation!r}), because only Hopper and newer GPUs support it. Leave `algorithms` out."
            )

    @property
    def available(self) -> Sequence[NcclAlgorithm]:
        """Algorithms that NCCL can choose from."""
        if self.algorithms is not None:
            return self.algorithms
        version = tuple(map(int, self.version.split(".")))
        has_nvls = self.inside == "nvlink" and self.generation in tables.NVLS_SHARE
        return [
            kind
            for kind in get_args(NcclAlgorithm)
            if version >= tables.SINCE[kind] and (has_nvls or not kind.startswith("nvls"))
        ]

    def payload_bytes_per_s(self, line_bytes_per_s: float) -> float:
        """Return the payload bandwidth of a network card in bytes/s, given its line rate."""
        payload = self.payload_share * line_bytes_per_s
        return min(payload, TCP_BYTES_PER_S) if self.fabric == "tcp" else payload

    def all_reduce(
        self,
        num_bytes: float,
        *,
        num_nodes: int,
        ranks_per_node: int,
        inside: Link,
        across: Link,
        num_nics: int = 1,
        algorithm: NcclAlgorithm | None = None,
    ) -> Cost:
        """Return the cost of an all-reduce with the algorithm that NCCL or its plug-in chooses.

        `algorithm` restricts the choice to one algorithm.

        `inside.bytes_per_s` is the bandwidth of a GPU in each direction. `across.bytes_per_s` is
        the payload bandwidth of a node with all its NICs. A hop takes NCCL's own latency, or the
        link's if that is higher (sockets, slow fabrics).
        """
        require_whole("num_nodes", num_nodes, "an all-reduce has at least one node")
        require_whole("ranks_per_node", ranks_per_node, "a node has at least one rank")
        if num_nodes * ranks_per_node == 1:
            return Cost()
        channels = self.channels or (
            num_nics if ranks_per_node == 1 else min(num_nics, ranks_per_node)
        )
        job = NcclJob(num_bytes, num_nodes, ranks_per_node, inside, across, channels)
        candidates: list[tuple[NcclAlgorithm, int]] = [
            (kind, protocol)
            for kind in ([algorithm] if algorithm else self.available)
            if _is_possible(kind, num_nodes, ranks_per_node)
            for protocol in self._protocols(num_bytes, kind, num_nodes)
        ]
        planned = None if algorithm else self._choice_of_plugin(job)
        chosen = planned or min(
            candidates, key=lambda pair: self._cost(pair[0], pair[1], job, expected=True).total_s
        )
        return self._cost(chosen[0], chosen[1], job, expected=False)

    def _choice_of_plugin(self, job: NcclJob) -> tuple[NcclAlgorithm, int] | None:
        if self.plugin is None or job.ranks_per_node != 8 or job.num_nodes == 1:
            return None
        ll_bytes, until = tables.PLUGIN_TREES[self.plugin]
        most = [num_bytes for ranks, num_bytes in until if ranks <= job.num_ranks][-1]
        return ("tree", int(job.num_bytes > ll_bytes)) if job.num_bytes <= most else None

    def coded_sum(self, num_bytes: float, num_nodes: int, across: Link) -> Cost:
        """Return the communication cost of an all-reduce of encoded gradients between nodes.

        The time of the codec itself is not included.

        One rank per node takes part. Two nodes exchange `num_bytes` by an all-gather. More nodes
        send shards by an all-to-all, which is assumed to cost as much as an all-gather, and
        all-gather the sums. An all-gather costs half of a ring all-reduce.
        """
        gathered = 2 * num_bytes if num_nodes == 2 else num_bytes
        costs = []
        for protocol in self._protocols(gathered, "ring", num_nodes):
            ring = self._cost(
                "ring", protocol, NcclJob(gathered, num_nodes, 1, across, across, 1), expected=False
            )
            start_s = self.launch_s + tables.BASE_S["ring"][protocol]
            costs.append(
                Cost(latency_s=(start_s + ring.latency_s) / 2, transfer_s=ring.transfer_s / 2)
            )
        fastest = min(costs, key=lambda cost: cost.total_s)
        return fastest if num_nodes == 2 else fastest + fastest

    def reduce(self, num_bytes: float, num_ranks: int, inside: Link, *, is_sharded: bool) -> Cost:
        """Return the cost of a reduce in chunks along a chain of a node's ranks.

        The broadcast costs the same. With `is_sharded`, the result is the cost of a reduce-scatter
        or an all-gather around a ring.
        """
        share = (num_ranks - 1) / num_ranks if is_sharded else 1.0
        require_whole("num_ranks", num_ranks, "a reduce has at least one rank")
        if num_ranks == 1:
            return Cost()
        costs = []
        for protocol in self._protocols(num_bytes, "ring"):
            hops_s = (num_ranks - 1) * tables.HOP_S[self.inside, "ring"][protocol]
            transfer_s = share * num_bytes / (SHARE_OF_PROTOCOL[protocol] * inside.bytes_per_s)
            costs.append(
                Cost(
                    latency_s=self.launch_s + tables.BASE_S["ring"][protocol] + hops_s,
                    transfer_s=transfer_s,
                )
            )
        return min(costs, key=lambda cost: cost.total_s)

    def _protocols(
        self, num_bytes: float, algorithm: NcclAlgorithm, num_nodes: int = 1
    ) -> list[int]:
        # Indices of the tables: 0 is LL, 1 is LL128, 2 is Simple, which is the only protocol of NVLS.
        if algorithm.startswith("nvls"):
            return [2]
        names = list(get_args(Protocol))
        if self.ll_up_to_bytes is not None:
            return [0 if num_bytes <= self.ll_up_to_bytes else 2]
        # LL128 needs a network that preserves the order of bytes.
        is_ordered = self.fabric != "tcp" and not (
            self.fabric == "efa" and self._is_before("hopper")
        )
        return [
            names.index(n) for n in self.protocols if n != "ll128" or num_nodes == 1 or is_ordered
        ] or [2]

    def _is_before(self, generation: Generation) -> bool:
        return tables.GENERATIONS.index(self.generation) < tables.GENERATIONS.index(generation)

    def _cost(self, kind: NcclAlgorithm, protocol: int, job: NcclJob, *, expected: bool) -> Cost:
        # Cost that NCCL expects, or the actual cost. The actual cost has the filling of pipelines in place of NCCL's
        # correction of trees.
        latency_s = self.launch_s + self._latency_s(kind, protocol, job)
        if kind == "nvls" or (kind == "nvls_tree" and job.num_nodes == 1):
            rate = tables.NVLS_SHARE[self.generation] * job.inside.bytes_per_s
            return Cost(
                latency_s=latency_s, transfer_s=(1 + 1 / job.ranks_per_node) * job.num_bytes / rate
            )
        rate = self._bus_bytes_per_s(kind, protocol, job)
        if kind == "tree" and (expected or job.num_nodes == 1):
            rate *= tables.tree_correction(job.num_bytes, protocol)
        share = 1.0 if kind == "tree" else (job.num_ranks - 1) / job.num_ranks
        if not expected and kind != "ring" and job.num_nodes > 1:
            latency_s += self._filling_s(kind, protocol, job)
        return Cost(latency_s=latency_s, transfer_s=2 * share * job.num_bytes / rate)

    def _bus_bytes_per_s(self, kind: NcclAlgorithm, protocol: int, job: NcclJob) -> float:
        # Between two nodes a tree sends every byte once, and rings twice.
        is_between = job.num_nodes > 1
        is_two = job.num_nodes == 2 and kind != "ring"
        link = job.across.bytes_per_s * (1 + is_two) if is_between else job.inside.bytes_per_s
        if kind == "nvls_tree":
            heads = min(32, job.ranks_per_node)
            inside = (
                2
                * (heads - 1)
                / heads
                * tables.NVLS_SHARE[self.generation]
                * job.inside.bytes_per_s
            )
            limit = heads * tables.NVLS_TREE[self.generation][job.column]
            return min(link, limit, inside) if heads > 1 else min(link, limit)
        rate = link if job.ranks_per_node == 1 else min(link, job.inside.bytes_per_s)
        shares = SHARE_OF_PROTOCOL
        ll128 = tables.RING_LL128
        if kind == "tree":
            shares = SHARE_OF_PROTOCOL_OF_TREE
            ll128 = tables.TREE_LL128
            rate *= SHARE_OF_TREE
            if is_between:
                rate = min(
                    rate,
                    job.channels
                    * tables.TREE.get(self.generation, tables.TREE_BEFORE_AMPERE)[job.column],
                )
        rate *= shares[protocol]
        if is_between and protocol == 0:
            rate = min(rate, tables.LL.get(self.cpu, tables.LL["intel"])[job.column])
        if is_between and protocol == 1:
            rate = min(
                rate,
                job.channels * ll128.get(self.generation, tables.LL128_BEFORE_HOPPER)[job.column],
            )
        return rate

    def _latency_s(self, kind: NcclAlgorithm, protocol: int, job: NcclJob) -> float:
        between_s = max(self._hop_s(kind, protocol), job.across.latency_s)
        if kind.startswith("nvls"):
            return tables.NVLS_HOP_S + 2 * job.rounds * between_s
        inside_s = max(tables.HOP_S[self.inside, kind][protocol], job.inside.latency_s)
        if kind == "tree":
            hops_s = 2 * ((job.ranks_per_node - 1) * inside_s + job.rounds * between_s)
            return tables.BASE_S["tree"][protocol] + hops_s
        if job.num_nodes > 1:  # with a network, a host has to start each step
            inside_s = max(
                inside_s, (2 if self.cpu == "amd" else 1) * US * (3 if protocol == 2 else 1)
            )
        hops_s = (
            2 * (job.num_ranks - job.num_nodes) * inside_s + 2 * (job.num_nodes - 1) * between_s
        )
        # Plateau of Simple rings between nodes, from tuning.cc.
        if (
            protocol == 2
            and job.num_nodes > 1
            and job.num_bytes / job.num_ranks >= tables.PLATEAU_BYTES_PER_RANK
        ):
            hops_s *= tables.PLATEAU_BEFORE_AMPERE if self._is_before("ampere") else tables.PLATEAU
        return tables.BASE_S["ring"][protocol] + hops_s

    def _hop_s(self, kind: NcclAlgorithm, protocol: int) -> float:
        own_s = (
            tables.NVLS_TREE_HOP_S
            if kind.startswith("nvls")
            else tables.HOP_S["net", kind][protocol]
        )
        if self.fabric == "efa":  # the plug-in's latency replaces LL's, which is 5 us in NCCL
            more_s = (
                tables.EFA_HOP_S.get(self.generation, tables.EFA_HOP_S["volta"])
                - tables.HOP_S["net", "tree"][0]
            )
            own_s += more_s + (tables.EFA_SIMPLE_S if protocol == 2 else 0)
        return max(own_s, TCP_HOP_S) if self.fabric in ("tcp", "tcpxo") else own_s

    def _filling_s(self, kind: NcclAlgorithm, protocol: int, job: NcclJob) -> float:
        if kind == "nvls_tree":
            heads = min(32, job.ranks_per_node)
            first = tables.nvls_tree_round_bytes(
                job.num_bytes, num_nodes=job.num_nodes, heads=heads, generation=self.generation
            )
            return 2 * job.rounds * first / job.across.bytes_per_s
        # connect.cc doubles channels, and doubles them again from Hopper on if they are few and their cards are fast.
        channels = 2 * job.channels
        is_fast = job.across.bytes_per_s / job.channels > BYTES_PER_S_OF_CHANNEL
        if channels < MANY_CHANNELS and is_fast and not self._is_before("hopper"):
            channels *= 2
        first = tables.tree_round_bytes(
            job.num_bytes,
            protocol,
            num_channels=channels,
            num_nodes=job.num_nodes,
            ranks_per_node=job.ranks_per_node,
        )
        first *= (2, 128 / 120, 1)[protocol]
        ll128 = tables.RING_LL128.get(self.generation, tables.LL128_BEFORE_HOPPER)[0]
        inside = min(job.inside.bytes_per_s, channels * ll128)
        return 2 * first * (job.rounds / job.across.bytes_per_s + (job.ranks_per_node - 1) / inside)


def _is_possible(algorithm: NcclAlgorithm, num_nodes: int, ranks_per_node: int) -> bool:
    # NVLS uses the switch inside one node. NVLS tree connects these switches by a tree between nodes.
    if algorithm == "nvls":
        return num_nodes == 1 and ranks_per_node > 1
    return algorithm != "nvls_tree" or num_nodes > 1
