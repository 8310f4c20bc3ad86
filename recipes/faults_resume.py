"""Kill a run anywhere, start it again with the same command, and compare what comes out: `python recipes/faults_resume.py`.

Each trial is a run of the digits recipe on two ranks, in a directory of its own, with `resume=auto`; it is killed at a
random point (phase, rank, step, signal), or its checkpoints are damaged, and then it is run again. The promise is held
if the second run ends as one that nobody disturbed: weights, averages, optimizer state, schedule, loss scale, place in
the data and every row of metrics that does not come from a clock, to the bit.

The ranks are forked from a process that has imported everything: a trial costs seconds, most of them training.
"""

from __future__ import annotations

import os
import random
import re
import runpy
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from hydra.utils import instantiate  # noqa: F401  imported before forking
from lightning.pytorch.utilities import rank_zero_only

from lightning_hybrid.checkpoint_file import read_checkpoint
from lightning_hybrid.metrics import metric_of
from recipes import train  # noqa: F401  imported before forking
from recipes.fault_points import OF_A_CHECKPOINT, OF_A_CHECKPOINT_RENAMED, PHASES
from recipes.fault_table import Outcome
from recipes.resume import newest_whole
from recipes.rows import read_rows

NUM_STEPS, SAVED_EVERY = 12, 2
BASE = (
    "logger=csv callbacks=[default,ema] ~callbacks.report trainer.max_epochs=2 trainer.limit_train_batches=6 "
    "trainer.limit_val_batches=1 trainer.limit_test_batches=1 trainer.log_every_n_steps=1 model.width=0.0625 "
    f"trainer.enable_progress_bar=false trainer.enable_model_summary=false callbacks.last.every_n_train_steps={SAVED_EVERY} "
    "callbacks.ema.decay=0.9 strategy.loss_scale=dynamic resume=auto"
).split()
SAME = ("state_dict", "optimizer_states", "lr_schedulers", "MasterWeightPrecision", "global_step", "epoch")


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How two ranks ended: exit codes (negative: by a signal), when the first was gone, and when the last."""

    codes: tuple[int, ...]
    last_s: float
    was_helped: bool
    told: str


def run_ranks(overrides: list[str], run_dir: Path, *, num_ranks: int = 2, limit_s: float = 60.0) -> Ended:
    """Run `recipes/train.py` on forked ranks. Those that are left after another has died get `limit_s` to notice."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group, codes, first_s, was_helped = 0, dict[int, int](), None, False
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, num_ranks, port, overrides, run_dir)
        group = group or pid
        os.setpgid(pid, group)
        codes[pid] = -1000
    left = set(codes)
    while left:
        pid, status = os.waitpid(-group, os.WNOHANG)
        if pid:
            left.discard(pid)
            codes[pid] = os.waitstatus_to_exitcode(status)
            first_s = first_s or time.time()
        elif first_s is not None and time.time() - first_s > limit_s and not was_helped:
            was_helped = True
            os.killpg(group, signal.SIGKILL)
        else:
            time.sleep(0.02)
    told = "\n".join((run_dir / f"rank{rank}.log").read_text(errors="replace") for rank in range(num_ranks))
    return Ended(codes=tuple(codes.values()), last_s=time.time(), was_helped=was_helped, told=told)


