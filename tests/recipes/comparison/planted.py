"""Fits with a known accuracy, for processes that avoid heavy imports."""

import os
import signal
import time
from pathlib import Path

from recipes.comparison.fits import FitResult


def values_of(request):
    """Return the last value of each override."""
    values = {}
    for override in request.overrides:
        key, _, value = override.partition("=")
        values[key] = value
    return values


def planted(request):
    """Return an accuracy that falls with the learning rate's distance from 0.5, minus offsets of variant and seed.

    Each call appends a line to a file. If a file `kill_at` exists next to it, the call with the number in this file
    kills the study.
    """
    values = values_of(request)
    folder = Path(values["folder"])
    with open(folder / "calls", "a") as file:
        file.write(f"{Path(request.run_dir).parent.name}/{Path(request.run_dir).name}\n")
    kill_at = folder / "kill_at"
    if kill_at.exists() and len((folder / "calls").read_text().splitlines()) >= int(
        kill_at.read_text()
    ):
        kill_at.unlink()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)  # this process ends with the study
    if values.get("fault") == "error":
        raise ValueError("`optim.lr` (=-1) must be positive: it is a rate. Set optim.lr=0.1.")
    if values.get("fault") == "exit":
        os._exit(3)
    seed = int(values["seed"])
    distance = abs(float(values["optim.lr"]) - 0.5)
    accuracy = (
        0.9
        - 0.1 * distance
        - float(values["offset"])
        - 0.01 * (seed * 7 % 5)
        - 0.001 * (seed * 3 % 4)
    )
    return FitResult(accuracy=accuracy, num_steps=int(values["global_batch_size"]), core_s=1.0)
