"""Draws the picture of the first page from two records: `python .docs/steps_figure.py`."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RECORDS = Path(__file__).resolve().parents[1] / "recipes" / "records" / "bench"
TITLE = "3 times as fast as ddp over slow links, 11 times with 4 bits; on one host 16-true is slower"
# Panel, record, case, and the arms with the words for them.
PANELS = (
    (
        "ResNet-50's gradients on CPUs: two hosts of two ranks, emulated link of 100 Mbit/s",
        "2026-11-23_codecs_resnet50_2x2_2-core-cpu",
        {
            "ddp": "ddp",
            "fp16_compress": "ddp, fp16 hook",
            "auto": "hybrid_allreduce",
            "auto_int8": "  8 bits between hosts",
            "auto_int4": "  4 bits between hosts",
        },
    ),
    (
        "The same on one host, four ranks",
        "2026-11-21_one_host_steps_4_ranks_large_buckets_2-core-cpu",
        {"ddp": "ddp", "auto_fp32": "hybrid_allreduce, 32-true", "auto": "hybrid_allreduce, 16-true"},
    ),
)
THEMES = {"steps.svg": ("#1f2328", "#8c959f", "#0969da"), "steps_dark.svg": ("#e6edf3", "#7d8590", "#4493f8")}


def medians_s(record: str) -> dict[str, float]:
    """Return the median seconds of a step with ResNet-50's gradients, by arm."""
    rows = [json.loads(line) for line in (RECORDS / record / "rows.jsonl").read_text().splitlines()[1:]]
    return {row["arm"]: row["median_s"] for row in rows if (row["section"], row["case"]) == ("step", "resnet50")}


def draw(
    axes: Axes, title: str, seconds: dict[str, float], words: dict[str, str], colours: tuple[str, str, str]
) -> None:
    """Draw one bar an arm, with its name before it and its value behind it."""
    text, grey, own = colours
    for i, arm in enumerate(words):
        value, is_own = seconds[arm], arm.startswith("auto")
        axes.barh(-i, value, color=own if is_own else grey, height=0.62)
        times = seconds["ddp"] / value
        said = f"{value:.3g} s" + ("" if arm == "ddp" else f", {times:.2f} x" if times < 2 else f", {times:.1f} x")
        axes.annotate(said, (value, -i), (5, 0), textcoords="offset points", va="center", color=text)
    axes.set_yticks([-i for i in range(len(words))], list(words.values()), color=text)
    axes.set_xticks([])
    axes.set_xlim(0, 1.28 * max(seconds[arm] for arm in words))
    axes.set_title(title, loc="left", color=text, fontsize=11)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def main() -> None:
    """Write the picture for a light and for a dark page."""
    for name, colours in THEMES.items():
        with rc_context(
            {"svg.hashsalt": "steps", "svg.fonttype": "none", "font.size": 11, "font.family": "sans-serif"}
        ):
            figure = Figure(figsize=(9.2, 3.9), layout="constrained")
            shares = [len(words) for _, _, words in PANELS]
            for axes, (title, record, words) in zip(figure.subplots(2, 1, height_ratios=shares), PANELS, strict=True):
                draw(axes, title, medians_s(record), words, colours)
            figure.suptitle(TITLE, x=0.01, ha="left", color=colours[0], fontsize=12, weight="bold")
            figure.savefig(RECORDS / name, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
