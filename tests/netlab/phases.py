"""Where the time of whole steps goes on an emulated cluster, by phase and by arm:

    python -m tests.netlab.phases --hosts 4 --ranks 2 --mbit 100 --delay-us 200 --arms ddp,fp16_compress,auto

Steps are those of ``linear_8mib_arithmetic`` (recipes/benchmarks/gradient_sets.py); arms, named as in recipes/bench.py,
take turns. A row holds medians over ranks and steps, in ms; phases follow each other in the thread that trains:

    batch       end of the step before -> begin of forward; Lightning asks rank zero for a signal here
    forward     begin -> end of the loss
    backward    -> the first bucket is handed over; without our engine, all of backward with its communication
    in node     -> the first chunk is on its way between nodes
    between     -> the last chunk has arrived
    last        -> all gradients are there: the last stage inside the node, and the division
    update      -> the end of the step: unscale, verdict, optimizer, half-precision copies

``processor`` is the time of all threads of a rank in a step, ``main`` that of the thread that trains; of the latter all
but a part of backward is exposed, and where ranks share cores, once for each rank on a core.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from recipes.benchmarks.gradient_sets import GradientSet, linear_8mib_shapes
from recipes.benchmarks.steps import StrategyArm
from tests.netlab.cluster import Cluster, ClusterError, why_not

BETWEEN = ("all_reduce", "parallel_all_reduce", "ring", "shard_all_reduce")
NUM_WARMUP_STEPS = 3


class Marks(pl.Callback):
    """When the training thread passed the border of two phases, in seconds; one dict for each step."""

    def __init__(self, timeline: Path) -> None:
        self.steps: list[dict[str, float]] = []
        self.events: list[dict[str, Any]] = []
        self._timeline = timeline

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trace = getattr(trainer.strategy, "comm_trace", None)
        if trace is not None:
            trace.keep_events = True

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.steps.append({"batch": time.perf_counter()})

    def on_before_backward(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.steps[-1]["forward"] = time.perf_counter()

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.steps[-1]["averaged"] = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        now = {"end": time.perf_counter(), "processor": time.process_time(), "main": time.thread_time()}
        self.steps[-1].update(now)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        trace = getattr(trainer.strategy, "comm_trace", None)
        if trace is not None:
            trace.write(self._timeline, rank=trainer.global_rank)
            found = json.loads(self._timeline.read_text())["traceEvents"]
            rows = {each["tid"]: each["args"]["name"] for each in found if each["name"] == "thread_name"}
            self.events = [{**each, "row": rows[each["tid"]]} for each in found if each["ph"] == "X"]

    def phases(self) -> list[dict[str, float]]:
        """Seconds of each phase, of each step that counts."""
        return [self._phases_of(*pair) for pair in list(pairwise(self.steps))[NUM_WARMUP_STEPS - 1 :]]

    def _phases_of(self, before: dict[str, float], step: dict[str, float]) -> dict[str, float]:
        of_step = [each for each in self.events if before["end"] <= each["ts"] / 1e6 < step["end"]]
        buckets = [each["ts"] / 1e6 for each in of_step if each["row"] == "buckets"]
        across = [each for each in of_step if each["row"].rpartition(" ")[2] in BETWEEN]
        borders = {"batch": step["batch"], "forward": step["forward"]}
        if across:
            borders["backward"] = min(buckets)
            borders["in node"] = min(each["ts"] for each in across) / 1e6
            borders["between"] = max(each["ts"] + each["dur"] for each in across) / 1e6
            borders["last"] = step["averaged"]
        else:
            borders["backward"] = step["averaged"]
        borders["update"] = step["end"]
        times = [before["end"], *borders.values()]
        found = {name: end - begin for name, (begin, end) in zip(borders, pairwise(times), strict=True)}
        return {
            "step": step["end"] - before["end"],
            **found,
            "processor": step["processor"] - before["processor"],
            "main": step["main"] - before["main"],
        }


def fit(arm: StrategyArm, num_steps: int, folder: Path) -> list[dict[str, float]]:
    """The phases of each counted step of one fit."""
    num_steps += NUM_WARMUP_STEPS
    marks = Marks(folder / f"{dist.get_rank()}.json")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=arm.strategy(),
        precision=arm.precision,
        max_steps=num_steps,
        callbacks=[marks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = GradientSet(linear_8mib_shapes(), has_arithmetic=True)
    trainer.fit(module, DataLoader(torch.zeros(num_steps, 1), batch_size=1))  # type: ignore[arg-type]
    del trainer, module
    gc.collect()
    return marks.phases()


def on_rank(names: list[str], num_rounds: int, num_steps: int) -> None:
    """Fit every arm in turns; rank zero prints the table."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    nodes = {"devices": int(os.environ["LOCAL_WORLD_SIZE"]), "num_nodes": int(os.environ["GROUP_WORLD_SIZE"])}
    Fabric(accelerator="cpu", strategy="ddp", **nodes).launch()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="phases-") as folder:
        for _ in range(num_rounds):
            for name in names:
                found[name] += fit(StrategyArm(name=name), num_steps, Path(folder))
    all_found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_found, found)
    if dist.get_rank() == 0:
        print(f"medians in ms; load {os.getloadavg()[0]:.1f}", flush=True)
        for name in names:
            steps = [step for one in all_found for step in one[name]]
            cells = [f"{key} {1e3 * statistics.median(step[key] for step in steps):.1f}" for key in steps[0]]
            print(f"{name:16}" + "  ".join(cells), flush=True)
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.netlab.phases", description=__doc__.partition(":")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--mbit", type=float, default=100.0, help="rate of each host's link in each direction, Mbit/s")
    parser.add_argument("--delay-us", type=float, default=200.0, help="one way")
    parser.add_argument("--arms", default="ddp,fp16_compress,auto", help="names, as `steps.arms` of recipes/bench.py")
    parser.add_argument("--rounds", type=int, default=3, help="fits of each arm, in turns")
    parser.add_argument("--steps", type=int, default=8, help="counted in each fit")
    asked = parser.parse_args()
    if "RANK" in os.environ:
        on_rank(asked.arms.split(","), asked.rounds, asked.steps)
        return
    if reason := why_not():
        sys.exit(f"error: {reason}")
    with Cluster(
        num_hosts=asked.hosts, ranks_per_host=asked.ranks, mbit_per_s=asked.mbit, delay_us=asked.delay_us
    ) as cluster:
        try:
            command = [sys.executable, "-m", "tests.netlab.phases", *sys.argv[1:]]
            cluster.run(command, timeout_s=1800.0, show_rank_zero=True)
        except ClusterError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
