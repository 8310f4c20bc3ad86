"""Runner that executes each check in its own process with a time limit."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_hybrid.formatting import markdown_table

Details = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
_PRELOADED = "exchange features fits hosts losses scales speed waits worlds".split()
PRELOADED = [f"recipes.gpu.{name}" for name in _PRELOADED]

NO_TIME = "No time was left. Increase `minutes`."
ON_GLOO = "gloo"
"""Value of `carrier` in the details of a check whose ranks communicated over Gloo.

NCCL was not tested by such a check.
"""


class NotHere(Exception):  # noqa: N818  not an error
    """Exception raised by a check that this machine cannot run, which then counts as skipped."""


class NotInTimeError(AssertionError):
    """Error raised if the ranks of a check do not finish within their time limit."""


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """Request to run one check, with its device, folder and time limit.

    Attributes:
        device: "cuda" or "cpu".
        folder: Empty folder for the files of the check.
        limit_s: Seconds after which the check is stopped.
        is_cut: Whether `limit_s` is shorter than usual, because the total time for all checks is nearly over.
        num_gpus: Number of GPUs of this machine, counted by another process. Counting them here could create a CUDA
            context, after which no process can be forked.
    """

    device: Literal["cuda", "cpu"]
    folder: Path
    limit_s: float
    is_cut: bool = False
    num_gpus: int = 0

    @property
    def on_cuda(self) -> bool:
        """True if the check runs on a GPU."""
        return self.device == "cuda"


Run = Callable[[CheckRequest], Details]


@dataclass(frozen=True, kw_only=True)
class Check:
    """Check of a feature or of its speed, with its function and time limit.

    `run` returns its results as JSON data: `message` (a line for the user), optional tables, and `status` if it is not
    PASS. Checks of speed have the status FAST or SLOW. `run` raises an error if the check fails, or `NotHere` to skip
    it. The time limit is the same on a CPU. `promise`: the guarantee of the README that is checked, in a few words. It
    is empty for checks of speed. `gpu_s`: estimated seconds on one GPU, or 0 if the check needs several GPUs.
    """

    name: str
    run: Run
    limit_s: float
    promise: str = ""
    gpu_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CheckOutcome:
    """Result of one check, with its status and duration.

    `message` is one line, and gives the reason if the check was skipped. `details` contains all results.
    """

    name: str
    status: Literal["PASS", "FAIL", "SKIP", "FAST", "SLOW"]
    seconds: float
    message: str
    details: Details = field(default_factory=dict)

    def line(self) -> str:
        """Format the result as a line for the terminal.

        >>> print(CheckOutcome(name="sums", status="FAIL", seconds=1.234, message="not equal").line())
        FAIL  sums                          1.2 s  not equal
        """
        return f"{self.status}  {self.name:<26}{self.seconds:>7.1f} s  {self.message}"


def run_checks(
    checks: Sequence[Check],
    device: Literal["cuda", "cpu"],
    out: Path,
    *,
    limit_s: float,
    on_outcome: Callable[[CheckOutcome], None],
    num_gpus: int = 0,
) -> list[CheckOutcome]:
    """Run checks one after another until the total time limit is reached, and skip those that remain.

    A check that is stopped because the total limit `limit_s` is reached counts as skipped.
    """
    end_s = time.monotonic() + limit_s
    outcomes = list[CheckOutcome]()
    # The fork server imports all modules when it starts the first process, so that imports do not count as check time.
    first = _forkserver().Process(target=int)
    first.start()
    first.join(limit_s)
    for check in checks:
        left_s = end_s - time.monotonic()
        outcome = CheckOutcome(name=check.name, status="SKIP", seconds=0.0, message=NO_TIME)
        if left_s > 0:
            request = CheckRequest(
                device=device,
                folder=out / check.name,
                limit_s=min(check.limit_s, left_s),
                is_cut=left_s < check.limit_s,
                num_gpus=num_gpus,
            )
            outcome = run_one(check, request)
        on_outcome(outcome)
        outcomes.append(outcome)
    return outcomes


def run_one(check: Check, request: CheckRequest) -> CheckOutcome:
    """Run a check in a new process with a time limit, and then kill all processes that it has started.

    The output goes to the file `log` in the folder of the check.
    """
    folder = request.folder
    limit_s = request.limit_s
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log").touch()
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    start_s = time.monotonic()
    process = _forkserver().Process(target=_be, args=(check.run, request))
    process.start()
    process.join(limit_s)
    seconds = time.monotonic() - start_s
    code = process.exitcode
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # The check leads a process group, so ranks and workers that it started are killed with it.
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()
    process.join()
    if code is None and request.is_cut:
        result: Details = {"status": "SKIP", "message": NO_TIME}
    elif code is None:
        result = {
            "status": "FAIL",
            "message": f"The check did not finish within {limit_s:.0f} s. See {folder / 'log'}.",
        }
    elif not answer.exists():
        if code < 0:
            died = f"by signal {-code}"
        else:
            died = f"with exit code {code}"
        result = {
            "status": "FAIL",
            "message": f"The process of the check ended {died}. See {folder / 'log'}.",
        }
    else:
        result = json.loads(answer.read_text())
    if result["status"] == "FAIL":
        result["details"] = result.get("details", {}) | {
            "log": (folder / "log").read_text(errors="replace")[-4000:]
        }
    return CheckOutcome(name=check.name, seconds=seconds, **result)


def _forkserver() -> Any:
    """Return a multiprocessing context whose fork server has already imported the modules of all checks.

    The fork server has no CUDA context. Only the processes of checks create one.
    """
    search_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        dict.fromkeys([str(ROOT), *filter(None, search_path)])
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _be(run: Run, request: CheckRequest) -> None:
    """Run a check in this child process, and write its result to `answer.json`.

    The child process leads a new process group, so that all processes of the check can be killed together.
    """
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    threading.Thread(
        target=_end_with, args=(multiprocessing.parent_process(),), daemon=True
    ).start()
    # NCCL writes its first messages to one file per process.
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(request.folder / "nccl.%p.log")}
    with (request.folder / "log").open("wb", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        details = run(request)
        said = {"status": details.pop("status", "PASS"), "message": details.pop("message", "")}
        result: Details = {**said, "details": details}
    except NotHere as reason:
        result = {"status": "SKIP", "message": str(reason)}
    except NotInTimeError as error:
        traceback.print_exc()
        result = {
            "status": "FAIL",
            "message": f"{error}"[:300],
            "details": {"error": traceback.format_exc()[-4000:]},
        }
        if request.is_cut:
            result = {"status": "SKIP", "message": f"{NO_TIME} ({error})"[:300]}
    except BaseException as error:
        traceback.print_exc()
        lines = f"{type(error).__name__}: {error}".splitlines()
        result = {
            "status": "FAIL",
            "message": lines[0][:300],
            "details": {"error": traceback.format_exc()[-4000:]},
        }
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    unfinished = request.folder / "answer.tmp"
    unfinished.write_text(json.dumps(result))
    unfinished.rename(request.folder / "answer.json")
    os._exit(0)  # a thread that waits for a failed rank must not keep the process alive


def _end_with(parent: Any) -> None:
    """Wait until the parent process ends, then kill this process group to free its GPUs."""
    parent.join()
    os.killpg(os.getpid(), signal.SIGKILL)


# ---- command line ----------------------------------------------------------------------------------------------------


def keys_from(arguments: Sequence[str]) -> dict[str, str]:
    """Parse `key=value` arguments of the command line into a dictionary.

    The keys are `out`, `minutes`, `only`, `again` and `readme`.

    >>> keys_from(["out=here", "minutes=2"])
    {'out': 'here', 'minutes': '2'}

    Raises:
        ValueError: The key is unknown, or the argument is not `key=value`.
    """
    keys = dict(word.partition("=")[::2] for word in arguments)
    for key in keys:
        if key not in ("out", "minutes", "only", "again", "readme"):
            usage = "out=DIR, minutes=50, only=NAME,NAME, again=NAME,NAME or readme=FILE"
            raise ValueError(f"`{key}` is not a known key. Use {usage}.")
    return keys


def chosen(only: str, checks: Sequence[Check], *, key: str = "only") -> list[Check]:
    """Return the checks that a comma-separated list of names selects, or all checks if the list is empty.

    Raises:
        ValueError: There is no check with one of the names.
    """
    names = list(filter(None, only.split(",")))
    checks_by_name = {check.name: check for check in checks}
    for name in names:
        if name not in checks_by_name:
            raise ValueError(
                f"`{key}` (={name}) must be the name of a check. The names are "
                f"{', '.join(checks_by_name)}."
            )
    return [checks_by_name[name] for name in names] or list(checks)


# ---- results ---------------------------------------------------------------------------------------------------------


def write_outcomes(path: Path, outcomes: Sequence[CheckOutcome], environment: Details) -> None:
    """Write the results of all checks and a description of the machine to a JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    checks = [asdict(outcome) for outcome in outcomes]
    unfinished = path.with_suffix(".tmp")  # the machine may fail at any time
    unfinished.write_text(
        json.dumps({"environment": environment, "checks": checks}, indent=1) + "\n"
    )
    unfinished.rename(path)


