"""Checks of what a user gave. Each error says name, value, rule, meaning and cure; `why` is the last two of these."""

import math
from collections.abc import Collection, Sequence
from typing import Any


def plain_value(value: Any) -> Any:
    """Return a value that a configuration tool handed over as a plain one: a tuple for a list, a number for its text.

    Hydra hands over a `ListConfig` for a list. A command line hands over the text of a number, if an argument may be
    text too, and so does YAML for `1e-3`. Every other value is returned as it is.

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


def make_plain(instance: Any, *fields: str) -> None:
    """Replace fields of a dataclass, frozen ones too, by their `plain_value`."""
    for field in fields:
        object.__setattr__(instance, field, plain_value(getattr(instance, field)))


def require_number(
    name: str, value: Any, why: str, *, low: float = 0, high: float = math.inf, above: bool = False
) -> None:
    """Raise `ValueError` unless `value` is a finite number in [low, high), or in (low, high) with `above`.

    >>> require_number("momentum", 1.5, "past gradients would never fade. SGD's usual is 0.9", high=1)
    Traceback (most recent call last):
    ValueError: `momentum` (=1.5) must be a number in [0, 1): past gradients would never fade. SGD's usual is 0.9.
    """
    # True is an int in Python, and would pass for 1. Comparisons with nan are false, so it is refused as well.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value < high or (above and value == low):
        interval = f"{'(' if above else '['}{low:g}, {high:g})"
        raise ValueError(f"`{name}` (={value!r:.80}) must be a number in {interval}: {why}.")


def require_positive(name: str, value: float, why: str) -> None:
    """Raise `ValueError` unless `value` is above zero; infinity is allowed.

    >>> require_positive("bytes_per_s", 0.0, "it is a rate")
    Traceback (most recent call last):
    ValueError: `bytes_per_s` (=0.0) must be positive: it is a rate.
    """
    # Not `value <= 0`: nan must be refused.
    if not value > 0:
        raise ValueError(f"`{name}` (={value!r:.80}) must be positive: {why}.")


def require_share(name: str, value: float, why: str) -> None:
    """Raise `ValueError` unless `value` is above 0 and at most 1."""
    if not 0 < value <= 1:
        raise ValueError(f"`{name}` (={value!r:.80}) must be above 0 and at most 1: {why}.")


def require_whole(name: str, value: Any, why: str, *, least: int = 1, unit: str = "") -> None:
    """Raise `ValueError` unless `value` is a whole number, `least` or more; `unit` says of what.

    >>> require_whole("num_nodes", 1.5, "nodes are counted")
    Traceback (most recent call last):
    ValueError: `num_nodes` (=1.5) must be a whole number, 1 or more: nodes are counted.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        of_unit = f" of {unit}" if unit else ""
        raise ValueError(
            f"`{name}` (={value!r:.80}) must be a whole number{of_unit}, {least} or more: {why}."
        )


def require_choice(name: str, value: Any, choices: Collection[Any], why: str) -> None:
    """Raise `ValueError` unless `value` is one of `choices`; 1 does not pass for True.

    >>> require_choice("nesterov", "yes", (True, False), "it is a switch")
    Traceback (most recent call last):
    ValueError: `nesterov` (='yes') must be one of True, False: it is a switch.
    """
    if not any(
        value is choice or (isinstance(value, str) and value == choice) for choice in choices
    ):
        raise ValueError(
            f"`{name}` (={value!r:.80}) must be one of {', '.join(map(repr, choices))}: {why}."
        )


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's text without its full stop, or the error's type where it has none.

    >>> first_line(ValueError("`lr` (=0) must be positive.\nSet optim.lr=0.1"))
    '`lr` (=0) must be positive'
    """
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
