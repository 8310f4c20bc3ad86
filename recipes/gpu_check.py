"""Checks of this library on a machine's GPUs: training, features on several ranks, failures, streams and speed.

  out=gpu_check       folder for report.json, report.html and gpu_report.zip, written after each check
  minutes=50          time for all checks; checks for which no time is left are skipped
  only=NAME,...       run these checks only; each line of the output starts with a name
  again=NAME,...      repeat these checks although they passed before; a restarted run skips checks that passed
  readme=FILE         write the results from out into the table of a file (recipes/records/README.md), and run nothing
  --device cpu        run the checks that make sense without a GPU

Examples
  python recipes/gpu_check.py
  python recipes/gpu_check.py --device cpu minutes=2 only=fits_16-true_lars,one_rank

Prints PASS, FAIL or SKIP for each check, or FAST or SLOW for speed, then tables and the guarantees of the README that
hold. The exit code is the number of failures. The checks need torch and Lightning, but neither Hydra nor wandb. The
test suite also needs pytest and a checkout of the repository.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

import _path  # noqa: F401
import torch

from recipes.gpu import (
    exchange,
    features,
    fits,
    hosts,
    losses,
    machine,
    page,
    runner,
    scales,
    speed,
    suite,
    waits,
    worlds,
)
from recipes.gpu.runner import Check

ROOT = Path(__file__).resolve().parents[1]


def _check(
    name: str, limit_s: float, gpu_s: float, promise: str, run: Any, *args: Any, **more: Any
) -> Check:
    return Check(
        name=name, run=partial(run, *args, **more), limit_s=limit_s, gpu_s=gpu_s, promise=promise
    )


BOTH = "both process-group classes of NCCL"
EXCHANGE = "parameters are fp32 outside of forward and backward"
LOST = "the other ranks name a failed rank within seconds"
# The most important checks come first: correctness before speed, one rank before several. Columns: maximum seconds,
# estimated seconds on one GPU (8 to start and compile, 25 for ranks that share the GPU and the same training on the
# CPU), guarantee of the README.
CHECKS = [
    _check("exchange", 60, 8, EXCHANGE, exchange.values),
    _check("exchange_ddp", 60, 8, EXCHANGE, exchange.reducer),
    _check("exchange_stream", 60, 8, EXCHANGE, exchange.stream),
    _check("exchange_compiled", 120, 40, EXCHANGE, exchange.compiled),
    _check("exchange_graph", 60, 8, EXCHANGE, exchange.graph),
    *(
        _check(
            f"fits_{precision}_{name}",
            90,
            12,
            f"{precision} with {name.upper()}",
            fits.ends,
            precision,
            name,
        )
        for precision in ("16-true", "bf16-true", "32-true")
        for name in ("lars", "lamb")
    ),
    _check("resumes", 90, 15, "a resumed run is bit-identical", fits.resumes),
    _check(
        "dynamic_scale",
        120,
        20,
        "the dynamic loss scale with per-step schedules",
        scales.dynamic_scale,
    ),
    _check(
        "resumes_within_epoch", 120, 25, "exact resume within an epoch", fits.resumes_within_epoch
    ),
    _check("contrastive", 60, 10, "contrastive losses in fp32", losses.contrastive),
    _check("waits", 60, 15, "no stream reads too early", waits.waits),
    _check("who_waits", 60, 10, "no step waits for the device", waits.who_waits),
    _check("one_rank", 60, 10, BOTH, worlds.one_rank),
    _check("one_rank_other", 60, 10, BOTH, worlds.one_rank, is_other_class=True),
    *(
        _check(
            name, 150, 25 if feature.by_gloo else 0, feature.promise, features.fits_as_on_cpu, name
        )
        for name, feature in features.FEATURES.items()
    ),
    *(
        _check(f"rank_{how}", features.loss_limit_s(how), 50, LOST, features.lost_rank, how)
        for how in features.LOSSES
    ),
    _check("lost_host", 150, 60, "a run continues after a host is lost", hosts.lost_host),
    *(
        _check(f"{name}_other", 150, 0, BOTH, features.fits_as_on_cpu, name, is_other_class=True)
        for name in ("flat", "two_level", "hierarchical", "int8")
    ),
    *(
        _check(
            f"rank_{how}_other",
            features.loss_limit_s(how),
            0,
            BOTH,
            features.lost_rank,
            how,
            is_other_class=True,
        )
        for how in features.LOSSES
    ),
    _check("lost_host_other", 150, 0, BOTH, hosts.lost_host, is_other_class=True),
    _check("updates", 90, 20, "", speed.updates),
    _check("resnet50", 600, 270, "", speed.resnet50),
    _check("sums", 90, 0, "", speed.sums),
    _check("gpu_tests", 600, 120, "the GPU tests of the test suite", suite.gpu_tests),
]


def main(arguments: list[str]) -> int:
    """Run the checks that the command line selects, write the reports and return the number of failures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "keys", nargs="*", metavar="key=value", help="out, minutes, only, again, readme"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    try:
        keys = dict.fromkeys(("only", "again", "readme"), "") | {
            "out": "gpu_check",
            "minutes": "50",
        }
        keys |= runner.keys_from(options.keys)
        checks = runner.chosen(keys["only"], CHECKS)
        limit_s = runner.limit_s_from(keys["minutes"])
        if keys["again"]:
            again = runner.chosen(keys["again"], CHECKS, key="again")
        else:
            again = []
        out = Path(keys["out"]).resolve()
        report = out / "report.json"
        if keys["readme"]:
            page.write_rows(Path(keys["readme"]), page.rows(CHECKS, *runner.read_report(report)))
            return 0
    except ValueError as error:
        parser.error(str(error))
    device: Literal["cuda", "cpu"] = options.device
    # Without this variable, looking for GPUs would create a CUDA context.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            f"error: PyTorch finds no usable GPU, because {machine.why_no_gpu()}. Install a driver "
            "that supports the CUDA version of torch, or use --device cpu for the checks that "
            "need no GPU."
        )
    environment = {"device": device} | machine.gpu_environment(ROOT)
    num_gpus = len(environment.get("gpus", ()))
    outcomes = {outcome.name: outcome for outcome in runner.done_before(report, environment)}
    for check in again:
        outcomes.pop(check.name, None)
    if outcomes:
        print(
            f"These checks passed here before, and are not run again: {', '.join(outcomes)}.",
            flush=True,
        )
    left = [check for check in checks if check.name not in outcomes]
    minutes = sum(check.gpu_s for check in left) / 60
    print(
        f"{len(left)} checks run. They take about {minutes:.0f} minutes on one GPU, and at most {limit_s / 60:g} here."
    )

    def note(outcome: runner.CheckOutcome) -> None:
        print(outcome.line(), flush=True)
        if device == "cuda" and (clocks := machine.clocks()):
            outcome.details["clocks"] = clocks
        outcomes[outcome.name] = outcome
        shown_outcomes = [outcomes[check.name] for check in CHECKS if check.name in outcomes]
        runner.write_outcomes(report, shown_outcomes, environment)
        page.write(out, CHECKS, shown_outcomes, environment)

    runner.run_checks(left, device, out, limit_s=limit_s, on_outcome=note, num_gpus=num_gpus)
    shown_outcomes = list(outcomes.values())
    lines = [
        runner.tables(shown_outcomes),
        f"{runner.summary(shown_outcomes)} The archive to send is {out / page.ARCHIVE}.",
    ]
    print("", "\n\n".join(lines), "", *page.promises(CHECKS, shown_outcomes), sep="\n", flush=True)
    return sum(outcome.status == "FAIL" for outcome in shown_outcomes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
