"""Codec without communication: its definition, the C++ implementation, and bounds on rounding errors of gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybrid.comm.codec import codec as codecs
from lightning_hybrid.comm.codec.block_format import BLOCK, message_bytes, most_code, num_blocks_of
from lightning_hybrid.comm.codec.codec import Codec, Coder
from lightning_hybrid.comm.codec.cpp_passes import SOURCE, CppPasses
from lightning_hybrid.comm.codec.encoder import Blocks
from lightning_hybrid.comm.codec.philox import random_signs
from lightning_hybrid.comm.codec.torch_passes import TorchPasses
from lightning_hybrid.cpp import library as cpp_library

BITS = pytest.mark.parametrize("bits", [8, 4])
KEY = (2**32 - 1, 9, 3, 1)


def passes_of(bits, kind=TorchPasses):
    signs = random_signs(BLOCK, 5) / 16 if bits == 4 else None
    return kind(bits, signs)


def encoded(passes, flat, bits, key=KEY, *, first_id=0):
    message = torch.full((message_bytes(flat.numel(), bits),), 77, dtype=torch.uint8)
    ids = torch.arange(first_id, first_id + num_blocks_of(flat.numel()), dtype=torch.int32)
    passes.encode(flat, ids, key, message, None)
    return message


def rounded(flat, bits, key=KEY, *, passes=None, first_id=0):
    if passes is None:
        passes = passes_of(bits)
    out = torch.empty_like(flat)
    passes.add(encoded(passes, flat, bits, key, first_id=first_id)[None], out)
    return out


def same(values, expected):
    """Return whether two tensors are equal, with nan in the same elements."""
    is_nan = expected.isnan()
    return torch.equal(values.isnan(), is_nan) and torch.equal(values[~is_nan], expected[~is_nan])


def gradients(numel, seed, *, is_wild=True):
    """Return normal numbers of many magnitudes, with zeros and with blocks that are tiny, huge or not finite."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(numel, generator=generator)
    if is_wild:
        flat *= torch.exp(3 * torch.randn(numel, generator=generator))
        for index, factor in enumerate((0.0, 1e-38, 1e-30, 1e33, math.inf, math.nan)):
            if numel > (3 * index + 2) * BLOCK:
                flat[(3 * index + 2) * BLOCK - 5 :][:9] *= factor
    return flat


@BITS
@pytest.mark.parametrize(
    "key", [None, KEY, (0, 0, 2**32 - 1, 2**32 - 1)], ids=["nearest", "stochastic", "of a sum"]
)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    numel=st.integers(0, 5000),
    seed=st.integers(0, 1000),
    first_id=st.sampled_from([0, 1, 2**31 - 30]),
)
def test_cpp_and_torch_write_and_read_the_same_bits(bits, key, numel, seed, first_id):
    flat = gradients(numel, seed)
    torch_passes = passes_of(bits, TorchPasses)
    cpp_passes = passes_of(bits, CppPasses)
    message = encoded(torch_passes, flat, bits, key, first_id=first_id)
    assert torch.equal(message, encoded(cpp_passes, flat, bits, key, first_id=first_id))
    rows = torch.stack([message, encoded(torch_passes, -2 * flat, bits), message])
    torch_sum = torch.empty(numel)
    cpp_sum = torch.empty(numel)
    torch_passes.add(rows, torch_sum)
    cpp_passes.add(rows, cpp_sum)
    assert same(cpp_sum, torch_sum)


@BITS
def test_no_flag_of_the_compiler_changes_a_bit(bits, tmp_path):
    """The result does not depend on the vector instructions and fused multiply-adds that these flags disable."""
    flags = ("-std=c++17", "-fPIC", "-shared", "-O1")
    passes = passes_of(bits, CppPasses)
    passes._library = SOURCE.load(cpp_library.find_compiler(), flags, tmp_path)
    flat = gradients(7000, 1)
    assert torch.equal(encoded(passes, flat, bits), encoded(passes_of(bits, CppPasses), flat, bits))
    assert same(rounded(flat, bits, passes=passes), rounded(flat, bits))


def scales_of(flat, bits):
    message = encoded(passes_of(bits), flat, bits)
    return message[: 2 * num_blocks_of(flat.numel())].view(torch.bfloat16).double()


@BITS
@settings(max_examples=12, deadline=None, derandomize=True)
@given(numel=st.integers(1, 3000), seed=st.integers(0, 1000), is_nearest=st.booleans())
def test_an_error_is_below_one_scale_and_half_of_one_to_the_nearest(bits, numel, seed, is_nearest):
    flat = gradients(numel, seed, is_wild=False)
    key = None if is_nearest else KEY
    share = 0.5 if is_nearest else 1.0
    error = rounded(flat, bits, key) - flat
    error = torch.nn.functional.pad(error, (0, -numel % BLOCK)).view(-1, BLOCK).double()
    scales = scales_of(flat, bits)
    if bits == 8:
        assert (error.abs() <= share * scales[:, None] * (1 + 2**-20)).all()
    elif numel % BLOCK == 0:
        # A rotation keeps the length of the error. The padding contains a part of it.
        assert (error.norm(dim=1) <= 16 * share * scales * (1 + 2**-15)).all()
    largest = flat.abs().max().double()
    assert bits == 4 or scales.max() <= largest / most_code(bits) * (1 + 2**-7)


