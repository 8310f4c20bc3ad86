"""Short summaries of errors for failure reports, and advice for full shared memory."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from pathlib import Path

RULE = "-" * 80

# Line of a traceback. A traceback of another process may be part of an error's message.
_FRAME = re.compile(r'^ +File "([^"]+)", line \d+, in .+$', re.MULTILINE)
# The separator keeps the package apart from a folder of the user whose name begins like the package's.
_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"
_LIBRARIES = (sysconfig.get_path("stdlib"), _PACKAGE, "<")
_SHARED_MEMORY_IS_FULL = re.compile(
    r"(shared memory|/dev/shm|/torch_\d).*No space left|out of shared memory|signal(: | SIG)bus",
    re.IGNORECASE,
)


def summary_of(error: BaseException) -> str:
    """Summarize an error by its type, its first line and the last line of user code in its traceback.

    If the error was raised in a worker of a DataLoader, or in a rank that Lightning started by spawn or fork, the
    summary describes the original error.
    """
    message = str(error)
    text = "".join(traceback.format_exception(error))
    lines_of_user: list[str] = []
    for frame in _FRAME.finditer(text):
        path = frame[1]
        if not path.startswith(_LIBRARIES) and "-packages" not in path:
            lines_of_user.append(frame[0].strip())

    summary = f"{type(error).__name__}: {message}".partition("\n")[0]
    # A traceback in the message comes from another process. The error of that process follows the last frame.
    frames_in_message = list(_FRAME.finditer(message))
    if frames_in_message:
        below_last_frame = message[frames_in_message[-1].end() :]
        original_error = re.search(r"^\S.*", below_last_frame, re.MULTILINE)
        if original_error is not None:
            summary = original_error[0]
    if lines_of_user:
        summary += f"\n  {lines_of_user[-1]}"
    return summary


def shared_memory_cure(error: BaseException) -> str:
    """Return advice if an error is caused by full shared memory, otherwise an empty string."""
    if not _SHARED_MEMORY_IS_FULL.search(str(error)):
        return ""
    size = ""
    if os.path.isdir("/dev/shm"):
        file_system = os.statvfs("/dev/shm")
        size = f" (={file_system.f_frsize * file_system.f_blocks / 2**20:.0f} MiB)"
    return (
        f"`/dev/shm`{size} is full. It contains the batches from DataLoader workers, and NCCL's buffers. Give "
        "the container more shared memory (docker run --shm-size=8g or --ipc=host; in Kubernetes, an emptyDir with "
        "medium: Memory at /dev/shm), or lower `num_workers`, `prefetch_factor` or the batch size."
    )
