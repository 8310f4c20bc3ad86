"""Comparison of the best pipeline with data parallelism, as a sentence and a table."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hybrid.formatting import markdown_table
from lightning_hybrid.planning.estimates.parallelism import PipelineChoice

SHOWN_CUTS = 3  # maximum in the sentence, while table.md lists all
CLEARLY_FASTER = 0.01  # fraction of a step that a pipeline must save to be recommended


def what_pays(choices: Sequence[PipelineChoice], data_parallel_s: float) -> str:
    """Return a sentence that says whether data parallelism or a pipeline has the shorter step."""
    best = choices[0]
    places = (
        f", cut before {', '.join(best.first_blocks)}"
        if len(best.first_blocks) <= SHOWN_CUTS
        else ""
    )
    words = (
        f"{best.num_ranks} ranks in a node ({best.schedule}, {best.num_microbatches} micro-batches, bubble "
        f"{best.bubble:.1%}{places})"
    )
    if best.step_s < (1 - CLEARLY_FASTER) * data_parallel_s:
        return (
            f"A pipeline is faster: with {words}, it saves {1 - best.step_s / data_parallel_s:.1%} of a step, if small "
            f"micro-batches are as efficient. To train with it: {' '.join(best.settings)}, in batches of "
            f"{best.num_images:,} images."
        )
    if best.step_s <= data_parallel_s:
        return (
            f"Data parallelism is as fast: the best pipeline, with {words}, saves less than "
            f"{CLEARLY_FASTER:.0%} of a step."
        )
    more = best.step_s / data_parallel_s - 1
    return f"Data parallelism is faster: the best pipeline, with {words}, takes {more:.1%} longer per step."


def pipeline_table(choices: Sequence[PipelineChoice], num_shown: int = 8) -> str:
    """Return a Markdown table of the fastest pipelines."""
    rows = [
        [
            " ".join(choice.settings[1:]),
            f"{choice.step_s:.4g}",
            f"{choice.bubble:.1%}",
            ", ".join(f"{num_bytes / 1e9:.3g}" for num_bytes in choice.rank_bytes),
            ", ".join(f"{num_bytes / 1e6:,.3g}" for num_bytes in choice.sent_bytes),
            ", ".join(choice.first_blocks),
        ]
        for choice in choices[:num_shown]
    ]
    header = [
        "pipeline",
        "step s",
        "bubble",
        "GB of each rank",
        "MB over each cut, each way",
        "cut before",
    ]
    return markdown_table(header, rows)
