"""Lightning under its two import names, which share no class: `isinstance` and `except` tell them apart.

    lightning.pytorch, lightning.fabric         import lightning
    pytorch_lightning, lightning_fabric         import pytorch_lightning

Code that serves both derives from neither and asks here, at run time, for what it needs. Only packages that the process
has imported are looked at: the other one is not imported for it.
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
    """Return the class of this name in each imported Lightning: for `isinstance`, which is False for none.

    >>> from lightning.pytorch.callbacks import Callback
    >>> Callback in lightning_types("pytorch.callbacks.Callback")
    True
    """
    return tuple(_found(name))


def lightning_function(name: str) -> Any:
    """Return the function of this name, from an imported Lightning: they are the same code.

    >>> lightning_function("fabric.utilities.cloud_io._is_local_file_protocol")("/some/where")
    True
    """
    for function in _found(name):
        return function
    import_module(
        _PACKAGES[name.partition(".")[0]][0]
    )  # our own code can be used with none imported
    return lightning_function(name)


def lightning_error(name: str, *args: object) -> BaseException:
    """Make an error that `except` finds by the class of this name, of whichever Lightning it was imported from.

    >>> from lightning.pytorch.utilities.exceptions import MisconfigurationException
    >>> isinstance(lightning_error("fabric.utilities.exceptions.MisconfigurationException"), MisconfigurationException)
    True
    """
    kinds = lightning_types(name)
    kind = (
        kinds[0] if len(kinds) == 1 else type(name.rpartition(".")[2], kinds or (RuntimeError,), {})
    )
    return kind(*args)


def misconfiguration(message: str) -> BaseException:
    """Make Lightning's error for what cannot work together."""
    return lightning_error("fabric.utilities.exceptions.MisconfigurationException", message)


def is_overridden(method: str, instance: object, kind: str) -> bool:
    """Return whether `instance` has a `method` of its own, other than that of Lightning's class `kind`.

    >>> from lightning.pytorch import Callback
    >>> class Mine(Callback):
    ...     def on_train_start(self, trainer, pl_module): ...
    >>> [is_overridden(hook, Mine(), "pytorch.callbacks.Callback") for hook in ("on_train_start", "on_train_end")]
    [True, False]
    """
    from lightning_utilities.core.overrides import is_overridden as differs

    kinds = lightning_types(kind)
    # One that derives from neither is held against the first, as Lightning does.
    own = [parent for parent in kinds if isinstance(instance, parent)] or kinds[:1]
    return any(differs(method, instance, parent) for parent in own)


def _found(name: str) -> Iterator[Any]:
    family, _, place = name.partition(".")
    for package in _PACKAGES[family]:
        if package in sys.modules:
            module, _, attribute = f"{package}.{place}".rpartition(".")
            yield getattr(import_module(module), attribute)
