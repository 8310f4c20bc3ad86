"""Command-line handling before torch is imported: help, completion, and errors for unknown keys.

Hydra itself parses the command line and composes the configuration, for a program that does nothing. This module
replaces Hydra's errors for a misspelt key: they do not suggest the key that was probably meant, and torchrun would
print them once per rank.
"""

from __future__ import annotations

import argparse
import difflib
import io
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, cast

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from recipes.cli import preflight
from recipes.cli.usage import (
    UsageError,
    command,
    missing_extras,
    missing_packages_of,
    refuse_missing_extras,
)

CONF = Path(__file__).resolve().parents[2] / "conf"

OPTIONS = ("config_path", "config_name", "config_dir")
"""Hydra's options that change the composed configuration."""

SYNONYMS = {"learning_rate": "lr", "batch_size": "global_batch_size", "epochs": "max_epochs"}
"""Names of keys in other trainers, and the corresponding names here."""

# Hydra's message for an unknown choice of a group.
AVAILABLE = re.compile(r"Available options in '.*':\n((?:\t.*\n?)+)")

LOCAL_STEPS_KEYS = tuple(
    f"strategy.between_nodes.{key}" for key in ("every", "from_step", "outer_lr")
)
"""Keys that exist only after `strategy/between_nodes=local_steps` is chosen."""


def bridge_hydra_versions() -> None:
    """Patch argparse so that Hydra 1.3 runs on Python 3.14, and silence Hydra's deprecation warnings.

    The warnings that Hydra 1.4 gives about Hydra 1.5 do not apply: our version bounds exclude 1.5.
    """
    for message in (
        r"\s*The version_base parameter is deprecated",  # Hydra 1.3 warns if it is missing
        r"\s*register_new_resolver\(\) is deprecated",  # OmegaConf 2.3 uses the new name for another function
        r"(?s)\s*hydra\.utils\.instantiate\(\) resolved .* with no",  # Hydra 1.3 would pass a whitelist to the target
    ):
        warnings.filterwarnings("ignore", message=message)
    check = getattr(argparse.ArgumentParser, "_check_help", None)
    if check is not None and check.__module__ == "argparse":
        # Python 3.14 checks each help text when an argument is added. Hydra 1.3 has a lazy one, built only when shown.
        def check_text(parser: argparse.ArgumentParser, action: argparse.Action) -> None:
            if action.help is None or isinstance(action.help, str):
                check(parser, action)

        argparse.ArgumentParser._check_help = check_text  # type: ignore[attr-defined]


def read(name: str) -> None:
    """Answer requests for help or information, and exit with an error if the command line is invalid.

    In both cases the program ends. Requests are answered even if packages of the command are not installed. In that
    case the help ends with the line that installs them.

    Raises:
        SystemExit: The request was answered.
        UsageError: The command line was rejected.
    """
    if not is_question(sys.argv[1:]):
        refuse_missing_extras(name)
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        return  # because the user wants Hydra's own tracebacks
    bridge_hydra_versions()
    OmegaConf.register_new_resolver("log_handlers", lambda: ["console"], replace=True)
    OmegaConf.register_new_resolver("command", command, replace=True)
    parsed = get_args_parser().parse_args()
    if parsed.experimental_rerun is not None:
        return
    options = [
        f"--{key.replace('_', '-')}={value}"
        for key in OPTIONS
        if (value := getattr(parsed, key)) is not None
    ]
    if asked := [override[:-2] for override in parsed.overrides if override.endswith("=?")]:
        other_overrides = [override for override in parsed.overrides if not override.endswith("=?")]
        print("\n\n".join(answer(name, key, [*options, *other_overrides]) for key in asked))
        raise SystemExit(0)
    is_sweep = parsed.multirun or "hydra.mode=MULTIRUN" in parsed.overrides
    # Shell completion counts as a request.
    is_answered = parsed.help or parsed.hydra_help or parsed.shell_completion or parsed.cfg
    if not parsed.shell_completion and (
        lines := refusals(
            name, options, parsed.overrides, is_sweep=is_sweep, also_values=not is_answered
        )
    ):
        # Every rank finds the same errors, and rank zero prints them. The other ranks wait, because launchers kill all
        # ranks when the first one exits.
        if is_first_rank():
            print("\n".join(lines), file=sys.stderr, flush=True)
        else:
            time.sleep(5)
        raise UsageError("\n".join(lines))
    if is_answered and not parsed.resolve:
        try:
            program(name)()
        finally:  # Hydra exits after it has shown the help
            if parsed.help and missing_extras(name):
                print(f"\n{missing_extras(name)}")
        raise SystemExit(0)


