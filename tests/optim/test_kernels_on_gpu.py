"""The kernels of the fused step where only a GPU or the compiler for it can tell: code, launches, waits, graphs."""

import re

import pytest
import torch

from lightning_hybrid.optim import LARS, fused
from tests.optim.test_kernels import assert_close, groups_of, parameters, triton, twins
from tests.optim.test_lars import set_grads


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_gpus_and_move_16_bytes_at_once(capability, tmp_path, monkeypatch):
    """Without a GPU: to PTX, and that to machine code."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lightning_hybrid.optim import kernels

    tl = triton.language
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"tensor_of": "*i32", "index_of": "*i32", "first_chunk": "*i32", "options": "*fp64", "lrs": "*fp64"}
    types |= {"numbers": "*fp64", "inverse_scale": "*fp32", "found_inf": "*fp32", "sums": "*fp32"}
    types |= {"num_tensors": "i32", "num_chunks": "i32"}
    types |= dict.fromkeys(("weights", "grads", "buffers", "copies", "numels"), "*i64")
    static = {"WEIGHT": tl.float32, "STATE": tl.float32, "GRAD": tl.float16, "COPY": tl.float16, "CHUNK": 4096}
    flags = ["IS_JOINT", "HAS_WEIGHT_SUMS", "IS_ALIGNED", "IS_GRAD_ALIGNED", "HAS_MOMENTUM", "HAS_COPY"]
    static |= {**dict.fromkeys(flags, True), "HAS_WEIGHT_SUMS": False}
    # Of 16 elements of each thread: w and v of 4 bytes, g and the copy of 2.
    wide = {kernels.norms: (4 + 2, 0), kernels.finalize: (0, 0), kernels.update: (4 + 4 + 2, 4 + 4 + 2)}
    for kernel, (loads, stores) in wide.items():
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        constants = {name: static[name] for name, kind in signature.items() if kind == "constexpr"}
        source = ASTSource(kernel, signature, constants)
        options = {"num_warps": 8, "enable_fp_fusion": True}
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm
        assert len(made["cubin"]) > 0
        assert len(re.findall(r"ld\.global\.v4\.b32", made["ptx"])) == loads
        assert len(re.findall(r"st\.global\.v4\.b32", made["ptx"])) == stores
        if stores:  # to nearest: the interpreter cannot show it
            source = ASTSource(kernel, signature, {**constants, "COPY": tl.bfloat16})
            ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
            assert re.search(r"cvt\.rn\.bf16", ptx)


def test_without_triton_fused_on_cuda_warns_once_and_uses_lists(monkeypatch):
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: None)
    fused.has_kernels.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"`fused` \(=True\) on CUDA needs triton"):
        assert not fused.has_kernels("cuda")
    assert not fused.has_kernels("cuda")
    assert fused.has_kernels("cpu")
    fused.has_kernels.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("num_tensors", [3, 300])
def test_a_step_never_waits_and_its_launches_do_not_grow_with_the_model(num_tensors):
    """A clearing and three kernels, one more for 1 / scale; learning rates that change cost one copy more."""
    params = parameters("cuda", shapes=[(100 + i,) for i in range(num_tensors)])
    optimizer = LARS(groups_of(params), lr=4.0, weight_decay=0.01, fused=True)
    optimizer.copies = {param: param.detach().half() for param in params}
    optimizer.grad_scale = torch.tensor(1024.0, device="cuda")
    for param in params:
        param.grad = torch.randn_like(param).half()
    for _ in range(2):  # compiles, makes state and tables
        optimizer.step()
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for rate in (1.0, 2.0):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    on_device = [one for one in profile.events() if one.device_type == torch.autograd.DeviceType.CUDA]
    names = [one.name for one in on_device if "Memcpy" not in one.name]
    assert sum(name in ("norms", "finalize", "update") for name in names) == 3, names
    assert len(names) <= 5, names


@pytest.mark.gpu
def test_a_captured_step_replays_with_new_gradients_rates_and_verdicts():
    params = parameters("cuda")
    others = twins(params)
    lr = torch.tensor(2.0, device="cuda")
    ours, theirs = LARS(params, lr=lr, weight_decay=0.01, fused=True), LARS(others, lr=2.0, weight_decay=0.01)
    ours.copies = {param: param.detach().half() for param in params}
    ours.grad_scale = torch.tensor(1024.0, device="cuda")
    for param in params:
        param.grad = torch.zeros_like(param, dtype=torch.float16)

    def fill(step):
        set_grads(others, step)
        for param, other in zip(params, others, strict=True):
            param.grad.copy_(other.grad * 1024)
            other.grad = param.grad.float().cpu() / 1024

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
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
    assert_close(params, others, 2e-6)
