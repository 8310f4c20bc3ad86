"""Draws the picture of the first page from two records: `python docs/steps_figure.py`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from lightning_hybrid.callbacks.run_report.figure import write_svg
from recipes.benchmarks.report import Timing, draw_bars

RECORDS = Path(__file__).resolve().parents[1] / "recipes" / "records" / "bench"
# Title, record, and the arms with the words for them.
PANELS = (
    (
        "Over an emulated link of 100 Mbit/s: {auto:.1f} times as fast as ddp, with 4 bits {auto_int4:.0f} times",
        "2026-11-23_codecs_resnet50_2x2_2-core-cpu",
        {
            "ddp": "ddp",
            "fp16_compress": "ddp, fp16 hook",
            "auto": "hybrid_allreduce",
            "auto_int8": "8 bits between hosts",
            "auto_int4": "4 bits between hosts",
        },
    ),
    (
        "On one host in fp16: slower than ddp",
        "2026-11-21_one_host_steps_4_ranks_large_buckets_2-core-cpu",
        {
            "ddp": "ddp",
            "auto_fp32": "hybrid_allreduce, 32-true",
            "auto": "hybrid_allreduce, 16-true",
        },
    ),
)


def steps_of(record: str) -> list[Timing]:
    """Return what a record says of steps with ResNet-50's gradients."""
    path = RECORDS / record / "rows.jsonl"
    if not path.exists():
        path = RECORDS / "emulated.jsonl"  # the rows of many records, by name
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if row.get("record", record) == record and "title" not in row]
    rows = [row for row in rows if (row["section"], row["case"]) == ("step", "resnet50")]
    left_out = ("median_s", "record")
    return [
        Timing(**{name: value for name, value in row.items() if name not in left_out})
        for row in rows
    ]


if __name__ == "__main__":
    panels = []
    for title, record, words in PANELS:
        rows = steps_of(record)
        first = next(row for row in rows if row.arm == "ddp")
        title = title.format(**{row.arm: first.median_s / row.median_s for row in rows})
        panels.append((partial(draw_bars, title, rows, words, None), 90 + 42 * len(words)))
    write_svg(RECORDS / "steps.svg", panels)
