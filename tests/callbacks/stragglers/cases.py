"""Runs with one slow rank and healthy runs: reports of `StragglerMonitor`, and the number of windows until then.

    python -m tests.callbacks.stragglers.cases --ranks 2 4 --repeats 5
    python -m tests.callbacks.stragglers.cases --healthy 200 --busy 2 --ranks 2
    python -m tests.callbacks.stragglers.cases --inside 20           microseconds of its own code in each step

Each rank trains a small network, with sleeps in place of long computations, so that the times of a case are known on
any machine. Rows are printed as JSON.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hybrid.callbacks import StragglerMonitor
from lightning_hybrid.callbacks.stragglers.measurement import StepMeasurement
from lightning_hybrid.comm.stats.trace import CommTrace
from tests import toy
from tests.rank_pool import RankPool
from tests.scenes import this_rank

WINDOW = 10  # steps
MOST_WINDOWS = 20


@dataclass(frozen=True, kw_only=True)
class Delays:
    """Seconds of each phase on every rank, and additional seconds of one phase on one rank."""

    phase: str = ""
    extra_s: float = 0.0
    rank: int = -1
    forward_s: float = 0.02
    backward_s: float = 0.02

    def seconds(self, phase: str) -> float:
        """Return the seconds for which this rank sleeps in a phase."""
        usual_s = {"forward": self.forward_s, "backward": self.backward_s}.get(phase, 0.0)
        if phase == self.phase and this_rank() == self.rank:
            return usual_s + self.extra_s
        return usual_s


def cases(rank: int) -> dict[str, Delays]:
    """Return the cases in which a rank is slow."""
    return {
        "200 ms in backward": Delays(phase="backward", extra_s=0.2, rank=rank),
        "150 ms in the loader": Delays(phase="input", extra_s=0.15, rank=rank),
        "forward 30 % slower": Delays(phase="forward", extra_s=0.06, rank=rank, forward_s=0.2),
        "100 ms in the optimizer": Delays(phase="optimizer", extra_s=0.1, rank=rank),
        "100 ms in a callback": Delays(phase="callbacks", extra_s=0.1, rank=rank),
    }


def sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        sleep(ctx.seconds)
        return gradient, None


class SGD(torch.optim.SGD):
    delays = Delays()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        sleep(self.delays.seconds("optimizer"))
        return super().step(closure)


class Slow(toy.Toy):
    """Toy with the times of a case."""

    def __init__(self, delays: Delays) -> None:
        super().__init__()
        self.delays = delays

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        sleep(self.delays.seconds("forward"))
        loss = super().training_step(batch, batch_idx)
        return _Backward.apply(loss, self.delays.seconds("backward"))

    def configure_optimizers(self) -> SGD:
        optimizer = SGD(self.parameters(), lr=0.01)
        optimizer.delays = self.delays
        return optimizer


class SlowCallback(pl.Callback):
    def __init__(self, delays: Delays) -> None:
        self.delays = delays

    def on_train_batch_end(self, *args: Any) -> None:
        sleep(self.delays.seconds("callbacks"))


class SlowBlobs(toy.Blobs):
    """Data set in which the last sample of each batch is late."""

    def __init__(self, delays: Delays, num_samples: int, batch_size: int) -> None:
        super().__init__(num_samples)
        self.delays = delays
        self.batch_size = batch_size
        self.num_read = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_read += 1
        if self.num_read % self.batch_size == 0:
            sleep(self.delays.seconds("input"))
        return super().__getitem__(index)


class StopsWhenNamed(pl.Callback):
    """Callback that ends the fit on all ranks once rank zero has reported a rank."""

    def __init__(self, monitor: StragglerMonitor) -> None:
        self.monitor = monitor

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step % self.monitor.every_n_steps == 0:
            is_named = trainer.strategy.broadcast(bool(self.monitor.messages))
            trainer.should_stop = trainer.should_stop or is_named


def run(
    delays: Delays,
    *,
    num_windows: int = MOST_WINDOWS,
    window: int = WINDOW,
    is_stopped: bool = True,
    more: Sequence[pl.Callback] = (),
    **settings: Any,
) -> list[tuple[int, str]]:
    """Train, and return the messages of rank zero with their steps."""
    monitor = StragglerMonitor(every_n_steps=window)
    callbacks: list[Any] = [monitor, *more, SlowCallback(delays)]
    if is_stopped:
        callbacks.append(StopsWhenNamed(monitor))
    batch_size = 4
    blobs = SlowBlobs(delays, 40 * batch_size * torch.distributed.get_world_size(), batch_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = toy.trainer(
            max_epochs=-1, max_steps=num_windows * window, callbacks=callbacks, **settings
        )
        trainer.fit(Slow(delays), DataLoader(blobs, batch_size=batch_size))
    return monitor.messages


def is_right(delays: Delays, messages: list[tuple[int, str]]) -> bool:
    """Return whether there is a single message, which names the slow rank and its phase."""
    words = {"input": "data", "callbacks": "callbacks", "optimizer": "optimizer"}
    phase = words.get(delays.phase, delays.phase)
    return len(messages) == 1 and all(
        word in messages[0][1] for word in (f"rank {delays.rank} on host", phase)
    )


def _spin() -> None:
    while True:
        pass


@contextmanager
def busy_loops(number: int) -> Any:
    """Run processes that use one core each."""
    processes = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(number)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


class Toggled(StragglerMonitor):
    """Monitor that is off in every second block of steps, and that records the seconds of each block."""

    block = 50

    def __init__(self) -> None:
        super().__init__(every_n_steps=self.block)
        self.blocks_s: list[float] = []
        self.began_s = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        is_on = len(self.blocks_s) % 2 == 0
        if is_on:
            super().on_train_batch_end(trainer, *args, **kwargs)
        if trainer.global_step % self.block == 0:
            now_s = time.perf_counter()
            self.blocks_s.append(now_s - self.began_s)
            measurement = self._measurement
            assert measurement is not None
            if is_on:
                measurement.detach()
            else:
                self._last_step = trainer.global_step
                measurement.attach()
            self.began_s = time.perf_counter()


def cost(num_pairs: int, precision: str) -> list[float]:
    """Return the seconds of blocks of steps, alternating with and without the monitor, after one warm-up block each."""
    monitor = Toggled()
    max_steps = monitor.block * 2 * (num_pairs + 1)
    # A single epoch, because the end of an epoch would only fall into blocks of one kind.
    loader = toy.loader(8 * max_steps * torch.distributed.get_world_size())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = toy.trainer(
            max_epochs=-1,
            max_steps=max_steps,
            callbacks=[monitor],
            precision=precision,
        )
        trainer.fit(toy.Toy(), loader)
    return monitor.blocks_s[2:]


class InsideTimer:
    """Timer of the monitor's code, without the functions of Lightning that it calls."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._began_s: float | None = None

    def inside(self, function: Any) -> Any:
        """Return the function with its time counted."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._began_s is not None:  # within another function that counts
                return function(*args, **kwargs)
            self._began_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.total_s += time.perf_counter() - self._began_s
                self._began_s = None

        return timed

    def hook(self, function: Any) -> Any:
        """Return a hook around a function of Lightning that counts only the hook's own time."""

        def timed(measurement: Any, original: Any) -> Any:
            return self.inside(function)(measurement, self._outside(original))

        return timed

    def _outside(self, function: Any) -> Any:
        def paused() -> Any:
            assert self._began_s is not None
            self.total_s += time.perf_counter() - self._began_s
            result = function()
            self._began_s = time.perf_counter()
            return result

        return paused


