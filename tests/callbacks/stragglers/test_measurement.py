"""Phases of a step, as marked by the strategy and as read by a device clock."""

from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_hybrid import HybridAllReduceStrategy, LocalSteps
from lightning_hybrid.callbacks import StragglerMonitor
from lightning_hybrid.callbacks.stragglers import callback
from lightning_hybrid.callbacks.stragglers.gather import HostGather, Hosts
from lightning_hybrid.callbacks.stragglers.measurement import reason_not_to_measure
from lightning_hybrid.callbacks.stragglers.on_cuda import CudaClock, CudaGather
from lightning_hybrid.callbacks.stragglers.window import RankWindow
from lightning_hybrid.comm.stats.phases import Phase, StepPhases
from lightning_hybrid.comm.stats.trace import CommTrace
from lightning_hybrid.placement import BLOCK
from lightning_hybrid.run_status import RunStatus
from tests import toy
from tests.callbacks.stragglers import cases
from tests.scenes import at, this_rank
from tests.stand_in.recording_cuda import CUDA, Cuda


class Clock:
    """Clock whose stamps become readable when a test allows it."""

    def __init__(self):
        self.now_s = 0.0
        self.readable_until_s = float("inf")

    def stamp(self):
        return self.now_s

    def is_readable(self, stamp):
        return stamp <= self.readable_until_s

    def seconds(self, begin, end):
        return end - begin


def recorded(clock, *moments):
    """Record phases that begin at these seconds. A moment without a phase ends a step."""
    phases = StepPhases(clock)
    for clock.now_s, phase in moments:
        if phase is None:
            phases.end_step()
        else:
            phases.enter(phase)
    return phases


TWO_STEPS = [
    (1.0, Phase.FORWARD),
    (3.0, Phase.BACKWARD),
    (6.0, Phase.WAIT),
    (10.0, Phase.CALLBACKS),
    (11.0, None),
    (12.0, Phase.FORWARD),
    (13.0, Phase.BACKWARD),
    (14.0, Phase.FORWARD),
    (16.0, None),
]


def test_phases_add_up_to_the_step_and_those_that_come_twice_are_summed():
    first, second = recorded(Clock(), *TWO_STEPS).take_steps()
    assert {phase.value: time for phase, time in first.items() if time} == {
        "callbacks": 2.0,
        "forward": 2.0,
        "backward": 3.0,
        "wait": 4.0,
    }
    assert {phase.value: time for phase, time in second.items() if time} == {
        "callbacks": 1.0,
        "forward": 3.0,
        "backward": 1.0,
    }


def test_steps_are_read_once_their_end_has_been_reached():
    clock = Clock()
    clock.readable_until_s = 12.0
    phases = recorded(clock, *TWO_STEPS)
    assert len(phases.take_steps()) == 1
    assert phases.take_steps() == []
    clock.readable_until_s = 16.0
    assert len(phases.take_steps()) == 1


def test_a_wait_inside_a_phase_is_taken_out_of_it():
    clock = Clock()
    trace = CommTrace()
    with trace.waiting():
        pass
    trace.phases = StepPhases(clock)
    trace.enter(Phase.OPTIMIZER)
    with trace.waiting():
        clock.now_s = 2.0
    clock.now_s = 5.0
    trace.phases.end_step()
    (times,) = trace.phases.take_steps()
    assert (times[Phase.WAIT], times[Phase.OPTIMIZER]) == (2.0, 3.0)


# ---- marks of a fit --------------------------------------------------------------------------------


class Manual(toy.Toy):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class CallsItself(toy.Toy):
    """Module that calls `self(...)` within the step, as most modules do, which must not start a new forward phase."""

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]).float(), batch[1])


def marks_of_second_step(module, settings):
    """Return the phases of the second step in order, and the hooks that are left after the fit."""
    steps = [[]]

    def watch(trainer, *_):
        phases = trainer.strategy.comm_trace.phases
        enter = phases.enter
        end_step = phases.end_step

        def note(phase):
            if phase is not phases.current:
                steps[-1].append(phase.value)
            enter(phase)

        def end():
            steps.append([])
            end_step()

        phases.enter = note
        phases.end_step = end

    module = module()
    trainer = toy.trainer(
        max_steps=2, callbacks=[StragglerMonitor(), at(on_train_start=watch)], **settings
    )
    trainer.fit(module, toy.loader())
    left = [
        name
        for name in ("_on_before_fetch", "_on_after_fetch", "_broadcast_sigterm_tensor")
        if name in vars(trainer.fit_loop.epoch_loop)
    ]
    return steps[1], left, len(module._forward_pre_hooks)


