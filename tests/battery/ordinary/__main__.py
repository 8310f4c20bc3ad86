"""Prints how each row goes: ours in fp32 and in half precision, beside Lightning's mixed precision.

    python -m tests.battery.ordinary                  # all rows, two ranks
    python -m tests.battery.ordinary state loops.Sam  # tables or beginnings of names
    python -m tests.battery.ordinary --mixed --world=1

Numbers are the largest distance of a loss from that of `ddp` in fp32, in roundings of the largest loss.
"""

from __future__ import annotations

import argparse
import logging
import warnings

from tests.battery.ordinary import case
from tests.battery.ordinary.tally import Tally
from tests.rank_pool import RankPool

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")


def cell(name: str, precision: str, reference: list[case.Result], pool: RankPool, tally: Tally) -> str:
    strategy = "ddp" if precision in case.MIXED else "hybrid_allreduce"
    results = case.run_on(pool.ranks(len(reference)), name, strategy, precision)
    outcome, faults = case.judge(name, precision, reference, results)
    tally.count(precision, outcome)
    if outcome == "close":
        return f"{case.roundings_between(precision, reference, results):.1f}"
    return f"**fails**: {' '.join(faults[0].split())[:160]}" if faults else outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="tables, or beginnings of names")
    parser.add_argument("--world", type=int, default=2, choices=(1, 2))
    parser.add_argument("--mixed", action="store_true", help="Lightning's mixed precision only")
    arguments = parser.parse_args()
    precisions = case.MIXED if arguments.mixed else ("32-true", *case.HALF, *case.MIXED)
    pool, tally = RankPool(arguments.world), Tally()
    print(f"| row | {' | '.join(precisions)} |\n|---|{'---|' * len(precisions)}")
    for name in case.names():
        kind = case.row(name)
        if (arguments.names and not name.startswith(tuple(arguments.names))) or arguments.world not in kind.worlds:
            continue
        reference = case.run_on(pool.ranks(arguments.world), name, "ddp", "32-true")
        fault = case.fault_of_reference(kind, reference)
        cells = [fault] if fault else [cell(name, p, reference, pool, tally) for p in precisions]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"\n{tally.table()}")
    pool.close()


if __name__ == "__main__":
    main()
