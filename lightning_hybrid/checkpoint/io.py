"""Lightning checkpoint plugin that writes checkpoint files atomically and with checksums."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_hybrid.checkpoint.file import (
    CheckpointWriteError,
    check_whole,
    load_unchecked,
    not_found,
    remove_checkpoint,
    write_checkpoint,
)
from lightning_hybrid.checkpoint.host_copy import HostCopies
from lightning_hybrid.checkpoint.writer_thread import WriterThread
from lightning_hybrid.checks import plain_value, require_choice, require_positive, require_whole
from lightning_hybrid.formatting import counted
from lightning_hybrid.lightning_names import lightning_function, lightning_types

if TYPE_CHECKING:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO as _Base
else:
    _Base = object


class DurableCheckpointIOMixin(_Base):
    """Checkpoint plugin that writes files atomically with checksums and rejects damaged files.

    A file is either complete or absent:

        save      temporary file by `torch.save`, checksum, fsync, atomic rename
        load      verify the checksum, then `torch.load`, which by default does not run code from the file
        remove    only after all earlier saves are on disk, and only if they succeeded

    The files can be read by any reader of Lightning checkpoints. Checkpoints from other sources are loaded without
    verification. For URLs (`s3://...`), Lightning's own writer is used, without checksum or background thread. Values
    keep their types. The first save warns about objects that torch loads only with `weights_only=False`, such as
    OmegaConf objects in hyper-parameters.

    Args:
        in_background: Whether to write checkpoints in a background thread. Training then waits only until the tensors
            are copied to host memory. If the process is killed before the thread finishes, the previous checkpoint
            remains. If False, training waits for the disk.
        max_in_memory: Maximum number of copied checkpoints that wait to be written (with `in_background`). Another
            save waits until the first of these checkpoints is written. Each checkpoint that is not yet written takes
            host memory of the size of its tensors. One block of this size is kept between checkpoints, and freed at
            the end of the run.
        timeout_s: Maximum time in seconds that a save, or the end of the run, waits for the thread.
        keep_previous: Whether an overwritten checkpoint is kept as `<name>.previous.ckpt`. A run can resume from this
            file if the disk damages the newest file. It takes twice the disk space. The recipes set this option for
            `resume=auto`. False behaves like `ddp`.
        on_error: `"raise"` stops the run if writing fails, for example because the disk is full. `"warn"` continues
            with the old checkpoint and tries again at the next save. With `in_background`, the error appears at the
            next save or at the end of the run.

    Raises:
        ValueError: `max_in_memory` or `timeout_s` is not above zero, or `on_error` is unknown.
    """

    def __init__(
        self,
        *,
        in_background: bool = False,
        max_in_memory: int = 2,
        # Long enough for a disk of 200 MB/s to write a checkpoint of 100 GB, which takes 500 s.
        timeout_s: float = 900.0,
        keep_previous: bool = False,
        on_error: Literal["raise", "warn"] = "raise",
    ) -> None:
        why = "the checkpoint that is being written counts too. Set max_in_memory=1, for example"
        max_in_memory = plain_value(max_in_memory)
        timeout_s = plain_value(timeout_s)
        require_whole("max_in_memory", max_in_memory, why, unit="checkpoints")
        require_positive(
            "timeout_s",
            timeout_s,
            "training waits at most this many seconds for the disk. Set timeout_s=900, for example",
        )
        why = "'raise' ends the run if a checkpoint cannot be written, and 'warn' lets the run continue without it"
        require_choice("on_error", on_error, ("raise", "warn"), why)
        self.in_background = in_background
        self.timeout_s = timeout_s
        self.keep_previous = keep_previous
        self.on_error = on_error
        self._thread = WriterThread(max_in_memory)
        self._copies: list[HostCopies] = []
        self._is_inspected = False
        # Whether the latest write has failed. While a write is in progress, the attribute is True.
        self._has_failed = False

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint to `path`, in a background thread if `in_background` is set.

        With `in_background`, the method returns once the tensors are copied.

        Raises:
            CheckpointWriteError: This checkpoint, or with `in_background` an earlier one, was not written.
        """
        if storage_options is not None or not _is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        if not self.in_background:
            try:
                self._write(checkpoint, _local_path(path))
            except CheckpointWriteError as error:
                self._raise(error)
            return

        # The background thread cannot raise an error in the training loop. The next call raises it.
        self._raise_earlier_error()
        if not self._thread.wait_for_slot(limit_s=self.timeout_s):
            raise self._too_slow()
        # Memory in `_copies` is not in use by any job. It is removed from the list, so that no later save overwrites it
        # while the thread reads it.
        if self._copies:
            copies = self._copies.pop()
        else:
            copies = HostCopies()
        copied_checkpoint = copies.take(checkpoint)
        self._thread.put(partial(self._write_copy, copies, copied_checkpoint, _local_path(path)))

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Wait for pending writes, then verify and load a checkpoint.

        Raises:
            FileNotFoundError, DamagedCheckpointError, RefusedCheckpointError: See `checkpoint.file.load_unchecked`.
        """
        if not _is_local(path):
            # With None, Lightning would create all objects in a file loaded from http(s).
            if weights_only is None:
                weights_only = True
            return super().load_checkpoint(path, map_location, weights_only)

        self._wait()
        file = _local_path(path)
        if not file.is_file():
            raise FileNotFoundError(not_found(file))
        if not check_whole(file):
            rank_zero_info(f"{path} has no checksum, so it cannot be verified before it is loaded.")
        return load_unchecked(file, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint after all pending writes, unless the last write failed."""
        if not _is_local(path):
            super().remove_checkpoint(path)
        elif self._thread.num_jobs:
            # Lightning removes the old checkpoint right after it saves the new one.
            self._thread.put(
                partial(self._remove_unless_failed, _local_path(path)), takes_slot=False
            )
        else:
            self._remove_unless_failed(_local_path(path))

    def teardown(self) -> None:
        """Wait until all pending checkpoints are written, and free the host memory for copies.

        Raises:
            CheckpointWriteError: A checkpoint was not written. While another error is being raised, a warning is issued
                instead.
        """
        try:
            self._wait()
        finally:
            self._copies = []
        self._raise_earlier_error()

    # ---- writing ---------------------------------------------------------------------------------------------------

    def _write(
        self, checkpoint: dict[str, Any], path: Path, copies: HostCopies | None = None
    ) -> None:
        self._has_failed = True
        if copies is not None:
            copies.wait()
        write_checkpoint(checkpoint, path, keep_previous=self.keep_previous)
        self._has_failed = False
        if not self._is_inspected:
            self._is_inspected = True
            _warn_of_objects(path)

    def _write_copy(self, copies: HostCopies, checkpoint: dict[str, Any], path: Path) -> None:
        try:
            self._write(checkpoint, path, copies)
        finally:
            # One block of memory is kept for the next checkpoint. More are needed only if saves follow quickly.
            if not self._copies:
                self._copies.append(copies)

    def _remove_unless_failed(self, path: Path) -> None:
        # If the save before this removal failed, the old checkpoint may be the only one.
        if not self._has_failed:
            remove_checkpoint(path)

    def _wait(self) -> None:
        if not self._thread.wait(limit_s=self.timeout_s):
            self._raise(self._too_slow())

    def _too_slow(self) -> CheckpointWriteError:
        waiting = counted(self._thread.num_in_slots, "checkpoint")
        return CheckpointWriteError(
            f"`timeout_s` (={self.timeout_s:g}) has passed before the disk has stored {waiting}, because it does not "
            "respond or is too slow. Earlier checkpoints are undamaged. Save less often, increase `timeout_s`, or "
            "check the disk."
        )

    # ---- errors ----------------------------------------------------------------------------------------------------

    def _raise_earlier_error(self) -> None:
        error = self._thread.take_error()
        if error is not None:
            self._raise(error)

    def _raise(self, error: BaseException) -> None:
        # If `teardown` runs after a failed step, the user must see the error of the step.
        would_hide_another = sys.exc_info()[1] not in (None, error)
        is_warning = self.on_error == "warn" or would_hide_another
        if isinstance(error, CheckpointWriteError) and is_warning:
            rank_zero_warn(f"{error} The run continues without a newer checkpoint.")
            return
        raise error


