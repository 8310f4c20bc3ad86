"""Resources of a process in training: memory, threads, open files, sockets, groups; and times of steps."""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed
from lightning.pytorch.callbacks import Callback

QUANTITIES = {
    "rss_bytes": "memory in RAM, shared pages counted whole",
    "pss_bytes": "the same, shared pages counted by the part that is this process's",
    "private_bytes": "memory of this process alone, in RAM or swapped, without unchanged pages of files",
    "num_threads": "of the process, as the kernel counts them",
    "num_fds": "open file descriptors",
    "num_sockets": "those of them that are sockets",
    "num_groups": "process groups of torch.distributed",
    "num_objects": "Python objects that the garbage collector tracks, after a collection",
    "step_s": "time of a step from batch to batch, median since the sample before",
    "cpu_s": "processor time of such a step, of all threads of the process, mean since the sample before",
}
"""Name of each sampled quantity, and what it is."""


def process_state() -> dict[str, float]:
    """Return what this process holds now; everything of `QUANTITIES` but times.

    Raises:
        ValueError: There is no `/proc` to read, as on systems that are not Linux.

    >>> sorted(set(QUANTITIES) - set(process_state()))
    ['cpu_s', 'step_s']
    >>> held = os.open(os.devnull, os.O_RDONLY)
    >>> more = process_state()["num_fds"]
    >>> os.close(held)
    >>> more - process_state()["num_fds"]
    1
    """
    me = Path("/proc/self")
    if not (me / "smaps_rollup").exists():
        raise ValueError(
            "`callbacks` (=endurance) needs /proc/self/smaps_rollup of Linux: memory and descriptors are read there. "
            "Leave `endurance` out of callbacks on this system."
        )
    gc.collect()
    memory = _fields(me / "smaps_rollup")
    links = [_link(entry) for entry in os.listdir(me / "fd")]
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return {
        "rss_bytes": memory["Rss"] * 1024,
        "pss_bytes": memory["Pss"] * 1024,
        "private_bytes": (memory["Private_Dirty"] + memory.get("SwapPss", 0)) * 1024,
        "num_threads": _fields(me / "status")["Threads"],
        "num_fds": len(links) - links.count(""),  # less the listing's own
        "num_sockets": sum(link.startswith("socket:") for link in links),
        "num_groups": len(torch.distributed.distributed_c10d._world.pg_map) if distributed else 0,
        "num_objects": len(gc.get_objects()),
    }


def _fields(path: Path) -> dict[str, int]:
    """Parse lines `name: number ...`."""
    pairs = (line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return {name: int(words[0]) for name, value in pairs if (words := value.split()) and words[0].isdigit()}


def _link(entry: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{entry}")
    except OSError:  # the descriptor of the listing itself, closed by now
        return ""


class ProcessWatch(Callback):
    """Callback that writes what each rank holds to `<directory>/rank-<r>.jsonl`, every `every_n_steps` steps.

    The garbage collector runs before each count, so what is counted is held, and not merely not yet collected.

    Args:
        directory: Where to write.
        every_n_steps: Steps from one sample to the next.

    Raises:
        ValueError: `every_n_steps` is not a whole number above zero.
    """

    def __init__(self, *, directory: str, every_n_steps: int) -> None:
        if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool) or every_n_steps < 1:
            raise ValueError(
                f"`every_n_steps` (={every_n_steps}) must be a whole number above zero: it is steps from one sample "
                "to the next. Set callbacks.endurance.every_n_steps=25."
            )
        self.directory, self.every_n_steps = Path(directory), every_n_steps
        self._times_s: list[tuple[float, float]] = []  # by the clock, of the processor
        self._began_s: tuple[float, float] | None = None
        self._last_step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start a new file."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._path(trainer).write_text("")
        self._last_step = trainer.global_step

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the step around a validation out of the times."""
        self._began_s = None

    on_train_epoch_end = on_validation_start

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Time the step; sample every `every_n_steps`."""
        if trainer.global_step == self._last_step:  # accumulating gradients
            return
        self._last_step = trainer.global_step
        if self._began_s is not None:
            began_s, began_cpu_s = self._began_s
            self._times_s.append((time.perf_counter() - began_s, time.process_time() - began_cpu_s))
        if trainer.global_step % self.every_n_steps == 0:
            sample: dict[str, float | None] = {"step": trainer.global_step, **process_state()}
            times_s, cpu_times_s = zip(*self._times_s, strict=True) if self._times_s else ((), ())
            sample["step_s"] = statistics.median(times_s) if times_s else None
            sample["cpu_s"] = statistics.mean(cpu_times_s) if cpu_times_s else None
            self._times_s = []
            with self._path(trainer).open("a") as file:
                file.write(json.dumps(sample) + "\n")
        self._began_s = (time.perf_counter(), time.process_time())

    def _path(self, trainer: pl.Trainer) -> Path:
        return self.directory / f"rank-{trainer.global_rank}.jsonl"
