"""A fingerprint differs where a single bit does, and nowhere else."""

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
    return torch.randint(0, 2 if dtype is torch.bool else 100, (numel,), generator=generator).to(
        device, dtype
    )


def flipped(tensor, element, bit):
    other = tensor.clone()
    other.view(torch.uint8)[element * tensor.element_size() + bit // 8] ^= 1 << (bit % 8)
    return other


@given(st.sampled_from(DTYPES[:6]), st.sampled_from(SIZES[1:]), st.data())
@settings(max_examples=60, deadline=None)
def test_any_one_flipped_bit_shows(dtype, numel, data):
    tensor = some(numel, dtype)
    element = data.draw(st.integers(0, numel - 1))
    bit = data.draw(st.integers(0, 8 * tensor.element_size() - 1))
    assert of(flipped(tensor, element, bit)) != of(tensor)


@given(st.lists(st.integers(0, 3 * _ROW), min_size=2, max_size=6, unique=True), st.integers(0, 31))
@settings(max_examples=60, deadline=None)
def test_the_same_bit_flipped_in_several_places_shows(places, bit):
    """The sign bit of an even number of elements is what sums with odd weights modulo 2**32 or in 64-bit words miss."""
    tensor = other = some(3 * _ROW + 1)
    for place in places:
        other = flipped(other, place, bit)
    assert of(other) != of(tensor)


@pytest.mark.parametrize("device", DEVICES)
def test_equal_bits_give_equal_fingerprints(device):
    """Whatever memory they are in. And the two devices agree, so a GPU is held to what is proved on the CPU."""
    for dtype, numel in itertools.product(DTYPES, SIZES):
        one = some(numel, dtype, device)
        other = torch.empty(numel + 1, dtype=dtype, device=device)[1:]
        other.copy_(one)
        assert of(one) == of(other) == of(some(numel, dtype)), (dtype, numel)


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


def test_a_combined_fingerprint_hangs_on_each_and_on_their_order():
    fingerprint = Fingerprint(torch.device("cpu"))
    one, two, three = (fingerprint.of(some(9, seed=seed)) for seed in range(3))
    combined = {
        int(fingerprint.combine(each))
        for each in ([one, two], [two, one], [one, three], [one, two, three])
    }
    assert len(combined) == 4


def test_it_is_the_same_number_on_every_machine():
    """Computed once by hand from the formula, in Python's whole numbers."""
    weights = np.random.default_rng([1202, 4961, 0]).integers(0, 2**64, _ROW, dtype=np.uint64)
    total = (
        sum((int(weight) | 1) * value for weight, value in zip(weights, (5, -7, 11), strict=False))
        % 2**64
    )
    assert of(torch.tensor([5, -7, 11], dtype=torch.int32)) % 2**64 == total
