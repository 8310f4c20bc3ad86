"""Hosts that are lost and replaced during a run: `python -m tests.netlab.recovery --out R`.

A host consists of `--ranks` real processes on this machine with a launcher of their own. They train on digits in
16-true with LARS.

    loss        `kill`: SIGKILL to a host; `split`: when one rank has its last all-reduce and another has not;
                `stop`: SIGSTOP to a host other than the first, which falls silent;
                `validation`, `epoch`, `checkpoint`: SIGKILL when one begins;
                `joining`: SIGKILL to a host that joins, and to another host at the same time
    reference   each part of the run between two changes, repeated by as many hosts from the previous part's checkpoint
    seconds     from the signal to the next step of all others; for a joining host, the longest step of the others
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import time
from functools import partial, partialmethod
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from tests.ports import free_addresses, free_port

PAUSE_S = 0.02  # pause of a callback after each step, so that losses are spread over the step
STEPS_BETWEEN = 25
KINDS = ("kill", "split", "stop", "validation", "epoch", "checkpoint", "joining")


def rank_main(
    host: str, local: int, port: int, options: dict[str, Any], folder: str, part: dict[str, Any]
) -> None:
    """Train on one rank, as a launcher with `--nnodes=1` on each host starts it."""
    import logging
    import warnings

    import torch

    for descriptor, name in ((1, "out"), (2, "err")):
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        os.dup2(os.open(f"{folder}/{name}_{host}_{local}", flags), descriptor)
    # The variables of a single-host launch.
    num_hosts = 1
    node = 0
    if part.get("is_plain"):
        num_hosts = options["hosts"]
        node = ord(host) - ord("a")
        port = part["port"]
    rank = node * options["ranks"] + local
    world_size = num_hosts * options["ranks"]
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(world_size),
        "GROUP_RANK": str(node),
    }
    os.environ |= {"LOCAL_WORLD_SIZE": str(options["ranks"]), "TORCHELASTIC_RUN_ID": "x"}
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0" if "meet" in part else "lo"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    _train(host, local, options, Path(folder), part)


def _train(
    host: str, local: int, options: dict[str, Any], folder: Path, part: dict[str, Any]
) -> None:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import WandbLogger
    from lightning.pytorch.loggers.logger import Logger
    from lightning.pytorch.utilities import rank_zero_only
    from torch import nn
    from torch.nn import functional
    from torchmetrics import SumMetric

    from lightning_hybrid import HybridAllReduceStrategy, HybridElasticStrategy
    from lightning_hybrid.callbacks.ema import MasterWeightAveraging
    from lightning_hybrid.elastic import elastic_fit, host_changes
    from lightning_hybrid.elastic.membership.view import IsolatedError
    from lightning_hybrid.optim import LARS
    from lightning_hybrid.strategy.option_classes import Mean
    from recipes.datasets.digits import DigitsDataModule

    host_changes.Membership = partial(host_changes.Membership, wait_s=part.get("wait_s", 10.0))  # type: ignore[assignment, misc]
    log = open(folder / f"log_{host}_{local}_{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115

    def note(**values: Any) -> None:
        log.write(
            json.dumps({"t": time.monotonic(), "host": host, "local": local, **values}) + "\n"
        )

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            width = options["width"]
            self.layers = nn.Sequential(
                nn.Flatten(),
                nn.Linear(256, width),
                nn.BatchNorm1d(width),
                nn.ReLU(),
                nn.Dropout(0.1),
                nn.Linear(width, width),
            )
            self.head = nn.Linear(width, 10)
            self.seen = None if "window" in part else SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = functional.cross_entropy(self.head(self.layers(batch[0])).float(), batch[1])
            num = len(batch[1])
            if "window" not in part:
                self.log("images", float(num), on_step=False, on_epoch=True, reduce_fx="sum")
                self.log(
                    "all_images",
                    float(num),
                    on_step=False,
                    on_epoch=True,
                    reduce_fx="sum",
                    sync_dist=True,
                )
                self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=num)
                self.seen(num)
                self.log("seen", self.seen, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            loss = functional.cross_entropy(self.head(self.layers(batch[0])).float(), batch[1])
            self.log("val_loss", loss, sync_dist=True)
            time.sleep(options["val_s"])

        def configure_optimizers(self) -> Any:
            optimizer = LARS(self.parameters(), lr=1.0, momentum=0.9)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.9)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if "window" in part:
                if trainer.global_step % part["window"] == 0:
                    note(event="time", step=trainer.global_step, processor_s=time.process_time())
                    while not (folder / f"go_{trainer.global_step}").exists():
                        time.sleep(0.01)
                    note(event="go", step=trainer.global_step, processor_s=time.process_time())
                return
            tensors = list(module.state_dict().values())
            if averages:
                tensors += averages._average_model.module.state_dict().values()
            values = [tensor.detach().numpy().tobytes() for tensor in tensors]
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            loss = float(trainer.callback_metrics["loss_step"])
            values.append(repr((rate, loss)).encode())
            digest = hashlib.blake2b(b"".join(values), digest_size=8).hexdigest()
            views = strategy._fit._views
            hosts = views.topology.num_nodes
            view = views.groups.number
            note(event="step", step=trainer.global_step - 1, digest=digest, hosts=hosts, view=view)
            # At the end of the fit, the module holds the average.
            if trainer.global_step == part["end"] and "to" in part:
                trainer.save_checkpoint(part["to"])
            time.sleep(PAUSE_S)

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            note(event="validation")

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
            note(event="checkpoint")

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            logged = trainer.callback_metrics
            counts = {}
            for name in ("images", "all_images", "seen"):
                if name in logged:
                    counts[name] = float(logged[name])
            note(event="epoch", epoch=trainer.current_epoch, **counts)

    class Rows(Logger):
        name = "rows"
        version = 0

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

        @rank_zero_only
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            if "loss_step" in metrics:
                note(event="row", step=step, loss=metrics["loss_step"])

    num_hosts = options["hosts"]
    meet = options["meet"]
    ways: dict[str, Any] = {"ranks_per_node": options["ranks"]}
    strategy_type: Any = HybridAllReduceStrategy
    if not part.get("is_plain"):
        least = part.get("min_hosts", 1)
        silent_s = options["silent_s"]
        ways = {"max_hosts": num_hosts, "min_hosts": least, "meet": meet, "silent_s": silent_s}
        strategy_type = HybridElasticStrategy
    strategy = strategy_type(
        between_nodes=Mean(
            dtype="int8" if "int8" in options["with"] else None,
            error_feedback="feedback" in options["with"],
        ),
        shard_update="node" if "shard_update" in options["with"] else "off",
        **ways,
    )
    if host in part.get("spoilt", ""):
        host_changes.Views._load = partialmethod(_spoil, host_changes.Views._load)  # type: ignore[assignment, method-assign]
    if (host, local) == ("a", options["ranks"] - 1):
        elastic_fit.ElasticFit._is_whole = partialmethod(
            _late, elastic_fit.ElasticFit._is_whole, folder
        )  # type: ignore[assignment, method-assign]
    # With `shard_update`, a rank averages only its own part of the weights.
    has_averages = "window" not in part and "shard_update" not in options["with"]
    if has_averages:
        averages = MasterWeightAveraging(0.9)
    else:
        averages = None
    averages_and_note = [*([averages] if averages else []), Note()]
    if "wandb" in options["with"]:
        wandb = [WandbLogger(id="recovery", offline=True, save_dir=folder)]
    else:
        wandb = []
    data = DigitsDataModule(global_batch_size=8 * options["ranks"] * num_hosts, seed=0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options["ranks"],
        num_nodes=num_hosts if part.get("is_plain") else 1,
        strategy=strategy,
        precision=options["precision"],
        max_steps=part["end"],
        callbacks=[
            *averages_and_note,
            ModelCheckpoint(folder / "checkpoints", every_n_train_steps=20),
        ],
        logger=False if "window" in part else [Rows(), *wandb],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    module = Net()
    try:
        trainer.fit(module, datamodule=data, ckpt_path=part.get("from"), weights_only=False)
    except BaseException as error:
        # This host has not joined yet.
        if isinstance(error, IsolatedError) and not trainer.global_step:
            sys.exit(75)
        note(event="error", error=f"{type(error).__name__}: {error}"[:2000])
        raise
    note(event="end", step=trainer.global_step)


def _late(fit: Any, is_whole: Any, folder: Path, views: Any) -> bool:
    # The last rank of the first host has all reduced gradients, and waits until a host is lost. By then, others have
    # stepped.
    if (folder / "split").exists():
        (folder / "split").rename(folder / "split_now")
        ends_s = time.monotonic() + 10
        while not views.ended and time.monotonic() < ends_s:
            time.sleep(0.002)
    return bool(is_whole(fit, views))


def _spoil(seen: Any, load: Any, *args: Any, **kwargs: Any) -> None:
    load(seen, *args, **kwargs)
    seen._strategy.lightning_module.head.bias.data[3] += 1


class Hosts:
    """Hosts of a run, each with its own processes, and the rows that they record."""

    main: Any = staticmethod(rank_main)

    def __init__(self, options: dict[str, Any], folder: Path, part: dict[str, Any]) -> None:
        self._options = options
        self._part = part
        self.folder = folder
        self._options |= {"meet": part.get("meet") or free_addresses(options["hosts"])}
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._context = multiprocessing.get_context("forkserver")
        self.running: dict[str, list[Any]] = {}
        self._read: dict[Path, int] = {}
        self.num_restarts = 0
        self.rows: list[dict[str, Any]] = []

    def start(self, host: str) -> None:
        """Start a host."""
        port = free_port()
        self.running[host] = [
            self._context.Process(
                target=self.main,
                args=(host, local, port, self._options, str(self.folder), self._part),
                daemon=True,
            )
            for local in range(self._options["ranks"])
        ]
        for process in self.running[host]:
            process.start()

    def signal(self, host: str, number: int) -> float:
        """Send a signal to all processes of a host, and return the time."""
        now = time.monotonic()
        for process in self.running[host]:
            os.kill(process.pid, number)
        return now

    def end(self, host: str) -> None:
        """Kill the remaining processes of a host."""
        for process in self.running.pop(host):
            process.kill()
            process.join()

    def _has_ended_itself(self, host: str) -> bool:
        return any(process.exitcode == 75 for process in self.running[host])

    def look(self) -> list[dict[str, Any]]:
        """Read and return the new rows."""
        new = []
        for path in self.folder.glob("log_*"):
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                while (line := file.readline()).endswith("}\n"):
                    new.append(json.loads(line) | {"process": path.stem})
                    self._read[path] = file.tell()
        self.rows += sorted(new, key=lambda row: row["t"])
        return new

    def wait(
        self, description: str, is_there: Any, *, limit_s: float = 120.0, restarts: bool = False
    ) -> None:
        """Wait until the rows satisfy a condition. With `restarts`, restart hosts that ended themselves."""
        ends_s = time.monotonic() + limit_s
        while not is_there():
            for name in list(self.running):
                if restarts and self._has_ended_itself(name):
                    self.num_restarts += 1
                    self.end(name)
                    self.start(name)
            if any(row["event"] == "error" for row in self.look()):
                errors = [row for row in self.rows if row["event"] == "error"]
                raise RuntimeError(f"{description}: {errors}")
            if time.monotonic() > ends_s:
                raise TimeoutError(f"{description}: not in {limit_s:g} s; {self.folder}")
            time.sleep(0.005)

    def steps(
        self, host: str, *, since_s: float = 0.0, hosts: int | None = None
    ) -> dict[int, list[dict[str, Any]]]:
        """Return the rows of steps of a host's ranks, by local rank."""
        rows_by_rank: dict[int, list[dict[str, Any]]] = {
            local: [] for local in range(self._options["ranks"])
        }
        for row in self.rows:
            is_step = row["event"] == "step" and row["host"] == host and row["t"] > since_s
            if is_step and hosts in (None, row["hosts"]):
                rows_by_rank[row["local"]].append(row)
        return rows_by_rank


