"""The choice of parameters that a layer-wise optimizer scales and decays, by module type and name."""

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from lightning_hybrid.checks import plain_value, require_number

Rule = Literal["normalisation", "bias", "vector"]
Predicate = Callable[[str, nn.Parameter, nn.Module], bool]
Exclusion = type[nn.Module] | str | Predicate

# _NormBase is every BatchNorm, SyncBatchNorm and InstanceNorm, lazy ones too.
NORMALISATION = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


@dataclass(frozen=True, kw_only=True)
class ParamChoice:
    """One parameter and its group: `reason` says why it is excluded, and is empty if it is not."""

    name: str
    param: nn.Parameter
    reason: str


class ParamGroups(list[dict[str, Any]]):
    """Two parameter groups for any optimizer, adapted and excluded; `choices` says why, in the model's order."""

    def __init__(self, groups: Iterable[dict[str, Any]], choices: tuple[ParamChoice, ...]) -> None:
        super().__init__(groups)
        self.choices = choices

    def report(self) -> str:
        """Format a table of what is adapted and what is excluded for which reason, in tensors and elements.

        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> print(param_groups(model, weight_decay=5e-4).report())
        parameters                  tensors  elements  example
        adapted                           1       216  0.weight
        excluded: bias                    1         8  0.bias
        excluded: BatchNorm2d             2        16  1.weight, 1.bias
        """
        rows = [("parameters", "tensors", "elements", "example")]
        by_label: dict[str, list[ParamChoice]] = {}
        for choice in sorted(self.choices, key=lambda choice: choice.reason != ""):
            by_label.setdefault(
                f"excluded: {choice.reason}" if choice.reason else "adapted", []
            ).append(choice)
        for label, choices in by_label.items():
            names = [choice.name for choice in choices]
            example = ", ".join(names[:2]) + (", ..." if len(names) > 2 else "")
            rows.append(
                (
                    label,
                    f"{len(choices):,}",
                    f"{sum(choice.param.numel() for choice in choices):,}",
                    example,
                )
            )
        width = max(26, *(len(row[0]) for row in rows))
        return "\n".join(
            f"{label:<{width}}  {count:>7}  {size:>8}  {example}"
            for label, count, size, example in rows
        )


