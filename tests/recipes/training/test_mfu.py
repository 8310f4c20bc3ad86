from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from lightning_hybrid.callbacks import TrainingMetrics
from recipes.training import mfu

CONFIG = {"precision": "16-true", "data": {"image_size": 4}, "model": {"in_channels": 2, "image_size": 9}}
FLOPS = 2 * 2 * (2 * 3) * 4 * 4  # a 1x1 convolution on 2 channels to 3: forward and the weights' gradient, no image's


def filled(monkeypatch, *, device_name, given=(), config=CONFIG):
    """The callback's two numbers after a run on a device of that name has been built."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: device_name)
    callback = TrainingMetrics(**dict(given))
    device = torch.device("cuda" if device_name else "cpu")
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=device), callbacks=[object(), callback])
    mfu.fill_in(trainer, nn.Conv2d(2, 3, 1, bias=False), OmegaConf.create(config))
    return callback.flops_per_image, callback.peak_flops_per_s


def test_a_known_device_gets_its_peak_and_counted_operations(monkeypatch):
    assert filled(monkeypatch, device_name="NVIDIA H200") == (FLOPS, 989.5e12)
    assert filled(monkeypatch, device_name="NVIDIA H200", config=CONFIG | {"precision": "32-true"}) == (FLOPS, 67e12)


def test_the_model_says_how_large_images_are_where_the_data_do_not(monkeypatch):
    flops, _ = filled(monkeypatch, device_name="NVIDIA H200", config=CONFIG | {"data": {}})
    assert flops == FLOPS * 81 / 16


@pytest.mark.parametrize("device_name", ["", "Some other GPU"])
def test_nothing_is_logged_of_a_device_whose_peak_is_not_known(monkeypatch, device_name):
    assert filled(monkeypatch, device_name=device_name) == (None, None)


def test_nor_where_the_size_of_images_is_unknown(monkeypatch):
    assert filled(monkeypatch, device_name="NVIDIA H200", config=CONFIG | {"data": {}, "model": {}}) == (None, None)


def test_what_the_configuration_gives_stays(monkeypatch):
    given = {"flops_per_image": 5.0, "peak_flops_per_s": 7.0}
    assert filled(monkeypatch, device_name="NVIDIA H200", given=given) == (5.0, 7.0)
