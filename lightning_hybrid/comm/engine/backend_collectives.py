"""The backend's collectives that versions of torch name differently."""

from __future__ import annotations

import torch.distributed as dist

# torch 2.13 renames both and warns at every call by the old names; 2.11 and 2.12 know only those.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
