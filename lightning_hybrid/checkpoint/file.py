"""Reading and atomic writing of checkpoint files with checksums.

Because writes are atomic, a file is either complete or absent. It consists of the zip archive that `torch.save` writes,
and a comment:

    archive                                        as torch wrote it, except the last 2 bytes: the comment's length
    "lightning_hybrid crc32 <8 hex> of <16 hex>"   checksum and number of the preceding bytes

torch, stock Lightning and `unzip` can read the file. torch does not verify checksums, so a flipped bit in a weight
would load without an error. CRC-32 detects any damage of up to 32 consecutive bits, and misses one in 4 billion larger
errors. It does not protect against malicious files, but `weights_only` does. Files are written in an order which
ensures that the name refers to either the old or the new file if the process is killed:

    write .NAME.part, fsync  ->  rename to NAME, fsync of the directory  ->  rename the old file to NAME.previous
"""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251  raised by `torch.load`
from typing import IO, Any, BinaryIO, cast

import torch

from lightning_hybrid.atomic_file import atomic_path, remove_quietly, sync, sync_directory
from lightning_hybrid.checks import first_line

_COMMENT = b"lightning_hybrid crc32 %08x of %016x"
_COMMENT_BYTES = len(_COMMENT % (0, 0))
_MAGIC = _COMMENT[: _COMMENT.index(b"%")]
_ZIP_BEGIN = b"PK\x03\x04"
# Signature and size of the record that ends an archive without a comment. Its last two bytes are the comment's length.
_ZIP_END = b"PK\x05\x06"
_ZIP_END_BYTES = 22
_BLOCK_BYTES = 1 << 22


class DamagedCheckpointError(ValueError):
    """Error raised when a checkpoint file is damaged or cannot be read."""


class RefusedCheckpointError(UnpicklingError, ValueError):
    """Error raised when a checkpoint contains objects other than tensors and plain data.

    The class derives from `UnpicklingError`, which torch raises in this case.
    """


class CheckpointWriteError(OSError):
    """Error raised when a checkpoint cannot be written.

    An existing checkpoint file is kept.
    """


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_checkpoint(checkpoint: Any, path: Path, *, keep_previous: bool = True) -> None:
    """Write a checkpoint file atomically and sync it to disk, leaving existing files intact on failure.

    Args:
        checkpoint: Object to save, as in `torch.save`.
        path: File to write. Missing folders are created.
        keep_previous: Whether an existing file is kept under `previous_of(path)` until the next call.

    Raises:
        CheckpointWriteError: The file cannot be written, for example because the disk is full.
    """
    # Until the new file is on disk, the old file also has this second name. At any moment, one of the two files exists.
    old = path.with_name(f".{path.name}.old")
    sink: _ChecksumFile | None = None
    is_moved = False  # Whether the old file was renamed, because the file system has no hard links.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as part:
            with part.open("wb", buffering=0) as file:
                sink = _ChecksumFile(file)
                torch.save(checkpoint, cast(IO[bytes], sink))
                sink.finish()
                sync(file)
            has_old = keep_previous and path.is_file() and not path.is_symlink()
            has_link = has_old and _link(path, old)
            if has_old and not has_link:
                os.replace(path, previous_of(path))
                is_moved = True
        sync_directory(path.parent)
        # The new file now survives a power failure, so the previous one may be replaced.
        if has_link:
            os.replace(old, previous_of(path))
            sync_directory(path.parent)
    except BaseException as error:
        remove_quietly(old)
        if is_moved and not path.exists():
            os.replace(previous_of(path), path)
        cause = _cause_of_failed_write(error, sink)
        if cause is None:
            raise
        raise CheckpointWriteError(cause.errno, _write_error_text(path, cause)) from cause


def _cause_of_failed_write(error: BaseException, sink: _ChecksumFile | None) -> OSError | None:
    # torch's writer replaces the error of the file by its own error, which does not say "disk full".
    if isinstance(error, OSError):
        return error
    if sink is not None:
        return sink.error
    return None


def previous_of(path: Path) -> Path:
    """Return the path under which `write_checkpoint` keeps the file that it replaces.

    >>> previous_of(Path("a/last.ckpt"))
    PosixPath('a/last.previous.ckpt')
    """
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint file and its previous version, or a checkpoint directory.

    Checkpoint directories are written by other strategies.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
        return
    path.unlink(missing_ok=True)
    previous_of(path).unlink(missing_ok=True)