def is_question(words: Sequence[str]) -> bool:
    """Return whether a command line asks for help, for the configuration or for the choices of a key."""
    options = (
        "--help",
        "-h",
        "--hydra-help",
        "--shell-completion",
        "-sc",
        "--cfg",
        "-c",
        "--info",
        "-i",
    )
    return any(word.partition("=")[0] in options or word.endswith("=?") for word in words)


def is_first_rank() -> bool:
    """Return whether this process is rank zero according to the launcher's environment variables."""
    return all(
        os.environ.get(variable, "0") == "0" for variable in ("RANK", "LOCAL_RANK", "SLURM_PROCID")
    )


def program(name: str) -> Any:
    """Return a Hydra entry point that composes the configuration of a command and does nothing else."""
    return hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(lambda cfg: None)


@contextmanager
def arguments(words: Sequence[str]) -> Iterator[None]:
    """Replace the command-line arguments in `sys.argv` while the context is active."""
    before = sys.argv
    sys.argv = [sys.argv[0], *words]
    try:
        yield
    finally:
        sys.argv = before


def composed(name: str, words: Sequence[str]) -> tuple[str, str]:
    """Compose the configuration of a command, and return its YAML text and Hydra's error message.

    One of the two strings is empty.
    """
    printed = io.StringIO()
    wrong = io.StringIO()
    with arguments([*words, "--cfg=job"]), redirect_stdout(printed), redirect_stderr(wrong):
        try:
            program(name)()
        except SystemExit as end:
            if end.code:
                return "", wrong.getvalue().partition(
                    "\nSet the environment variable HYDRA_FULL_ERROR"
                )[0].strip()
    return printed.getvalue(), ""


def answer(name: str, key: str, words: Sequence[str]) -> str:
    """Return the answer to `key=?`: the choices of a config group, or the value of any other key.

    The choices are listed one per line.

    Raises:
        UsageError: The key does not exist.
    """
    wrong = composed(name, [*words, f"{key}=?"])[1]
    if options := AVAILABLE.search(wrong):
        lines = []
        choices = options[1].split()
        width = max(22, *map(len, choices))
        for choice in choices:
            text = (CONF / key / f"{choice}.yaml").read_text()
            lines.append(f"  {choice:<{width}}  {description_of(text)}".rstrip())
        return "\n".join([f"{key}=", *lines])
    text = composed(name, words)[0]
    if key not in (keys := keys_of(text)):
        message = refusal(name, key, "does not exist", keys)
        print(message, file=sys.stderr, flush=True)
        raise UsageError(message)
    value: Any = OmegaConf.to_container(OmegaConf.create(text))
    for word in key.split("."):
        value = value[word]
    return f"{key}={value}"


def description_of(text: str) -> str:
    r"""Return the first sentence of the comment at the top of a configuration file.

    >>> description_of("# @package _global_\n# Noise. Nothing is\n# read.\nroot: null")
    'Noise.'
    >>> description_of("# Images of your own, packed\n# or not:\n#   python recipes/train.py\nroot: null")
    'Images of your own, packed or not'
    """
    words: list[str] = []
    for line in text.splitlines():
        if line.startswith("# @"):
            continue
        if not re.match(r"# \S", line):
            break
        words += line.removeprefix("# ").split()
    sentence = re.match(r".*?\.(?=$| [A-Z])", " ".join(words))
    if sentence is not None:
        return sentence[0]
    return " ".join(words).rstrip(":")


