"""Checkpoint files that are whole or not there, and that can tell.

A file is what `torch.save` writes, a zip archive, with a comment at its end:

    archive                                        as torch wrote it, but for its last 2 bytes, the comment's length
    "lightning_hybrid crc32 <8 hex> of <16 hex>"   checksum and number of the bytes before

A zip archive may have a comment, so torch, stock Lightning and `unzip` read the file as any other. torch looks at no
checksum: a flipped bit in a weight loads without a word. CRC-32 finds every damage of up to 32 bits in a row, and
misses one in 4 billion of larger ones; it is no seal against anybody's intent. Against that stands `weights_only`.

A kill at any moment leaves the old file or the new one under its name:

    write .NAME.part, fsync  ->  rename to NAME, fsync of the directory  ->  the one before is NAME.previous
"""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any, BinaryIO, cast

import torch

_COMMENT = b"lightning_hybrid crc32 %08x of %016x"
_COMMENT_BYTES = len(_COMMENT % (0, 0))
_MAGIC = _COMMENT[: _COMMENT.index(b"%")]
_ZIP_END, _ZIP_END_BYTES = (
    b"PK\x05\x06",
    22,
)  # of an archive without a comment; its last two bytes are the length of one
_BLOCK_BYTES = 1 << 22


class DamagedCheckpointError(ValueError):
    """A checkpoint that is not as it was written."""


class RefusedCheckpointError(ValueError):
    """A checkpoint with more in it than tensors and plain data."""


class CheckpointWriteError(OSError):
    """A checkpoint that could not be written; what was there before is still there."""


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_checkpoint(checkpoint: Any, path: Path, *, keep_previous: bool = True) -> None:
    """Save `checkpoint` under `path`, whole and durable, or leave everything as it was.

    Args:
        checkpoint: For `torch.save`.
        path: Of the file. Directories are made.
        keep_previous: Whether a file that is already there lives on under `previous_of(path)`, until the next time.

    Raises:
        CheckpointWriteError: The disk is full, the directory read-only, ...

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "some.ckpt"
    >>> write_checkpoint({"step": 1}, path); write_checkpoint({"step": 2}, path)
    >>> torch.load(path), read_checkpoint(previous_of(path)), has_checksum(path)
    ({'step': 2}, {'step': 1}, True)
    """
    part, old = (path.with_name(f".{path.name}.{state}") for state in ("part", "old"))
    sink: _Summed | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb", buffering=0) as file:
            sink = _Summed(file)
            torch.save(checkpoint, cast(IO[bytes], sink))
            sink.finish()
            os.fsync(file.fileno())
        is_kept = keep_previous and _link_beside(path, old)
        os.replace(part, path)
        sync_directory(path.parent)
        if is_kept:
            os.replace(old, previous_of(path))
            sync_directory(path.parent)
    except BaseException as error:
        for left in (part, old):
            _unlink_quietly(left)
        # torch's writer turns an error of the file into one of its own
        cause = error if isinstance(error, OSError) else None if sink is None else sink.error
        if cause is None:
            raise
        raise CheckpointWriteError(cause.errno, _words(path, cause)) from cause


