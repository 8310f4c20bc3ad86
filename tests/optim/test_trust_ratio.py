import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_hybrid.optim.trust_ratio import tensor_norms

FC6 = 4096 * 9216  # elements of AlexNet's largest layer


def exact_norm(tensor: Tensor) -> float:
    return math.sqrt(math.fsum(part.double().square().sum().item() for part in tensor.split(1 << 16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_norm_of_a_large_constant_layer_is_right_to_1e_6(dtype):
    """Equal addends are the worst case: each rounds the same way. The norm of n times c is known: c * sqrt(n)."""
    layer = torch.full((FC6,), 0.01, dtype=dtype)
    assert tensor_norms([layer]).item() == pytest.approx(layer[0].item() * math.sqrt(FC6), rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    num=st.sampled_from([0, 1, 255, 256, 32768, 32769, 65_537, (1 << 20) + 1, (1 << 20) + 300]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_norms_of_any_size_and_dtype_are_right(num, dtype, seed):
    tensor = torch.randn(num, generator=torch.Generator().manual_seed(seed)).to(dtype)
    (result,) = tensor_norms([tensor])
    assert result.dtype == torch.float64
    assert result.item() == pytest.approx(exact_norm(tensor), rel=1e-6)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(64, 32, 5, 5).to(memory_format=torch.channels_last),
        lambda x: x.view(640, 80).T,
        lambda x: x[::2],
        lambda x: x[:1].expand(40_000),
    ],
    ids=["channels_last", "transposed", "strided", "expanded"],
)
def test_norm_does_not_depend_on_the_layout(view):
    tensor = view(torch.randn(51_200, generator=torch.Generator().manual_seed(1)))
    assert tensor_norms([tensor]).item() == pytest.approx(exact_norm(tensor.flatten()), rel=1e-6)
