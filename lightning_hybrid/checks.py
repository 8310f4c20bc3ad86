"""What numbers in descriptions of clusters must be, in one place."""

from __future__ import annotations


def require_positive(name: str, value: float, meaning: str) -> None:
    """Raise ``ValueError`` unless ``value`` is above zero.

    >>> require_positive("bytes_per_s", 0.0, "it is a rate")
    Traceback (most recent call last):
    ValueError: `bytes_per_s` (=0.0) must be positive: it is a rate.
    """
    if not value > 0:
        raise ValueError(f"`{name}` (={value}) must be positive: {meaning}.")


def require_whole(name: str, value: int, meaning: str, *, least: int = 1) -> None:
    """Raise ``ValueError`` unless ``value`` is a whole number, ``least`` or more.

    >>> require_whole("num_nodes", 1.5, "nodes are counted")
    Traceback (most recent call last):
    ValueError: `num_nodes` (=1.5) must be a whole number, 1 or more: nodes are counted.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"`{name}` (={value}) must be a whole number, {least} or more: {meaning}.")


def require_share(name: str, value: float, meaning: str) -> None:
    """Raise ``ValueError`` unless ``value`` is above 0 and at most 1."""
    if not 0 < value <= 1:
        raise ValueError(f"`{name}` (={value}) must be above 0 and at most 1: {meaning}.")