class _ChecksumFile:
    """Wrapper of a writable file that computes a CRC-32 checksum and appends it as a zip comment.

    The last two bytes, which are the length of the comment, are withheld until `finish` is called.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.crc32 = 0
        self.num_bytes = 0
        self.withheld = b""
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        # The last two bytes are the length of the archive's comment, which torch writes as 0. They are withheld until
        # `finish`, because torch writes pieces of any size, and this method does not know which piece is the last.
        if len(view) < 2:
            view = memoryview(self.withheld + view)
        else:
            self._put(memoryview(self.withheld))
        self._put(view[:-2])
        self.withheld = bytes(view[-2:])
        return len(data)

    def flush(self) -> None:
        """Do nothing, because the file is not buffered."""

    def finish(self) -> None:
        """Write the length of the zip comment, and the comment with the checksum."""
        assert self.withheld == b"\0\0", "torch.save did not end with an archive without a comment"
        self._put(memoryview(_COMMENT_BYTES.to_bytes(2, "little")))
        comment = _COMMENT % (self.crc32, self.num_bytes)
        self._put(memoryview(comment))

    def _put(self, view: memoryview) -> None:
        self.crc32 = zlib.crc32(view, self.crc32)
        self.num_bytes = self.num_bytes + len(view)
        try:
            while view:  # An unbuffered file may write less than requested.
                num_written = self.file.write(view)
                view = view[num_written:]
        except OSError as error:
            if self.error is None:
                self.error = error
            raise


def _link(path: Path, link: Path) -> bool:
    """Create a hard link to a file, and return False if the file system does not support hard links."""
    remove_quietly(link)
    try:
        os.link(path, link)
    except OSError:
        return False
    return True


def _write_error_text(path: Path, cause: OSError) -> str:
    remedies = {
        errno.ENOSPC: "the disk is full. Free some space, or set another directory",
        errno.EDQUOT: "your disk quota is exhausted. Free some space, or set another directory",
        errno.EFBIG: "the file exceeds the size limit (`ulimit -f`). Raise the limit, or set another directory",
        errno.EROFS: "the disk is read-only. Set another directory",
        errno.EACCES: "this user cannot write to the directory. Change its permissions, or set another directory",
    }
    remedy = "set another directory"
    if cause.errno is not None:
        remedy = remedies.get(cause.errno, remedy)
    remaining = "No incomplete file was left"
    if path.exists():
        remaining = "The previous checkpoint at this path is undamaged"
    reason = cause.strerror or cause
    return f"`{path}` was not written ({reason}): {remedy} (`dirpath` of ModelCheckpoint). {remaining}."


# ---- reading ---------------------------------------------------------------------------------------------------------


def load_unchecked(
    path: Path, *, map_location: Any = None, weights_only: bool | None = True, mmap: bool = False
) -> Any:
    """Load a checkpoint without verifying its checksum.

    Args:
        path: File to load.
        map_location: As in `torch.load`.
        weights_only: Whether to reject objects other than tensors and plain data. Set it to False only for files that
            you trust, because creating other objects can run arbitrary code. None selects torch's default, which is
            True unless the environment overrides it.
        mmap: As in `torch.load`, to read only parts of the file.

    Raises:
        DamagedCheckpointError: The file cannot be read.
        RefusedCheckpointError: The file contains objects other than tensors and plain data.
        FileNotFoundError: There is no such file.
        Exception: torch's own error, if the file is undamaged. For example, the code no longer has a class of an object
            in the file, or `map_location` is a device that this machine lacks.
    """
    try:
        return torch.load(
            path, map_location=map_location, weights_only=weights_only, mmap=mmap or None
        )
    except FileNotFoundError:
        raise
    except Exception as error:  # RuntimeError, UnpicklingError, EOFError, KeyError, OSError or others, raised by torch
        # torch raises UnpicklingError both for rejected classes and for damage. The classes in the file show which.
        refused_classes = []
        if isinstance(error, UnpicklingError) and weights_only is not False:
            refused_classes = _objects_in(path)
        if not refused_classes:
            lacks_code = isinstance(error, ImportError | AttributeError) and weights_only is False
            if lacks_code or _is_verified(path):
                raise
            reason = first_line(error)
            if isinstance(error, UnpicklingError):
                # torch's advice to use weights_only=False would not help, and is dangerous.
                reason = "it is not a file written by `torch.save`"
            raise DamagedCheckpointError(_damaged(path, reason)) from error
        raise RefusedCheckpointError(
            f"`{path}` contains objects other than tensors and plain data ({', '.join(refused_classes)}). Loading "
            "such objects can run arbitrary code, so the file was not loaded. If you trust the file, set "
            "weights_only=False, or call torch.serialization.add_safe_globals with these classes first."
        ) from None


def check_whole(path: Path) -> bool:
    """Verify the checksum of a checkpoint file, and return whether the file has a checksum.

    Raises:
        DamagedCheckpointError: The checksum is wrong, or the file is not a checkpoint.
    """
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        raise DamagedCheckpointError(_damaged(path, "it is empty"))
    with path.open("rb") as file:
        comment = _end_of(file, num_bytes, _COMMENT_BYTES)
        if not comment.startswith(_MAGIC):
            # Files written by stock Lightning have no checksum and are accepted. A truncated file of this package has
            # no checksum either, but it does not have the end of a zip archive.
            if _is_archive(file) and not _has_archive_end(file, num_bytes):
                raise DamagedCheckpointError(
                    _damaged(path, "the end of the file is missing or corrupt")
                )
            return False
        crc32 = _crc32_of(file, num_bytes - _COMMENT_BYTES)
    if comment != _COMMENT % (crc32, num_bytes - _COMMENT_BYTES):
        raise DamagedCheckpointError(_damaged(path, "its checksum does not match its content"))
    return True


def _is_verified(path: Path) -> bool:
    """Return whether a file has a checksum that matches its content."""
    try:
        return check_whole(path)
    except (DamagedCheckpointError, OSError):
        return False


def _is_archive(file: BinaryIO) -> bool:
    file.seek(0)
    return file.read(len(_ZIP_BEGIN)) == _ZIP_BEGIN


def _has_archive_end(file: BinaryIO, num_bytes: int) -> bool:
    end = _end_of(file, num_bytes, _ZIP_END_BYTES)
    return end.startswith(_ZIP_END) and end.endswith(b"\0\0")


def _crc32_of(file: BinaryIO, num_bytes: int) -> int:
    """Return the CRC-32 checksum of the first `num_bytes` bytes of a file."""
    crc32 = 0
    remaining = num_bytes
    file.seek(0)
    while remaining > 0 and (block := file.read(min(remaining, _BLOCK_BYTES))):
        crc32 = zlib.crc32(block, crc32)
        remaining -= len(block)
    return crc32


def mark_of(path: Path) -> str:
    """Return the name and checksum of a checkpoint file, as a short text that identifies the file.

    If the file has no checksum, the text contains the size instead. Only the end of the file is read.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "some.ckpt"
    >>> write_checkpoint({}, path); mark_of(path).startswith("some.ckpt, crc32 ")
    True
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        comment = _end_of(file, num_bytes, _COMMENT_BYTES)
    if comment.startswith(_MAGIC):
        digits = comment[len(_MAGIC) :][:8].decode(errors="replace")
        return f"{path.name}, crc32 {digits}"
    return f"{path.name}, {num_bytes} bytes"


