"""The check of a GPU: a check that fails, dies or hangs is a line and not the end; no Hydra and no wandb is needed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from recipes import gpu_check
from recipes.gpu import page, runner, waits, worlds
from recipes.gpu import speed as fast
from recipes.gpu.runner import Check, Given, NotHere
from tests.checkout import ROOT
from tests.without import environment_without

HANGS_AFTER_S = 4  # ample for a process that is forked and starts another


def is_well(given):
    print("said aside")
    return {"message": "all is well", "table": [{"arm": "one", "ms": 1.5}], "device": given.device}


def is_wrong(given):
    print("what led to it")
    raise AssertionError("two is not three\nand more")


def is_elsewhere(given):
    raise NotHere("there is no such thing here")


def dies(given):
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves(given):
    os._exit(3)


def hangs(given):
    """With a process of its own, which must not be left behind either."""
    child = subprocess.Popen(["sleep", "600"])
    (given.folder / "pid").write_text(str(child.pid))
    time.sleep(600)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    out = tmp_path_factory.mktemp("checks")
    checks = [Check(name=run.__name__, run=run, limit_s=60) for run in (is_wrong, dies, leaves, is_elsewhere, is_well)]
    hanging = Check(name="hangs", run=hangs, limit_s=HANGS_AFTER_S)
    said = []
    found = runner.run_checks([*checks[:2], hanging, *checks[2:]], "cpu", out, limit_s=600, on_outcome=said.append)
    assert said == found
    return out, {outcome.name: outcome for outcome in found}


@pytest.mark.long
def test_what_fails_dies_or_hangs_is_a_line_and_the_next_check_runs(outcomes):
    _, found = outcomes
    verdicts = {name: outcome.status for name, outcome in found.items()}
    failed = dict.fromkeys(("hangs", "is_wrong", "dies", "leaves"), "FAIL")
    assert verdicts == failed | {"is_elsewhere": "SKIP", "is_well": "PASS"}
    assert runner.num_failures(list(found.values())) == 4
    assert found["is_wrong"].message == "AssertionError: two is not three"
    assert "ended by signal 11" in found["dies"].message
    assert "ended with exit code 3" in found["leaves"].message
    assert f"not done after {HANGS_AFTER_S} s" in found["hangs"].message
    assert found["is_elsewhere"].message == "there is no such thing here"
    assert found["is_well"].line().split() == ["PASS", "is_well", *found["is_well"].line().split()[2:]]
    assert runner.summary(list(found.values())) == "1 passed, 4 failed, 1 skipped; of speed 0 fast, 0 slow."


@pytest.mark.long
def test_nothing_that_a_hanging_check_started_is_left(outcomes):
    out, _ = outcomes
    pid = int((out / "hangs" / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]


@pytest.mark.long
def test_the_json_holds_what_was_found_and_with_which_versions(outcomes, tmp_path):
    _, found = outcomes
    path = tmp_path / "report.json"
    runner.write_outcomes(path, list(found.values()), {"device": "cpu"} | gpu_check.machine.gpu_environment(ROOT))
    content = json.loads(path.read_text())
    assert content["environment"]["torch"] == torch.__version__
    assert content["environment"]["device"] == "cpu"
    assert {"commit", "has_changes", "lightning", "triton", "cuda", "python"} <= content["environment"].keys()
    by_name = {check["name"]: check for check in content["checks"]}
    assert list(by_name) == list(found)
    assert by_name["is_well"]["details"] == {"table": [{"arm": "one", "ms": 1.5}], "device": "cpu"}
    assert "what led to it" in by_name["is_wrong"]["details"]["log"]
    assert "and more" in by_name["is_wrong"]["details"]["error"]
    assert runner.tables(list(found.values())) == "is_well\n\n| arm | ms  |\n|-----|-----|\n| one | 1.5 |"


def test_a_check_for_which_no_time_is_left_is_skipped_and_says_so(tmp_path):
    (outcome,) = runner.run_checks(
        [Check(name="late", run=is_well, limit_s=60)], "cpu", tmp_path, limit_s=0.0, on_outcome=lambda _: None
    )
    assert (outcome.status, outcome.message) == ("SKIP", "no time left: give more `minutes`")


def sleeps(given):
    time.sleep(60)


def test_a_check_that_the_total_time_cuts_is_skipped_and_one_over_its_own_limit_fails(tmp_path):
    cases = {"cut": (60, 1.0), "slow": (1, 60.0)}
    found = {}
    for name, (limit_s, total_s) in cases.items():
        check = Check(name=name, run=sleeps, limit_s=limit_s)
        (found[name],) = runner.run_checks([check], "cpu", tmp_path, limit_s=total_s, on_outcome=lambda _: None)
    assert (found["cut"].status, found["cut"].message) == ("SKIP", runner.NO_TIME)
    assert found["cut"].seconds >= 1
    assert (found["slow"].status, runner.num_failures(list(found.values()))) == ("FAIL", 1)


def is_slow(given):
    return {"status": "SLOW", "message": "half as fast"}


def test_the_exit_code_is_the_number_of_failures_and_speed_is_none(tmp_path, monkeypatch, capsys):
    checks = [Check(name=run.__name__, run=run, limit_s=60) for run in (is_wrong, is_well, dies, is_slow)]
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    assert gpu_check.main([f"out={tmp_path}", "--device", "cpu"]) == 2
    said = capsys.readouterr().out
    assert "FAIL  is_wrong" in said
    assert "SLOW  is_slow" in said
    assert "1 passed, 2 failed, 0 skipped; of speed 0 fast, 1 slow." in said
    assert [fast.verdict(Given(device="cuda", folder=tmp_path, limit_s=1), is_fast=each) for each in (True, False)] == [
        "FAST",
        "SLOW",
    ]


def test_what_was_found_is_written_at_once_and_a_second_start_goes_on_where_the_first_ended(
    tmp_path, monkeypatch, capsys
):
    clean = {"commit": "abc", "has_changes": False}
    monkeypatch.setattr(gpu_check.machine, "gpu_environment", lambda root: dict(clean))
    checks = [Check(name=run.__name__, run=run, limit_s=60) for run in (is_well, is_slow, is_wrong)]
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    written = []

    def run_one(check, *args, **kwargs):
        if (report := tmp_path / "report.json").exists():
            written.append([each["name"] for each in json.loads(report.read_text())["checks"]])
        return runner.CheckOutcome(
            name=check.name,
            status={"is_slow": "SLOW", "is_wrong": "FAIL"}.get(check.name, "PASS"),
            seconds=0,
            message="",
        )

    monkeypatch.setattr(runner, "run_one", run_one)
    command = [f"out={tmp_path}", "--device", "cpu"]
    assert gpu_check.main(command) == 1
    assert written == [["is_well"], ["is_well", "is_slow"]]
    for more, num_run in (([], 1), (["again=is_well"], 2)):
        del written[:]
        assert gpu_check.main([command[0], *more, *command[1:]]) == 1
        assert len(written) == num_run
    assert "Passed here before, and not run again: is_well, is_slow." in capsys.readouterr().out
    for other in ({"commit": "def"}, {"has_changes": True}):
        del written[:]
        monkeypatch.setattr(gpu_check.machine, "gpu_environment", lambda root, other=other: clean | other)
        gpu_check.main(command)
        assert len(written) == 3


def test_what_makes_the_groups_of_nccl_is_recorded(monkeypatch):
    """Which of two, in a torch that has two, the variable decides."""
    found = {}
    for value in ("0", "1"):
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", value)
        monkeypatch.setattr(dist.Backend, "_plugins", {})
        found[value] = gpu_check.machine.gpu_environment(ROOT)["nccl_made_by"]
    has_two = hasattr(dist, "ProcessGroupNCCL2")
    assert has_two is ("nccl2" in str(found["1"])) is (found["0"] != found["1"])
    assert (found["0"] is None) is not dist.is_nccl_available()


def test_a_gpu_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--device cpu"):
        gpu_check.main([])


# ---- the checks can fail -------------------------------------------------------------------------------------------


def raises_on_one(given, rank, num_ranks):
    if rank == 1:
        raise KeyError("the telling word")
    return {"rank": rank}


def test_a_rank_that_fails_is_named(tmp_path):
    given = Given(device="cpu", folder=tmp_path, limit_s=60)
    check = Check(name="ranks", run=fails_on_a_rank, limit_s=60)
    outcome = runner.run_one(check, given.device, tmp_path, limit_s=60)
    assert (outcome.status, outcome.message) == ("FAIL", "AssertionError: rank 1 of 2: KeyError: 'the telling word'")


def fails_on_a_rank(given):
    return {"answers": worlds.run_world(given, raises_on_one, num_ranks=2, limit_s=50)}


def test_other_bits_are_found():
    one, other = {"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(2), "b": torch.tensor([1.0, 1.0000001])}
    waits.same_bits(one, dict(one), "x")
    with pytest.raises(AssertionError, match="x: 1 of 2 tensors have other bits, the first is b"):
        waits.same_bits(one, other, "x")


def test_a_wait_is_noted_by_the_line_that_asks(tmp_path):
    watch = waits._Watches(Given(device="cpu", folder=tmp_path, limit_s=1))
    watch.on_train_batch_start(None, None, None, 4)
    warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    line = traceback.extract_stack()[-1].lineno - 1
    watch.on_train_batch_end(None, None, None, None, waits.NUM_BATCHES - 2)
    assert watch.places == {f"tests/recipes/gpu/test_gpu_check.py:{line}": 1}


# ---- the whole program ---------------------------------------------------------------------------------------------


@pytest.mark.long
def test_it_runs_without_hydra_wandb_and_simplejpeg(tmp_path):
    """All its modules are imported at once; of the checks some that start processes, train, save and draw no page."""
    names = ("resumes", "who_waits", "one_rank", "two_level", "fabric", "rank_killed", "resnet50", "sums")
    keys = [f"out={tmp_path / 'out'}", f"only={','.join(names)}", "--device", "cpu"]
    command = [sys.executable, str(ROOT / "recipes" / "gpu_check.py"), *keys]
    there = environment_without(tmp_path) | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path, env=there)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {check["name"]: check["status"] for check in content["checks"]} == dict.fromkeys(names, "PASS")
    (resnet,) = (check for check in content["checks"] if check["name"] == "resnet50")
    assert all(isinstance(row["images/s"], float) for row in resnet["details"]["table"])


def notes_that_it_ran(given):
    """The second of three, at its first start, hangs."""
    out, name = given.folder.parent, given.folder.name
    with (out / "ran").open("a") as file:
        file.write(name)
    if name == "b" and not (out / "pid").exists():
        (out / "pid").write_text(str(os.getpid()))
        time.sleep(600)
    return {}


PROGRAM = """
import sys
from recipes import gpu_check
from tests.recipes.gpu.test_gpu_check import Check, notes_that_it_ran

