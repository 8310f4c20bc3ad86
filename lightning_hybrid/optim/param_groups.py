"""Parameter groups for layer-wise optimizers, selected by module type and parameter name."""

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from lightning_hybrid.checks import plain_value, require_number

Rule = Literal["normalization", "bias", "vector"]
Predicate = Callable[[str, nn.Parameter, nn.Module], bool]
Exclusion = type[nn.Module] | str | Predicate

# _NormBase is the base class of BatchNorm, SyncBatchNorm and InstanceNorm, including lazy modules.
NORMALIZATION = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


@dataclass(frozen=True, kw_only=True)
class ParamChoice:
    """Decision on whether the steps of a parameter are scaled by a trust ratio (adapted) or not (excluded).

    Attributes:
        name: Full name of the parameter.
        param: Parameter.
        reason: Reason why the parameter is excluded, or an empty string if it is adapted.
    """

    name: str
    param: nn.Parameter
    reason: str


class ParamGroups(list[dict[str, Any]]):
    """List of two parameter groups, one whose steps are scaled by trust ratios and one whose steps are not.

    Any optimizer accepts them.

    Args:
        groups: Adapted group and excluded group.
        choices: Decision for each parameter, in the order of the model.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], choices: tuple[ParamChoice, ...]) -> None:
        super().__init__(groups)
        self.choices = choices

    def report(self) -> str:
        """Return a text table that counts adapted parameters, and excluded parameters by reason.

        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> print(param_groups(model, weight_decay=5e-4).report())
        parameters                  tensors  elements  example
        adapted                           1       216  0.weight
        excluded: bias                    1         8  0.bias
        excluded: BatchNorm2d             2        16  1.weight, 1.bias
        """
        by_label: dict[str, list[ParamChoice]] = {}
        for choice in sorted(self.choices, key=lambda choice: choice.reason != ""):
            label = "adapted"
            if choice.reason:
                label = f"excluded: {choice.reason}"
            by_label.setdefault(label, []).append(choice)

        rows = [("parameters", "tensors", "elements", "example")]
        for label, choices in by_label.items():
            num_elements = sum(choice.param.numel() for choice in choices)
            example = ", ".join(choice.name for choice in choices[:2])
            if len(choices) > 2:
                example += ", ..."
            rows.append((label, f"{len(choices):,}", f"{num_elements:,}", example))

        width = max(26, *(len(label) for label, _, _, _ in rows))
        lines = []
        for label, count, size, example in rows:
            lines.append(f"{label:<{width}}  {count:>7}  {size:>8}  {example}")
        return "\n".join(lines)


def param_groups(
    model: nn.Module,
    weight_decay: float,
    exclude: Exclusion | Collection[Exclusion] = (),
    *,
    rules: Collection[Rule] = get_args(Rule),
    include_frozen: bool = False,
    named: bool = False,
) -> ParamGroups:
    """Split a model's parameters into a group with trust ratios and weight decay, and a group without both.

        adapted     weight_decay = `weight_decay`    trust_ratio = True
        excluded    weight_decay = 0                 trust_ratio = False

    A parameter is excluded if one of `rules` (default: all three) or one of `exclude` applies to it:

        "normalization"   any parameter in a normalization module: BatchNorm, SyncBatchNorm, InstanceNorm,
                          LayerNorm, GroupNorm, RMSNorm, LocalResponseNorm and their subclasses
        "bias"            a parameter with the name `bias`, `bias_...` or `..._bias` in its module
        "vector"          a parameter with at most one dimension, such as a scale or a gate
        a module type     a parameter in such a module or in one of its submodules
        a pattern         a parameter whose full name matches, as in `fnmatch` and case-sensitive: "head.*"
        a predicate       a parameter for which `predicate(name, param, module)` is true, where `module` holds it

    `rules=("normalization",)` is the paper's rule, which adapts biases as well. `rules=()` adapts all parameters.

    A parameter that modules share is listed once, with its first name. It is excluded if a rule applies to it
    in any of these modules. Both groups have the order of `model.named_parameters()`, and exist even if they
    are empty. They are plain dicts, so torch's optimizers accept them and ignore `trust_ratio`.

    Args:
        model: Module whose parameters are split.
        weight_decay: Weight decay of the adapted group.
        exclude: Module type, pattern or predicate, or a collection of these.
        rules: Names of the rules that exclude parameters.
        include_frozen: Whether to include frozen parameters (`requires_grad=False`).
        named: Whether to add the names of parameters to the groups. torch then raises an error for later groups
            without names, which `BaseFinetuning` adds.

    Raises:
        TypeError: `model` is not a module, for example `net.parameters()`.
        ValueError: No parameter is trainable, a lazy module has not run, a rule is unknown, or an exclusion matches no
            parameter.

    >>> model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2), nn.LayerNorm(2))
    >>> adapted, excluded = param_groups(model, weight_decay=0.1, exclude=[nn.Embedding], named=True)
    >>> adapted["param_names"], adapted["weight_decay"], adapted["trust_ratio"]
    (['1.weight'], 0.1, True)
    >>> excluded["param_names"], excluded["weight_decay"], excluded["trust_ratio"]
    (['0.weight', '1.bias', '2.weight', '2.bias'], 0.0, False)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"`model` must be a module, but it is of type {type(model).__name__}. The rules depend on "
            "the types of layers. Call param_groups(net, ...) instead of param_groups(net.parameters(), ...)."
        )
    weight_decay = plain_value(weight_decay)
    require_number(
        "weight_decay",
        weight_decay,
        "a negative decay would make the weights grow. Set 0 to disable it",
    )
    exclusions = _checked_exclusions(exclude)
    _check_rules(rules)

    reasons = _exclusion_reasons(model, exclusions, rules)
    choices = []
    for param, (name, reason) in reasons.items():
        if include_frozen or param.requires_grad:
            choices.append(ParamChoice(name=name, param=param, reason=reason))
    if not choices:
        state = "it has no parameters at all"
        if reasons:
            state = f"all {len(reasons)} parameters are frozen"
        raise ValueError(
            f"`model` (={type(model).__name__}) has no trainable parameters, because {state}. Call "
            "`requires_grad_(True)` on the parameters to train, or pass `include_frozen=True`."
        )

    adapted = [choice for choice in choices if not choice.reason]
    excluded = [choice for choice in choices if choice.reason]
    # Empty groups are kept, so that the number of groups is constant for schedules.
    groups = [
        _group_of(adapted, weight_decay, is_adapted=True, named=named),
        _group_of(excluded, 0.0, is_adapted=False, named=named),
    ]
    return ParamGroups(groups, tuple(choices))


