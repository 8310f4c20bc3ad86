"""Arms of the study on eight emulated hosts, a process each: `python -m tests.evidence.local_sgd.hosts FOLDER`.

The same images in the same order as in one process, through the strategy, with bytes counted by the hosts' kernels.
Linux, root; about a minute a run on two cores.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback

from lightning_hybrid import Comm, HybridAllReduceStrategy, LocalSteps
from lightning_hybrid.data.in_memory.loader import Normalize
from recipes.datasets.glyphs import glyphs_split
from tests import toy
from tests.evidence.local_sgd.training import ARMS, NUM_EPOCHS, NUM_NODES, Node, accuracy, batches_of, new_network
from tests.netlab.cluster import Cluster
from tests.netlab.test_bytes import bytes_sent

RUNS = {  # arm, optimizer: the rate that seed 0 chose in one process
    ("16 steps of 64, int8", "orthogonal"): 64.0,
    ("4 steps of 64, int4", "orthogonal"): 64.0,
    ("6 steps of 64, int4", "orthogonal"): 64.0,
    ("16 steps of 64, int4", "orthogonal"): 64.0,
}
SEEDS = (1, 2, 3, 4, 5)
LIMIT_S = 900.0


class Module(pl.LightningModule):
    """The study's network and optimizer, as a user writes them."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node, self.network = [node], node.network

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        images, labels = batch
        return F.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> Any:
        """Step the schedule with each step of the optimizer."""
        (node,) = self.node
        return [node.optimizer], [{"scheduler": node.schedule, "interval": "step"}]


class Sent(Callback):
    """What this host sends to others while it trains."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to count, all hosts together."""
        dist.barrier()
        self.before = bytes_sent()[0]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count."""
        dist.barrier()
        self.total = bytes_sent()[0] - self.before


def fit(arm_name: str, kind: str, lr: float, seed: int) -> dict[str, float]:
    """Train as one of the hosts, and return what it sent and, of the first, the accuracy in percent."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    arm, sets = ARMS[arm_name], glyphs_split()
    normalize = Normalize.fitted_to(sets["train"].images)
    num_steps = len(sets["train"].labels) * NUM_EPOCHS // (NUM_NODES * arm.images_per_step)
    module = Module(Node(new_network(), kind, lr, num_steps))
    sent = Sent()
    bits: Any = None if arm.bits is None else f"int{arm.bits}"
    strategy = HybridAllReduceStrategy(between_nodes=LocalSteps(every=arm.every, dtype=bits), comm=Comm(tune="off"))
    trainer = toy.trainer(
        strategy=strategy, precision="32-true", max_epochs=-1, max_steps=num_steps, callbacks=[sent], benchmark=False
    )
    rank = dist.get_rank()
    trainer.fit(module, batches_of(sets["train"], normalize, size=arm.images_per_step, seed=seed, rank=rank))
    found = {"bytes": sent.total}
    if rank == 0:
        found |= {name: accuracy(module.network, sets[name], normalize) for name in ("val", "test")}
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Return a row of Markdown for each arm and optimizer."""
    lines = ["| arm | optimizer | MB a host sent | accuracy in % | seeds |", "|---|---|---|---|---|"]
    for arm, kind in RUNS:
        found = [row for row in rows if (row["arm"], row["optimizer"]) == (arm, kind)]
        if found:
            tests = [row["test"] for row in found]
            spread = stdev(tests) if len(tests) > 1 else float("nan")
            sent = mean(row["bytes"] for row in found) / 1e6
            lines.append(f"| {arm} | {kind} | {sent:.2f} | {mean(tests):.1f} ± {spread:.1f} | {len(found)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, seed by seed."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows_hosts.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    with Cluster(num_hosts=NUM_NODES, ranks_per_host=1, mbit_per_s=1000) as cluster:
        for seed in SEEDS:
            for (arm, kind), lr in RUNS.items():
                key = {"arm": arm, "optimizer": kind, "lr": lr, "seed": seed}
                if any(key.items() <= row.items() for row in rows):
                    continue
                began_s = time.monotonic()
                hosts = cluster.call(fit, arm, kind, lr, seed, timeout_s=LIMIT_S)
                sent = mean(host["bytes"] for host in hosts)
                rows.append(key | hosts[0] | {"bytes": sent, "seconds": round(time.monotonic() - began_s, 1)})
                with path.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(rows[-1], flush=True)
    (folder / "table_hosts.md").write_text(table(rows) + "\n")


if __name__ == "__main__":
    main()
