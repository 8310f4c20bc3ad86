"""Error of a rank in the file that torchrun reads, so that the box with which torchrun ends names rank and cause."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress

from lightning_hybrid.strategy.error_summary import RULE, summary_of

# Environment variable that torchrun sets for each rank: the file to write. Its format is that of
# `torch.distributed.elastic.multiprocessing.errors.record`, which users may put around their `main`.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

# Files that this process has written.
_written: set[str] = set()


def write_error_file(exception: BaseException) -> None:
    """Write the last words on an error, if torchrun started this rank and no file is there yet."""
    path = os.environ.get(ERROR_FILE)
    # An exit or an interruption is no failure that the user has to look for.
    if not path or os.path.exists(path) or not isinstance(exception, Exception):
        return
    content = {
        "message": {
            "message": f"{type(exception).__name__}: {exception}",
            "extraInfo": {
                "py_callstack": last_words(exception),
                "timestamp": str(int(time.time())),  # noqa: TID251  the format of torchrun
            },
        }
    }
    with suppress(OSError), open(path, "w") as file:
        json.dump(content, file)
        _written.add(path)


def remove_error_file() -> None:
    """Remove the file of an error that the user's code has caught, to fit again."""
    for path in _written:
        with suppress(OSError):
            os.unlink(path)
    _written.clear()


def last_words(exception: BaseException) -> str:
    """Return the lines below an error's traceback that name the rank and the cause."""
    for note in getattr(exception, "__notes__", ()):
        if note.startswith(RULE):
            return str(note).removeprefix(RULE).strip()
    return summary_of(exception)