def first_of_sweep(override: str) -> str:
    """Convert a Hydra sweep override to the override of the sweep's first job.

    >>> first_of_sweep("optim.lr=5,10"), first_of_sweep("a=[1,2]"), first_of_sweep("a=range(2,4)"), first_of_sweep("=")
    ('optim.lr=5', 'a=[1,2]', 'a=2', '=')
    """
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return override  # rejected later, when the configuration is composed
    if not parsed.is_sweep_override():
        return override
    return f"{override.partition('=')[0]}={next(parsed.sweep_string_iterator())}"


def refusals(
    name: str,
    options: Sequence[str],
    overrides: Sequence[str],
    *,
    is_sweep: bool,
    also_values: bool = False,
) -> list[str]:
    """Return the error messages for an invalid command line, or an empty list if it is valid.

    There is one message for each override that Hydra cannot compose. If Hydra can compose all overrides and
    `also_values` is set, the messages are about invalid values or missing packages.
    """
    one_job = {
        given_override: first_of_sweep(given_override) if is_sweep else given_override
        for given_override in overrides
    }
    config, text = composed(name, [*options, *one_job.values()])
    if text.startswith("Traceback"):  # an error of the machine, such as a deleted working directory
        return []
    if not text:
        if not also_values:
            return []
        values = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(config)))
        lines = wrong_numbers(name, options, list(one_job.values()), values)
        if lines:
            return lines
        try:
            preflight.check_required(values)
            preflight.check_values(values)
        except ValueError as error:
            return [f"error: {error}"]
        line = missing_packages_of(values)
        if line:
            return [f"error: {line}"]
        return []
    # Overrides are added one by one, group choices before keys inside the groups. An override that fails here is wrong
    # by itself, independent of the other overrides.
    good = list(options)
    messages = list[str]()
    for override in sorted(
        overrides, key=lambda given_override: "." in given_override.partition("=")[0]
    ):
        if wrong := composed(name, [*good, one_job[override]])[1]:
            messages.append(refusal(name, override, wrong, keys_of(composed(name, good)[0])))
        else:
            good.append(one_job[override])
    return messages or [f"error: {text}"]


def wrong_numbers(
    name: str, options: Sequence[str], overrides: Sequence[str], values: Mapping[str, Any]
) -> list[str]:
    """Return error messages for keys with a numeric default that were set to text."""
    numbers = {
        override.partition("=")[0].lstrip("+")
        for override in overrides
        if not override.startswith("~")
    }
    is_text = {
        key
        for key in numbers
        if isinstance(value := value_at(values, key), str) and "${" not in value
    }
    if not is_text:
        return []
    # Only the text values are dropped. The choices of groups must stay, because they decide which keys exist.
    choices = [
        override for override in overrides if override.partition("=")[0].lstrip("+") not in is_text
    ]
    text, wrong = composed(name, [*options, *choices])
    if wrong:
        return []
    defaults: Any = OmegaConf.to_container(OmegaConf.create(text))
    lines = []
    for key in sorted(is_text):
        default = value_at(defaults, key)
        if isinstance(default, int | float) and not isinstance(default, bool):
            value = value_at(values, key)
            lines.append(
                f"error: `{key}` (={value!r}) must be a number. Set {key}={default}, for example."
            )
    return lines


def value_at(values: Any, key: str) -> Any:
    """Return the value of a dotted key in nested mappings, or None if there is no such key.

    >>> value_at({"a": {"b": 1}}, "a.b"), value_at({"a": 2}, "a.b")
    (1, None)
    """
    for word in key.split("."):
        if not isinstance(values, Mapping) or word not in values:
            return None
        values = values[word]
    return values


