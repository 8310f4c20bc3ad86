"""Validation of the user's module, optimizers and precision, and arguments for DDP derived from them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_hybrid.comm import CommPlan, Topology
from lightning_hybrid.comm.adasum.combine import refuse_odd_nodes
from lightning_hybrid.comm.bucket_layout import ddp_limits
from lightning_hybrid.comm.codec.codec import Codec
from lightning_hybrid.comm.plan import MAX_BYTES
from lightning_hybrid.lightning_names import is_overridden, lightning_types, misconfiguration
from lightning_hybrid.precision.loss_scale import LossScale
from lightning_hybrid.precision.plugin import MasterWeightMixin
from lightning_hybrid.strategy.options import Planner
from lightning_hybrid.strategy.registration import STRATEGY_NAME
from lightning_hybrid.strategy.strategy_options import StrategyOptions

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import Precision

Masters = TypeVar("Masters", bound=MasterWeightMixin)


def ask_planner(
    planner: Planner,
    module: nn.Module,
    topology: Topology,
    *,
    comm_dtype: torch.dtype | None,
    on_cuda: bool,
    across_nodes: torch.dtype | Codec | None = None,
) -> CommPlan:
    """Return the communication plan that a planner chooses for the module's gradients.

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
    """Return the plan's bucket sizes as the keyword argument `bucket_cap_mb_list` of DDP.

    The result is empty if torch has no such argument or the user set it. On CUDA, if a plan leaves buckets to DDP, the
    list has DDP's own two sizes: the first bucket's size and the size of all other buckets.

    >>> bias_then_weight = nn.Linear(256, 256)
    >>> bucket_caps_for_ddp(bias_then_weight, CommPlan(last_bucket_bytes=1024), {}, num_nodes=2)
    {'bucket_cap_mb_list': [0.0009765625, 0.25]}
    """
    if "bucket_cap_mb_list" in ddp_kwargs:
        return {}
    if "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters:
        return {}
    trained: list[nn.Parameter] = []
    for parameter in module.parameters():
        if parameter.requires_grad and not getattr(parameter, "_ddp_ignored", False):
            trained.append(parameter)
    if plan.has_ddp_buckets(on_cuda=any(parameter.is_cuda for parameter in trained)):
        return {"bucket_cap_mb_list": [limit / 2**20 for limit in ddp_limits(plan.bucket_bytes)]}

    # DDP uses separate buckets for each dtype but one list of sizes for all of them. The list is made for the dtype
    # with the most bytes. Gradients of other dtypes, such as fp32 normalisation layers next to half-precision weights,
    # do not fill a bucket and are sent last.
    by_dtype: dict[torch.dtype, list[int]] = {}
    for parameter in reversed(trained):
        num_bytes = parameter.numel() * parameter.element_size()
        by_dtype.setdefault(parameter.dtype, []).append(num_bytes)
    largest_dtype = max(by_dtype.values(), key=sum, default=[])
    caps = [cap for cap in plan.bucket_caps(largest_dtype, num_nodes=num_nodes) if cap]
    if len(caps) < 2:
        return {}
    if ddp_kwargs.get("find_unused_parameters"):
        # DDP first applies the list to parameters in the order of definition. After the first step it rebuilds its
        # buckets in the order in which gradients get ready, but not when it looks for unused parameters.
        caps.reverse()
    return {"bucket_cap_mb_list": [cap / 2**20 for cap in caps]}


def refuse_two_precisions(trainer: pl.Trainer, plugin: Precision) -> None:
    """Raise if `Trainer(precision=...)` disagrees with the precision plugin passed to the strategy.

    Raises:
        MisconfigurationException: The two precisions differ.
    """
    # Lightning uses the strategy's plugin and silently ignores the flag. "32-true" is the flag's default.
    flag = getattr(trainer._accelerator_connector, "_precision_flag", "32-true")
    if flag not in ("32-true", plugin.precision):
        raise misconfiguration(
            f"`precision` (={flag!r}) must agree with the strategy's own precision plugin "
            f"({type(plugin).__name__}, {plugin.precision!r}), which would silently be used instead. Set the precision "
            f"once: leave `precision=` out, or leave `precision_plugin=` out."
        )


def user_moves_batches(module: pl.LightningModule | None) -> bool:
    """Return whether the module or data module overrides a hook that moves batches to the device."""
    assert module is not None
    trainer: Any = module.trainer
    datamodule = trainer.datamodule
    for hook in ("on_before_batch_transfer", "transfer_batch_to_device"):
        if is_overridden(hook, module, "pytorch.LightningModule"):
            return True
        if datamodule is not None and is_overridden(
            hook, datamodule, "pytorch.LightningDataModule"
        ):
            return True
    return False


def with_own_names(advice: str, strategy_type: str) -> str:
    """Rewrite Lightning's advice on unused parameters to use the names of this package's strategy."""
    advice = advice.replace(
        "ddp_find_unused_parameters_true", f"{STRATEGY_NAME}_find_unused_parameters_true"
    )
    return advice.replace("strategy=DDPStrategy(", f"strategy={strategy_type}(")


def refuse_foreign_parameters(optimizers: Iterable[Optimizer], module: nn.Module) -> None:
    """Raise if an optimizer has a parameter that is not in `module`.

    DDP averages the gradients of the module's parameters only.

    Raises:
        ValueError: An optimizer has such a parameter. The error names the optimizer and the group.
    """
    # Parameters are compared by identity, because `in` would compare tensors element by element.
    averaged = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            if any(id(parameter) not in averaged for parameter in group["params"]):
                raise ValueError(
                    f"`configure_optimizers` returned {type(optimizer).__name__} with a parameter in group {index} "
                    "that is not part of the LightningModule: its gradients would never be averaged over ranks. "
                    "Register it (`self.name = torch.nn.Parameter(...)`) in `__init__` or `configure_model`."
                )


