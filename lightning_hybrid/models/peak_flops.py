"""Peak arithmetic of accelerators, from their makers' datasheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class PeakFlops:
    """The rates of dense matrix products of one device, in FLOP/s; None where not known.

    Attributes:
        device_name: Pattern of the whole of `torch.cuda.get_device_name()`.
        float32: Rate without tensor cores.
        tfloat32: Rate of fp32 matrices at TF32's precision, as `torch.set_float32_matmul_precision("high")` allows.
        float16: Rate of fp16 operands with fp32 sums.
        bfloat16: Rate of bf16 operands with fp32 sums.
        source: The publication of the numbers.
    """

    device_name: str
    float32: float | None
    tfloat32: float | None
    float16: float | None
    bfloat16: float | None
    source: str


# Where a datasheet has only the doubled rate of matrices that are half zeros ("with sparsity"), this is half of it.
# We do not use lightning.fabric's `get_available_flops`: its H200 is the doubled rate under another name than the
# driver's, it takes a part of a device (MIG) for the whole, and it has no P40.
PEAKS = (
    PeakFlops(
        device_name=r"Tesla P40",
        float32=12e12,
        tfloat32=None,
        # Pascal's P40 computes fp16 products in fp32; its own fp16 arithmetic runs at 1/64 of that
        float16=12e12,
        bfloat16=None,
        source="NVIDIA, Tesla P40 datasheet (fp32; the rate for fp16 operands is our conclusion)",
    ),
    PeakFlops(
        device_name=r"Tesla P100-SXM2-.*",
        float32=10.6e12,
        tfloat32=None,
        float16=21.2e12,
        bfloat16=None,
        source="NVIDIA, Tesla P100 datasheet",
    ),
    PeakFlops(
        device_name=r"Tesla V100-SXM2-.*",
        float32=15.7e12,
        tfloat32=None,
        float16=125e12,
        bfloat16=None,
        source="NVIDIA, V100 datasheet (volta-v100-datasheet-update-us-1165301-r5)",
    ),
    PeakFlops(
        device_name=r"Tesla V100-PCIE-.*",
        float32=14e12,
        tfloat32=None,
        float16=112e12,
        bfloat16=None,
        source="NVIDIA, V100 datasheet (volta-v100-datasheet-update-us-1165301-r5)",
    ),
    PeakFlops(
        device_name=r"Tesla T4",
        float32=8.1e12,
        tfloat32=None,
        float16=65e12,
        bfloat16=None,
        source="NVIDIA, T4 datasheet (t4-tensor-core-datasheet-951643)",
    ),
    PeakFlops(
        device_name=r"(NVIDIA )?A100[- ](SXM4|PCIE|PCI|80GB PCIe)(-\d+GB)?",
        float32=19.5e12,
        tfloat32=156e12,
        float16=312e12,
        bfloat16=312e12,
        source="NVIDIA, A100 datasheet (nvidia-a100-datasheet-us-nvidia-1758950-r4)",
    ),
    PeakFlops(
        device_name=r"NVIDIA H100 80GB HBM3",  # SXM
        float32=66.9e12,
        tfloat32=494.7e12,
        float16=989.4e12,
        bfloat16=989.4e12,
        source="NVIDIA, H100 Tensor Core GPU Architecture",
    ),
    PeakFlops(
        device_name=r"NVIDIA H100 PCIe",
        float32=51.2e12,
        tfloat32=378e12,
        float16=756e12,
        bfloat16=756e12,
        source="NVIDIA, H100 Tensor Core GPU Architecture",
    ),
    PeakFlops(
        device_name=r"NVIDIA H200",  # SXM: H100's chip with more memory
        float32=67e12,
        tfloat32=494.5e12,
        float16=989.5e12,
        bfloat16=989.5e12,
        source="NVIDIA, H200 datasheet (TF32 989 and fp16 1,979 teraFLOPS with sparsity)",
    ),
    PeakFlops(
        device_name=r"NVIDIA B200",
        float32=None,
        tfloat32=None,
        float16=2.25e15,
        bfloat16=2.25e15,
        source="NVIDIA, Blackwell Architecture Technical Brief (HGX B200)",
    ),
)


def peak_flops_per_s(device_name: str, dtype: torch.dtype, *, allow_tf32: bool = False) -> float | None:
    """Look up the peak of dense matrix products of `dtype` on one whole device, in FLOP/s; None if not known.

    Args:
        device_name: The result of `torch.cuda.get_device_name()`. A part of a device (MIG) and a CPU are not known.
        dtype: dtype of the operands: under autocast, autocast's.
        allow_tf32: Whether fp32 products may run as TF32.

    >>> peak_flops_per_s("NVIDIA A100-SXM4-80GB", torch.float16)
    312000000000000.0
    >>> peak_flops_per_s("NVIDIA H200 MIG 1g.18gb", torch.float16) is None
    True
    """
    for peaks in PEAKS:
        if re.fullmatch(peaks.device_name, device_name):
            if dtype is torch.float32 and allow_tf32 and peaks.tfloat32 is not None:
                return peaks.tfloat32
            rates = {torch.float32: peaks.float32, torch.float16: peaks.float16, torch.bfloat16: peaks.bfloat16}
            return rates.get(dtype)
    return None
