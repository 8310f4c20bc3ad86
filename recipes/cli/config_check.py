"""Validation of a configuration against the signatures of the classes that it builds.

The constructors are the schema. Pydantic compares a value with the annotation of its argument and converts nothing.
Ranges are checked in the constructor or by an annotated type. The recipe itself lists the keys that are not constructor
arguments, with a type for each.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import math
import operator
import os
import re
import types
import typing
from collections import abc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, cast

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from pydantic import AfterValidator, ConfigDict, Strict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from recipes.cli.command_line import CONF

T = TypeVar("T")

OPEN_PACKAGES = (
    "lightning_hybrid recipes tests lightning torch torchmetrics wandb datetime optuna".split()
)
"""Packages whose classes are accepted for arguments without a type.

Other arguments accept only classes of their type.
"""

PASSES_ON = {
    "WandbLogger": "wandb.init",
    "DDPStrategy": "torch.nn.parallel.DistributedDataParallel.__init__",
}
"""Targets of the `**kwargs` of a class, if they are not passed to a base class."""

MAX_SHOWN = 80  # characters of a value, in a message

_HYDRA_KEYS = {
    "_partial_": bool,
    "_recursive_": bool,
    "_args_": list,
    "_convert_": Literal["none", "partial", "object", "all"],
}

_WORDS = {  # Rules in messages, for pydantic's error types. Other types keep pydantic's message.
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "none_required": "null",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "too_long": "of at most {max_length} items",
    "literal_error": "{expected}",
}


class WrongValueError(ValueError):
    """Error for an invalid value in the configuration. The attribute `key` is the dotted key of the value."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def check(cfg: DictConfig, keys: Mapping[str, Any]) -> None:
    """Raise if a configuration has missing values, unknown keys or values of the wrong type.

    Args:
        cfg: The complete configuration.
        keys: Required type for each dotted key. If the type is a class, a mapping whose `_target_` builds an instance
            is accepted too.

    Raises:
        ValueError: The message names the key and the values that it accepts.
    """
    raw = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False))
    values = dict(_walk(raw))
    if missing := sorted(key for key, value in values.items() if value == "???"):
        raise ValueError(
            f"`{missing[0]}` (=???) is required, but has no value. Missing keys: {', '.join(missing)}. Set "
            f"them on the command line, for example {missing[0]}=<value>."
        )
    read = {key.partition(".")[0] for key in keys}
    read |= _keys_referred_to(raw)
    if not read.issuperset(raw):
        read |= _keys_referred_to(_without_values())
    for name in (raw_name for raw_name in raw if raw_name not in read):
        near = difflib.get_close_matches(str(name), sorted(read), n=1)
        if near:
            hint = f"Did you mean {near[0]}? "
        else:
            hint = ""
        raise ValueError(
            f"`{name}` (={_shown(raw[name])}) is not a key of this recipe, and no other key refers to "
            f"it as ${{{name}}}. {hint}The keys are {', '.join(sorted(read))}."
        )
    # Check before resolving, because a resolver would report a wrong value under the name of another key.
    _check_values(raw, keys)
    try:
        _check_values(OmegaConf.to_container(cfg, resolve=True), keys)
    except WrongValueError as error:
        if isinstance(source := values.get(error.key), str) and "${" in source:
            raise ValueError(
                f"{error} The key is set to {source}. Correct the key that this expression refers "
                "to."
            ) from None
        raise


def _keys_referred_to(config: Any) -> set[str]:
    """Return the top-level keys that the interpolations in a configuration refer to."""
    return set(re.findall(r"\$\{([A-Za-z_]\w*)", str(config)))


