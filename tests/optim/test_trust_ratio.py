import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_hybrid.optim.trust_ratio import in_memory_order, tensor_norms, trust_ratio

FC6 = 4096 * 9216  # elements of AlexNet's largest layer


def exact_norm(tensor: Tensor) -> float:
    return math.sqrt(math.fsum(part.double().square().sum().item() for part in tensor.split(1 << 16)))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_norm_of_a_large_layer_is_right_to_1e_6(dtype):
    """torch's own norm is off by 2e-3 (float32) and 4e-2 (float16) here: the last line shows that the test can fail."""
    layer = torch.randn(FC6, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = exact_norm(layer)
    assert tensor_norms([layer]).item() == pytest.approx(expected, rel=1e-6)
    assert torch.linalg.vector_norm(layer).item() != pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_norm_of_a_large_constant_layer_is_right_to_1e_6(dtype):
    """Equal addends are the worst case: each rounds the same way. The norm of n times c is known: c * sqrt(n)."""
    layer = torch.full((FC6,), 0.01, dtype=dtype)
    assert tensor_norms([layer]).item() == pytest.approx(layer[0].item() * math.sqrt(FC6), rel=1e-6)


def test_norm_past_the_range_of_float16_is_finite():
    layer = torch.full((100_000,), 1000.0, dtype=torch.float16)
    assert tensor_norms([layer, layer[:5]]).tolist() == pytest.approx([1e3 * math.sqrt(1e5), 1e3 * math.sqrt(5)])


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


def test_in_memory_order_copies_nothing_that_is_dense():
    weight = torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last)
    assert in_memory_order(weight).data_ptr() == weight.data_ptr()
    assert in_memory_order(torch.tensor(2.0)).shape == (1,)


positive = st.floats(1e-3, 1e3)


@given(w=positive, u=positive, eta=st.floats(1e-4, 1), wd=st.floats(0, 0.1), eps=st.floats(0, 0.1))
def test_trust_ratio_is_its_formula(w, u, eta, wd, eps):
    norms = (torch.tensor([norm], dtype=torch.float64) for norm in (w, u))
    ratio = trust_ratio(*norms, trust_coefficient=eta, weight_decay=wd, eps=eps)
    assert ratio.item() == pytest.approx(eta * w / (u + wd * w + eps), rel=1e-14)


@pytest.mark.parametrize(("w", "u"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_a_zero_norm_gives_ratio_one(w, u, eps):
    ratio = trust_ratio(torch.tensor([w]), torch.tensor([u]), trust_coefficient=0.001, weight_decay=0.1, eps=eps)
    assert ratio.item() == 1.0
