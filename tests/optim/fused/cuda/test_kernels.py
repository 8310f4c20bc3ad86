"""Kernels of the fused step, in Triton's interpreter on CPU tensors, and on CUDA if there is a GPU.

The interpreter must be selected before Triton is imported. The first test therefore runs the interpreted tests in a
separate process.
"""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

from lightning_hybrid.optim import LARS
from lightning_hybrid.optim.fused import availability
from lightning_hybrid.optim.fused import step as fused_step
from lightning_hybrid.optim.lars import Denominator, MomentumForm
from lightning_hybrid.placement import BLOCK
from tests.optim.makers import (
    OptimizerPair,
    Parts,
    Whole,
    distance,
    normals,
    on_threads,
    overflow,
    set_grads,
    written,
)

triton = pytest.importorskip("triton", reason="needs triton, which PyPI has for Linux only")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = pytest.param("cpu")
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_devices = pytest.mark.parametrize("device", [CPU] if IS_INTERPRETED else [CUDA])
not_interpreted = pytest.mark.skipif(IS_INTERPRETED, reason="is not about the interpreter")

LOOP = {"foreach": False}
KERNELS = {"fused": True}
# A chunk has 64 elements in the interpreter and 4096 on a GPU. The sizes are: several chunks and a remainder, less than
# one chunk, a scalar, exactly one chunk, and one more element.
SHAPES = {"cpu": [(33, 7), (5,), (), (64,), (65,)], "cuda": [(330, 70), (5,), (), (4096,), (4097,)]}


@pytest.fixture(autouse=IS_INTERPRETED)
def _kernels_for_cpu_tensors(monkeypatch):
    from lightning_hybrid.optim.fused.cuda.lars import KernelLars

    def engine_of(self, tensors, optimizer):
        has_momentum, is_joint = tensors.flags
        if has_momentum:
            moments = optimizer.state_lists(tensors.params, "momentum_buffer")
        else:
            moments = []
        return KernelLars(tensors.params, moments, tensors.grad_dtype, is_joint=is_joint, chunk=64)

    monkeypatch.setattr(fused_step.FusedLars, "engine_of", engine_of)


def parameters(device, dtype=torch.float32, shapes=None):
    if shapes is None:
        shapes = SHAPES[device]
    params = []
    for index, shape in enumerate(shapes):
        param = nn.Parameter(normals(*shape, seed=index, dtype=dtype).to(device))
        param.grad_dtype = None
        params.append(param)
    return params


def clones_of(params):
    return [nn.Parameter(param.detach().cpu().clone()) for param in params]


def give_grads(params, cpu_params, seed):
    set_grads(cpu_params, seed)
    for param, cpu_param in zip(params, cpu_params, strict=True):
        param.grad = cpu_param.grad.to(param.device, copy=True)


@not_interpreted
@pytest.mark.long
def test_what_follows_holds_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider"]
    root = Path(__file__).parents[4]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 20


def pair_on(device, **options):
    return OptimizerPair(Whole(), KERNELS, shapes=SHAPES[device], device=device, **options)


@on_devices
@pytest.mark.parametrize("denominator", get_args(Denominator))
@pytest.mark.parametrize("momentum_form", get_args(MomentumForm))
def test_kernels_make_the_steps_of_the_loop_in_every_form(device, momentum_form, denominator):
    """Results differ only by some five roundings per step. Float64 verifies the rule, and float32 the rounding."""
    forms = {"momentum_form": momentum_form, "denominator": denominator}
    bounds = {torch.float64: 1e-14}
    if momentum_form == "lr_inside":
        bounds[torch.float32] = 2e-6
    for dtype, bound in bounds.items():
        for options in (
            {},
            {"nesterov": True, "excluded_lr_mult": 0.01},
            {"trust_clip": 1.0, "lr": 0.01},
            {"maximize": True, "weight_decay": 0.0},
            {"momentum": 0.0, "eps": 0.1},
        ):
            both = pair_on(device, dtype=dtype, **forms, **options)
            assert both.steps(3).distance() <= bound, options


@on_devices
@pytest.mark.parametrize("denominator", ["sum", "joint"])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_scaled_half_gradients_move_fp32_weights_that_user_code_writes_between_steps(
    device, half, denominator
):
    """A norm of the weights must not be carried over from the last step."""
    both = pair_on(device, half=half, nesterov=True, denominator=denominator)
    assert written(both) <= 2e-6


@on_devices
@pytest.mark.parametrize("denominator", ["sum", "joint"])
@pytest.mark.parametrize(
    ("bad", "is_verdict_given"), [(torch.inf, False), (-torch.inf, True), (torch.nan, False)]
)
def test_an_overflow_leaves_every_bit(device, bad, is_verdict_given, denominator):
    both = pair_on(device, half=torch.float16, denominator=denominator)
    verdicts, is_untouched, distance_after = overflow(both, (0, -1), is_verdict_given, bad)
    assert verdicts == [0.0, 1.0, 0.0]
    assert is_untouched
    assert distance_after <= 2e-6


