"""Random losses, joins and cuts of three hosts, compared with one plain process.

    python -m tests.elastic.random_events --events 500 --seed 0

The program prints one line per run and the total number of steps that differ. It ends with an error if a step differs,
is missing or is made twice, or if a host does not end as it should.
"""

from __future__ import annotations

import argparse
import random
import shutil
import string
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.elastic.replicas import (
    WAIT_LIMIT_S,
    Cut,
    Join,
    Loss,
    Outcome,
    Scene,
    differences,
    plain_run,
    run,
)

EVENTS_PER_RUN = 20
NUM_HOSTS = 3
PRECISIONS = ("32-true", "16-true")


def random_scene(num_events: int, seed: int) -> Scene:
    """Return a run that begins with three hosts, of which one or two are lost and replaced again and again."""
    draw = random.Random(seed)
    unused = list(string.ascii_letters)
    living = [unused.pop(0) for _ in range(NUM_HOSTS)]
    hosts = list(living)
    events: list[Loss | Join | Cut] = []
    step = 0
    for _ in range(num_events):
        step += draw.choice([1, 2, 3])
        event: Loss | Join | Cut
        if len(living) == 1 or (len(living) < NUM_HOSTS and draw.random() < 0.6):
            event = Join(unused.pop(0), step)
            living.append(event.host)
            hosts.append(event.host)
        else:
            event = random_loss(living, step, draw)
            living.remove(event.host)
            step += 1  # so that a loss shortly after the step began happens before the next event
        events.append(event)
    return Scene(
        "".join(hosts), events, num_steps=step + 3, precision=PRECISIONS[seed % 2], silent_s=1.0
    )


def random_loss(living: list[str], step: int, draw: random.Random) -> Loss | Cut:
    """Return a random loss of one of these hosts. A cut or a loss after the all-reduce needs two other hosts."""
    host = draw.choice(living)
    remaining = [name for name in living if name != host]
    kinds = ["before", "within", "soon"]
    if len(remaining) == 2:
        kinds += ["after", "cut"]
    kind = draw.choice(kinds)
    if kind == "cut":
        return Cut(host, step)
    if kind == "before":
        return Loss(host, step, "before")
    if kind == "within":
        shard = 0
        if len(remaining) == 1:  # then each host has two shards
            shard = draw.choice([0, 1])
        return Loss(host, step, "within", shard=shard)
    if kind == "soon":
        return Loss(host, step, "soon", delay_s=draw.uniform(0.0, 0.05))
    ahead = draw.choice(remaining)
    late = next(name for name in remaining if name != ahead)
    return Loss(host, step, "after", ahead=ahead, late=late)


def kind_of(event: Loss | Join | Cut) -> str:
    if isinstance(event, Loss):
        return f"loss {event.when}"
    return type(event).__name__.lower()


def faults_of(scene: Scene, outcome: Outcome) -> list[str]:
    """Return faults other than different values: hosts with missing steps or with an unexpected end."""
    lost = {event.host for event in scene.events if not isinstance(event, Join)}
    starts = {event.host: event.step for event in scene.events if isinstance(event, Join)}
    faults = []
    for host in scene.hosts:
        steps = outcome.steps_of(host)
        if host in lost:
            continue
        if outcome.ends.get((host, 0)) != "ended":
            faults.append(f"host {host} ended with {outcome.ends.get((host, 0))}")
        is_whole = steps[-1:] == [scene.num_steps - 1] and steps[0] >= starts.get(host, 0)
        if not is_whole:
            faults.append(f"host {host} made steps {steps}")
    cut = {event.host for event in scene.events if isinstance(event, Cut)}
    for host in sorted(cut):
        end = outcome.ends.get((host, 0), "")
        if not end.startswith("IsolatedError"):
            faults.append(f"host {host}, which was cut off, ended with {end!r}")
    return faults


def steps_that_differ(outcome: Outcome, scene: Scene) -> tuple[int, set[int], list[str]]:
    """Return the number of steps, the steps that differ on any host, and a line for each difference."""
    expected = plain_run(scene.num_steps, scene.precision)
    all_steps: set[int] = set()
    differing: set[int] = set()
    lines: list[str] = []
    for ranks, records in outcome.records.items():
        steps = [step for step, _ in records]
        all_steps |= set(steps)
        for record in records:
            found_differences = differences(Outcome(records={ranks: [record]}), expected)
            if found_differences:
                differing.add(record[0])
                lines += found_differences
        if steps and steps != list(range(steps[0], steps[0] + len(steps))):
            lines.append(f"host {ranks[0]} made steps {steps}")
            twice = {step for step in steps if steps.count(step) > 1}
            missing = set(range(steps[0], steps[-1])) - set(steps)
            differing |= twice | missing
    return len(all_steps), differing, lines


@dataclass
class Totals:
    """Counts over all runs."""

    kinds: Counter[str] = field(default_factory=Counter)
    num_steps: int = 0
    num_differing: int = 0
    num_faults: int = 0


def run_scene(seed: int, num_events: int, totals: Totals, keep: Path | None) -> None:
    """Run one random scene, print a line about it, and add it to the totals.

    If the run fails, its files are moved to the folder `keep`.
    """
    scene = random_scene(num_events, seed)
    folder = Path(tempfile.mkdtemp(prefix=f"random_events_{seed}_"))
    began_s = time.monotonic()
    num_steps = 0
    differing: set[int] = set()
    try:
        outcome = run(scene, folder, limit_s=WAIT_LIMIT_S + 10.0 * len(scene.events))
        num_steps, differing, faults = steps_that_differ(outcome, scene)
        faults += faults_of(scene, outcome)
    except (TimeoutError, AssertionError) as error:
        faults = [str(error)]

    totals.num_steps += num_steps
    totals.num_differing += len(differing)
    totals.num_faults += bool(faults)
    totals.kinds.update(kind_of(event) for event in scene.events)
    seconds = time.monotonic() - began_s
    print(
        f"seed {seed}: {num_steps} steps, {len(differing)} differ, {seconds:.0f} s; "
        f"{totals.kinds.total()} events",
        flush=True,
    )
    if faults:
        print(scene, *faults[:10], sep="\n", flush=True)
        if keep is not None:
            shutil.copytree(folder, keep / folder.name)
    shutil.rmtree(folder)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=500)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first run; each run has the next one"
    )
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="begin no run after so many minutes; 0: no limit"
    )
    parser.add_argument("--keep", type=Path, help="folder for the files of runs with a fault")
    return parser.parse_args()


def main() -> None:
    """Run random scenes until enough events have happened or the time limit is reached."""
    options = parse_arguments()
    began_s = time.monotonic()
    totals = Totals()
    seed = options.seed
    while totals.kinds.total() < options.events:
        minutes = (time.monotonic() - began_s) / 60
        if options.minutes and minutes > options.minutes:
            print(f"{minutes:.1f} minutes are over", flush=True)
            break
        num_events = min(EVENTS_PER_RUN, options.events - totals.kinds.total())
        run_scene(seed, num_events, totals, options.keep)
        seed += 1
    print(f"{totals.kinds.total()} events: {dict(sorted(totals.kinds.items()))}")
    print(
        f"{totals.num_steps} steps against one process: {totals.num_differing} differ; "
        f"runs with a fault: {totals.num_faults}"
    )
    if totals.num_differing or totals.num_faults or not totals.num_steps:
        sys.exit("error: a run with losses is not the run of one process")


if __name__ == "__main__":
    main()
