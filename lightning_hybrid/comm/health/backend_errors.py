"""Detection of communication errors that another rank may have caused.

Stores raise subclasses of `torch.distributed.DistError`, and NCCL raises `DistBackendError`. Gloo raises plain
`RuntimeError`s. Errors of any type become `RuntimeError`s if they pass through a callback or through autograd. These
errors are recognized by phrases that only torch uses. Words such as "timeout" or "socket" are not enough, because
errors of user code may contain them as well.
"""

from __future__ import annotations

import re

import torch.distributed as dist

from lightning_hybrid.comm.health.consensus import OrderError

_PHRASES = re.compile(
    "|".join(
        (
            # Gloo's messages begin with a line of its source code: [.../gloo/transport/tcp/pair.cc:547].
            r"\[[^\]\s]*\bgloo/[^\]\s]*\.(?:cc|h):\d+\]",
            r"Gloo connectFullMesh failed",
            r"Application timeout caused pair closure",
            r"\bmonitoredBarrier\b",
            # torch's waits with a timeout, for any backend.
            r"^Operation timed out!",
            # NCCL, and torch's watchdog for NCCL.
            r"\bNCCL (?:[Ee]rror|timeout|communicator|operation)\b",
            r"\bWorkNCCL\(",
            # If an error passes through a callback, its text still contains the name of its type.
            r"\bDist(?:Backend|Network|Store)Error: ",
        )
    )
)


def is_of_a_collective(error: BaseException) -> bool:
    """Return whether an error was raised by a torch collective or store rather than by user code.

    >>> is_of_a_collective(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
    True
    >>> is_of_a_collective(RuntimeError("socket timeout of my database"))
    False
    """
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _PHRASES.search(str(error)) is not None


def comes_from_others(error: BaseException) -> bool:
    """Return whether an error could have been caused by another rank.

    Such errors come from a collective, from a store, or from this package's comparison of buckets.
    """
    return isinstance(error, OrderError) or is_of_a_collective(error)


def failed_wait(error: BaseException | None) -> BaseException | None:
    """Return the first communication error in an error's chain of causes, or None.

    Communication errors are errors of a collective or a store, and this package's errors that all ranks raise.
    """
    while error is not None:
        if is_of_a_collective(error) or "comm: " in str(error):
            return error
        if error.__cause__ is not None:
            error = error.__cause__
        elif error.__suppress_context__:
            error = None
        else:
            error = error.__context__
    return None