def disturbed(options: dict[str, Any], folder: Path) -> tuple[Hosts, list[dict[str, Any]]]:
    """Lose and replace hosts repeatedly, and return the run and a row for each loss."""
    names = [chr(ord("a") + number) for number in range(options["hosts"])]
    draw = random.Random(options["seed"])
    losses = []
    run = Hosts(options, folder, {"end": STEPS_BETWEEN * (options["losses"] * 3 + 4)})
    for name in names:
        run.start(name)
        # The first host takes the first address, so its half continues when hosts fall silent.
        time.sleep(2.0 * (name == "a"))
    num_all = options["hosts"]
    run.wait("all hosts", lambda: all(run.steps(name, hosts=num_all)[0] for name in names))
    for number in range(options["losses"]):
        kind = options["kinds"][number % len(options["kinds"])]
        if kind in ("split", "stop"):
            may_be_lost = names[1:]
        else:
            may_be_lost = names
        lost = draw.sample(may_be_lost, options["lost"])
        left = [name for name in names if name not in lost]
        time.sleep(draw.random() * STEPS_BETWEEN * PAUSE_S)
        if kind == "split":
            (run.folder / "split").touch()
            run.wait("a late rank", (run.folder / "split_now").exists)
            # A surviving host made the step and the first host did not.
            if num_all - options["lost"] > 1:
                stays = next(name for name in names if name not in [*lost, "a"])
                run.wait(
                    "one has stepped",
                    lambda: run.steps(stays)[0][-1]["step"] > run.steps("a")[0][-1]["step"],
                    limit_s=5,
                )
            (run.folder / "split_now").unlink()
        if kind in ("validation", "epoch", "checkpoint"):
            seen = len(run.rows)
            run.wait(kind, lambda: any(row["event"] == kind for row in run.rows[seen:]))
        if kind == "joining":
            _lose_a_joiner(run, lost, left)
        if kind == "stop":
            number_of = signal.SIGSTOP
        else:
            number_of = signal.SIGKILL
        began_s = min(run.signal(name, number_of) for name in lost)
        num_left = len(left)
        run.wait(
            f"loss {number} ({kind} of {lost})",
            lambda: all(
                all(run.steps(name, since_s=began_s, hosts=num_left).values()) for name in left
            ),
        )
        after_s = max(
            rows[0]["t"]
            for name in left
            for rows in run.steps(name, since_s=began_s, hosts=num_left).values()
        )
        for name in lost:
            run.end(name)
        joins_s = time.monotonic()
        for name in sorted(lost):
            run.start(name)
            # The host takes the first address again.
            time.sleep(2.0 * (name == "a" and "stop" in options["kinds"]))
        run.wait(
            "joined",
            lambda: all(all(run.steps(n, since_s=joins_s, hosts=num_all).values()) for n in names),
            restarts=True,
        )
        rows = [row for row in run.steps(left[0])[0] if row["t"] > joins_s]
        pauses = [later["t"] - row["t"] for row, later in pairwise(rows)]
        losses.append(
            {"kind": kind, "lost": lost, "seconds": after_s - began_s, "join_wait_s": max(pauses)}
        )
        seconds = f"{losses[-1]['seconds']:.2f} s; join: others wait {max(pauses):.2f} s"
        print(f"loss {number + 1:2d} {kind:5s} of {','.join(lost)}: {seconds}", flush=True)
    run.look()
    for name in names:
        run.end(name)
    return run, losses


