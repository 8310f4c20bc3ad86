"""Cost of the checks in a training step of ResNet-50: `python -m tests.evidence.faults.cost`.

One rank trains on noise with LARS in fp16; the clock surrounds every hook of the monitor, and what a rank computes
for a comparison. On a CPU, which queues nothing, that is what they cost. It counts the processor's seconds of this
process, so that other work on the machine does not count. The 16 bytes that a comparison sends are left out.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid.callbacks import NumericsMonitor
from lightning_hybrid.callbacks.replica_check import tensors_of_replica
from lightning_hybrid.callbacks.run_report.environment import environment
from lightning_hybrid.callbacks.tensor_hash import Fingerprint
from lightning_hybrid.optim import LARS
from recipes.cli.markdown import markdown_table
from recipes.cli.results import write_json
from recipes.networks.resnet import ResNet

BATCH, NUM_STEPS, EVERY = 4, 6, 3
DEFAULT_EVERY_N_STEPS = 100  # default of ReplicaCheck
LOG_EVERY_N_STEPS = 50  # Lightning's default


class Module(pl.LightningModule):
    """ResNet-50 at its own image size."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ResNet()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the cross entropy."""
        return F.cross_entropy(self.net(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make LARS with momentum."""
        return LARS(self.parameters(), lr=0.1, momentum=0.9)


class Times(Callback):
    """Callback that times every step, and a hash of all that a rank holds."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []
        self.checks_s: list[float] = []
        self.num_bytes = 0

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock."""
        self._began_s = time.process_time()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stop the clock; then time what a comparison computes."""
        self.steps_s.append(time.process_time() - self._began_s)
        began_s = time.process_time()
        fingerprint = Fingerprint(torch.device("cpu"))
        tensors = dict(tensors_of_replica(trainer))
        fingerprint.combine([fingerprint.of(tensor) for tensor in tensors.values()])
        self.checks_s.append(time.process_time() - began_s)
        self.num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class TimedWatch(NumericsMonitor):
    """Monitor that times its own hooks: at steps that are logged, and at others."""

    def __init__(self) -> None:
        super().__init__()
        self.logged_s: list[float] = []
        self.others_s: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        """Time the hook."""
        self._start_s = _seconds_of(super().on_train_batch_start, *args)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Time the hook."""
        took_s = _seconds_of(super().on_train_batch_end, trainer, *args) + self._start_s
        (self.others_s if trainer.global_step % EVERY else self.logged_s).append(took_s)


def _seconds_of(function: Callable[..., Any], *args: Any) -> float:
    began_s = time.process_time()
    function(*args)
    return time.process_time() - began_s


def main() -> None:
    """Print the table and, with a folder as argument, write it there."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    times, watch = Times(), TimedWatch()
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy="hybrid_allreduce",
        precision="16-true",
        max_steps=NUM_STEPS,
        log_every_n_steps=EVERY,
        callbacks=[times, watch],
        **quiet,
    )
    images = torch.randn(BATCH * NUM_STEPS, 3, 224, 224)
    labels = torch.randint(1000, (len(images),))
    trainer.fit(Module(), DataLoader(TensorDataset(images, labels), batch_size=BATCH))
    step_s, check_s = statistics.median(times.steps_s[1:]), statistics.median(times.checks_s[1:])
    logged_s, other_s = statistics.median(watch.logged_s), statistics.median(watch.others_s[1:])
    watch_s = other_s + (logged_s - other_s) / LOG_EVERY_N_STEPS
    rows = [
        [f"one step, {BATCH} images", f"{1e3 * step_s:.4g}", "", ""],
        _row(f"ReplicaCheck, {times.num_bytes / 1e6:.0f} MB", check_s, check_s / DEFAULT_EVERY_N_STEPS, step_s),
        _row(f"NumericsMonitor, logged every {LOG_EVERY_N_STEPS}", logged_s, watch_s, step_s),
    ]
    table = markdown_table(["what", "ms when it runs", "ms per step", "% of a step"], rows)
    print(table)
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cost.md").write_text(table + "\n")
        content = {
            "environment": environment(Path(__file__).parent),
            "steps_s": times.steps_s,
            "checks_s": times.checks_s,
        }
        content |= {"watch_logged_s": watch.logged_s, "watch_others_s": watch.others_s}
        write_json(folder / "cost.json", content)


def _row(what: str, runs_s: float, per_step_s: float, step_s: float) -> list[str]:
    return [what, f"{1e3 * runs_s:.4g}", f"{1e3 * per_step_s:.3g}", f"{100 * per_step_s / step_s:.3f}"]


if __name__ == "__main__":
    main()
