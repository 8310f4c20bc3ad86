"""Output streams that ignore errors from a full disk or a closed pipe, as in `| head -1`."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, TextIO, cast


class BrokenPipeSafeStream:
    """Text stream that discards output once its pipe is closed or its disk is full.

    The first failed write prints one message to another stream. The run continues.

    Args:
        stream: `sys.stdout` or `sys.stderr`.
        name: Name of the stream in the message.
        other: Stream for the message. None prints no message.
    """

    def __init__(self, stream: TextIO, *, name: str, other: Any) -> None:
        self._stream = stream
        self._name = name
        self._other = other

    def write(self, text: str) -> int:
        """Write text, or discard it if the stream is closed or its disk is full."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._let_go(error)
            return len(text)

    def flush(self) -> None:
        """Flush the stream, ignoring the errors of a closed stream or a full disk."""
        try:
            self._stream.flush()
        except OSError as error:
            self._let_go(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _let_go(self, error: OSError) -> None:
        """Redirect the stream to the null device, so that later writes and flushes succeed.

        Print one message to the other stream, if there is one.
        """
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())
        os.close(nothing)
        if self._other is not None:
            consequence = "Further output is dropped, and the run continues."
            print(
                f"{self._name} cannot be written ({error.strerror}). {consequence}",
                file=self._other,
                flush=True,
            )


def outlive_streams() -> None:
    """Replace standard output and standard error with streams that survive a closed pipe or a full disk.

    A second call has no effect. Python's `logging` also stops printing a traceback for every line that cannot be
    written, because W&B would log these tracebacks.
    """
    logging.raiseExceptions = False
    for name, words, other_stream in (
        ("stdout", "Standard output", "stderr"),
        ("stderr", "Standard error", None),
    ):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, BrokenPipeSafeStream):
            if other_stream:
                where = getattr(sys, other_stream)
            else:
                where = None
            setattr(sys, name, BrokenPipeSafeStream(cast(TextIO, stream), name=words, other=where))


def restore_streams() -> None:
    """Restore the original standard output and standard error after `outlive_streams`."""
    logging.raiseExceptions = True
    for name in ("stdout", "stderr"):
        if isinstance(stream := getattr(sys, name), BrokenPipeSafeStream):
            setattr(sys, name, stream._stream)
