"""Rank of a short run of a user's own loop with Fabric, with a fault."""

import os
import sys
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid.flavours.fabric import HybridAllReduceStrategy
from tests.evidence.faults.inject import Inject

BATCHES_PER_EPOCH = 4


def train_with_fabric(spec: dict[str, Any], images: Dataset, network: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Train; return what a rank writes."""
    strategy = HybridAllReduceStrategy(timeout=timedelta(seconds=spec["timeout_s"]), **options)
    answer: dict[str, Any] = {"error": None, "num_steps": 0, "weights": 0}
    try:
        num_nodes, devices = int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        fabric = Fabric(accelerator="cpu", strategy=strategy, devices=devices, num_nodes=num_nodes, precision="16-true")
        fabric.launch()
        _loop(fabric, Inject(spec), spec, images, network)
    except BaseException as error:
        answer["error"] = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        sys.last_value = error  # as where the interpreter has shown it
    answer["time_s"] = time.monotonic()
    strategy._close_engines()  # as at the interpreter's end
    return answer


def _loop(fabric: Any, inject: Inject, spec: dict[str, Any], images: Dataset, network: Any) -> None:
    # Of the trainer a fault needs no more than this.
    trainer: Any = SimpleNamespace(global_rank=fabric.global_rank, global_step=0, lightning_module=network)
    optimizer = torch.optim.SGD(network.net.parameters(), lr=0.05, momentum=0.9)
    net, optimizer = fabric.setup(network.net, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(images, batch_size=8, shuffle=True))
    while True:
        total = torch.zeros(())
        for batch, (x, labels) in enumerate(loader):
            inject._reach(trainer, "forward")
            loss = F.cross_entropy(net(x).float(), labels)
            loss = loss if network.spoil is None else network.spoil(loss)
            fabric.backward(loss)
            inject._reach(trainer, "update")
            optimizer.step()
            optimizer.zero_grad()
            trainer.global_step, total = trainer.global_step + 1, total + loss.detach()
            if trainer.global_step == spec["num_steps"]:
                return
            if batch + 1 == BATCHES_PER_EPOCH:
                break
        inject._reach(trainer, "validation")
        fabric.all_reduce(total)
