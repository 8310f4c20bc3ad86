"""Helpers for the communication plan of a run, its bucket sizes in DDP and its description in logs."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hybrid.comm import CommPlan, Topology
from lightning_hybrid.comm.adasum.combine import refuse_odd_nodes
from lightning_hybrid.comm.bucket_sizes import ddp_limits
from lightning_hybrid.comm.codec.codec import Codec
from lightning_hybrid.comm.plan import MAX_BYTES
from lightning_hybrid.strategy.option_classes import Planner
from lightning_hybrid.strategy.strategy_options import StrategyOptions


def ask_planner(
    planner: Planner,
    module: nn.Module,
    topology: Topology,
    *,
    comm_dtype: torch.dtype | None,
    on_cuda: bool,
    across_nodes: torch.dtype | Codec | None = None,
) -> CommPlan:
    """Let a planner choose a communication plan for the gradients of a module.

    All ranks get the same plan, because the choice does not depend on measurements.

    Args:
        planner: The planner.
        module: The module, with at least one trainable parameter.
        topology: The ranks and their nodes.
        comm_dtype: The dtype on the wire. None: the dtype of the largest gradient.
        on_cuda: Whether the gradients are on GPUs.
        across_nodes: The dtype or codec between nodes.
    """
    gradients = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients.reverse()  # approximately the order in which backward computes gradients
    dtype = comm_dtype or max(gradients, key=torch.Tensor.numel).dtype
    numels = [parameter.numel() for parameter in gradients]
    # Planners need not support codecs unless one is used.
    codec_options: dict[str, Any] = {}
    if isinstance(across_nodes, Codec):
        codec_options["codec_bits"] = across_nodes.bits
    return planner.plan_for(
        numels, topology, itemsize=dtype.itemsize, on_cuda=on_cuda, **codec_options
    )


def bucket_caps_for_ddp(
    module: nn.Module, plan: CommPlan, ddp_kwargs: Mapping[str, Any], *, num_nodes: int
) -> dict[str, Any]:
    """Convert a plan's bucket sizes to DDP's keyword argument `bucket_cap_mb_list`.

    The result is empty if the user set it. If all gradients fit into one bucket, or torch has no such argument, the
    result has the plan's size limit as `bucket_cap_mb`. On CUDA, if a plan leaves buckets to DDP, the list has DDP's
    own two sizes: that of the first bucket and that of all other buckets.

    >>> bias_then_weight = nn.Linear(256, 256)
    >>> bucket_caps_for_ddp(bias_then_weight, CommPlan(last_bucket_bytes=1024), {}, num_nodes=2)
    {'bucket_cap_mb_list': [0.0009765625, 0.25]}
    """
    if "bucket_cap_mb_list" in ddp_kwargs:
        return {}
    # A planner may have chosen another limit than that of the options, which `ddp_kwargs` holds.
    one_limit = {"bucket_cap_mb": plan.bucket_bytes / 2**20}
    if "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters:
        return one_limit
    trained: list[nn.Parameter] = []
    for parameter in module.parameters():
        if parameter.requires_grad and not getattr(parameter, "_ddp_ignored", False):
            trained.append(parameter)
    if plan.has_ddp_buckets(on_cuda=any(parameter.is_cuda for parameter in trained)):
        return {"bucket_cap_mb_list": [limit / 2**20 for limit in ddp_limits(plan.bucket_bytes)]}

    # DDP uses separate buckets for each dtype but one list of sizes for all of them. The list is made for the dtype
    # with the most bytes. Gradients of other dtypes, such as fp32 normalization layers next to half-precision weights,
    # do not fill a bucket and are sent last.
    by_dtype: dict[torch.dtype, list[int]] = {}
    for parameter in reversed(trained):
        num_bytes = parameter.numel() * parameter.element_size()
        by_dtype.setdefault(parameter.dtype, []).append(num_bytes)
    largest_dtype = max(by_dtype.values(), key=sum, default=[])
    caps = [cap for cap in plan.bucket_caps(largest_dtype, num_nodes=num_nodes) if cap]
    if len(caps) < 2:
        return one_limit
    if ddp_kwargs.get("find_unused_parameters"):
        # DDP first applies the list to parameters in the order of definition. After the first step it rebuilds its
        # buckets in the order in which gradients get ready, but not when it looks for unused parameters.
        caps.reverse()
    return {"bucket_cap_mb_list": [cap / 2**20 for cap in caps]}


_SHORT_NAMES = {
    "16-true": "fp16 on fp32 masters",
    "bf16-true": "bf16 on fp32 masters",
    "32-true": "fp32",
}


def describe_options(options: StrategyOptions, plugin: Any, *, num_nodes: int) -> str:
    """Return a one-line description of enabled features and precision for the log.

    >>> plugin = type("Plugin", (), {"precision": "16-true"})()
    >>> from lightning_hybrid import Mean
    >>> options = StrategyOptions.parse({}, argument_names=(), between_nodes=Mean("int8", error_feedback=True))
    >>> describe_options(options, plugin, num_nodes=2)
    '8 bits between nodes, error feedback; fp16 on fp32 masters'
    """
    features = []
    dtype = options.dtype_across_nodes
    if dtype is not None and num_nodes > 1:
        name = str(dtype).removeprefix("torch.")
        if isinstance(dtype, Codec):
            name = f"{dtype.bits} bits"
        features.append(f"{name} between nodes")
    if options.has_error_feedback:
        features.append("error feedback")
    if options.local_steps is not None:
        features.append(f"averages between nodes every {options.local_steps.every} steps")
    if options.shard_update != "off":
        features.append(f"update sharded over the ranks of the {options.shard_update}")

    precision = str(plugin.precision)
    description = _SHORT_NAMES.get(precision, precision)
    if precision.endswith("16-mixed"):
        cheaper = precision.replace("mixed", "true")
        description += f": gradients in fp32, where precision='{cheaper}' sends half the bytes"
    if not features:
        return description
    return f"{', '.join(features)}; {description}"


def adasum_plan(plan: CommPlan, topology: Topology) -> CommPlan | None:
    """Return a hierarchical plan for Adasum, in which node leaders combine complete buckets.

    On one node the function returns None and warns, because gradients are averaged there.

    Raises:
        ValueError: Adasum cannot combine this number of nodes in pairs.

    >>> topology = Topology.from_ranks_per_node(rank=0, world_size=8, ranks_per_node=2)
    >>> plan = adasum_plan(CommPlan(), topology)
    >>> plan.bucket(index=0, numel=2**25, dtype="float16", num_bytes=2**26, topology=topology).describe()
    'bucket 0: 33554432 x float16 = 64 MiB, hierarchical'
    """
    refuse_odd_nodes(topology)
    if topology.num_nodes == 1:
        rank_zero_warn(
            "`between_nodes` (=Adasum()) combines the gradients of several nodes, but all ranks are on one node, so "
            "gradients are averaged. Leave `between_nodes` out, or set `ranks_per_node`."
        )
        return None
    # Adasum takes inner products of whole parameters, so a chunk must not end within a parameter.
    return dataclasses.replace(plan, algorithm="hierarchical", chunk_bytes=MAX_BYTES)
