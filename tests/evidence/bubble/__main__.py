"""Measure schedules with stages that sleep: `python -m tests.evidence.bubble`, on quiet cores.

    step = (num_microbatches + (num_ranks - 1) / v) * (forward + backward)         v: stages on each rank

Prints the median of several steps over that, and the most micro-batches that each rank kept for backward.
"""

from __future__ import annotations

import argparse

from tests.evidence.bubble.sleeping import measured
from tests.rank_pool import RankPool


def main() -> None:
    """Print one line for each schedule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    num_ranks = parser.parse_args().ranks
    pool = RankPool(num_ranks=num_ranks)
    print("schedule     ranks  micro-batches  time / formula  kept")
    for schedule, parts in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        for num_microbatches in (num_ranks, 4 * num_ranks):
            found = pool.run(measured, schedule, num_microbatches, parts)
            ratio = max(each for each, _ in found)
            print(f"{schedule:12} {num_ranks:5} {num_microbatches:14} {ratio:15.2f}  {[kept for _, kept in found]}")
    pool.close()


if __name__ == "__main__":
    main()
