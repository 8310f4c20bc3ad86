"""Checkpoint files with a checksum, which are whole or not there.

A file is what `torch.save` writes, a zip archive, with a comment at its end:

    archive                                        as torch wrote it, but for its last 2 bytes, the comment's length
    "lightning_hybrid crc32 <8 hex> of <16 hex>"   checksum and number of the bytes before

torch, stock Lightning and `unzip` read the file as any other. torch looks at no checksum: a flipped bit in a weight
loads without an error. CRC-32 finds every damage of up to 32 bits in a row, and misses one in 4 billion of larger ones.
It does not protect from intent: `weights_only` does. A kill leaves the old file or the new one under its name:

    write .NAME.part, fsync  ->  rename to NAME, fsync of the directory  ->  the one before is NAME.previous
"""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251  what `torch.load` raises
from typing import IO, Any, BinaryIO, cast

import torch

from lightning_hybrid.atomic_file import atomic_path, remove_quietly, sync, sync_directory
from lightning_hybrid.checks import first_line

_COMMENT = b"lightning_hybrid crc32 %08x of %016x"
_COMMENT_BYTES = len(_COMMENT % (0, 0))
_MAGIC = _COMMENT[: _COMMENT.index(b"%")]
# The end of an archive without a comment; its last two bytes are the length of the comment.
_ZIP_END = b"PK\x05\x06"
_ZIP_END_BYTES = 22
_BLOCK_BYTES = 1 << 22


class DamagedCheckpointError(ValueError):
    """A checkpoint file that differs from what was written."""


class RefusedCheckpointError(UnpicklingError, ValueError):
    """A checkpoint that holds more than tensors and plain data; an `UnpicklingError`, as torch raises."""


class CheckpointWriteError(OSError):
    """A checkpoint that could not be written; the file that was there before is still there."""


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_checkpoint(checkpoint: Any, path: Path, *, keep_previous: bool = True) -> None:
    """Save `checkpoint` under `path`, whole and durable, or leave everything as it was.

    Args:
        checkpoint: What `torch.save` takes.
        path: The file. Its folders are made.
        keep_previous: Whether a file that is already there stays under `previous_of(path)`, until the next time.

    Raises:
        CheckpointWriteError: The disk is full, the directory read-only, ...
    """
    # The old file has this second name until the new one is durable, so at no moment is there none.
    old = path.with_name(f".{path.name}.old")
    sink: _ChecksumFile | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as part:
            with part.open("wb", buffering=0) as file:
                sink = _ChecksumFile(file)
                torch.save(checkpoint, cast(IO[bytes], sink))
                sink.finish()
                sync(file)
            has_old = keep_previous and _link_old(path, old)
        sync_directory(path.parent)
        # The new file stands, also after a power failure: only now the previous one may go.
        if has_old:
            os.replace(old, previous_of(path))
            sync_directory(path.parent)
    except BaseException as error:
        remove_quietly(old)
        # torch's writer replaces an error of the file by an error of its own, which does not say "disk full".
        cause = error if isinstance(error, OSError) else None if sink is None else sink.error
        if cause is None:
            raise
        raise CheckpointWriteError(cause.errno, _write_error_text(path, cause)) from cause


def previous_of(path: Path) -> Path:
    """Return where `write_checkpoint` saves the file that it replaces.

    >>> previous_of(Path("a/last.ckpt"))
    PosixPath('a/last.previous.ckpt')
    """
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint and the previous one; or a directory, as other strategies write."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
        return
    for each in (path, previous_of(path)):
        each.unlink(missing_ok=True)


