"""The last words of an error, below a traceback of a hundred lines: which rank, where in the user's code, what cure."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from pathlib import Path

RULE = "-" * 80

# As a traceback has it, also that of another process, which is text in the error's message.
_FRAME = re.compile(r'^ +File "([^"]+)", line \d+, in .+$', re.MULTILINE)
_LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]), "<")
_SHARED_MEMORY_IS_FULL = re.compile(
    r"(shared memory|/dev/shm|/torch_\d).*No space left|out of shared memory|signal(: | SIG)bus",
    re.IGNORECASE,
)


def summary_of(error: BaseException) -> str:
    """Return an error's type and first line, and below it the last line of the user's own code on the way to it.

    Of an error that a worker of a DataLoader has had, or a rank of Lightning's spawn or fork: those of that error.
    """
    said, text = str(error), "".join(traceback.format_exception(error))
    own = [
        each
        for each in _FRAME.finditer(text)
        if not each[1].startswith(_LIBRARIES) and "-packages" not in each[1]
    ]
    first = f"{type(error).__name__}: {said}".partition("\n")[0]
    if inner := list(_FRAME.finditer(said)):
        first = next(iter(re.findall(r"^\S.*", said[inner[-1].end() :], re.MULTILINE)), first)
    return first + (f"\n  {own[-1][0].strip()}" if own else "")


def shared_memory_cure(error: BaseException) -> str:
    """Return what to do where an error says that there is no shared memory left; else nothing."""
    if not _SHARED_MEMORY_IS_FULL.search(str(error)):
        return ""
    size = ""
    if os.path.isdir("/dev/shm"):
        found = os.statvfs("/dev/shm")
        size = f" (={found.f_frsize * found.f_blocks / 2**20:.0f} MiB)"
    return (
        f"`/dev/shm`{size} must hold the batches that workers of DataLoaders hand over (NCCL's buffers too), and it is "
        "full. Give the container more (docker run --shm-size=8g or --ipc=host, in Kubernetes an emptyDir with medium: "
        "Memory at /dev/shm), or lower `num_workers`, `prefetch_factor` or the batch size."
    )
