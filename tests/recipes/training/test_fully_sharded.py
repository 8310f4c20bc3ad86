"""What `strategy=fsdp2` refuses, and which module it gets. That it trains as `ddp`: `test_train.py`."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from lightning_hybrid.callbacks.ema import MasterWeightAveraging
from recipes.training import keys
from recipes.training.fully_sharded import FullyShardedStrategy
from tests.recipes.composed import composed


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
