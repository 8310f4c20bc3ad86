"""Fingerprints of tensors, which differ exactly if a bit differs."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.comm.health.tensor_hash import _BLOCK_ROWS, _ROW, Fingerprint

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
]
SIZES = [0, 1, 3, _ROW - 1, _ROW, _ROW + 1, 3 * _ROW + 5, _BLOCK_ROWS * _ROW + 7]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def of(tensor):
    return int(Fingerprint(tensor.device).of(tensor))


def some(numel, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    end = 2 if dtype is torch.bool else 100
    return torch.randint(0, end, (numel,), generator=generator).to(device, dtype)


def flipped(tensor, element, bit):
    result = tensor.clone()
    result.view(torch.uint8)[element * tensor.element_size() + bit // 8] ^= 1 << (bit % 8)
    return result


@given(st.sampled_from(DTYPES[:6]), st.sampled_from(SIZES[1:]), st.data())
@settings(max_examples=60, deadline=None)
def test_any_one_flipped_bit_shows(dtype, numel, data):
    tensor = some(numel, dtype)
    element = data.draw(st.integers(0, numel - 1))
    bit = data.draw(st.integers(0, 8 * tensor.element_size() - 1))
    assert of(flipped(tensor, element, bit)) != of(tensor)


@given(st.lists(st.integers(0, 3 * _ROW), min_size=2, max_size=6, unique=True), st.integers(0, 31))
@settings(max_examples=60, deadline=None)
def test_the_same_bit_flipped_in_several_elements_shows(elements, bit):
    """Flips of one sign bit in several elements are detected.

    With an even number of elements, sums with odd weights modulo 2**32, or over 64-bit words, would miss them.
    """
    tensor = some(3 * _ROW + 1)
    changed = tensor
    for element in elements:
        changed = flipped(changed, element, bit)
    assert of(changed) != of(tensor)


@pytest.mark.parametrize("device", DEVICES)
def test_equal_bits_give_equal_fingerprints(device):
    """Equal bits match at any alignment and on both devices, so proofs on the CPU also hold for GPUs."""
    for dtype, numel in itertools.product(DTYPES, SIZES):
        tensor = some(numel, dtype, device)
        off_alignment = torch.empty(numel + 1, dtype=dtype, device=device)[1:]
        off_alignment.copy_(tensor)
        on_cpu = some(numel, dtype)
        assert of(tensor) == of(off_alignment) == of(on_cpu), (dtype, numel)


def test_every_element_of_a_channels_last_tensor_counts():
    tensor = some(2 * 3 * 4 * 5).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    changed = tensor.clone()
    changed[1, 2, 3, 4] += 1
    assert of(changed) != of(tensor)


def test_a_slice_counts_its_own_elements_only():
    tensor = some(6 * 5).view(6, 5)
    before = of(tensor[:, 1:3])
    tensor[:, 3:] = 7
    assert of(tensor[:, 1:3]) == before
    tensor[4, 2] += 1
    assert of(tensor[:, 1:3]) != before


def test_a_combined_fingerprint_depends_on_each_tensor_and_on_their_order():
    fingerprint = Fingerprint(torch.device("cpu"))
    a, b, c = (fingerprint.of(some(9, seed=seed)) for seed in range(3))
    combined = {int(fingerprint.combine(parts)) for parts in ([a, b], [b, a], [a, c], [a, b, c])}
    assert len(combined) == 4


def test_a_fingerprint_is_the_same_number_on_every_machine():
    """The expected value was computed by hand from the formula, with Python integers."""
    weights = np.random.default_rng([1202, 4961, 0]).integers(0, 2**64, _ROW, dtype=np.uint64)
    a, b, c = (int(weight) | 1 for weight in weights[:3])
    total = (5 * a - 7 * b + 11 * c) % 2**64
    assert of(torch.tensor([5, -7, 11], dtype=torch.int32)) % 2**64 == total


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_single_element_has_the_same_fingerprint_with_any_stride(dtype):
    pair = torch.ones(2, dtype=dtype)
    assert pair[::2].stride() == (2,)
    assert of(pair[::2]) == of(torch.ones(1, dtype=dtype))
