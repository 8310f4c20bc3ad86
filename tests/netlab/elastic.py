"""Hosts are lost and come back, under torchrun's elastic launch: the run goes on with those that are there.

    python -m tests.netlab.elastic --out FOLDER                          # one host of two
    python -m tests.netlab.elastic --out FOLDER --hosts 4 --lost 2       # two of four
    python -m tests.netlab.elastic --out FOLDER --lose rendezvous        # host 0, which keeps the rendezvous
    python -m tests.netlab.elastic --out FOLDER --lose checkpointing     # the same, while it writes a checkpoint
    python -m tests.netlab.elastic --out FOLDER --sync-every 8           # hosts train on their own between averages

On emulated hosts ``recipes/train.py resume=auto`` trains on the digits with a global batch of 128, at most 64 at a
time. After ``--lose-at`` steps every process of the lost hosts is killed, torchrun's agent included, and their links
are cut; when the hosts left have made ``--alone`` steps, the lost come back. Without the host that keeps the rendezvous
nobody can go on: all agents must end within ``--end-s``, and the same commands resume. Every rank writes which images
it trains on, so that all steps that counted can be compared with those of a run that nothing happened to.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.callbacks import Callback

from tests.netlab.cluster import Cluster, why_not

ROOT = Path(__file__).resolve().parents[2]
GLOBAL_BATCH, AT_ONCE, EVERY = 128, 64, 3
TIMEOUT_MIN = 0.5  # of collectives: a host whose link is cut says nothing, so the others wait for it so long
DIED = "died"
DEAD_AFTER_S = 3 * 2  # torchrun counts a node as gone after three signs of life that it missed, here one every 2 s


class Records(Callback):
    """Appends one line per batch of this rank to ``rank<r>_<process>.jsonl``: step, images, loss, world size."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        images = [hash_of(image) for image in batch[0].float().numpy()]
        steps_per_epoch = trainer.num_training_batches // trainer.accumulate_grad_batches
        step = trainer.current_epoch * steps_per_epoch + batch_idx // trainer.accumulate_grad_batches
        told = {"time_s": time.time(), "step": step, "world_size": trainer.world_size, "images": images}
        told["loss"] = float(outputs["loss"]) * trainer.accumulate_grad_batches
        with open(self.directory / f"rank{trainer.global_rank}_{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps(told) + "\n")


def hash_of(image: np.ndarray) -> int:
    """Of an image as it is trained on, crop included."""
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(image).tobytes(), digest_size=6).digest())


