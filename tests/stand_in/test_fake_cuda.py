"""Optimizers on CUDA without a GPU: their path, their launches, and the current device."""

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from lightning_hybrid.optim import LAMB, LARS
from lightning_hybrid.optim.fused import option_table
from lightning_hybrid.placement import BLOCK, Part
from recipes.benchmarks.gradient_sets import GRADIENT_SETS
from tests.optim.fused.cuda.test_kernels import triton
from tests.stand_in.fake_cuda import ONE, ZERO, Launches, fake_cuda, parameter

assert triton  # otherwise the tests are skipped
CONF = Path(__file__).parents[2] / "conf" / "optim"
SHAPES = GRADIENT_SETS["resnet50"]()
RULES = {LARS: "lars", LAMB: "lamb"}
KERNELS = ["norms", "finalize", "lars_update"]


@pytest.fixture
def fake(monkeypatch):
    with fake_cuda(monkeypatch) as fake:
        yield fake


def recipe(rule, shapes=SHAPES, *, fused=None):
    """Return a recipe's optimizer for ResNet-50 in 16-true, with fp16 gradients, and fp32 ones for normalizations."""
    options = yaml.safe_load((CONF / f"{RULES[rule]}.yaml").read_text())
    assert options.pop("fused", "missing") is None
    options = {name: value for name, value in options.items() if not name.startswith("_")} | {
        "fused": fused
    }
    groups = ({"params": []}, {"params": [], "trust_ratio": False, "weight_decay": 0.0})
    for shape in shapes:
        is_half = len(shape) > 1 or shape == (1000,)  # convolutions and the head
        param = parameter(*shape, grad_dtype=torch.float16 if is_half else torch.float32)
        groups[len(shape) == 1]["params"].append(param)
    return rule(list(groups), **options)


def scaled_step(optimizer):
    optimizer.grad_scale = torch.empty((), device=ZERO)
    optimizer.found_inf = None
    optimizer.step()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_fused_update_of_a_recipe_is_at_most_eight_launches_and_the_host_reads_nothing(
    precision, fake
):
    """The third step is counted, and the learning rate changes in each step. A read by the host would raise."""
    optimizer = recipe(LARS, fused=True)
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (step + 1)
        fake.launched.clear()
        fake.num_copies = 0
        with Launches() as launches:
            scaled_step(optimizer) if precision == "fp16" else optimizer.step()
    kernels = [name for name, _ in fake.launched]
    assert sorted(kernels) == sorted(2 * KERNELS)  # for fp16 gradients, and for fp32 ones
    assert fake.num_copies == 1  # for all options
    # 1 / scale, and the 0 of found_inf.
    assert len(launches.names) == (precision == "fp16"), launches.names


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_default_of_lars_is_lists_and_the_host_reads_nothing(precision, fake):
    """The number of launches does not grow with the model, except for the selection of old or new values."""
    numbers = []
    for shapes in (SHAPES[-20:], SHAPES[-60:]):
        optimizer = recipe(LARS, shapes)
        for _ in range(2):
            with Launches() as launches:
                scaled_step(optimizer) if precision == "fp16" else optimizer.step()
        numbers.append(len(launches.names))
    assert not fake.launched
    num_selections = 2 if precision == "fp16" else 0  # per tensor: the weight and its momentum
    assert numbers[1] - numbers[0] == num_selections * 40


@pytest.mark.parametrize(("fused", "precision"), [(None, "fp16"), (True, "bf16")])
def test_lamb_steps_by_lists_whose_operations_do_not_grow_with_the_model(
    fused, precision, fake, recwarn
):
    """Only the selection of old or new values grows, if a step may be skipped. A read by the host would raise.

    `fused=True` may come from a CPU checkpoint. On CUDA, a request for it raises an error.
    """
    numbers = []
    for shapes in (SHAPES[-20:], SHAPES[-60:]):
        optimizer = recipe(LAMB, shapes)
        for group in optimizer.param_groups:
            group["fused"] = fused
        for _ in range(2):
            with Launches() as launches:
                scaled_step(optimizer) if precision == "fp16" else optimizer.step()
        numbers.append(len(launches.names))
    assert not fake.launched
    assert not list(recwarn)
    num_selections = 3 if precision == "fp16" else 0  # per tensor: the weight and both moments
    assert numbers[0] <= 130 + 20 * num_selections
    assert numbers[1] - numbers[0] == num_selections * 40
    with pytest.raises(
        ValueError,
        match=r"`fused` \(=True\) requires parameters on cpu or meta, but one parameter is on `cuda:0`.*LAMB",
    ):
        LAMB([parameter(8, 4)], lr=0.1, fused=True)


