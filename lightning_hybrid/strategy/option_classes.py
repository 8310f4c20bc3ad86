"""Option classes of the strategies. Users pass objects of these classes to a strategy.

Choices that cannot be combined are classes for the same argument. `StrategyOptions.parse` checks the arguments
themselves.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from lightning_hybrid.checks import (
    did_you_mean,
    make_plain,
    make_whole,
    require_choice,
    require_number,
    require_whole,
)
from lightning_hybrid.comm import CommPlan, Topology
from lightning_hybrid.comm.codec.codec import Codec

_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_DTYPES: dict[str, torch.dtype] = {}
for _short_name, _name in _NAMES.items():
    _DTYPES[_name] = getattr(torch, _name)
    _DTYPES[_short_name] = getattr(torch, _name)


@runtime_checkable
class Planner(Protocol):
    """Interface of planners, which choose a communication plan when training starts.

    `planning.model.cluster.Cluster` implements it.
    """

    def plan_for(
        self, numels: Sequence[int], topology: Topology, *, itemsize: int, on_cuda: bool
    ) -> CommPlan:
        """Return the communication plan for gradients of the given sizes.

        All ranks must get the same plan. `numels` lists the numbers of elements in the order in which gradients get
        ready.

        With a codec between nodes, the strategy also passes `codec_bits=8` or `4`.
        """


class OptionValue:
    """Base class of option objects, whose `repr` is the constructor call without default values."""

    def __repr__(self) -> str:
        option: Any = self  # a dataclass
        arguments: list[str] = []
        for field_of_option in dataclasses.fields(option):
            value = getattr(self, field_of_option.name)
            if value != field_of_option.default:
                arguments.append(f"{field_of_option.name}={value!r}")
        return f"{type(self).__name__}({', '.join(arguments)})"


class BetweenNodes(OptionValue):
    """Base class of options for communication between nodes, such as `Mean` and `LocalSteps`."""

    # This is not a dataclass, so that LightningCLI asks for a class and keeps it. From a union of dataclasses it would
    # choose the first one that fits.

    @property
    def on_wire(self) -> torch.dtype | Codec | None:
        """Data type or codec between nodes, or None for the data type used inside a node."""
        return None


@dataclass(frozen=True, kw_only=True, repr=False)
class Mean(BetweenNodes):
    """Option to average gradients between nodes in every step.

    Args:
        dtype: Data type of gradients sent between nodes: `"float16"`, `"bfloat16"`, `"int8"` or `"int4"`. The
            integer types are rounded to 8 or 4 bits without bias (see comm/README.md). Traffic inside a node is not
            affected, except by the 16-bit types with `flat` and `parallel_flat`. These algorithms have no stage inside
            the node, so ranks of a node also add their gradients in this type. `"auto"` means `flat` on GPUs. Set
            comm=Comm(algorithm="two_level") to add them in their own dtype. None: the dtype used inside the node.
        error_feedback: With `"int8"` or `"int4"`, round to the nearest value and add the rounding error to the next
            step's gradients.

    Raises:
        ValueError: `dtype` is unknown, or `error_feedback` is set without `"int8"` or `"int4"`.

    >>> Mean(dtype="int4", error_feedback=True), str(Mean(dtype="int4", error_feedback=True).on_wire), Mean().on_wire
    (Mean(dtype='int4', error_feedback=True), 'int4 with error feedback (seed 0)', None)
    """

    dtype: str | torch.dtype | None = field(default=None, kw_only=False)
    error_feedback: bool = False

    def __post_init__(self) -> None:
        """Raise `ValueError` if `dtype` or `error_feedback` is invalid."""
        name = "between_nodes.error_feedback"
        dtype = _on_wire(self.dtype)
        why = "True adds rounding errors to the gradients of the next step. Leave it out for False"
        require_choice(name, self.error_feedback, (True, False), why)
        if self.error_feedback and not isinstance(dtype, Codec):
            dtype_name = str(dtype).removeprefix("torch.")
            raise ValueError(
                f"`{name}` (=True) needs a codec between nodes, but `between_nodes.dtype` is {dtype_name}. Only the "
                f"rounding errors of int8 and int4 are fed back. Set dtype='int8' or 'int4', or leave `{name}` out."
            )

    @property
    def on_wire(self) -> torch.dtype | Codec | None:
        """Data type or codec of gradients between nodes, or None for the data type used inside a node."""
        dtype = _on_wire(self.dtype)
        if isinstance(dtype, Codec):
            return replace(dtype, error_feedback=self.error_feedback)
        return dtype


@dataclass(frozen=True, kw_only=True, repr=False)
class Adasum(BetweenNodes):
    """Option to combine the mean gradients of the nodes with Adasum, per parameter and in every step.

    Gradients that agree are averaged, and orthogonal ones are summed.

    Source: Maleki et al. 2020 (arXiv:2006.02924).
    """


@dataclass(frozen=True, kw_only=True, repr=False)
class LocalSteps(BetweenNodes):
    """Option for local SGD, in which nodes train independently and average weights periodically.

    Nodes average weights and momentum every `every` steps:

        w <- mean over nodes of w        after steps from_step + every, from_step + 2 * every, ...

    Args:
        every: Number of optimizer steps between two averages, at least 2.
        from_step: Average gradients over all ranks in every step until this step, then switch to local steps.
        dtype: Data type in which weight differences are sent: None (fp32), `"bfloat16"`, `"int8"` or `"int4"`.
        outer_lr, outer_momentum: Nesterov step from the last common weights to the next. DiLoCo uses 0.7 and 0.9. With
            1 and 0 (default), the average is used as it is.

    Raises:
        ValueError: An argument is out of range.

    Source: Stich 2019 (arXiv:1805.09767); Lin et al. 2020 (arXiv:1808.07217); Douillard et al. 2023 (arXiv:2311.08105).

    >>> steps = LocalSteps(every=4, from_step=2)
    >>> [num_steps for num_steps in range(12) if steps.end_at(num_steps)]
    [6, 10]
    """

    every: int = field(kw_only=False)
    from_step: int = 0
    dtype: str | torch.dtype | None = None
    outer_lr: float = 1.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        """Raise `ValueError` if an option is out of range or `dtype` is not supported."""
        make_plain(self, "every", "from_step", "outer_lr", "outer_momentum")
        why = (
            "nodes average their weights after this number of optimizer steps. To average gradients over all ranks in "
            "every step, set between_nodes=Mean()"
        )
        require_whole("between_nodes.every", self.every, why, least=2, unit="steps")
        why = "nodes train independently after this number of optimizer steps. Set 0 to begin with the first step"
        require_whole("between_nodes.from_step", self.from_step, why, least=0, unit="steps")
        why = "it multiplies the change of the averaged weights. Set 1 for a plain average"
        require_number("between_nodes.outer_lr", self.outer_lr, why, above=True)
        why = "with 1 or more, the momentum of past periods would never fade. Set 0.9, as in DiLoCo"
        require_number("between_nodes.outer_momentum", self.outer_momentum, why, high=1)
        if self.on_wire is torch.float16:
            raise ValueError(
                f"`between_nodes.dtype` (={self.dtype!r}) cannot be used for weight changes, because weight "
                "changes are not scaled and can be too small for fp16. Set dtype='bfloat16', 'int8' or 'int4', or "
                "leave `between_nodes.dtype` out."
            )

    @property
    def on_wire(self) -> torch.dtype | Codec | None:
        """Data type or codec in which nodes send weight differences, and gradients before `from_step`."""
        return _on_wire(self.dtype)

    def end_at(self, num_steps: int) -> bool:
        """Return whether nodes average their weights after `num_steps` optimizer steps of the run."""
        return num_steps > self.from_step and (num_steps - self.from_step) % self.every == 0

    def num_periods(self, num_steps: int) -> int:
        """Return how many times weights are averaged in the first `num_steps` optimizer steps."""
        return max(0, num_steps - self.from_step) // self.every

    @property
    def has_outer_step(self) -> bool:
        """True if an outer optimizer step is applied to the averaged weights."""
        return self.outer_lr != 1 or self.outer_momentum != 0


@dataclass(frozen=True, kw_only=True, repr=False)
class Comm(OptionValue):
    """Options of the all-reduce. None of them changes the result by more than rounding errors.

    Args:
        algorithm: `"flat"`: one all-reduce over all ranks. `"parallel_flat"`: the same, several at once.
            `"hierarchical"`: reduce inside each node, ring of node leaders, broadcast inside each node. `"two_level"`:
            reduce-scatter inside each node, all-reduce between nodes, all-gather inside each node. `"auto"` (default):
            the best fit for each bucket's size and the topology.
        bucket_bytes: Size of the buckets in which gradients are fused, in bytes.
        plan: Complete communication plan, in place of `algorithm` and `bucket_bytes`: a `CommPlan`, the path of a plan
            in JSON, or a `Planner` that makes one when training starts, such as a `planning.model.cluster.Cluster`.
        dtype: Data type on the wire (`"float16"`, `torch.bfloat16`, ...). None: the gradients' dtype.

    Raises:
        ValueError: An argument is invalid, or `plan` is combined with `algorithm` or `bucket_bytes`.
    """

    algorithm: Literal["auto", "flat", "parallel_flat", "hierarchical", "two_level"] = field(
        default="auto", kw_only=False
    )
    bucket_bytes: int | None = None
    plan: CommPlan | Planner | str | None = None
    dtype: str | torch.dtype | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` if an option is invalid or the plan file cannot be read."""
        make_whole(self, "bucket_bytes")
        self.made_plan()
        dtype_from(self.dtype, name="comm.dtype")

    @property
    def on_wire(self) -> torch.dtype | None:
        """Data type in which gradients are sent, or None for the gradients' own data type."""
        return dtype_from(self.dtype, name="comm.dtype")

    @property
    def planner(self) -> Planner | None:
        """Planner that chooses the communication plan when training starts, or None."""
        return self.plan if isinstance(self.plan, Planner) else None

    def made_plan(self) -> CommPlan:
        """Return the communication plan that results from the options.

        It is `plan` itself, the plan in the file `plan`, or a plan made from `algorithm` and `bucket_bytes`. With a
        planner it is the default plan, until the planner chooses one.

        Raises:
            ValueError: `plan` is combined with `algorithm` or `bucket_bytes`, or a value is invalid.
        """
        plan = self.plan
        size = self.bucket_bytes
        if plan is None:
            default_plan = CommPlan(algorithm=self.algorithm)
            if size is None:
                return default_plan
            return replace(default_plan, bucket_bytes=size, num_buckets=1)
        if self.algorithm != "auto" or size is not None:
            raise ValueError(
                f"`comm.plan` (={plan!r}) already sets the algorithm and the bucket size. Leave `comm.algorithm` and "
                "`comm.bucket_bytes` out, or leave the plan out."
            )
        # A class has the same attributes as its objects, so that the class of a planner would count as a planner.
        if isinstance(plan, type):
            raise ValueError(
                f"`comm.plan` (={plan.__name__}) is a class, but must be an object. Set "
                f"comm=Comm(plan={plan.__name__}(...))."
            )
        if isinstance(plan, Planner):
            return CommPlan()
        if isinstance(plan, CommPlan):
            return plan
        try:
            return CommPlan.from_json(Path(plan).read_text())
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(
                f"`comm.plan` (={plan!r}) cannot be read as a plan: {error}. Create a plan with "
                "`CommPlan(...).to_json()`, or leave `comm.plan` out."
            ) from error


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(OptionValue):
    """Options for communication timelines and link metrics.

    Args:
        trace_dir: Folder for a timeline of every bucket and stage, `rank<r>.json`, for Perfetto. None: no timeline.
        link_bytes_per_s: Bandwidth of a node's link to the other nodes in each direction, in bytes per second. Only
            metrics and reports use it.

    Raises:
        ValueError: An argument is invalid.
    """

    trace_dir: str | None = None
    link_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` if an option has an invalid type or value."""
        make_plain(self, "link_bytes_per_s")
        if self.trace_dir is not None and not isinstance(self.trace_dir, str | os.PathLike):
            raise ValueError(
                f"`report.trace_dir` (={self.trace_dir!r}) must be the path of a folder, or None. Leave "
                "`report.trace_dir` out to write no timelines."
            )
        if self.link_bytes_per_s is not None:
            why = (
                "it is the bandwidth of a node's link in each direction in bytes per second, such as 1.25e8 for "
                "1 Gbit/s. Leave it out if it is unknown"
            )
            require_number("report.link_bytes_per_s", self.link_bytes_per_s, why, above=True)


def require_value(name: str, value: Any, kinds: tuple[type, ...], example: str) -> None:
    """Raise unless an argument is an instance of one of the given option classes.

    Args:
        name: The name of the argument.
        value: The value of the argument.
        kinds: The accepted dataclasses.
        example: Source text of a valid object, for the error message.

    Raises:
        ValueError: The value has another type. The error suggests an object.
    """
    if isinstance(value, kinds):
        return
    class_names = [kind.__name__ for kind in kinds]
    rule = class_names[0]
    if len(class_names) > 1:
        rule = f"{', '.join(class_names[:-1])} or {class_names[-1]}"
    shown = f"{value!r:.80}"
    if isinstance(value, type):
        shown = value.__name__
    suggestion = _object_meant_by(value, kinds)
    cure = f"Set {name}={example}, for example."
    if suggestion is not None:
        cure = f"Did you mean {name}={suggestion}?"
    raise ValueError(f"`{name}` (={shown}) must be a {rule} object. {cure}")


def _object_meant_by(value: Any, kinds: tuple[type, ...]) -> str | None:
    """Return the source code of the option object that the user probably meant, or None.

    The value may be a class, the name of a class, a mapping of fields or the value of one field.
    """
    for kind in kinds:
        if value is kind or str(value).lower().replace("_", "") == kind.__name__.lower():
            return _EXAMPLES.get(kind, f"{kind.__name__}()")
    for kind in kinds:
        candidates: list[Mapping[str, Any]] = [
            {option.name: value} for option in dataclasses.fields(kind)
        ]
        if isinstance(value, Mapping):
            candidates = [value]
        for fields in candidates:
            try:
                return repr(kind(**fields))
            except (TypeError, ValueError):  # The value does not fit this field.
                continue
    return None


_EXAMPLES: dict[type, str] = {LocalSteps: "LocalSteps(every=8)"}
"""Objects to suggest for classes that have no default for every field."""


def dtype_from(
    setting: str | torch.dtype | None, *, name: str, further_choices: tuple[str, ...] = ()
) -> torch.dtype | None:
    """Convert the name of a data type in an option to a `torch.dtype`.

    Args:
        setting: The value of the option. None is returned unchanged.
        name: The name of the option, for the error message.
        further_choices: Further values that the option may have, for the error message.

    Raises:
        ValueError: The setting is not a dtype that is supported for gradients.

    >>> [dtype_from(name, name="comm.dtype") for name in ("fp16", "torch.bfloat16", None)]
    [torch.float16, torch.bfloat16, None]
    """
    if setting is None or (isinstance(setting, torch.dtype) and setting in _DTYPES.values()):
        return setting
    if isinstance(setting, str) and setting.removeprefix("torch.") in _DTYPES:
        return _DTYPES[setting.removeprefix("torch.")]
    cure = ""
    name_of_bits = str(setting).removeprefix("torch.")
    if name_of_bits in ("int8", "int4"):
        cure = (
            " Gradients cannot be summed in 8 or 4 bits. To use them between nodes, set "
            f"between_nodes=Mean(dtype={name_of_bits!r})."
        )
    choices = [*_DTYPES, *further_choices]
    if not cure:
        cure = (
            did_you_mean(name_of_bits, choices)
            or " Leave it out to send gradients in their own dtype."
        )
    raise ValueError(f"`{name}` (={setting!r}) must be None or one of {', '.join(choices)}.{cure}")


def _on_wire(setting: str | torch.dtype | None) -> torch.dtype | Codec | None:
    """Convert a value of `between_nodes.dtype` to a data type or a codec."""
    name = str(setting).removeprefix("torch.")
    if name == "int8":
        return Codec(bits=8)
    if name == "int4":
        return Codec(bits=4)
    return dtype_from(setting, name="between_nodes.dtype", further_choices=("int8", "int4"))
