"""Shared pytest fixtures and hooks: worlds of one to four real ranks, and rules for GPU and clock tests.

`pytest` without paths runs all tests. If `pytest-xdist` is installed, it uses several processes, because tests spend
half of their time waiting for sockets or for other ranks. `pytest -n 0` runs all tests in a single process.
"""

from __future__ import annotations

import fcntl
import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

# Set before torch is imported. On tensors this small, synchronizing several threads costs more than they save.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from recipes.cli.preflight import LAUNCH_VARIABLES

# Importing torch takes seconds, and the xdist process that distributes the tests does not need it.
if TYPE_CHECKING:
    from tests.rank_pool import RankPool, Ranks

# There is no deadline, because the duration of an example depends on the load of the machine. Every run uses the same
# examples, so a new failure is caused by the code change. To try other examples, use `pytest
# --hypothesis-profile=exploring`.
settings.register_profile("same examples", deadline=None, derandomize=True)
settings.register_profile("exploring", deadline=None, max_examples=1000)
settings.load_profile("same examples")

# This is more than a small machine has cores, because tests spend half of their time waiting for sockets or clocks.
NUM_PROCESSES = 4

LONG_TEST_LIMIT_S = 3600  # `timeout` in pyproject.toml limits all other tests


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "cases of each fuzz test; by default few enough for every run of the tests"
    parser.addoption("--fuzz-cases", type=int, default=None, help=help_text)
    help_text = "on a CPU, modules move as to a GPU and back: tests/stand_in/moving_device.py"
    parser.addoption("--moving-device", action="store_true", help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--moving-device"):
        from tests.stand_in import moving_device

        moving_device.install()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the options
def pytest_cmdline_main(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # an xdist worker must not start workers itself
        return
    options = config.option
    are_all = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not options.collectonly
    if (
        are_all
        and getattr(options, "numprocesses", 0) is None
        and not options.usepdb
        and (os.cpu_count() or 1) > 1
    ):
        options.numprocesses = NUM_PROCESSES
        options.dist = "loadfile"


@pytest.fixture(scope="session")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Open the two lock files that all test processes of the session share."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    else:
        folder = folder
    queue, machine = (
        os.open(folder / name, os.O_RDWR | os.O_CREAT) for name in ("queue", "machine")
    )
    yield queue, machine
    os.close(queue)
    os.close(machine)


@pytest.fixture(autouse=True)
def alone_where_it_reads_clocks(
    request: pytest.FixtureRequest, turns: tuple[int, int]
) -> Iterator[None]:
    """Run a test marked `clock` alone, while no other process runs a test."""
    queue, machine = turns
    is_alone = request.node.get_closest_marker("clock")
    # A test holds the queue lock until it gets the machine lock, so no later test can start before it.
    fcntl.flock(queue, fcntl.LOCK_EX)
    fcntl.flock(machine, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
    fcntl.flock(queue, fcntl.LOCK_UN)
    yield
    fcntl.flock(machine, fcntl.LOCK_UN)


@pytest.fixture(scope="session")
def rank_pool(pytestconfig: pytest.Config) -> Iterator[RankPool]:
    from tests.rank_pool import RankPool

    pool = RankPool(num_ranks=8, is_moving=pytestconfig.getoption("--moving-device"))
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
    """Restore the launch variables after each test, so that later tests do not inherit Lightning's values."""
    before = {name: os.environ.get(name) for name in LAUNCH_VARIABLES}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def no_copy_of_pytest_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test that would make Lightning start further copies of pytest for a fit on several devices.

    If such a copy fails, Lightning's observer sends SIGTERM to the process that started it. The signal arrives seconds
    later, in the middle of another test. Run such fits with ``two_ranks`` or in a separate program.
    """
    launchers = sys.modules.get("lightning.pytorch.strategies.launchers.subprocess_script")
    if launchers is None:
        return
    launch = launchers._SubprocessScriptLauncher._call_children_scripts

    def launch_or_fail(launcher: Any) -> None:
        if launcher.num_processes > 1:
            pytest.fail(f"this test would start {launcher.num_processes - 1} copies of pytest")
        launch(launcher)

    monkeypatch.setattr(
        launchers._SubprocessScriptLauncher, "_call_children_scripts", launch_or_fail
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Pause garbage collection while tests are collected, and exclude the imported objects from later collections.

    The collector would otherwise scan everything that the imports create. This would take seconds during collection and
    a third of a second on each later pass.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_cases = Counter[str]()
    for item in items:
        if (sampled := item.get_closest_marker("sampled")) and not item.get_closest_marker("long"):
            name = item.nodeid.partition("[")[0]
            if num_cases[name] % sampled.args[0]:
                item.add_marker("long")
                item.add_marker("battery")
            num_cases[name] += 1
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.timeout(LONG_TEST_LIMIT_S))
    import torch

    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(
        reason="needs a CUDA device, and torch.cuda.is_available() is False here"
    )
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)
