"""Command for hyper-parameter search: `python recipes/search.py axes.optim.lr.high=50`.

See hyperparams/README.md.
"""

from functools import partial
from pathlib import Path
from typing import Any, cast

import _path  # noqa: F401
import hydra
import optuna
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from recipes.cli import config_check, launch
from recipes.cli.ranges import Count, NotNegative
from recipes.hyperparams.axes import axes_from, overrides_of
from recipes.hyperparams.report import SearchReport
from recipes.hyperparams.runner import TrialRunner
from recipes.hyperparams.search import Mode, Search
from recipes.hyperparams.trial import TrainTrial, configured, num_ranks_of, settings_of

launch.register_resolvers()

KEYS: dict[str, Any] = {
    "objective": str,
    "mode": Mode,
    "trial": list[str],
    "base": list[str],
    "axes": dict,
    "pruner": BasePruner,
    "sampler": BaseSampler,
    "num_trials": Count,
    "num_workers": Count,
    "budget_s": NotNegative | None,
    "run_dir": str,
}


@hydra.main(version_base="1.3", config_path="../conf", config_name="search")
def main(cfg: DictConfig) -> float | None:
    """Run the remaining trials of the search, write its table and figure, and return the best objective."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
        folder = Path(cfg.run_dir)
        base = (*config["base"], *config["trial"])
        axes = axes_from(config["axes"])
        first_point = {axis.key: axis.low for axis in axes}
        trial_config = configured([*base, *overrides_of(first_point)], run_dir="-")
        sampler = instantiate(cfg.sampler)
        if isinstance(sampler, partial):
            sampler = sampler(axes)
        search = Search(
            folder,
            axes,
            sampler=sampler,
            num_trials=cfg.num_trials,
            pruner=instantiate(cfg.pruner),
            mode=cfg.mode,
            settings=settings_of(base, objective=cfg.objective, mode=cfg.mode),
        )
        report = SearchReport(axes=axes, objective=cfg.objective, direction=search.study.direction)

    def print_row(trial: FrozenTrial) -> None:
        print(
            report.row(trial, num_ended=search.num_ended(), num_trials=search.num_trials),
            flush=True,
        )

    runner = TrialRunner(
        search,
        TrainTrial(base=base, objective=cfg.objective, run_dir=str(folder / "trials")),
        num_workers=cfg.num_workers,
        num_ranks=num_ranks_of(trial_config),
        budget_s=cfg.budget_s,
        log_dir=folder / "logs",
        on_end=print_row,
    )
    num_left = search.num_trials - search.num_ended()
    print(f"{num_left} of {search.num_trials} trials remain.\n{report.header()}", flush=True)
    runner.run()

    rounds = search.rounds()
    report.write(folder, search.study, rounds)
    print(f"\n{report.table(rounds)}\n\nWritten to {folder.resolve()}")
    if not search.is_complete():
        print("The search is not complete. Run it again with the same hydra.run.dir to continue.")
    best = report.best(rounds)
    if best is None:
        raise SystemExit("error: No trial was completed. See the reasons in the table.")
    for key in report.edges(best):
        print(f"The best {key} is at an end of its range. Widen axes.{key}.low or axes.{key}.high.")
    print(f"best: {' '.join(overrides_of(best.params))}", flush=True)
    return best.value


if __name__ == "__main__":
    main()
