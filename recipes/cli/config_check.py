"""What a configuration may say, checked against the signatures of what it builds, before anything is built.

The constructors are the schema: a value must fit the annotation of the argument that it is for, so that no key has to
be written down twice. What fits and still cannot work is refused by the constructor itself. Keys that are no argument
of anything are given by the recipe, with a type or a `Rule` for each.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, cast

from omegaconf import DictConfig, OmegaConf

from recipes.cli.config_values import (
    LISTS,
    MAPPINGS,
    WrongValueError,
    choices_of,
    fits,
    hints_of,
    members_of,
    rule_of,
    target_of,
    words_of,
)

OUR_PACKAGES = ("lightning_hybrid.", "recipes.")
"""Their arguments say by their names what they hold; see `rule_of`."""

MAX_SHOWN = 80  # characters of a value, in a message

_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*)")  # the first part of a key that a value refers to

_HYDRA_KEYS: dict[str, Any] = {
    "_partial_": bool,
    "_recursive_": bool,
    "_convert_": Literal["none", "partial", "object", "all"],
    "_args_": list,
}


def check(cfg: DictConfig, keys: Mapping[str, Any]) -> None:
    """Refuse a configuration with holes, or with values of a kind that cannot work.

    Args:
        cfg: All of it.
        keys: For dotted keys, what they must hold: a type, a union of types, a `Rule`, or a tuple of alternatives. A
            class stands for a part that makes one by `_target_`.

    Raises:
        ValueError: It names the key, and what may stand there; or a key that nothing reads.
    """
    raw = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False))
    check_holes(cfg)
    _check_names(raw, keys)
    _check_all(raw, keys)  # first: a resolver would stumble over a wrong value in the name of another key
    try:
        _check_all(cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True)), keys)
    except WrongValueError as error:
        source = _value_at(raw, error.key)[1]
        if isinstance(source, str) and "${" in source:
            raise ValueError(f"{error} The key says {source}: correct what that refers to.") from None
        raise


def _check_all(told: dict[str, Any], keys: Mapping[str, Any]) -> None:
    nodes = list(_nodes(told))
    for key, node in nodes:  # of all first: what a part makes hangs on them
        for name, hint in _HYDRA_KEYS.items():
            if name in node:
                _require(node[name], hint, f"{key}.{name}", why="Hydra reads it")
    for key, node in nodes:
        _check_node(key, node)
    for key, hint in keys.items():
        found, value = _value_at(told, key)
        if not found:
            raise ValueError(
                f"`{key}` must be in the configuration, and is not: it must be {words_of(hint)}. Leave ~{key} out, and "
                f"give a choice of conf/{key} where it is a group."
            )
        _require(value, hint, key, why="")


def _check_names(told: Mapping[str, Any], keys: Mapping[str, Any]) -> None:
    """Refuse keys of the first level that neither the recipe nor another key reads, such as `+ckpt_path=...`."""
    read = {key.partition(".")[0] for key in keys}
    read |= {name for _, value in leaves(told) if isinstance(value, str) for name in _REFERENCE.findall(value)}
    for name, value in told.items():
        if name not in read:
            near = difflib.get_close_matches(str(name), sorted(read), n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise ValueError(
                f"`{name}` (={_shortened(repr(value))}) must be a key of this recipe, or one that another refers to as "
                f"${{{name}}}: nothing would read it. {hint}The keys are {', '.join(sorted(read))}."
            )


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
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise WrongValueError(
            key, f"`{key}` (={value}) must fit into 64 bits, as all whole numbers. Set {key}=<number>."
        )
    elif isinstance(value, float) and math.isnan(value):
        raise WrongValueError(
            key, f"`{key}` (=nan) must be a number: nothing can be computed with this. Set {key}=<number>."
        )


def check_arguments(target: Any, given: Any, key: str, *, but: Collection[str] = ()) -> None:
    """Check arguments that a recipe gives to `target` by itself; those in `but` by name alone.

    Raises:
        ValueError: One is unknown, missing or of the wrong kind.
    """
    hints, known = hints_of(target), inspect.signature(target).parameters
    _require(given, dict, key, why="")
    needed = [name for name, parameter in known.items() if parameter.default is parameter.empty]
    for name in (*(each for each in given if each not in known), *(each for each in needed if each not in given)):
        near = difflib.get_close_matches(name, list(known), n=1)
        hint = f" Did you mean {key}.{near[0]}?" if near and near[0] != name else ""
        state = "must be given" if name in known else "is not known"
        raise ValueError(f"`{key}.{name}` {state}: {key} has {', '.join(known)}.{hint}")
    for name, value in given.items():
        if name not in but:
            _require(value, hints[name], f"{key}.{name}", why="")


def _check_node(key: str, node: dict[str, Any]) -> None:
    hints = hints_of(target_of(node, key))
    is_ours = str(node["_target_"]).startswith(OUR_PACKAGES)
    for name, value in node.items():
        if name in hints and not name.startswith("_"):
            _require(value, hints[name], f"{key}.{name}", why=f"it is an argument of {node['_target_']}")
        rule = rule_of(name)
        if is_ours and rule is not None and isinstance(value, int | float) and not isinstance(value, bool):
            _require(value, rule, f"{key}.{name}", why="its name says what it holds")


def _require(value: Any, hint: Any, key: str, *, why: str) -> None:
    if fits(value, hint):
        return
    for part in members_of(hint):  # the one inside that does not fit is easier to find than the whole
        kind, args = typing.get_origin(part), typing.get_args(part)
        if kind in MAPPINGS and isinstance(value, dict) and "_target_" not in value:
            for name, child in value.items():
                _require(child, args[1], f"{key}.{name}", why=why)
        if kind in LISTS and kind is not tuple and isinstance(value, list):
            for index, child in enumerate(value):
                _require(child, args[0], f"{key}[{index}]", why=why)
    told = f": {why}" if why else ""
    has_target = isinstance(value, dict) and "_target_" in value
    shown = f"{{_target_: {value['_target_']}}}" if has_target else repr(value)
    shown = _shortened(shown)
    near = difflib.get_close_matches(str(value), [str(each) for each in choices_of(hint)], n=1)
    cure = near[0] if near else next(iter(map(str, choices_of(hint))), "<value>")
    raise WrongValueError(key, f"`{key}` (={shown}) must be {words_of(hint)}{told}. Set {key}={cure}.")


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
