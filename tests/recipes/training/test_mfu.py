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


GIVEN = {"flops_per_image": 5.0, "peak_flops_per_s": 7.0}


@pytest.mark.parametrize(
    ("device_name", "config", "given", "expected"),
    [
        ("NVIDIA H200", {}, {}, (FLOPS, 989.5e12)),
        ("NVIDIA H200", {"precision": "32-true"}, {}, (FLOPS, 67e12)),
        ("NVIDIA H200", {"data": {}}, {}, (FLOPS * 81 / 16, 989.5e12)),  # the model says how large images are
        ("NVIDIA H200", {}, GIVEN, tuple(GIVEN.values())),
        ("Some other GPU", {}, {}, (None, None)),
    ],
    ids=str,
)
def test_a_known_device_gets_its_peak_and_counted_operations_and_what_is_given_stays(
    monkeypatch, device_name, config, given, expected
):
    assert filled(monkeypatch, device_name=device_name, config=CONFIG | config, given=given) == expected
