"""Steps of stages with replicas of their own, predicted and run.

    python -m tests.evidence.planner.replicas 1 5       the milliseconds below, and five times as many (the default)

A rank that wakes late does so once a task, however long that is: what longer tasks take off the ratio is the machine's
part of it, and what stays is the model's.
"""

import itertools
import sys
from statistics import median

from recipes.cli.markdown import markdown_table
from recipes.planning.estimates.pipeline_cost import StageLoad, pipeline_step_s, simulate_pipeline
from recipes.planning.estimates.replicas import replicated_tasks
from tests.pipeline.replicated_step import step_on_rank
from tests.rank_pool import RankPool

NUM_MICRO, NUM_STEPS = 12, 9
PLANS = (  # replicas, milliseconds of a forward in each stage; backward takes twice as long
    ((1, 1, 1), (20, 40, 20)),
    ((1, 2, 1), (20, 40, 20)),
    ((2, 2), (20, 60)),
    ((3, 1), (60, 20)),
)


def main() -> None:
    """Run each plan on Gloo ranks of this host."""
    rows, pool = [], RankPool(num_ranks=4)
    for (replicas, once_ms), times in itertools.product(PLANS, map(int, sys.argv[1:] or ["5"])):
        forwards_ms = tuple(times * each for each in once_ms)
        loads = [StageLoad(forward_s=each / 1000, backward_s=each / 500) for each in forwards_ms]
        predicted_s = pipeline_step_s(simulate_pipeline(replicated_tasks(replicas, NUM_MICRO), loads), loads)
        found = pool.ranks(sum(replicas)).run(step_on_rank, replicas, NUM_MICRO, loads, NUM_STEPS, timeout_s=500.0)
        steps_s = sorted(map(max, zip(*(each for each, _ in found), strict=True)))
        middle_s = median(steps_s)
        numbers = [f"{predicted_s:.3f}", f"{middle_s:.3f}", f"{steps_s[0]:.3f} to {steps_s[-1]:.3f}"]
        rows.append([" + ".join(map(str, replicas)), str(forwards_ms), *numbers, f"{middle_s / predicted_s:.3f}"])
    pool.close()
    print(markdown_table(["replicas", "forward, ms", "predicted, s", "median, s", "range", "ratio"], rows))


if __name__ == "__main__":
    main()
