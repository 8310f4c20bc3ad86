"""Search for hyper-parameters: `python recipes/search.py axes.optim.lr.high=50`; see hyperparams/README.md."""

from pathlib import Path
from typing import Any, cast

import _path  # noqa: F401
import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from recipes.cli import config_check, launch
from recipes.cli.ranges import CountOrZero, NotNegative
from recipes.hyperparams import report as search_report
from recipes.hyperparams.coarse_to_fine import CoarseToFine, Stopping, TrialRunner, axes_from, grid, overrides_of
from recipes.hyperparams.optuna_backend import OptunaSearch
from recipes.hyperparams.trial import TrainTrial, common_of
from recipes.hyperparams.trial_log import Mode, TrialLog, TrialOutcome, best_of, check_mode, fingerprint_of
from recipes.hyperparams.trial_pool import TrialPool

launch.register_resolvers()

KEYS: dict[str, Any] = {
    "objective": str,
    "mode": Mode,
    "trial": list[str],
    "base": list[str],
    "axes": dict,
    "stopping": Stopping,
    "backend": CoarseToFine | OptunaSearch,
    "num_workers": CountOrZero,
    "budget_s": NotNegative | None,
    "run_dir": str,
}


def say(outcome: TrialOutcome) -> None:
    """Print a line for a trial that ended."""
    found = outcome.reason if outcome.value is None else f"{outcome.value:.5g}"
    print(f"{' '.join(outcome.overrides)}: {outcome.status} {found} {outcome.wall_s:.1f} s", flush=True)


@hydra.main(version_base="1.3", config_path="../conf", config_name="search")
def main(cfg: DictConfig) -> float | None:
    """Run what is left of the search; write `trials.jsonl` as it goes, then table and picture; return the best."""
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        folder = Path(cfg.run_dir)
        config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
        mode, objective = check_mode(config["mode"]), config["objective"]
        axes, stopping, backend = axes_from(config["axes"]), instantiate(cfg.stopping), instantiate(cfg.backend)
        base = (*config["base"], *config["trial"])
        common = [common_of(base, overrides_of(grid(axes)[0])), objective, mode]
        log = TrialLog(folder / "trials.jsonl", fingerprint=fingerprint_of(common))
        trial = TrainTrial(base=base, objective=objective, mode=mode, run_dir=str(folder / "trials"))
        pool = TrialPool(trial, num_workers=cfg.num_workers, budget_s=cfg.budget_s)
    with pool:
        run = TrialRunner(pool, log, mode=mode, stopping=stopping, tell=say)
        is_complete = backend.search(axes, run, mode)
    search_report.write_search(folder, run.rounds, axes, objective=objective, mode=mode)
    print(
        f"\n{search_report.markdown(run.rounds, axes, objective=objective, mode=mode)}\n\nwritten to {folder.resolve()}"
    )
    for key in search_report.edges(run.rounds, axes, mode=mode):
        print(f"the best {key} lies at an end of its range: widen axes.{key}.low or axes.{key}.high")
    if not is_complete:
        print("not complete: run it again with the same hydra.run.dir")
    best = best_of(run.seen(), mode=mode)
    if best is None:
        raise SystemExit("error: no trial was done; the table says why.")
    print(f"best: {' '.join(best.overrides)}", flush=True)
    return best.value


if __name__ == "__main__":
    main()
