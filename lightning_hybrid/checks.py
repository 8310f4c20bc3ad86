"""Functions that validate option values and raise errors that say how to correct them.

Each error names the argument, its value and the rule. The argument `why` of the functions is the reason, usually
followed by a second sentence that says what to do.
"""

import difflib
import math
from collections.abc import Collection, Sequence
from typing import Any


def plain_value(value: Any) -> Any:
    """Convert a value from a configuration tool or command line to a plain Python value.

    Lists become tuples, because Hydra passes a `ListConfig` for a list. The text of a number becomes a number, because
    command lines pass text if an argument may also be a string, and YAML reads `1e-3` as text. Every other value is
    returned unchanged.

    >>> plain_value(["0.9", 0.999]), plain_value("1024"), plain_value("1e-3"), plain_value("dynamic")
    ((0.9, 0.999), 1024, 0.001, 'dynamic')
    """
    if isinstance(value, str):
        return _number_in(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return tuple(plain_value(item) for item in value)
    return value


def _number_in(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def make_whole(instance: Any, *fields: str) -> None:
    """Convert fields of a dataclass in place to plain Python values, with integral floats as integers.

    This lets users write 1e6 for an integer, which YAML and Python read as a float. The dataclass may be frozen.
    """
    make_plain(instance, *fields)
    for field in fields:
        value = getattr(instance, field)
        if isinstance(value, float) and value.is_integer():
            object.__setattr__(instance, field, int(value))


def make_plain(instance: Any, *fields: str) -> None:
    """Convert fields of a dataclass in place to plain Python values, even if the dataclass is frozen."""
    for field in fields:
        object.__setattr__(instance, field, plain_value(getattr(instance, field)))


def require_number(
    name: str, value: Any, why: str, *, low: float = 0, high: float = math.inf, above: bool = False
) -> None:
    """Raise `ValueError` unless `value` is a finite number in the interval [low, high).

    With `above`, the interval is (low, high).

    >>> require_number("momentum", 1.5, "past gradients would never fade. Use 0.9, for example", high=1)
    Traceback (most recent call last):
    ValueError: `momentum` (=1.5) must be a number in [0, 1): past gradients would never fade. Use 0.9, for example.
    """
    # True is an int in Python and would pass as 1. nan is rejected too, because comparisons with nan are false.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value < high or (above and value == low):
        bracket = "["
        if above:
            bracket = "("
        raise ValueError(
            f"`{name}` (={value!r:.80}) must be a number in {bracket}{low:g}, {high:g}): {why}."
        )


def require_positive(name: str, value: float, why: str) -> None:
    """Raise `ValueError` unless `value` is a positive number or infinity.

    >>> require_positive("bytes_per_s", 0.0, "it is a rate")
    Traceback (most recent call last):
    ValueError: `bytes_per_s` (=0.0) must be positive: it is a rate.
    """
    # `value <= 0` would be false for nan, which must be rejected.
    if not value > 0:
        raise ValueError(f"`{name}` (={value!r:.80}) must be positive: {why}.")


def require_share(name: str, value: float, why: str) -> None:
    """Raise `ValueError` unless `value` is a fraction in the interval (0, 1]."""
    if not 0 < value <= 1:
        raise ValueError(f"`{name}` (={value!r:.80}) must be above 0 and at most 1: {why}.")


def require_whole(name: str, value: Any, why: str, *, least: int = 1, unit: str = "") -> None:
    """Raise `ValueError` unless `value` is an integer that is at least `least`.

    The error message includes `unit`, unless it is empty.

    >>> require_whole("num_nodes", 1.5, "nodes are counted")
    Traceback (most recent call last):
    ValueError: `num_nodes` (=1.5) must be an integer, 1 or more: nodes are counted.
    """
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer and value >= least:
        return
    kind = "an integer"
    if unit:
        kind = f"a whole number of {unit}"
    raise ValueError(f"`{name}` (={value!r:.80}) must be {kind}, {least} or more: {why}.")


def require_choice(name: str, value: Any, choices: Collection[Any], why: str) -> None:
    """Raise `ValueError` unless `value` is one of `choices`.

    The number 1 is not accepted for True, although the two are equal in Python.

    >>> require_choice("nesterov", "yes", (True, False), "it is a switch")
    Traceback (most recent call last):
    ValueError: `nesterov` (='yes') must be one of True, False: it is a switch.
    """
    for choice in choices:
        if value is choice or (isinstance(value, str) and value == choice):
            return
    listed = ", ".join(map(repr, choices))
    hint = did_you_mean(value, choices)
    raise ValueError(f"`{name}` (={value!r:.80}) must be one of {listed}: {why}.{hint}")


def did_you_mean(value: Any, choices: Collection[Any]) -> str:
    """Return a "Did you mean ...?" sentence with the choice closest to `value`, or an empty string.

    >>> did_you_mean("hierachical", ["flat", "hierarchical"]), did_you_mean("x", ["flat"])
    (" Did you mean 'hierarchical'?", '')
    """
    names = [choice for choice in choices if isinstance(choice, str)]
    similar = difflib.get_close_matches(str(value), names, n=1)
    if not similar:
        return ""
    return f" Did you mean {similar[0]!r}?"


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's message without its final period.

    If the message is empty, the name of the error's type is returned.

    >>> first_line(ValueError("`lr` (=0) must be positive.\nSet optim.lr=0.1"))
    '`lr` (=0) must be positive'
    """
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
