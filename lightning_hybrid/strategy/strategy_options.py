"""Validation of a strategy's constructor arguments, which are then passed on as one object."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_hybrid.checks import plain_value, require_choice, require_number, require_whole
from lightning_hybrid.comm import CommPlan
from lightning_hybrid.comm.codec.codec import Codec
from lightning_hybrid.precision.loss_scale import LossScale, loss_scale_from
from lightning_hybrid.strategy.compatibility import refuse_excluded
from lightning_hybrid.strategy.extension import FitContext, FitExtension
from lightning_hybrid.strategy.option_classes import (
    Adasum,
    BetweenNodes,
    Comm,
    LocalSteps,
    Mean,
    Report,
    require_value,
)
from lightning_hybrid.strategy.registration import STRATEGY_NAME

ShardUpdate = Literal["off", "node", "world"]
UnevenBatches = Literal["error", "join"]
ExtensionFactory = Callable[[FitContext], FitExtension]

_HOOK_OPTIONS = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")
_OPTIONS_OF_THE_STRATEGY = (
    "module",
    "device_ids",
    "output_device",
    "process_group",
    "device_mesh",
    "mixed_precision",
)
_OPTION_TYPES: tuple[tuple[str, Any], ...] = (
    ("between_nodes", Mean),
    ("between_nodes", LocalSteps),
    ("comm", Comm),
    ("report", Report),
)
"""Arguments that take an option object, with the types whose fields a user may have written as arguments."""


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """Validated options of a strategy, which `parse` creates from constructor arguments.

    Attributes:
        strategy_features: Features of the strategy itself, in the format of `features`.
        between_nodes: How nodes combine their gradients or weights.
        comm: The options of the all-reduce.
        plan: The communication plan of `comm`, until a planner chooses another one.
        ranks_per_node: The number of consecutive ranks that form a node. None: the ranks of a host.
        shard_update: The ranks between which the update of weights is sharded.
        loss_scale: The loss scale for fp16, or None for the default.
        report: The options of reports.
        extensions: Factories of the user's extensions.
        uneven_batches: What happens if ranks have different numbers of training batches.
        exact_evaluation: Whether every sample counts once in evaluation.
        ddp_options: Keyword arguments for `DistributedDataParallel`.
    """

    strategy_features: Mapping[str, str]
    between_nodes: BetweenNodes
    comm: Comm
    plan: CommPlan
    ranks_per_node: int | None
    shard_update: ShardUpdate
    loss_scale: LossScale | None
    report: Report
    extensions: tuple[ExtensionFactory, ...]
    uneven_batches: UnevenBatches
    exact_evaluation: bool
    ddp_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(
        cls,
        ddp_kwargs: Mapping[str, Any],
        *,
        argument_names: Iterable[str],
        strategy_name: str = STRATEGY_NAME,
        strategy_features: Mapping[str, str] | None = None,
        between_nodes: BetweenNodes = Mean(),  # noqa: B008  frozen
        comm: Comm = Comm(),  # noqa: B008
        ranks_per_node: int | None = None,
        shard_update: ShardUpdate | bool = "off",
        loss_scale: str | float | LossScale | None = None,
        report: Report = Report(),  # noqa: B008
        extensions: Iterable[ExtensionFactory] | None = None,
        uneven_batches: UnevenBatches = "error",
        exact_evaluation: bool = False,
    ) -> StrategyOptions:
        """Validate the constructor arguments of a strategy, and return them as one object.

        This needs no process group.

        Args:
            ddp_kwargs: The keyword arguments that the strategy does not define itself.
            argument_names: The arguments of the strategy, for suggestions in errors.
            strategy_name: The name of the strategy, for errors.
            strategy_features: Features of the strategy itself, with which some options cannot be combined.
            between_nodes: As in `HybridAllReduceStrategy`.
            comm: As in `HybridAllReduceStrategy`.
            ranks_per_node: As in `HybridAllReduceStrategy`.
            shard_update: As in `HybridAllReduceStrategy`.
            loss_scale: As in `HybridAllReduceStrategy`.
            report: As in `HybridAllReduceStrategy`.
            extensions: As in `HybridAllReduceStrategy`.
            uneven_batches: As in `HybridAllReduceStrategy`.
            exact_evaluation: As in `HybridAllReduceStrategy`.

        Raises:
            ValueError: An option is unknown, has an invalid value, or cannot be combined with another one.
        """
        refuse_unknown_options(ddp_kwargs, argument_names, strategy_name)
        require_value(
            "between_nodes", between_nodes, (Mean, Adasum, LocalSteps), "Mean(dtype='int8')"
        )
        require_value("comm", comm, (Comm,), "Comm(algorithm='flat')")
        require_choice(
            "exact_evaluation",
            exact_evaluation,
            (True, False),
            "with True, every sample counts once in validation, test and prediction. Leave it out for False",
        )
        require_value("report", report, (Report,), "Report(trace_dir='traces')")

        ddp_options = dict(ddp_kwargs)
        comm = _with_bucket_cap(comm, ddp_options.pop("bucket_cap_mb", None))
        plan = comm.made_plan()
        ddp_options["bucket_cap_mb"] = plan.bucket_bytes / 2**20

        parsed_scale = None
        if loss_scale is not None:
            parsed_scale = loss_scale_from(loss_scale)

        options = cls(
            strategy_features=dict(strategy_features or {}),
            between_nodes=between_nodes,
            comm=comm,
            plan=plan,
            ranks_per_node=_parse_ranks_per_node(ranks_per_node),
            shard_update=_parse_shard_update(shard_update),
            loss_scale=parsed_scale,
            report=report,
            extensions=_parse_extensions(extensions),
            uneven_batches=_parse_uneven_batches(uneven_batches),
            exact_evaluation=exact_evaluation,
            ddp_options=ddp_options,
        )
        refuse_excluded(options.features())
        return options

    @property
    def is_adasum(self) -> bool:
        """True if nodes combine their gradients with Adasum."""
        return isinstance(self.between_nodes, Adasum)

    @property
    def local_steps(self) -> LocalSteps | None:
        """Options of local SGD, or None if nodes combine gradients in every step."""
        if isinstance(self.between_nodes, LocalSteps):
            return self.between_nodes
        return None

    @property
    def dtype_across_nodes(self) -> torch.dtype | Codec | None:
        """Data type or codec between nodes, or None for the data type used inside a node."""
        return self.between_nodes.on_wire

    @property
    def has_error_feedback(self) -> bool:
        """True if a codec's rounding errors are added to the next step's gradients."""
        codec = self.dtype_across_nodes
        return isinstance(codec, Codec) and codec.error_feedback

    @property
    def joins_uneven_batches(self) -> bool:
        """True if ranks with exhausted loaders join the remaining steps of the epoch."""
        return self.uneven_batches == "join"

    @property
    def trace_dir(self) -> str | None:
        """Folder for communication timelines, or None if none are written."""
        if self.report.trace_dir is None:
            return None
        return os.fspath(self.report.trace_dir)

    def features(self) -> dict[str, str]:
        """Return the features that the options enable, each with a description for error messages.

        The keys are names of `compatibility.CURES`.
        """
        between_nodes = f"`between_nodes` (={self.between_nodes!r})"
        features: dict[str, str] = {}
        if self.is_adasum:
            features["adasum"] = between_nodes
        if self.local_steps is not None:
            features["local steps"] = between_nodes
        if isinstance(self.dtype_across_nodes, Codec):
            features["codec"] = between_nodes
        if self.has_error_feedback:
            features["error feedback"] = between_nodes
        if self.shard_update != "off":
            features["shard update"] = f"`shard_update` (={self.shard_update!r})"
        if self.shard_update == "world":
            features["world update"] = "`shard_update` (='world')"
        if self.comm.planner is not None:
            features["planner"] = f"`comm.plan` (=a {type(self.comm.planner).__name__})"
        if self.plan.algorithm not in ("auto", "hierarchical"):
            features["algorithm"] = f"`comm.algorithm` (={self.plan.algorithm!r})"
        if self.ddp_options.get("find_unused_parameters"):
            features["unused parameters"] = "`find_unused_parameters` (=True)"
        if self.extensions:
            features["extensions"] = f"`extensions` (={list(self.extensions)!r:.80})"
        if self.joins_uneven_batches:
            features["uneven batches"] = f"`uneven_batches` (={self.uneven_batches!r})"
        if self.exact_evaluation:
            features["exact evaluation"] = "`exact_evaluation` (=True)"
        if self.ranks_per_node is not None:
            features["ranks per node"] = f"`ranks_per_node` (={self.ranks_per_node})"
        return features | dict(self.strategy_features)


def _with_bucket_cap(comm: Comm, bucket_cap_mb: Any) -> Comm:
    """Return a copy of `comm` with the bucket size from DDP's argument `bucket_cap_mb`, if it is set."""
    bucket_cap_mb = plain_value(bucket_cap_mb)
    if bucket_cap_mb is None:
        return comm
    if comm.bucket_bytes is not None:
        raise ValueError(
            f"`bucket_cap_mb` (={bucket_cap_mb}) and `comm.bucket_bytes` (={comm.bucket_bytes}) both set the bucket "
            "size. Set only `comm.bucket_bytes`."
        )
    if comm.plan is not None:
        raise ValueError(
            f"`bucket_cap_mb` (={bucket_cap_mb}) and `comm.plan` both set the bucket size. Leave `bucket_cap_mb` out, "
            "or set `bucket_bytes` of the plan."
        )
    why = "it is the size of a bucket in MiB. Set 25, for example, the default of DistributedDataParallel"
    require_number("bucket_cap_mb", bucket_cap_mb, why, above=True)
    return replace(comm, bucket_bytes=int(bucket_cap_mb * 2**20))


