"""Check of the dynamic loss scale together with a learning-rate schedule that advances every step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.precision.loss_scale import DynamicLossScale
from recipes.gpu.fits import NUM_BATCHES, NUM_EPOCHS, Small, short_fit
from recipes.gpu.runner import CheckRequest, Details

NUM_STEPS = NUM_BATCHES * NUM_EPOCHS
LOG_EVERY = 3
MAX_RATE = 0.5


class Scheduled(Small):
    """Small network with a `OneCycleLR` schedule that advances after each batch."""

    def configure_optimizers(self) -> Any:
        """Create the optimizer, and a schedule of its learning rate and momentum."""
        optimizer = super().configure_optimizers()
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": one_cycle(optimizer), "interval": "step"},
        }


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
    """Create a `OneCycleLR` schedule for an optimizer."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=MAX_RATE, total_steps=NUM_STEPS)


class _Rates(pl.Callback):
    """Callback that records the learning rate and the number of skipped steps every few steps."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}
        self.num_skipped: dict[int, int] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Record the learning rate and the number of skipped steps, if this is a logged step."""
        if trainer.global_step % LOG_EVERY == 0:
            self.rates[trainer.global_step] = trainer.optimizers[0].param_groups[0]["lr"]
            self.num_skipped[trainer.global_step] = int(trainer.precision_plugin.num_skipped_steps)  # type: ignore[attr-defined]


def rates_by_hand(num_steps: int) -> list[float]:
    """Calculate the expected learning rates before the first step and after each of `num_steps` steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    schedule = one_cycle(optimizer)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(num_steps):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def dynamic_scale(request: CheckRequest) -> Details:
    """Check that training skips exactly one step if the initial loss scale is too high.

    The learning-rate schedule must not advance in the skipped step.
    """
    by_hand = rates_by_hand(NUM_STEPS)
    num_skipped: dict[str, int] = {}
    for optimizer, fused in (("lars", False), ("sgd", True)):
        read = _Rates()
        module = Scheduled(optimizer, fused=fused)
        scale = DynamicLossScale(init_scale=2.0**24)
        strategy = HybridAllReduceStrategy(loss_scale=scale)
        short_fit(
            request,
            module,
            "16-true",
            strategy=strategy,
            callbacks=[read],
            log_every_n_steps=LOG_EVERY,
        )
        assert list(read.rates) == list(range(LOG_EVERY, NUM_STEPS + 1, LOG_EVERY)), (
            "The rates must be recorded once at each logged step."
        )
        for step, rate in read.rates.items():
            expected = by_hand[step - read.num_skipped[step]]
            assert rate == expected, (
                f"With {optimizer}, the learning rate after {step} steps, of which "
                f"{read.num_skipped[step]} were skipped, must be {expected}, but is {rate}."
            )
        num_skipped[optimizer] = read.num_skipped[NUM_STEPS]
        # One step at a scale of 2**24 is skipped, and none afterwards, because the largest gradient is then known.
        assert num_skipped[optimizer] == 1, (
            f"With {optimizer}, one step must be skipped, but {num_skipped[optimizer]} were."
        )
        losses = torch.stack(module.losses)
        assert losses[-4:].mean() < losses[:4].mean(), (
            f"With {optimizer}, the loss must decrease, but it was {losses.tolist()}."
        )
    return {
        "message": f"The schedule was followed, and 1 of {NUM_STEPS} steps was skipped.",
        "num_skipped": num_skipped,
    }