def _end_of(file: BinaryIO, num_bytes: int, length: int) -> bytes:
    file.seek(max(0, num_bytes - length))
    return file.read(length)


def not_found(path: Path) -> str:
    """Return an error message for a missing checkpoint, with the newest checkpoints in the folder."""
    folder = path.parent
    problem = f"Checkpoint file not found: {path}."
    if path.is_dir():
        folder = path
        problem = f"Checkpoint file not found: {path} is a folder, not a file."
    if not folder.is_dir():
        return (
            f"{problem} The folder {folder} does not exist either. Set the path of a checkpoint that a run has "
            "written."
        )
    checkpoints = sorted(folder.glob("*.ckpt"), key=os.path.getmtime, reverse=True)
    if not checkpoints:
        return (
            f"{problem} The folder {folder} contains no checkpoint. Set the path of a checkpoint that a run has "
            "written."
        )
    names = ", ".join(checkpoint.name for checkpoint in checkpoints[:3])
    return f"{problem} The newest checkpoints in {folder} are {names}. Set the path of one of them."


def _damaged(path: Path, reason: str) -> str:
    return (
        f"`{path}` is damaged: {reason}. Resume from another checkpoint, such as {previous_of(path).name} if it "
        "exists. `lightning-hybrid train` finds the newest undamaged one with resume=auto."
    )


def _objects_in(path: Path) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except Exception:
        return []
