"""Names of the collectives of a sharded update, and their description in messages."""

from __future__ import annotations

from typing import Literal, get_args

# Names of the collectives of a sharded update, over the ranks of a node or over all ranks (engine/node_exchange.py).
Exchange = Literal[
    "node_sum", "node_gather", "node_collect", "world_sum", "world_gather", "world_collect"
]
_EXCHANGES = get_args(Exchange)


def is_exchange(name: str) -> bool:
    """Return whether `name` is a collective of a sharded update rather than an all-reduce algorithm."""
    return name in _EXCHANGES


def words_of(name: str) -> str:
    """Describe an algorithm for error messages, such as `two_level all-reduce`.

    >>> words_of("two_level"), words_of("node_gather")
    ('two_level all-reduce', 'node_gather exchange')
    """
    if is_exchange(name):
        return f"{name} exchange"
    return f"{name} all-reduce"
