"""What a configuration may say, checked against the signatures of what it builds, before anything is built.

The constructors are the schema: a value must fit the annotation of the argument that it is for, so that no key has to
be written down twice. What fits and still cannot work is refused by the constructor itself. Keys that are no argument
of anything are given by the recipe, with a `Rule` or a type for each.
"""

from __future__ import annotations

import collections.abc
import datetime  # noqa: F401  for the doctest
import difflib
import inspect
import math
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, Union, cast

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

OPEN_PACKAGES = ("lightning_hybrid", "recipes", "lightning", "torch", "torchmetrics", "wandb", "datetime", "optuna")
"""Packages whose classes may stand where an argument takes anything; elsewhere the class must be of the argument's."""

OUR_PACKAGES = ("lightning_hybrid.", "recipes.")
"""Their arguments say by their names what they hold; see `rule_of`."""

PASSES_ON = {"WandbLogger": "wandb.init"}
"""Whose arguments a target takes beside its own."""

NONE = type(None)
MAX_SHOWN = 80  # characters of a value, in a message

_HYDRA_KEYS: dict[str, Any] = {
    "_partial_": bool,
    "_recursive_": bool,
    "_convert_": Literal["none", "partial", "object", "all"],
    "_args_": list,
}


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
POSITIVE = Rule(hint=float, words="a number above zero", holds=lambda value: 0 < value < math.inf)
SECONDS = Rule(hint=float, words="a number of seconds above zero", holds=lambda value: value > 0)
SEED = Rule(hint=int, words="a whole number from 0 to 4294967295", holds=lambda value: 0 <= value < 2**32)


NOT_NEGATIVE = Rule(hint=float, words="a number, at least 0", holds=lambda value: 0 <= value < math.inf)
_ABOVE_ZERO = (
    "_bytes",
    "_size",
    "_side",
    "_kernel",
    "_stride",
    "_resize",
    "_channels",
    "_steps",
    "_classes",
    "_factor",
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


def check(cfg: DictConfig, keys: Mapping[str, Any]) -> None:
    """Refuse a configuration with holes, or with values of a kind that cannot work.

    Args:
        cfg: All of it.
        keys: For dotted keys, what they must hold: a type, a union of types, a `Rule`, or a tuple of alternatives. A
            class stands for a part that makes one by `_target_`.

    Raises:
        ValueError: It names the key, and what may stand there.
    """
    raw = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False))
    check_holes(cfg)
    _check_all(raw, keys)  # first: a resolver would stumble over a wrong value in the name of another key
    try:
        _check_all(cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True)), keys)
    except _WrongValueError as error:
        source = _value_at(raw, error.key)[1]
        if isinstance(source, str) and "${" in source:
            raise ValueError(f"{error} The key says {source}: correct what that refers to.") from None
        raise


