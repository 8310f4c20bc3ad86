"""Tunes the plan of communication while training runs: measures and carries out what plan_trials.py decides.

    step 0 ... 4     nothing: memory is allocated, DDP rebuilds its buckets
    then             trials: every step another plan, and after each round
                         all ranks    each step's largest time over ranks; step and plan compared    all-reduce
                         rank 0       decides what to try next, or which plan it is                  broadcast
    then             nothing: the plan stays for the rest of the fit

The unit is the optimizer step, from the begin of its first batch to the end of its last `optimizer_step`. A plan
changes between two steps, on every rank after the same one; all that changes is the order of additions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from lightning_hybrid.comm.codec.codec import Codec
from lightning_hybrid.comm.engine.engine import CommEngine
from lightning_hybrid.comm.health.consensus import max_over_ranks
from lightning_hybrid.comm.plan import CommPlan
from lightning_hybrid.comm.tuning.plan_trials import (
    MOST_STEPS,
    PlanTrials,
    Trial,
    other_algorithms,
    result_line,
    trials_for,
)

NUM_WARMUP_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Rank 0's decision for all ranks."""

    plan: CommPlan
    trials: tuple[Trial, ...] = ()  # of the next steps; without any, `plan` is used from now on


class TuningSession:
    """The tuning of an engine's plan. Every rank must call `before_batch` and `after_optimizer_step` in the same order.

    Args:
        engine: of a world of several ranks.
        most_steps: of trials.
        report: gets a line for the user; called on rank 0.
        on_plan: called on every rank when a plan is taken for good.
        clock: seconds.
    """

    def __init__(
        self,
        engine: CommEngine,
        *,
        most_steps: int = MOST_STEPS,
        report: Callable[[str], None] = print,
        on_plan: Callable[[CommPlan], None] = lambda plan: None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._engine = engine
        self._most_steps = most_steps
        self._report, self._on_plan, self._clock = report, on_plan, clock
        self._is_first_rank = engine.topology.rank == 0
        self._start = engine.plan
        self._began_s: float | None = None
        self._ended_s: float | None = None
        self._num_steps = 0
        self._do: Callable[[float], None] = self._warm_up
        self._trials: tuple[Trial, ...] = ()
        self._times_s: list[float] = []
        self._plan_trials: PlanTrials | None = None  # on rank 0 only
        self._change_s = 0.0
        # On CUDA a communicator takes memory for good: all that trials may need are made before steps take theirs.
        if engine.device.type == "cuda":
            engine.prepare(other_algorithms(engine.plan, engine.topology))

    def before_batch(self) -> None:
        """Change the plan between two steps, if it is to change. Collective for the first batch of a step."""
        if self._began_s is not None and self._ended_s is not None:
            # A step ended with its optimizer's step, not here: validation and checkpoints are not in its time.
            step_s, self._began_s, self._ended_s = self._ended_s - self._began_s, None, None
            self._num_steps += 1
            before_s = self._clock()
            self._do(step_s)
            self._change_s += self._clock() - before_s
        if self._began_s is None:
            self._began_s = self._clock()

    def after_optimizer_step(self) -> None:
        """End the step's time here, or at the next call before a batch begins (with several optimizers)."""
        if self._trials and self._engine.device.type == "cuda":
            # Only in trials: the host runs ahead of the device, and its time of a step would be that of enqueueing.
            torch.cuda.synchronize(self._engine.device)
        self._ended_s = self._clock()

    # ---- phases: what is done after a step --------------------------------------------------------------------------

    def _warm_up(self, step_s: float) -> None:
        if self._num_steps == NUM_WARMUP_STEPS - 1:
            self._engine.adopt(self._engine.plan)  # forgets the buckets before DDP rebuilt them
        elif self._num_steps == NUM_WARMUP_STEPS:
            # Compares the place alone: ranks that stood at different steps would change the plan at different buckets.
            max_over_ranks([], self._place(), self._engine.device)
            self._follow(self._from_first_rank(self._begin))

    def _try(self, step_s: float) -> None:
        self._times_s.append(step_s)
        if len(self._times_s) < len(self._trials):
            self._engine.adopt(self._trials[len(self._times_s)].plan)
            return
        times_s = max_over_ranks(self._times_s, self._place(), self._engine.device)  # the slowest rank counts
        self._follow(self._from_first_rank(lambda: self._decision(times_s)))

    # ---- rank 0 decides, all follow ---------------------------------------------------------------------------------

    def _place(self) -> str:
        return f"step {self._num_steps} under plan {self._engine.plan.plan_hash[:8]}"

    def _from_first_rank(self, decide: Callable[[], Decision]) -> Decision:
        device = self._engine.device
        # Rank 0 alone decides: clocks and files differ between ranks, and two decisions would be two plans.
        sent: list[Any] = [decide() if self._is_first_rank else None]
        dist.broadcast_object_list(sent, src=0, device=device if device.type == "cuda" else None)
        decision: Decision = sent[0]
        return decision

    def _follow(self, decision: Decision) -> None:
        self._trials, self._times_s = decision.trials, []
        plan = decision.trials[0].plan if decision.trials else decision.plan
        if plan != self._engine.plan:
            self._engine.adopt(plan)
        if decision.trials:
            self._do = self._try
            return
        self._engine.free_unused()  # threads and groups of plans that lost
        self._on_plan(plan)
        self._do = lambda step_s: None  # the plan stays as it is, to the end of the fit

    def _begin(self) -> Decision:
        engine = self._engine
        self._plan_trials = trials_for(
            self._start,
            engine.buckets,
            engine.topology,
            on_cuda=engine.device.type == "cuda",
            is_coded=isinstance(engine.dtype_across_nodes, Codec),
            most_steps=self._most_steps,
        )
        self._change_s = 0.0
        return self._decision()

    def _decision(self, times_s: Sequence[float] = ()) -> Decision:
        assert self._plan_trials is not None
        if times_s:
            self._plan_trials.record(times_s)
        trials, found = self._plan_trials.trials(), self._plan_trials.result
        if not trials:
            self._report(result_line(self._start, found, change_s=self._change_s))
        return Decision(plan=found.plan, trials=trials)
