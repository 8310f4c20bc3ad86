"""Measure schedules with stages that sleep: `python -m tests.evidence.bubble`, on quiet cores; about 40 seconds.

    step = (num_microbatches + (num_ranks - 1) / v) * (forward + backward)         v: stages on each rank

Prints the median of several steps over that with its aim, and the most micro-batches that each rank kept for
backward, with those of the planner's schedule.
"""

from __future__ import annotations

import argparse

from tests.evidence.bubble.sleeping import kept_by_plan, measured
from tests.rank_pool import RankPool

AIMS = {"gpipe": 1.15, "1f1b": 1.15, "interleaved": 1.25}


def main() -> None:
    """Print one line for each schedule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--stage-ms", type=float, nargs="+", default=[20, 50], help="forward and backward of a micro-batch on a rank"
    )
    asked = parser.parse_args()
    pool, num_ranks = RankPool(num_ranks=asked.ranks), asked.ranks
    print("| schedule | ranks | micro-batches | stage, ms | time / formula | aim | kept by rank | planned |")
    print("|---|---|---|---|---|---|---|---|")
    for schedule, parts in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        for num in (num_ranks, 4 * num_ranks):
            for stage_ms in asked.stage_ms:
                found = pool.run(measured, schedule, num, parts, stage_ms / 1000)
                ratio, kept = max(each for each, _ in found), [each for _, each in found]
                cells = [schedule, num_ranks, num, f"{stage_ms:g}", f"{ratio:.2f}", AIMS[schedule], kept]
                cells.append(kept_by_plan(schedule, num_ranks, num, parts))
                print(f"| {' | '.join(map(str, cells))} |", flush=True)
    pool.close()


if __name__ == "__main__":
    main()
