"""Study of large batches, with and without the method: `python recipes/claims.py`; see records/claims/README.md."""

from pathlib import Path
from typing import Any, cast

import _path  # noqa: F401
import hydra
from omegaconf import DictConfig, OmegaConf

from recipes.cli import config_check, launch
from recipes.cli.ranges import CountOrZero, NotNegative, Seed
from recipes.cli.results import environment, write_json
from recipes.hyperparams import study_report
from recipes.hyperparams.study import Study
from recipes.hyperparams.trial import TrainTrial, common_of
from recipes.hyperparams.trial_log import TrialLog, TrialOutcome, fingerprint_of
from recipes.hyperparams.trial_pool import TrialPool

launch.register_resolvers()

KEYS: dict[str, Any] = {
    "num_workers": CountOrZero,
    "budget_s": NotNegative | None,
    "about": str | None,
    "trial": list[str],
    "tuning": dict,
    "seeds": list[Seed],
    "study": dict,
    "study.arms": dict[str, dict],
    "study.precisions": dict[str, list[str]],
    "run_dir": str,
}


def say(name: str, outcome: TrialOutcome) -> None:
    """Print a line for a trial that ended."""
    found = outcome.reason if outcome.value is None else f"{outcome.value:.4f}"
    own = " ".join(one for one in outcome.overrides if one.startswith(("optim.lr=", "seed=")))
    print(f"{name}: {own} {outcome.status} {found} {outcome.wall_s:.1f} s", flush=True)


@hydra.main(version_base="1.3", config_path="../conf", config_name="claims")
def main(cfg: DictConfig) -> None:
    """Run what is left of the study; write `results.jsonl` as it goes, then table, picture and versions."""
    with launch.short_errors():
        config_check.check(cfg, KEYS)
        folder = Path(cfg.run_dir)
        config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
        study = Study.from_config(config)
        base = tuple(config["trial"])
        log = TrialLog(
            folder / "results.jsonl",
            fingerprint=fingerprint_of([common_of(base), study.tuning.objective, study.tuning.mode]),
        )
        runner = TrainTrial(
            base=base, objective=study.tuning.objective, mode=study.tuning.mode, run_dir=str(folder / "trials")
        )
        pool = TrialPool(runner, num_workers=cfg.num_workers, budget_s=cfg.budget_s)
    with pool:
        is_complete = study.run(pool, log, say)
    study_report.write_study(folder, study, log, environment=environment() | {"about": cfg.about})
    write_json(folder / "config.json", config | {"run_dir": ""})
    state = "complete" if is_complete else "not complete: run it again with the same hydra.run.dir"
    print(f"{study_report.markdown(study, log)}\n\nwritten to {folder.resolve()}; {state}", flush=True)


if __name__ == "__main__":
    main()
