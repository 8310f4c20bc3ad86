"""Growth with the steps of a run: robust slopes of what `process_watch.ProcessWatch` wrote."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scipy.stats import theilslopes

from recipes.cli.markdown import markdown_table
from recipes.cli.results import write_json
from tests.evidence.endurance.process_watch import QUANTITIES

Sample = Mapping[str, float | None]

CONFIDENCE = 0.95
NUM_BLOCKS = 40
"""Number of stretches of the run whose medians are fitted: neighbouring samples are not independent."""


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """Growth in a step at which a quantity counts as steady: `per_step`, and a `share` of its median a run.

    Counts may not grow at all. 256 bytes a step (our choice) are 1 GiB in four million steps, hundreds of times the
    longest recipe; 2 % of the processor time (our choice) is less than two equal runs differ by on a shared machine.
    The time by the clock is reported and not judged: it grows whenever another process computes.
    """

    per_step: float = 0.0
    share: float = 0.0
    is_judged: bool = True


ALLOWANCES = {
    "rss_bytes": Allowance(per_step=256.0),
    "pss_bytes": Allowance(per_step=256.0),
    "private_bytes": Allowance(per_step=256.0),
    "num_objects": Allowance(share=0.001),
    "step_s": Allowance(is_judged=False),
    "cpu_s": Allowance(share=0.02),
}


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Change of a quantity of one rank with the steps.

    Attributes:
        begin, end: Median of the first block, and of the last.
        most: Largest sample.
        slope, slope_low, slope_high: Theil and Sen's, per step, with the ends of its confidence interval (Sen 1968).
        num_steps: From the first sample to the last.
        verdict: `grows`, where the whole interval lies above what is allowed; `steady`; `not judged`.
    """

    rank: int
    quantity: str
    begin: float
    end: float
    most: float
    slope: float
    slope_low: float
    slope_high: float
    num_steps: int
    verdict: str


def trend_of(samples: Sequence[Sample], *, rank: int, quantity: str) -> Trend:
    """Return the trend of a quantity: the median slope between any two blocks, robust against outliers.

        slope = median over i < j of (y_j - y_i) / (x_j - x_i)

    Raises:
        ValueError: There are fewer than two samples of it.

    >>> samples = [{"step": step, "num_fds": 60 + (step == 50)} for step in range(100)]
    >>> trend_of(samples, rank=0, quantity="num_fds").verdict
    'steady'
    >>> samples = [{"step": step, "num_fds": 60 + step // 10} for step in range(100)]
    >>> trend = trend_of(samples, rank=0, quantity="num_fds")
    >>> trend.verdict, round(trend.slope, 1)
    ('grows', 0.1)
    """
    points = [(sample["step"], value) for sample in samples if (value := sample.get(quantity)) is not None]
    if len(points) < 2:
        raise ValueError(
            f"`warmup_steps` must leave two samples of {quantity} or more of rank {rank}: {len(points)} are left. "
            "Set warmup_steps lower, or trainer.max_steps higher."
        )
    blocks = _blocks(points)
    steps, values = zip(*blocks, strict=True)
    slope, _, low, high = theilslopes(values, steps, CONFIDENCE)
    allowance = ALLOWANCES.get(quantity, Allowance())
    num_steps = int(points[-1][0] - points[0][0])  # type: ignore[operator]
    allowed = allowance.per_step + allowance.share * statistics.median(values) / max(1, num_steps)
    verdict = "not judged" if not allowance.is_judged else "grows" if low > allowed else "steady"
    return Trend(
        rank=rank,
        quantity=quantity,
        begin=values[0],
        end=values[-1],
        most=max(value for _, value in points),
        slope=float(slope),
        slope_low=float(low),
        slope_high=float(high),
        num_steps=num_steps,
        verdict=verdict,
    )


def _blocks(points: Sequence[tuple[Any, float]]) -> list[tuple[float, float]]:
    """Return medians of steps and values of at most `NUM_BLOCKS` stretches of equal length."""
    size = max(1, len(points) // NUM_BLOCKS)
    stretches = [points[start : start + size] for start in range(0, len(points) - size + 1, size)]
    return [tuple(statistics.median(column) for column in zip(*each, strict=True)) for each in stretches]


def read_samples(folder: Path) -> dict[int, list[Sample]]:
    """Read the samples of every rank, by rank.

    Raises:
        ValueError: There are none, or a line is torn.
    """
    found: dict[int, list[Sample]] = {}
    for path in sorted(folder.glob("rank-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2])):
        try:
            found[int(path.stem.partition("-")[2])] = [json.loads(line) for line in path.read_text().splitlines()]
        except ValueError as error:
            raise ValueError(
                f"{path} (samples of a run) must be a JSON object a line: {error}. Run it again."
            ) from error
    if not found:
        raise ValueError(f"{folder} must hold the samples of a run, rank-0.jsonl and so on: there are none.")
    return found


def trends_of(samples: Mapping[int, Sequence[Sample]], *, warmup_steps: int) -> list[Trend]:
    """Return the trends of every quantity and rank, without the first `warmup_steps` steps."""
    counted = {rank: [s for s in rows if (s["step"] or 0) > warmup_steps] for rank, rows in samples.items()}
    sampled = {quantity for rows in samples.values() for sample in rows for quantity in sample}
    known = [quantity for quantity in QUANTITIES if quantity in sampled]
    return [trend_of(rows, rank=rank, quantity=quantity) for quantity in known for rank, rows in counted.items()]


def markdown(trends: Sequence[Trend]) -> str:
    """Format a row for each quantity and rank."""
    header = ["quantity", "rank", "begin", "end", "most", "growth in 1,000 steps [95 %]", "verdict"]
    rows = []
    for trend in trends:
        slopes = [1000 * slope for slope in (trend.slope, trend.slope_low, trend.slope_high)]
        growth = "{} [{}, {}]".format(*(_amount(trend.quantity, slope) for slope in slopes))
        amounts = [_amount(trend.quantity, value) for value in (trend.begin, trend.end, trend.most)]
        rows.append([trend.quantity, str(trend.rank), *amounts, growth, trend.verdict])
    return markdown_table(header, rows)


def _amount(quantity: str, value: float) -> str:
    if quantity.endswith("_bytes"):
        return f"{value / 2**20:.2f} MiB"
    return f"{1e3 * value:.3f} ms" if quantity.endswith("_s") else f"{value:g}"


def write_report(
    folder: Path, samples: Mapping[int, Sequence[Sample]], *, warmup_steps: int, head: Mapping[str, Any]
) -> str:
    """Write `endurance.json` and `table.md`; return the table."""
    trends = trends_of(samples, warmup_steps=warmup_steps)
    found = {**head, "warmup_steps": warmup_steps, "trends": [asdict(trend) for trend in trends]}
    write_json(folder / "endurance.json", found)
    (folder / "table.md").write_text(markdown(trends) + "\n")
    return markdown(trends)
