"""Kinds of values: whether a value of a configuration fits the annotation of an argument, and how to say what does."""

from __future__ import annotations

import collections.abc
import datetime  # noqa: F401  for the doctest
import inspect
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, Union

from hydra.utils import get_object

OPEN_PACKAGES = ("lightning_hybrid", "recipes", "lightning", "torch", "torchmetrics", "wandb", "datetime", "optuna")
"""Packages whose classes may stand where an argument takes anything; elsewhere the class must be of the argument's."""

PASSES_ON = {
    "WandbLogger": "wandb.init",
    "MasterWeightAveraging": "lightning.pytorch.callbacks.EMAWeightAveraging",
    "HybridAllReduceStrategy": "torch.nn.parallel.DistributedDataParallel",
}
"""Whose arguments a target takes beside its own."""

NONE = type(None)


class WrongValueError(ValueError):
    """A value that cannot stand at `key`."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A type with a condition: `hint`, in `words`, where `holds`."""

    hint: Any
    words: str
    holds: Callable[[Any], bool]


COUNT = Rule(hint=int, words="a whole number above zero", holds=lambda value: 0 < value < 2**63)
COUNT_OR_ZERO = Rule(hint=int, words="a whole number, at least 0", holds=lambda value: 0 <= value < 2**63)
RANKS = Rule(
    hint=int, words="a whole number above zero, or -1 for all", holds=lambda value: value == -1 or 0 < value <= 10**6
)
NOTHING = Rule(hint=dict, words="an empty mapping", holds=lambda value: not value)
POSITIVE = Rule(hint=float, words="a number above zero", holds=lambda value: 0 < value < math.inf)
SEED = Rule(hint=int, words="a whole number from 0 to 4294967295", holds=lambda value: 0 <= value < 2**32)

NOT_NEGATIVE = Rule(hint=float, words="a number, at least 0", holds=lambda value: 0 <= value < math.inf)
_ABOVE_ZERO = (
    "_bytes",
    "_size",
    "_per_rank",
    "_side",
    "_kernel",
    "_stride",
    "_resize",
    "_channels",
    "_steps",
    "_classes",
    "_factor",
    "_eps",
)
_AT_LEAST_ZERO = ("_s", "_padding", "_pixels", "_epochs", "_cases", "_images")


def rule_of(name: str) -> Rule | None:
    """The range that the name of one of our arguments promises, by the law of names; None: none.

    >>> rule_of("batch_size").words, rule_of("num_rounds").words, rule_of("lr")
    ('a number above zero', 'a whole number, at least 0', None)
    """
    if name == "seed":
        return SEED
    if name.startswith("num_"):
        return COUNT if name.endswith(_ABOVE_ZERO) else COUNT_OR_ZERO
    if name in ("width", "depth") or name.endswith(_ABOVE_ZERO):
        return POSITIVE
    return NOT_NEGATIVE if name.endswith(_AT_LEAST_ZERO) else None


