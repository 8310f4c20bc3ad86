"""User code that trains under `ddp` trains the same here, with the same guarantees."""

import itertools
import re

import pytest

from tests.battery import case, judge
from tests.checkout import ROOT

README = ROOT / "lightning_hybrid/strategy/differences.md"
PRECISIONS = ("32-true", *case.HALF)
QUICK = (
    "models.Plain models.Temperature layers.Convolutions state.Moco optimizers.Adam optimizers.LarsFused "
    "loops.Accumulates loops.ByHandNoSyncAndClips loops.GanToggles loaders.Refilled callbacks.SavesStateDict"
).split()
"""Rows that a default run takes in every precision on two ranks; of every other row it takes a part in fp16 on one."""


def rows():
    for world, (place, (name, kind)) in itertools.product((1, 2), enumerate(case.rows().items())):
        for precision in PRECISIONS if world in kind.worlds else ():
            is_first = precision == "16-true" and world == min(kind.worlds) and place % 2 == 0
            if is_first or (name in QUICK and world == 2):
                marks = []
            else:
                marks = [pytest.mark.long, pytest.mark.battery]
            yield pytest.param(
                name, world, precision, id=f"{name}-{world}-{precision}", marks=marks
            )


@pytest.fixture(scope="session")
def references(rank_pool):
    """Return the result of a row under `ddp` in fp32, trained once per session."""
    known = {}

    def reference(name, world):
        if (name, world) not in known:
            known[name, world] = case.on_ranks(
                rank_pool.ranks(world), case.train, name, "ddp", "32-true"
            )
        return known[name, world]

    return reference


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "world", "precision"), list(rows()))
def test_what_trains_under_ddp_trains_the_same_here(rank_pool, references, name, world, precision):
    kind = case.rows()[name]
    reference = references(name, world)
    assert not judge.fault_of_reference(kind, reference)
    ours = case.on_ranks(rank_pool.ranks(world), case.train, name, "hybrid_allreduce", precision)
    _, faults = judge.judge(kind, precision, reference, ours)
    assert not faults, "\n".join(faults)


def deliberate():
    table = [
        line.split(" | ") for line in README.read_text().splitlines() if line.startswith("| `")
    ]
    found = {}
    for names, where, *_ in table:
        precisions = tuple(re.findall(r"`([\w-]+)`", where)) or PRECISIONS
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), precisions)
    return len(table), found


NUM_ROWS, DELIBERATE = deliberate()
BEHAVIOURS = list(case.behaviours())


def observations():
    """In bf16 on one rank: what two add is what it adds in fp16."""
    for world, precision, name in itertools.product((1, 2), PRECISIONS, BEHAVIOURS):
        if (world, precision) != (2, "bf16-true") and not (world == 2 and name in case.ON_ONE_RANK):
            yield pytest.param(name, world, precision, id=f"{name}-{world}-{precision}")


def differs(rank_pool, folder, name, world, precision):
    rank_0, rank_1 = (
        rank_pool.ranks(world).run(case.observe, name, strategy, precision, str(folder))
        for strategy in case.STRATEGIES
    )
    fails = [
        seen["seen"]
        for seen in rank_0
        if isinstance(seen["seen"], str) and seen["seen"].startswith("raises ")
    ]
    if fails and precision != "32-true" and rank_0 != rank_1:
        return None  # `ddp` cannot do it in this precision
    assert not fails or "not supported with distributed" in fails[0], fails
    return [
        result
        for theirs, ours in zip(rank_0, rank_1, strict=True)
        for result in judge.differences(theirs, ours)
    ]


@pytest.mark.sampled(72)
@pytest.mark.parametrize(("name", "world", "precision"), list(observations()))
def test_what_differs_from_ddp_is_what_the_readme_names(
    rank_pool, tmp_path, name, world, precision
):
    result = differs(rank_pool, tmp_path, name, world, precision)
    assert result is None or bool(result) == (precision in DELIBERATE.get(name, ())), "\n".join(
        result
    )


@pytest.mark.parametrize("name", DELIBERATE)
def test_each_row_of_the_readme_is_true(rank_pool, tmp_path, name):
    assert differs(rank_pool, tmp_path, name, 1, DELIBERATE[name][0])


def test_the_batteries_are_whole():
    assert len(case.rows()) > 100
    assert set(QUICK) <= set(case.rows())
    assert set(DELIBERATE) <= set(BEHAVIOURS)
    assert NUM_ROWS <= 10
    assert f"\n{len(BEHAVIOURS)} behaviours of " in README.read_text()


# ---- that it can fail ------------------------------------------------------------------------------------------------
