"""Runner of checks, each in a process of its own with a time limit."""

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

NO_TIME = "no time left: give more `minutes`"
ON_GLOO = "gloo"
"""Value of `carrier` in the details of a check whose ranks talked over Gloo: NCCL was not tried."""


class NotHere(Exception):  # noqa: N818  no error
    """Reason for which this machine cannot answer a check: it is skipped."""


class NotInTimeError(AssertionError):
    """Error of a check whose ranks were not done in the time that it gave them."""


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """Request for one check: its device, folder and time.

    Attributes:
        device: "cuda" or "cpu".
        folder: An empty folder for its files.
        limit_s: Seconds after which the check is stopped.
        is_cut: Whether that limit is shorter than usual, because the time for all checks runs out.
        num_gpus: GPUs of this machine, counted by another process: counting them here could make a CUDA context, after
            which no process may be forked.
    """

    device: Literal["cuda", "cpu"]
    folder: Path
    limit_s: float
    is_cut: bool = False
    num_gpus: int = 0

    @property
    def on_cuda(self) -> bool:
        """True if the numbers are those of a GPU."""
        return self.device == "cuda"


Run = Callable[[CheckRequest], Details]


@dataclass(frozen=True, kw_only=True)
class Check:
    """Question about this machine.

    `run` returns what it found, as JSON can hold it: `message`, a line for people, any tables, and `status` where
    that is not PASS: speed is FAST or SLOW, not right or wrong. It raises where the answer is no, or `NotHere`. On a
    CPU it has as long as on a GPU. `promise`: what of README it tries, in a few words; none for speed. `gpu_s`: how
    long it takes on one GPU, an estimate; 0 where it needs several.
    """

    name: str
    run: Run
    limit_s: float
    promise: str = ""
    gpu_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CheckOutcome:
    """Result of a check. `message` is a line, the reason of a SKIP. `details` all that was found."""

    name: str
    status: Literal["PASS", "FAIL", "SKIP", "FAST", "SLOW"]
    seconds: float
    message: str
    details: Details = field(default_factory=dict)

    def line(self) -> str:
        """Format a line for the terminal.

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
    """Run one check after the other. Skip the rest, and the one that is cut, when `limit_s` is over."""
    end_s = time.monotonic() + limit_s
    outcomes = list[CheckOutcome]()
    # The server of processes imports everything when the first process is asked for: no check pays for that.
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
    """Run a check in a fresh process, and end that with all that it started. Its folder's `log` has its output."""
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
        # The check leads a group: ranks and workers that it started end with it.
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()
    process.join()
    if code is None and request.is_cut:
        result: Details = {"status": "SKIP", "message": NO_TIME}
    elif code is None:
        result = {
            "status": "FAIL",
            "message": f"not done after {limit_s:.0f} s; see {folder / 'log'}",
        }
    elif not answer.exists():
        if code < 0:
            died = f"by signal {-code}"
        else:
            died = f"with exit code {code}"
        result = {"status": "FAIL", "message": f"its process ended {died}; see {folder / 'log'}"}
    else:
        result = json.loads(answer.read_text())
    if result["status"] == "FAIL":
        result["details"] = result.get("details", {}) | {
            "log": (folder / "log").read_text(errors="replace")[-4000:]
        }
    return CheckOutcome(name=check.name, seconds=seconds, **result)


