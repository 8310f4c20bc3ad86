"""The strategy mixin that chooses the checkpoint plugin."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO


class DurableCheckpointMixin:
    """A strategy mixin: `DurableCheckpointIO` unless the user gave another, as `plugins=` or as `checkpoint_io=`."""

    _checkpoint_io: Any

    @property
    def checkpoint_io(self) -> Any:
        """The plugin of the user, or else `DurableCheckpointIO`, also inside a wrapper (`AsyncCheckpointIO`)."""
        from lightning_hybrid.checkpoint.io import DurableCheckpointIO  # here: only a trainer needs it

        if self._checkpoint_io is None:
            self._checkpoint_io = DurableCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = DurableCheckpointIO()  # the wrapper keeps the first that it is given
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io