def _is_local(path: Any) -> bool:
    return bool(lightning_function("fabric.utilities.cloud_io._is_local_file_protocol")(path))


def _local_path(path: Any) -> Path:
    """Convert a local path to a `Path`, without the prefix `file://` and with `~` expanded, like Lightning."""
    text = str(path)
    for prefix in ("file://", "local://"):
        text = text.removeprefix(prefix)
    return Path(text).expanduser()


def _warn_of_objects(path: Path) -> None:
    # This warns at the first write, rather than when the checkpoint is needed, that it cannot be loaded by default.
    classes = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    if classes:
        rank_zero_warn(
            f"The checkpoint `{path}` contains objects other than tensors and plain data ({', '.join(classes)}). "
            "As with any strategy, fit(ckpt_path=...) and load_from_checkpoint can load this checkpoint only with "
            "weights_only=False, or after torch.serialization.add_safe_globals with these classes. To "
            "avoid that, keep such objects out of hyper-parameters "
            "(`save_hyperparameters(ignore=...)`) and out of the `state_dict` of callbacks."
        )


def _user_io_or_durable(strategy: Any) -> Any:
    io = strategy._checkpoint_io
    if io is None:
        io = strategy._checkpoint_io_type()
        strategy._checkpoint_io = io
    elif isinstance(io, lightning_types("pytorch.plugins.io.wrapper._WrappingCheckpointIO")):
        # A wrapper keeps the first plugin that it is given.
        io.checkpoint_io = strategy._checkpoint_io_type()
    return io


def _set_checkpoint_io(strategy: Any, io: Any) -> None:
    strategy._checkpoint_io = io


# Property of a strategy that returns the user's checkpoint plugin, or by default a plugin of the type
# `_checkpoint_io_type`. The default is also inserted into a plugin that wraps another plugin.
durable_by_default = property(_user_io_or_durable, _set_checkpoint_io)
