"""Whether the tuner finds what brute force finds, on an emulated cluster, in whole training steps:

    python -m tests.netlab.tuner --hosts 2 --ranks 2 --mbit 100 --delay-us 200 --folder recipes/records/bench/...

The plan is tuned in a `Trainer.fit` as a user's would be; then steps go through a grid of fixed plans in turns, and
then the tuned plan against the best of these, the plan that the tuner began with, and flat, in turns.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_hybrid import Comm, HybridAllReduceStrategy
from lightning_hybrid.comm import CommPlan
from lightning_hybrid.comm.health.consensus import max_over_ranks
from lightning_hybrid.comm.tuning.plan_trials import distinct, other_algorithms
from recipes.benchmarks.gradient_sets import GRADIENT_SETS, GradientSet
from recipes.cli.results import environment, write_json
from tests.netlab.cluster import Cluster, ClusterError, why_not

CPU = torch.device("cpu")
CHUNK_BYTES = [2**17, 2**18, 2**19, 2**20]
NUM_GROUPS = [1, 2, 4]


class Tells(Callback):
    """Notes what the tuner says, and when; ends the fit once the plan is tuned."""

    def __init__(self):
        self.told, self.tuned_at = [], None

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 0:  # the tuner is made at the first batch
            trainer.strategy._comm._tuning.before_batch(module)
            tuning = trainer.strategy._comm._tuning._tuning
            tuning._report = lambda line: self.told.append((trainer.global_step, line))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        tuning = trainer.strategy._comm._tuning._tuning
        if self.tuned_at is None and tuning._do == tuning._rest:
            self.tuned_at = trainer.global_step
            self.plan = trainer.strategy._engine.plan
            trainer.should_stop = True


class InTurns(Callback):
    """Every step another plan, forwards and backwards; a first step under each is not counted."""

    def __init__(self, plans_of, num_rounds):
        self.plans_of, self.num_rounds = plans_of, num_rounds
        self.times_s = {}

    def schedule(self, engine):
        phases = zip(self.plans_of, self.num_rounds, strict=True)
        for phase, (plans_of, num_rounds) in enumerate(phases):
            plans = plans_of(engine, self.times_s)
            self.times_s[phase] = {plan: [] for plan in plans}
            yield from ((plan, None) for plan in plans)
            for number in range(num_rounds):
                for plan in plans if number % 2 == 0 else reversed(plans):
                    yield plan, phase
            for plan in plans:
                self.times_s[phase][plan] = max_over_ranks(self.times_s[phase][plan], str(phase), CPU)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        engine = trainer.strategy._engine
        if batch_idx == 3:
            engine.adopt(engine.plan)  # forgets the buckets before DDP rebuilt them
        if batch_idx == 4:
            self.steps = self.schedule(engine)
        if batch_idx >= 4:
            self.plan, self.phase = next(self.steps, (None, None))
            if self.plan is None:
                trainer.should_stop = True
            else:
                engine.adopt(self.plan)
        self.began_s = time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx >= 4 and self.phase is not None:
            self.times_s[self.phase][self.plan].append(time.perf_counter() - self.began_s)


def fit(gradients, callback, max_steps, tune):
    for message in ("`isinstance\\(treespec", ".*does not have many workers", "The number of training batches"):
        warnings.filterwarnings("ignore", message=message)
    strategy = HybridAllReduceStrategy(comm=Comm(tune=tune))
    trainer = pl.Trainer(
        strategy=strategy,
        precision="16-true",
        accelerator="cpu",
        devices=int(dist.get_world_size() / num_hosts()),
        num_nodes=num_hosts(),
        max_steps=max_steps,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(GradientSet(GRADIENT_SETS[gradients]()), DataLoader(torch.zeros(max_steps, 1), batch_size=1))


def num_hosts():
    import os

    return int(os.environ["GROUP_WORLD_SIZE"])


def grid(engine):
    """Every algorithm with every chunk size and number of groups, but for those that do the same."""
    plans = [
        replace(plan, chunk_bytes=chunk_bytes, num_parallel_groups=num_groups)
        for plan in other_algorithms(engine.plan, engine.topology)
        for chunk_bytes, num_groups in itertools.product(CHUNK_BYTES, NUM_GROUPS)
    ]
    return distinct(plans, engine.buckets, engine.topology)


def tune_and_compare(gradients, num_grid_rounds, num_final_rounds, num_best):
    """On every rank: what the tuner said and chose, and the times of all plans."""
    tells = Tells()
    fit(gradients, tells, 2000, tune="on")

    def finalists(engine, times_s):
        best = sorted(times_s[0], key=lambda plan: statistics.median(times_s[0][plan]))[:num_best]
        start = CommPlan()
        return distinct([tells.plan, *best, start, replace(start, algorithm="flat")], engine.buckets, engine.topology)

    turns = InTurns([lambda engine, times_s: grid(engine), finalists], [num_grid_rounds, num_final_rounds])
    fit(gradients, turns, 5000, tune="off")
    return tells.told, tells.tuned_at, tells.plan, turns.times_s


# ---- in the process that starts the ranks ----------------------------------------------------------------------------


def words(plan):
    if plan.algorithm == "flat":
        return "flat"
    if plan.algorithm == "parallel_flat":
        return f"parallel_flat, {plan.num_parallel_groups} groups"
    return f"{plan.algorithm}, chunks of {plan.chunk_bytes // 1024} KiB, {plan.num_parallel_groups} groups"


def compare(told, tuned_at, tuned, times_s):
    """Rows of the last phase, each plan against the tuned one, pair by pair; the grid's medians."""
    final = times_s[1]
    of_tuned = final[tuned]
    rows = []
    for plan, of_plan in final.items():
        ratios = [a / b for a, b in zip(of_tuned, of_plan, strict=True)]
        low, high = interval(ratios)
        rows.append((words(plan), statistics.median(of_plan), statistics.median(ratios), low, high, len(ratios)))
    return rows


