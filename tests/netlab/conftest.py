"""A cluster, or the reason why there is none."""

import pytest

from tests.netlab.cluster import why_not
from tests.recipes.conftest import collect_ignore_glob as without_hydra


@pytest.fixture(scope="session")
def cluster_or_skip():
    """Skips where this machine cannot have one."""
    if reason := why_not():
        pytest.skip(reason)


# Programs over those of tests/evidence, which need Hydra.
if not without_hydra:
    collect_ignore = []
else:
    collect_ignore = ["faults.py", "test_bench.py"]