gpu_check.CHECKS = [Check(name=name, run=notes_that_it_ran, limit_s=300) for name in "abc"]
gpu_check.machine.gpu_environment = lambda root: {"torch": "2"}
sys.exit(gpu_check.main(sys.argv[1:]))
"""


@pytest.mark.long
def test_killed_in_the_middle_it_leaves_nothing_behind_and_goes_on_there(tmp_path):
    command = [sys.executable, "-c", PROGRAM, f"out={tmp_path}", "--device", "cpu"]
    there = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "recipes")])}
    with subprocess.Popen(command, env=there) as first:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        first.kill()
    process = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    wait_until(lambda: not process.exists() or "Z" in process.read_text().split()[2])
    subprocess.run(command, env=there, check=True, timeout=300)
    assert (tmp_path / "ran").read_text() == "abbc"
    found, _ = runner.read_report(tmp_path / "report.json")
    assert [(one.name, one.status) for one in found] == [(name, "PASS") for name in "abc"]


def wait_until(is_so, limit_s=200):
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def test_page_archive_and_rows_say_what_was_found(tmp_path):
    statuses = {"good": "PASS", "bad": "FAIL", "late": "SKIP", "quick": "FAST"}
    checks = [Check(name=name, run=is_well, limit_s=1, promise=f"what is {name}") for name in statuses][:3]
    details = {"table": [{"arm": "<b>", "ms": 1.5}], "error": "Traceback <x>"}
    found = [
        runner.CheckOutcome(name=n, status=s, seconds=1, message=f"{n} | x", details=details)
        for n, s in statuses.items()
    ]
    promised = ["Holds here: what is good.", "Does not hold here: what is bad.", "Not tried: what is late."]
    assert page.promises(checks, found) == promised
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "rank0.log").write_bytes(os.urandom(6 << 20) + b"the end")
    (tmp_path / "bad" / "nccl.7.log").write_text("NCCL version 2\n" + "x" * 100_000)
    runner.write_outcomes(tmp_path / "report.json", found, {"torch": "2", "topology": "a\nb"})
    page.write(tmp_path, checks, found, {"torch": "2", "topology": "a\nb"})
    html = (tmp_path / "report.html").read_text()
    assert all(line in html for line in (*promised, "&lt;b&gt;", "Traceback &lt;x&gt;", "<pre>a\nb</pre>", "viewport"))
    assert "http" not in html
    assert (tmp_path / page.ARCHIVE).stat().st_size < 5_000_000
    with zipfile.ZipFile(tmp_path / page.ARCHIVE) as archive:
        assert archive.read("bad/rank0.log").endswith(b"the end")
        assert archive.read("bad/nccl.7.log").startswith(b"NCCL version 2")
        assert {"report.json", "report.html"} < set(archive.namelist())
    readme = tmp_path / "README.md"
    readme.write_text("\n## Results\n\n| command |\n|---|\n| `x` | 1 | y |\n\nAfter.\n")
    for _ in range(2):
        assert gpu_check.main([f"readme={readme}", f"out={tmp_path}"]) == 0
    lines = readme.read_text().splitlines()
    assert [line[:3] for line in lines] == ["", "## ", "", "| c", "|--", "| `", "| `", "| `", "", "Aft"]
    assert "quick / x" in lines[7]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("output=here", "`output` is not known: give out=DIR"),
        ("minutes=abc", "`minutes` (=abc) must be a number above zero"),
        ("only=sums", "`only` (=sums) must be a check: fits_16-true_lars"),
    ],
)
def test_a_wrong_key_is_one_message_and_exit_code_2(capsys, key, words):
    with pytest.raises(SystemExit) as end:
        gpu_check.main(["--device=cpu", key])
    assert end.value.code == 2
    assert words in capsys.readouterr().err
