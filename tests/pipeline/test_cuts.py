"""Balanced cuts of a network, compared with all possible cuts."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.pipeline.cuts import BlockProfile, balanced_cuts
from lightning_hybrid.pipeline.options import cut_places


def stages(values, cuts):
    return [values[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(values)])]


def all_cuts(num_blocks, num_stages):
    return [list(cuts) for cuts in itertools.combinations(range(1, num_blocks), num_stages - 1)]


def is_within(cuts, bytes_, kept, alive, most_bytes):
    """Return whether every stage fits into memory with the activations of its micro-batches."""
    parts = zip(stages(bytes_, cuts), stages(kept, cuts), alive, strict=True)
    return all(
        sum(weights) + count * sum(activations) <= most_bytes
        for weights, activations, count in parts
    )


WHOLE = st.integers(0, 20)  # sums are exact, so ties are exact


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    num_blocks=st.integers(1, 7),
    most_bytes=st.one_of(st.just(math.inf), st.integers(0, 120)),
)
def test_the_balanced_cut_has_the_fastest_slowest_stage_and_then_the_most_even_stages(
    data, num_blocks, most_bytes
):
    num_stages = data.draw(st.integers(1, num_blocks))
    lists = st.lists(WHOLE, min_size=num_blocks, max_size=num_blocks)
    seconds = data.draw(lists)
    bytes_ = data.draw(lists)
    kept = data.draw(lists)
    alive = data.draw(st.lists(st.integers(0, 4), min_size=num_stages, max_size=num_stages))
    memory = {"most_bytes": most_bytes, "activation_bytes": kept, "num_alive": alive}
    fitting = [
        cuts
        for cuts in all_cuts(num_blocks, num_stages)
        if is_within(cuts, bytes_, kept, alive, most_bytes)
    ]
    if not fitting:
        message = r"`most_bytes` \(=\d+\) must be \d+ or more.*checkpoint_activations=True"
        with pytest.raises(ValueError, match=message) as error:
            balanced_cuts(seconds, bytes_, num_stages, **memory)
        memory["most_bytes"] = float(str(error.value).split("must be ")[1].split(" or more")[0])
        cuts = balanced_cuts(seconds, bytes_, num_stages, **memory)
        assert is_within(cuts, bytes_, kept, alive, memory["most_bytes"])
        return
    if any(seconds):
        counted = seconds
    else:
        counted = [1] * num_blocks

    def unevenness(cuts):
        sums = [sum(part) for part in stages(counted, cuts)]
        return max(sums), sum(total**2 for total in sums)

    result = balanced_cuts(seconds, bytes_, num_stages, **memory)
    assert result in fitting
    assert unevenness(result) == min(map(unevenness, fitting))


def test_a_profile_cuts_by_its_seconds_under_the_memory_that_the_schedule_needs():
    """With two stages and two micro-batches, GPipe keeps two in both stages and 1F1B keeps one in the last stage."""
    profile = BlockProfile(
        seconds=[3, 1, 1, 1], activation_bytes=[1, 1, 1, 1], held_bytes=[0, 0, 0, 2], most_bytes=6
    )
    by = {
        name: cut_places([1.0] * 4, profile, 2, num_microbatches=2, schedule=name)
        for name in ("gpipe", "1f1b")
    }
    assert by == {"gpipe": [0, 2, 4], "1f1b": [0, 1, 4]}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (([1.0], [0.0], 2), r"`num_stages` \(=2\) must not exceed the number of blocks \(1\)"),
        (
            ([1.0, 1.0], [0.0], 1),
            r"`bytes_` has length 1, but must contain one number for each of the 2 blocks",
        ),
        (
            ([1.0, math.nan], [0.0, 0.0], 1),
            r"`seconds` .* contains a number that is negative, infinite or nan",
        ),
        (([1.0], [0.0], 0), r"`num_stages` \(=0\) must be an integer, 1 or more"),
    ],
)
def test_numbers_that_cannot_be_cut_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        balanced_cuts(*call)