def refuse_nothing_to_train(module: nn.Module) -> None:
    """Raise if `module` has no trainable parameter.

    Raises:
        ValueError: The module has no parameters, or all are frozen.
    """
    parameters = list(module.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        state = "none registered"
        if parameters:
            state = "all of them frozen"
        raise ValueError(
            f"{type(module).__name__} has {len(parameters)} parameters ({state}): there is nothing to train or to "
            "average. Make layers attributes of the module in `__init__` or `configure_model`, or unfreeze some."
        )


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
        features.append(f"update shared in the {options.shard_update}")

    precision = str(plugin.precision)
    description = _SHORT_NAMES.get(precision, precision)
    if precision.endswith("16-mixed"):
        cheaper = precision.replace("mixed", "true")
        description += f": gradients in fp32, where precision='{cheaper}' sends half the bytes"
    if not features:
        return description
    return f"{', '.join(features)}; {description}"


def adasum_plan(plan: CommPlan, topology: Topology) -> CommPlan | None:
    """Return a hierarchical plan for Adasum, in which node leaders combine whole buckets.

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
            "`between_nodes` (=Adasum()) combines the gradients of several nodes, but all ranks share "
            "one node, so gradients are averaged. Leave `between_nodes` out, or set `ranks_per_node`."
        )
        return None
    # Adasum takes inner products of whole parameters, so no chunk may cut one.
    return dataclasses.replace(plan, algorithm="hierarchical", chunk_bytes=MAX_BYTES)


def warn_of_trust_ratios(optimizers: Iterable[Optimizer]) -> None:
    """Warn about optimizers with trust ratios, which discard the magnitude of Adasum's result."""
    for optimizer in optimizers:
        # `optim.param_groups` sets `trust_ratio` in groups even if the optimizer does not support it.
        if "trust_ratio" not in optimizer.defaults:
            continue
        if any(group["trust_ratio"] for group in optimizer.param_groups):
            name = type(optimizer).__name__
            rank_zero_warn(
                f"`between_nodes` (=Adasum()) with {name}: its trust ratio divides by the size of each parameter's "
                "update. The size is how Adasum distinguishes gradients that agree from orthogonal ones, so only the "
                f"direction is left. Use between_nodes=Mean() with {name}, or SGD or Adam with Adasum."
            )


_PLAIN_HALF_PRECISION = (
    "pytorch.plugins.precision.HalfPrecision",
    "fabric.plugins.precision.HalfPrecision",
)


def with_masters(
    plugin: Any, plugin_type: type[Masters], loss_scale: str | float | LossScale | None
) -> Any:
    """Replace Lightning's plain half-precision plugin by one with fp32 master weights.

    Any other plugin is returned unchanged.
    """
    if not any(isinstance(plugin, lightning_types(name)) for name in _PLAIN_HALF_PRECISION):
        return plugin
    if plugin.precision != "16-true":
        loss_scale = None
    return plugin_type(plugin.precision, loss_scale=loss_scale)


def warn_of_unused_loss_scale(loss_scale: LossScale | None, plugin: Any) -> None:
    """Warn if the user set a loss scale but the precision does not use it."""
    if loss_scale is None or plugin.precision == "16-true":
        return
    own_scaler = ""
    if plugin.precision == "16-mixed":
        own_scaler = ", and Lightning's own scaler scales the loss of '16-mixed'"
    rank_zero_warn(
        f"`loss_scale` (={type(loss_scale).__name__}) has no effect with precision={plugin.precision!r}: it is for "
        f"precision='16-true'{own_scaler}. Leave it out, or train with precision='16-true'."
    )


def refuse_other_accumulation(accumulate_grad_batches: Any) -> None:
    """Raise unless `Trainer(accumulate_grad_batches=...)` is a positive integer.

    Raises:
        ValueError: The argument is something else, such as a mapping from epochs to numbers.
    """
    value = accumulate_grad_batches
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return
    cure = "Write accumulate_grad_batches=2"
    if isinstance(value, Mapping):
        cure = (
            f"Write callbacks=[GradientAccumulationScheduler({dict(value)!r})], of "
            "`lightning.pytorch.callbacks`, for other numbers in later epochs"
        )
    raise ValueError(
        f"`accumulate_grad_batches` (={value!r}) must be a whole number, 1 or more: it counts the batches of a step. "
        f"{cure}."
    )


def refuse_what_is_not_averaged(
    optimizer: Optimizer, averaged: Collection[int], module: Any
) -> None:
    """Raise if an optimizer trains a parameter that DDP does not average.

    Args:
        optimizer: Optimizer that is about to step.
        averaged: The `id`s of the parameters that DDP averages.
        module: Module in which the name of the parameter is looked up.

    Raises:
        RuntimeError: A parameter is trained but not averaged. The error names it.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in averaged:
                name = _name_of(parameter, module)
                raise RuntimeError(
                    f"Parameter `{name}` (shape {tuple(parameter.shape)}) "
                    "is trained but not averaged: DDP takes the trainable parameters when training starts, and this "
                    "one was added or unfrozen later, so every rank would train its own copy. Keep it trainable from "
                    "the start (with lr 0 until it is needed), or start a new fit after unfreezing."
                )


def _name_of(parameter: nn.Parameter, module: nn.Module) -> str:
    for name, module_parameter in module.named_parameters():
        if module_parameter is parameter:
            return name
    return "(not in the module)"