@BITS
def test_rounding_is_unbiased(bits):
    """The mean over 4,000 steps stays within 5 standard deviations at every element, unlike rounding to nearest.

    A code is off by one scale with probability p (1 - p) <= 1/4. The variance is therefore at most scale^2 / 4, with or
    without rotation.
    """
    flat = gradients(BLOCK, 3, is_wild=False)
    passes = passes_of(bits, CppPasses)
    total = torch.zeros(BLOCK, dtype=torch.float64)
    num = 4000
    for step in range(num):
        total += rounded(flat, bits, (1, step, 0, 0), passes=passes)
    bound = 5 * 0.5 * float(scales_of(flat, bits)) / math.sqrt(num)
    assert (total / num - flat).abs().max() < bound
    assert (rounded(flat, bits, None) - flat).abs().max() > bound


@BITS
def test_noise_is_another_for_each_seed_step_sender_sum_and_block(bits):
    flat = gradients(BLOCK, 3, is_wild=False)
    keys = [KEY, (1, *KEY[1:]), (KEY[0], 8, *KEY[2:]), (*KEY[:2], 4, KEY[3]), (*KEY[:3], 2)]
    messages = [encoded(passes_of(bits), flat, bits, key) for key in keys]
    messages += [
        encoded(passes_of(bits), flat, bits, first_id=1),
        encoded(passes_of(bits), flat, bits, None),
    ]
    assert len({tuple(message.tolist()) for message in messages}) == len(messages)
    assert torch.equal(messages[0], encoded(passes_of(bits), flat, bits, KEY))


@BITS
@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_inf_and_nan_make_their_block_nan_and_no_other(bits, bad):
    flat = gradients(3 * BLOCK, 3, is_wild=False)
    flat[BLOCK + 7] = bad
    out = rounded(flat, bits).view(3, BLOCK)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@BITS
def test_zeros_stay_zeros_and_what_is_tiny_counts_as_zeros(bits):
    flat = torch.zeros(3 * BLOCK)
    flat[BLOCK : 2 * BLOCK] = 2.0**-96 / 33
    flat[2 * BLOCK] = 1.0
    out = rounded(flat, bits)
    assert not out[: 2 * BLOCK].any()
    if bits == 8:  # elements are not mixed
        assert not out[2 * BLOCK + 1 :].any()
        assert out[2 * BLOCK] == pytest.approx(1.0, rel=2**-7)


@pytest.mark.parametrize(("bits", "least", "most"), [(8, 9e-5, 1.1e-4), (4, 0.030, 0.034)])
def test_the_measured_error_is_that_of_the_format(bits, least, most):
    results = []
    flat = gradients(1 << 18, 0, is_wild=False)
    coder = Coder(Codec(bits=bits), torch.device("cpu"), lambda *sums: results.append(sums))
    message = torch.empty(coder.codec.message_bytes(flat.numel()), dtype=torch.uint8)
    Blocks.of(coder, flat).encode(flat, message, sender=0)
    ((error, power),) = results
    out = torch.empty_like(flat)
    coder.add(message[None], out)
    exact = float((out - flat).double().square().sum() / flat.double().square().sum())
    assert error / power == pytest.approx(exact, rel=0.2)  # measured on a sample of the blocks
    assert least < exact < most


def test_without_a_compiler_torch_does_it_and_says_so_once(monkeypatch):
    def no_compiler(*args):
        raise cpp_library.CannotBuildError("none of c++, g++ and clang++ was found")

    monkeypatch.setattr("lightning_hybrid.comm.codec.cpp_passes._library", no_compiler)
    with pytest.warns(
        RuntimeWarning, match=r"^`between_nodes.dtype` \(='int8'\) needs a C\+\+ compiler"
    ):
        coder = Coder(Codec(bits=8), torch.device("cpu"))
    assert isinstance(coder._passes, TorchPasses)
    assert isinstance(codecs._passes_for(torch.device("meta"), Codec(bits=8)), TorchPasses)


@pytest.mark.parametrize("bits", [8, 4])
def test_where_triton_is_there_and_cannot_build_torch_does_it_and_says_so(monkeypatch, bits):
    """If Triton can be imported but its first launch fails, as without a C compiler, torch operations take over."""
    triton_passes = pytest.importorskip(
        "lightning_hybrid.comm.codec.triton_passes", reason="needs triton"
    )

    class NoCompiler:
        def __getitem__(self, grid):
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(triton_passes.triton_kernels, "encode_block", NoCompiler())
    monkeypatch.setattr(
        triton_passes.TritonPasses, "try_out", on_the_cpu(triton_passes.TritonPasses.try_out)
    )
    monkeypatch.setattr(Codec, "signs", lambda codec, device: None)
    with pytest.warns(
        RuntimeWarning, match=rf"^`between_nodes.dtype` \(='int{bits}'\) needs .*C compiler"
    ):
        passes = codecs._passes_for(torch.device("cuda"), Codec(bits=bits))
    assert isinstance(passes, TorchPasses)


def on_the_cpu(try_out):
    return lambda passes, device: try_out(passes, torch.device("cpu"))