def previous_of(path: Path) -> Path:
    """Where the file that `path` took the place of is kept.

    >>> previous_of(Path("a/last.ckpt"))
    PosixPath('a/last.previous.ckpt')
    """
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def remove_checkpoint(path: Path) -> None:
    """Take away a checkpoint and the one before it; a directory too, as other strategies write."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
        return
    for each in (path, previous_of(path)):
        each.unlink(missing_ok=True)


def sync_directory(folder: Path) -> None:
    """Make renames in `folder` durable. Where directories cannot be opened, as on Windows, there is nothing to do."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except (PermissionError, IsADirectoryError):
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Summed:
    """A file that adds up a checksum of what goes through, and holds the last two bytes back for `finish`."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.crc32, self.num_bytes, self.held = file, 0, 0, b""
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) < 2:
            view = memoryview(self.held + view)
        else:
            self._put(memoryview(self.held))
        self._put(view[:-2])
        self.held = bytes(view[-2:])
        return len(data)

    def flush(self) -> None:
        """Nothing waits here."""

    def finish(self) -> None:
        """Write the comment, and before it its length where torch has written 0."""
        assert self.held == b"\0\0", "torch.save did not end with an archive without a comment"
        self._put(memoryview(_COMMENT_BYTES.to_bytes(2, "little")))
        comment = _COMMENT % (self.crc32, self.num_bytes)
        self._put(memoryview(comment))

    def _put(self, view: memoryview) -> None:
        self.crc32, self.num_bytes = zlib.crc32(view, self.crc32), self.num_bytes + len(view)
        try:
            while view:  # an unbuffered file may take a part of it
                view = view[self.file.write(view) :]
        except OSError as error:
            self.error = self.error or error
            raise


def _link_beside(path: Path, old: Path) -> bool:
    """Give the file at `path`, if there is one, a second name, until it is clear that the new one stands."""
    if not path.is_file() or path.is_symlink():
        return False
    _unlink_quietly(old)
    try:
        os.link(path, old)
    except OSError:  # a file system without hard links: for a moment the file has its new name only
        os.replace(path, previous_of(path))
        return False
    return True


def _unlink_quietly(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _words(path: Path, cause: OSError) -> str:
    cures = {
        errno.ENOSPC: "the disk is full: free some of it, or write elsewhere",
        errno.EDQUOT: "your quota is used up: free some of it, or write elsewhere",
        errno.EFBIG: "files may not become that large here (`ulimit -f`)",
        errno.EROFS: "the disk is read-only: write elsewhere",
        errno.EACCES: "this user may not write there: write elsewhere, or change the permissions",
    }
    number = cause.errno or 0
    cure = cures.get(number, "write elsewhere")
    kept = "the checkpoint that is there is the old one, whole" if path.exists() else "no file was left there"
    return (
        f"`{path}` was not written ({cause.strerror}): {cure} (`dirpath` of ModelCheckpoint). As to that name, {kept}."
    )


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_checkpoint(path: Path, *, map_location: Any = None, weights_only: bool = True, mmap: bool = False) -> Any:
    """What was saved under `path`, if it is whole.

    Args:
        path: Of the file.
        map_location: As in `torch.load`.
        weights_only: False also builds objects that the file describes, which can run anything: for files of yours.
        mmap: As in `torch.load`; for looking at a part of it.

    Raises:
        DamagedCheckpointError: The checksum is another, or the file cannot be read. A file without a checksum is not
            compared with one: stock Lightning wrote it, or an earlier version.
        RefusedCheckpointError: It holds more than tensors and plain data, and `weights_only`.
        FileNotFoundError: There is none.
    """
    check_whole(path)
    return load_unchecked(path, map_location=map_location, weights_only=weights_only, mmap=mmap)


def load_unchecked(path: Path, *, map_location: Any = None, weights_only: bool = True, mmap: bool = False) -> Any:
    """As `read_checkpoint`, without comparing the checksum: for a look at a part, with `mmap`."""
    try:
        return torch.load(path, map_location=map_location, weights_only=weights_only, mmap=mmap or None)
    except FileNotFoundError:
        raise
    except Exception as error:  # torch raises anything here: RuntimeError, UnpicklingError, EOFError, KeyError, OSError
        found = _objects_in(path) if weights_only and isinstance(error, UnpicklingError) else []
        if not found:
            raise DamagedCheckpointError(_damaged(path, _first_line(error))) from error
        raise RefusedCheckpointError(
            f"`{path}` holds objects (={', '.join(found)}) beside tensors and plain data: to build them is to run code "
            "that the file names, so it was not loaded, and nothing of it was run. Take another file; if you wrote "
            "this one yourself, keep such objects out of `state_dict` and hyper-parameters, or give weights_only=False."
        ) from None


def check_whole(path: Path) -> bool:
    """Compare the file's checksum; whether it has one.

    Raises:
        DamagedCheckpointError: It is another, or there is nothing of a checkpoint in the file.
    """
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        raise DamagedCheckpointError(_damaged(path, "it is empty"))
    with path.open("rb") as file:
        comment = _end_of(file, num_bytes, _COMMENT_BYTES)
        if not comment.startswith(_MAGIC):
            _refuse_torn(path, file, num_bytes)
            return False
        crc32, left = 0, num_bytes - _COMMENT_BYTES
        file.seek(0)
        while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
            crc32, left = zlib.crc32(block, crc32), left - len(block)
    if comment != _COMMENT % (crc32, num_bytes - _COMMENT_BYTES):
        raise DamagedCheckpointError(_damaged(path, "its checksum is not that of its content"))
    return True


def has_checksum(path: Path) -> bool:
    """Whether the file is one of ours; its content is not looked at."""
    with path.open("rb") as file:
        return _end_of(file, path.stat().st_size, _COMMENT_BYTES).startswith(_MAGIC)


def mark_of(path: Path) -> str:
    """What tells a checkpoint from another, of which only the end is read: its checksum, or else its size.

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


def _refuse_torn(path: Path, file: BinaryIO, num_bytes: int) -> None:
    """Without our comment an archive must end as torch's do: else a part is missing, or the comment is hurt."""
    file.seek(0)
    is_zip = file.read(4) == b"PK\x03\x04"
    end = _end_of(file, num_bytes, _ZIP_END_BYTES)
    if is_zip and not (end.startswith(_ZIP_END) and end.endswith(b"\0\0")):
        raise DamagedCheckpointError(_damaged(path, "its end is missing or hurt"))


def _end_of(file: BinaryIO, num_bytes: int, length: int) -> bytes:
    file.seek(max(0, num_bytes - length))
    return file.read(length)


def _damaged(path: Path, reason: str) -> str:
    return (
        f"`{path}` is not the checkpoint that was written: {reason}. Resume from another one, such as "
        f"{previous_of(path).name} where there is one; recipes/train.py finds the newest whole one with resume=auto."
    )


def _objects_in(path: Path) -> list[str]:
    look: Callable[[str], list[str]] = torch.serialization.get_unsafe_globals_in_checkpoint
    try:
        return sorted(look(str(path)))
    except Exception:
        return []


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