def _parse_ranks_per_node(ranks_per_node: Any) -> int | None:
    number: int | None = plain_value(ranks_per_node)
    if number is not None:
        require_whole(
            "ranks_per_node",
            number,
            "this number of consecutive ranks forms a node. Leave `ranks_per_node` out to detect the nodes",
        )
    return number


def _parse_shard_update(shard_update: Any) -> ShardUpdate:
    why = (
        "it selects the ranks that share fp32 master weights and optimizer state. Set shard_update='node', or leave "
        "it out"
    )
    require_choice("shard_update", shard_update, ("off", "node", "world", False), why)
    # YAML reads `off` as a boolean.
    parsed: ShardUpdate = shard_update or "off"
    return parsed


def _parse_extensions(extensions: Any) -> tuple[ExtensionFactory, ...]:
    if extensions is None:
        return ()
    factories: tuple[Any, ...] = ()
    is_list = isinstance(extensions, Iterable)
    if is_list:
        factories = tuple(extensions)
    if not is_list or not all(callable(factory) for factory in factories):
        raise ValueError(
            f"`extensions` (={extensions!r:.120}) must be a list of extension factories, such as classes or "
            "`functools.partial(LogsNorm, every=10)`, because each run creates its own extensions in each process. "
            "Set extensions=[LogsNorm], without calling the class."
        )
    return factories


