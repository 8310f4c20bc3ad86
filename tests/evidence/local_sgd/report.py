"""The table and the picture of accuracy against bytes between nodes."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tests.evidence.local_sgd.training import ARMS

Row = dict[str, Any]

LEAST = 84.0  # of the picture, in %


def chosen(rows: list[Row], optimizer: str, arm: str) -> tuple[float, list[Row]]:
    """Return the rate with which seed 0 was best in validation, and the rows of other seeds with it."""
    of_cell = [row for row in rows if row["optimizer"] == optimizer and row["arm"] == arm]
    tried = [row for row in of_cell if row["seed"] == 0]
    if not tried:
        return 0.0, []
    lr = max(tried, key=lambda row: row["val"])["lr"]
    return lr, [row for row in of_cell if row["lr"] == lr and row["seed"] != 0]


def table(rows: list[Row]) -> str:
    """Return a row of Markdown for each arm and optimizer.

    >>> row = {"optimizer": "SGD", "arm": "8 steps of 128 images", "lr": 0.25, "val": 80.0, "test": 81.0}
    >>> row |= {"test_recalibrated": 82.0, "bytes": 2e6, "num_syncs": 16}
    >>> print(table([row | {"seed": 0}, row | {"seed": 1}, row | {"seed": 2, "test": 83.0}]))
    | arm | optimizer | rate | synchronisations | MB a node sends | accuracy in % | recalibrated | seeds |
    |---|---|---|---|---|---|---|---|
    | 8 steps of 128 images | SGD | 0.25 | 16 | 2.0 | 82.0 ± 1.4 | 82.0 ± 0.0 | 2 |
    """
    lines = [
        "| arm | optimizer | rate | synchronisations | MB a node sends | accuracy in % | recalibrated | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        for optimizer in ("SGD", "orthogonal"):
            lr, found = chosen(rows, optimizer, arm)
            if found:
                of = [found[0]["num_syncs"], f"{found[0]['bytes'] / 1e6:.1f}"]
                of += [_spread([row[key] for row in found]) for key in ("test", "test_recalibrated")]
                lines.append("| " + " | ".join(map(str, [arm, optimizer, lr, *of, len(found)])) + " |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{mean(values):.1f} ± {stdev(values) if len(values) > 1 else float('nan'):.1f}"


def write_report(folder: Path, rows: list[Row]) -> None:
    """Write `table.md` and `accuracy.svg`."""
    (folder / "table.md").write_text(table(rows) + "\n")
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9.6, 4.2))
    cells = [(arm, kind) for arm in ARMS for kind in ("SGD", "orthogonal") if chosen(rows, kind, arm)[1]]
    names = []
    for number, (arm, kind) in enumerate(cells, 1):
        found = chosen(rows, kind, arm)[1]
        x, y = found[0]["bytes"] / 1e6, mean(row["test"] for row in found)
        names.append(f"{number:2}  {arm}, {kind}" + (f": {y:.1f} %" if y < LEAST else ""))
        if y >= LEAST:
            colour = "tab:gray" if kind == "SGD" else "tab:blue"
            axes.plot(x, y, "s" if arm.startswith("synchronous") else "o", color=colour)
            axes.annotate(str(number), (x, y), textcoords="offset points", xytext=(5, 4 - 8 * (number % 2)), fontsize=8)
    axes.set(xscale="log", xlabel="MB that a node sends to others", ylabel="test accuracy in %", ylim=(LEAST, None))
    axes.text(1.03, 1.0, "\n".join(names), transform=axes.transAxes, va="top", fontsize=7, family="monospace")
    axes.set_title("Eight nodes, glyphs, 131,072 images; grey: SGD, blue: orthogonal", fontsize=9)
    figure.tight_layout()
    figure.savefig(folder / "accuracy.svg", metadata={"Date": None})
    plt.close(figure)
