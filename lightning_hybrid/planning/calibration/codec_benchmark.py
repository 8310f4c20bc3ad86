"""Benchmarks of gradient codecs, and of inter-node all-reduces with compressed gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_hybrid.comm.codec.codec import Codec, Coder
from lightning_hybrid.comm.codec.encoder import Blocks
from lightning_hybrid.comm.engine.engine import CommEngine
from lightning_hybrid.comm.plan import KIB, MIB, CommPlan

CODECS = {"int8": Codec(bits=8), "int4": Codec(bits=4)}

# Names and sizes of all-reduces with a codec. Two sizes show how they differ from all-reduces without a codec.
CODED_SUMS = tuple(
    (f"two_level_{name}", num_bytes) for name in CODECS for num_bytes in (512 * KIB, 4 * MIB)
)


def codec_call(name: str, num_bytes: int, device: torch.device) -> Callable[[], object]:
    """Return a function to be timed, which encodes a float32 tensor and then decodes and adds two messages."""
    coder = Coder(CODECS[name], device)
    flat = torch.ones(num_bytes // 4, device=device)  # because blocks of zeros would take no time
    message_bytes = coder.codec.message_bytes(flat.numel())
    messages = torch.empty(2, message_bytes, dtype=torch.uint8, device=device)
    blocks = Blocks.of(coder, flat)
    total = torch.empty_like(flat)
    blocks.encode(flat, messages[1], sender=1)

    def call() -> None:
        blocks.encode(flat, messages[0], sender=0)
        coder.add(messages, total)

    return call


def coded_engines(**settings: Any) -> dict[str, CommEngine]:
    """Create one communication engine per codec, keyed by the name of its benchmark case.

    Collective: every rank of the group must call it, in the same order.

    Args:
        **settings: Arguments of `CommEngine`, except `plan` and `dtype_across_nodes`.
    """
    plan = CommPlan(algorithm="two_level")
    engines = {}
    for name, codec in CODECS.items():
        engines[f"two_level_{name}"] = CommEngine(plan=plan, dtype_across_nodes=codec, **settings)
    return engines
