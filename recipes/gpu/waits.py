"""Checks that CUDA streams never read data too early, and that training steps never make the host wait."""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hybrid.checkpoint.host_copy import HostCopies
from lightning_hybrid.comm import CommEngine
from recipes.gpu.fits import NUM_BATCHES, Small, loader, same_bits, short_fit
from recipes.gpu.runner import ROOT, CheckRequest, Details, NotHere

TEN_MS_OF_CYCLES = 20_000_000  # at 2 GHz
_OWN = (__file__, warnings.__file__)


def waits(request: CheckRequest) -> Details:
    """Delay writes on CUDA streams to check that no other stream reads the data too early.

    Writes are delayed by 10 ms and change the values. The check covers the results of all-reduces, gradients in
    backward, prefetched batches and copies for checkpoints. Each training run must be bit-identical to a run in which
    the host synchronizes with the device at every delayed write.
    """

    def late(*, is_safe: bool) -> dict[str, dict[str, Tensor]]:
        if is_safe:
            pause = _synchronize
        else:
            pause = _pause

        def doubled(tensor: Tensor) -> Tensor:
            pause(request)
            doubled = tensor * 2
            if is_safe:
                _synchronize(request)
            return doubled

        def summed(flat: Tensor) -> Tensor:
            return flat.copy_(doubled(flat))

        batches = _Doubled(loader(), doubled)
        with _finishing_with(summed):
            sums = short_fit(request, Small(), "16-true", max_epochs=1)
        backward = short_fit(request, Small(on_hidden=doubled), "16-true", max_epochs=1)
        prefetched = short_fit(request, Small(), "16-true", max_epochs=1, data=batches)
        return {"the sum": sums, "backward": backward, "the prefetcher": prefetched}

    quick = late(is_safe=False)
    safe = late(is_safe=True)
    for kind, weights in quick.items():
        same_bits(weights, safe[kind], f"With writes delayed by 10 ms in {kind}")
    device = torch.device(request.device)
    weight = torch.ones(1 << 20, device=device)
    host = HostCopies()
    _pause(request)
    copied = host.take({"weight": weight.add_(1)})["weight"]
    weight.add_(1)
    host.wait()
    assert (copied == 2).all(), (
        f"The copy for a checkpoint must contain only 2, but contains {copied.unique().tolist()}."
    )
    if not request.on_cuda:
        raise NotHere(
            "A CPU has no streams, so only the arithmetic was checked, and it is correct."
        )
    return {
        "message": "All-reduces, backward, prefetcher and checkpoint copies wait for late writes."
    }


class _Doubled:
    """Loader that changes each batch on the CUDA stream that the prefetcher uses for copies."""

    def __init__(self, batches: DataLoader, change: Callable[[Tensor], Tensor]) -> None:
        self.batches = batches
        self.change = change

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def on_device(self, batch: Any) -> Any:
        """Change the images of a batch on the current stream, which is that of `DevicePrefetcher`."""
        return [self.change(batch[0]), batch[1]]


@contextmanager
def _finishing_with(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Context manager that calls a function with the result of every all-reduce when it finishes."""
    original = CommEngine.submit

    def submit(self: CommEngine, flat: Tensor, **settings: Any) -> Any:
        finish = settings.pop("finish", lambda flat: flat)
        return original(self, flat, finish=lambda flat: finish(change(flat)), **settings)

    CommEngine.submit = submit  # type: ignore[method-assign]
    try:
        yield
    finally:
        CommEngine.submit = original  # type: ignore[method-assign]


def _pause(request: CheckRequest) -> None:
    if request.on_cuda:
        torch.cuda._sleep(TEN_MS_OF_CYCLES)
    else:
        time.sleep(1e-4)


def _synchronize(request: CheckRequest) -> None:
    if request.on_cuda:
        torch.cuda.synchronize()


# ---- host synchronization --------------------------------------------------------------------------------------------


class _Watches(pl.Callback):
    """Callback that counts device synchronizations by source line, in batches 4 to 6 of an epoch."""

    def __init__(self, request: CheckRequest) -> None:
        self.request = request
        self.places = Counter[str]()
        self._catching = warnings.catch_warnings()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx != 4:
            return
        self._catching.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._note
        if self.request.on_cuda:
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if args[-1] != NUM_BATCHES - 2:
            return
        if self.request.on_cuda:
            torch.cuda.set_sync_debug_mode("default")
        self._catching.__exit__(None, None, None)

    def _note(self, message: Any, *args: Any, **kwargs: Any) -> None:
        """Count the source line that caused a synchronization warning, ignoring frames inside torch."""
        if "synchroniz" in str(message):
            frames = [
                f
                for f in traceback.extract_stack()
                if "/torch/" not in f.filename and f.filename not in _OWN
            ]
            path = frames[-1].filename.rpartition("site-packages/")[2].removeprefix(f"{ROOT}/")
            self.places[f"{path}:{frames[-1].lineno}"] += 1


def who_waits(request: CheckRequest) -> Details:
    """Check that this library never synchronizes with the device during a training step.

    Three steps per optimizer are observed. The table lists all source lines that synchronize.
    """
    table: list[Details] = []
    for optimizer in ("lars", "lamb", "sgd"):
        watch = _Watches(request)
        short_fit(
            request,
            Small(optimizer),
            "16-true",
            max_epochs=1,
            callbacks=[watch],
            deterministic=False,
        )
        table += [
            {"optimizer": optimizer, "where": location, "times": times}
            for location, times in watch.places.items()
        ]
    ours = [
        f"{row['where']} ({row['optimizer']})"
        for row in table
        if row["where"].startswith("lightning_hybrid/")
    ]
    if not request.on_cuda:
        raise NotHere("A CPU device never blocks a step, so only the training runs were checked.")
    assert not ours, (
        f"These lines of the library wait for the device during a step: {', '.join(ours)}."
    )
    return {
        "message": f"{len(ours)} lines of this library and {len(table) - len(ours)} others wait for the device.",
        "table": table,
    }
