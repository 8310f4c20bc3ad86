"""The cost of the orthogonalised momentum: what is counted, measured among ranks, and planned for a node."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.benchmarks.gradient_sets import alexnet_shapes, resnet50_shapes
from tests.evidence.orthogonal_cost.planned import planned
from tests.evidence.orthogonal_cost.updates import shares

ROOT = Path(__file__).resolve().parents[2]


def test_one_layer_of_alexnet_is_most_of_the_work_of_any_number_of_ranks():
    """fc6, 4,096 x 9,216: five times 4 * 4096^2 * 9216 + 2 * 4096^3 of 5.95 TFLOP, which no rank can share."""
    fc6 = 5 * (4 * 4096**2 * 9216 + 2 * 4096**3)
    alone = shares(alexnet_shapes(), 1)[0][0]
    for num_ranks in (2, 4, 8):
        parts = shares(alexnet_shapes(), num_ranks)
        assert max(flops for flops, _ in parts) == fc6
        assert sum(flops for flops, _ in parts) == alone
    assert 0.63 < fc6 / alone < 0.64


def test_a_share_counts_two_bytes_for_each_element_of_a_matrix():
    """ResNet-50 has 53 kernels and a classifier of 2,048 x 1,000; biases and normalisation are no matrices."""
    vectors = 2 * 26560 + 1000
    assert sum(num_bytes for _, num_bytes in shares(resnet50_shapes(), 8)) == 2 * (25_557_032 - vectors)


def test_the_plan_of_a_node_is_the_arithmetic_of_its_parts():
    row = planned("dgx_a100")
    assert row.step_s == pytest.approx(64 / 3398)
    assert row.shared_s >= row.alone_s / 8
    assert row.share() == pytest.approx((row.shared_s + row.gather_s) / row.step_s)
    assert row.share(images=8192) == pytest.approx(row.share() / 128)
    at_that_rate = row.shared_s * row.rate_flops / row.rate_needed + row.gather_s
    assert at_that_rate == pytest.approx(0.05 * row.step_s)
    assert row.one_gather_s < row.gather_s


def test_a_node_without_a_rate_is_refused():
    with pytest.raises(ValueError, match=r"`clusters` \(=hgx_b200\) must have NCCL and images_per_s of resnet50"):
        planned("hgx_b200")


@pytest.mark.long
def test_two_ranks_share_an_update_and_hold_the_bits_of_one(tmp_path):
    command = [sys.executable, "-m", "tests.evidence.orthogonal_cost", f"hydra.run.dir={tmp_path}", "clusters=null"]
    done = subprocess.run(
        [*command, "updates.gradients=[linear_8mib]", "updates.num_ranks=[2]", "updates.num_rounds=2"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    rows = {row["arm"]: row for row in json.loads((tmp_path / "cost.json").read_text())["updates"]}
    assert all(row["is_equal"] and len(row["cpu_s"]) == 2 for row in rows.values())
    assert rows["shared"]["flops"] == rows["orthogonal"]["flops"] / 2
    assert rows["shared"]["received_bytes"] == 2 * 4 * 512 * 512
    # A result is 2 bytes an element, of 8 layers; an iteration holds some matrices of 1 MiB.
    assert 2 * 2**20 < rows["orthogonal"]["peak_bytes"][-1] < 64 * 2**20
    assert (tmp_path / "table.md").read_text().count("|") > 30
