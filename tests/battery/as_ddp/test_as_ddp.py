"""What users of `ddp` may rely on holds here too, but for what the strategy's README names."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from lightning.pytorch import callbacks

from tests.battery.as_ddp import case
from tests.battery.as_ddp.callbacks import CALLBACKS

README = Path(__file__).parents[3] / "lightning_hybrid/strategy/differences.md"
PRECISIONS = ("32-true", "16-true", "bf16-true")
BEHAVIOURS = list(case.behaviours())


def deliberate():
    """Behaviour -> precisions in which it differs, as the README's table says."""
    section = README.read_text()
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    found = {}
    for names, where, *_ in rows:
        precisions = tuple(re.findall(r"`([\w-]+)`", where)) or PRECISIONS
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), precisions)
    return len(rows), found


NUM_ROWS, DELIBERATE = deliberate()


def cases():
    """In bf16 on one rank: what two add is what it adds in fp16."""
    for world, precision, name in itertools.product((1, 2), PRECISIONS, BEHAVIOURS):
        if world in case.worlds(name) and (world, precision) != (2, "bf16-true"):
            yield pytest.param(name, world, precision, id=f"{name}-{world}-{precision}")


def differs(rank_pool, folder, name, world, precision):
    """Where it differs, in words; None if there is nothing to compare with."""
    results = [
        rank_pool.ranks(world).run(case.observe, name, strategy, precision, str(folder)) for strategy in case.STRATEGIES
    ]
    fails = [one["seen"] for one in results[0] if isinstance(one["seen"], str) and one["seen"].startswith("raises ")]
    if fails and precision != "32-true" and results[0] != results[1]:
        return None  # `ddp` cannot do it in this precision
    assert not fails or "not supported with distributed" in fails[0], fails
    return [found for one, other in zip(*results, strict=True) for found in case.differences(one, other)]


@pytest.mark.sampled(72)
@pytest.mark.parametrize(("name", "world", "precision"), list(cases()))
def test_what_differs_from_ddp_is_what_the_readme_names(rank_pool, tmp_path, name, world, precision):
    found = differs(rank_pool, tmp_path, name, world, precision)
    assert found is None or bool(found) == (precision in DELIBERATE.get(name, ())), "\n".join(found)


@pytest.mark.parametrize("name", DELIBERATE)
def test_each_row_of_the_readme_is_true(rank_pool, tmp_path, name):
    precision = DELIBERATE[name][0]
    assert differs(rank_pool, tmp_path, name, 1, precision)


def test_the_readme_names_behaviours_that_are_compared_and_few():
    assert set(DELIBERATE) <= set(BEHAVIOURS)
    assert NUM_ROWS <= 10
    assert f"\n{len(BEHAVIOURS)} behaviours of " in README.read_text()


def test_every_callback_that_lightning_ships_is_compared():
    assert set(CALLBACKS) == set(callbacks.__all__)


def test_a_difference_is_found_and_own_names_are_none(tmp_path):
    runs = [case.Run(strategy=name, precision="32-true", folder=tmp_path / name) for name in case.STRATEGIES]
    seen = [
        {"a": [1, (2.5, run.strategy == "ddp")], "b": run.folder, "c": type(run.trainer().strategy)} for run in runs
    ]
    one, two = (case.plain(value, run=run, is_exact=True) for value, run in zip(seen, runs, strict=True))
    assert case.differences(one, one) == []
    assert case.differences(one, two) == [".1.a.list.1.tuple.1.1: ddp True, ours False"]
