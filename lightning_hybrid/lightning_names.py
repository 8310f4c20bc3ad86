"""Look-up of Lightning's classes and functions under both of its import names, which share no class.

    lightning.pytorch, lightning.fabric         import lightning
    pytorch_lightning, lightning_fabric         import pytorch_lightning

`isinstance` and `except` distinguish the classes of the two. Code that serves both derives from neither, and looks up
here, at run time, the names that it needs. Only packages that the process has already imported are searched.
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
    """Return the class of this name in each imported Lightning, for `isinstance`. Without any, the tuple is empty.

    >>> from lightning.pytorch.callbacks import Callback
    >>> Callback in lightning_types("pytorch.callbacks.Callback")
    True
    """
    return tuple(_objects_named(name))


def lightning_function(name: str) -> Any:
    """Return the function of this name from any imported Lightning, as the code is the same in all.

    >>> lightning_function("fabric.utilities.cloud_io._is_local_file_protocol")("/some/where")
    True
    """
    for function in _objects_named(name):
        return function
    # This package can be used without an imported Lightning.
    family = name.partition(".")[0]
    import_module(_PACKAGES[family][0])
    return lightning_function(name)


def lightning_error(name: str, *args: object) -> BaseException:
    """Create an error that `except` catches by the class of this name, from whichever Lightning it was imported.

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
    """Create Lightning's error for options that cannot be combined."""
    return lightning_error("fabric.utilities.exceptions.MisconfigurationException", message)


def is_overridden(method: str, instance: object, kind: str) -> bool:
    """Return whether `instance` overrides a method of Lightning's class `kind`.

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
        # Like Lightning, compare an instance that derives from neither class with the first class.
        parents = list(types[:1])
    return any(overrides_parent(method, instance, parent) for parent in parents)


def _objects_named(name: str) -> Iterator[Any]:
    family, _, relative_name = name.partition(".")
    for package in _PACKAGES[family]:
        if package in sys.modules:
            module, _, attribute = f"{package}.{relative_name}".rpartition(".")
            yield getattr(import_module(module), attribute)