def _group_of(
    choices: Collection[ParamChoice], weight_decay: float, *, is_adapted: bool, named: bool
) -> dict[str, Any]:
    """Create the optimizer's parameter group for some parameters."""
    group: dict[str, Any] = {"params": [choice.param for choice in choices]}
    if named:
        group["param_names"] = [choice.name for choice in choices]
    group["weight_decay"] = weight_decay
    group["trust_ratio"] = is_adapted
    return group


def _exclusion_reasons(
    model: nn.Module, exclusions: tuple[Exclusion, ...], rules: Collection[Rule]
) -> dict[nn.Parameter, tuple[str, str]]:
    """Return the name of each parameter and the reason for its exclusion (empty if it is not excluded)."""
    names: dict[nn.Parameter, str] = {}
    reasons: dict[nn.Parameter, str] = {}
    matched: set[int] = set()
    for name, param, ancestors in _walk_parameters(model):
        if is_lazy(param):
            raise ValueError(
                f"`{name}` (={type(param).__name__}) has no shape yet, because its lazy module is not initialized. "
                "Run one batch through the model before you call `param_groups`."
            )
        # A shared parameter appears several times. It keeps its first name, and each of its modules may exclude it.
        names.setdefault(param, name)
        # All exclusions are tried even if a rule applies, because an exclusion that matches nothing is an error below.
        applying = []
        for index, exclusion in enumerate(exclusions):
            if _applies(exclusion, name, param, ancestors):
                applying.append(index)
        matched.update(applying)
        reason = _rule_reason(name, param, ancestors, rules)
        if not reason and applying:
            reason = _text_of(exclusions[applying[0]])
        if reason:
            reasons.setdefault(param, reason)

    _check_all_matched(exclusions, matched, list(names.values()))
    return {param: (name, reasons.get(param, "")) for param, name in names.items()}