def _without_values() -> Any:
    """Return the configuration of the running command with its chosen config groups, but no other overrides.

    An override may replace the only value that refers to a key. For example, `packing.short_side=16` replaces the
    reference to `short_side`. The key then has no effect, but it is not a mistake. Outside of a command, the result is
    empty.
    """
    if not HydraConfig.initialized():
        return {}
    hydra_cfg = HydraConfig.get()
    choices = []
    for override in hydra_cfg.overrides.task:
        group = override.lstrip("+~").partition("=")[0].partition("@")[0]
        if group in hydra_cfg.runtime.choices:
            choices.append(override)
    return OmegaConf.to_container(compose(hydra_cfg.job.config_name, choices), resolve=False)


def _check_values(config: Any, keys: Mapping[str, Any]) -> None:
    values = dict(_walk(config))
    for key, value in values.items():
        if isinstance(value, int) and abs(value) >= 2**63:
            raise WrongValueError(
                key,
                f"`{key}` (={value}) does not fit into a 64-bit integer. Set {key}=1, for example.",
            )
        if isinstance(value, float) and math.isnan(value):
            raise WrongValueError(
                key, f"`{key}` (=nan) must be a number other than nan. Set {key}=<number>."
            )
    for key, node in reversed(values.items()):  # nested parts before the part that contains them
        if isinstance(node, dict) and "_target_" in node:
            _require(
                _arguments_of(target_of(node, key)),
                node,
                f"{key}.",
                f" for {node['_target_']}",
            )
    # Check values first, because a wrong value is more informative than the missing key that it may cause.
    if missing := [key for key in keys if key not in values]:
        raise ValueError(
            f"`{missing[0]}` must not be removed from the configuration, because this recipe needs it. "
            f"Remove ~{missing[0]} from the command line. If `{missing[0]}` is a config group, choose "
            f"one of the files in conf/{missing[0]}."
        )
    _require(_schema(keys), {key: values[key] for key in keys}, "", "")


