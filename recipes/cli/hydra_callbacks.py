"""Hydra callback of all recipes, which checks the environment before Hydra creates a run directory.

`conf/job.yaml` registers it under `hydra.callbacks`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from recipes.cli import launch, preflight, stdio


class BeforeRun(Callback):
    """Hydra callback that checks the environment and the run directory before a job or a sweep starts.

    It also lets the process continue if standard output is closed. The check must run early: Hydra writes into the run
    directory before it calls a recipe, and its error for a directory that is not writable is unclear.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the environment and the run directory before a single job."""
        self._check(config, "run")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the environment and the sweep directory before a sweep."""
        self._check(config, "sweep")

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Restore the original standard output and standard error after a single job."""
        stdio.restore_streams()

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Restore the original standard output and standard error after a sweep."""
        stdio.restore_streams()

    def _check(self, config: DictConfig, mode: str) -> None:
        stdio.outlive_streams()
        with launch.short_errors():  # Hydra turns errors other than SystemExit into warnings
            values = _values_without_hydra(config)
            preflight.check_secrets(values)
            folder = config.hydra[mode].dir
            if not launch.is_rank_zero():
                # Other ranks write nothing.
                preflight.check_environment(None)
                return
            if mode == "run" and "resume" in values:
                resume = values["resume"]
                overwrite = values.get("overwrite")
                preflight.refuse_to_overwrite(Path(folder), resume=resume, overwrite=overwrite)
            preflight.check_environment(folder)


def _values_without_hydra(config: DictConfig) -> dict[str, Any]:
    values = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
    values.pop("hydra", None)
    return values
