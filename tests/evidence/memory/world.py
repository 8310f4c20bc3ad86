"""Peak memory of a rank in a step of BERT whose update all share, next to the planner's.

    MALLOC_MMAP_THRESHOLD_=131072 python -m tests.evidence.memory.world 4 world     ranks, `shard_update`

Counted by the kernel, everything: the most resident bytes within a step over those before the network was there. With
the threshold the allocator keeps nothing that torch has freed.
"""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from tests.evidence.memory.bert import loss_of
from torch.utils.data import DataLoader

from lightning_hybrid import Comm
from lightning_hybrid.optim import LAMB
from recipes.networks.bert import Bert
from recipes.planning.activations import step_bytes
from recipes.planning.estimates.memory import MemoryChoices, StateBytes
from recipes.planning.layers import WithoutValues
from tests.rank_pool import RankPool
from tests.scenes import at, fit

SIZES = {"num_classes": 16_000, "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 6}
SIZES |= {"intermediate_size": 2048}
NUM_SEQUENCES, LENGTH, NUM_STEPS, PRECISION = 8, 128, 4, "bf16-true"  # fp16 on a CPU has fp32 copies on top


class Masked(pl.LightningModule):
    """The network alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Bert(**SIZES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of masked tokens."""
        return loss_of(self.net, self.net.example(NUM_SEQUENCES, LENGTH, device="cpu"))

    def configure_optimizers(self) -> Any:
        """Return LAMB."""
        return LAMB(self.parameters(), lr=1e-3, fused=True)


def resident(name: str) -> int:
    """Bytes of this process, by a name of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def most_since_last(*_: Any) -> int:
    """The most resident bytes since the last call."""
    found = resident("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")
    return found


def peak_of_a_step(scope: str) -> int:
    """The lesser of the second and the third step, of this rank."""
    options = {"precision": PRECISION, "comm": Comm(tune="off"), "ranks_per_node": 1, "max_epochs": 1}
    options |= {"train": DataLoader(torch.zeros(NUM_STEPS, 1)), "use_distributed_sampler": False}
    fit(None, Masked, callbacks=at(on_train_batch_start=most_since_last), shard_update=scope, **options)  # imports
    before = resident("VmRSS")
    seen = fit(None, Masked, callbacks=at(on_train_batch_start=most_since_last), shard_update=scope, **options)
    return min(seen.looks["on_train_batch_start"][2:]) - before


def predicted(num_ranks: int, scope: str) -> float:
    """The planner's bytes."""
    with WithoutValues():
        network = Bert(**SIZES)
    first, whole = (step_bytes(network, [LENGTH], batch_size=size, precision=PRECISION) for size in (1, NUM_SEQUENCES))
    choices = MemoryChoices(
        states={PRECISION: StateBytes.of(precision=PRECISION, optimizer="lamb", copies_gradients=False)},
        activations={(PRECISION, False): (first, whole)},
        batch_size=NUM_SEQUENCES,
        numels=[one.numel() for one in network.parameters()],
        world_size=num_ranks,
    )
    return choices.need(PRECISION, NUM_SEQUENCES, sharing="world" if scope == "world" else "").total_bytes


def main(num_ranks: int, scope: str) -> None:
    """Print both, of the rank that needs most."""
    pool = RankPool(num_ranks=num_ranks)
    measured = max(pool.ranks(num_ranks).run(peak_of_a_step, scope, timeout_s=500.0))
    pool.close()
    expected = predicted(num_ranks, scope)
    print(f"{num_ranks} ranks, {scope}: {expected:,.0f} predicted, {measured:,.0f} measured, {expected / measured:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
