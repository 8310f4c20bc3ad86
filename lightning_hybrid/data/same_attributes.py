"""Synchronization of attributes between a user's loader and the copy that training iterates over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_hybrid.data.plain_pass import rebound

# The copy has its own samplers and iterators. torchdata's loader keeps the state of its iterator in the others.
_SEPARATE = (
    "exact_resume",
    "sampler",
    "batch_sampler",
    "_iterator",
    "_initial_iter_for_state_dict",
    "next_iter_state",
)
_MISSING = object()


class SameAttributes:
    """Two-way synchronization of the attributes of a user's loader and its copy.

    Under `ddp`, training iterates over the user's own object, so that changes by user code and by methods of the loader
    have an effect on both. Values that are changed in place are equal in both without this class, because the copy is
    shallow.

    Args:
        user_loader: Loader of the user.
        copied: Copy of the loader, with the same attributes.
    """

    def __init__(self, user_loader: DataLoader[Any], copied: DataLoader[Any]) -> None:
        self._user_loader = user_loader
        self._copied = copied
        self._of_user: dict[str, Any] = {}
        self._of_copy: dict[str, Any] = {}
        self._note_values()

    def update(self) -> None:
        """Apply the changes since the last call to the other loader.

        If both have changed an attribute, the value of the user's loader is used.
        """
        user_changes = _changed_names(self._user_loader, self._of_user)
        copy_changes = _changed_names(self._copied, self._of_copy)
        if not user_changes and not copy_changes:
            return
        for name in copy_changes - user_changes:
            _transfer(name, self._copied, self._user_loader)
        for name in user_changes:
            _transfer(name, self._user_loader, self._copied)
        self._note_values()

    def _note_values(self) -> None:
        self._of_user = _values_of(self._user_loader)
        self._of_copy = _values_of(self._copied)


def _values_of(loader: DataLoader[Any]) -> dict[str, Any]:
    values = {}
    for name, value in vars(loader).items():
        # Iterators belong to a pass of one of the loaders.
        if name not in _SEPARATE and not isinstance(value, Iterator):
            values[name] = value
    return values


def _changed_names(loader: DataLoader[Any], before: dict[str, Any]) -> set[str]:
    now = _values_of(loader)
    names = set[str]()
    for name in now.keys() | before.keys():
        if now.get(name, _MISSING) is not before.get(name, _MISSING):
            names.add(name)
    return names


def _transfer(name: str, source: DataLoader[Any], target: DataLoader[Any]) -> None:
    """Copy an attribute from one loader to the other, or delete the other's attribute if it was deleted."""
    values = vars(source)
    if name in values:
        # `DataLoader` does not allow setting some attributes.
        object.__setattr__(target, name, rebound(values[name], source, target))
    else:
        vars(target).pop(name, None)
