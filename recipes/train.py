"""Train a network: `python recipes/train.py`, or any part of `conf/train.yaml` in other words after it."""

import os
import sys
from pathlib import Path

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is imported: ranks share the cores. Yours wins if it is set.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `recipes` is not installed

import hydra
import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch.utilities import rank_zero_info
from omegaconf import DictConfig
from torch import nn

from lightning_hybrid import metrics as m
from lightning_hybrid.callbacks import RunReport
from lightning_hybrid.models import correct_momentum_
from recipes.cli import config_check, launch
from recipes.cli.world import batch_line, check_world
from recipes.training import keys, mfu, resume, tracking
from recipes.training.classifier import Classifier

launch.register_resolvers()

OPTIONS = "warmup_epochs warmup_steps label_smoothing trust_ratio decay_excluded channels_last compile".split()


def build(cfg: DictConfig, ckpt_path: str | None = None) -> tuple[pl.Trainer, Classifier, pl.LightningDataModule]:
    """Everything a run needs, checked as far as it can be before any process is started."""
    config_check.check(cfg, keys.TRAIN_KEYS)
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    data: pl.LightningDataModule = instantiate(cfg.data)
    optimizer, schedule = instantiate(cfg.optim), instantiate(cfg.schedule)
    schedule(optimizer([nn.Parameter(torch.zeros(1))]), total_steps=2, warmup_steps=1)  # a wrong argument shows here
    trainer: pl.Trainer = instantiate(
        cfg.trainer,
        strategy=instantiate(cfg.strategy),
        callbacks=[resume.SameCheckpoint(ckpt_path), *filter(None, map(instantiate, cfg.callbacks.values()))],
        logger=tracking.logger_of(cfg, ckpt_path=ckpt_path) or False,
    )
    check_world(trainer)
    rank_zero_info(batch_line(cfg.global_batch_size, trainer.world_size, trainer.accumulate_grad_batches))
    model = keys.model_for(data, cfg)
    correct_momentum_(model, accumulate_grad_batches=trainer.accumulate_grad_batches)
    mfu.fill_in(trainer, model, cfg)
    module = Classifier(
        model=model,
        optimizer=optimizer,
        weight_decay=cfg.optim.weight_decay,
        schedule=schedule,
        num_classes=cfg.model.num_classes,
        **{name: cfg[name] for name in OPTIONS},
    )
    return trainer, module, data


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(cfg: DictConfig) -> float:
    """Fit, then test the network as training left it; the accuracy is what a sweep compares."""
    with launch.job() as trainers:
        with launch.short_errors():
            ckpt_path = resume.checkpoint(cfg)
            trainer, module, data = build(cfg, ckpt_path)
            tracking.begin(trainer, cfg, overrides=HydraConfig.get().overrides.task)
        trainers.append(trainer)
        rank_zero_info(f"run directory: {cfg.run_dir}")
        trainer.fit(module, data, ckpt_path=ckpt_path)
        trainer.test(module, data, verbose=False)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RunReport) and trainer.is_global_zero:
                print(callback.table(trainer), flush=True)
        return float(trainer.callback_metrics.get(m.TEST_ACC, float("nan")))


if __name__ == "__main__":
    main()