def _check_rules(rules: Collection[Rule]) -> None:
    for rule in rules:
        if rule not in get_args(Rule):
            raise ValueError(
                f"`rules` (={rules!r}) contains {rule!r}, which is not a rule. The rules are "
                f"{', '.join(map(repr, get_args(Rule)))}. Pass patterns, types and predicates as `exclude`."
            )


def _walk_parameters(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Parameter, tuple[nn.Module, ...]]]:
    """Yield the name of each parameter, the parameter, and all modules that contain it.

    Unlike `named_parameters`, the function yields a shared parameter once for each module that holds it.
    """

    def walk(
        module: nn.Module, prefix: str, ancestors: tuple[nn.Module, ...]
    ) -> Iterator[tuple[str, nn.Parameter, tuple[nn.Module, ...]]]:
        ancestors_and_self = (*ancestors, module)
        for name, param in module._parameters.items():
            if param is not None:
                yield prefix + name, param, ancestors_and_self
        for name, child in module._modules.items():
            # A module that contains itself would lead to endless recursion.
            if child is not None and child not in ancestors_and_self:
                yield from walk(child, f"{prefix}{name}.", ancestors_and_self)

    return walk(model, "", ())


def _rule_reason(
    name: str, param: nn.Parameter, ancestors: tuple[nn.Module, ...], rules: Collection[Rule]
) -> str:
    if "normalization" in rules:
        # All ancestors are checked, because a parametrized weight belongs to a submodule of the normalization module.
        for module in ancestors:
            if isinstance(module, NORMALIZATION):
                return type(module).__name__
    if "bias" in rules:
        # A parametrized bias is called `parametrizations.bias.original`.
        path = name.split(".")
        leaf = path[-1]
        if "parametrizations" in path[-3:-2]:
            leaf = path[-2]
        if leaf == "bias" or leaf.startswith("bias_") or leaf.endswith("_bias"):
            return "bias"
    if "vector" in rules and param.dim() <= 1:
        return "vector"
    return ""


def _applies(
    exclusion: Exclusion, name: str, param: nn.Parameter, ancestors: tuple[nn.Module, ...]
) -> bool:
    if isinstance(exclusion, str):
        return fnmatchcase(name, exclusion)
    if isinstance(exclusion, type):
        return any(isinstance(module, exclusion) for module in ancestors)
    return bool(exclusion(name, param, ancestors[-1]))


def _text_of(exclusion: Exclusion) -> str:
    if isinstance(exclusion, str):
        return f"pattern {exclusion!r}"
    if isinstance(exclusion, type):
        return f"in {exclusion.__name__}"
    return f"predicate {getattr(exclusion, '__name__', type(exclusion).__name__)}"


def _checked_exclusions(exclude: Any) -> tuple[Exclusion, ...]:
    exclusions: tuple[Any, ...]
    if isinstance(exclude, str | type) or callable(exclude):
        exclusions = (exclude,)
    else:
        exclusions = tuple(exclude)
    for exclusion in exclusions:
        if isinstance(exclusion, type) and not issubclass(exclusion, nn.Module):
            raise ValueError(
                f"`exclude` (={exclusion.__name__}) must be a module type, a name pattern or a predicate, but this "
                "type is not a subclass of nn.Module. To exclude single parameters, pass a predicate(name, param, "
                "module)."
            )
        if not isinstance(exclusion, str) and not callable(exclusion):
            raise ValueError(
                f"`exclude` (={exclusion!r:.80}) must be a module type, a name pattern or a predicate. Pass, for "
                'example, nn.Embedding, "head.*" or lambda name, param, module: param.numel() < 100.'
            )
    return exclusions


def _check_all_matched(
    exclusions: tuple[Exclusion, ...], matched: set[int], names: list[str]
) -> None:
    for index, exclusion in enumerate(exclusions):
        if index in matched or not names:
            continue
        if isinstance(exclusion, str):
            similar = difflib.get_close_matches(exclusion, names, n=3, cutoff=0.3)
            if not similar:
                similar = names[:3]
            raise ValueError(
                f"`exclude` (={exclusion!r}) matches none of the {len(names)} parameter names. Use "
                f"a pattern that matches a full name, such as {', '.join(similar)}."
            )
        if isinstance(exclusion, type):
            raise ValueError(
                f"`exclude` (={exclusion.__name__}) matches none of the {len(names)} parameters, because no module of "
                "this type has a parameter. Leave `exclude` out, or check the types of the model's modules."
            )
