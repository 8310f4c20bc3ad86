"""Simulator against published results, nothing fitted to them: `python -m tests.evidence.planner.published`.

Each row is a published result, and what the model says of that cluster with the constants of
conf/cluster. Where the publication leaves something open, the last column says what was assumed.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from recipes.cli.results import environment, write_json
from tests.evidence.planner.known_clusters import PublishedRow
from tests.evidence.planner.published_rows import published_rows


def markdown(found: list[PublishedRow]) -> str:
    """Format a table."""
    lines = [
        "| result | published | predicted | predicted / published | source | assumed |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        published, predicted = (f"{value:.3g} {row.unit}" for value in (row.published, row.predicted))
        lines.append(f"| {row.what} | {published} | {predicted} | {row.ratio:.2f} | {row.source} | {row.note} |")
    return "\n".join(lines)


def write(found: list[PublishedRow]) -> None:
    """Print the table; write it into the folder that is the first argument, where there is one."""
    print(markdown(found))
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
        content = {"rows": [asdict(row) | {"ratio": row.ratio} for row in found], "environment": environment()}
        write_json(folder / "published.json", content)
        (folder / "table.md").write_text(markdown(found) + "\n")


if __name__ == "__main__":
    write(published_rows())