@on_devices
@pytest.mark.parametrize("denominator", get_args(Denominator))
def test_zero_norms_and_no_learning_rate_and_a_rate_on_the_device(device, denominator):
    for clip, lr in ((None, 0.5), (1.0, 0.0), (1.0, torch.tensor(0.5))):
        params = parameters(device, shapes=[(7,), (7,), (100,), (0,)])
        with torch.no_grad():
            params[0].zero_()
        expected = clones_of(params)
        give_grads(params, expected, 1)
        params[1].grad.zero_()
        expected[1].grad.zero_()
        params[2].grad = torch.full_like(params[2], 60000.0, dtype=torch.float16)
        expected[2].grad = torch.full_like(expected[2], 60000.0)
        options = {"weight_decay": 0.1, "denominator": denominator, "trust_clip": clip}
        version = params[2]._version
        lr_of_kernels = lr
        if isinstance(lr, torch.Tensor):
            lr_of_kernels = lr.to(device)
        LARS(params, lr=lr_of_kernels, **options, fused=True).step()
        assert params[2]._version > version  # autograd must notice the write
        LARS(expected, lr=float(lr), **options).step()
        assert distance(params, expected) <= 1e-6


@on_devices
def test_layouts_missing_gradients_and_moved_memory(device):
    """Steps work for channels-last, transposed, expanded and misaligned gradients, and for a strided weight.

    In the long misaligned gradient whole chunks are misaligned, and in the short one a remainder. Both are
    half-precision, as DDP packs them.
    """
    if device == "cpu":
        long = 200
    else:
        long = 9000
    params = parameters(device, shapes=[(4, 3, 2, 2), (6, 9), (9,), (9,), (20,), (long,)])
    params[0] = nn.Parameter(params[0].detach().to(memory_format=torch.channels_last))
    params[4] = nn.Parameter(params[4].detach()[::2])
    expected = clones_of(params)
    ours = LARS(params, lr=2.0, weight_decay=0.1, **KERNELS)
    theirs = LARS(expected, lr=2.0, weight_decay=0.1, **LOOP)
    for step in range(4):
        give_grads(params, expected, step)
        params[1].grad = params[1].grad.T.contiguous().T
        params[2].grad = expected[2].grad = None
        params[2].grad = torch.full((), 0.5, device=device).expand(9)
        expected[2].grad = torch.full((9,), 0.5)
        for index in (3, 5):  # misaligned
            half = params[index].grad.half()
            params[index].grad = None
            params[index].grad = torch.cat([half.new_zeros(1), half])[1:]
            expected[index].grad = half.float().cpu()
        if step == 2:
            params[3].grad = expected[3].grad = None
            params[1].data = params[1].data.clone()
        ours.step()
        theirs.step()
    assert distance(params, expected) <= 1e-6


@on_devices
def test_the_first_kernel_that_is_tried_can_be_launched(device, monkeypatch):
    from lightning_hybrid.optim.fused.cuda import lars

    monkeypatch.setattr(lars, "try_out", functools.partial(lars.try_out, device))
    assert availability.has_kernels.__wrapped__("cuda")


@on_devices
def test_parts_of_tensors_move_as_the_whole_ones(device, monkeypatch):
    """Two ranks in turn each step a part of a tensor. In the second of three steps, one part contains inf."""
    from lightning_hybrid.optim.fused.cuda.lars import KernelLars

    def engine_of(self, tensors, optimizer):
        moments = optimizer.state_lists(tensors.params, "momentum_buffer")
        return KernelLars(
            tensors.params, moments, tensors.grad_dtype, is_joint=True, parts=tensors.parts
        )

    monkeypatch.setattr(fused_step.FusedLars, "engine_of", engine_of)
    assert BLOCK % 4096 == 0  # the chunk of the kernels

    def on_rank(rank, add_up_):
        both = OptimizerPair(
            Parts(rank, 2, add_up_),
            KERNELS,
            whole_path=KERNELS,
            device=device,
            shapes=[(2 * BLOCK + 300,), (5,)],
            half=torch.float16,
            denominator="joint",
        )
        return overflow(both, (0, BLOCK + 3))

    bound = 0.0 if device == "cpu" else 2e-6  # the whole tensors are on the CPU
    for rank, result in enumerate(on_threads(2, on_rank)):
        verdicts, is_untouched, distance_after = result
        assert verdicts == [0.0, 1.0, 0.0], f"rank {rank}"
        assert is_untouched, f"rank {rank}"
        assert distance_after <= bound, f"rank {rank}"


class TwoEqualHalves:
    """Mock of `ShardSums`, in which the other rank has the same elements as this one."""

    def add_up_(self, params, table):
        table.mul_(2)

    def norms(self, params, *norms):
        return [norm * 2**0.5 for norm in norms]

    def largest(self, value):
        return value


@on_devices
def test_shards_of_dtensors_move_by_the_norms_of_whole_tensors(device):
    halves = parameters(device, shapes=[(33, 7), (0,), (5,), (64,), (65,)])
    wholes = [nn.Parameter(torch.cat([half.detach().cpu()] * 2)) for half in halves]
    ours = LARS(halves, lr=4.0, **KERNELS)
    theirs = LARS(wholes, lr=4.0, **LOOP)
    ours.shard_sums = TwoEqualHalves()
    for step in range(3):
        set_grads(wholes, step)
        for half, whole in zip(halves, wholes, strict=True):
            if whole.numel():
                whole.grad = torch.cat([whole.grad.chunk(2)[0]] * 2)
            half.grad = whole.grad.chunk(2)[0].clone().to(device)
        for optimizer in (ours, theirs):
            optimizer.step()
    assert distance(halves, [whole.chunk(2)[0] for whole in wholes]) <= 2e-6
