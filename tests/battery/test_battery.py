"""User code that trains under `ddp` trains the same under our strategy, with the same guarantees."""

import functools
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
    named_kinds = list(enumerate(case.rows().items()))
    for world, (index, (name, kind)) in itertools.product((1, 2), named_kinds):
        if world not in kind.worlds:
            continue
        for precision in PRECISIONS:
            is_sampled = precision == "16-true" and world == min(kind.worlds) and index % 2 == 0
            marks = [pytest.mark.long, pytest.mark.battery]
            if is_sampled or (name in QUICK and world == 2):
                marks = []
            case_id = f"{name}-{world}-{precision}"
            yield pytest.param(name, world, precision, id=case_id, marks=marks)


@pytest.fixture(scope="session")
def references(rank_pool):
    """Return a function that trains a row under `ddp` in fp32, once per session."""

    @functools.cache
    def reference(name, world):
        return case.on_ranks(rank_pool.ranks(world), case.train, name, "ddp", "32-true")

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
    """Return the number of rows of the page's table, and the precisions of each behavior in it."""
    lines = README.read_text().splitlines()
    table = [line.split(" | ") for line in lines if line.startswith("| `")]
    precisions_by_behavior = {}
    for names, where, *_ in table:
        precisions = tuple(re.findall(r"`([\w-]+)`", where)) or PRECISIONS
        for name in re.findall(r"`(\w+)`", names):
            precisions_by_behavior[name] = precisions
    return len(table), precisions_by_behavior


NUM_ROWS, DELIBERATE = deliberate()
BEHAVIORS = list(case.behaviors())


def observations():
    """Yield each behavior on one and two ranks. bf16 runs on one rank only, as two ranks add nothing beyond fp16."""
    for world, precision, name in itertools.product((1, 2), PRECISIONS, BEHAVIORS):
        if world == 2 and (precision == "bf16-true" or name in case.ON_ONE_RANK):
            continue
        yield pytest.param(name, world, precision, id=f"{name}-{world}-{precision}")


def differences_from_ddp(rank_pool, folder, name, world, precision):
    """Return the differences of a behavior, or None if `ddp` does not support it in this precision."""
    ranks = rank_pool.ranks(world)
    under_ddp = ranks.run(case.observe, name, "ddp", precision, str(folder))
    under_ours = ranks.run(case.observe, name, "hybrid_allreduce", precision, str(folder))
    errors = []
    for observation in under_ddp:
        seen = observation["seen"]
        if isinstance(seen, str) and seen.startswith("raises "):
            errors.append(seen)
    if errors and precision != "32-true" and under_ddp != under_ours:
        return None
    assert not errors or "not supported with distributed" in errors[0], errors
    lines = []
    for theirs, ours in zip(under_ddp, under_ours, strict=True):
        lines += judge.differences(theirs, ours)
    return lines


@pytest.mark.sampled(72)
@pytest.mark.parametrize(("name", "world", "precision"), list(observations()))
def test_what_differs_from_ddp_is_what_the_readme_names(
    rank_pool, tmp_path, name, world, precision
):
    lines = differences_from_ddp(rank_pool, tmp_path, name, world, precision)
    if lines is not None:
        is_deliberate = precision in DELIBERATE.get(name, ())
        assert bool(lines) == is_deliberate, "\n".join(lines)


@pytest.mark.parametrize("name", DELIBERATE)
def test_each_row_of_the_readme_is_true(rank_pool, tmp_path, name):
    precision = DELIBERATE[name][0]
    assert differences_from_ddp(rank_pool, tmp_path, name, 1, precision)


def test_the_batteries_are_whole():
    assert len(case.rows()) > 100
    assert set(QUICK) <= set(case.rows())
    assert set(DELIBERATE) <= set(BEHAVIORS)
    assert NUM_ROWS <= 10
    assert f" {len(BEHAVIORS)} behaviors of " in README.read_text()


# ---- tests that the battery can fail ---------------------------------------------------------------------------------
