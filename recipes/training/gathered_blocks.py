"""Selection of the blocks of a network that FSDP2 shards and gathers separately.

`simulate` uses this module too, and must start without importing Lightning.
"""

from __future__ import annotations

from torch import nn


def gathered_alone(network: nn.Module) -> list[nn.Module]:
    """Return the blocks of a network that should be sharded and gathered as separate FSDP2 units.

    `FullyShardedStrategy.shard_` describes these blocks.
    """
    candidates: list[nn.Module] = []
    for module in network.modules():
        if isinstance(module, nn.ModuleList):
            candidates += module
    if not candidates:
        for child in network.children():
            candidates += child.children() if isinstance(child, nn.Sequential) else [child]
    return [block for block in candidates if any(param.dim() > 1 for param in block.parameters())]
