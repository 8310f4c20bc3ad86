"""Triton kernels of the codec: interpreted on CPU tensors, compiled for an absent GPU, and run on a GPU.

The interpreter must be selected before Triton is imported. The first test therefore runs the interpreted tests in a
separate process.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_hybrid.comm.codec.codec import Codec, Coder
from tests.comm.codec.test_codec import BITS, KEY, encoded, gradients, passes_of, same

triton = pytest.importorskip("triton", reason="needs triton, which PyPI has for Linux only")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
not_interpreted = pytest.mark.skipif(IS_INTERPRETED, reason="is not about the interpreter")


@not_interpreted
@pytest.mark.long
def test_what_follows_holds_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider"]
    where = {"cwd": Path(__file__).parents[3], "env": {**os.environ, "TRITON_INTERPRET": "1"}}
    done = subprocess.run(command, **where, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 6


def coder_of(bits):
    """Return a coder for the CPU that uses torch operations and writes one row after the other."""
    coder = Coder(Codec(bits=bits), torch.device("cpu"))
    coder._passes = passes_of(bits)
    return coder


@BITS
@pytest.mark.parametrize(
    "key", [None, KEY, (0, 0, 2**32 - 1, 2**32 - 1)], ids=["nearest", "stochastic", "of a sum"]
)
@pytest.mark.parametrize(
    "device", ["cpu"] if IS_INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]
)
# NumPy warns about inf - inf in the interpreter.
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")
def test_the_kernels_write_and_read_the_bits_of_torch(device, bits, key):
    from lightning_hybrid.comm.codec.triton_passes import TritonPasses

    kernels = passes_of(bits, TritonPasses)
    if kernels._signs is not None:
        kernels._signs = kernels._signs.to(device)
    for numel in (1, 257, 6000):
        flat = gradients(numel, 2)
        expected = encoded(passes_of(bits), flat, bits, key, first_id=77)
        message = torch.zeros_like(expected, device=device)
        ids = torch.arange(77, 77 + -(-numel // 256), dtype=torch.int32, device=device)
        kernels.encode(flat.to(device), ids, key, message, None)
        assert torch.equal(message.cpu(), expected)
        rows = torch.stack([expected, encoded(passes_of(bits), -2 * flat, bits), expected])
        sums = torch.empty(numel, device=device), torch.empty(numel)
        kernels.add(rows.to(device), sums[0])
        passes_of(bits).add(rows, sums[1])
        assert same(sums[0].cpu(), sums[1])
        coder = coder_of(bits)
        parts = torch.zeros(
            4, coder.codec.message_bytes(256 * max(1, -(-numel // 768))), dtype=torch.uint8
        )
        in_turn = parts.clone()
        kernels.encode(flat.to(device), ids, key, (there := parts.to(device)), None)
        coder.encode(flat, ids.cpu(), key, in_turn)
        assert torch.equal(there.cpu(), in_turn)
        decoded = torch.empty(numel, device=device), torch.empty(numel)
        kernels.decode(there, decoded[0])
        coder.decode(in_turn, decoded[1])
        assert same(decoded[0].cpu(), decoded[1])


@not_interpreted
@pytest.mark.long
@BITS
def test_the_kernels_compile_for_a_gpu(bits):
    """Triton compiles the kernels for an H100 with IEEE division, and without flushing subnormals to zero."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_hybrid.comm.codec import triton_kernels

    most = {"MOST": 2 ** (bits - 1) - 1}
    numbers = {"RECIPROCAL": 1 / most["MOST"], "LEAST": 31 << 23, "IS_NEAREST": False}
    pointers = {"flat": "*fp32", "ids": "*i32", "signs": "*fp32", "scales": "*i16", "codes": "*u8"}
    # The other arguments are i32.
    pointers |= {
        "messages": "*u8",
        "to": "*fp32",
        "key": "i64",
        "sender": "i64",
    }
    results = []
    for kernel, constants in (
        (triton_kernels.encode_block, most | numbers),
        (triton_kernels.add_block, most),
    ):
        types = {name: pointers.get(name, "i32") for name in kernel.arg_names}
        source = ASTSource(
            fn=kernel, signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants
        )
        options = {"num_warps": 1, "enable_fp_fusion": True}
        results.append(
            triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        )
    assert "div.rn.f32" in results[0]
    assert not any(".ftz" in ptx for ptx in results)