def param_groups(
    model: nn.Module,
    weight_decay: float,
    exclude: Exclusion | Collection[Exclusion] = (),
    *,
    rules: Collection[Rule] = get_args(Rule),
    include_frozen: bool = False,
    named: bool = False,
) -> ParamGroups:
    """Split the parameters of `model` into those to scale and decay, and those to leave alone.

        adapted     weight_decay = `weight_decay`    trust_ratio = True
        excluded    weight_decay = 0                 trust_ratio = False

    Excluded is a parameter that one of `rules` (default all three) or of `exclude` applies to:

        "normalisation"   a parameter of any shape in a normalisation module, known by type: BatchNorm, SyncBatchNorm,
                          InstanceNorm, LayerNorm, GroupNorm, RMSNorm, LocalResponseNorm and their subclasses
        "bias"            a parameter that its module, of any type, calls `bias`, `bias_...` or `..._bias`
        "vector"          one with at most one dimension: home-made normalisation, scales and gates too
        a module type     a parameter in such a module, or anywhere below one
        a pattern         one whose full name matches, as in `fnmatch` and case-sensitive: "head.*"
        a predicate       one for which `predicate(name, param, module)` is true; `module` is the one that holds it

    For the paper's own rule, which adapts biases too, give `rules=("normalisation",)`; for everything `rules=()`.

    A parameter shared between modules comes once, under its first name, and is excluded if any of its places is.
    Frozen parameters (`requires_grad=False`) are left out, unless `include_frozen`. Both groups have the order of
    `model.named_parameters()`, and are there even if one is empty. They are plain dicts: torch's optimizers take them,
    and ignore `trust_ratio`. With `named` torch later refuses groups without names, which `BaseFinetuning` adds.

    Raises:
        TypeError: `model` is no module, such as `net.parameters()`.
        ValueError: Nothing is trainable, a lazy module has not run, a rule is unknown, or an exclusion matches nothing.

    >>> model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2), nn.LayerNorm(2))
    >>> adapted, excluded = param_groups(model, weight_decay=0.1, exclude=[nn.Embedding], named=True)
    >>> adapted["param_names"], adapted["weight_decay"], adapted["trust_ratio"]
    (['1.weight'], 0.1, True)
    >>> excluded["param_names"], excluded["weight_decay"], excluded["trust_ratio"]
    (['0.weight', '1.bias', '2.weight', '2.bias'], 0.0, False)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"`model` (=a {type(model).__name__}) must be the module itself: the rules look at the types of layers, "
            "which parameters do not have. Write param_groups(net, ...) in place of "
            "param_groups(net.parameters(), ...)."
        )
    weight_decay = plain_value(weight_decay)
    require_number(
        "weight_decay", weight_decay, "a negative decay would grow the weights; 0 is off"
    )
    exclusions = _checked_exclusions(exclude)
    for rule in rules:
        if rule not in get_args(Rule):
            raise ValueError(
                f"`rules` (={rules!r}) must hold only {', '.join(map(repr, get_args(Rule)))}: {rule!r} is no rule. "
                "Patterns, types and predicates go to `exclude`."
            )
    names: dict[nn.Parameter, str] = {}
    reasons: dict[nn.Parameter, str] = {}
    matched: set[int] = set()
    for name, param, ancestors in _places(model):
        if is_lazy(param):
            raise ValueError(
                f"`{name}` (={type(param).__name__}) must have a shape: its lazy module has not seen a batch. Run one "
                "batch through the model before `param_groups`."
            )
        # A shared parameter comes several times: the first name stays, and any place may exclude it.
        names.setdefault(param, name)
        # All exclusions are tried even where a rule excludes already: one that matches nothing is an error below.
        applying = [
            index for index, one in enumerate(exclusions) if _applies(one, name, param, ancestors)
        ]
        matched.update(applying)
        reason = _rule_reason(name, param, ancestors, rules)
        if not reason and applying:
            reason = _text_of(exclusions[applying[0]])
        if reason:
            reasons.setdefault(param, reason)
    _check_all_matched(exclusions, matched, list(names.values()))
    choices = tuple(
        ParamChoice(name=name, param=param, reason=reasons.get(param, ""))
        for param, name in names.items()
        if include_frozen or param.requires_grad
    )
    if not choices:
        state = f"all {len(names)} are frozen" if names else "it has none at all"
        raise ValueError(
            f"`model` (={type(model).__name__}) must have trainable parameters: {state}. Call `requires_grad_(True)` "
            "on what is to be trained, or pass `include_frozen=True`."
        )
    groups = []
    # Both groups, even if one is empty: schedulers see a constant number.
    for excluded in (False, True):
        mine = [choice for choice in choices if bool(choice.reason) == excluded]
        group: dict[str, Any] = {"params": [choice.param for choice in mine]}
        if named:
            group["param_names"] = [choice.name for choice in mine]
        groups.append(
            group | {"weight_decay": 0.0 if excluded else weight_decay, "trust_ratio": not excluded}
        )
    return ParamGroups(groups, choices)


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, tuple[nn.Module, ...]]]:
    # Unlike `named_parameters` this yields a shared parameter at each of its places, with all modules above it.

    def walk(module: nn.Module, prefix: str, above: tuple[nn.Module, ...]) -> Iterator[Any]:
        around = (*above, module)
        for name, param in module._parameters.items():
            if param is not None:
                yield prefix + name, param, around
        for name, child in module._modules.items():
            if (
                child is not None and child not in around
            ):  # a module that contains itself would be walked without end
                yield from walk(child, f"{prefix}{name}.", around)

    return walk(model, "", ())


def _rule_reason(
    name: str, param: nn.Parameter, ancestors: tuple[nn.Module, ...], rules: Collection[Rule]
) -> str:
    if "normalisation" in rules:
        # All ancestors, not only the holder: a parametrized weight is held by a module inside the normalisation.
        for module in ancestors:
            if isinstance(module, NORMALISATION):
                return type(module).__name__
    if "bias" in rules:
        # A parametrized bias is called `parametrizations.bias.original`.
        path = name.split(".")
        leaf = path[-2] if "parametrizations" in path[-3:-2] else path[-1]
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
    one = isinstance(exclude, str | type) or callable(exclude)
    exclusions = (exclude,) if one else tuple(exclude)
    for exclusion in exclusions:
        if isinstance(exclusion, type) and not issubclass(exclusion, nn.Module):
            raise ValueError(
                f"`exclude` (={exclusion.__name__}) must be a module type, a name pattern or a predicate: this type "
                "is no subclass of nn.Module. To choose by parameter, use a predicate(name, param, module)."
            )
        if not isinstance(exclusion, str) and not callable(exclusion):
            raise ValueError(
                f"`exclude` (={exclusion!r:.80}) must be a module type, a name pattern or a predicate: this is none. "
                'Examples: nn.Embedding, "head.*", lambda name, param, module: param.numel() < 100.'
            )
    return exclusions


def _check_all_matched(
    exclusions: tuple[Exclusion, ...], matched: set[int], names: list[str]
) -> None:
    for index, exclusion in enumerate(exclusions):
        if index in matched or not names:
            continue
        if isinstance(exclusion, str):
            near = difflib.get_close_matches(exclusion, names, n=3, cutoff=0.3) or names[:3]
            raise ValueError(
                f"`exclude` (={exclusion!r}) matches none of {len(names)} parameter names: it would exclude "
                f"nothing. Patterns match the whole name; near it are {', '.join(near)}."
            )
        if isinstance(exclusion, type):
            raise ValueError(
                f"`exclude` (={exclusion.__name__}) matches none of {len(names)} parameters: no module of this type "
                "holds one. Leave it out, or check that the model is built of the type you mean."
            )
