"""What a check leaves: a page, an archive to send, three plain lines, rows for the records' table of results."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

from lightning_hybrid.callbacks.run_report import html_page
from recipes.gpu.runner import Check, CheckOutcome, Details, summary

ARCHIVE = "gpu_report.zip"
MOST_BYTES = 4 * 2**20  # of logs, before compression: the archive stays below 5 MB
COMMAND = "`python recipes/gpu_check.py`"
RECORDS = "recipes/records/README.md"
TEMPLATE = Path(__file__).parent / "templates" / "gpu_check.html"


def promises(checks: Sequence[Check], outcomes: Sequence[CheckOutcome]) -> list[str]:
    """Return three lines: the promises of README that hold on this machine, that do not, that were not tried.

    One that a check refutes does not hold; one of which a check was skipped or is missing, and none refutes, counts as
    not tried.

    >>> check = Check(name="lars", run=dict, limit_s=1, promise="LARS")
    >>> promises([check], [CheckOutcome(name="lars", status="PASS", seconds=1, message="")])
    ['Holds here: LARS.', 'Does not hold here: nothing.', 'Not tried: nothing.']
    """
    found: dict[str, set[str]] = {}
    of_names = {one.name: one.status for one in outcomes}
    for check in checks:
        if check.promise:
            found.setdefault(check.promise, set()).add(of_names.get(check.name, "SKIP"))
    lines = {"Holds here": list[str](), "Does not hold here": [], "Not tried": []}
    for promise, statuses in found.items():
        is_refuted, is_open = "FAIL" in statuses, "SKIP" in statuses
        lines["Does not hold here" if is_refuted else "Not tried" if is_open else "Holds here"].append(promise)
    return [f"{words}: {'; '.join(names) or 'nothing'}." for words, names in lines.items()]


def write(out: Path, checks: Sequence[Check], outcomes: Sequence[CheckOutcome], environment: Details) -> None:
    """Write `report.html`, and `gpu_report.zip` with it, `report.json`, ends of all logs and NCCL's first lines."""
    (out / "report.html").write_text(_page(checks, outcomes, environment))
    logs = sorted(path for path in out.glob("*/*") if path.name == "log" or path.suffix == ".log")
    share = min(2**16, MOST_BYTES // max(1, len(logs)))
    unfinished = out / f"{ARCHIVE}.tmp"
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("report.json", "report.html"):
            archive.write(out / name, name)
        for path in logs:
            is_nccl = path.name.startswith("nccl.")
            with path.open("rb") as file:
                file.seek(0 if is_nccl else max(0, path.stat().st_size - share))
                archive.writestr(str(path.relative_to(out)), file.read(min(share, 8192) if is_nccl else share))
    unfinished.rename(out / ARCHIVE)


def _page(checks: Sequence[Check], outcomes: Sequence[CheckOutcome], environment: Details) -> str:
    gpus = environment.get("gpus")
    title = f"GPU check: {len(gpus)} x {gpus[0]}" if gpus else "GPU check: what a CPU can answer"
    return html_page.render(
        TEMPLATE,
        title=title,
        summary=[*promises(checks, outcomes), summary(outcomes)],
        outcomes=outcomes,
        short_facts={name: value for name, value in environment.items() if "\n" not in str(value)},
        long_facts={name: value for name, value in environment.items() if "\n" in str(value)},
    )


# ---- records ---------------------------------------------------------------------------------------------------------


def rows(checks: Sequence[Check], outcomes: Sequence[CheckOutcome], environment: Details) -> list[str]:
    """Return rows of the records' table of results: what holds, then each check of speed that gave a number."""
    gpus = environment.get("gpus") or ["a CPU"]
    said = [" ".join(promises(checks, outcomes)[:2])]
    said += [one.message.replace("|", "/") for one in outcomes if one.status in ("FAST", "SLOW")]
    where, commit = f"{len(gpus)} x {gpus[0]}, torch {environment['torch']}", environment.get("commit") or "a wheel"
    return [f"| {COMMAND} | {where}: {words} | {ARCHIVE} of {commit[:8]} |" for words in said]


def write_rows(page: Path, new: Sequence[str]) -> None:
    """Put rows at the end of the first table after `## Results`, in place of those that an earlier check put there.

    Raises:
        ValueError: there is no such table.
    """
    lines = page.read_text().splitlines() if page.is_file() else []
    heading = next((at for at, line in enumerate(lines) if line.startswith("## Results")), len(lines))
    start = next((at for at in range(heading, len(lines)) if lines[at].startswith("|")), None)
    if start is None:
        raise ValueError(f"`readme` (={page}) must have a table under `## Results`: readme={RECORDS}.")
    end = next((at for at in range(start, len(lines)) if not lines[at].startswith("|")), len(lines))
    kept = [line for line in lines[start:end] if not line.startswith(f"| {COMMAND} |")]
    page.write_text("\n".join([*lines[:start], *kept, *new, *lines[end:], ""]))