def interval(values):
    """95 % confidence interval of the median, by order statistics (no assumption on the distribution)."""
    ordered, n = sorted(values), len(values)
    below = 0
    while sum(math.comb(n, k) for k in range(below + 1)) / 2**n <= 0.025:
        below += 1
    return ordered[max(0, below - 1)], ordered[n - max(1, below)]


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.netlab.tuner", description=__doc__.partition(":")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--mbit", type=float, default=100.0, help="rate of each host's link in each direction, Mbit/s")
    parser.add_argument("--delay-us", type=float, default=200.0, help="one way")
    parser.add_argument("--gradients", default="linear_8mib", choices=list(GRADIENT_SETS))
    parser.add_argument("--grid-rounds", type=int, default=3)
    parser.add_argument("--final-rounds", type=int, default=20)
    parser.add_argument("--best", type=int, default=3, help="of the grid, timed against the tuned plan")
    parser.add_argument("--limit-s", type=float, default=600.0, help="then everything is ended")
    parser.add_argument("--folder", type=Path, help="of the record")
    asked = parser.parse_args()
    if reason := why_not():
        sys.exit(f"error: {reason}")
    about = f"{asked.hosts} x {asked.ranks} ranks, {asked.mbit:g} Mbit/s, {asked.delay_us:g} us, {asked.gradients}"
    layout = {"num_hosts": asked.hosts, "ranks_per_host": asked.ranks}
    with Cluster(**layout, mbit_per_s=asked.mbit, delay_us=asked.delay_us) as cluster:
        try:
            arguments = (asked.gradients, asked.grid_rounds, asked.final_rounds, asked.best)
            found = cluster.call(tune_and_compare, *arguments, timeout_s=asked.limit_s)[0]
        except ClusterError as error:
            sys.exit(f"error: {error}")
    told = [f"{about}\n", *(f"after step {step}: {line}" for step, line in found[0]), ""]
    told += ["| plan | median ms | tuned / this | 95 % of the median | pairs |", "|---|---|---|---|---|"]
    for name, median_s, ratio, low, high, num in compare(*found):
        told.append(f"| {name} | {1e3 * median_s:.1f} | {ratio:.3f} | {low:.3f} to {high:.3f} | {num} |")
    samples = [{words(plan): times_s for plan, times_s in phase.items()} for phase in found[3].values()]
    samples = {"grid": samples[0], "final": samples[1], "tuned": asdict(found[2])}
    text = "\n".join(told)
    print(text)
    if asked.folder is not None:
        asked.folder.mkdir(parents=True, exist_ok=True)
        (asked.folder / "table.md").write_text(text + "\n")
        (asked.folder / "command.txt").write_text(f"python -m tests.netlab.tuner {' '.join(sys.argv[1:])}\n")
        values = {"config": {k: str(v) for k, v in vars(asked).items()}, "environment": environment(), **samples}
        write_json(asked.folder / "bench.json", values)


if __name__ == "__main__":
    main()