FETCH = ["wait", "callbacks", "input"]
FORWARD = ["wait", "forward", "backward"]
BEFORE = [*FETCH, "optimizer", *FORWARD]  # the optimizer calls the closure
AFTER = ["wait", "optimizer", "callbacks"]


@pytest.mark.parametrize(
    ("module", "settings", "expected"),
    [
        (toy.Toy, {}, BEFORE + AFTER),
        (CallsItself, {"precision": "16-true"}, BEFORE + AFTER),
        (
            toy.Toy,
            {"precision": "16-true", "accumulate_grad_batches": 2},
            [*FETCH, *FORWARD, "optimizer", "callbacks", *BEFORE, *AFTER],
        ),
        # In manual optimization the step continues between backward and optimizer, and after the optimizer.
        (Manual, {}, [*FETCH, *FORWARD, "wait", "forward", "optimizer", "forward", "callbacks"]),
    ],
    ids=["fp32", "fp16", "accumulated", "manual"],
)
def test_the_phases_of_a_step_come_in_order_and_nothing_is_left(
    two_ranks, module, settings, expected
):
    for entered, left, num_hooks in two_ranks.run(marks_of_second_step, module, settings):
        assert entered == expected
        assert (left, num_hooks) == ([], 0)


class Large(toy.Toy):
    """Toy with a parameter that is large enough to be sharded."""

    def __init__(self):
        super().__init__()
        self.large = nn.Parameter(torch.zeros(4 * BLOCK))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.large.sum()


def marks_of_a_shared_update():
    return marks_of_second_step(Large, {"strategy": HybridAllReduceStrategy(shard_update="node")})


def test_waits_for_the_parts_of_other_ranks_are_no_time_of_the_optimizer(two_ranks):
    for entered, _, _ in two_ranks.run(marks_of_a_shared_update):
        update = entered[len(BEFORE) + 1 :]
        assert update[:3] == ["optimizer", "wait", "optimizer"]
        assert update[-1] == "callbacks"


def trace_of_a_fit_without_monitor():
    traces = []
    watch = at(on_train_start=lambda trainer, *_: traces.append(trainer.strategy.comm_trace))
    toy.trainer(max_steps=2, callbacks=[watch]).fit(toy.Toy(), toy.loader())
    return traces[0].phases


def test_without_the_callback_nothing_is_measured(two_ranks):
    assert two_ranks.run(trace_of_a_fit_without_monitor) == [None, None]


# ---- runs that cannot be measured ------------------------------------------------------------------


TRACE = CommTrace()


class Wrapped(DistributedDataParallel):
    def __init__(self):
        """Create the wrapper without ranks."""


@pytest.mark.parametrize(
    ("model", "layer", "status", "reason"),
    [
        (Wrapped(), nn.Linear(1, 1), {}, "another strategy"),
        (Wrapped(), nn.Linear(1, 1), {"comm_trace": TRACE, "gather_over_hosts": id}, "elastic"),
        (nn.Linear(1, 1), nn.Linear(1, 1), {"comm_trace": TRACE}, "the stages of a pipeline"),
        (Wrapped(), nn.SyncBatchNorm(1), {"comm_trace": TRACE}, "layer `0` waits for other ranks"),
        (Wrapped(), nn.Linear(1, 1), {"comm_trace": TRACE}, ""),
    ],
    ids=["ddp", "elastic", "pipeline", "SyncBatchNorm", "measured"],
)
def test_a_run_that_cannot_be_measured_says_why(model, layer, status, reason):
    trainer = SimpleNamespace(strategy=SimpleNamespace(model=model))
    found = reason_not_to_measure(trainer, nn.Sequential(layer), RunStatus(**status))
    assert reason in found
    assert bool(found) == bool(reason)


def fit_under_ddp():
    lines = []
    with patch.object(callback, "rank_zero_info", lines.append):
        trainer = toy.trainer(max_steps=2, strategy="ddp", callbacks=[StragglerMonitor(1)])
        trainer.fit(toy.Toy(), toy.loader())
    return trainer.global_step, lines


def test_under_another_strategy_training_goes_on_after_a_line(two_ranks):
    for num_steps, (line,) in two_ranks.run(fit_under_ddp):
        assert num_steps == 2
        assert line.startswith("`StragglerMonitor` measures nothing: it needs the bucket timings")


# ---- on CUDA, without a GPU ------------------------------------------------------------------------