def read_report(path: Path) -> tuple[list[CheckOutcome], Details]:
    """Read the results of checks and the machine description from a file that `write_outcomes` wrote.

    Raises:
        ValueError: The file does not exist or has different content.
    """
    try:
        content = json.loads(path.read_text())
        return [CheckOutcome(**row) for row in content["checks"]], content["environment"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"`out` (={path.parent}) contains no readable report.json of a GPU check: {error}. "
            "Set out=<folder> to the folder of a check."
        ) from error


def done_before(path: Path, environment: Details) -> list[CheckOutcome]:
    """Return the earlier results that are still valid for this machine, its library versions and the code.

    Failed and skipped checks are not included. Nothing is valid if the git checkout has uncommitted changes.
    """
    try:
        outcomes, there = read_report(path)
    except ValueError:
        return []
    is_same = there == environment and not environment.get("has_changes")
    return [outcome for outcome in outcomes if is_same and outcome.status not in ("FAIL", "SKIP")]


def tables(outcomes: Sequence[CheckOutcome]) -> str:
    """Format the result tables of all checks as Markdown."""
    named_tables = [
        (outcome.name, rows) for outcome in outcomes if (rows := outcome.details.get("table"))
    ]
    cells = [
        (name, list(rows[0]), [[str(cell) for cell in row.values()] for row in rows])
        for name, rows in named_tables
    ]
    return "\n\n".join(f"{name}\n\n{markdown_table(header, body)}" for name, header, body in cells)


def summary(outcomes: Sequence[CheckOutcome]) -> str:
    """Format the numbers of passed, failed, skipped, fast and slow checks as a line of text.

    >>> summary([CheckOutcome(name="x", status="PASS", seconds=0.0, message="")])
    '1 passed, 0 failed, 0 skipped; speed checks: 0 fast, 0 slow.'
    """
    counts = [
        sum(outcome.status == status for outcome in outcomes)
        for status in ("PASS", "FAIL", "SKIP", "FAST", "SLOW")
    ]
    return "{} passed, {} failed, {} skipped; speed checks: {} fast, {} slow.".format(*counts)


def limit_s_from(minutes: str) -> float:
    """Convert the total time limit from minutes, given as text, to seconds.

    Raises:
        ValueError: `minutes` is not a number above zero and at most a day.

    >>> limit_s_from("0.5")
    30.0
    """
    try:
        limit_s = 60 * float(minutes)
    except ValueError:
        limit_s = 0.0
    if not 0 < limit_s < 86_400:
        raise ValueError(
            f"`minutes` (={minutes}) must be a number above zero and below 1440 (one day). For "
            "example, set minutes=8."
        )
    return limit_s
