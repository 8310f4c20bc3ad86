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

# Two sizes show how all-reduces with a codec differ from all-reduces without a codec.
_CODED_SUM_BYTES = (512 * KIB, 4 * MIB)


def _coded_sum_name(codec_name: str) -> str:
    return f"two_level_{codec_name}"


def _coded_sums() -> tuple[tuple[str, int], ...]:
    """Return the name and size of each all-reduce with a codec."""
    sums = []
    for codec_name in CODECS:
        for num_bytes in _CODED_SUM_BYTES:
            sums.append((_coded_sum_name(codec_name), num_bytes))
    return tuple(sums)


# Names and sizes of the benchmark cases.
CODED_SUMS = _coded_sums()


def codec_call(name: str, num_bytes: int, device: torch.device) -> Callable[[], object]:
    """Return a function to be timed, which encodes a float32 tensor and then decodes and adds two messages."""
    codec = CODECS[name]
    coder = Coder(codec, device)
    numel = num_bytes // 4
    flat = torch.ones(numel, device=device)  # because blocks of zeros would take no time
    total = torch.empty_like(flat)
    blocks = Blocks.of(coder, flat)

    message_bytes = codec.message_bytes(numel)
    messages = torch.empty(2, message_bytes, dtype=torch.uint8, device=device)
    other_message = messages[1]
    blocks.encode(flat, other_message, sender=1)

    def call() -> None:
        own_message = messages[0]
        blocks.encode(flat, own_message, sender=0)
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
    for codec_name, codec in CODECS.items():
        engine = CommEngine(plan=plan, dtype_across_nodes=codec, **settings)
        engines[_coded_sum_name(codec_name)] = engine
    return engines
