"""List that holds weak references to modules."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn


class LivingModules:
    """Ordered list of modules that drops a module once no other code references it.

    >>> modules = LivingModules()
    >>> layer = nn.Linear(2, 1)
    >>> modules.append(layer)
    >>> [name for name, _ in modules.named_parameters()]
    ['0.weight', '0.bias']
    >>> del layer
    >>> list(modules)
    []
    """

    def __init__(self) -> None:
        self._references: list[weakref.ref[nn.Module]] = []

    def append(self, module: nn.Module) -> None:
        """Add a module."""
        self._references.append(weakref.ref(module))

    def forget_dead(self) -> None:
        """Drop the references to modules that no longer exist."""
        self._references = [reference for reference in self._references if reference() is not None]

    def clear(self) -> None:
        """Remove all modules."""
        self._references.clear()

    def __iter__(self) -> Iterator[nn.Module]:
        for reference in self._references:
            module = reference()
            if module is not None:
                yield module

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the distinct parameters of all modules."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the distinct parameters of all modules. Each name begins with the index of the module."""
        seen: set[int] = set()
        for index, module in enumerate(self):
            for name, parameter in module.named_parameters(prefix=str(index)):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter
