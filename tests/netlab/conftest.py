"""A cluster, or the reason why there is none."""

import pytest

from tests.netlab.cluster import why_not


@pytest.fixture(scope="session")
def cluster_or_skip():
    """Skips where this machine cannot have one."""
    if reason := why_not():
        pytest.skip(reason)
