"""Fixture of an emulated cluster, which skips tests where none is possible."""

import pytest

from tests.netlab.cluster import why_not
from tests.recipes.conftest import collect_ignore_glob as without_hydra


@pytest.fixture(scope="session")
def cluster_or_skip():
    """Skip the test with the reason if this machine cannot emulate a cluster."""
    if reason := why_not():
        pytest.skip(reason)


# These programs use tests/evidence, which needs Hydra.
if not without_hydra:
    collect_ignore = []
else:
    collect_ignore = ["faults.py", "test_bench.py"]
