"""Device memory with `strategy.offload`. `test_train.py` compares `strategy=fsdp2` with `ddp`."""

import json
import subprocess
import sys

import pytest

from recipes.networks.bert import Bert
from recipes.training.gathered_blocks import gathered_alone
from tests.checkout import ROOT

CASES = {
    "whole": {"offload": False},
    "offloaded": {},
    "resumed": {
        "is_resumed": True,
        "optimizer": "lamb",
        "precision": "32-true",
        "gradient_clip_val": 1.0,
    },
    "refused": {"offload": False, "has_policy": True},
}


@pytest.mark.long
def test_offload_leaves_a_device_what_is_gathered_of_a_block():
    """With two ranks, the device has 3 bytes per parameter. LARS alone has shards of 4 bytes, and a step needs 12."""
    program = ["-W", "ignore", "-m", "tests.stand_in.accelerator", json.dumps(CASES)]
    done = subprocess.run([sys.executable, *program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    whole = results["whole"]
    device = whole["masters"]
    assert device != ["cpu"]
    assert whole["state"] == device
    for name in ("offloaded", "resumed"):
        result = results[name]
        assert result["masters"] == ["cpu"], name
        assert result["state"] == ["cpu"], name
        assert result["file"] == ["cpu"], name
        assert result["buffers"] == device, name
        assert [result["module"]] == device, name
        # Verdicts and norms are reduced on the host.
        assert result["backend"].startswith("cpu:gloo,"), name
        assert result["peak"] < 3, name
        assert whole["after"] - result["after"] == pytest.approx((4 + 4) / 2, rel=1e-3), name
        assert result["after"] < 0.02, name  # statistics of BatchNorm
    assert whole["scale"] == device
    assert results["offloaded"]["scale"] == ["cpu"]
    assert whole["peak"] > 12
    assert "it would move the offloaded shards to the device" in results["refused"]["error"]


def test_blocks_of_a_transformer_are_its_layers_and_none_has_the_weight_that_two_uses_share():
    network = Bert(
        num_classes=300,
        hidden_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=8,
    )
    assert gathered_alone(network) == list(network.network.bert.encoder.layer)
