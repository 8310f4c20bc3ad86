"""Every row of the battery, in each precision, on one and on two ranks. `case.py` says how."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch

from tests.battery.ordinary import case
from tests.battery.ordinary.tally import TALLY

QUICK = (
    "models.Plain models.Temperature layers.Convolutions state.Moco optimizers.Adam optimizers.LarsFused "
    "loops.Accumulates loops.ByHandNoSyncAndClips loops.GanToggles loaders.Refilled callbacks.SavesStateDict"
).split()
"""Rows that a default run takes in every precision on two ranks; every other row it takes in fp16 on one."""

PRECISIONS = ("32-true", *case.HALF)
NAMES = case.names()


def cases(precisions):
    for world, name in itertools.product((1, 2), NAMES):  # a pool makes a new group where the world changes
        if world in case.row(name).worlds:
            for precision in precisions:
                is_first = precision == "16-true" and world == min(case.row(name).worlds)
                is_default = (is_first and name in NAMES[::2]) or (name in QUICK and world == 2)
                marks = [] if is_default else [pytest.mark.long, pytest.mark.battery]
                yield pytest.param(name, world, precision, id=f"{name}-{world}-{precision}", marks=marks)


@pytest.fixture(scope="session")
def references(rank_pool):
    """What `ddp` makes of a row in fp32, once in a session."""
    known = {}

    def reference(name, world):
        if (name, world) not in known:
            known[name, world] = case.run_on(rank_pool.ranks(world), name, "ddp", "32-true")
        return known[name, world]

    return reference


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "world", "precision"), list(cases(PRECISIONS)))
def test_what_trains_under_ddp_trains_the_same_here(rank_pool, references, name, world, precision):
    reference = references(name, world)
    assert not case.fault_of_reference(case.row(name), reference)
    ours = case.run_on(rank_pool.ranks(world), name, "hybrid_allreduce", precision)
    outcome, faults = case.judge(name, precision, reference, ours)
    TALLY.count(precision, outcome)
    assert not faults, "\n".join(faults)


@pytest.mark.long
@pytest.mark.parametrize("precision", case.MIXED)
@pytest.mark.parametrize("name", NAMES)
def test_what_users_of_mixed_precision_may_expect(rank_pool, references, name, precision):
    """Lightning's own, by the same measure: where it is asked less than we are, the row says so."""
    world = min(case.row(name).worlds)
    reference = references(name, world)
    theirs = case.run_on(rank_pool.ranks(world), name, "ddp", precision)
    outcome, faults = case.judge(name, precision, reference, theirs)
    TALLY.count(precision, outcome)
    known = case.row(name).mixed_fails.get(precision)
    if known is None:
        assert not faults, "\n".join(faults)
    else:
        assert any(known in fault for fault in faults), f"not {known!r}, but {faults}"


# ---- that the battery can fail --------------------------------------------------------------------------------------


@pytest.fixture
def plain(references):
    return references("models.Plain", 2), copy.deepcopy(references("models.Plain", 2))


def worse(result, name):
    """One thing that is wrong, by name."""
    if name == "last digit of a loss":
        result.losses[3] = math.nextafter(result.losses[3], 0)
    if name == "last digit of a weight":
        result.state["net.0.weight"][0, 0] = torch.nextafter(result.state["net.0.weight"][0, 0], torch.tensor(9.0))
    if name == "nothing is learned":
        result.losses = [result.losses[0]] * len(result.losses)
    if name == "a batch is missing":
        del result.losses[5]
    if name == "two batches change places":
        result.losses[0], result.losses[1] = result.losses[1], result.losses[0]
    if name == "a loss is nan":
        result.losses[-1] = math.nan
    if name == "weights stay":
        result.state = copy.deepcopy(result.start)
    if name == "weights are half":
        result.state = {key: value.half() for key, value in result.state.items()}
    if name == "a weight is missing":
        del result.state["net.0.bias"]
    if name == "a fact":
        result.facts["counter"] = 1
    if name == "an error":
        result.error = "RuntimeError: Expected Half, got Float"


ALL_FAULTS = (
    "nothing is learned|a batch is missing|two batches change places|a loss is nan|weights stay|weights are half|"
    "a weight is missing|a fact|an error"
).split("|")


@pytest.mark.parametrize("fault", ["last digit of a loss", "last digit of a weight", *ALL_FAULTS])
def test_bits_that_differ_are_found(plain, fault):
    reference, ours = plain
    assert case.judge("models.Plain", "32-true", reference, ours) == ("bit-equal", [])
    worse(ours[1], fault)
    assert case.judge("models.Plain", "32-true", reference, ours)[0] == "fails"


@pytest.mark.parametrize("fault", ALL_FAULTS)
@pytest.mark.parametrize("precision", case.HALF)
def test_what_is_not_close_is_found(plain, precision, fault):
    reference, ours = plain
    assert case.judge("models.Plain", precision, reference, ours) == ("bit-equal", [])
    worse(ours[0], fault)
    worse(ours[1], fault)
    assert case.judge("models.Plain", precision, reference, ours)[0] == "fails"


def test_ranks_that_part_are_found(plain):
    reference, ours = plain
    ours[1].losses[0] += 1e-3
    ours[1].state["net.0.bias"][0] += 1e-3
    assert case.judge("models.Plain", "16-true", reference, ours) == ("fails", ["ranks differ in ['net.0.bias']"])


def test_a_reference_that_learns_nothing_is_none(plain):
    reference, _ = plain
    kind = case.row("models.Plain")
    assert not case.fault_of_reference(kind, reference)
    still = copy.deepcopy(reference)
    worse(still[0], "nothing is learned")
    assert "ddp learns nothing on rank 0" in case.fault_of_reference(kind, still)
    assert case.fault_of_reference(kind, [reference[0], reference[0]]) == "ranks must see different data"


def test_a_row_that_must_be_refused_fails_when_it_trains(plain):
    reference, ours = plain
    assert case.judge("optimizers.Lbfgs", "16-true", reference, ours)[0] == "fails"
    ours[0].error = "MisconfigurationException: LBFGS must not run the closure by itself, it says"
    assert case.judge("optimizers.Lbfgs", "16-true", reference, [ours[0]] * 2) == ("refused in words", [])


def test_a_row_that_is_to_be_different_fails_where_it_is_not_and_where_it_is_otherwise(plain, monkeypatch):
    reference, ours = plain
    monkeypatch.setattr(case.row("models.Plain"), "different", {"16-true": "float16"})
    assert case.judge("models.Plain", "16-true", reference, ours) == ("fails", ["nothing has 'float16'"])
    for result in ours:
        worse(result, "weights are half")
    assert case.judge("models.Plain", "16-true", reference, ours) == ("deliberately different", [])
    worse(ours[0], "a loss is nan")
    assert case.judge("models.Plain", "16-true", reference, ours)[0] == "fails"


def test_every_table_has_rows_and_every_row_is_found_by_its_name():
    assert all(case.rows(table) for table in case.TABLES)
    assert len(NAMES) == len(set(NAMES)) > 200
    assert set(QUICK) <= set(NAMES)
