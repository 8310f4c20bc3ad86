"""Whole steps of a small ResNet are timed on one device, arm by arm in rounds."""

import pytest
import torch

from recipes import bench_training, bench_updates
from recipes.bench_training import TrainingBench


def rows_of(**settings):
    quick = {"batch_sizes": [2], "image_size": 32, "depth": 18, "num_steps": 2, "num_warmup_steps": 1, "num_rounds": 2}
    bench = TrainingBench(arms=["mixed_sgd", "ours_lars"], **{**quick, **settings})
    return list(bench.run(torch.device("cpu")))


@pytest.mark.slow
def test_every_arm_is_timed_in_every_round(one_rank):
    (rows,) = one_rank.run(rows_of)
    assert [(row.batch_size, row.arm, len(row.images_per_s)) for row in rows] == [
        (2, "mixed_sgd", 2),
        (2, "ours_lars", 2),
    ]
    assert all(rate > 0 for row in rows for rate in row.images_per_s)
    assert bench_training.markdown(rows).splitlines()[2].endswith("| 1.00 |")


def test_an_arm_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"`training.arms` \(=theirs\) must be one of mixed_sgd, ours_sgd, ours_lars"):
        TrainingBench(arms=["theirs"])


def test_a_copy_has_a_rate():
    """Of a mebibyte: more than a disk, less than any memory there is."""
    assert 1e8 < bench_updates.copy_rate(torch.device("cpu"), num_bytes=2**20) < 1e13
