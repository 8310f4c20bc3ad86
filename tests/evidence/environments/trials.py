"""Whole programs in environments that cannot work, or only seem so, and what a user reads.

Each case is `python recipes/<program>.py` as a user starts it, a run of three steps where it trains. Either it ends in
an error without a traceback, which names what was wrong with the environment, before a limit of time. Or it goes on to
the end, with a message where something was lost.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from tests.evidence.environments.cases import Environment
from tests.evidence.faults.table import FaultOutcome

ROOT = Path(__file__).resolve().parents[3]
TRAIN = (
    "trainer.max_steps=3 trainer.max_epochs=1 trainer.limit_val_batches=1 trainer.limit_test_batches=1 "
    "model.width=0.0625 trainer.log_every_n_steps=1 trainer.enable_progress_bar=false "
    "trainer.enable_model_summary=false callbacks.best.monitor=null"
).split()
OURS = ("LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WANDB_MODE", "WANDB_API_KEY")
LINE = 150

SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static const long ahead_s = 31536000;
int clock_gettime(clockid_t clock, struct timespec *now) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += ahead_s;
  return code;
}
int gettimeofday(struct timeval *now, void *zone) {
  struct timespec found; clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec; now->tv_usec = found.tv_nsec / 1000; return 0;
}
time_t time(time_t *now) {
  struct timespec found; clock_gettime(CLOCK_REALTIME, &found);
  if (now) *now = found.tv_sec;
  return found.tv_sec;
}
"""


class FillDisk(Callback):
    """Callback that leaves no byte on the disk of `folder` before a step.

    Args:
        folder: Run directory.
        step: The first one that finds it full, counted from 0.
    """

    def __init__(self, folder: str, step: int) -> None:
        self.folder, self.step = Path(folder), step

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, i: int) -> None:
        """Fill the disk once."""
        if trainer.global_step == self.step and trainer.is_global_zero:
            with (self.folder / "ballast").open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    return


class ProgramExit:
    """End of the processes of a case: exit codes, None for one that had to be killed, and all output."""

    def __init__(self, codes: list[int | None], output: str, seconds: float) -> None:
        self.codes, self.output, self.seconds = codes, output, seconds


def environment_outcomes(folder: Path, cases: Sequence[Environment]) -> Iterator[FaultOutcome]:
    """Yield outcomes of all cases that this machine can do; print the names of the others."""
    for index, case in enumerate(cases):
        if missing := [tool for tool in case.needs if not _has(tool)]:
            print(f"left out: {case.fault}: this machine has no {', '.join(missing)}", flush=True)
            continue
        yield environment_outcome(case, run_programs(case, folder / f"{index}"))


def environment_outcome(case: Environment, ended: ProgramExit) -> FaultOutcome:
    """Judge whether the promise was held, by exit codes and output."""
    problems = [
        f"process {place} still ran after {case.limit_s:g} s" for place, c in enumerate(ended.codes) if c is None
    ]
    if case.goes_on:
        problems += [f"exit code {code}" for code in ended.codes if code not in (0, None)]
    elif all(code == 0 for code in ended.codes):
        problems.append("no process ended in an error")
    problems += [f"does not say {name!r}" for name in case.names if name not in ended.output]
    problems += ["a traceback"] if "Traceback (most recent" in ended.output else []
    lines = [line.strip() for line in ended.output.splitlines() if line.strip()]
    heard = [line for line in lines if any(name in line for name in case.names)] or ["nothing to say"]
    last = lines[-1] if lines else ""
    return FaultOutcome(
        promise="goes on" if case.goes_on else "ends in words",
        fault=case.fault,
        phase=case.phase,
        where=f"recipes/{case.program}.py",
        detected_by=(f"{'; '.join(problems)}: {last}" if problems else heard[0].removeprefix("error: "))[:LINE],
        seconds=None if case.goes_on else ended.seconds,
        lost=case.lost,
        is_held=not problems,
    )


def run_programs(case: Environment, folder: Path) -> ProgramExit:
    """Start the processes of a case, wait for all, kill the rest at the limit."""
    folder.mkdir(parents=True)
    run_dir = folder / case.run_dir
    if case.wrapper:
        run_dir.mkdir(parents=True)  # the wrapper may mount there
    with ExitStack() as stack:
        words = {"FREE": _free_port(), "TAKEN": _taken_port(stack), "SHIM": "", "RUN": str(run_dir), "ROOT": str(ROOT)}
        if any("SHIM" in str(value) for rank in case.ranks for value in rank.values()):
            words["SHIM"] = _shim(folder)
        begun_s = time.monotonic()
        own = TRAIN if case.program == "train" else []
        command = [sys.executable, f"recipes/{case.program}.py", *own, *case.overrides]
        command = [*case.wrapper, *(_filled(each, words) for each in command), f"hydra.run.dir='{run_dir}'"]
        logs = [stack.enter_context((folder / f"log{place}").open("wb+")) for place in range(len(case.ranks))]
        processes = list[subprocess.Popen[bytes]]()
        for rank, log in zip(case.ranks, logs, strict=True):
            environment = {name: value for name, value in os.environ.items() if name not in OURS}
            given = {"PYTHONPATH": str(ROOT), "RUN_DIR": str(run_dir), **case.variables, **rank}
            environment |= {name: _filled(value, words) for name, value in given.items() if value is not None}
            for name in (name for name, value in given.items() if value is None):
                environment.pop(name, None)
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
            processes.append(process)
        codes = [_wait(process, begun_s + case.limit_s) for process in processes]
        texts = [log.seek(0) or log.read().decode(errors="replace") for log in logs]
    text = "\n".join(map(str, texts)).replace(str(run_dir), "<run directory>").replace(f"{ROOT}/", "")
    return ProgramExit(codes, text, time.monotonic() - begun_s)


def _wait(process: subprocess.Popen[bytes], end_s: float) -> int | None:
    try:
        return process.wait(max(0.0, end_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def _filled(text: str, words: dict[str, str]) -> str:
    for name, value in words.items():
        text = text.replace(f"<{name}>", value)
    return text


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _taken_port(stack: ExitStack) -> str:
    taken = stack.enter_context(socket.socket())
    taken.bind(("", 0))
    taken.listen()
    return str(taken.getsockname()[1])


def _shim(folder: Path) -> str:
    """Build a library that puts a process's clock a year ahead."""
    (folder / "clock.c").write_text(SHIM)
    made = folder / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(made), str(folder / "clock.c"), "-ldl"], check=True)
    return str(made)


def _has(tool: str) -> bool:
    """Return whether this machine has a program, or allows namespaces."""
    if tool not in ("--mount", "--net"):
        return shutil.which(tool) is not None
    with tempfile.TemporaryDirectory() as folder:
        script = f"mount -t tmpfs none {folder}" if tool == "--mount" else "ip link set lo up"
        command = ["unshare", tool, "sh", "-c", script]
        return _has("unshare") and subprocess.run(command, capture_output=True, check=False).returncode == 0
