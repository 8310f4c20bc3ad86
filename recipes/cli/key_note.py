"""Translation of the Python argument names in error messages to configuration keys.

Errors of `lightning_hybrid` name arguments as a Python user writes them: `comm.algorithm`, `between_nodes=Mean()`.
A recipe builds its objects by `_target_`, so the key of an argument is the key of the object plus the argument's name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import yaml
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from recipes.cli.command_line import CONF

KEYS_WITH_OTHER_NAMES = {"node_slices": "model.slice_fc"}
"""Attributes that the library reads from a network, and the keys that set them."""

_QUOTED = re.compile(r"`([a-z_]+(?:\.[a-z_]+)*)`")
_WRITTEN = re.compile(r"(?<![\w(.])([a-z_]+)=(?:([A-Z]\w+)\((?:([a-z_]+)=)?)?")


def note_of(message: str, cfg: DictConfig, built_key: str = "") -> str:
    """Return a line that lists the configuration keys for the Python arguments in an error message.

    The line is empty if the message names no argument.

    Args:
        message: Text of an error of `lightning_hybrid`.
        cfg: Configuration of the recipe.
        built_key: Key of the object whose constructor raised the error. Empty if the error was raised later.
    """
    content: Any = OmegaConf.to_container(cfg, resolve=False)
    parts = dict(_parts(content, ""))
    keys: dict[str, str] = {}
    for match in _QUOTED.finditer(message):
        if match[1] not in content:  # otherwise it is already a key of the recipe
            keys[f"`{match[1]}`"] = _key_of(match[1], parts, built_key)
    for match in _WRITTEN.finditer(message):
        argument, class_name, field = match.groups()
        if argument in content:
            continue
        key = _key_of(argument, parts, built_key)
        choice = _choice_of_group(key, class_name)
        if field is not None:
            keys[f"{argument}={class_name}({field}=...)"] = _key_of(
                f"{argument}.{field}", parts, built_key
            )
        elif choice:
            keys[f"{argument}={class_name}()"] = choice
        else:
            keys.setdefault(f"`{argument}`", key)
    named = [
        f"{argument} is {key}"
        for argument, key in keys.items()
        if key and argument.strip("`") != key
    ]
    if named:
        return f"Keys of the recipe: {', '.join(named)}."
    return ""


def _parts(node: Any, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dotted key and the content of every configuration node that has a `_target_`."""
    if not isinstance(node, dict):
        return
    if "_target_" in node:
        yield key, node
    for name, child in node.items():
        yield from _parts(child, f"{key}.{name}".lstrip("."))


def _key_of(argument: str, parts: dict[str, dict[str, Any]], built_key: str) -> str:
    """Return the configuration key of a Python argument such as `comm.algorithm`.

    The result is empty if the argument is not found, or if several objects of the configuration have it.
    """
    if argument in KEYS_WITH_OTHER_NAMES:
        return KEYS_WITH_OTHER_NAMES[argument]
    if built_key in parts:
        # The error names the constructor's own argument, or its path from the strategy: `comm.tune` is
        # `strategy.comm.tune`.
        field = argument.rpartition(".")[2]
        if field in parts[built_key]:
            return f"{built_key}.{field}"
    keys = [f"{key}.{argument}" for key, content in parts.items() if _has_path(content, argument)]
    of_strategy = [key for key in keys if key.startswith("strategy.")]
    for candidates in (keys, of_strategy):
        if len(candidates) == 1:
            return candidates[0]
    if not keys and "strategy" in parts and _takes(parts["strategy"]["_target_"], argument):
        # Not in conf: Hydra adds the key if it is written with a plus.
        return f"+strategy.{argument}"
    return ""


def _has_path(content: Any, argument: str) -> bool:
    for name in argument.split("."):
        if not isinstance(content, dict) or name not in content:
            return False
        content = content[name]
    return True


def _takes(target: str, argument: str) -> bool:
    """Return whether the class or function `target` accepts an argument with this name."""
    try:
        return argument in inspect.signature(get_object(target)).parameters
    except (TypeError, ValueError):  # implemented in C, or without a signature
        return False


def _choice_of_group(key: str, class_name: str | None) -> str:
    """Return the Hydra override `group=choice` that selects a class, or an empty string if there is none."""
    folder = CONF / key.removeprefix("+").replace(".", "/")
    if not key or class_name is None:
        return ""
    for path in sorted(folder.glob("*.yaml")):
        content = yaml.safe_load(path.read_text())
        if str(content.get("_target_")).endswith(f".{class_name}"):
            return f"{key.replace('.', '/')}={path.stem}"
    return ""
