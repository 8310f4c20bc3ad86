"""Fixtures for user code: comparisons with `ddp` in fp32, whose results are computed once per session."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.precision.user_code.support import (
    FabricLoop,
    Outcome,
    Setup,
    class_of,
    differences,
    faults_of_reference,
    run_loop,
    train,
)
from tests.rank_pool import RankError, RankPool

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run a file's tests on one rank before those on two, because each new world size recreates the process group."""
    own_indices = [index for index, item in enumerate(items) if item.path.parent == FOLDER]
    own_items = sorted((items[index] for index in own_indices), key=file_and_world_size)
    for index, item in zip(own_indices, own_items, strict=True):
        items[index] = item


def file_and_world_size(item: pytest.Item) -> tuple[str, int]:
    """Return the file of a test and the number of ranks on which it runs."""
    assert isinstance(item, pytest.Function)
    if hasattr(item, "callspec"):
        parameters = item.callspec.params
    else:
        parameters = {}
    return item.path.name, parameters.get("world_size", 2)


class Comparison:
    """Runs of a case on ranks of the pool, and their comparison with `ddp` in fp32."""

    def __init__(self, rank_pool: RankPool, new_folder: Callable[[], str]) -> None:
        self._rank_pool = rank_pool
        self._new_folder = new_folder
        self._references: dict[tuple[Any, int], list[Outcome]] = {}

    def run(self, user_code: Any, strategy: str, world_size: int, precision: str) -> list[Outcome]:
        """Return the outcome of the case on each rank. The error of an outcome says whether ranks hung or died."""
        setup = Setup(strategy=strategy, precision=precision, folder=self._new_folder())
        program = train
        if issubclass(class_of(user_code), FabricLoop):
            program = run_loop
        try:
            return self._rank_pool.ranks(world_size).run(program, user_code, setup)
        except RankError as error:
            return [Outcome(error=str(error)) for _ in range(world_size)]

    def reference(self, user_code: Any, world_size: int) -> list[Outcome]:
        """Return the outcome of the case under `ddp` in fp32, which must keep the promises of the case."""
        key = (repr(user_code), world_size)
        if key not in self._references:
            self._references[key] = self.run(user_code, "ddp", world_size, "32-true")
        reference = self._references[key]
        assert not faults_of_reference(class_of(user_code), reference)
        return reference

    def assert_as_under_ddp(self, user_code: Any, world_size: int, precision: str) -> list[Outcome]:
        """Fail with all differences from `ddp`, or return the outcome of the case."""
        reference = self.reference(user_code, world_size)
        outcomes = self.run(user_code, "hybrid_allreduce", world_size, precision)
        faults = differences(class_of(user_code), precision, reference, outcomes)
        assert not faults, "\n".join(faults)
        return outcomes


@pytest.fixture(scope="session")
def comparison(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Return a comparison with `ddp` whose references are kept for the session."""
    return Comparison(rank_pool, lambda: str(tmp_path_factory.mktemp("user_code")))
