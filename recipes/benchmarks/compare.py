"""Picture of the steps of several records: `python -m recipes.benchmarks.compare OUT.png RECORD...`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from recipes.benchmarks.report import Timing

NAMES = {"ddp": "stock ddp, fp32", "fp16_compress": "ddp, fp16_compress_hook", "auto": "hybrid_allreduce, 16-true"}
CODECS = {"auto_int8": "8 bits between nodes", "auto_int4": "4 bits between nodes"}
NETWORKS = {
    "linear_8mib": "8 MiB of gradients",
    "linear_8mib_arithmetic": "8 MiB, with arithmetic",
    "resnet50": "ResNet-50",
    "alexnet": "AlexNet",
}


def steps_of(record: Path) -> tuple[str, float, list[Timing]]:
    """Return layout, rate of a link and rows of whole steps. `record`: the folder of a `rows.jsonl`."""
    head, *found = map(json.loads, (record / "rows.jsonl").read_text().splitlines())
    rows = []
    for row in found:
        if row["section"] == "step":
            del row["median_s"]
            rows.append(Timing(**{**row, "times_s": tuple(row["times_s"])}))
    nodes = head["title"].partition("=")[2].split()
    return f"{nodes[0]} x {nodes[3]}", head["config"]["link_bytes_per_s"], rows


def line_of(layout: str, rate: float, rows: Sequence[Timing]) -> str:
    """Format a Markdown row: medians [least, most] in ms, ratios to `auto`, `auto` over its byte bound."""
    by_arm = {row.arm: row for row in rows}
    ours = by_arm["auto"]

    def cell(row: Timing) -> str:
        return f"{row.median_s * 1e3:.0f} [{min(row.times_s) * 1e3:.0f}, {max(row.times_s) * 1e3:.0f}]"

    ratios = [f"{by_arm[arm].median_s / ours.median_s:.2f}" for arm in ("ddp", "fp16_compress")]
    bounds = [f"{by_arm[arm].median_s / (by_arm[arm].bound_s(rate) or 1):.2f}" for arm in NAMES]
    cells = [NETWORKS[ours.case], layout, *(cell(by_arm[arm]) for arm in NAMES), *ratios, *bounds]
    return "| " + " | ".join(cells) + " |"


def picture(records: Sequence[tuple[str, float, list[Timing]]]) -> Figure:
    """Draw a panel for each gradient set, a group of bars for each layout; a tick on a bar is its byte bound."""
    cases = list(dict.fromkeys(row.case for _, _, rows in records for row in rows))
    figure = Figure(figsize=(4.2 * len(cases), 3.6), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(cases), squeeze=False).flat, cases, strict=True):
        groups = [(layout, rate, rows) for layout, rate, rows in records if rows[0].case == case]
        for index, (_, rate, rows) in enumerate(groups):
            width = 0.84 / len(rows)
            in_order = [(row, name) for arm, name in (NAMES | CODECS).items() for row in rows if row.arm == arm]
            for place, (row, name) in enumerate(in_order):
                where = index + width * (place - (len(rows) - 1) / 2)
                axes.bar(where, row.median_s, width=0.93 * width, color=f"C{place}", label=name)
                axes.text(where, row.median_s, f"{row.median_s:.2g}", ha="center", va="bottom", fontsize=8)
                bound = row.bound_s(rate)
                if bound is not None:
                    ends = where - width / 2, where + width / 2
                    axes.hlines(bound, *ends, color="black", linewidth=1.5, label="byte bound")
        axes.set_xticks(range(len(groups)), [layout for layout, *_ in groups])
        axes.set_title(NETWORKS[case])
        axes.set_xlabel("nodes x ranks")
        axes.set_ylabel("s per step")
    named = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named, fontsize=8, loc="outside lower center", ncol=4)
    return figure


def main() -> None:
    """Write the picture, print the table."""
    out, *folders = sys.argv[1:]
    records = [steps_of(Path(folder)) for folder in folders]
    picture(records).savefig(out, dpi=110)
    heads = ["gradients", "nodes x ranks", *NAMES.values(), "over ddp", "over fp16_compress"]
    heads += [f"{arm} / bound" for arm in ("ddp", "fp16_compress", "ours")]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for record in records:
        print(line_of(*record))


if __name__ == "__main__":
    main()