def keys_of(text: str) -> list[str]:
    """Return every dotted key of a YAML configuration, including the keys of nested mappings.

    >>> keys_of("{a: {b: 1}, c: [{d: 2}]}")
    ['a', 'a.b', 'c']
    """

    def walk(node: Any, prefix: str) -> Iterator[str]:
        for key, value in node.items():
            yield f"{prefix}{key}"
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{key}.")

    return list(walk(OmegaConf.to_container(OmegaConf.create(text)), ""))


def with_quotes(value: str) -> str:
    """Quote a value so that Hydra reads it literally.

    In a list, each element gets its own quotes.

    >>> with_quotes("/a(b)/c")
    '"/a(b)/c"'
    >>> with_quotes("[recipe=small_images,lr=1]")
    '["recipe=small_images","lr=1"]'
    """
    if not (value.startswith("[") and value.endswith("]")):
        return f'"{value}"'
    elements = [f'"{element.strip()}"' for element in value[1:-1].split(",")]
    return f"[{','.join(elements)}]"


def refusal(name: str, override: str, text: str, keys: Sequence[str]) -> str:
    """Convert Hydra's error about an override to a message that suggests a correction."""
    mark, key, equals, value = re.fullmatch(
        r"(\+\+?|~)?([^=]*)(=?)(.*)", override, re.DOTALL
    ).groups("")  # type: ignore[union-attr]
    if options := AVAILABLE.search(text):
        choices = options[1].split()
        near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
        if near:
            hint = f"Did you mean {mark}{key}={near[0]}?"
        else:
            hint = f"Set {mark}{key}=<one of them>."
        return f"error: `{key}` (={value}) must be one of {', '.join(choices)}. {hint}"
    if "override_grammar" in text:
        quoted = f"'{mark}{key}={with_quotes(value)}'"
        return (
            f"error: `{override}` is not valid in Hydra's grammar. Put quotes around values with "
            f"special characters, as in {quoted}."
        )
    if f"use +{key}" not in text and "does not exist" not in text:
        return f"error: {text}"
    rule = f"error: unknown key `{key}`."
    if equals:
        rule = f"error: unknown key `{key}` (={value})."
    near_key = nearest(key, keys)
    if near_key is not None:
        hint = f" Did you mean {mark}{near_key}{equals}{value}?"
    else:
        hint = ""
    if key in LOCAL_STEPS_KEYS:
        hint = f" Did you mean strategy/between_nodes=local_steps {key}={value}?"
    if hint or mark:
        ending = ""
    else:
        ending = f" To add an argument that conf leaves out, use a plus: +{key}={value}."
    return f"{rule}{hint} Run `{command(name)} --cfg job` to list all keys.{ending}"


def nearest(key: str, keys: Sequence[str]) -> str | None:
    """Return the existing key that the user probably meant, or None if no key is similar.

    Keys are compared by their last component, by synonyms and by spelling.

    >>> keys = ["global_batch_size", "optim", "optim.lr", "data.global_batch_size", "trainer.max_epochs"]
    >>> [nearest(key, keys) for key in ("lr", "optm.lr", "optim.learning_rate", "epochs", "batch_size", "opitm.x")]
    ['optim.lr', 'optim.lr', 'optim.lr', 'trainer.max_epochs', 'global_batch_size', None]
    """
    word = key.rpartition(".")[2]
    for meant in (word, SYNONYMS.get(word)):
        same = [full_key for full_key in keys if full_key.rpartition(".")[2] == meant]
        if same:  # prefer the outermost key: inner keys mostly refer to it
            return min(
                same,
                key=lambda full_key: (
                    full_key.count("."),
                    -difflib.SequenceMatcher(None, key, full_key).ratio(),
                ),
            )
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    if near:
        return near[0]
    words = {full_key.rpartition(".")[2]: full_key for full_key in reversed(keys)}
    return next(
        (words[full_key] for full_key in difflib.get_close_matches(word, words, n=1, cutoff=0.75)),
        None,
    )
