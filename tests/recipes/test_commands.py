"""Commands as a user starts them: printed output, written files, and exit codes."""

import csv
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from lightning_hybrid.comm.plan import Algorithm, CommPlan
from recipes.datasets import packing
from tests.checkout import ROOT
from tests.programs import run_program
from tests.recipes.datasets.images.pictures import write_root


def content_of(path: Path) -> Any:
    return json.loads(path.read_text())


def packed(folder: Path, said: str) -> None:
    assert packing.PLAN_NAME in {path.name for path in (folder / "out" / "train").iterdir()}


def benched(folder: Path, said: str) -> None:
    head, *rows = map(json.loads, (folder / "run/rows.jsonl").read_text().splitlines())
    sums = {(r["arm"], r["case"], r["num_bytes"]) for r in rows if r["section"] == "allreduce"}
    arms = ("torch", "auto", *get_args(Algorithm))
    assert sums == {(a, d, n) for a in arms for d in ("float32", "float16") for n in (1024, 4096)}
    steps = {r["arm"]: r["num_bytes"] for r in rows if r["section"] == "step"}
    assert list(steps) == ["ddp", "fp16_compress", "auto"]
    assert steps["ddp"] == 2 * steps["auto"] == 2 * steps["fp16_compress"]
    overlap = [r for r in rows if r["section"] == "overlap"]
    assert [r["arm"].partition(", backward")[0] for r in overlap] == ["auto", "auto, silent"] * 2
    assert [r["backward_s"] for r in overlap[:2]] == [0.0, 0.0]
    assert all(min(r["times_s"]) >= r["backward_s"] for r in overlap)
    assert all(len(r["times_s"]) == 2 and min(r["times_s"]) > 0 for r in rows)
    assert head["environment"]["torch"] == torch.__version__
    with open(folder / "run/table.csv") as file:
        assert len(list(csv.reader(file))) == 1 + len(rows)


def measured(folder: Path, said: str) -> None:
    content = content_of(folder / "run/summary.json")
    assert content["world"]["ranks_per_node"] == 2
    assert content["calibration"]["links"]["inside"]["bytes_per_s"] > 0
    assert (folder / "run/cluster/measured.yaml").exists()
    assert CommPlan.from_json((folder / "run/plan.json").read_text())


def planned(folder: Path, said: str) -> None:
    content = content_of(folder / "run/simulate.json")
    numbers = content["numbers"]
    assert numbers["num_ranks"] == 16
    assert numbers["step_s"] == pytest.approx(statistics.fmean(content["steps_s"]))
    assert len(content["steps_s"]) == 7
    hours = 2 * 1281167 / (16 * 64) * numbers["step_s"] / 3600
    paid = numbers["run_with_failures_s"] / 3600  # start-up and failures are paid as well
    assert paid > hours
    assert [numbers[key] for key in ("run_hours", "run_price", "run_kwh")] == pytest.approx(
        [hours, paid * 2 * 30, paid * 2 * 3]
    )
    assert [point["num_ranks"] for point in content["scaling"]] == [1, 16]
    assert len(content["plans"]) == 4
    events = content_of(folder / "run/trace/rank-0.json")["traceEvents"]
    assert {"backward", "buckets"} <= {
        event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert content["memory"]["needs"][0]["settings"] == []
    assert content["pipelines"][0]["step_s"] > numbers["step_alone_s"]
    assert (
        f"(ImageNet) on 16 GPUs (2 x 8): {paid * 60:.3g} min including start-up and failures"
        in said
    )
    assert f"{hours * 60:.3g} min without" in said
    assert "| step_s_quantile_0.9 |" in (folder / "run/table.md").read_text()


def searched(folder: Path, said: str) -> None:
    """Check a search of four rates in one worker, of which the lowest is best."""
    header, *rows = (folder / "run/table.md").read_text().splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1:]]
    assert header.startswith("| rank | round | optim.lr")
    assert cells[0][2] == "0.01"
    assert {row[4] for row in cells[1:]} <= {"diverged", "stopped"}
    assert len(cells) == 4
    assert "4 of 4 trials remain" in said
    assert (folder / "run/journal.jsonl").stat().st_size > 0


