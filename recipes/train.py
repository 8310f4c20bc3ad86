"""Command that trains a network: `python recipes/train.py`, with overrides of `conf/train.yaml`."""

import _path  # noqa: F401
import hydra
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.utilities import rank_zero_info
from omegaconf import DictConfig

from lightning_hybrid.callbacks import RunReport
from lightning_hybrid.callbacks import metrics as m
from recipes.cli import launch
from recipes.training import resume, tracking
from recipes.training.build import build


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(cfg: DictConfig) -> float:
    """Train and test the network, and return the test accuracy for the comparison of jobs in Hydra sweeps."""
    with launch.job(cfg) as trainers:
        with launch.short_errors(cfg):
            ckpt_path = resume.checkpoint(cfg)
            trainer, module, data = build(cfg, ckpt_path)
            tracking.begin(trainer, cfg, overrides=HydraConfig.get().overrides.task)
        trainers.append(trainer)
        rank_zero_info(f"The run directory is {cfg.run_dir}.")
        trainer.fit(module, data, ckpt_path=ckpt_path)
        trainer.test(module, data, verbose=False)
        tracking.send_report(trainer, cfg.run_dir)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RunReport) and trainer.is_global_zero:
                print(callback.table(trainer), flush=True)
        return float(trainer.callback_metrics.get(m.TEST_ACC, float("nan")))


if __name__ == "__main__":
    main()
