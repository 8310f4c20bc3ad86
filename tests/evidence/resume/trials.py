"""Trials that kill a run anywhere, start it again with the same command, and compare the results.

Each trial is a run of the digits recipe on two ranks, in a directory of its own, with `resume=auto`; it is killed at a
random point (phase, rank, step, signal), and then it is run again. The promise is held
if the second run ends as an undisturbed one: weights, averages, optimizer state, schedule, loss scale, place in
the data and every row of metrics that does not come from a clock, to the bit.
"""

import random
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_hybrid import DurableCheckpointIO
from recipes.training.resume import newest_whole
from tests.evidence.faults.table import FaultOutcome
from tests.evidence.resume.forked_ranks import RanksExit, difference, run_ranks
from tests.evidence.resume.kill_points import OF_A_CHECKPOINT, OF_A_CHECKPOINT_RENAMED, PHASES

NUM_STEPS, SAVED_EVERY = 12, 2
BASE = (
    "logger=csv callbacks=[default,ema] ~callbacks.report trainer.max_epochs=2 trainer.limit_train_batches=6 "
    "trainer.limit_val_batches=1 trainer.limit_test_batches=1 trainer.log_every_n_steps=1 model.width=0.0625 "
    "trainer.enable_progress_bar=false trainer.enable_model_summary=false "
    f"callbacks.last.every_n_train_steps={SAVED_EVERY} callbacks.ema.decay=0.9 strategy.loss_scale=dynamic resume=auto"
).split()


@dataclass(frozen=True, kw_only=True)
class KillPoint:
    """Point at which a run is killed: see `kill_points.DieAt`."""

    phase: str
    rank: int | None
    step: int
    number: int

    @property
    def override(self) -> str:
        """Override for the command line."""
        rank = "null" if self.rank is None else self.rank
        place = f"phase: '{self.phase}', rank: {rank}, step: {self.step}, number: {self.number}"
        return (
            "+callbacks.die={_target_: tests.evidence.resume.kill_points.DieAt, mark: '${run_dir}/died', " + place + "}"
        )


def points(num_trials: int, seed: int) -> list[KillPoint]:
    """Return every phase in turn; rank, step and signal drawn by chance.

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
        # A checkpoint must follow in the run, else the point is never reached.
        last = NUM_STEPS - SAVED_EVERY if is_written else NUM_STEPS
        found.append(KillPoint(phase=phase, rank=rank, step=draw.randint(1, last), number=int(number)))
    return found


def killed(point: KillPoint, undisturbed: Path, run_dir: Path, base: list[str]) -> FaultOutcome:
    """Run until the signal, run again, compare."""
    command = [*base, point.override]
    first = run_ranks(command, run_dir)
    mark = run_dir / "died"
    seconds = max(0.0, first.last_s - float(mark.read_text())) if mark.is_file() else None
    found = newest_whole(run_dir / "checkpoints") if (run_dir / "checkpoints").is_dir() else None
    at = 0 if found is None else int(DurableCheckpointIO().load_checkpoint(found)["global_step"])
    second = run_ranks(command, run_dir)
    wrong = None if mark.is_file() else "the point was not reached"
    if second.codes != (0, 0):
        wrong = wrong or f"second run ended with {second.codes}: {last_line(second.output)}"
    # Whichever rank got the signal: rank zero ends with 128 + SIGTERM, the other regularly.
    expected = (143, 0) if point.number == signal.SIGTERM else None
    if expected is not None and first.codes != expected and at < NUM_STEPS:
        wrong = wrong or f"SIGTERM ended ranks with {first.codes}, not {expected}"
    wrong = wrong or difference(run_dir, undisturbed)
    reached = NUM_STEPS if point.phase == "test" else point.step
    lost = max(0, reached - at)
    noticed = "killed by hand" if first.was_helped else noticed_by(first)
    return FaultOutcome(
        promise="exact resume",
        fault=signal.Signals(point.number).name,
        phase=point.phase,
        where=f"{'all ranks' if point.rank is None else f'rank {point.rank}'}, step {point.step}",
        detected_by=noticed if wrong is None else f"{noticed}; NOT THE SAME: {wrong}",
        seconds=seconds,
        lost=f"{lost} step{'s' if lost != 1 else ''}",
        is_held=wrong is None,
    )


def noticed_by(ended: RanksExit) -> str:
    """Return who noticed, in the survivors' own words."""
    if 143 in ended.codes:
        return "the run: exit code 143"
    found = re.search(r"rank \d+ does not answer|comm: rank \d+ [^.:]*|\w+Error: .{60}", ended.output)
    return found.group() if found else "nobody is left" if all(code < 0 for code in ended.codes) else "-"


def last_line(text: str) -> str:
    """Return the last line with text."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def resume_outcomes(
    folder: Path, *, num_trials: int = 24, seed: int = 0, own: tuple[str, ...] = ()
) -> Iterator[FaultOutcome]:
    """Yield all trials, each as it ends.

    Args:
        folder: Folder of the runs; each gets a directory of its own, which stays where the promise is broken.
        num_trials: Killed runs.
        seed: Seed of the points.
        own: Overrides of every run, after `BASE`.
    """
    base, undisturbed = [*BASE, *own], folder / "undisturbed"
    ended = run_ranks(base, undisturbed)
    if ended.codes != (0, 0):
        raise RuntimeError(f"the undisturbed run ended with {ended.codes}: {ended.output[-2000:]}")
    for index, point in enumerate(points(num_trials, seed)):
        yield _removed_if_held(killed(point, undisturbed, folder / f"killed{index}", base), folder / f"killed{index}")


def _removed_if_held(outcome: FaultOutcome, run_dir: Path) -> FaultOutcome:
    if outcome.is_held:
        shutil.rmtree(run_dir)
    return outcome
