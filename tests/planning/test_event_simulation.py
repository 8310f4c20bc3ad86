"""Events: threads do one chunk at a time, places are shared fairly, nothing is lost and nothing is done twice."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.planning.cost import StageCost
from lightning_hybrid.planning.event_simulation import SimulatedChunk, simulate_events


def chunk(bucket, *stages, ready_s=0.0, algorithm="x", column=0, **more):
    return SimulatedChunk(
        bucket=bucket, num_bytes=1, ready_s=ready_s, algorithm=algorithm, column=column, stages=stages, **more
    )


def stage(name="ring", place="across", delay_s=0.0, work_s=1.0, share=1.0):
    return StageCost(name=name, place=place, delay_s=delay_s, work_s=work_s, share=share)


STAGES = st.builds(
    stage,
    place=st.sampled_from(["inside", "across"]),
    delay_s=st.floats(0, 2),
    work_s=st.floats(0, 2),
    share=st.floats(0.1, 1),
)
PIECES = st.lists(
    st.tuples(st.lists(STAGES, min_size=1, max_size=3), st.floats(0, 3), st.integers(0, 1), st.booleans()),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60)
@given(PIECES)
def test_whatever_comes_the_laws_hold(drawn):
    chunks = [
        chunk(index, *stages, ready_s=ready_s, column=column, is_serial=is_serial)
        for index, (stages, ready_s, column, is_serial) in enumerate(drawn)
    ]
    spans = simulate_events(chunks)
    assert len(spans) == sum(len(one.stages) for one in chunks)
    for one in chunks:  # in order, not before they are ready, not faster than alone
        own = sorted((span for span in spans if span.bucket == one.bucket), key=lambda span: span.end_s)
        assert own[0].begin_s >= one.ready_s
        for span, its_stage in zip(own, one.stages, strict=True):
            assert span.end_s - span.begin_s >= its_stage.alone_s * (1 - 1e-9) - 1e-9
        for before, after in itertools.pairwise(own):
            assert after.begin_s >= before.end_s
    for place in ("inside", "across"):  # no place does more work than there is time
        work_s = sum(s.work_s for one in chunks for s in one.stages if s.place == place)
        assert max(span.end_s for span in spans) >= work_s * (1 - 1e-9) - 1e-9


@pytest.mark.parametrize("time_s", [float("inf"), float("nan"), -1.0])
def test_a_time_in_which_nothing_would_end_is_refused(time_s):
    with pytest.raises(ValueError, match="time would stand still"):
        simulate_events([chunk(0, stage(), ready_s=time_s)])
    with pytest.raises(ValueError, match="time would stand still"):
        simulate_events([chunk(0, stage(work_s=time_s))])


def test_equal_chunks_through_places_of_their_own_are_the_formula():
    stages = (stage("reduce", "inside", work_s=0.5), stage("ring", "across", work_s=2.0))
    spans = simulate_events([chunk(index, *stages) for index in range(5)])
    assert spans[-1].end_s == pytest.approx((0.5 + 2.0) + (5 - 1) * 2.0)  # one of each, then the slowest stage


def test_what_a_slow_flow_leaves_goes_to_the_others():
    """A quarter to the slow one; the other has three quarters until it is done."""
    slow, fast = chunk(0, stage(share=0.25), column=0), chunk(1, stage(work_s=0.75), column=1)
    assert {span.bucket: span.end_s for span in simulate_events([slow, fast])} == {0: 4.0, 1: 1.0}


def test_a_stream_does_all_stages_of_one_before_the_next():
    stages = (stage("reduce", "inside"), stage("ring", "across"))
    spans = simulate_events([chunk(index, *stages, is_serial=True) for index in range(2)])
    assert [(span.bucket, span.stage) for span in spans] == [(0, "reduce"), (0, "ring"), (1, "reduce"), (1, "ring")]
    assert spans[-1].end_s == 4.0
