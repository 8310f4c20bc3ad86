"""Check of a machine's GPU: fits, resume, streams, kernels, speed and, with two GPUs, NCCL and a rank that dies.

  out=gpu_check       where report.json goes, written after each check
  minutes=            of all checks; those that are left are skipped. Unset: 12 with one GPU, 20 with several
  only=NAME,...       these checks alone: each line of the output starts with its name
  again=NAME,...      these too, although they passed here before: started again, it goes on where it was ended
  --device cpu        what makes sense without a GPU

Examples
  python recipes/gpu_check.py
  python recipes/gpu_check.py --device cpu minutes=2 only=fits_16-true_lars,one_rank

Prints PASS, FAIL or SKIP of each check, of speed FAST or SLOW, then tables; the exit code is the number of failures.
Needs torch and Lightning, and for the tests pytest and a checkout; neither Hydra nor wandb.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Literal

import _path  # noqa: F401
import torch

from recipes.gpu import fits, machine, runner, speed, suite, waits, worlds
from recipes.gpu.runner import Check

ROOT = Path(__file__).resolve().parents[1]
CHECKS = [
    *(
        Check(name=f"fits_{precision}_{optimizer}", run=fits.ends_in(precision, optimizer), limit_s=60)
        for precision in ("16-true", "bf16-true", "32-true")
        for optimizer in ("lars", "lamb")
    ),
    Check(name="resumes", run=fits.resumes, limit_s=60),
    Check(name="waits", run=waits.waits, limit_s=60),
    Check(name="who_waits", run=waits.who_waits, limit_s=60),
    Check(name="one_rank", run=worlds.one_rank, limit_s=60),
    Check(name="four_ranks", run=worlds.four_ranks, limit_s=150),
    Check(name="nccl", run=worlds.nccl, limit_s=150),
    Check(name="nccl_other", run=worlds.nccl_of_the_other_class, limit_s=150),
    Check(name="dead_rank", run=worlds.dead_rank, limit_s=120),
    Check(name="dead_rank_other", run=worlds.dead_rank_of_the_other_class, limit_s=120),
    Check(name="stopped_rank", run=worlds.stopped_rank, limit_s=120),
    Check(name="gpu_tests", run=suite.gpu_tests, limit_s=240),
    Check(name="updates", run=speed.updates, limit_s=60),
    Check(name="resnet50", run=speed.resnet50, limit_s=120),
    Check(name="decoding", run=speed.decoding, limit_s=90),
]


def main(arguments: list[str]) -> int:
    """Run the checks; return the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="*", metavar="key=value", help="out, minutes, only, again")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args(arguments)
    try:
        minutes = "20" if torch.cuda.device_count() > 1 else "12"
        keys = {"out": "gpu_check", "minutes": minutes, "only": "", "again": ""} | runner.keys_from(given.keys)
        checks, limit_s = runner.chosen(keys["only"], CHECKS), runner.limit_s_from(keys["minutes"])
        again = runner.chosen(keys["again"], CHECKS, key="again") if keys["again"] else []
    except ValueError as error:
        parser.error(str(error))
    device: Literal["cuda", "cpu"] = given.device
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: torch.cuda.is_available() is False here: --device cpu tries what makes sense without.")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # to be asked for a GPU makes no context of CUDA's
    out = Path(keys["out"]).resolve()
    report, environment = out / "report.json", {"device": device} | machine.gpu_environment(ROOT)
    outcomes = {one.name: one for one in runner.done_before(report, environment)}
    for check in again:
        outcomes.pop(check.name, None)
    if outcomes:
        print(f"Passed here before, and not run again: {', '.join(outcomes)}.", flush=True)

    def note(one: runner.CheckOutcome) -> None:
        print(one.line(), flush=True)
        outcomes[one.name] = one
        runner.write_outcomes(report, list(outcomes.values()), environment)

    left = [check for check in checks if check.name not in outcomes]
    runner.run_checks(left, device, out, limit_s=limit_s, on_outcome=note)
    found = list(outcomes.values())
    print(f"\n{runner.tables(found)}\n\n{runner.summary(found)} Written to {out}.", flush=True)
    return runner.num_failures(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
