"""A rate to begin with: the published points, between them no corner, and what has no point is refused."""

from __future__ import annotations

import math

import pytest

from lightning_hybrid.optim import starting_rate
from lightning_hybrid.optim.starting_rate import MLPERF_LARS


def test_lars_goes_through_mlperfs_points_and_grows_between_them():
    assert [starting_rate("lars", batch_size=batch) for batch in MLPERF_LARS] == pytest.approx([*MLPERF_LARS.values()])
    rates = [starting_rate("lars", batch_size=batch) for batch in range(256, 65537, 256)]
    assert rates == sorted(rates)
    assert starting_rate("lars", batch_size=8192, sgd_lr=0.4, sgd_batch_size=512) == pytest.approx(34)


def test_sgd_grows_with_the_batch_and_lamb_with_its_root():
    assert starting_rate("sgd", batch_size=8192) == pytest.approx(3.2)
    rates = [starting_rate("lamb", batch_size=batch) for batch in (512, 32768)]
    assert rates == pytest.approx([0.04 / 8, 0.04])
    assert math.isclose(starting_rate("lamb", batch_size=32768, sgd_lr=0.2), 0.08)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"optimizer": "adam", "batch_size": 1}, "`optimizer`"),
        ({"optimizer": "lars", "batch_size": 131072}, "at most 65536"),
        ({"optimizer": "sgd", "batch_size": 0}, "`batch_size`"),
        ({"optimizer": "sgd", "batch_size": 1, "sgd_lr": float("nan")}, "`sgd_lr`"),
    ],
)
def test_what_has_no_point_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        starting_rate(**given)
