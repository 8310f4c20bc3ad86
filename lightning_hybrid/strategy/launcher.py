"""What users see of Lightning's launchers: in a notebook, and when a rank that they started dies."""

from __future__ import annotations

import sys
import threading
import time
from functools import partial
from typing import Any

from lightning_hybrid.checks import require_choice
from lightning_hybrid.lightning_names import lightning_types, misconfiguration

# How long the ranks of a node may take to report which rank is dead. Our choice: they need about 5 s over Gloo, 15 s
# over NCCL, and more where what they do meanwhile is none of communication.
GRACE_S = 30.0

_OBSERVER = "fabric.strategies.launchers.subprocess_script._ChildProcessObserver"


def start_method_from(setting: str) -> Any:
    """Return how the ranks of a node are started.

    Raises:
        ValueError: there is no such way.
    """
    why = "it is how the ranks of a node are started. Leave `strategy.start_method` out for 'popen'"
    require_choice("start_method", setting, ("popen", "spawn", "fork", "forkserver"), why)
    return setting


def refuse_notebook(name: str, start_method: str) -> None:
    """Check, before ranks are started by repeating the command, that this is no interactive session.

    Raises:
        MisconfigurationException: with the name for notebooks.
    """
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
    if start_method == "popen" and is_interactive:  # as Lightning, whose error would name a variant of DDP
        raise misconfiguration(
            f"`strategy` (={name!r}) must be started from a script: it repeats the command for each rank, and an "
            f"interactive session or a notebook has none. Write strategy='{name}_notebook' (in a strategy object "
            "start_method='fork'), which forks the ranks, or run your code as a script."
        )


def let_ranks_report() -> None:
    """Give ranks `GRACE_S` to end by an error of their own, before Lightning kills them because one has died.

    Lightning looks every 5 s, and would kill this process before, or while, it reports which rank is dead, and why.
    """
    for thread in threading.enumerate():
        if isinstance(thread, lightning_types(_OBSERVER)) and "_run" not in vars(thread):
            thread._run = partial(_look_again, thread._child_processes, thread._run)


def _look_again(processes: list[Any], look: Any) -> bool:
    if any(process.poll() for process in processes):
        time.sleep(GRACE_S)
    is_over: bool = look()
    return is_over
