"""Report of the GPU checks as an HTML page, a zip archive, a summary and rows of a Markdown table."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

from lightning_hybrid.callbacks.run_report import html_page
from recipes.gpu.runner import ON_GLOO, Check, CheckOutcome, Details, summary

ARCHIVE = "gpu_report.zip"
# Maximum size of logs before compression, so that the archive stays below 5 MB.
MOST_BYTES = 4 * 2**20
COMMAND = "`python recipes/gpu_check.py`"
RECORDS = "recipes/records/README.md"
TEMPLATE = Path(__file__).parent / "templates" / "gpu_check.html"


def promises(checks: Sequence[Check], outcomes: Sequence[CheckOutcome]) -> list[str]:
    """Return three lines with the guarantees that hold, those that do not hold, and those that were not tested.

    A guarantee does not hold if one of its checks failed. It counts as not tested if a check was skipped or is missing,
    and no check failed. A guarantee that was tested only over Gloo holds "over Gloo", and counts as not tested over
    NCCL.

    >>> check = Check(name="lars", run=dict, limit_s=1, promise="LARS")
    >>> outcome = CheckOutcome(name="lars", status="PASS", seconds=1, message="")
    >>> promises([check], [outcome])
    ['Holds here: LARS.', 'Does not hold here: nothing.', 'Not tested: nothing.']
    >>> outcome.details["carrier"] = "gloo"
    >>> promises([check], [outcome])
    ['Holds here: LARS over Gloo.', 'Does not hold here: nothing.', 'Not tested (1 of 2): LARS over NCCL.']
    """
    by_name = {outcome.name: outcome for outcome in outcomes}
    statuses: dict[str, set[str]] = {}
    over_gloo: set[str] = set()
    for check in checks:
        if not check.promise:
            continue
        outcome = by_name.get(check.name)
        statuses.setdefault(check.promise, set())
        statuses[check.promise].add("SKIP" if outcome is None else outcome.status)
        if outcome is not None and outcome.details.get("carrier") == ON_GLOO:
            over_gloo.add(check.promise)
    kept: list[str] = []
    broken: list[str] = []
    open_: list[str] = []
    for promise, promise_statuses in statuses.items():
        if "FAIL" in promise_statuses:
            broken.append(promise)
        elif "SKIP" in promise_statuses:
            open_.append(promise)
        elif promise in over_gloo:
            kept.append(f"{promise} over Gloo")
            open_.append(f"{promise} over NCCL")
        else:
            kept.append(promise)
    if open_:
        count = f" ({len(open_)} of {len(kept) + len(broken) + len(open_)})"
    else:
        count = ""
    lines = {"Holds here": kept, "Does not hold here": broken, f"Not tested{count}": open_}
    return [f"{words}: {'; '.join(names) or 'nothing'}." for words, names in lines.items()]


def write(
    out: Path, checks: Sequence[Check], outcomes: Sequence[CheckOutcome], environment: Details
) -> None:
    """Write the HTML report of the checks, and a zip archive with the reports and excerpts of all logs.

    The files are `report.html` and `gpu_report.zip`. An excerpt is the end of a log, or the beginning of an
    NCCL log.
    """
    (out / "report.html").write_text(_page(checks, outcomes, environment))
    logs = sorted(path for path in out.glob("*/*") if path.name == "log" or path.suffix == ".log")
    num_logs = max(1, len(logs))
    share = min(2**16, MOST_BYTES // num_logs)
    unfinished = out / f"{ARCHIVE}.tmp"
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("report.json", "report.html"):
            archive.write(out / name, name)
        for path in logs:
            with path.open("rb") as file:
                if path.name.startswith("nccl."):
                    excerpt = file.read(min(share, 8192))
                else:
                    file.seek(max(0, path.stat().st_size - share))
                    excerpt = file.read(share)
            archive.writestr(str(path.relative_to(out)), excerpt)
    unfinished.rename(out / ARCHIVE)


def _page(checks: Sequence[Check], outcomes: Sequence[CheckOutcome], environment: Details) -> str:
    gpus = environment.get("gpus")
    if gpus:
        title = f"GPU check: {len(gpus)} x {gpus[0]}"
    else:
        title = "GPU check: the checks that a CPU can run"
    return html_page.render(
        TEMPLATE,
        title=title,
        summary=[*promises(checks, outcomes), summary(outcomes)],
        outcomes=outcomes,
        short_facts={name: value for name, value in environment.items() if "\n" not in str(value)},
        long_facts={name: value for name, value in environment.items() if "\n" in str(value)},
    )


# ---- records ---------------------------------------------------------------------------------------------------------


def rows(
    checks: Sequence[Check], outcomes: Sequence[CheckOutcome], environment: Details
) -> list[str]:
    """Return Markdown table rows with the guarantees that hold and the results of the speed checks."""
    gpus = environment.get("gpus") or ["a CPU"]
    said = [" ".join(promises(checks, outcomes)[:2])]
    said += [
        outcome.message.replace("|", "/")
        for outcome in outcomes
        if outcome.status in ("FAST", "SLOW")
    ]
    where = f"{len(gpus)} x {gpus[0]}, torch {environment['torch']}"
    commit = environment.get("commit") or "a wheel"
    return [f"| {COMMAND} | {where}: {words} | {ARCHIVE} of {commit[:8]} |" for words in said]


def write_rows(page: Path, new: Sequence[str]) -> None:
    """Write table rows into the results table of a Markdown page, replacing those of an earlier check.

    The results table is the first table after `## Results`.

    Raises:
        ValueError: There is no results table.
    """
    if page.is_file():
        lines = page.read_text().splitlines()
    else:
        lines = []
    heading = next(
        (at for at, line in enumerate(lines) if line.startswith("## Results")), len(lines)
    )
    start = next((at for at in range(heading, len(lines)) if lines[at].startswith("|")), None)
    if start is None:
        raise ValueError(
            f"`readme` (={page}) has no table under the heading `## Results`. Set readme={RECORDS}."
        )
    end = next((at for at in range(start, len(lines)) if not lines[at].startswith("|")), len(lines))
    kept = [line for line in lines[start:end] if not line.startswith(f"| {COMMAND} |")]
    page.write_text("\n".join([*lines[:start], *kept, *new, *lines[end:], ""]))
