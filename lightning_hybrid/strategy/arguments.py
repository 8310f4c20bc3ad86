"""Checks of what a user gives the strategy, made before anything is built."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_hybrid.comm import CommPlan, Topology
from lightning_hybrid.comm.bucket_layout import ddp_limits
from lightning_hybrid.comm.codec.codec import Codec
from lightning_hybrid.lightning_names import is_overridden, misconfiguration
from lightning_hybrid.strategy.registration import STRATEGY_NAME

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import Precision

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


@runtime_checkable
class Planner(Protocol):
    """What chooses a plan when training starts; `planning.cluster.Cluster` is one."""

    def plan_for(self, numels: Sequence[int], topology: Topology, *, itemsize: int, on_cuda: bool) -> CommPlan:
        """Choose, equally on every rank, the plan for gradients of `numels` elements in the order they get ready.

        Sums that go through a codec between nodes have `codec_bits=8` or `4` besides.
        """


def refuse_unknown_options(ddp_kwargs: Mapping[str, Any], own: Iterable[str]) -> None:
    """Check that every name is an argument of `DistributedDataParallel` and free for the user to set.

    Raises:
        ValueError: names the option, and the one it is close to: one of DDP's or of the strategy's `own`.
    """
    own = [name for name in own if name != "ddp_kwargs"]
    # Lightning passes every unknown keyword on, and DDP would refuse it only after the process group was made.
    ddp = list(inspect.signature(DistributedDataParallel).parameters)
    for name, value in ddp_kwargs.items():
        if name in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period"):
            if value is None:  # Lightning's own default
                continue
            raise ValueError(
                f"`{name}` (={value!r}) cannot be combined with strategy={STRATEGY_NAME!r}: it is the communication "
                "hook. In place of fp16_compress_hook give comm_dtype='float16', in place of bf16_compress_hook "
                "comm_dtype='bfloat16'; for another hook, such as PowerSGD, or for local steps use strategy='ddp'."
            )
        if name in ("module", "device_ids", "output_device", "process_group", "device_mesh", "mixed_precision"):
            raise ValueError(f"`{name}` cannot be given: the strategy sets it for DistributedDataParallel.")
        if name not in ddp:
            near = difflib.get_close_matches(name, [*own, *ddp], n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise ValueError(
                f"`{name}` (={value!r}) is not an option of strategy={STRATEGY_NAME!r} nor of DistributedDataParallel."
                f"{hint} Options: {', '.join(own)}."
            )


def one_bucket_size(bucket_bytes: int | None, ddp_kwargs: dict[str, Any]) -> int | None:
    """Return the bytes of a bucket, from `bucket_bytes` or from DDP's `bucket_cap_mb` (MiB), taken from `ddp_kwargs`.

    Raises:
        ValueError: both were given.
    """
    cap_mb = ddp_kwargs.pop("bucket_cap_mb", None)
    if cap_mb is None:
        return bucket_bytes
    if bucket_bytes is not None:
        raise ValueError(
            f"`bucket_cap_mb` (={cap_mb}) and `bucket_bytes` (={bucket_bytes}) say the same thing. Keep `bucket_bytes`."
        )
    return int(cap_mb * 2**20)


def plan_from(plan: CommPlan | Planner | str | None, *, algorithm: Any, bucket_bytes: int | None) -> CommPlan:
    """Return the given plan, or read it from the file of that path, or make it from the two options that need none.

    For a planner it is the library's own plan, until `ask_planner` can choose.

    Raises:
        ValueError: a plan and one of the options were given, or a value cannot work.
    """
    if plan is None:
        made = CommPlan(algorithm=algorithm)
        return made if bucket_bytes is None else dataclasses.replace(made, bucket_bytes=bucket_bytes, num_buckets=1)
    if algorithm != "auto" or bucket_bytes is not None:
        raise ValueError(
            f"`plan` (={plan!r}) says which algorithm and what bucket size are used: leave `algorithm` and "
            "`bucket_bytes` out, or the plan."
        )
    if isinstance(plan, Planner):
        return CommPlan()
    if isinstance(plan, CommPlan):
        return plan
    try:
        return CommPlan.from_json(Path(plan).read_text())
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"`plan` (={plan!r}) must be the path of a plan that can be read: {error}. Write one with "
            "`CommPlan(...).to_json()`, or leave `strategy.plan` out."
        ) from error


def ask_planner(
    planner: Planner,
    module: nn.Module,
    topology: Topology,
    *,
    comm_dtype: torch.dtype | None,
    on_cuda: bool,
    across_nodes: torch.dtype | Codec | None = None,
) -> CommPlan:
    """Return the planner's choice for this module's gradients, of the dtype on the wire or that of the largest one."""
    # Ranks that know the same module choose the same plan: nothing here is measured. Gradients get ready about in the
    # reverse order of the parameters.
    gradients = [parameter for parameter in module.parameters() if parameter.requires_grad][::-1]
    dtype = comm_dtype or max(gradients, key=torch.Tensor.numel).dtype
    numels = [parameter.numel() for parameter in gradients]
    # Only planners that are asked about a codec need to know one.
    more: dict[str, Any] = {"codec_bits": across_nodes.bits} if isinstance(across_nodes, Codec) else {}
    return planner.plan_for(numels, topology, itemsize=dtype.itemsize, on_cuda=on_cuda, **more)


def bucket_caps_for_ddp(
    module: nn.Module, plan: CommPlan, ddp_kwargs: Mapping[str, Any], *, num_nodes: int
) -> dict[str, Any]:
    """Return the plan's buckets as `bucket_cap_mb_list`; nothing where torch has no such option, or the user gave it.

    On CUDA, where a plan leaves buckets to DDP, they are DDP's own two sizes: of the first bucket, and of all others.

    >>> bias_then_weight = nn.Linear(256, 256)
    >>> bucket_caps_for_ddp(bias_then_weight, CommPlan(last_bucket_bytes=1024), {}, num_nodes=2)
    {'bucket_cap_mb_list': [0.0009765625, 0.25]}
    """
    if (
        "bucket_cap_mb_list" in ddp_kwargs
        or "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters
    ):
        return {}
    # Without what DDP is to ignore.
    trained = [one for one in module.parameters() if one.requires_grad and not getattr(one, "_ddp_ignored", False)]
    if plan.has_ddp_buckets(on_cuda=any(parameter.is_cuda for parameter in trained)):
        return {"bucket_cap_mb_list": [limit / 2**20 for limit in ddp_limits(plan.bucket_bytes)]}
    # DDP puts gradients of each dtype into buckets of their own, and one list must do for all: it is made for the dtype
    # with most bytes. The others, normalisation in fp32 next to half-precision weights, fill no bucket and come last.
    by_dtype: dict[torch.dtype, list[int]] = {}
    for parameter in reversed(trained):
        by_dtype.setdefault(parameter.dtype, []).append(parameter.numel() * parameter.element_size())
    caps = plan.bucket_caps(max(by_dtype.values(), key=sum, default=[]), num_nodes=num_nodes)
    caps = [cap for cap in caps if cap]
    if len(caps) < 2:
        return {}
    if ddp_kwargs.get("find_unused_parameters"):
        # DDP applies the list to parameters in the order of definition, and after its first step to gradients in the
        # order they get ready. Looking for unused parameters it never rebuilds its buckets: the first order stays.
        caps.reverse()
    return {"bucket_cap_mb_list": [cap / 2**20 for cap in caps]}


def dtype_from(
    setting: str | torch.dtype | None, *, name: str = "comm_dtype", more: tuple[str, ...] = ()
) -> torch.dtype | None:
    """Return the dtype that an option names; `more`: what else it may name, for the error.

    Raises:
        ValueError: it names no dtype of a gradient.

    >>> dtype_from("fp16"), dtype_from("torch.bfloat16"), dtype_from(None)
    (torch.float16, torch.bfloat16, None)
    """
    if setting is None or (isinstance(setting, torch.dtype) and setting in _DTYPES.values()):
        return setting
    if isinstance(setting, str) and setting.removeprefix("torch.") in _DTYPES:
        return _DTYPES[setting.removeprefix("torch.")]
    cure = ""
    if str(setting).removeprefix("torch.") in ("int8", "int4"):
        cure = f" Sums have to hold them as they are: 8 and 4 bits are for comm_dtype_across_nodes={setting!r}."
    raise ValueError(f"`{name}` (={setting!r}) must be None or one of {', '.join([*_DTYPES, *more])}.{cure}")


def across_nodes_from(setting: str | torch.dtype | None) -> torch.dtype | Codec | None:
    """Return what `comm_dtype_across_nodes` names: a dtype or a codec.

    Raises:
        ValueError: it names neither.

    >>> across_nodes_from("fp16"), across_nodes_from("int8").bits, across_nodes_from(None)
    (torch.float16, 8, None)
    """
    name = str(setting).removeprefix("torch.")
    if name not in ("int8", "int4"):
        return dtype_from(setting, name="comm_dtype_across_nodes", more=("int8", "int4"))
    return Codec(bits=8 if name == "int8" else 4)


def rate_from(setting: float | None, *, name: str = "link_bytes_per_s") -> float | None:
    """Check an option in bytes per second, and return it as a float.

    Raises:
        ValueError: it is no number above zero, or not finite.

    >>> rate_from(125_000_000), rate_from(None)
    (125000000.0, None)
    """
    if setting is None:
        return None
    if isinstance(setting, bool) or not isinstance(setting, int | float) or not 0 < setting < math.inf:
        raise ValueError(
            f"`{name}` (={setting!r}) must be None or a number of bytes per second above zero: it is what a node's "
            "link to the others carries in each direction, 1.25e8 for 1 Gbit/s. Leave it unset where it is not known."
        )
    return float(setting)


def folder_from(name: str, setting: str | os.PathLike[str] | None) -> str | None:
    """Return the folder that the option of this name says.

    Raises:
        ValueError: it is neither a path nor None.
    """
    if setting is not None and not isinstance(setting, str | os.PathLike):
        raise ValueError(
            f"`{name}` (={setting!r}) must be the path of a folder, or None. Leave `strategy.{name}` out for None."
        )
    return None if setting is None else os.fspath(setting)


def refuse_two_precisions(trainer: pl.Trainer, plugin: Precision) -> None:
    """Check that `Trainer(precision=...)` agrees with the precision in the strategy object.

    Raises:
        MisconfigurationException: it says something else.
    """
    # Lightning takes the strategy's plugin and ignores the flag without a word; "32-true" is the flag's default.
    asked = getattr(trainer._accelerator_connector, "_precision_flag", "32-true")
    if asked not in ("32-true", plugin.precision):
        raise misconfiguration(
            f"`precision` (={asked!r}) must agree with the strategy's own precision plugin "
            f"({type(plugin).__name__}, {plugin.precision!r}), which would silently win. Give the precision in one "
            f"place: leave `precision=` out, or leave `precision_plugin=` out."
        )


def tune_from(setting: Any, *, is_own_choice: bool = True, cache_dir: object = None) -> Any:
    """Return the setting of `tune`; with a plan that is not the library's own choice, `"auto"` is `"off"`.

    `cache_dir`: an option that is gone, and warned of.

    Raises:
        ValueError: the setting is none of auto, on, off.

    >>> tune_from("auto"), tune_from(True), tune_from(False)
    ('auto', 'on', 'off')
    >>> tune_from("auto", is_own_choice=False)
    'off'
    """
    if cache_dir is not None:
        message = f"`tune_cache_dir` (={cache_dir!r}) has no effect any more: each run tunes its own. Leave it out."
        warnings.warn(message, FutureWarning, stacklevel=2)
    # YAML reads `on` and `off` as booleans.
    setting = {True: "on", False: "off"}[setting] if isinstance(setting, bool) else setting
    if setting not in ("auto", "on", "off"):
        raise ValueError(
            f"`tune` (={setting!r}) must be one of auto, on, off: whether the plan of communication is tuned in the "
            "first steps. Leave `strategy.tune` out for auto."
        )
    return "off" if setting == "auto" and not is_own_choice else setting


def shard_update_from(setting: Any) -> str:
    """Return the setting of `shard_update`.

    Raises:
        ValueError: it is neither off nor node.

    >>> shard_update_from("node"), shard_update_from(False)
    ('node', 'off')
    """
    setting = "off" if setting is False else setting  # YAML reads `off` as a boolean
    if setting not in ("off", "node"):
        raise ValueError(
            f"`shard_update` (={setting!r}) must be off or node: whether the ranks of a node share masters and "
            "optimizer state. Set strategy.shard_update=node, or leave it out."
        )
    return str(setting)


def user_moves_batches(module: pl.LightningModule | None) -> bool:
    """Return whether module or data module has a hook of its own that moves batches to the device."""
    assert module is not None
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device")
    datamodule = module.trainer.datamodule  # type: ignore[attr-defined]
    return any(
        is_overridden(hook, module, "pytorch.LightningModule")
        or (datamodule is not None and is_overridden(hook, datamodule, "pytorch.LightningDataModule"))
        for hook in hooks
    )


def with_own_names(advice: str, strategy_type: str) -> str:
    """Return Lightning's advice on unused parameters with the names of this strategy."""
    advice = advice.replace("ddp_find_unused_parameters_true", f"{STRATEGY_NAME}_find_unused_parameters_true")
    return advice.replace("strategy=DDPStrategy(", f"strategy={strategy_type}(")