def _walk(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every node in a nested configuration.

    >>> list(_walk({"a": {"b": 1}, "c": [2]}))
    [('a', {'b': 1}), ('a.b', 1), ('c', [2]), ('c[0]', 2)]
    """
    if key:
        yield key, value
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _walk(child, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _walk(child, f"{key}[{index}]")


def _require(schema: TypeAdapter[Any], given: Mapping[str, Any], prefix: str, why: str) -> None:
    """Raise an error that names the first value which does not match the schema.

    Values with unresolved interpolations are not checked.
    """
    values = {
        name: _with_parts(value, f"{prefix}{name}")
        for name, value in given.items()
        if "${" not in str(value)
    }
    try:
        schema.validate_python(values)
    except ValidationError as invalid:
        raise _refusal(invalid.errors(include_url=False), values, prefix, why) from None


def made(kind: type[T], given: Any, key: str) -> T:
    """Build a dataclass, including nested dataclasses, from plain mappings and lists.

    Lists become tuples. Error messages name the configuration key `key`.

    Raises:
        ValueError: A value is missing, unknown or of the wrong type, or the constructor of `kind` rejects it.
    """
    schema = TypeAdapter(kind)
    try:
        return schema.validate_json(json.dumps(given), strict=True)
    except ValidationError as invalid:
        errors = invalid.errors(include_url=False)
        raise errors[0].get("ctx", {}).get("error") or _refusal(
            errors, given, f"{key}.", ""
        ) from None


def _refusal(
    errors: Sequence[Mapping[str, Any]], values: Any, prefix: str, why: str
) -> WrongValueError:
    """Convert pydantic's errors to a single error about the most deeply nested invalid value.

    Only errors of the first invalid argument are considered.
    """
    errors = [error for error in errors if error["loc"][0] == errors[0]["loc"][0]]
    places = [_place(error["loc"], values) for error in errors]
    key, value = max(places, key=lambda location: len(location[0]))
    dotted_key = f"{prefix}{key}".rstrip(".")
    deepest = [error for error, place in zip(errors, places, strict=True) if place[0] == key]
    if deepest[0]["type"] == "missing":
        missing = deepest[0]["loc"][-1]
        return WrongValueError(
            dotted_key,
            f"`{dotted_key}` (={_shown(value)}) needs the key `{missing}`{why}. "
            f"Set {dotted_key}.{missing}=<value>.",
        )
    if deepest[0]["type"] == "unexpected_keyword_argument":
        return WrongValueError(
            dotted_key,
            f"`{dotted_key}` (={_shown(value)}) is not a known key{why}. Remove it, or correct its name.",
        )
    rules = list[str]()
    choices = list[str]()
    for error in deepest:
        context = error.get("ctx", {})
        expected = context.get("expected", "").replace("'", "").replace(" or ", ", ").split(", ")
        choices += filter(None, expected)
        context |= {"expected": " or ".join(expected)}
        own_words = re.sub("^Input should be |^Value error, ", "", error["msg"])
        rules.append(
            _WORDS[error["type"]].format(**context) if error["type"] in _WORDS else own_words
        )
    rule = " or ".join(dict.fromkeys(rules))
    name = dotted_key
    # a config group inside a part
    if not choices and (files := sorted((CONF / dotted_key.replace(".", "/")).glob("*.yaml"))):
        name = dotted_key.replace(".", "/")
        choices = [file.stem for file in files]
    kind = "<value>"
    if rule.startswith(("a ", "an ")) and " or " not in rule:
        kind = f"<{rule.partition(' ')[2]}>"
    good_value = [*difflib.get_close_matches(str(value), choices, n=1), *choices, kind][0]
    return WrongValueError(
        dotted_key,
        f"`{dotted_key}` (={_shown(value)}) must be {rule}{why}. Set {name}={good_value}.",
    )


def _place(loc: tuple[int | str, ...], value: Any) -> tuple[str, Any]:
    """Return the dotted key and the value at the location of a pydantic error.

    Pydantic puts names of types between the keys of `loc`. These names are skipped.
    """
    key = ""
    for part in loc:
        if isinstance(value, dict) and part in value:
            if key:
                key = f"{key}.{part}"
            else:
                key = str(part)
            value = value[part]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            key = f"{key}[{part}]"
            value = value[part]
    return key, value


def _shown(value: Any) -> str:
    text = repr(value)
    if len(text) <= MAX_SHOWN:
        return text
    return text[:MAX_SHOWN] + "..."


@dataclass(frozen=True)
class Part:
    """Placeholder, used during validation, for an object that Hydra would build from a `_target_`."""

    target: str
    made: type
    is_partial: bool

    def __repr__(self) -> str:
        return f"{{_target_: {self.target}}}"


def _with_parts(value: Any, key: str) -> Any:
    if isinstance(value, dict) and "_target_" in value:
        target = target_of(value, key)
        # A factory function builds the type of its return annotation.
        if not inspect.isclass(target):
            returned = _hints_of(target).get("return")
            target = next(filter(inspect.isclass, (*typing.get_args(returned), returned)), object)
        return Part(value["_target_"], target, bool(value.get("_partial_")))
    if isinstance(value, dict):
        return {name: _with_parts(child, f"{key}.{name}") for name, child in value.items()}
    if isinstance(value, list):
        return [_with_parts(item, f"{key}[{i}]") for i, item in enumerate(value)]
    return value


def target_of(node: Mapping[str, Any], key: str) -> Any:
    """Import the class or function that a `_target_` names.

    Raises:
        ValueError: The name cannot be imported, or it is not callable.
    """
    name = node["_target_"]
    try:
        target = get_object(str(name))
        if callable(target):
            return target
        reason = f"it is a {type(target).__name__}"
    except Exception as error:  # importing a user's module may raise any exception
        reason = " ".join(str(error).split())
    raise WrongValueError(
        f"{key}._target_",
        f"`{key}._target_` (={name!r}) is not the full name of a class or function, such as "
        f"torch.optim.SGD ({reason}). Correct the name, or use the one in the files of conf/.",
    )


@functools.cache
def _arguments_of(target: Any) -> TypeAdapter[Any]:
    """Create a pydantic schema for the arguments of a function or class.

    For a class the schema includes the arguments of its base classes, which `**kwargs` may pass on.
    """
    hints = dict[str, Any](_HYDRA_KEYS)
    for owner in reversed(target.__mro__) if inspect.isclass(target) else [target]:
        if (name := getattr(owner, "__name__", "")) in PASSES_ON:
            hints |= _hints_of(get_object(PASSES_ON[name]))
        hints |= _hints_of(vars(owner).get("__init__") if inspect.isclass(owner) else owner)
    return _schema(hints)


def _hints_of(function: Any) -> dict[str, Any]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # implemented in C
        return {}
    parameters = signature.parameters
    hints = dict[str, Any]()
    annotation_by_name = {name: parameter.annotation for name, parameter in parameters.items()}
    for name, hint in (annotation_by_name | {"return": signature.return_annotation}).items():
        holder = types.SimpleNamespace(
            __annotations__={} if hint is inspect.Signature.empty else {name: hint}
        )
        with suppress(Exception):  # resolved one by one: some names exist only for type checkers
            hints |= typing.get_type_hints(
                holder, inspect.unwrap(function).__globals__, include_extras=True
            )
    for name, parameter in parameters.items():
        # many arguments in torch have no annotation
        if name not in hints and isinstance(parameter.default, bool):
            hints[name] = bool
        elif name in hints and parameter.default is None:
            hints[name] = hints[name] | None
    return hints


def _schema(hints: Mapping[str, Any]) -> TypeAdapter[Any]:
    """Create a strict pydantic schema for a mapping from keys to values of given types.

    Unknown keys are not checked.
    """
    types = {name: _fillable(hint) for name, hint in hints.items()}
    fields = TypedDict("fields", types, total=False)  # type: ignore[misc]
    fields.__pydantic_config__ = ConfigDict(strict=True)  # type: ignore[attr-defined]
    return TypeAdapter(fields)


def _fillable(hint: Any) -> Any:
    """Convert the annotation of an argument to the type that the argument has in a configuration file.

    Tuples accept lists, paths accept text, and classes accept a mapping with a `_target_` that builds an instance.
    """
    origin = typing.get_origin(hint)
    args = tuple(map(_fillable, typing.get_args(hint)))
    kind = origin or hint
    if origin is Literal or kind in (None, type(None), bool, int, float, str, ...):
        return hint
    if origin is Annotated:
        return Annotated[(args[0], *hint.__metadata__)]
    if origin in (Union, types.UnionType):
        return functools.reduce(operator.or_, args)
    if not inspect.isclass(kind) or kind in (Any, object) or getattr(kind, "_is_protocol", False):
        return _part_or_value(object)  # any value; also for type variables and unresolved names
    if issubclass(kind, os.PathLike):
        return str
    container: Any = next(
        (
            container_type
            for container_type in (list, dict, tuple)
            if issubclass(container_type, kind)
        ),
        None,
    )
    if container is None:
        return _part_or_value(kind)
    if args:
        filled = container[args]
    else:
        filled = container
    if container is tuple:
        return Annotated[filled, Strict(False)]
    return filled


def _part_or_value(kind: type) -> Any:
    """Return an annotated type that accepts instances of `kind`, and `_target_` nodes that build them.

    For `object`, it accepts any value, and any `_target_` from `OPEN_PACKAGES`.
    """
    words = {
        object: f"from one of the packages {', '.join(OPEN_PACKAGES)}",
        abc.Callable: "and `_partial_: true`",
    }

    def check(value: Any) -> Any:
        if not isinstance(value, Part):
            fits = isinstance(value, kind)
        elif kind is object:
            fits = value.target.partition(".")[0] in OPEN_PACKAGES
        else:
            fits = issubclass(value.made, kind) or (kind is abc.Callable and value.is_partial)
        if not fits:
            raise ValueError(
                f"an object with a `_target_` {words.get(kind, f'that builds a {kind.__name__}')}"
            )
        return value

    return Annotated[Any, AfterValidator(check)]
