"""Peak FLOP/s: the names that drivers report, and None for all that is not known."""

import pytest
import torch

from recipes.networks.peak_flops import peak_flops_per_s


@pytest.mark.parametrize(
    ("device_name", "fp16", "fp32"),
    [
        ("Tesla P40", 12e12, 12e12),
        ("Tesla V100-SXM2-16GB", 125e12, 15.7e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 19.5e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12, 66.9e12),
        ("NVIDIA H200", 989.5e12, 67e12),
        ("NVIDIA B200", 2.25e15, None),
    ],
)
def test_devices_go_by_the_name_that_the_driver_reports(device_name, fp16, fp32):
    assert peak_flops_per_s(device_name, torch.float16) == fp16
    assert peak_flops_per_s(device_name, torch.float32) == fp32


@pytest.mark.parametrize("device_name", ["", "cpu", "NVIDIA H200 NVL", "NVIDIA H200 MIG 1g.18gb", "NVIDIA A10"])
def test_a_part_of_a_device_and_an_unlisted_one_have_no_peak(device_name):
    assert peak_flops_per_s(device_name, torch.float16) is None


def test_bf16_is_known_from_ampere_on_and_tf32_counts_only_where_it_is_allowed_and_there_is_some():
    assert peak_flops_per_s("Tesla V100-SXM2-16GB", torch.bfloat16) is None
    assert peak_flops_per_s("NVIDIA A100-SXM4-80GB", torch.bfloat16) == 312e12
    assert peak_flops_per_s("NVIDIA H200", torch.float64) is None
    for dtype, peak in ((torch.float32, 156e12), (torch.float16, 312e12)):
        assert peak_flops_per_s("NVIDIA A100-SXM4-80GB", dtype, allow_tf32=True) == peak
    assert peak_flops_per_s("Tesla P40", torch.float32, allow_tf32=True) == 12e12