# ---- types -----------------------------------------------------------------------------------------------------------


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of a configuration may be given to an argument with this annotation.

    >>> fits(1, float), fits(True, int), fits([1, "a"], list[int]), fits("mean", Literal["sum", "mean"])
    (True, False, False, True)
    >>> fits({"_target_": "os.system"}, float | None), fits({"_target_": "os.system"}, Any)
    (False, False)
    >>> fits({"_target_": "datetime.timedelta", "minutes": 1}, datetime.timedelta)
    True
    """
    if hint is Any and not isinstance(value, dict):
        return True
    if isinstance(value, str) and "${" in value:  # not resolved yet
        return True
    if isinstance(hint, Rule):
        return fits(value, hint.hint) and (value is None or hint.holds(value))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return fits(value, args[0])
    if len(members := members_of(hint)) > 1:
        return any(fits(value, member) for member in members)
    if isinstance(value, dict) and "_target_" in value:
        return _makes(value, origin or hint)
    if origin is Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if hint in (None, NONE):
        return value is None
    if hint in (bool, str):
        return isinstance(value, hint)
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    kind = origin or hint
    if kind in (Any, object) or not inspect.isclass(kind):
        return True  # also, type variables, names of types
    if issubclass(kind, os.PathLike | PurePath):
        return isinstance(value, str)
    if kind in LISTS:
        return isinstance(value, list) and (not args or all(fits(v, a) for v, a in _pairs(value, kind, args)))
    if kind in MAPPINGS:
        return isinstance(value, dict) and (len(args) < 2 or all(fits(child, args[1]) for child in value.values()))
    return isinstance(value, kind)


LISTS = (list, tuple, set, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def _pairs(value: list[Any], kind: type, args: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    if kind is tuple and Ellipsis not in args:
        return iter(zip(value, args, strict=True)) if len(value) == len(args) else iter([(object(), Literal["none"])])
    return ((child, args[0]) for child in value)


def _makes(node: dict[str, Any], kind: Any) -> bool:
    """Whether a part of the configuration makes what is asked for.

    Where that is a class: a subclass, or a function that says it returns one. Where it is anything: something of
    `OPEN_PACKAGES`. What a class does when it is made is its own affair: this is no sandbox.
    """
    target = target_of(node, "")
    if kind is collections.abc.Callable and node.get("_partial_"):
        return True
    if kind in (Any, object) or not inspect.isclass(kind):
        return str(node["_target_"]).split(".")[0] in OPEN_PACKAGES
    made = [target] if inspect.isclass(target) else [each for each in members_of(_returned(target)) if each is not NONE]
    return bool(made) and all(inspect.isclass(each) and issubclass(each, kind) for each in made)


def _returned(function: Any) -> Any:
    try:
        return typing.get_type_hints(function).get("return")
    except Exception:
        return None


def members_of(hint: Any) -> tuple[Any, ...]:
    """Of a union, also written as a tuple; else the hint alone."""
    if isinstance(hint, tuple):
        return hint
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def choices_of(hint: Any) -> list[Any]:
    """Literals among what may stand there."""
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint))
    members = members_of(hint)
    return [choice for member in members for choice in choices_of(member)] if len(members) > 1 else []


def words_of(hint: Any) -> str:
    """What may stand there, for people.

    >>> words_of(float | None), words_of(list[int]), words_of(Literal["sum", "mean"])
    ('a number or null', 'a list of which each is a whole number', 'sum or mean')
    """
    simple = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NONE: "null"}
    if isinstance(hint, Rule):
        return hint.words
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and hint in simple:
        return simple[hint]
    if origin is Literal:
        return " or ".join(map(str, args))
    if len(members := members_of(hint)) > 1:
        return " or ".join(dict.fromkeys(map(words_of, members)))
    kind = origin or hint
    if kind in LISTS:
        inner = [arg for arg in args if arg is not Ellipsis]
        return "a list" + (f" of which each is {words_of(inner[0])}" if len(set(inner)) == 1 else "")
    if kind in MAPPINGS:
        return "a mapping of names to values"
    if kind is collections.abc.Callable:
        return "a part with a `_target_` and `_partial_: true`"
    if inspect.isclass(kind) and issubclass(kind, os.PathLike | PurePath):
        return "a path"
    return f"a part with a `_target_` that makes a {getattr(kind, '__name__', kind)}"


def one_of(names: Iterable[str]) -> Any:
    """A type with these words as values."""
    return Literal[tuple(names)]


def target_of(node: dict[str, Any], key: str) -> Any:
    """What a `_target_` names.

    Raises:
        ValueError: There is no such thing, or it cannot be called.
    """
    name = node["_target_"]
    reason = "it is no text"
    if isinstance(name, str):
        try:
            found = get_object(name)
        except Exception as error:  # the import of anybody's module may raise anything
            reason = " ".join(str(error).split())
        else:
            if callable(found):
                return found
            reason = f"that is a {type(found).__name__}"
    raise WrongValueError(
        f"{key}._target_",
        f"`{key}._target_` (={name!r}) must be the full name of a class or function, such as torch.optim.SGD: {reason}."
        f" Correct it, or leave {key}._target_ as the files of conf/ have it.",
    )


def hints_of(target: Any) -> dict[str, Any]:
    """Annotations of the arguments; empty where the target does not tell."""
    hints = dict[str, Any]()
    if (further := PASSES_ON.get(getattr(target, "__name__", ""))) is not None:
        hints = hints_of(get_object(further))
    try:
        found = inspect.signature(target).parameters
    except (TypeError, ValueError):  # of C
        return {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    raw = {name: parameter.annotation for name, parameter in found.items() if parameter.kind in by_name}
    try:
        resolved = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:  # names that exist for type checkers only
        resolved = {}
    hints |= {name: resolved.get(name, hint) for name, hint in raw.items()}
    may_be_none = {name for name, parameter in found.items() if parameter.default is None}
    for name, parameter in found.items():  # torch leaves much without an annotation
        if parameter.annotation is parameter.empty and isinstance(parameter.default, bool):
            hints[name] = bool
    return {
        name: hint | None if name in may_be_none and isinstance(hint, type) else hint
        for name, hint in hints.items()
        if hint is not inspect.Parameter.empty and not isinstance(hint, str)
    }