def test_on_cuda_phases_are_the_devices_and_the_host_waits_for_nothing(monkeypatch):
    with Cuda().installed(monkeypatch) as cuda:
        phases = StepPhases(CudaClock(CUDA))
        cuda.compute.now_s = 1.0
        phases.enter(Phase.FORWARD)
        cuda.hang()
        cuda.compute.now_s = 3.0
        phases.enter(Phase.BACKWARD)
        cuda.compute.now_s = 7.0
        phases.end_step()
        assert phases.take_steps() == []
        cuda.go_on()
        (times,) = phases.take_steps()
        assert (times[Phase.FORWARD], times[Phase.BACKWARD]) == (2.0, 4.0)
        assert cuda.host_waits == []


def window_of(step_s):
    return RankWindow(step_s=step_s, phases_s=dict.fromkeys(Phase, 0.0))


@pytest.fixture
def fake_world():
    """Become rank 0 of two whose collectives do nothing."""
    if dist.is_initialized():  # left by an earlier test's fit in this process
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="copies to a fake CUDA tensor need a build for CUDA"
)
def test_on_cuda_the_host_reads_figures_once_they_are_there(fake_world, monkeypatch):
    read = []
    monkeypatch.setattr(
        "lightning_hybrid.callbacks.stragglers.on_cuda.windows_of",
        lambda rows: read.append(len(rows)) or "windows",
    )
    with Cuda().on_fake_tensors() as cuda:
        gather = CudaGather(None, CUDA)
        assert gather.gather(window_of(1.0)) == []
        assert cuda.host_waits == []
        cuda.go_on()
        assert gather.gather(window_of(2.0)) == ["windows", "windows"]
    assert cuda.violations == []
    assert read == [2, 2]


# ---- gather ----------------------------------------------------------------------------------------


def gathered_and_hosts():
    hosts = Hosts.of_world()
    windows = HostGather(None).gather(window_of(1.0 + this_rank()))
    return [[window.step_s for window in of_ranks] for of_ranks in windows], hosts


def test_the_first_rank_alone_gets_the_windows_of_all(two_ranks):
    first, second = two_ranks.run(gathered_and_hosts)
    assert first[0] == [[1.0, 2.0]]
    assert second[0] == []
    assert first[1].ranks == (0, 1)
    assert first[1].nodes == (0, 0)
    assert first[1].of_ranks([1]).ranks == (1,)


# ---- whole fits ------------------------------------------------------------------------------------


@pytest.mark.clock
def test_a_fit_names_the_slow_rank_and_its_phase(two_ranks):
    delays = cases.Delays(phase="backward", extra_s=0.2, rank=1, forward_s=0.0, backward_s=0.0)
    messages, others = two_ranks.run(partial(cases.run, delays, window=2))
    assert cases.is_right(delays, messages)
    assert others == []


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("name", cases.cases(0))
def test_each_case_is_named_within_twenty_windows(rank_pool, name, num_ranks):
    delays = cases.cases(num_ranks - 1)[name]
    messages = rank_pool.ranks(num_ranks).run(partial(cases.run, delays), timeout_s=600)[0]
    assert cases.is_right(delays, messages), messages


def messages_with_local_steps(delays):
    strategy = HybridAllReduceStrategy(ranks_per_node=2, between_nodes=LocalSteps(every=4))
    return cases.run(delays, is_stopped=False, window=4, num_windows=8, strategy=strategy)


@pytest.mark.long
def test_with_local_steps_ranks_are_compared_in_their_node(four_ranks):
    """One node does not wait for the other in each step. The first rank of a node reports for it."""
    delays = cases.Delays(phase="forward", extra_s=0.2, rank=3)
    by_rank = four_ranks.run(messages_with_local_steps, delays, timeout_s=300)
    assert cases.is_right(delays, by_rank[2])
    assert by_rank[0] == by_rank[1] == by_rank[3] == []


@pytest.mark.long
def test_a_slow_optimizer_is_named_where_ranks_share_the_update(two_ranks):
    delays = cases.Delays(phase="optimizer", extra_s=0.2, rank=1)
    messages = two_ranks.run(messages_with_a_shared_update, delays, timeout_s=300)[0]
    assert cases.is_right(delays, messages), messages


def messages_with_a_shared_update(delays):
    strategy = HybridAllReduceStrategy(shard_update="node")
    return cases.run(delays, window=4, strategy=strategy, precision="16-true")


@pytest.mark.long
def test_nobody_is_named_in_healthy_windows_beside_busy_loops(two_ranks):
    with cases.busy_loops(2):
        messages = two_ranks.run(
            partial(cases.run, cases.Delays(), num_windows=200, is_stopped=False), timeout_s=3000
        )[0]
    assert messages == []
