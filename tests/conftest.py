"""Fixtures every test may use: worlds of one to four real ranks, and the rule for tests that need a GPU."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from recipes.cli.preflight import LAUNCH_VARIABLES
from tests.rank_pool import RankPool, Ranks

# No deadline: how long an example takes is the machine's load. The same examples in every run: a test that fails is
# the change's doing and not the day's. Other examples: `pytest --hypothesis-profile=exploring`.
settings.register_profile("same examples", deadline=None, derandomize=True)
settings.register_profile("exploring", deadline=None, max_examples=1000)
settings.load_profile("same examples")


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "cases of each fuzz test; by default few enough for every run of the tests"
    parser.addoption("--fuzz-cases", type=int, default=None, help=help_text)
    help_text = "on a CPU, modules move as to a GPU and back: tests/moving_device.py"
    parser.addoption("--moving-device", action="store_true", help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--moving-device"):
        from tests import moving_device

        moving_device.install()


@pytest.fixture(scope="session")
def rank_pool(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    pool = RankPool(num_ranks=4, is_moving=pytestconfig.getoption("--moving-device"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def one_rank(rank_pool: RankPool) -> Ranks:
    return rank_pool.ranks(1)


@pytest.fixture(scope="session")
def two_ranks(rank_pool: RankPool) -> Ranks:
    return rank_pool.ranks(2)


@pytest.fixture(scope="session")
def three_ranks(rank_pool: RankPool) -> Ranks:
    return rank_pool.ranks(3)


@pytest.fixture(scope="session")
def four_ranks(rank_pool: RankPool) -> Ranks:
    return rank_pool.ranks(4)


@pytest.fixture(autouse=True)
def nothing_is_left_in_the_environment() -> Iterator[None]:
    """Lightning writes seed, port and world into it, which programs that later tests start would inherit."""
    before = {name: os.environ.get(name) for name in LAUNCH_VARIABLES}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def pytest_collection_finish() -> None:
    """The collector need not look again at what imports have made: a third of a second each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_cases = Counter[str]()
    for item in items:
        if (sampled := item.get_closest_marker("sampled")) and not item.get_closest_marker("long"):
            name = item.nodeid.partition("[")[0]
            if num_cases[name] % sampled.args[0]:
                item.add_marker("long")
                item.add_marker("battery")
            num_cases[name] += 1
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)
