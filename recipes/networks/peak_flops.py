"""Peak arithmetic throughput of accelerators, taken from their datasheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class PeakFlops:
    """Peak FLOP/s of dense matrix products on one type of device, by dtype.

    A rate is None if it is unknown.

    Attributes:
        device_name: Regular expression for the complete `torch.cuda.get_device_name()`.
        float32: Rate without tensor cores.
        tfloat32: Rate of fp32 matrices in TF32 precision, which `torch.set_float32_matmul_precision("high")` allows.
        float16: Rate of fp16 operands with fp32 accumulation.
        bfloat16: Rate of bf16 operands with fp32 accumulation.
        source: Publication of the numbers.
    """

    device_name: str
    float32: float | None
    tfloat32: float | None
    float16: float | None
    bfloat16: float | None
    source: str


# If a datasheet has only the rate "with sparsity", which is twice the dense rate, this is half of it.
# lightning.fabric's `get_available_flops` is not used: its H200 has the rate with sparsity and another name than the
# driver reports, it treats a MIG instance as a whole device, and it has no P40.
# fmt: off
PEAKS = tuple(
    PeakFlops(device_name=name, float32=fp32, tfloat32=tf32, float16=fp16, bfloat16=bf16, source=f"NVIDIA, {source}")
    for name, fp32, tf32, fp16, bf16, source in (
        # Pascal's P40 computes fp16 products in fp32; its own fp16 arithmetic runs at 1/64 of that.
        (r"Tesla P40", 12e12, None, 12e12, None,
         "Tesla P40 datasheet (fp32; the rate for fp16 operands is our conclusion)"),
        (r"Tesla P100-SXM2-.*", 10.6e12, None, 21.2e12, None, "Tesla P100 datasheet"),
        (r"Tesla V100-SXM2-.*", 15.7e12, None, 125e12, None,
         "V100 datasheet (volta-v100-datasheet-update-us-1165301-r5)"),
        (r"Tesla V100-PCIE-.*", 14e12, None, 112e12, None,
         "V100 datasheet (volta-v100-datasheet-update-us-1165301-r5)"),
        (r"Tesla T4", 8.1e12, None, 65e12, None, "T4 datasheet (t4-tensor-core-datasheet-951643)"),
        (r"(NVIDIA )?A100[- ](SXM4|PCIE|PCI|80GB PCIe)(-\d+GB)?", 19.5e12, 156e12, 312e12, 312e12,
         "A100 datasheet (nvidia-a100-datasheet-us-nvidia-1758950-r4)"),
        (r"NVIDIA H100 80GB HBM3", 66.9e12, 494.7e12, 989.4e12, 989.4e12,  # SXM
         "H100 Tensor Core GPU Architecture"),
        (r"NVIDIA H100 PCIe", 51.2e12, 378e12, 756e12, 756e12, "H100 Tensor Core GPU Architecture"),
        (r"NVIDIA H200", 67e12, 494.5e12, 989.5e12, 989.5e12,  # SXM: H100's chip with more memory
         "H200 datasheet (TF32 989 and fp16 1,979 teraFLOPS with sparsity)"),
        (r"NVIDIA B200", None, None, 2.25e15, 2.25e15, "Blackwell Architecture Technical Brief (HGX B200)"),
    )
)
# fmt: on


def peak_flops_per_s(
    device_name: str, dtype: torch.dtype, *, allow_tf32: bool = False
) -> float | None:
    """Return the peak FLOP/s of dense matrix products on a device, or None if the device is unknown.

    Args:
        device_name: Result of `torch.cuda.get_device_name()`. MIG instances and CPUs are unknown.
        dtype: dtype of the operands. Under autocast, it is autocast's dtype.
        allow_tf32: Whether fp32 products may use TF32.

    >>> peak_flops_per_s("NVIDIA A100-SXM4-80GB", torch.float16)
    312000000000000.0
    >>> peak_flops_per_s("NVIDIA H200 MIG 1g.18gb", torch.float16) is None
    True
    """
    for peaks in PEAKS:
        if re.fullmatch(peaks.device_name, device_name):
            # Devices before Ampere have no TF32 units, and torch's switch has no effect on them.
            if dtype is torch.float32 and allow_tf32 and peaks.tfloat32 is not None:
                return peaks.tfloat32
            rates = {
                torch.float32: peaks.float32,
                torch.float16: peaks.float16,
                torch.bfloat16: peaks.bfloat16,
            }
            return rates.get(dtype)
    return None
