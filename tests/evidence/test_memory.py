"""The census finds what is known to be there: tensors of known sizes, in fresh processes, by owner."""

import pytest

from tests.evidence.outcomes import ran

KNOWN = {  # weights, masters, gradients, optimizer
    ("32-true", "adamw"): (4, 0, 4, 8),
    ("32-true", "sgd"): (4, 0, 4, 4),
    ("16-true", "adamw"): (2, 4, 4, 8),  # fp32 gradients for the step; the buckets of 2 are found next to them
    ("16-true", "sgd"): (2, 4, 4, 4),
}


@pytest.mark.long
def test_census_finds_weights_masters_gradients_and_state(tmp_path):
    options = ["precisions=[32-true,16-true]", "optimizers=[sgd,adamw]", "census.width=256", "census.depth=4"]
    rows = ran("memory", tmp_path, *options, file="memory.json")["rows"]
    assert len(rows) == 4
    for row in rows:
        held = row["bytes_per_parameter"]
        expected = KNOWN[row["precision"], row["optimizer"]]
        for owner, known in zip(("weights", "masters", "gradients", "optimizer"), expected, strict=True):
            assert held[owner] == pytest.approx(known, abs=0.05), (row["precision"], row["optimizer"], owner)
        # Buckets: DDP holds them next to fp32 gradients, and here next to what was made of them. The rest is small.
        buckets = 4 if row["precision"] == "32-true" else 2
        assert buckets + 0.2 < held["communication and rest"] < buckets + 0.3  # 64 KiB of it are the samples
    assert (tmp_path / "table.md").read_text().count("|") > 40