@dataclass(frozen=True, kw_only=True)
class Command:
    """Program with its overrides (TMP: the test's folder, IMAGES: an image set), and the expected results.

    `says`: text in standard output, or in standard error without a traceback if the exit code is not zero. `files`:
    pictures and other files of more than 5,000 bytes. `look`: function that checks the folder and the printed output.
    """

    words: str
    code: int = 0
    says: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    look: Callable[[Path, str], None] = lambda folder, said: None


TRIAL = [
    *("recipe=claim_digits", "global_batch_size=600", "batch_size_per_rank=null", "callbacks=none"),
    *("trainer.max_epochs=2", "optim=sgd", "precision=32-true"),
]
SEARCH = (
    f"recipes/search.py trial=[{','.join(map(repr, TRIAL))}] axes.optim.lr.low=1e-2 axes.optim.lr.high=1e37 "
    "axes.optim.lr.num=4 sampler.num_rounds=1"
)
QUIET = "trainer.devices=1 trainer.max_epochs=1 logger=csv trainer.enable_progress_bar=false"
COMMANDS = {
    "pack": Command(
        words="recipes/pack.py root=IMAGES out=TMP/out short_side=32",
        says=("train: 23 images, 1 shard, ",),
        look=packed,
    ),
    "bench": Command(
        words="recipes/bench.py allreduce.max_bytes=4096 allreduce.num_rounds=2 allreduce.min_sample_s=0.01 "
        "steps.gradients=[linear_8mib] steps.num_rounds=1 steps.num_steps=2 steps.num_warmup_steps=2 "
        "steps.overlap=auto",
        says=("Written to TMP/run",),
        files=("bench.svg",),
        look=benched,
    ),
    "tune": Command(
        words="recipes/tune.py world.devices=2 measure.limit_s=4 measure.max_bytes=262144 model=alexnet_bn "
        "image_shape=[1,16,16]",
        says=("links between nodes were not measured", "--config-dir=TMP/run cluster=measured"),
        look=measured,
    ),
    "simulate": Command(
        words="recipes/simulate.py num_nodes=2 num_steps=7 jitter.relative_std=0.02 scaling_ranks=[1,16] epochs=2 "
        "cluster.price_per_node_hour=30 cluster.watts_per_node=3000 search.algorithms=[flat,two_level] "
        "search.bucket_bytes=[4194304,67108864] pictures=true",
        says=("on 16 GPUs (2 x 8): ", "a step of 1,024 images takes ", "Written to TMP/run"),
        files=("simulate.svg", "pipeline.svg"),
        look=planned,
    ),
    "search": Command(
        words=SEARCH,
        says=("best: optim.lr=0.01\n", "is at an end of its range. Widen axes.optim.lr.low"),
        files=("search.svg",),
        look=searched,
    ),
    "train on noise": Command(
        words="recipes/train.py data=synthetic data.image_size=16 data.num_train_images=64 data.num_val_images=16 "
        f"data.num_stored_images=8 model.in_channels=3 global_batch_size=16 {QUIET}",
        files=("run.png",),
    ),
    "a command of the package": Command(
        words="-m lightning_hybrid report runs=[nowhere]",
        code=2,
        says=("error: `runs` (=", "`python -m lightning_hybrid train` prints the directory.\n"),
    ),
}


def run(words: str, folder: Path) -> Any:
    left = (
        "HYDRA_FULL_ERROR",
        "LOCAL_RANK",
        "NODE_RANK",
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    environment = {name: value for name, value in os.environ.items() if name not in left}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    words = words.replace("TMP", str(folder)).replace("IMAGES", str(folder / "images"))
    arguments = [*words.split(), f"hydra.run.dir={folder}/run"]
    return run_program(*arguments, cwd=ROOT, env=environment, timeout_s=240)


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_does_what_is_said_of_it(command, tmp_path):
    if "IMAGES" in command.words:
        write_root(tmp_path / "images", num_train=23, num_val=4)
    done = run(command.words, tmp_path)
    assert done.returncode == command.code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if command.code:
        printed = done.stderr
    else:
        printed = done.stdout
    for words in command.says:
        assert words.replace("TMP", str(tmp_path)) in printed
    for name in command.files:
        assert (tmp_path / "run" / name).stat().st_size >= 5_000, name
    command.look(tmp_path, printed)
