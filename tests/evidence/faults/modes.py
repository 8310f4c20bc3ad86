"""Options under which faults are injected."""

from dataclasses import dataclass, field
from typing import Any

from lightning_hybrid import HybridAllReduceStrategy, HybridPipelineStrategy, LocalSteps, Mean


@dataclass(frozen=True, kw_only=True)
class Mode:
    """Strategy, its options, and layers that are cut."""

    strategy: type = HybridAllReduceStrategy
    options: dict[str, Any] = field(default_factory=dict)
    node_slices: tuple[tuple[str, ...], ...] = ()
    is_fabric: bool = False


NODES: dict[str, Any] = {"ranks_per_node": 2}
INT8 = {**NODES, "between_nodes": Mean(dtype="int8")}
MODES = {
    "plain": Mode(),
    "pipeline": Mode(strategy=HybridPipelineStrategy, options={**NODES, "num_stages": 2, "num_microbatches": 4}),
    "shard_update": Mode(options={**NODES, "shard_update": "node"}),
    "local_steps": Mode(options={**NODES, "between_nodes": LocalSteps(every=4)}),
    "feedback": Mode(options={**NODES, "between_nodes": Mean(dtype="int8", error_feedback=True)}),
    "node_slices": Mode(options=NODES, node_slices=(("0", "2"),)),
    "fabric": Mode(options=INT8, is_fabric=True),
}