class _WrongValueError(ValueError):
    """A value that cannot stand at `key`."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def _check_all(told: dict[str, Any], keys: Mapping[str, Any]) -> None:
    for key, hint in keys.items():
        found, value = _value_at(told, key)
        if not found:
            raise ValueError(
                f"`{key}` must be in the configuration, and is not: it must be {_words(hint)}. Leave ~{key} out, and "
                f"give a choice of conf/{key} where it is a group."
            )
        _require(value, hint, key, why="")
    for key, node in _nodes(told):
        _check_node(key, node)


def check_holes(cfg: DictConfig) -> None:
    """Refuse a configuration with holes.

    Raises:
        ValueError: A `???` without a value.
    """
    raw = OmegaConf.to_container(cfg, resolve=False)
    if missing := sorted(key for key, value in leaves(raw) if value == "???"):
        raise ValueError(
            f"`{missing[0]}` (=???) must have a value. Missing: {', '.join(missing)}. Give it on the command line: "
            f"{missing[0]}=..."
        )


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that holds no others, and every empty list or mapping, with its dotted key.

    >>> list(leaves({"a": {"b": 1}, "c": [2, {}]}))
    [('a.b', 1), ('c[0]', 2), ('c[1]', {})]
    """
    if isinstance(value, dict) and value:
        for name, child in value.items():
            yield from leaves(child, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and value:
        for index, child in enumerate(value):
            yield from leaves(child, f"{key}[{index}]")
    else:
        yield key, value


# ---- walk ------------------------------------------------------------------------------------------------------------


def _value_at(told: Any, key: str) -> tuple[bool, Any]:
    for part in key.split("."):
        if not isinstance(told, dict) or part not in told:
            return False, None
        told = told[part]
    return True, told


def _nodes(value: Any, key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping with a `_target_`, with its dotted key; numbers that are none are refused on the way."""
    if isinstance(value, dict):
        if "_target_" in value:
            yield key, value
        for name, child in value.items():
            yield from _nodes(child, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _nodes(child, f"{key}[{index}]")
    elif isinstance(value, float) and math.isnan(value):
        raise _WrongValueError(
            key, f"`{key}` (=nan) must be a number: nothing can be computed with this. Set {key}=<number>."
        )


def _check_node(key: str, node: dict[str, Any]) -> None:
    for name, hint in _HYDRA_KEYS.items():
        if name in node:
            _require(node[name], hint, f"{key}.{name}", why="Hydra reads it")
    hints = _hints(_target(node, key))
    is_ours = str(node["_target_"]).startswith(OUR_PACKAGES)
    for name, value in node.items():
        if name in hints and not name.startswith("_"):
            _require(value, hints[name], f"{key}.{name}", why=f"it is an argument of {node['_target_']}")
        rule = rule_of(name)
        if is_ours and rule is not None and isinstance(value, int | float) and not isinstance(value, bool):
            _require(value, rule, f"{key}.{name}", why="its name says what it holds")


def _target(node: dict[str, Any], key: str) -> Any:
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
    raise _WrongValueError(
        f"{key}._target_",
        f"`{key}._target_` (={name!r}) must be the full name of a class or function, such as torch.optim.SGD: {reason}."
        f" Correct it, or leave {key}._target_ as the files of conf/ have it.",
    )


def _hints(target: Any) -> dict[str, Any]:
    """Annotations of the arguments; empty where the target does not tell."""
    hints = dict[str, Any]()
    if (further := PASSES_ON.get(getattr(target, "__name__", ""))) is not None:
        hints = _hints(get_object(further))
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
    return {
        name: hint | None if name in may_be_none and isinstance(hint, type) else hint
        for name, hint in hints.items()
        if hint is not inspect.Parameter.empty and not isinstance(hint, str)
    }


# ---- types -----------------------------------------------------------------------------------------------------------


def _require(value: Any, hint: Any, key: str, *, why: str) -> None:
    if fits(value, hint):
        return
    for part in _members(hint):  # the one inside that does not fit is easier to find than the whole
        kind, args = typing.get_origin(part), typing.get_args(part)
        if kind in _MAPPINGS and isinstance(value, dict) and "_target_" not in value:
            for name, child in value.items():
                _require(child, args[1], f"{key}.{name}", why=why)
        if kind in _LISTS and kind is not tuple and isinstance(value, list):
            for index, child in enumerate(value):
                _require(child, args[0], f"{key}[{index}]", why=why)
    told = f": {why}" if why else ""
    has_target = isinstance(value, dict) and "_target_" in value
    shown = f"{{_target_: {value['_target_']}}}" if has_target else repr(value)
    shown = shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "..."
    near = difflib.get_close_matches(str(value), [str(each) for each in _choices(hint)], n=1)
    cure = near[0] if near else next(iter(map(str, _choices(hint))), "...")
    raise _WrongValueError(key, f"`{key}` (={shown}) must be {_words(hint)}{told}. Set {key}={cure}.")


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
    if len(members := _members(hint)) > 1:
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
    if kind in _LISTS:
        return isinstance(value, list) and (not args or all(fits(v, a) for v, a in _pairs(value, kind, args)))
    if kind in _MAPPINGS:
        return isinstance(value, dict) and (len(args) < 2 or all(fits(child, args[1]) for child in value.values()))
    return isinstance(value, kind)


_LISTS = (list, tuple, set, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def _pairs(value: list[Any], kind: type, args: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    if kind is tuple and Ellipsis not in args:
        return iter(zip(value, args, strict=True)) if len(value) == len(args) else iter([(object(), Literal["none"])])
    return ((child, args[0]) for child in value)


def _makes(node: dict[str, Any], kind: Any) -> bool:
    """Whether a part of the configuration makes what is asked for.

    Where that is a class: a subclass, or a function that says it returns one. Where it is anything: something of
    `OPEN_PACKAGES`. What a class does when it is made is its own affair: this is no sandbox.
    """
    target = _target(node, "")
    if kind is collections.abc.Callable and node.get("_partial_"):
        return True
    if kind in (Any, object) or not inspect.isclass(kind):
        return str(node["_target_"]).split(".")[0] in OPEN_PACKAGES
    made = [target] if inspect.isclass(target) else [each for each in _members(_returned(target)) if each is not NONE]
    return bool(made) and all(inspect.isclass(each) and issubclass(each, kind) for each in made)


def _returned(function: Any) -> Any:
    try:
        return typing.get_type_hints(function).get("return")
    except Exception:
        return None


def _members(hint: Any) -> tuple[Any, ...]:
    """Of a union, also written as a tuple; else the hint alone."""
    if isinstance(hint, tuple):
        return hint
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _choices(hint: Any) -> list[Any]:
    """Literals among what may stand there."""
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint))
    members = _members(hint)
    return [choice for member in members for choice in _choices(member)] if len(members) > 1 else []


def _words(hint: Any) -> str:
    """What may stand there, for people.

    >>> _words(float | None), _words(list[int]), _words(Literal["sum", "mean"])
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
    if len(members := _members(hint)) > 1:
        return " or ".join(dict.fromkeys(map(_words, members)))
    kind = origin or hint
    if kind in _LISTS:
        inner = [arg for arg in args if arg is not Ellipsis]
        return "a list" + (f" of which each is {_words(inner[0])}" if len(set(inner)) == 1 else "")
    if kind in _MAPPINGS:
        return "a mapping of names to values"
    if inspect.isclass(kind) and issubclass(kind, os.PathLike | PurePath):
        return "a path"
    return f"a part with a `_target_` that makes a {getattr(kind, '__name__', kind)}"
