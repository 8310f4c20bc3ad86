"""Hydra callback of every recipe, called before Hydra makes a directory: `hydra.callbacks` of `conf/job.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from recipes.cli import launch, preflight, stdio


class BeforeRun(Callback):
    """Check of the machine, in one message. Protection from an end of standard output.

    Hydra writes into the run directory before it calls a recipe, and has no words for a directory that takes nothing.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check before a single job."""
        self._look(config, "run")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check before a sweep."""
        self._look(config, "sweep")

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Restore the streams."""
        stdio.restore_streams()

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Restore the streams."""
        stdio.restore_streams()

    def _look(self, config: DictConfig, mode: str) -> None:
        stdio.outlive_streams()
        with launch.short_errors():  # Hydra would only warn of another error than SystemExit
            config_values = {
                name: value for name, value in _plain(config).items() if name != "hydra"
            }
            preflight.check_secrets(config_values)
            folder = config.hydra[mode].dir
            if mode == "run" and launch.is_rank_zero() and "resume" in config_values:
                preflight.refuse_to_overwrite(
                    Path(folder),
                    resume=config_values["resume"],
                    overwrite=config_values.get("overwrite"),
                )
            preflight.check_environment(folder if launch.is_rank_zero() else None)


def _plain(config: DictConfig) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