def _be_rank(rank: int, num_ranks: int, port: int, overrides: list[str], run_dir: Path) -> None:
    code = 1
    try:
        with (run_dir / f"rank{rank}.log").open("wb", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        told = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in told.items()} | {"MASTER_ADDR": "127.0.0.1"})
        rank_zero_only.rank = rank
        os.chdir(ROOT)
        sys.argv = ["recipes/train.py", *overrides, f"hydra.run.dir='{run_dir}'"]
        runpy.run_path("recipes/train.py", run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# ---- comparison ------------------------------------------------------------------------------------------------------


def differs(a: Any, b: Any, where: str = "") -> str | None:
    """The first place at which two nested values are not the same to the bit; None if there is none."""
    if isinstance(a, torch.Tensor):
        return None if isinstance(b, torch.Tensor) and a.dtype is b.dtype and torch.equal(a, b) else where
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{where}: keys"
        return next((found for key in a if (found := differs(a[key], b[key], f"{where}/{key}"))), None)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return f"{where}: length"
        pairs = enumerate(zip(a, b, strict=True))
        return next((found for i, (x, y) in pairs if (found := differs(x, y, f"{where}/{i}"))), None)
    return None if type(a) is type(b) and a == b else where


def state_of(run_dir: Path, name: str = "last") -> dict[str, Any]:
    """What a run ends with, of what is promised."""
    checkpoint = read_checkpoint(run_dir / "checkpoints" / f"{name}.ckpt")
    state = {part: checkpoint[part] for part in SAME}
    state["averaged"] = checkpoint.get("current_model_state"), checkpoint.get("averaging_state")
    state["data"] = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader")
    return state


def rows_of(run_dir: Path) -> list[dict[str, str]]:
    """The rows of metrics, without what a clock or the machine says."""
    rows = read_rows(run_dir / "csv" / "metrics.csv")
    return [{name: value for name, value in row.items() if value and _is_repeatable(name)} for row in rows]


def _is_repeatable(name: str) -> bool:
    metric = metric_of(name)
    return metric is None or not (metric.from_clock or name.startswith("memory/"))


def difference(run_dir: Path, undisturbed: Path) -> str | None:
    """What of two runs is not the same; None: nothing."""
    for name in ("last", "best"):
        if found := differs(state_of(run_dir, name), state_of(undisturbed, name), name):
            return found
    return differs(rows_of(run_dir), rows_of(undisturbed), "metrics.csv")


# ---- killed runs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where a run is killed: see `fault_points.DieAt`."""

    phase: str
    rank: int | None
    step: int
    number: int

    @property
    def override(self) -> str:
        """For the command line."""
        rank = "null" if self.rank is None else self.rank
        place = f"phase: '{self.phase}', rank: {rank}, step: {self.step}, number: {self.number}"
        return "+callbacks.die={_target_: recipes.fault_points.DieAt, mark: '${run_dir}/died', " + place + "}"


def points(num_trials: int, seed: int) -> list[Point]:
    """Every phase in turn; rank, step and signal drawn by chance.

    >>> {point.phase for point in points(len(PHASES), seed=0)} == set(PHASES)
    True
    """
    draw = random.Random(seed)
    found = []
    for index in range(num_trials):
        phase = PHASES[index % len(PHASES)]
        is_written = phase in (*OF_A_CHECKPOINT, OF_A_CHECKPOINT_RENAMED)
        number = signal.SIGKILL if is_written or phase == "test" else draw.choice((signal.SIGKILL, signal.SIGTERM))
        rank = draw.choice((0, None) if is_written else (0, 1, None))
        last = NUM_STEPS - SAVED_EVERY if is_written else NUM_STEPS
        found.append(Point(phase=phase, rank=rank, step=draw.randint(1, last), number=int(number)))
    return found


def killed(point: Point, undisturbed: Path, run_dir: Path, base: list[str]) -> Outcome:
    """Run until the signal, run again, compare."""
    command = [*base, point.override]
    first = run_ranks(command, run_dir)
    mark = run_dir / "died"
    seconds = max(0.0, first.last_s - float(mark.read_text())) if mark.is_file() else None
    found = newest_whole(run_dir / "checkpoints") if (run_dir / "checkpoints").is_dir() else None
    at = 0 if found is None else int(read_checkpoint(found)["global_step"])
    second = run_ranks(command, run_dir)
    wrong = None if mark.is_file() else "the point was not reached"
    if second.codes != (0, 0):
        wrong = wrong or f"second run ended with {second.codes}: {last_line(second.told)}"
    expected = (143, 0) if point.number == signal.SIGTERM else None
    if expected is not None and first.codes != expected and at < NUM_STEPS:
        wrong = wrong or f"SIGTERM ended ranks with {first.codes}, not {expected}"
    wrong = wrong or difference(run_dir, undisturbed)
    reached = NUM_STEPS if point.phase == "test" else point.step
    lost = max(0, reached - at)
    noticed = "killed by hand" if first.was_helped else noticed_by(first)
    return Outcome(
        promise="exact resume",
        fault=signal.Signals(point.number).name,
        phase=point.phase,
        where=f"{'all ranks' if point.rank is None else f'rank {point.rank}'}, step {point.step}",
        detected_by=noticed if wrong is None else f"{noticed}; NOT THE SAME: {wrong}",
        seconds=seconds,
        lost=f"{lost} step{'s' if lost != 1 else ''}",
        is_held=wrong is None,
    )


def noticed_by(ended: Ended) -> str:
    """Who noticed, in a few of the survivors' own words."""
    if 143 in ended.codes:
        return "the run: exit code 143"
    words = re.search(r"comm: rank \d+ [^.:]*", ended.told)
    if words:
        return words.group()
    return "nobody is left" if all(code < 0 for code in ended.codes) else last_line(ended.told)[:80] or "-"


def last_line(text: str) -> str:
    """The last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


# ---- damaged checkpoints ---------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _plant(path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(path.parent / "was_here"),)

    torch.save({"global_step": 10**6, "optimizer_states": [], "callbacks": Evil()}, path)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated to half": _cut,
    "one bit flipped": _flip,
    "zero length": lambda path: path.write_bytes(b"") and None,
    "a pickle that runs code": _plant,
}


def damaged(name: str, interrupted: Path, undisturbed: Path, run_dir: Path, base: list[str]) -> Outcome:
    """A copy of a run that was killed, with the newest checkpoint damaged, run again."""
    shutil.copytree(interrupted, run_dir)
    path = run_dir / "checkpoints" / "last.ckpt"
    DAMAGES[name](path)
    ended = run_ranks(base, run_dir)
    wrong = None if ended.codes == (0, 0) else f"ended with {ended.codes}: {last_line(ended.told)}"
    is_named = "last.ckpt` " in ended.told and "passed over" in ended.told
    wrong = wrong or (None if is_named else "the file was not named")
    wrong = wrong or ("the pickle ran" if (path.parent / "was_here").exists() else None)
    wrong = wrong or difference(run_dir, undisturbed)
    return Outcome(
        promise="damaged files are passed over",
        fault=name,
        phase="before resuming",
        where="last.ckpt",
        detected_by="named, passed over" if wrong is None else f"NOT HELD: {wrong}",
        seconds=None,
        lost=f"{SAVED_EVERY} steps",
        is_held=wrong is None,
    )


def disk_full(undisturbed: Path, run_dir: Path, base: list[str]) -> Outcome:
    """From step 7 on no file may grow beyond 64 KiB: an error in words, the old checkpoint whole, and a resume."""
    point = Point(phase="loading", rank=0, step=7, number=0)
    command = [*base, point.override.replace("number: 0", "number: 0, limit_bytes: 65536")]
    first = run_ranks(command, run_dir)
    said = "was not written (File too large)" in first.told and 0 not in first.codes
    found = newest_whole(run_dir / "checkpoints")
    second = run_ranks(command, run_dir)
    wrong = None if said else f"no clear error: {first.codes} {last_line(first.told)}"
    wrong = wrong or (None if second.codes == (0, 0) else f"second run ended with {second.codes}")
    wrong = wrong or difference(run_dir, undisturbed)
    mark = float((run_dir / "died").read_text())
    at = 0 if found is None else int(read_checkpoint(found)["global_step"])
    return Outcome(
        promise="a full disk loses no checkpoint",
        fault="files may not grow (RLIMIT_FSIZE)",
        phase="checkpoint: write",
        where="rank 0, step 8",
        detected_by="CheckpointWriteError" if wrong is None else f"NOT HELD: {wrong}",
        seconds=max(0.0, first.last_s - mark),
        lost=f"{8 - at} steps",
        is_held=wrong is None,
    )


def outcomes(folder: Path, *, num_trials: int = 24, seed: int = 0, own: tuple[str, ...] = ()) -> Iterator[Outcome]:
    """All trials, each as it ends.

    Args:
        folder: Of the runs; each gets a directory of its own, which stays where the promise is broken.
        num_trials: Of killed runs; the damaged files and the full disk come on top.
        seed: Of the points.
        own: Overrides of every run, after `BASE`.
    """
    base, undisturbed = [*BASE, *own], folder / "undisturbed"
    ended = run_ranks(base, undisturbed)
    if ended.codes != (0, 0):
        raise RuntimeError(f"the run that nobody disturbs ended with {ended.codes}: {ended.told[-2000:]}")
    for index, point in enumerate(points(num_trials, seed)):
        yield _kept_if_broken(killed(point, undisturbed, folder / f"killed{index}", base), folder / f"killed{index}")
    interrupted = folder / "interrupted"
    run_ranks([*base, Point(phase="loading", rank=None, step=10, number=int(signal.SIGKILL)).override], interrupted)
    for index, name in enumerate(DAMAGES):
        run_dir = folder / f"damaged{index}"
        yield _kept_if_broken(damaged(name, interrupted, undisturbed, run_dir, base), run_dir)
    yield _kept_if_broken(disk_full(undisturbed, folder / "full", base), folder / "full")


def _kept_if_broken(outcome: Outcome, run_dir: Path) -> Outcome:
    if outcome.is_held:
        shutil.rmtree(run_dir)
    return outcome
