"""Where a thread stands now: in a collective of torch's, or in whose code; read from its stack, which costs it nothing.

So every wait for other ranks is known, Lightning's, torchmetrics' and the user's own too, and none has to be wrapped.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from types import FrameType

import torch
import torch.distributed as dist
from torch.autograd import graph
from torch.nn.parallel import distributed as ddp

_TORCH = os.path.dirname(torch.__file__)
_COLLECTIVES = os.path.dirname(dist.__file__)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]


def place_of(thread: int) -> tuple[str, bool]:
    """Return where a thread (by its `ident`) stands, in words, and whether that is a collective of torch's."""
    return _place_of(sys._current_frames().get(thread))


def place_of_error(error: BaseException) -> str:
    """Return where an error was raised, in the words of `place_of`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return _place_of(frames[-1] if frames else None)[0]


def _place_of(frame: FrameType | None) -> tuple[str, bool]:
    # DDP and we ourselves broadcast buffers by a function that is no Python: its caller is the last frame. So it is in
    # backward, which at its end waits for DDP's averages, unless a hook runs.
    files = (_COLLECTIVES, ddp.__file__, graph.__file__)
    is_inside = frame is not None and (
        frame.f_code.co_filename.startswith(files) or "broadcast" in frame.f_code.co_name
    )
    name = ""
    within = frame
    while within is not None and within.f_code.co_filename.startswith(_COLLECTIVES):
        name = (
            name if within.f_code.co_name == "wrapper" else within.f_code.co_name
        )  # torch's, around each collective
        within = within.f_back
    while (
        within is not None
        and within.f_back is not None
        and _is_of_others(within.f_code.co_filename)
    ):
        within = within.f_back
    if within is None:
        return "at an unknown place", False
    file = os.path.basename(within.f_code.co_filename)
    where = f"`{within.f_code.co_name}` ({file}:{within.f_lineno})"
    return (f"in `{name}`, called by {where}" if name else f"in {where}"), is_inside


def _is_of_others(file: str) -> bool:
    is_standard = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return is_standard or file.startswith((_TORCH, "<"))
