"""What trains under `ddp` trains the same here, and what users of `ddp` may rely on holds here too."""

from __future__ import annotations

import copy
import itertools
import math
import re

import pytest
import torch
from lightning.pytorch import callbacks

from tests.battery import case, judge
from tests.battery.as_ddp.callbacks import CALLBACKS
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
            marks = [] if is_first or (name in QUICK and world == 2) else [pytest.mark.long, pytest.mark.battery]
            yield pytest.param(name, world, precision, id=f"{name}-{world}-{precision}", marks=marks)


@pytest.fixture(scope="session")
def references(rank_pool):
    """What `ddp` makes of a row in fp32, once in a session."""
    known = {}

    def reference(name, world):
        if (name, world) not in known:
            known[name, world] = case.on_ranks(rank_pool.ranks(world), case.train, name, "ddp", "32-true")
        return known[name, world]

    return reference


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "world", "precision"), list(rows()))
def test_what_trains_under_ddp_trains_the_same_here(rank_pool, references, name, world, precision):
    kind, reference = case.rows()[name], references(name, world)
    assert not judge.fault_of_reference(kind, reference)
    ours = case.on_ranks(rank_pool.ranks(world), case.train, name, "hybrid_allreduce", precision)
    _, faults = judge.judge(kind, precision, reference, ours)
    assert not faults, "\n".join(faults)


@pytest.mark.long
@pytest.mark.parametrize("precision", case.MIXED)
@pytest.mark.parametrize("name", case.rows())
def test_what_users_of_mixed_precision_may_expect(rank_pool, references, name, precision):
    """Lightning's own, by the same measure: where it is asked less than we are, the row says so."""
    kind = case.rows()[name]
    world = min(kind.worlds)
    theirs = case.on_ranks(rank_pool.ranks(world), case.train, name, "ddp", precision)
    _, faults = judge.judge(kind, precision, references(name, world), theirs)
    known = kind.mixed_fails.get(precision)
    assert not faults if known is None else any(known in fault for fault in faults), "\n".join(faults)


def deliberate():
    """Behaviour -> precisions in which it differs, as the README's table says."""
    table = [line.split(" | ") for line in README.read_text().splitlines() if line.startswith("| `")]
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
    """Where it differs, in words; None if there is nothing to compare with."""
    one, other = (
        rank_pool.ranks(world).run(case.observe, name, strategy, precision, str(folder)) for strategy in case.STRATEGIES
    )
    fails = [seen["seen"] for seen in one if isinstance(seen["seen"], str) and seen["seen"].startswith("raises ")]
    if fails and precision != "32-true" and one != other:
        return None  # `ddp` cannot do it in this precision
    assert not fails or "not supported with distributed" in fails[0], fails
    return [found for theirs, ours in zip(one, other, strict=True) for found in judge.differences(theirs, ours)]


@pytest.mark.sampled(72)
@pytest.mark.parametrize(("name", "world", "precision"), list(observations()))
def test_what_differs_from_ddp_is_what_the_readme_names(rank_pool, tmp_path, name, world, precision):
    found = differs(rank_pool, tmp_path, name, world, precision)
    assert found is None or bool(found) == (precision in DELIBERATE.get(name, ())), "\n".join(found)


@pytest.mark.parametrize("name", DELIBERATE)
def test_each_row_of_the_readme_is_true(rank_pool, tmp_path, name):
    assert differs(rank_pool, tmp_path, name, 1, DELIBERATE[name][0])


def test_the_batteries_are_whole():
    assert len(case.rows()) > 200
    assert set(QUICK) <= set(case.rows())
    assert set(DELIBERATE) <= set(BEHAVIOURS)
    assert NUM_ROWS <= 10
    assert f"\n{len(BEHAVIOURS)} behaviours of " in README.read_text()
    assert set(CALLBACKS) == set(callbacks.__all__)


# ---- that the batteries can fail -------------------------------------------------------------------------------------


def change_weight(result, change):
    result.state["net.0.weight"] = change(result.state["net.0.weight"])


FAULTS = {
    "last digit of a loss": lambda r: r.losses.__setitem__(3, math.nextafter(r.losses[3], 0)),
    "last digit of a weight": lambda r: change_weight(r, lambda w: torch.nextafter(w, torch.tensor(9.0))),
    "nothing is learned": lambda r: setattr(r, "losses", [r.losses[0]] * len(r.losses)),
    "a batch is missing": lambda r: r.losses.pop(5),
    "two batches change places": lambda r: r.losses.insert(0, r.losses.pop(1)),
    "a loss is nan": lambda r: r.losses.__setitem__(-1, math.nan),
    "weights stay": lambda r: setattr(r, "state", copy.deepcopy(r.start)),
    "weights are half": lambda r: change_weight(r, torch.Tensor.half),
    "a weight is missing": lambda r: r.state.pop("net.0.bias"),
    "a fact": lambda r: r.facts.update(counter=1),
    "an error": lambda r: setattr(r, "error", "RuntimeError: Expected Half, got Float"),
}
PLAIN = case.rows()["models.Plain"]


@pytest.fixture
def plain(references):
    return references("models.Plain", 2), copy.deepcopy(references("models.Plain", 2))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_found(plain, fault, precision):
    reference, ours = plain
    assert judge.judge(PLAIN, precision, reference, ours) == ("bit-equal", [])
    for result in ours:
        FAULTS[fault](result)
    is_rounding = fault.startswith("last digit") and precision != "32-true"
    assert judge.judge(PLAIN, precision, reference, ours)[0] == ("close" if is_rounding else "fails")


def test_ranks_that_part_are_found_and_a_reference_that_learns_nothing_is_none(plain):
    reference, ours = plain
    assert not judge.fault_of_reference(PLAIN, reference)
    assert judge.fault_of_reference(PLAIN, [reference[0], reference[0]]) == "ranks must see different data"
    ours[1].losses[0] += 1e-3
    ours[1].state["net.0.bias"][0] += 1e-3
    assert judge.judge(PLAIN, "16-true", reference, ours) == ("fails", ["ranks differ in ['net.0.bias']"])
    FAULTS["nothing is learned"](ours[0])
    assert "ddp learns nothing on rank 0" in judge.fault_of_reference(PLAIN, ours)


def test_what_must_be_refused_or_different_fails_where_it_is_neither(plain):
    reference, ours = plain
    refused, other = case.row(refused={"16-true": "not so"}), case.row(different={"16-true": "float16"})
    assert judge.judge(refused, "16-true", reference, ours)[0] == "fails"
    assert judge.judge(other, "16-true", reference, ours) == ("fails", ["nothing has 'float16'"])
    for result in ours:
        FAULTS["weights are half"](result)
    assert judge.judge(other, "16-true", reference, ours) == ("deliberately different", [])
    FAULTS["a loss is nan"](ours[0])
    assert judge.judge(other, "16-true", reference, ours)[0] == "fails"
    for result in ours:
        result.error = "MisconfigurationException: it is not so, it says"
    assert judge.judge(refused, "16-true", reference, ours) == ("refused in words", [])


def test_a_difference_is_found_and_own_names_are_none(tmp_path):
    runs = [case.Run(strategy=name, precision="32-true", folder=tmp_path / name) for name in case.STRATEGIES]
    one, two = (
        judge.plain(
            {"a": [1, (2.5, run.strategy == "ddp")], "b": run.folder, "c": type(run.trainer().strategy)},
            folder=run.folder,
            is_exact=True,
        )
        for run in runs
    )
    assert judge.differences(one, one) == []
    assert judge.differences(one, two) == [".1.a.list.1.tuple.1.1: ddp True, ours False"]
