"""Device memory under `strategy.offload`. `test_train.py` compares `strategy=fsdp2` with `ddp`."""

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


def test_offload_leaves_a_device_what_is_gathered_of_a_block():
    """Two ranks on a device of 3 bytes a parameter: LARS alone has shards of 4 there, and a step needs 12."""
    run = [sys.executable, "-W", "ignore", "-m", "tests.stand_in.accelerator", json.dumps(CASES)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    whole, offloaded, resumed, refused = json.loads(done.stdout.splitlines()[-1]).values()
    for one in (offloaded, resumed):
        assert one["masters"] == one["state"] == ["cpu"]
        assert one["buffers"] == [one["module"]] == whole["masters"] == whole["state"] != ["cpu"]
        assert one["file"] == ["cpu"]
        assert one["backend"].startswith("cpu:gloo,")  # verdicts and norms are added up on the host
        assert one["peak"] < 3
        assert whole["after"] - one["after"] == pytest.approx((4 + 4) / 2, rel=1e-3)
        assert one["after"] < 0.02  # statistics of BatchNorm
    assert (whole["scale"], offloaded["scale"]) == (whole["masters"], ["cpu"])
    assert whole["peak"] > 12
    assert "must not move shards to the device" in refused["error"]


def test_blocks_of_a_transformer_are_its_layers_and_none_has_the_weight_that_two_uses_share():
    network = Bert(
        num_classes=300,
        hidden_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=8,
    )
    assert gathered_alone(network) == list(network.network.bert.encoder.layer)
