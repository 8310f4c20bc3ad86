"""Speed: updates against the memory's bandwidth, training against Lightning's own, training during decoding."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.data.images.imagenet import ImageNetDataModule
from lightning_hybrid.optim import LARS
from recipes.benchmarks.gradient_sets import GRADIENT_SETS, numel
from recipes.benchmarks.updates import ARMS, FLOOR_BYTES
from recipes.gpu.fits import trainer_for
from recipes.gpu.runner import Details, Given, NotHere
from recipes.networks.resnet import ResNet

UPDATE_BOUND = 1.3  # times the bytes over the bandwidth of a copy
NUM_UPDATES, NUM_SAMPLES = 20, 5
HEAD_START_CYCLES = 400_000_000  # 0.2 s at 2 GHz, in which the host enqueues all updates


# ---- updates ---------------------------------------------------------------------------------------------------------


def verdict(given: Given, *, is_fast: bool) -> str:
    """Return FAST or SLOW for a GPU; on a CPU, where nothing is measured, PASS."""
    return "PASS" if not given.on_cuda else "FAST" if is_fast else "SLOW"


def updates(given: Given) -> Details:
    """Time updates and torch's on the device; compare with their bytes at the rate of a copy.

    On CUDA: many updates between two events, behind a kernel that lets the host run ahead. LARS must take no
    more than 1.3 times their bytes.
    """
    device = torch.device(given.device)
    rate = device_copy_rate(device, num_bytes=2**30 if given.on_cuda else 2**24)
    case = "resnet50" if given.on_cuda else "linear_8mib"
    shapes, table = GRADIENT_SETS[case](), list[Details]()
    for arm in ("sgd_fused_fp32", "lars_fused", "adamw_fused_fp32", "lamb"):
        num_bytes = FLOOR_BYTES[arm]
        device_s, host_s = seconds_of(ARMS[arm](shapes, device), device)
        floor_s = num_bytes * numel(shapes) / rate
        row: Details = {"arm": arm, "parameters": case, "bytes per parameter": num_bytes}
        row |= {"device ms": round(1e3 * device_s, 4), "host ms": round(1e3 * host_s, 4)}
        table.append(row | {"GB/s": round(num_bytes * numel(shapes) / device_s / 1e9, 1)})
        table[-1]["x bytes over bandwidth"] = round(device_s / floor_s, 2)
    ratios = {row["arm"]: row["x bytes over bandwidth"] for row in table}
    is_fast = ratios["lars_fused"] <= UPDATE_BOUND
    message = ", ".join(f"{arm} {ratio}" for arm, ratio in ratios.items())
    return {
        "status": verdict(given, is_fast=is_fast),
        "message": f"copy {rate / 1e9:.0f} GB/s; times its bytes: {message}",
        "table": table,
        "copy_bytes_per_s": rate,
    }


def device_copy_rate(device: torch.device, *, num_bytes: int) -> float:
    """Measure the bytes per second, read and written, of copying a tensor."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)[0]


def seconds_of(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Time the device, and the host that enqueues: medians over samples, each of many calls."""
    for _ in range(3):  # compiles, and touches memory
        work()
    device_s, host_s = [], []
    for _ in range(NUM_SAMPLES):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            # The device waits until all updates are queued: its time has no gap in which the host prepares.
            torch.cuda._sleep(HEAD_START_CYCLES)
            begin.record()
            start_s = time.perf_counter()
            for _ in range(NUM_UPDATES):
                work()
            host_s.append((time.perf_counter() - start_s) / NUM_UPDATES)
            end.record()
            end.synchronize()
            device_s.append(begin.elapsed_time(end) / 1e3 / NUM_UPDATES)
        else:
            start_s = time.perf_counter()
            work()
            device_s.append(time.perf_counter() - start_s)
            host_s.append(device_s[-1])
    return statistics.median(device_s), statistics.median(host_s)


# ---- ResNet-50 -------------------------------------------------------------------------------------------------------


class SpeedModule(pl.LightningModule):
    """ResNet that trains on random images in the device's memory."""

    def __init__(self, *, is_ours: bool, size: Details) -> None:
        super().__init__()
        self.net = ResNet(depth=50, width=size["width"]).to(memory_format=torch.channels_last)  # type: ignore[call-overload,unused-ignore]
        self.is_ours = is_ours

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the cross entropy."""
        return F.cross_entropy(self.net(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make LARS by kernels, or for Lightning's arm the cheapest optimizer of torch."""
        if self.is_ours:
            return LARS(self.parameters(), lr=1.0, weight_decay=5e-5, fused=True)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5, fused=True)


class _Clock(pl.Callback):
    """Images per second after the first steps, by a clock that waits for the device."""

    def __init__(self, size: Details) -> None:
        self.size, self.start_s, self.images_per_s = size, 0.0, 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        done = trainer.global_step
        if done in (self.size["num_warmup"], self.size["num_warmup"] + self.size["num_steps"]):
            if trainer.strategy.root_device.type == "cuda":
                torch.cuda.synchronize()
            now_s, first_s = time.perf_counter(), self.start_s
            self.start_s = now_s
            self.images_per_s = self.size["num_steps"] * self.size["batch"] / (now_s - first_s)


