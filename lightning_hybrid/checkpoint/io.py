"""Lightning's checkpoint plugin on `checkpoint.file`: checkpoints that survive a kill of the run."""

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
    remove_checkpoint,
    write_checkpoint,
)
from lightning_hybrid.checkpoint.host_copy import HostCopies
from lightning_hybrid.checkpoint.writer_thread import WriterThread
from lightning_hybrid.checks import plain_value, require_choice, require_positive, require_whole
from lightning_hybrid.lightning_names import lightning_function, lightning_types

if TYPE_CHECKING:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO as _Base
else:
    _Base = object


class DurableCheckpointIOMixin(_Base):
    """A checkpoint plugin that writes files whole or not at all, with a checksum, and loads only whole files.

        save      temporary file by `torch.save`, checksum, fsync -> atomic rename
        load      compare the checksum, then `torch.load`, which by default runs nothing that a file names
        remove    after all that was saved before it is on the disk, and not if that failed

    Any other reader of Lightning checkpoints reads these; checkpoints of others load here, without a comparison. Where
    a path is a URL (`s3://...`) Lightning's own writing is used, without checksum and thread. What is saved is what is
    loaded, types included; of objects that torch loads with `weights_only=False` only, such as OmegaConf's in
    hyper-parameters, the first save warns.

    Args:
        in_background: Copy the tensors, which training waits for, and write them by a thread, which it does not wait
            for. A kill before the thread is done leaves the previous checkpoint. False: training waits for the disk.
        max_in_memory: With `in_background`, checkpoints that are copied and not yet written. A further one waits for
            the first to be written. Host memory, in bytes of the checkpoint's tensors: once for each that is not yet
            written; once between checkpoints, for the next; none after the end of fitting.
        timeout_s: How long saving, and the end of fitting, wait for the thread; seconds.
        keep_previous: Whether a checkpoint that is overwritten stays next to the new one, as `<name>.previous.ckpt`:
            twice the space, and another one to resume from if the disk damages the newest. The recipes set it, for
            `resume=auto`; False is what `ddp` does.
        on_error: The effect of a write error, such as a full disk: `"raise"` ends the run; with `"warn"` it continues
            with the old checkpoint and tries again at the next save. With `in_background` the error shows at the next
            save or at the end of fitting.

    Raises:
        ValueError: `max_in_memory` or `timeout_s` is not above zero, or `on_error` is unknown.
    """

    def __init__(
        self,
        *,
        in_background: bool = False,
        max_in_memory: int = 2,
        # Our choice: a checkpoint of 100 GB takes a disk of 200 MB/s 500 s.
        timeout_s: float = 900.0,
        keep_previous: bool = False,
        on_error: Literal["raise", "warn"] = "raise",
    ) -> None:
        why = "the one that is being written is in memory. Write max_in_memory=1"
        max_in_memory = plain_value(max_in_memory)
        timeout_s = plain_value(timeout_s)
        require_whole("max_in_memory", max_in_memory, why, unit="checkpoints")
        require_positive(
            "timeout_s", timeout_s, "it is how long to wait for the disk, in seconds. 900 is usual"
        )
        why = "raise ends the run when a checkpoint is not written, warn lets it continue with the old one"
        require_choice("on_error", on_error, ("raise", "warn"), why)
        self.in_background = in_background
        self.timeout_s = timeout_s
        self.keep_previous = keep_previous
        self.on_error = on_error
        self._thread = WriterThread(max_in_memory)
        self._copies: list[HostCopies] = []
        self._is_inspected = False

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Save under `path`; with `in_background`, return once the tensors are copied.

        Raises:
            CheckpointWriteError: This one, or with `in_background` an earlier one, was not written.
        """
        if storage_options is not None or not _is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        if not self.in_background:
            try:
                self._write(checkpoint, Path(path))
            except CheckpointWriteError as error:
                self._raise(error)
            return
        self._raise_earlier_error()  # a thread cannot raise into training: the next call does it
        if not self._thread.wait_for_place(limit_s=self.timeout_s):
            raise self._too_slow()
        # Memory that no job reads, and taken out: no later save writes into what the thread still reads.
        copies = self._copies.pop() if self._copies else HostCopies()
        self._thread.put(partial(self._write_copy, copies, copies.take(checkpoint), Path(path)))

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a whole checkpoint, after all pending ones are written.

        Raises:
            FileNotFoundError, DamagedCheckpointError, RefusedCheckpointError: See `checkpoint.file.load_unchecked`.
        """
        if not _is_local(path):
            only = (
                weights_only is None or weights_only
            )  # Lightning builds all objects of a file behind http(s)
            return super().load_checkpoint(path, map_location, only)
        self._wait()
        if not Path(path).is_file():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        if not check_whole(Path(path)):
            rank_zero_info(
                f"{path} has no checksum: whether it is whole is not known beyond that it loads."
            )
        return load_unchecked(Path(path), map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, after all pending ones are written."""
        if not _is_local(path):
            super().remove_checkpoint(path)
        elif self._thread.num_jobs:
            # Lightning removes the old checkpoint right after it saves the new one. In the queue behind that write, and
            # only if it succeeded: else the old one is all there is. It holds no memory, so it needs no place.
            self._thread.put(partial(remove_checkpoint, Path(path)), needs_success=True)
        else:
            remove_checkpoint(Path(path))

    def teardown(self) -> None:
        """Wait for the thread, and free its memory.

        Raises:
            CheckpointWriteError: A checkpoint was not written; only a warning, while another error is being raised.
        """
        try:
            self._wait()
        finally:
            self._copies = []
        self._raise_earlier_error()

    # ---- writing ---------------------------------------------------------------------------------------------------

    def _write(self, checkpoint: dict[str, Any], path: Path) -> None:
        write_checkpoint(checkpoint, path, keep_previous=self.keep_previous)
        if not self._is_inspected:
            self._is_inspected = True
            _warn_of_objects(path)

    def _write_copy(self, copies: HostCopies, checkpoint: dict[str, Any], path: Path) -> None:
        try:
            copies.wait()
            self._write(checkpoint, path)
        finally:
            if (
                not self._copies
            ):  # one stays for the next checkpoint; a second was needed for two in a row
                self._copies.append(copies)

    def _wait(self) -> None:
        if not self._thread.wait(limit_s=self.timeout_s):
            self._raise(self._too_slow())

    def _too_slow(self) -> CheckpointWriteError:
        return CheckpointWriteError(
            f"`timeout_s` (={self.timeout_s:g}) is over and {self._thread.num_jobs} checkpoints are not yet written: "
            "the disk hangs, or is too slow for them. What was written before is whole. Save less often, give "
            "`timeout_s` more, or look after the disk."
        )

    # ---- errors ----------------------------------------------------------------------------------------------------

    def _raise_earlier_error(self) -> None:
        if (error := self._thread.take_error()) is not None:
            self._raise(error)

    def _raise(self, error: BaseException) -> None:
        # In `teardown` after a failed step: the error of the step must be the one that the user sees.
        would_hide_another = sys.exc_info()[1] not in (None, error)
        if isinstance(error, CheckpointWriteError) and (
            self.on_error == "warn" or would_hide_another
        ):
            rank_zero_warn(f"{error} The run goes on without a newer checkpoint.")
            return
        raise error


def _is_local(path: Any) -> bool:
    return bool(lightning_function("fabric.utilities.cloud_io._is_local_file_protocol")(path))


def _warn_of_objects(path: Path) -> None:
    # At the first write, and not only when the checkpoint is needed and refuses to load.
    if found := sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path))):
        rank_zero_warn(
            f"The checkpoint `{path}` holds objects (={', '.join(found)}) next to tensors and plain data: as with any "
            "strategy, fit(ckpt_path=...) and load_from_checkpoint will take it with weights_only=False only, or after "
            "torch.serialization.add_safe_globals with these classes. Or keep them out of hyper-parameters "
            "(`save_hyperparameters(ignore=...)`) and of `state_dict` of callbacks."
        )


def _user_io_or_durable(strategy: Any) -> Any:
    io = strategy._checkpoint_io
    if io is None:
        strategy._checkpoint_io = io = strategy._checkpoint_io_type()
    elif isinstance(io, lightning_types("pytorch.plugins.io.wrapper._WrappingCheckpointIO")):
        io.checkpoint_io = strategy._checkpoint_io_type()  # it keeps the first that it is given
    return io


# Of a strategy: the plugin of the user, or else one of its `_checkpoint_io_type`, which also goes into a wrapper.
durable_by_default = property(
    _user_io_or_durable, lambda strategy, io: setattr(strategy, "_checkpoint_io", io)
)
