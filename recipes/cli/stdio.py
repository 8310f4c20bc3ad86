"""Standard output and error that may end before the run does: `| head -1`, a terminal that is gone, a full disk."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, TextIO, cast


class BrokenPipeSafeStream:
    """Stream of text whose end does not end the run: what cannot be written is dropped, after one message.

    Args:
        stream: `sys.stdout` or `sys.stderr`.
        name: Name of the stream in the message.
        other: Stream for the message.
    """

    def __init__(self, stream: TextIO, *, name: str, other: Any) -> None:
        self._stream = stream
        self._name = name
        self._other = other

    def write(self, text: str) -> int:
        """Write as any stream. Never fail for want of a reader or of space."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._let_go(error)
            return len(text)

    def flush(self) -> None:
        """Flush as any stream."""
        try:
            self._stream.flush()
        except OSError as error:
            self._let_go(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _let_go(self, error: OSError) -> None:
        """Point the stream at nothing, so that neither later text nor the interpreter's last flush fails."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())
        os.close(nothing)
        if self._other is not None:
            consequence = "nothing is printed there from here on; the run goes on"
            print(
                f"{self._name} takes no more ({error.strerror}): {consequence}",
                file=self._other,
                flush=True,
            )


def outlive_streams() -> None:
    """Let this process outlive its standard output and error. One call is enough.

    Nor does Python's `logging` print a traceback for every line that a log file does not take: W&B would log those.
    """
    logging.raiseExceptions = False
    for name, words, other_stream in (
        ("stdout", "standard output", "stderr"),
        ("stderr", "standard error", None),
    ):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, BrokenPipeSafeStream):
            if other_stream:
                where = getattr(sys, other_stream)
            else:
                where = None
            setattr(sys, name, BrokenPipeSafeStream(cast(TextIO, stream), name=words, other=where))


def restore_streams() -> None:
    """Undo `outlive_streams`."""
    logging.raiseExceptions = True
    for name in ("stdout", "stderr"):
        if isinstance(stream := getattr(sys, name), BrokenPipeSafeStream):
            setattr(sys, name, stream._stream)
