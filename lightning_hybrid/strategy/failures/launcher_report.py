"""Per-rank error files, from which torchrun's final report takes the failed rank and the cause."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress

from lightning_hybrid.strategy.failures.error_summary import RULE, summary_of

# Environment variable that torchrun sets for each rank to the path of the error file. The file has the format of
# `torch.distributed.elastic.multiprocessing.errors.record`, a decorator that users may put around their `main`.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

# Paths of the files that this process has written.
_written: set[str] = set()


def write_error_file(exception: BaseException) -> None:
    """Write an error to torchrun's error file, unless there is already one or torchrun is not in use."""
    path = os.environ.get(ERROR_FILE)
    # An exit or an interruption is not a failure that the user has to investigate.
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
    """Remove the error files that this process wrote for errors that user code has caught since then."""
    for path in _written:
        with suppress(OSError):
            os.unlink(path)
    _written.clear()


def last_words(exception: BaseException) -> str:
    """Return the failure summary that is printed below the traceback.

    It is the note that names the failed rank and the cause, or else a summary of the error.
    """
    for note in getattr(exception, "__notes__", ()):
        if note.startswith(RULE):
            return str(note).removeprefix(RULE).strip()
    return summary_of(exception)
