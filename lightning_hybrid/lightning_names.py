"""Lookup of Lightning's classes and functions under both of its import names.

    lightning.pytorch, lightning.fabric         import lightning
    pytorch_lightning, lightning_fabric         import pytorch_lightning

The two distributions share no classes, so `isinstance` and `except` do not match a class of one distribution with the
same class of the other. Code that must work with both imports neither of them. Instead, it looks up names at run time
with the functions of this module, which search only packages that the process has already imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

_PACKAGES = {
    "pytorch": ("lightning.pytorch", "pytorch_lightning"),
    "fabric": ("lightning.fabric", "lightning_fabric"),
}


def lightning_types(name: str) -> tuple[Any, ...]:
    """Return the classes called `name` from all imported Lightning packages.

    The tuple can be passed to `isinstance`. It is empty if no Lightning package has been imported.

    >>> from lightning.pytorch.callbacks import Callback
    >>> Callback in lightning_types("pytorch.callbacks.Callback")
    True
    """
    return tuple(_objects_named(name))


def lightning_function(name: str) -> Any:
    """Return the function called `name` from the first imported Lightning package.

    The code is the same in all packages. If none has been imported, the first one is imported.

    >>> lightning_function("fabric.utilities.cloud_io._is_local_file_protocol")("/some/where")
    True
    """
    for function in _objects_named(name):
        return function
    # No Lightning package has been imported yet.
    family = name.partition(".")[0]
    import_module(_PACKAGES[family][0])
    return lightning_function(name)


def lightning_error(name: str, *args: object) -> BaseException:
    """Create an exception that is an instance of the class called `name` in every imported Lightning package.

    User code can therefore catch the error by the class of whichever package it imports. If no Lightning package has
    been imported, the error is a `RuntimeError`.

    >>> from lightning.pytorch.utilities.exceptions import MisconfigurationException
    >>> isinstance(lightning_error("fabric.utilities.exceptions.MisconfigurationException"), MisconfigurationException)
    True
    """
    error_types = lightning_types(name)
    if len(error_types) == 1:
        return error_types[0](*args)
    if not error_types:
        error_types = (RuntimeError,)
    class_name = name.rpartition(".")[2]
    combined_type = type(class_name, error_types, {})
    return combined_type(*args)


def misconfiguration(message: str) -> BaseException:
    """Create, but do not raise, a `MisconfigurationException`, Lightning's error for invalid options."""
    return lightning_error("fabric.utilities.exceptions.MisconfigurationException", message)


def is_overridden(method: str, instance: object, kind: str) -> bool:
    """Return whether the class of `instance` overrides a method of Lightning's class `kind`.

    >>> from lightning.pytorch import Callback
    >>> class Mine(Callback):
    ...     def on_train_start(self, trainer, pl_module): ...
    >>> [is_overridden(hook, Mine(), "pytorch.callbacks.Callback") for hook in ("on_train_start", "on_train_end")]
    [True, False]
    """
    from lightning_utilities.core.overrides import is_overridden as overrides_parent

    types = lightning_types(kind)
    parents = [parent for parent in types if isinstance(instance, parent)]
    if not parents:
        # An instance that derives from none of these classes is compared with the first one, as in Lightning.
        parents = list(types[:1])
    return any(overrides_parent(method, instance, parent) for parent in parents)


def _objects_named(name: str) -> Iterator[Any]:
    family, _, relative_name = name.partition(".")
    for package in _PACKAGES[family]:
        if package in sys.modules:
            module, _, attribute = f"{package}.{relative_name}".rpartition(".")
            yield getattr(import_module(module), attribute)
