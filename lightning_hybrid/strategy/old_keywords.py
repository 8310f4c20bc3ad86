"""Keywords of 0.2, for one release: what to write in their place."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from lightning_hybrid.checks import require_choice
from lightning_hybrid.strategy.options import Adasum, BetweenNodes, Comm, LocalSteps, Mean, Report

# By the argument that they have become a part of: old keywords, and their fields there.
_FIELDS: dict[str, dict[str, str]] = {
    "between_nodes": {
        "comm_dtype_across_nodes": "dtype",
        "error_feedback": "error_feedback",
        "reduction": "",
        "sync_across_nodes_every": "every",
        "sync_across_nodes_from_step": "from_step",
        "outer_step": "",
    },
    "comm": {
        "algorithm": "algorithm",
        "bucket_bytes": "bucket_bytes",
        "plan": "plan",
        "comm_dtype": "dtype",
    },
    "report": {"trace_dir": "trace_dir", "link_bytes_per_s": "link_bytes_per_s"},
}
OLD_KEYWORDS = (*(name for fields in _FIELDS.values() for name in fields),)


def with_old_keywords(
    arguments: Mapping[str, Any], *, between_nodes: BetweenNodes, comm: Comm, report: Report | None = None
) -> tuple[BetweenNodes, Comm, Report]:
    """Return the values that keywords of 0.2 among a strategy's `arguments` stand for; a warning has the new line.

    Raises:
        ValueError: an old keyword and the argument that it is a part of now were both given, or a value cannot work.
    """
    given: dict[str, Any] = {"between_nodes": between_nodes, "comm": comm, "report": report or Report()}
    defaults: dict[str, Any] = {"between_nodes": Mean(), "comm": Comm(), "report": Report()}
    old = {name: arguments[name] for name in OLD_KEYWORDS if arguments.get(name) is not None}
    if not old:
        return given["between_nodes"], given["comm"], given["report"]
    for argument, fields in _FIELDS.items():
        own = {name: old[name] for name in fields if name in old}
        if own and given[argument] != defaults[argument]:
            name, value = next(iter(own.items()))
            raise ValueError(
                f"`{name}` (={value!r}) and `{argument}` (={given[argument]!r}) say the same thing: the first is a "
                f"keyword of 0.2 that has become a part of the second. Leave `{name}` out."
            )
        if own and argument == "between_nodes":
            given[argument] = _between_nodes_of(own)
        elif own:
            given[argument] = type(defaults[argument])(**{fields[name]: value for name, value in own.items()})
    names = ", ".join(f"`{name}` (={value!r:.80})" for name, value in old.items())
    line = ", ".join(f"{argument}={value!r}" for argument, value in given.items() if value != defaults[argument])
    cure = f"Write {line}, with classes of `lightning_hybrid`." if line else "It is so by default: leave it out."
    warnings.warn(f"{names}: of 0.2, gone with the next release. {cure}", FutureWarning, stacklevel=3)
    return given["between_nodes"], given["comm"], given["report"]


def _between_nodes_of(old: Mapping[str, Any]) -> BetweenNodes:
    reduction, every = old.get("reduction", "mean"), old.get("sync_across_nodes_every", 1)
    require_choice("reduction", reduction, ("mean", "adasum"), "take `between_nodes=Mean()` or `Adasum()` in its place")
    kind: Any = Adasum if reduction == "adasum" else Mean if every == 1 else LocalSteps
    known, found = {each.name for each in dataclasses.fields(kind)}, dict[str, Any]()
    for name, field in _FIELDS["between_nodes"].items():
        value = old.get(name)
        if name == "reduction" or value in (None, False, {}) or (field == "every" and value == 1):  # as without it
            continue
        if name == "outer_step" and not (isinstance(value, Mapping) and set(value) <= {"lr", "momentum"}):
            raise ValueError(
                f"`outer_step` (={value!r}) must be a mapping with `lr` and `momentum`. Take "
                "`between_nodes=LocalSteps(every=8, outer_lr=0.7, outer_momentum=0.9)` in its place."
            )
        own = {field: value} if field else {f"outer_{key}": number for key, number in value.items()}
        if not own.keys() <= known:
            raise ValueError(
                f"`{name}` (={value!r}) has no effect with {kind.__name__}(...), which the other keywords ask for. "
                f"Leave `{name}` out, or write the `between_nodes` that you mean."
            )
        found |= own
    made: BetweenNodes = kind(**found)
    return made
