"""The strategy mixin that chooses the checkpoint plugin."""

from __future__ import annotations

from typing import Any

from lightning_hybrid.lightning_names import lightning_types


class DurableCheckpointMixin:
    """A strategy mixin: `DurableCheckpointIO` unless the user gave another, as `plugins=` or as `checkpoint_io=`."""

    _checkpoint_io: Any
    _checkpoint_io_type: type  # `DurableCheckpointIO` of the same Lightning

    @property
    def checkpoint_io(self) -> Any:
        """The plugin of the user, or else `DurableCheckpointIO`, also inside a wrapper (`AsyncCheckpointIO`)."""
        wrappers = lightning_types("pytorch.plugins.io.wrapper._WrappingCheckpointIO")
        if self._checkpoint_io is None:
            self._checkpoint_io = self._checkpoint_io_type()
        elif isinstance(self._checkpoint_io, wrappers):
            self._checkpoint_io.checkpoint_io = self._checkpoint_io_type()  # it keeps the first that it is given
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io