class _ChecksumFile:
    """A file that computes the checksum of what is written to it, and holds the last two bytes back for `finish`."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.crc32 = 0
        self.num_bytes = 0
        self.held = b""
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        # The last two bytes are the length of the archive's comment, which torch writes as 0. They are held back, as it
        # writes in pieces of any size and only `finish` knows which was last.
        if len(view) < 2:
            view = memoryview(self.held + view)
        else:
            self._put(memoryview(self.held))
        self._put(view[:-2])
        self.held = bytes(view[-2:])
        return len(data)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def finish(self) -> None:
        """Write the comment, and before it its length where torch has written 0."""
        assert self.held == b"\0\0", "torch.save did not end with an archive without a comment"
        self._put(memoryview(_COMMENT_BYTES.to_bytes(2, "little")))
        comment = _COMMENT % (self.crc32, self.num_bytes)
        self._put(memoryview(comment))

    def _put(self, view: memoryview) -> None:
        self.crc32 = zlib.crc32(view, self.crc32)
        self.num_bytes = self.num_bytes + len(view)
        try:
            while view:  # an unbuffered file may take a part of it
                view = view[self.file.write(view) :]
        except OSError as error:
            self.error = self.error or error
            raise


def _link_old(path: Path, old: Path) -> bool:
    """Give the file at `path`, if there is one, a second name, until it is certain that the new one stands."""
    if not path.is_file() or path.is_symlink():
        return False
    remove_quietly(old)
    try:
        os.link(path, old)
    except OSError:  # a file system without hard links: for a moment the file has its new name only
        os.replace(path, previous_of(path))
        return False
    return True


def _write_error_text(path: Path, cause: OSError) -> str:
    cures = {
        errno.ENOSPC: "the disk is full: free some of it, or write elsewhere",
        errno.EDQUOT: "your quota is used up: free some of it, or write elsewhere",
        errno.EFBIG: "files may not become that large here (`ulimit -f`)",
        errno.EROFS: "the disk is read-only: write elsewhere",
        errno.EACCES: "this user may not write there: write elsewhere, or change the permissions",
    }
    number = cause.errno or 0
    cure = cures.get(number, "write elsewhere")
    rest = (
        "the checkpoint that is there is the old one, whole"
        if path.exists()
        else "no file was left there"
    )
    return (
        f"`{path}` was not written ({cause.strerror}): {cure} (`dirpath` of ModelCheckpoint). "
        f"As to that name, {rest}."
    )


# ---- reading ---------------------------------------------------------------------------------------------------------


def load_unchecked(
    path: Path, *, map_location: Any = None, weights_only: bool | None = True, mmap: bool = False
) -> Any:
    """Load a checkpoint without comparing its checksum.

    Args:
        path: The file.
        map_location: As in `torch.load`.
        weights_only: False also builds objects that the file describes, which can run any code: for your own files.
            None: torch's default, which is True unless the environment says otherwise.
        mmap: As in `torch.load`; for reading a part of the file.

    Raises:
        DamagedCheckpointError: The file cannot be read.
        RefusedCheckpointError: The file holds more than tensors and plain data.
        FileNotFoundError: There is no such file.
    """
    try:
        return torch.load(
            path, map_location=map_location, weights_only=weights_only, mmap=mmap or None
        )
    except FileNotFoundError:
        raise
    except Exception as error:  # torch raises anything here: RuntimeError, UnpicklingError, EOFError, KeyError, OSError
        # torch raises UnpicklingError for a refused class as well as for damage: the list of classes in the file tells.
        found = (
            _objects_in(path)
            if isinstance(error, UnpicklingError) and weights_only is not False
            else []
        )
        if not found:
            raise DamagedCheckpointError(_damaged(path, first_line(error))) from error
        raise RefusedCheckpointError(
            f"`{path}` holds objects (={', '.join(found)}) next to tensors and plain data: to build them is to run "
            "code that the file names, so it was not loaded, and nothing of it was run. If you wrote the file "
            "yourself, give weights_only=False, or call torch.serialization.add_safe_globals with these classes before."
        ) from None


def check_whole(path: Path) -> bool:
    """Compare the checksum of the file with its content, and return whether it has a checksum.

    Raises:
        DamagedCheckpointError: The checksum differs, or the file is no checkpoint.
    """
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        raise DamagedCheckpointError(_damaged(path, "it is empty"))
    with path.open("rb") as file:
        comment = _end_of(file, num_bytes, _COMMENT_BYTES)
        # A file of stock Lightning has no checksum, and is accepted. One of ours that lost its end has none either, and
        # does not end as torch's archives do: refused.
        if not comment.startswith(_MAGIC):
            end = _end_of(file, num_bytes, _ZIP_END_BYTES)
            file.seek(0)
            if file.read(4) == b"PK\x03\x04" and not (
                end.startswith(_ZIP_END) and end.endswith(b"\0\0")
            ):
                raise DamagedCheckpointError(_damaged(path, "its end is missing or hurt"))
            return False
        crc32 = 0
        left = num_bytes - _COMMENT_BYTES
        file.seek(0)
        while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
            crc32 = zlib.crc32(block, crc32)
            left = left - len(block)
    if comment != _COMMENT % (crc32, num_bytes - _COMMENT_BYTES):
        raise DamagedCheckpointError(_damaged(path, "its checksum is not that of its content"))
    return True


def mark_of(path: Path) -> str:
    """Return name and checksum of a checkpoint, or name and size where it has no checksum. Reads its end only.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "some.ckpt"
    >>> write_checkpoint({}, path); mark_of(path).startswith("some.ckpt, crc32 ")
    True
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        comment = _end_of(file, num_bytes, _COMMENT_BYTES)
    if comment.startswith(_MAGIC):
        return f"{path.name}, crc32 {comment[len(_MAGIC) :][:8].decode(errors='replace')}"
    return f"{path.name}, {num_bytes} bytes"


def _end_of(file: BinaryIO, num_bytes: int, length: int) -> bytes:
    file.seek(max(0, num_bytes - length))
    return file.read(length)


def _damaged(path: Path, reason: str) -> str:
    return (
        f"`{path}` is not the checkpoint that was written: {reason}. Resume from another one, such as "
        f"{previous_of(path).name} where there is one; `lightning-hybrid train` finds the "
        "newest whole one with resume=auto."
    )


def _objects_in(path: Path) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except Exception:
        return []