def _parse_uneven_batches(uneven_batches: Any) -> UnevenBatches:
    why = (
        "it selects what happens if the training loader of a rank ends before the others. Set uneven_batches='join' "
        "to train on all batches, or leave it out"
    )
    require_choice("uneven_batches", uneven_batches, ("error", "join"), why)
    parsed: UnevenBatches = uneven_batches
    return parsed


def argument_names(strategy_type: type, root: type) -> list[str]:
    """Return the names of the constructor arguments of a strategy and its base classes.

    Args:
        strategy_type: The class of the strategy.
        root: The most basic class whose arguments are included.
    """
    names: list[str] = []
    for base in strategy_type.__mro__:
        if not issubclass(base, root) or "__init__" not in vars(base):
            continue
        for parameter in inspect.signature(vars(base)["__init__"]).parameters.values():
            is_named = parameter.kind is not inspect.Parameter.VAR_KEYWORD
            if is_named and parameter.name != "self" and parameter.name not in names:
                names.append(parameter.name)
    return names


def refuse_unknown_options(
    ddp_kwargs: Mapping[str, Any], argument_names: Iterable[str], strategy_name: str = STRATEGY_NAME
) -> None:
    """Raise for keyword arguments that are not arguments of DDP, or that users cannot set.

    Args:
        ddp_kwargs: The keyword arguments to check.
        argument_names: The arguments of the strategy, for suggestions.
        strategy_name: The name of the strategy.

    Raises:
        ValueError: A keyword is unknown, or the strategy sets it. The error names the most similar option.
    """
    strategy_names = [name for name in argument_names if name != "ddp_kwargs"]
    # Lightning passes every unknown keyword on, and DDP would reject it only after the process group is created.
    ddp_names = list(inspect.signature(DistributedDataParallel).parameters)
    for name, value in ddp_kwargs.items():
        if name in _HOOK_OPTIONS:
            if value is None:  # because this is Lightning's own default
                continue
            raise ValueError(
                f"`{name}` (={value!r}) cannot be combined with strategy={strategy_name!r}, which registers its own "
                "communication hook. Replace fp16_compress_hook by comm=Comm(dtype='float16'), bf16_compress_hook by "
                "comm=Comm(dtype='bfloat16'), and model averaging by between_nodes=LocalSteps(every=8). For another "
                "hook, such as PowerSGD, use strategy='ddp'."
            )
        if name in _OPTIONS_OF_THE_STRATEGY:
            raise ValueError(
                f"`{name}` cannot be set, because the strategy passes its own value to DistributedDataParallel. Leave "
                f"`{name}` out."
            )
        if name not in ddp_names:
            suggestion = _suggestion(name, [*strategy_names, *ddp_names])
            raise ValueError(
                f"`{name}` (={value!r}) is not an option of strategy={strategy_name!r} or of DistributedDataParallel."
                f"{suggestion} Options: {', '.join(strategy_names)}."
            )


def _suggestion(name: str, names: list[str]) -> str:
    """Return a sentence that suggests the most similar option or field of an option, or an empty string."""
    fields: dict[str, str] = {}
    for argument, option_type in _OPTION_TYPES:
        for option_field in dataclasses.fields(option_type):
            fields[option_field.name] = (
                f"{argument}={option_type.__name__}({option_field.name}=...)"
            )
    matches = difflib.get_close_matches(name, [*names, *fields], n=1)
    if not matches:
        return ""
    return f" Did you mean `{fields.get(matches[0], matches[0])}`?"
