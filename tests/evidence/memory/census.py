"""Bytes per parameter that a training holds between two steps, by owner, taken from the tensors themselves."""

import ctypes
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid import HybridAllReduceStrategy  # and registers the names
from lightning_hybrid.optim import LAMB, LARS
from recipes.cli import ranges

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "lars": lambda params: LARS(params, lr=1e-3, fused=False),
    "lars_fused": lambda params: LARS(params, lr=1e-3, fused=True),  # on a CPU
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "lamb": lambda params: LAMB(params, lr=1e-3, fused=False),
    "lamb_fused": lambda params: LAMB(params, lr=1e-3, fused=True),
}
OWNERS = ("weights", "masters", "gradients", "optimizer", "communication and rest", "total")
NUM_STEPS = 4  # DDP builds its buckets again after the first
M_MMAP_THRESHOLD = -3  # of mallopt(3): from this size on a block has a mapping of its own, gone when it is freed
LARGE = 64 * 1024  # bytes
MAPS = Path("/proc/self/maps")


class Layers(pl.LightningModule):
    """Square layers under a squared loss, made within the fit, so that the count starts before them."""

    def __init__(self, width: int, depth: int, optimizer: str) -> None:
        super().__init__()
        self.width, self.depth, self.optimizer_name = width, depth, optimizer

    def configure_model(self) -> None:
        """Make the layers."""
        self.layers = nn.Sequential(*[nn.Linear(self.width, self.width) for _ in range(self.depth)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return a loss that reaches every parameter."""
        return self.layers(batch).float().square().mean()

    def train_dataloader(self) -> DataLoader[Any]:
        """Yield one sample a batch: activations are small next to the parameters."""
        return DataLoader(torch.randn(64, self.width), batch_size=1)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the optimizer of that name."""
        optimizer: torch.optim.Optimizer = OPTIMIZERS[self.optimizer_name](self.parameters())
        return optimizer


class Count(pl.Callback):
    """Callback that writes, after the last step, what is alive: by owner, and in total as the allocator sees it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Start before the first parameter exists."""
        self._profile: Any = None
        if trainer.strategy.root_device.type == "cuda":
            self._before = torch.cuda.memory_allocated()
        else:
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)
            self._profile = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
            )
            self._profile.__enter__()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count; gradients still exist, as they are dropped when the next step begins."""
        if trainer.global_step != NUM_STEPS:
            return
        if self._profile is None:
            total = torch.cuda.memory_allocated() - self._before
        else:
            self._profile.__exit__(None, None, None)
            total = sum(_alive(_allocations(self._profile)).values())
        masters = getattr(trainer.precision_plugin, "masters", None)
        twins = [] if masters is None else list(masters.pairs.values())
        parameters = list(pl_module.parameters())
        grads = [p.grad for p in parameters if p.grad is not None]
        grads += [twin._gradient for twin in twins if twin._gradient is not None]
        state = [
            value
            for of_one in trainer.optimizers[0].state.values()
            for value in of_one.values()
            if isinstance(value, Tensor)
        ]
        seen: set[int] = set()
        owned = {
            "weights": _bytes(parameters, seen),
            "masters": _bytes((twin.master for twin in twins), seen),
            "gradients": _bytes(grads, seen),
            "optimizer": _bytes(state, seen),
        }
        owned |= {"communication and rest": total - sum(owned.values()), "total": total}
        numel = sum(parameter.numel() for parameter in parameters)
        if trainer.is_global_zero:
            self.path.write_text(json.dumps({owner: held / numel for owner, held in owned.items()}))


def _allocations(profile: Any) -> list[tuple[int, int]]:
    """Yield `(address, bytes)` of each allocation of torch's profiler and `(address, -bytes)` of each free, in time."""
    events, found = list(profile.profiler.kineto_results.experimental_event_tree()), []
    while events:
        event = events.pop()
        events += event.children
        if event.typed[0].name == "Allocation":
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return [(address, size) for _, address, size in sorted(found)]


