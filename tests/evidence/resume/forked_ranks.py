"""Runs of `recipes/train.py` on forked ranks, which start in tenths of a second, and differences of two runs."""

import os
import runpy
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.utilities import rank_zero_only

from lightning_hybrid import DurableCheckpointIO
from lightning_hybrid.callbacks.metrics import metric_of
from recipes.training import build  # noqa: F401  all that a rank imports is there before it is forked
from recipes.training.csv_logger import read_rows
from tests.scenes import same

ROOT = Path(__file__).resolve().parents[3]
SAME = ("state_dict", "optimizer_states", "lr_schedulers", "MasterWeightPrecision", "global_step", "epoch")


@dataclass(frozen=True, kw_only=True)
class RanksExit:
    """End of two ranks: exit codes (negative: by a signal), when the first was gone, and when the last."""

    codes: tuple[int, ...]
    last_s: float  # by the monotonic clock, which all processes of a machine share
    was_helped: bool
    output: str


def run_ranks(overrides: list[str], run_dir: Path, *, num_ranks: int = 2, limit_s: float = 60.0) -> RanksExit:
    """Run `recipes/train.py` on forked ranks; end survivors that do not notice a death within `limit_s`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group, codes, first_s, was_helped = 0, dict[int, int](), None, False
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, num_ranks, port, overrides, run_dir)
        group = group or pid
        # One group for all ranks: a signal to it is what a failure of the host would be.
        os.setpgid(pid, group)
        codes[pid] = -1000
    left = set(codes)
    while left:
        pid, status = os.waitpid(-group, os.WNOHANG)
        if pid:
            left.discard(pid)
            codes[pid] = os.waitstatus_to_exitcode(status)
            first_s = first_s or time.monotonic()
        elif first_s is not None and time.monotonic() - first_s > limit_s and not was_helped:
            was_helped = True
            os.killpg(group, signal.SIGKILL)
        else:
            time.sleep(0.02)
    output = "\n".join((run_dir / f"rank{rank}.log").read_text(errors="replace") for rank in range(num_ranks))
    return RanksExit(codes=tuple(codes.values()), last_s=time.monotonic(), was_helped=was_helped, output=output)


def _be_rank(rank: int, num_ranks: int, port: int, overrides: list[str], run_dir: Path) -> None:
    code = 1
    try:
        with (run_dir / f"rank{rank}.log").open("wb", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        output = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in output.items()} | {"MASTER_ADDR": "127.0.0.1"})
        cast(Any, rank_zero_only).rank = rank
        GlobalHydra.instance().clear()
        os.chdir(ROOT)
        torch.set_num_threads(1)  # another number of them adds up in another order
        sys.path.insert(0, "recipes")  # as Python does for a script
        sys.argv = ["recipes/train.py", *overrides, f"hydra.run.dir='{run_dir}'"]
        runpy.run_path("recipes/train.py", run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def state_of(run_dir: Path, name: str = "last") -> dict[str, Any]:
    """Return the final state of a run, as far as it is promised."""
    checkpoint = DurableCheckpointIO().load_checkpoint(run_dir / "checkpoints" / f"{name}.ckpt")
    state = {part: checkpoint[part] for part in SAME}
    state["averaged"] = checkpoint.get("current_model_state"), checkpoint.get("averaging_state")
    state["residuals"] = checkpoint.get("error_feedback")
    state["data"] = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader")
    return state


def rows_of(run_dir: Path) -> list[dict[str, str]]:
    """Return the rows of metrics, without what a clock or the machine determines."""
    rows = read_rows(run_dir / "csv" / "metrics.csv")
    return [{name: value for name, value in row.items() if value and _is_repeatable(name)} for row in rows]


def _is_repeatable(name: str) -> bool:
    # The error of rounding is that of every 16th block of a message, and DDP's first buckets are others than its later
    # ones: the step after a resume measures other blocks.
    metric = metric_of(name)
    return metric is None or not (metric.from_clock or name.startswith(("memory/", "comm/quantisation_nmse")))


def difference(run_dir: Path, undisturbed: Path) -> str | None:
    """Return what of two runs is not the same; None: nothing."""
    for name in ("last", "best"):
        found, expected = state_of(run_dir, name), state_of(undisturbed, name)
        if parts := [part for part in expected if not same(found[part], expected[part])]:
            return f"{name}: {', '.join(parts)}"
    return None if rows_of(run_dir) == rows_of(undisturbed) else "metrics.csv"
