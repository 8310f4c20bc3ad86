"""Elastic runs with losses, joins and cuts at chosen steps, compared with one plain process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_hybrid.comm import Topology
from lightning_hybrid.elastic.host_vote import HostVote
from tests.elastic import random_events
from tests.elastic.replicas import Cut, Join, Loss, Outcome, Scene, differences, plain_run, run

SCENES = {
    "one host has all shards": Scene("a"),
    "losses within a step, until one host has all shards": Scene(
        "abc", [Loss("c", 2, "within"), Loss("b", 4, "within", shard=1)]
    ),
    "losses before a step, until one host has all shards": Scene(
        "abc", [Loss("c", 2, "before"), Loss("b", 6, "before")]
    ),
    "the first host is lost before and within a step": Scene(
        "abc", [Loss("a", 1, "before"), Loss("b", 3, "within")]
    ),
    "a host has a sum that another host has stepped by": Scene(
        "abc", [Loss("c", 3, "after", ahead="b", late="a")]
    ),
    "a host joins, and another leaves": Scene(
        "abcd", [Join("d", 2), Loss("a", 4, "within"), Join("c", 6)]
    ),
    "a host is cut off": Scene("abc", [Cut("c", 3)], silent_s=1.0),
    "two hosts of two ranks, of which one is lost": Scene(
        "ab", [Loss("b", 3, "within")], ranks=2, max_hosts=2
    ),
}

# Each case reduces several shards in a different way, in fp32 with a single rounding.
IN_HALF_PRECISION = (
    "one host has all shards",
    "losses within a step, until one host has all shards",
    "two hosts of two ranks, of which one is lost",
)


def check(scene: Scene, outcome: Outcome) -> None:
    """Check every value of every step on every rank, and that all surviving ranks made every step."""
    words = differences(outcome, plain_run(scene.num_steps, scene.precision))
    assert not words, "\n".join(words[:10])
    lost = {event.host for event in scene.events if not isinstance(event, Join)}
    starts = {event.host: event.step for event in scene.events if isinstance(event, Join)}
    for host in scene.hosts:
        for local in range(scene.ranks):
            if host in lost:
                continue
            assert outcome.ends[host, local] == "ended"
            assert outcome.steps_of(host, local) == list(
                range(starts.get(host, 0), scene.num_steps)
            )
    for event in scene.events:
        if not isinstance(event, Join):
            assert outcome.steps_of(event.host)[-1] == event.step - 1
        if isinstance(event, Cut):
            assert (
                "cannot be reached but may continue, and the reachable hosts"
                in outcome.ends[event.host, 0]
            )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SCENES)
def test_every_step_has_the_bits_of_one_plain_process(tmp_path: Path, name: str) -> None:
    check(SCENES[name], run(SCENES[name], tmp_path))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_HALF_PRECISION else pytest.param(name, marks=pytest.mark.long)
        for name in SCENES
    ],
)
def test_every_step_has_the_bits_of_one_plain_process_in_half_precision(
    tmp_path: Path, name: str
) -> None:
    scene = replace(SCENES[name], precision="16-true")
    check(scene, run(scene, tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_random_losses_joins_and_cuts_leave_the_bits_of_one_plain_process(
    tmp_path: Path, seed: int
) -> None:
    """Two random scenes match the plain process. `python -m tests.elastic.random_events` runs more of them."""
    scene = random_events.random_scene(random_events.EVENTS_PER_RUN, seed)
    outcome = run(scene, tmp_path, limit_s=300.0)
    num_made, differing, words = random_events.steps_that_differ(outcome, scene)
    assert not differing, "\n".join(words[:10])
    assert not random_events.faults_of(scene, outcome)
    assert num_made == scene.num_steps


def test_a_host_with_another_network_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    scene = Scene("ab", [Join("b", 2)], num_steps=5, widths={"b": 5}, join_ends_view=False)
    outcome = run(scene, tmp_path)
    assert outcome.ends["b", 0].startswith("RefusedError"), outcome.ends
    assert ", but this host has " in outcome.ends["b", 0]
    assert outcome.steps_of("a") == list(range(5))
    assert not outcome.steps_of("b")
    assert not differences(outcome, plain_run(5))


def vote_of_this_rank() -> list[bool]:
    """Vote in turn: all in favor, the first rank against, another rank against, all against."""
    rank = dist.get_rank()
    vote = HostVote(Topology.from_ranks_per_node(rank=rank, world_size=3, ranks_per_node=3))
    return [vote(rank not in against) for against in ((), (0,), (1,), (2,), (0, 1, 2), ())]


def test_a_no_of_any_rank_of_a_host_is_a_no_on_all(three_ranks: Any) -> None:
    wanted = [True, False, False, False, False, True]
    assert three_ranks.run(vote_of_this_rank) == [wanted] * 3