def steps_in(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What every attempt at a step trained on, oldest first: those of one step and one world size belong together."""
    lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    attempts: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for one in sorted(lines, key=lambda line: line["time_s"]):
        of_step = attempts[one["step"]]
        if not of_step or of_step[-1]["world_size"] != one["world_size"] or of_step[-1]["num"] >= GLOBAL_BATCH:
            of_step.append(
                {"world_size": one["world_size"], "num": 0, "images": [], "losses": [], "began_s": one["time_s"]}
            )
        of_step[-1]["num"] += len(one["images"])
        of_step[-1]["images"] += one["images"]
        of_step[-1]["losses"].append(one["loss"])
    return dict(attempts)


def command(
    folder: Path, max_steps: int, timeout_min: float = 5.0, killed_at: int | None = None, sync_every: int = 1
) -> list[str]:
    """``killed_at``: the step whose checkpoint, or the next one, rank 0 dies in. ``sync_every``: and saves so often."""
    save_every = EVERY if sync_every == 1 else sync_every
    options = [
        "logger=none trainer.enable_progress_bar=false trainer.enable_model_summary=false trainer.log_every_n_steps=1",
        f"trainer.max_steps={max_steps} trainer.limit_val_batches=0 trainer.limit_test_batches=1 trainer.max_epochs=50",
        # Masks are drawn by rank, and whether a sum overflows in fp16 hangs on who adds up how much: without the two,
        # losses on one rank are those on two.
        "model.dropout=0 strategy.loss_scale=1024",
        f"global_batch_size={GLOBAL_BATCH} max_batch_size_per_rank={AT_ONCE} strategy.timeout.minutes={timeout_min}",
        f"callbacks.last.every_n_train_steps={save_every} callbacks.last.save_on_train_epoch_end=false ~callbacks.best",
        f"resume=auto hydra.run.dir={folder / 'run'}",
        "+callbacks.records={_target_:tests.netlab.elastic.Records,directory:" + str(folder / "steps") + "}",
    ]
    if sync_every > 1:
        options.append(
            f"strategy/between_nodes=local_steps strategy.between_nodes.every={sync_every} strategy.ranks_per_node=1"
        )
    words = [str(ROOT / "recipes" / "train.py"), *" ".join(options).split()]
    if killed_at is not None:
        place = f"mark: '{folder / DIED}', phase: 'checkpoint: write', rank: 0, step: {killed_at}, number: 9"
        words.append("+callbacks.die={_target_: tests.evidence.resume.kill_points.DieAt, " + place + "}")
    return words


def torchrun(
    cluster: Cluster, host: int, folder: Path, max_steps: int, killed_at: int | None = None, sync_every: int = 1
) -> subprocess.Popen[bytes]:
    """torchrun's agent on a host, with one rank."""
    rendezvous = (
        f"last_call_timeout=3,keep_alive_interval={DEAD_AFTER_S // 3},keep_alive_max_attempt=3,is_host={int(host == 0)}"
    )
    launch = f"--nnodes=1:{cluster.num_hosts} --nproc-per-node=1 --max-restarts=5 --rdzv-backend=c10d --rdzv-id=elastic"
    launch += f" --rdzv-endpoint={cluster.address(0)}:29400 --local-addr={cluster.address(host)}"
    environment = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    # torch 2.13 tells where the ranks meet in the first round alone if agents share their store, so an agent that
    # comes later waits for it in vain.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with open(folder / f"host{host}.log", "ab") as log:
        inside = f"setpriv --pdeathsig KILL nsenter --net={cluster.namespace(host)} --".split()
        agent = [sys.executable, "-m", "torch.distributed.run", *launch.split(), "--rdzv-conf", rendezvous]
        return subprocess.Popen(
            [*inside, *agent, *command(folder, max_steps, TIMEOUT_MIN, killed_at, sync_every)],
            env=os.environ | environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def processes_under(pid: int) -> list[int]:
    """A process and all its descendants: torchrun puts its workers in sessions of their own."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


def wait_for_steps(folder: Path, num: int, *, world_size: int, since_s: float, limit_s: float) -> None:
    """Until so many whole steps were made by so many ranks after a moment."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        made = [one for tries in steps_in(folder / "steps").values() for one in tries]
        whole = [one for one in made if one["num"] == GLOBAL_BATCH and one["world_size"] == world_size]
        if sum(one["began_s"] > since_s for one in whole) >= num:
            return
        time.sleep(0.2)
    raise TimeoutError(f"{num} steps with {world_size} ranks were not made within {limit_s:g} s: see {folder}")


def end(agents: Iterable[subprocess.Popen[bytes]]) -> None:
    """As when the power fails: torchrun's agents and all under them."""
    for agent in agents:
        for pid in processes_under(agent.pid) if agent.poll() is None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()


def seconds_to_the_end(agents: list[subprocess.Popen[bytes]], *, limit_s: float) -> float:
    """Until the last agent has ended by itself: none may go on after ``limit_s``, or end as if all were well."""
    began_s = time.monotonic()
    while any(agent.poll() is None for agent in agents):
        if time.monotonic() - began_s > limit_s:
            raise TimeoutError(f"agents without a rendezvous still ran after {limit_s:g} s")
        time.sleep(0.1)
    if not all(agent.returncode for agent in agents):
        raise RuntimeError(f"agents without a rendezvous ended with {[agent.returncode for agent in agents]}")
    return time.monotonic() - began_s


def lose_and_come_back(asked: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Seconds that it took, by what they were for."""
    num_hosts = asked.hosts
    keeps_rendezvous = asked.lose != "others"
    lost = [0] if keeps_rendezvous else list(range(num_hosts))[-asked.lost :]
    left = [host for host in range(num_hosts) if host not in lost]
    killed_at = asked.lose_at if asked.lose == "checkpointing" else None
    agents: dict[int, subprocess.Popen[bytes]] = {}
    seconds = {}
    with Cluster(num_hosts=num_hosts, ranks_per_host=1, mbit_per_s=1000) as cluster:
        wait = partial(wait_for_steps, folder, limit_s=asked.limit_s)
        start = partial(
            torchrun,
            cluster,
            folder=folder,
            max_steps=asked.steps,
            killed_at=killed_at,
            sync_every=asked.sync_every,
        )
        try:
            agents = {host: start(host) for host in range(num_hosts)}
            wait(asked.lose_at, world_size=num_hosts, since_s=0.0)
            while killed_at is not None and not (folder / DIED).exists():
                time.sleep(0.005)
            end(agents[host] for host in lost)
            for host in lost:
                cluster.spoil_link(host, loss=1.0)
            lost_s = time.time()
            if keeps_rendezvous:
                seconds["s_from_loss_to_the_end_of_all"] = seconds_to_the_end(
                    [agents[host] for host in left], limit_s=asked.end_s
                )
            else:
                wait(1, world_size=len(left), since_s=lost_s)
                seconds["s_from_loss_to_going_on_alone"] = time.time() - lost_s
                wait(asked.alone, world_size=len(left), since_s=lost_s)
            for host in lost:
                cluster.spoil_link(host)
            back_s = time.time()
            for host in range(num_hosts) if keeps_rendezvous else lost:
                agents[host] = start(host)
            wait(1, world_size=num_hosts, since_s=back_s)
            seconds["s_from_return_to_going_on_together"] = time.time() - back_s
            wait(asked.together, world_size=num_hosts, since_s=back_s)
        finally:
            end(agents.values())
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.netlab.elastic", description=__doc__.partition(":")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--lost", type=int, default=1, help="hosts, the last ones")
    parser.add_argument("--lose", choices=["others", "rendezvous", "checkpointing"], default="others")
    parser.add_argument("--lose-at", type=int, default=7, help="steps")
    parser.add_argument("--alone", type=int, default=8, help="steps that those left make before the lost are back")
    parser.add_argument("--together", type=int, default=5, help="steps after that")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sync-every", type=int, default=1, help="steps from one average over hosts to the next")
    parser.add_argument("--end-s", type=float, default=180.0, help="for agents that lost their rendezvous to end")
    parser.add_argument("--limit-s", type=float, default=900.0, help="of each wait")
    asked = parser.parse_args()
    if reason := why_not():
        sys.exit(f"error: {reason}")
    folder = asked.out.resolve()
    folder.mkdir(parents=True)
    seconds = lose_and_come_back(asked, folder)
    attempts = steps_in(folder / "steps")
    last = max(step for step, tries in attempts.items() if tries[-1]["num"] == GLOBAL_BATCH)
    reference = folder / "undisturbed"
    reference.mkdir()
    with open(reference / "log", "wb") as log:
        subprocess.run(
            [sys.executable, *command(reference, last + 1, sync_every=asked.sync_every)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            stdout=log,
            stderr=log,
            check=True,
        )
    expected = steps_in(reference / "steps")
    same = [sorted(attempts[step][-1]["images"]) == sorted(expected[step][-1]["images"]) for step in range(last + 1)]
    again = sum(len([one for one in tries if one["num"] == GLOBAL_BATCH]) - 1 for tries in attempts.values())
    apart = [
        abs(statistics.mean(attempts[s][-1]["losses"]) - statistics.mean(expected[s][-1]["losses"]))
        for s in range(last + 1)
    ]
    told = {
        "hosts": asked.hosts,
        "lost": f"{asked.lost} of {asked.hosts}" if asked.lose == "others" else f"host 0, {asked.lose}",
        "num_steps": last + 1,
        "world_sizes": [attempts[step][-1]["world_size"] for step in range(last + 1)],
        "num_steps_with_the_same_images": sum(same),
        "num_steps_made_again": again,
        "losses": [statistics.mean(attempts[step][-1]["losses"]) for step in range(last + 1)],
        "losses_undisturbed": [statistics.mean(expected[step][-1]["losses"]) for step in range(last + 1)],
        "largest_difference_of_losses": max(apart),
        **seconds,
    }
    (folder / "elastic.json").write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps({name: value for name, value in told.items() if not name.startswith("losses")}, indent=1))
    if not all(same):
        sys.exit(1)


if __name__ == "__main__":
    main()