def _lose_a_joiner(run: Hosts, lost: list[str], left: list[str]) -> None:
    # A host is lost, restarts, and is lost again while it joins.
    began_s = min(run.signal(name, signal.SIGKILL) for name in lost)
    run.wait(
        "others go on", lambda: all(all(run.steps(name, since_s=began_s).values()) for name in left)
    )
    for name in lost:
        run.end(name)
        run.start(name)
    time.sleep(random.Random(len(run.rows)).uniform(0.5, 3.0))


def parts_of(rows: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Return (first step, end, hosts) of each view of a run."""
    view_of_step: dict[int, tuple[int, int]] = {}  # view and number of hosts by step
    for row in sorted(rows, key=lambda row: row["t"]):
        # The first rank with a row made the step. A rank that received it from that one is in another view.
        if row["event"] == "step":
            view_of_step.setdefault(row["step"], (row["view"], row["hosts"]))
    parts = []
    for (_, hosts), steps in groupby(sorted(view_of_step), key=view_of_step.__getitem__):
        first, *later_steps = steps
        parts.append((first, (later_steps or [first])[-1] + 1, hosts))
    return parts


def reference(
    options: dict[str, Any], folder: Path, parts: list[tuple[int, int, int]]
) -> dict[int, str]:
    """Run each part on as many hosts, from the previous part's checkpoint, and return the digest of each step."""
    digests: dict[int, str] = {}
    checkpoint = None
    for number, (_, end, hosts) in enumerate(parts):
        to = str(folder / f"part_{number}.ckpt")
        run = Hosts(
            options,
            folder / f"part_{number}",
            {"end": end, "from": checkpoint, "to": to, "min_hosts": hosts, "wait_s": 0.3},
        )
        names = [chr(ord("a") + index) for index in range(hosts)]
        for name in names:
            run.start(name)
        run.wait(
            f"part {number}",
            lambda: sum(r["event"] == "end" for r in run.rows) == hosts * options["ranks"],
        )
        for name in names:
            run.end(name)
        for row in run.rows:
            if row["event"] == "step":
                assert digests.setdefault(row["step"], row["digest"]) == row["digest"], row
        if checkpoint:
            Path(checkpoint).unlink()
        checkpoint = to
    return digests


def report(
    run: Hosts, losses: list[dict[str, Any]], wanted: dict[int, str] | None
) -> dict[str, Any]:
    """Return the measurements, and the counts of wrong steps and rows."""
    steps = [row for row in run.rows if row["event"] == "step"]
    per_process: dict[str, list[int]] = {}
    for row in steps:
        per_process.setdefault(row["process"], []).append(row["step"])
    epochs = [row for row in run.rows if row["event"] == "epoch" and row["local"] == 0]
    logged = [(row["step"], row["loss"]) for row in run.rows if row["event"] == "row"]
    logged_steps = {step for step, _ in logged}
    result = {
        "losses": len(losses),
        "ended_themselves": run.num_restarts,
        "steps": len({row["step"] for row in steps}),
        "twice_or_missing": sum(map(_are_twice_or_missing, per_process.values())),
        "with_two_digests": num_with_two_digests(steps),
        "images_per_epoch": sorted({row["images"] for row in epochs}),
        "all_images_per_epoch": sorted({row["all_images"] for row in epochs}),
        "seen_per_epoch": sorted({row["seen"] for row in epochs}),
        "rows": len(logged),
        "rows_lost": len({row["step"] for row in steps} - {steps[-1]["step"]} - logged_steps),
        "rows_twice": len(logged) - len(set(logged)),
        "rows_of_two_values": len(set(logged)) - len(logged_steps),
    }
    if wanted is not None:
        result["differ_from_reference"] = sum(
            wanted.get(row["step"]) != row["digest"] for row in steps
        )
    for kind in KINDS:
        if times := [loss["seconds"] for loss in losses if loss["kind"] == kind]:
            result[kind] = _median_and_worst(times)
    result["join_wait"] = _median_and_worst([loss["join_wait_s"] for loss in losses])
    return result


def _are_twice_or_missing(steps: list[int]) -> bool:
    return steps != list(range(steps[0], steps[0] + len(steps)))


def num_with_two_digests(rows: list[dict[str, Any]]) -> int:
    """Return the number of steps after which two ranks have different weights."""
    digests: dict[int, set[str]] = {}
    for row in rows:
        digests.setdefault(row["step"], set()).add(row["digest"])
    return sum(len(digests_of_step) > 1 for digests_of_step in digests.values())


def _median_and_worst(times_s: list[float]) -> dict[str, float]:
    return {
        "median_s": round(statistics.median(times_s), 3),
        "worst_s": round(max(times_s), 3),
        "of": len(times_s),
    }


def healthy(
    options: dict[str, Any], folder: Path, *, num_pairs: int, window: int = 60
) -> dict[str, Any]:
    """Compare processor time of steps with and without `elastic`, in two runs that alternate."""
    num = options["hosts"] * options["ranks"]
    names = [chr(ord("a") + index) for index in range(options["hosts"])]
    runs: dict[bool, Hosts] = {}
    for is_plain in (False, True):
        part = {
            "end": window * (num_pairs + 3),
            "window": window,
            "is_plain": is_plain,
            "port": free_port(),
        }
        runs[is_plain] = Hosts(options, folder / f"pair_{is_plain}", part)
        for name in names:
            runs[is_plain].start(name)

    def at(run: Hosts, event: str, step: int) -> list[float]:
        rows = [row for row in run.rows if row["event"] == event and row.get("step") == step]
        return [row["processor_s"] for row in rows]

    def go(run: Hosts, step: int) -> float:
        (run.folder / f"go_{step}").touch()
        run.wait("a window", lambda: len(at(run, "time", step + window)) == num)
        return (sum(at(run, "time", step + window)) - sum(at(run, "go", step))) / num / window

    for run in runs.values():
        run.wait("the first window", lambda run=run: len(at(run, "time", window)) == num)
        go(run, window)
    pairs = []
    sums = {False: 0.0, True: 0.0}
    for pair in range(num_pairs):
        step = (pair + 2) * window
        order = (False, True) if pair % 2 else (True, False)
        seconds = {}
        for is_plain in order:
            seconds[is_plain] = go(runs[is_plain], step)
            sums[is_plain] += seconds[is_plain]
        pairs.append(seconds[False] / seconds[True])
        elastic_ms = seconds[False] * 1e3
        plain_ms = seconds[True] * 1e3
        print(
            f"pair {pair + 1}: {elastic_ms:.2f} ms of {plain_ms:.2f}: {pairs[-1]:.3f}", flush=True
        )
    for run in runs.values():
        for name in names:
            run.end(name)
    low, middle, high = statistics.quantiles(pairs, n=4)
    return {
        "ratio": middle,
        "quartiles": [low, high],
        "least": min(pairs),
        "most": max(pairs),
        "pairs": num_pairs,
        "ratio_of_sums": sums[False] / sums[True],
        "plain_ms": sums[True] / num_pairs * 1e3,
    }


def main() -> None:
    """Lose hosts, compare, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lost", type=int, default=1)
    parser.add_argument("--losses", type=int, default=40)
    parser.add_argument("--kinds", default="kill,split,kill,stop")
    parser.add_argument("--with", dest="with_", default="")
    parser.add_argument("--precision", default="16-true")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument(
        "--healthy", type=int, default=0, help="pairs of runs without losses, in place of losses"
    )
    arguments = parser.parse_args()
    options = vars(arguments) | {
        "with": arguments.with_.split(","),
        "kinds": arguments.kinds.split(","),
    }
    options |= {"out": str(arguments.out), "silent_s": 2.0, "val_s": 0.02}
    multiprocessing.set_forkserver_preload(
        ["lightning.pytorch", "lightning_hybrid", "recipes.datasets.digits", "tests.preloaded"]
    )
    if arguments.healthy:
        print(json.dumps(healthy(options, arguments.out, num_pairs=arguments.healthy)))
        return
    run, losses = disturbed(options, arguments.out / "run")
    if arguments.no_reference:
        wanted = None
    else:
        wanted = reference(options, arguments.out / "reference", parts_of(run.rows))
    result = report(run, losses, wanted)
    (arguments.out / "recovery.json").write_text(
        json.dumps({"options": options, "found": result, "losses": losses}, indent=1)
    )
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