class Inside(StragglerMonitor):
    """Monitor that records the time of its own code in each window, and the time of the window."""

    def __init__(self, timer: InsideTimer) -> None:
        super().__init__()
        self.timer = timer
        self.windows: list[tuple[float, float]] = []
        self.began_s = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(trainer, *args, **kwargs)
        if trainer.global_step % self.every_n_steps == 0:
            now_s = time.perf_counter()
            self.windows.append((self.timer.total_s, now_s - self.began_s))
            self.timer.total_s = 0.0
            self.began_s = now_s


def inside(num_windows: int, precision: str) -> list[tuple[float, float]]:
    """Return the seconds in the monitor's code and the seconds of each window, after a warm-up window."""
    timer = InsideTimer()
    monitor = Inside(timer)
    max_steps = monitor.every_n_steps * (num_windows + 1)
    loader = toy.loader(8 * max_steps * torch.distributed.get_world_size())
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(CommTrace, "enter", timer.inside(CommTrace.enter))
        patch.setattr(StepMeasurement, "_on_forward", timer.inside(StepMeasurement._on_forward))
        for name in ("_before_batch", "_before_fetch", "_after_fetch"):
            patch.setattr(StepMeasurement, name, timer.hook(getattr(StepMeasurement, name)))
        of_callback = StragglerMonitor.on_train_batch_end
        patch.setattr(StragglerMonitor, "on_train_batch_end", timer.inside(of_callback))
        trainer = toy.trainer(
            max_epochs=-1, max_steps=max_steps, callbacks=[monitor], precision=precision
        )
        trainer.fit(toy.Toy(), loader)
    return monitor.windows[1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside the ranks")
    parser.add_argument("--healthy", type=int, default=0, help="windows without a slow rank")
    parser.add_argument("--cost", type=int, default=0, help="pairs of blocks with and without")
    parser.add_argument("--inside", type=int, default=0, help="windows, timed inside the monitor")
    parser.add_argument("--sleep-ms", type=float, default=20.0, help="in forward, and in backward")
    parser.add_argument("--window", type=int, default=WINDOW, help="steps")
    parser.add_argument("--precision", default="32-true")
    options = parser.parse_args()
    pool = RankPool(max(options.ranks))
    with busy_loops(options.busy):
        for num_ranks in options.ranks:
            for row in rows(pool, num_ranks, options):
                print(json.dumps(row), flush=True)
    pool.close()


def rows(pool: RankPool, num_ranks: int, options: Any) -> Any:
    ranks = pool.ranks(num_ranks)
    common = {"ranks": num_ranks, "busy": options.busy, "precision": options.precision}
    if options.cost:
        blocks_s = ranks.run(cost, options.cost, options.precision, timeout_s=3000)[0]
        with_monitor_s = blocks_s[::2]
        without_s = blocks_s[1::2]
        ratios = [on / off for on, off in zip(with_monitor_s, without_s, strict=True)]
        yield common | {
            "load of the machine": round(os.getloadavg()[0], 1),
            "pairs": options.cost,
            "ms per step without": 1e3 * statistics.median(without_s) / Toggled.block,
            "median ratio": statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios, n=4),
        }
        return
    if options.inside:
        windows = ranks.run(inside, options.inside, options.precision, timeout_s=3000)[0]
        steps = Toggled.block
        in_monitor_us = [1e6 * in_monitor_s / steps for in_monitor_s, _ in windows]
        yield common | {
            "load of the machine": round(os.getloadavg()[0], 1),
            "windows": options.inside,
            "us per step in the monitor": round(statistics.median(in_monitor_us), 1),
            "quartiles": [round(value, 1) for value in statistics.quantiles(in_monitor_us, n=4)],
            "ms per step": round(1e3 * statistics.median(s for _, s in windows) / steps, 2),
        }
        return
    if options.healthy:
        began_s = time.monotonic()
        sleep_s = options.sleep_ms / 1e3
        messages = ranks.run(_healthy, options.healthy, options.window, sleep_s, timeout_s=3000)[0]
        seconds = round(time.monotonic() - began_s, 1)
        yield common | {
            "load of the machine": round(os.getloadavg()[0], 1),
            "healthy windows": options.healthy,
            "steps of a window": options.window,
            "sleep ms": options.sleep_ms,
            "messages": messages,
            "s": seconds,
        }
        return
    for repeat in range(options.repeats):
        for name, delays in cases(repeat % num_ranks).items():
            began_s = time.monotonic()
            messages = ranks.run(_case, delays, options.window, options.precision, timeout_s=900)[0]
            yield common | {
                "load of the machine": round(os.getloadavg()[0], 1),
                "case": name,
                "slow rank": delays.rank,
                "is right": is_right(delays, messages),
                "windows": messages[0][0] / options.window if messages else None,
                "messages": messages,
                "s": round(time.monotonic() - began_s, 1),
            }


def _case(delays: Delays, window: int, precision: str) -> list[tuple[int, str]]:
    return run(Delays(**asdict(delays)), window=window, precision=precision)


def _healthy(num_windows: int, window: int, sleep_s: float) -> list[tuple[int, str]]:
    delays = Delays(forward_s=sleep_s, backward_s=sleep_s)
    return run(delays, num_windows=num_windows, window=window, is_stopped=False)


if __name__ == "__main__":
    main()