def _forkserver() -> Any:
    """Return the context whose server imports once. A CUDA context is in no process but a check's."""
    search_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        dict.fromkeys([str(ROOT), *filter(None, search_path)])
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _be(run: Run, request: CheckRequest) -> None:
    """Be the process of a check, and the leader of a group of processes, so that all of them can be ended."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    threading.Thread(
        target=_end_with, args=(multiprocessing.parent_process(),), daemon=True
    ).start()
    # NCCL's first lines, a file for each process.
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
    os._exit(0)  # a thread that waits for a rank that is gone keeps no check from its end


def _end_with(parent: Any) -> None:
    """End this group when the program is killed: who starts it again finds no GPU in use."""
    parent.join()
    os.killpg(os.getpid(), signal.SIGKILL)


# ---- what was asked for ----------------------------------------------------------------------------------------------


def keys_from(arguments: Sequence[str]) -> dict[str, str]:
    """Return `out`, `minutes`, `only`, `again` and `readme` of the command line.

    >>> keys_from(["out=here", "minutes=2"])
    {'out': 'here', 'minutes': '2'}

    Raises:
        ValueError: Another key, or no key at all.
    """
    keys = dict(word.partition("=")[::2] for word in arguments)
    for key in keys:
        if key not in ("out", "minutes", "only", "again", "readme"):
            usage = "out=DIR, minutes=50, only=NAME,NAME, again=NAME,NAME or readme=FILE"
            raise ValueError(f"`{key}` is not known: give {usage}.")
    return keys


def chosen(only: str, checks: Sequence[Check], *, key: str = "only") -> list[Check]:
    """Return the checks whose names are in `only`, separated by commas. All where it is empty.

    Raises:
        ValueError: A name is no check.
    """
    names = list(filter(None, only.split(",")))
    checks_by_name = {check.name: check for check in checks}
    for name in names:
        if name not in checks_by_name:
            raise ValueError(f"`{key}` (={name}) must be a check: {', '.join(checks_by_name)}.")
    return [checks_by_name[name] for name in names] or list(checks)


# ---- what comes of it ------------------------------------------------------------------------------------------------


def write_outcomes(path: Path, outcomes: Sequence[CheckOutcome], environment: Details) -> None:
    """Write everything that was found, with the versions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    checks = [asdict(outcome) for outcome in outcomes]
    unfinished = path.with_suffix(".tmp")  # a machine may be taken back at any time
    unfinished.write_text(
        json.dumps({"environment": environment, "checks": checks}, indent=1) + "\n"
    )
    unfinished.rename(path)


def read_report(path: Path) -> tuple[list[CheckOutcome], Details]:
    """Return outcomes and environment as `write_outcomes` wrote them.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    try:
        content = json.loads(path.read_text())
        return [CheckOutcome(**row) for row in content["checks"]], content["environment"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"`out` (={path.parent}) must hold the report.json of a check: {error}."
        ) from error


def done_before(path: Path, environment: Details) -> list[CheckOutcome]:
    """Return what passed on this machine, with the same versions and unchanged code."""
    try:
        outcomes, there = read_report(path)
    except ValueError:
        return []
    is_same = there == environment and not environment.get("has_changes")
    return [outcome for outcome in outcomes if is_same and outcome.status not in ("FAIL", "SKIP")]


def tables(outcomes: Sequence[CheckOutcome]) -> str:
    """Format all `table`s that checks returned, lists of rows of one form, in Markdown."""
    named_tables = [
        (outcome.name, rows) for outcome in outcomes if (rows := outcome.details.get("table"))
    ]
    cells = [
        (name, list(rows[0]), [[str(cell) for cell in row.values()] for row in rows])
        for name, rows in named_tables
    ]
    return "\n\n".join(f"{name}\n\n{markdown_table(header, body)}" for name, header, body in cells)


def summary(outcomes: Sequence[CheckOutcome]) -> str:
    """Count passed, failed and skipped checks, and those of speed.

    >>> summary([CheckOutcome(name="x", status="PASS", seconds=0.0, message="")])
    '1 passed, 0 failed, 0 skipped; of speed 0 fast, 0 slow.'
    """
    counts = [
        sum(outcome.status == status for outcome in outcomes)
        for status in ("PASS", "FAIL", "SKIP", "FAST", "SLOW")
    ]
    return "{} passed, {} failed, {} skipped; of speed {} fast, {} slow.".format(*counts)


def limit_s_from(minutes: str) -> float:
    """Return the time limit of all checks together.

    Raises:
        ValueError: It is no number above zero.

    >>> limit_s_from("0.5")
    30.0
    """
    try:
        limit_s = 60 * float(minutes)
    except ValueError:
        limit_s = 0.0
    if not 0 < limit_s < 86_400:
        raise ValueError(
            f"`minutes` (={minutes}) must be a number above zero, of a day at most: minutes=8."
        )
    return limit_s
