"""What `strategy=fsdp2` refuses, and what `offload` leaves on a device. That it trains as `ddp`: `test_train.py`."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from lightning_hybrid.callbacks.ema import MasterWeightAveraging
from recipes.training import keys
from recipes.training.fully_sharded import FullyShardedStrategy
from tests.checkout import ROOT
from tests.recipes.composed import composed

CASES = {
    "whole": {"offload": False},
    "offloaded": {},
    "resumed": {"is_resumed": True, "optimizer": "lamb", "precision": "32-true", "gradient_clip_val": 1.0},
    "refused": {"offload": False, "has_policy": True},
}


def test_a_precision_whose_loss_scale_knows_no_shards_is_refused():
    cfg = composed("train", "strategy=fsdp2", "precision=16-mixed")
    with pytest.raises(ValueError, match=r"`precision` \(='.*'\) and strategy=fsdp2 .* Set precision=16-true, bf16-"):
        keys.check_precision(cfg)
    for fits in ("bf16-mixed", "32-true", "16-true", "bf16-true"):
        cfg.precision = fits
        keys.check_precision(cfg)


def test_kernels_in_channels_last_are_refused():
    network = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"`channels_last` \(=true\) and strategy=fsdp2 .* `0.weight` has strides"):
        FullyShardedStrategy().shard_(network)


def test_an_average_of_shards_is_refused():
    trainer = SimpleNamespace(strategy=ModelParallelStrategy())
    with pytest.raises(ValueError, match=r"`strategy` \(=ModelParallelStrategy\) and MasterWeightAveraging exclude"):
        MasterWeightAveraging().setup(trainer, nn.Linear(1, 1), "fit")


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
    assert "must be held on the host" in refused["error"]