def refuse_slices(module: nn.Module) -> None:
    """Check that no layers are slices before the strategy cuts some: they would be taken for whole ones.

    Raises:
        ValueError: names the layer.
    """
    for name, layer in module.named_modules():
        if hasattr(layer, "slice_group"):
            raise ValueError(
                f"`{name}` (={type(layer).__name__}) must be a whole layer: strategy={STRATEGY_NAME!r} cuts layers "
                "itself, so that loss scale, trust ratios and checkpoints are of whole tensors. Leave the layer as it "
                "is and name it in `node_slices`, as strategy/node_slices/sliced_linear.py shows."
            )


def factories_from(setting: Any) -> tuple[Callable[[Any], Any], ...]:
    """Return the factories of extensions.

    Raises:
        ValueError: they are no list of factories.
    """
    some = tuple(setting) if isinstance(setting, Iterable) else (setting,)
    for one in some:
        if not callable(one):
            raise ValueError(
                f"`extensions` (={setting!r}) must be a list of factories, each called with a `FitContext` when a fit "
                "begins: an object would be shared between fits. Write extensions=[partial(MyExtension, every=50)]."
            )
    return some


def refuse_foreign_parameters(optimizers: Iterable[Optimizer], module: nn.Module) -> None:
    """Check that `module` has every parameter that an optimizer trains: DDP would not average others.

    Raises:
        ValueError: names optimizer and group.
    """
    # By identity: `in` would compare tensors element by element.
    known = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            if any(id(parameter) not in known for parameter in group["params"]):
                raise ValueError(
                    f"`configure_optimizers` returned {type(optimizer).__name__} with a parameter in group {index} "
                    "that is not part of the LightningModule: its gradients would never be averaged over ranks. "
                    "Register it (`self.name = torch.nn.Parameter(...)`) in `__init__` or `configure_model`."
                )


def refuse_what_is_not_averaged(optimizer: Optimizer, averaged: Collection[int], module: nn.Module) -> None:
    """Check, before a step, that DDP averages all that it trains; `averaged`: by `id`.

    Raises:
        RuntimeError: names the parameter.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in averaged:
                names = {id(p): name for name, p in module.named_parameters()}
                raise RuntimeError(
                    f"Parameter `{names.get(id(parameter), '(not in the module)')}` (shape {tuple(parameter.shape)}) "
                    "is trained but not averaged: DDP takes the trainable parameters when training starts, and this "
                    "one was added or unfrozen later, so every rank would train its own copy. Keep it trainable from "
                    "the start (with lr 0 until it is needed), or start a new fit after unfreezing."
                )


def refuse_nothing_to_train(module: nn.Module) -> None:
    """Check that `module` has a trainable parameter.

    Raises:
        ValueError: it has none, or all are frozen.
    """
    parameters = list(module.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        state = "all of them frozen" if parameters else "none registered"
        raise ValueError(
            f"{type(module).__name__} has {len(parameters)} parameters ({state}): there is nothing to train or to "
            "average. Make layers attributes of the module in `__init__` or `configure_model`, or unfreeze some."
        )