class _Same:
    """Loader of the same batch again and again."""

    def __init__(self, batch: list[Tensor], num_batches: int) -> None:
        self.batch, self.num_batches = batch, num_batches

    def __iter__(self) -> Iterator[list[Tensor]]:
        return (list(self.batch) for _ in range(self.num_batches))


def _size(given: Given) -> Details:
    if not given.on_cuda:
        return {"width": 0.125, "batch": 4, "pixels": 32, "num_warmup": 1, "num_steps": 2, "num_rounds": 1}
    is_large = torch.cuda.get_device_properties(0).total_memory > 40 * 2**30
    batch = 256 if is_large else 64
    return {"width": 1.0, "batch": batch, "pixels": 224, "num_warmup": 15, "num_steps": 40, "num_rounds": 3}


def _images_per_s(given: Given, size: Details, *, is_ours: bool) -> float:
    gc.collect()  # the last trainer and its module refer to one another
    device, clock = torch.device(given.device), _Clock(size)
    images = torch.randn(size["batch"], 3, size["pixels"], size["pixels"], device=device)
    batch = [images.contiguous(memory_format=torch.channels_last), torch.randint(1000, (size["batch"],), device=device)]
    # By the name of "16-mixed" Lightning would take bf16 on a CPU: there both do.
    precision = ("16-true" if is_ours else "16-mixed") if given.on_cuda else ("bf16-true" if is_ours else "bf16-mixed")
    strategy: Any = HybridAllReduceStrategy() if is_ours else "auto"
    num_steps = size["num_warmup"] + size["num_steps"]
    settings = {"strategy": strategy, "max_steps": num_steps, "max_epochs": -1, "deterministic": False}
    trainer = trainer_for(given, precision, benchmark=True, callbacks=[clock], **settings)
    trainer.fit(SpeedModule(is_ours=is_ours, size=size), _Same(batch, num_steps))
    return clock.images_per_s


def resnet50(given: Given) -> Details:
    """Measure images per second of ResNet-50 in turns: 16-true with LARS, and Lightning's 16-mixed with fused SGD."""
    size, rates = _size(given), dict[str, list[float]](ours=[], lightning=[])
    for _ in range(size["num_rounds"]):
        for arm, samples in rates.items():
            samples.append(_images_per_s(given, size, is_ours=arm == "ours"))
    ours, theirs = (statistics.median(samples) for samples in rates.values())
    rows = {arm: [round(sample, 1) for sample in samples] for arm, samples in rates.items()}
    table = [{"arm": arm, "images/s, median": statistics.median(row), "rounds": row} for arm, row in rows.items()]
    message = f"{ours:.0f} images/s, Lightning's mixed precision {theirs:.0f}: {ours / theirs:.2f} times"
    return {
        "status": verdict(given, is_fast=ours > theirs),
        "message": message if given.on_cuda else f"{message} (a tiny network: no measurement)",
        "table": table,
        "size": size,
    }


# ---- decoding --------------------------------------------------------------------------------------------------------


def decoding(given: Given) -> Details:
    """Measure images per second of training on images in memory, alone and while threads of this process decode.

    The decoded images are dropped: what is seen is what the threads take from the thread that trains.
    """
    size = _size(given)
    batches = _decoded(given, size)
    alone = _images_per_s(given, size, is_ours=True)
    count, stop = [0], threading.Event()

    def decode() -> None:
        for each in batches():
            count[0] += len(each[1])
            if stop.is_set():
                return

    thread = threading.Thread(target=decode)
    thread.start()
    start_s = time.perf_counter()
    try:
        both = _images_per_s(given, size, is_ours=True)
    finally:
        stop.set()
        thread.join()
    decoded = count[0] / (time.perf_counter() - start_s)
    only_s, num_only = time.perf_counter(), 0
    for each in batches():
        num_only += len(each[1])
        if time.perf_counter() - only_s > (4.0 if given.on_cuda else 0.5):
            break
    only = num_only / (time.perf_counter() - only_s)
    table = [
        {"what": "training alone", "images/s": round(alone, 1)},
        {"what": "training during decoding", "images/s": round(both, 1)},
        {"what": "decoding during training", "images/s": round(decoded, 1)},
        {"what": "decoding alone", "images/s": round(only, 1)},
    ]
    message = f"training has {both / alone:.0%} of its rate during decoding, decoding {decoded / only:.0%} of its own"
    return {"message": message, "table": table}


def _decoded(given: Given, size: Details) -> Callable[[], Iterable[Sequence[Tensor]]]:
    """Make batches without end, as `ImageNetDataModule` decodes them, from photographs that libraries contain."""
    try:
        from recipes.benchmarks.photos import write_photos
    except ImportError as error:
        raise NotHere(f"the photographs come with scikit-learn and matplotlib: {error}") from error
    num_images = 512 if given.on_cuda else 16
    root = given.folder / "photos"
    write_photos(root, num_train=num_images, num_val=2, num_classes=2)
    data = ImageNetDataModule(
        root=str(root),
        global_batch_size=min(size["batch"], 64),
        seed=0,
        num_classes=2,
        image_size=size["pixels"],
        eval_resize=size["pixels"] + 32,
    )
    data.setup("fit")

    def batches() -> Iterable[Sequence[Tensor]]:
        while True:
            yield from data.train_dataloader()

    return batches
