"""Description of the code that a thread is executing, such as a torch collective or user code.

The description is read from the thread's stack, at no cost for the thread. Every wait for other ranks is detected in
this way, including waits in Lightning, torchmetrics and user code, without wrapping their functions.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from types import CodeType, FrameType

import torch
import torch.distributed as dist
from torch.autograd import graph
from torch.nn.parallel import distributed as ddp

_TORCH = os.path.dirname(torch.__file__)
_COLLECTIVES = os.path.dirname(dist.__file__)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


def place_of(thread: int) -> tuple[str, bool]:
    """Describe a thread's current code location, and return whether the thread is in a collective.

    Args:
        thread: `ident` of the thread.
    """
    return _place_of(sys._current_frames().get(thread))


def place_of_error(error: BaseException) -> str:
    """Describe the code location at which an error was raised."""
    last_frame = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        last_frame = frame
    words, _ = _place_of(last_frame)
    return words


def _place_of(frame: FrameType | None) -> tuple[str, bool]:
    if frame is None:
        return "at an unknown location in the code", False
    is_inside = _is_in_collective(frame.f_code)

    # The name of the collective is that of the outermost frame in torch.distributed, except torch's decorator.
    name = ""
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.startswith(_COLLECTIVES):
        if caller.f_code.co_name != "wrapper":
            name = caller.f_code.co_name
        caller = caller.f_back
    # The caller to report is user code, or the outermost frame if there is no user code.
    while caller is not None and caller.f_back is not None and _is_library(caller.f_code):
        caller = caller.f_back
    if caller is None:
        return "at an unknown location in the code", False

    file_name = os.path.basename(caller.f_code.co_filename)
    location = f"`{caller.f_code.co_name}` ({file_name}:{caller.f_lineno})"
    if name:
        return f"in `{name}`, called by {location}", is_inside
    return f"in {location}", is_inside


def _is_in_collective(code: CodeType) -> bool:
    # DDP and this package broadcast buffers with a C++ function, so the last Python frame is its caller. The same holds
    # for backward, at the end of which DDP's averages are awaited.
    files = (_COLLECTIVES, ddp.__file__, graph.__file__)
    return code.co_filename.startswith(files) or "broadcast" in code.co_name


def _is_library(code: CodeType) -> bool:
    """Return whether code belongs to the standard library or torch, or has no source file."""
    file = code.co_filename
    if file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file:
        return True
    return file.startswith((_TORCH, "<"))
