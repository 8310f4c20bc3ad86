"""Kernels of the fused step that need a GPU or its compiler: code, launches, waits, graphs."""

import re
import subprocess
import sys

import pytest
import torch

from lightning_hybrid.optim import LARS
from lightning_hybrid.optim.fused import availability
from tests.optim.fused.cuda.test_kernels import clones_of, parameters, triton
from tests.optim.makers import distance, set_grads

TENSORS = ("weights", "grads", "buffers", "numels")
TYPES = {
    **dict.fromkeys(TENSORS, "*i64"),
    **dict.fromkeys(("tensor_of", "index_of", "first_chunk"), "*i32"),
    **dict.fromkeys(("options", "lrs", "numbers"), "*fp64"),
    **dict.fromkeys(("inverse_scale", "found_inf", "sums"), "*fp32"),
    **dict.fromkeys(("num_tensors", "num_chunks"), "i32"),
}
FLAGS = ("IS_JOINT", "HAS_MOMENTUM")


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Return a compiler of kernels to PTX for fp32 weights, fp16 gradients and aligned buffers.

    The PTX must also assemble to machine code.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tl = triton.language
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    static = {"WEIGHT": tl.float32, "STATE": tl.float32, "GRAD": tl.float16, "CHUNK": 4096}
    static |= dict.fromkeys(FLAGS, True)

    def compiled(kernel, capability, **changes):
        values = static | changes
        signature = {name: TYPES.get(name, "constexpr") for name in kernel.arg_names}
        constants = {name: values[name] for name in signature if name not in TYPES}
        source = ASTSource(kernel, signature, constants)
        options = {"num_warps": 8, "enable_fp_fusion": True}
        target = GPUTarget("cuda", capability, 32)
        code = triton.compile(source, target=target, options=options).asm
        assert len(code["cubin"]) > 0
        return code["ptx"]

    return compiled


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", ["norms", "finalize", "lars_update"])
def test_the_kernels_compile_for_gpus(name, capability, compiled):
    from lightning_hybrid.optim.fused.cuda import lars_kernels

    kernel = getattr(lars_kernels, name)
    ptx = compiled(kernel, capability)
    assert bool(re.search(r"ld\.global\.v4\.b32", ptx)) == (name != "finalize")  # 16 bytes at once
    # Misaligned gradients are read element by element, because a wider load would be a fault.
    assert not re.search(r"ld\.global\.v2\.b", ptx)
    # rounds to nearest, which the interpreter cannot show
    if name == "lars_update" and capability == 90:
        ptx_of_bf16 = compiled(kernel, capability, WEIGHT=triton.language.bfloat16)
        assert re.search(r"cvt\.rn\.bf16", ptx_of_bf16)


def no_triton(monkeypatch):
    monkeypatch.delattr("lightning_hybrid.optim.fused.cuda.lars", raising=False)
    monkeypatch.setitem(sys.modules, "lightning_hybrid.optim.fused.cuda.lars", None)


def no_compiler(monkeypatch):
    def try_out():
        raise subprocess.CalledProcessError(1, ["gcc", "cuda_utils.c"])

    monkeypatch.setattr("lightning_hybrid.optim.fused.cuda.lars.try_out", try_out)


@pytest.mark.parametrize(
    ("lack", "reason"),
    [(no_triton, ".*ModuleNotFoundError"), (no_compiler, ".*CalledProcessError.*gcc")],
)
def test_where_kernels_cannot_be_had_on_cuda_one_warning_says_so_and_it_is_the_lists(
    lack, reason, monkeypatch
):
    lack(monkeypatch)
    availability.has_kernels.cache_clear()
    with pytest.warns(
        RuntimeWarning,
        match=rf"`fused` \(=True\) needs Triton kernels {reason}.*multi-tensor implementation is used",
    ):
        assert not availability.has_kernels("cuda")
    assert not availability.has_kernels("cuda")
    assert availability.has_kernels("cpu")
    availability.has_kernels.cache_clear()


@pytest.mark.gpu
def test_a_captured_step_replays_with_new_gradients_rates_and_skips():
    params = parameters("cuda")
    expected = clones_of(params)
    lr = torch.tensor(2.0, device="cuda")
    ours = LARS(params, lr=lr, weight_decay=0.01, fused=True)
    theirs = LARS(expected, lr=2.0, weight_decay=0.01)
    ours.grad_scale = torch.tensor(1024.0, device="cuda")
    for param in params:
        param.grad = torch.zeros_like(param, dtype=torch.float16)

    def fill(step):
        set_grads(expected, step)
        for param, expected_param in zip(params, expected, strict=True):
            param.grad.copy_(expected_param.grad * 1024)
            expected_param.grad = param.grad.float().cpu() / 1024

    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fill(0)
        ours.step()
        theirs.step()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            ours.step()
    torch.cuda.synchronize()
    for step in (1, 2, 3):
        fill(step)
        lr.fill_(step)
        theirs.param_groups[0]["lr"] = float(step)
        if step == 2:
            params[1].grad[0] = torch.inf
        else:
            theirs.step()
        graph.replay()
    torch.cuda.synchronize()
    assert distance(params, expected) <= 2e-6
