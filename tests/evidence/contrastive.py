"""Memory and seconds of a loss over many pairs: `python -m tests.evidence.contrastive out=rows.csv pairs=8192 ranks=2`.

Arms, each on fresh processes, in turns:

    own batch       256 pairs a rank, the loss of a rank's own pairs: the memory to hold
    accumulated     a rank's share in batches of 256, each with the loss of its own pairs; gradients added up
    global batch    `GlobalBatch(InfoNCE)` over all pairs of all ranks
    loss alone      forward and backward of that loss on embeddings that are there

Memory is what the process holds at most in a step, over what it held before it (VmHWM).
"""

from __future__ import annotations

import csv
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hybrid.contrastive import GlobalBatch, InfoNCE

CHUNK, FEATURES = 256, 128
ARMS = ("own batch", "accumulated", "global batch", "loss alone")


def network() -> nn.Module:
    """Convolutions for 32 x 32 pixels, some 4 million multiply-adds an image."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, FEATURES))


class Embedder(nn.Module):
    """Two views of each image: the image, and mirrored."""

    def __init__(self, arm: str) -> None:
        super().__init__()
        self.net, self.arm = network(), arm
        self.loss = GlobalBatch(InfoNCE(0.1, block=CHUNK), chunk=CHUNK)

    def embed(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.net(images), self.net(images.flip(3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.arm == "global batch":
            return self.loss(self.embed, images)
        a, b = (nn.functional.normalize(view, dim=1) for view in self.embed(images))
        return nn.functional.cross_entropy(10 * a @ b.T, torch.arange(len(a)))


def step(arm: str, model: nn.Module, images: torch.Tensor) -> None:
    if arm == "loss alone":
        views = [torch.randn(len(images), FEATURES, requires_grad=True) for _ in range(2)]
        InfoNCE(0.1, block=CHUNK)(*views).backward()
    elif arm == "global batch":
        model(images).backward()
    else:
        parts = images.split(CHUNK)[: 1 if arm == "own batch" else None]
        for part in parts[:-1]:
            with model.no_sync():
                model(part).backward()
        model(parts[-1]).backward()


def held(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{name}:")[2].split()[0])


def on_rank(rank: int, ranks: int, arm: str, pairs: int, store: str, queue: object) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    model = DistributedDataParallel(Embedder(arm))
    images = torch.randn(pairs // ranks, 3, 32, 32, generator=torch.Generator().manual_seed(rank))
    step(arm, model, images[: 2 * CHUNK])  # allocators, connections
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    before, start = held("VmRSS"), time.perf_counter()
    step(arm, model, images)
    dist.barrier()
    queue.put((time.perf_counter() - start, held("VmHWM") - before))  # type: ignore[attr-defined]
    dist.destroy_process_group()


def measured(arm: str, pairs: int, ranks: int) -> tuple[float, int]:
    """Seconds of a step, bytes of the rank that held most."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [context.Process(target=on_rank, args=(r, ranks, arm, pairs, store, queue)) for r in range(ranks)]
        for process in processes:
            process.start()
        found = [queue.get() for _ in processes]
        for process in processes:
            process.join()
    return max(s for s, _ in found), max(b for _, b in found)


if __name__ == "__main__":
    given = dict(word.split("=") for word in sys.argv[1:])
    pairs, ranks, rounds = (int(given.get(name, n)) for name, n in (("pairs", 8192), ("ranks", 2), ("rounds", 3)))
    rows = [(arm, pairs, ranks, *measured(arm, pairs, ranks)) for _ in range(rounds) for arm in ARMS]
    with open(given["out"], "a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    for arm in ARMS:
        seconds, held_bytes = zip(*(row[3:] for row in rows if row[0] == arm), strict=True)
        print(f"{arm:<14}{statistics.median(seconds):8.2f} s  {max(held_bytes) / 1e6:8.0f} MB")
