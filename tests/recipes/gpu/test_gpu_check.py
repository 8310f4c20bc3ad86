"""GPU check: checks that fail, die or hang are reported, and the next one runs. Hydra and wandb are not needed."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_hybrid.precision.loss_scale import DynamicLossScale
from lightning_hybrid.precision.schedule_guard import ScheduleGuard
from lightning_hybrid.strategy.rendezvous import RendezvousError
from recipes import gpu_check
from recipes.gpu import (
    features,
    hosts,
    machine,
    page,
    runner,
    scales,
    speed,
    updates,
    waits,
    worlds,
)
from recipes.gpu.runner import Check, CheckRequest, NotHere
from tests.checkout import ROOT
from tests.without import environment_without

HANGS_AFTER_S = 4  # ample for a process that is forked and starts another


def ends(how, request):
    """Run a check that ends in the way of `how`. If it hangs, its child process must not outlive it."""
    print("what led to it")
    if how == "wrong":
        raise AssertionError("two is not three\nand more")
    if how == "elsewhere":
        raise NotHere("there is no such thing here")
    if how == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "leaves":
        os._exit(3)
    if how == "of_a_rank":
        worlds.run_world(
            request, lambda request, rank, num_ranks: {"rank": [0][rank]}, num_ranks=2, limit_s=50
        )
    if how == "hangs":
        child = subprocess.Popen(["sleep", "600"])
        (request.folder / "pid").write_text(str(child.pid))
        time.sleep(600)
    return {
        "message": "all is well",
        "table": [{"arm": "one", "ms": 1.5}],
        "device": request.device,
    }


def check(how, **settings):
    return Check(name=how, run=partial(ends, how), **{"limit_s": 60} | settings)


def is_gone(path):
    process = Path(f"/proc/{path.read_text()}/stat")
    return not process.exists() or "Z" in process.read_text().split()[2]


def run_all(checks, out, *, limit_s=600):
    reported = []
    results = runner.run_checks(checks, "cpu", out, limit_s=limit_s, on_outcome=reported.append)
    assert reported == results
    return {outcome.name: outcome for outcome in results}


@pytest.mark.long
def test_what_fails_dies_or_hangs_is_a_line_and_the_next_check_runs(tmp_path):
    checks = [check("hangs", limit_s=HANGS_AFTER_S)]
    for how in ("wrong", "dies", "of_a_rank", "leaves", "elsewhere", "well"):
        checks.append(check(how))
    outcomes = run_all(checks, tmp_path)
    expected = {
        "wrong": ("FAIL", "AssertionError: two is not three"),
        "dies": ("FAIL", f"The process of the check ended by signal 11. See {tmp_path}/dies/log."),
        "hangs": (
            "FAIL",
            f"The check did not finish within {HANGS_AFTER_S} s. See {tmp_path}/hangs/log.",
        ),
        "of_a_rank": (
            "FAIL",
            "AssertionError: Rank 1 of 2 failed: IndexError: list index out of range",
        ),
        "leaves": (
            "FAIL",
            f"The process of the check ended with exit code 3. See {tmp_path}/leaves/log.",
        ),
        "elsewhere": ("SKIP", "there is no such thing here"),
        "well": ("PASS", "all is well"),
    }
    for name, outcome in outcomes.items():
        assert (outcome.status, outcome.message) == expected[name], name
    assert outcomes.keys() == expected.keys()
    assert is_gone(tmp_path / "hangs" / "pid"), "what it started must end with it"
    assert outcomes["well"].details == {"table": [{"arm": "one", "ms": 1.5}], "device": "cpu"}
    assert "what led to it" in outcomes["wrong"].details["log"]
    assert "and more" in outcomes["wrong"].details["error"]
    tables = runner.tables(list(outcomes.values()))
    assert tables == "well\n\n| arm | ms  |\n|-----|-----|\n| one | 1.5 |"


def test_what_the_total_time_leaves_out_or_cuts_is_skipped_and_a_check_over_its_own_limit_fails(
    tmp_path,
):
    for limit_s, total_s, status in ((60, 0.0, "SKIP"), (60, 0.5, "SKIP"), (0.5, 60.0, "FAIL")):
        began_s = time.monotonic()
        outcomes = run_all([check("hangs", limit_s=limit_s)], tmp_path, limit_s=total_s)
        outcome = outcomes["hangs"]
        assert outcome.status == status
        assert (outcome.message == "No time was left. Increase `minutes`.") is (status == "SKIP")
        # The total time includes the start of the processes, and a check's own limit does not.
        assert time.monotonic() - began_s >= min(limit_s, total_s)
        assert status == "SKIP" or outcome.seconds >= limit_s


def finishes_late(request):
    """Run a check whose ranks exceed their limit, as if most of the time had been used up."""
    worlds.run_world(
        request,
        lambda request, rank, num_ranks: time.sleep(60),
        num_ranks=2,
        limit_s=0.3 * request.limit_s,
    )


def finds_nobody(request):
    """Run a check in which a rank waits for the others in vain."""

    def run(request, rank, num_ranks):
        raise RendezvousError(
            "`WORLD_SIZE` (=2) ranks must meet, and within 15 s rank 1 did not come."
        )

    worlds.run_world(request, run, num_ranks=2, limit_s=50)


@pytest.mark.long
@pytest.mark.parametrize(
    "run", [finishes_late, finds_nobody], ids=["finishes_late", "finds_nobody"]
)
def test_ranks_that_are_late_are_a_skip_where_the_check_was_cut_and_else_a_failure(tmp_path, run):
    late = Check(name="late", run=run, limit_s=600)
    cut = run_all([late], tmp_path, limit_s=20)["late"]
    assert cut.status == "SKIP", cut.message
    assert cut.message.startswith("No time was left. Increase `minutes`. (Rank 0 of 2")
    whole = run_all([replace(late, limit_s=15)], tmp_path)["late"]
    assert whole.status == "FAIL", whole.message
    assert whole.message.startswith("Rank 0 of 2")


def test_a_wrong_result_of_a_check_that_was_cut_is_a_failure(tmp_path):
    outcomes = run_all([check("of_a_rank", limit_s=600)], tmp_path, limit_s=60)
    assert outcomes["of_a_rank"].status == "FAIL"


def test_a_report_is_written_after_each_check_and_a_second_run_continues_from_it(
    tmp_path, monkeypatch, capsys
):
    environment = {"commit": "abc", "has_changes": False}
    written = []
    monkeypatch.setattr(gpu_check.machine, "gpu_environment", lambda root: dict(environment))
    statuses = {"well": "PASS", "slow": "SLOW", "wrong": "FAIL"}
    monkeypatch.setattr(gpu_check, "CHECKS", [check(name, gpu_s=90) for name in statuses])

    def run_one(check, *args, **kwargs):
        names_in_report = []
        if written:
            outcomes, _ = runner.read_report(tmp_path / "report.json")
            names_in_report = [outcome.name for outcome in outcomes]
        written.append(names_in_report)
        return runner.CheckOutcome(
            name=check.name, status=statuses[check.name], seconds=0, message=""
        )

    def num_run(*keys):
        del written[:]
        exit_code = gpu_check.main([f"out={tmp_path}", *keys, "--device", "cpu"])
        assert exit_code == 1, "one check failed; a slow one is no failure"
        return len(written)

    monkeypatch.setattr(runner, "run_one", run_one)
    assert num_run() == 3
    assert written == [[], ["well"], ["well", "slow"]]
    printed = capsys.readouterr().out
    for words in (
        "They take about 4 minutes on one GPU, and at most 50 here",
        "\nSLOW  slow ",
        "\nFAIL  wrong ",
        "1 passed, 1 failed, 0 skipped; speed checks: 0 fast, 1 slow.",
    ):
        assert words in printed
    assert num_run() == 1
    assert num_run("again=well") == 2
    assert (
        "These checks passed here before, and are not run again: well, slow."
        in capsys.readouterr().out
    )
    for change in ({"commit": "def"}, {"has_changes": True}):
        environment |= change
        assert num_run() == 3
    on_cuda = CheckRequest(device="cuda", folder=tmp_path, limit_s=1)
    assert speed.verdict(on_cuda, is_fast=True) == "FAST"
    assert speed.verdict(on_cuda, is_fast=False) == "SLOW"


def test_a_fit_on_gpus_that_is_not_that_of_the_cpu_fails(tmp_path, monkeypatch):
    def run_world(request, run, **settings):
        value = 1.05 if request.on_cuda else 1.0
        weights = {"weight": torch.full((9,), value)}
        torch.save(weights, request.folder / f"{request.device}.pt")
        return [{"bits": str(rank // num_equal)} for rank in range(settings["num_ranks"])]

    monkeypatch.setattr(features, "run_world", run_world)
    request = CheckRequest(device="cuda", folder=tmp_path, limit_s=1, num_gpus=8)
    num_equal = 8
    assert features.fits_as_on_cpu("bf16", request)["message"].startswith(
        "The weights of 8 ranks over nccl are bit-identical, and differ from those of the CPU by 5.0e-02"
    )
    with pytest.raises(AssertionError, match="differ from those of the CPU"):
        features.fits_as_on_cpu("flat", request)
    num_equal = 7
    with pytest.raises(AssertionError, match="The ranks ended with different weights over nccl"):
        features.fits_as_on_cpu("int4", request)
    num_equal = 8
    request = replace(request, num_gpus=1)
    assert features.fits_as_on_cpu("bf16", request)["carrier"] == "gloo"
    with pytest.raises(NotHere, match="needs two GPUs"):
        features.fits_as_on_cpu("adasum", request)
    weights = {"a": torch.ones(2), "b": torch.tensor([1.0, 1.0])}
    changed = {**weights, "b": torch.tensor([1.0, 1.0000001])}
    waits.same_bits(weights, dict(weights), "x")
    with pytest.raises(AssertionError, match="x, 1 of 2 tensors differ, the first of which is b"):
        waits.same_bits(weights, changed, "x")


@pytest.mark.long
def test_the_gpu_check_runs_without_hydra_wandb_and_simplejpeg(tmp_path):
    """All its modules are imported. Some checks that start processes, train and save run, without a drawn page."""
    names = (
        "resumes",
        "who_waits",
        "one_rank",
        "two_level",
        "fabric",
        "rank_killed",
        "resnet50",
        "sums",
    )
    keys = [f"out={tmp_path / 'out'}", f"only={','.join(names)}", "--device", "cpu"]
    command = [sys.executable, str(ROOT / "recipes" / "gpu_check.py"), *keys]
    environment = environment_without(tmp_path) | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    expected = dict.fromkeys(names, "PASS") | {"who_waits": "SKIP"}
    assert {check["name"]: check["status"] for check in content["checks"]} == expected
    (resnet,) = (check for check in content["checks"] if check["name"] == "resnet50")
    assert all(isinstance(row["images/s"], float) for row in resnet["details"]["table"])


def test_page_archive_and_rows_say_what_was_found(tmp_path, monkeypatch):
    statuses = {"good": "PASS", "bad": "FAIL", "late": "SKIP", "quick": "FAST"}
    checks = [check(name, promise=f"what is {name}") for name in statuses][:3]
    shared = {
        "seconds": 1,
        "details": {"table": [{"arm": "<b>", "ms": 1.5}], "error": "Traceback <x>"},
    }
    results = [
        runner.CheckOutcome(name=name, status=status, message=f"{name} | x", **shared)
        for name, status in statuses.items()
    ]
    promised = [
        "Holds here: what is good.",
        "Does not hold here: what is bad.",
        "Not tested (1 of 3): what is late.",
    ]
    assert page.promises(checks, results) == promised
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "rank0.log").write_bytes(os.urandom(6 << 20) + b"the end")
    (tmp_path / "bad" / "nccl.7.log").write_text("NCCL version 2\n" + "x" * 100_000)
    environment = {"torch": "2", "topology": "a\nb"}
    runner.write_outcomes(tmp_path / "report.json", results, environment)
    assert runner.read_report(tmp_path / "report.json") == (results, environment)
    page.write(tmp_path, checks, results, environment)
    html = (tmp_path / "report.html").read_text()
    for words in (*promised, "&lt;b&gt;", "Traceback &lt;x&gt;", "<pre>a\nb</pre>", "viewport"):
        assert words in html
    assert "http" not in html
    assert (tmp_path / page.ARCHIVE).stat().st_size < 5_000_000
    with zipfile.ZipFile(tmp_path / page.ARCHIVE) as archive:
        assert archive.read("bad/rank0.log").endswith(b"the end")
        assert archive.read("bad/nccl.7.log").startswith(b"NCCL version 2")
        assert {"report.json", "report.html"} < set(archive.namelist())
    assert "\n## Results in one table\n" in (ROOT / page.RECORDS).read_text()
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    records = tmp_path / "README.md"
    before = "| command |\n|---|\n\n## Results in one table\n\n| command |\n|---|\n"
    for after in ("", "\nAfter.\n"):
        records.write_text(before + after)
        for _ in range(2):
            assert gpu_check.main([f"readme={records}", f"out={tmp_path}"]) == 0
        good, quick = records.read_text().removeprefix(before).removesuffix(after).splitlines()
        assert f"1 x a CPU, torch 2: {promised[0]} {promised[1]} |" in good
        assert "quick / x" in quick


def test_a_wrong_key_is_one_message_and_exit_code_2(capsys, monkeypatch):
    wrong = {
        "output=here": "`output` is not a known key. Use out=DIR",
        "minutes=abc": "`minutes` (=abc) must be a number above zero",
        "only=sum": "`only` (=sum) must be the name of a check. The names are exchange",
        "readme=none": "contains no readable report.json of a GPU check",
    }
    for key, words in wrong.items():
        with pytest.raises(SystemExit) as end:
            gpu_check.main(["--device=cpu", key])
        assert end.value.code == 2
        assert words in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "driver", lambda: "535.104.05\n535.104.05")
    with pytest.raises(SystemExit) as end:
        gpu_check.main([])
    message = str(end.value)
    assert f"built for CUDA {torch.version.cuda}, and the driver is 535.104.05" in message
    assert "--device cpu" in message


def test_what_gloo_alone_has_carried_was_not_tried_over_nccl():
    checks = [check(name, promise="sums") for name in ("flat", "two_level")]
    outcomes = [
        runner.CheckOutcome(
            name=name, status="PASS", seconds=1, message="", details={"carrier": carrier}
        )
        for name, carrier in (("flat", "gloo"), ("two_level", "nccl"))
    ]
    assert page.promises(checks[1:], outcomes)[0] == "Holds here: sums."
    holds, _, not_tried = page.promises(checks, outcomes)
    assert holds == "Holds here: sums over Gloo."
    assert not_tried == "Not tested (1 of 2): sums over NCCL."


def test_a_host_gets_one_of_the_gpus_that_a_scheduler_gave():
    assert [hosts.visible_gpu(rank, "4,5") for rank in (0, 1)] == ["4", "5"]
    assert hosts.visible_gpu(1, "MIG-one,MIG-two") == "MIG-two"
    assert [hosts.visible_gpu(1, visible) for visible in (None, "")] == ["1", "1"]


def test_a_machine_is_asked_for_its_gpus_by_a_process_of_its_own(monkeypatch):
    for name in ("device_count", "get_device_properties", "get_device_capability"):
        monkeypatch.setattr(
            torch.cuda, name, lambda *args, name=name: pytest.fail(f"{name} makes a context here")
        )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    answer = {
        "gpus": ["NVIDIA H100, 80 GiB"],
        "capability": "9.0",
        "cudnn": 91002,
        "nccl": "2.30.7",
    }
    monkeypatch.setattr(
        machine, "_output", lambda *command, **limits: f"a warning\n{json.dumps(answer)}"
    )
    environment = machine.gpu_environment(ROOT)
    assert {name: environment[name] for name in answer} == answer
    monkeypatch.undo()
    if not torch.cuda.is_available():
        assert "gpus" not in machine.gpu_environment(ROOT)


def test_a_queue_of_a_gpu_is_not_filled_by_updates_of_many_launches():
    weights = [torch.zeros(2) for _ in range(567)]
    assert updates.calls_in_a_row(lambda: [weight.add_(1) for weight in weights]) == 1
    assert updates.calls_in_a_row(lambda: torch._foreach_add_(weights, 1)) == 20


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("fault", ["none", "a schedule that does not wait", "no skipped step"])
def test_a_schedule_that_does_not_wait_for_a_skipped_step_fails_the_check(
    tmp_path, monkeypatch, fault
):
    request = CheckRequest(device="cpu", folder=tmp_path, limit_s=60)
    if fault == "a schedule that does not wait":
        monkeypatch.setattr(ScheduleGuard, "guard", lambda self, config: None)
    if fault == "no skipped step":
        monkeypatch.setattr(scales, "DynamicLossScale", lambda init_scale: DynamicLossScale())
    if fault == "none":
        assert scales.dynamic_scale(request)["num_skipped"] == {"lars": 1, "sgd": 1}
        return
    words = {"no skipped step": "one step must be skipped"}.get(
        fault, "the learning rate after 3 steps, of which 1 were skipped"
    )
    with pytest.raises(AssertionError, match=words):
        scales.dynamic_scale(request)