def test_an_update_whose_rate_is_as_before_copies_nothing_and_another_in_a_captured_graph_is_refused(
    fake, monkeypatch
):
    optimizer = recipe(LARS, fused=True)
    optimizer.step()
    before = fake.num_copies
    optimizer.step()
    assert fake.num_copies == before > 0
    monkeypatch.setattr(option_table, "is_capturing", lambda: True)
    optimizer.step()
    optimizer.param_groups[0]["lr"] *= 0.5
    with pytest.raises(RuntimeError, match="must not change inside a CUDA graph capture"):
        optimizer.step()


PATHS = [(LARS, None), (LARS, True), (LAMB, None)]


@pytest.mark.parametrize(("rule", "fused"), PATHS, ids=str)
def test_parts_are_added_over_ranks_on_their_device_and_the_host_reads_nothing(rule, fused, fake):
    """A read by the host would raise. There are as many kernels as for whole tensors."""
    params = [
        parameter(2 * BLOCK, grad_dtype=torch.float16),
        parameter(8, 4, grad_dtype=torch.float16),
    ]
    optimizer = rule(params, lr=0.1, fused=fused)
    optimizer.parts = {params[0]: Part(numel=5 * BLOCK, begin=2 * BLOCK, end=4 * BLOCK)}
    tables = []
    optimizer.add_up_ = tables.append
    for _ in range(2):
        fake.launched.clear()
        tables.clear()
        scaled_step(optimizer)
        assert [(table.device, table.dtype) for table in tables] == [(ZERO, torch.float64)] * (
            1 if rule is LARS else 2
        )
        assert optimizer.last_found_inf.device == ZERO
        assert [name for name, _ in fake.launched] == (KERNELS if fused else [])


@pytest.mark.parametrize(
    ("options", "is_fused"),
    [
        ({}, False),
        ({"fused": None}, False),
        ({"fused": True}, True),
        ({"fused": False}, False),
        ({"foreach": True}, False),
        ({"foreach": False}, False),
        ({"capturable": True}, False),
    ],
    ids=str,
)
def test_nobody_gets_kernels_unasked_and_who_asks_for_them_must_clip_elsewhere(
    options, is_fused, fake
):
    """Lightning's `16-mixed` refuses to clip if an optimizer declares that it unscales gradients itself."""
    optimizer = LARS([parameter(8, 4)], lr=0.1, **options)
    scaled_step(optimizer)
    assert bool(fake.launched) is is_fused
    assert optimizer._step_supports_amp_scaling is is_fused
    assert optimizer.last_found_inf.device == ZERO
    mixed = LARS([parameter(8, 4), parameter(4, device=torch.device("cpu"))], lr=0.1, **options)
    assert mixed._asks_for_fused() is is_fused


@pytest.mark.parametrize(("rule", "fused"), PATHS, ids=str)
def test_state_of_a_checkpoint_on_the_cpu_goes_to_the_parameters(rule, fused, fake):
    """The test loads half-precision parameters with float32 state, and a CPU state of the fused passes with counts."""
    params = [
        nn.Parameter(torch.empty(8, 4, device=device, dtype=torch.float16))
        for device in (ZERO, ONE)
    ]
    for param in params:
        param.grad = torch.empty_like(param)
    optimizer = rule(params, lr=0.1, fused=fused)
    optimizer.step()
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        entry.update(
            {key: torch.empty(value.shape, dtype=value.dtype) for key, value in entry.items()}
        )
    optimizer.load_state_dict(saved)
    for _ in range(2):
        scaled_step(optimizer)
    for param in params:
        entry = optimizer.state[param]
        assert {value.device for key, value in entry.items() if key != "step"} == {param.device}
        assert {value.dtype for value in entry.values()} == {torch.float32}