def _alive(allocations: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return, by address, the bytes of what is still allocated.

    The profiler sees only what its own thread frees. DDP's first buffers are at times let go last by a thread of the
    process group; so what a later allocation covers, and what is large and no longer mapped, has been freed as well.
    """
    held: dict[int, int] = {}
    for address, size in allocations:
        if size < 0:
            held.pop(address, None)
            continue
        # Two live allocations cannot overlap: what this one covers was freed by another thread.
        covered = [other for other, its in held.items() if other < address + size and address < other + its]
        for other in covered:
            del held[other]
        held[address] = size
    maps = [line.split(maxsplit=1)[0].split("-") for line in MAPS.read_text().splitlines()]
    mapped = [(int(first, 16), int(end, 16)) for first, end in maps]
    return {
        address: size
        for address, size in held.items()
        if size < LARGE or any(first <= address < end for first, end in mapped)
    }


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Count the bytes under `tensors` that are not in `seen`, and add them to it: views share memory."""
    held = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            held += storage.nbytes()
    return held


@dataclass(frozen=True, kw_only=True)
class Census:
    """Setup of the measurement: `num_ranks` processes with `depth` layers of `width` squared weights.

    `shard_update="node"`: the ranks share the update. `num_ranks` None is two, on CUDA no more than there are devices:
    one alone has no all-reduce to hold memory for.

    Raises:
        ValueError: `device` is "cpu", and the system is not Linux, which lists what is mapped.
    """

    device: str = "cpu"
    num_ranks: ranges.CountOrZero | None = None
    shard_update: Literal["off", "node"] | bool = "off"  # YAML reads `off` as a boolean
    width: ranges.Count = 512
    depth: ranges.Count = 8

    def __post_init__(self) -> None:
        if self.device == "cpu" and not MAPS.exists():
            raise ValueError(
                f"census.device (={self.device!r}) must be 'cuda' on a system without {MAPS}, where it is seen what a "
                "process has freed. Count on Linux, or on a GPU."
            )

    def take(self, precision: str, optimizer: str) -> dict[str, Any]:
        """Measure bytes per parameter of rank zero, by owner; in fresh processes."""
        held = self._fit(precision, optimizer)
        strategy = "hybrid_allreduce" if _is_ours(precision) else "ddp"
        if self.shard_update == "node":
            strategy = 'hybrid_allreduce, shard_update="node"'
        return {"precision": precision, "strategy": strategy, "optimizer": optimizer, "bytes_per_parameter": held}

    def _fit(self, precision: str, optimizer: str) -> dict[str, float]:
        # A process with a CUDA context cannot fork.
        how = "_fork" if self.device == "cpu" else "_spawn"
        chosen: dict[str, Any] = {"precision": precision}
        if precision == "16-mixed" and self.device == "cpu":  # by name Lightning would take bf16 there
            scaler = torch.amp.GradScaler("cpu")
            chosen = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "census.json"
            trainer = pl.Trainer(
                accelerator="cpu" if self.device == "cpu" else "gpu",
                devices=self.num_ranks or most_ranks(self.device),
                strategy=self._strategy(precision, how),
                max_steps=NUM_STEPS,
                callbacks=[Count(path)],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                **chosen,
            )
            trainer.fit(Layers(self.width, self.depth, optimizer))
            held: dict[str, float] = json.loads(path.read_text())
        return held

    def _strategy(self, precision: str, how: str) -> Any:
        if self.shard_update == "node":
            start = "fork" if self.device == "cpu" else "spawn"
            return HybridAllReduceStrategy(shard_update="node", start_method=start)
        return ("hybrid_allreduce" if _is_ours(precision) else "ddp") + how


def most_ranks(device: str) -> int:
    """Return two, or the number of CUDA devices where that is less.

    >>> most_ranks("cpu")
    2
    """
    return 2 if device == "cpu" else min(2, max(1, torch.cuda.device_count()))


def _is_ours(precision: str) -> bool:
    return precision in ("16-true", "bf16-true")


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Format the table: bytes per parameter, by owner."""
    lines = [f"| precision, strategy | optimizer | {' | '.join(OWNERS)} |", "|---|---|" + "---|" * len(OWNERS)]
    for row in rows:
        cells = [f"{row['bytes_per_parameter'][owner]:.1f}" for owner in OWNERS]
        lines.append(f"| {row['precision']}, {row['strategy']} | {row['optimizer']} | {' | '.join(cells)} |")
    return "\n".join(lines)
