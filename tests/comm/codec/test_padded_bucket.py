"""A bucket in which every gradient begins a block: what goes in comes out, and the padding is zeros in every step."""

import pytest
import torch

from lightning_hybrid.comm.codec.padded_bucket import PaddedBucket
from lightning_hybrid.comm.hook import from_wire, to_wire

CPU = torch.device("cpu")


@pytest.mark.parametrize("wire", [torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_it_divides_and_rounds_as_the_hook_does_without_a_codec(dtype, wire):
    values = torch.randn(3 + 256 + 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    bucket, buffer, plain = (
        PaddedBucket([3, 256, 300], [0, 1, 2], dtype=wire, device=CPU),
        values.clone(),
        values.clone(),
    )
    padded, expected = bucket.load(buffer, before=2), to_wire(plain, wire, before=2)
    gradients = torch.cat([padded[:3], padded[256:512], padded[512:812]])
    assert torch.equal(gradients, expected)
    assert bucket.store(padded, buffer=buffer, after=1.5) is buffer
    assert torch.equal(buffer, from_wire(expected, buffer=plain, after=1.5))
