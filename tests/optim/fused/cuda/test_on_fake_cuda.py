"""What the optimizers do on CUDA, without one: which path they take, what they launch, and on which device."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid.callbacks.tensor_hash import _BLOCK_ROWS_ON_CUDA, _ROW, Fingerprint
from lightning_hybrid.optim import LAMB, LARS
from lightning_hybrid.optim.diagnostics import trust_ratios
from lightning_hybrid.optim.fused import option_table
from lightning_hybrid.placement import BLOCK, Part
from lightning_hybrid.precision.loss_scale import DynamicLossScale
from lightning_hybrid.precision.skipped_steps import OptimizerStepState
from recipes.benchmarks.gradient_sets import GRADIENT_SETS
from tests.optim.fused.cuda.fake_cuda import ONE, ZERO, Launches, fake_cuda, parameter
from tests.optim.fused.cuda.test_kernels import triton

assert triton  # else all is skipped
CONF = Path(__file__).parents[4] / "conf" / "optim"
SHAPES = GRADIENT_SETS["resnet50"]()
RULES = {LARS: "lars", LAMB: "lamb"}
KERNELS_OF = {LARS: ("norms", "finalize", "lars_update"), LAMB: ("norms", "count", "moments", "rates", "lamb_update")}
every_rule = pytest.mark.parametrize("rule", RULES, ids=RULES.values())


@pytest.fixture
def fake(monkeypatch):
    with fake_cuda(monkeypatch) as fake:
        yield fake


def recipe(rule):
    """The optimizer of a recipe, for ResNet-50 as 16-true has it: masters with fp16 copies, normalisation in fp32."""
    options = dict(OmegaConf.load(CONF / f"{RULES[rule]}.yaml"))
    assert options.pop("fused", "missing") is None
    options = {name: value for name, value in options.items() if not name.startswith("_")}
    groups = ({"params": []}, {"params": [], "trust_ratio": False, "weight_decay": 0.0})
    copies = {}
    for shape in SHAPES:
        is_half = len(shape) > 1 or shape == (1000,)  # convolutions and the head
        one = parameter(*shape, grad_dtype=torch.float16 if is_half else torch.float32)
        if is_half:
            copies[one] = torch.empty_like(one, dtype=torch.float16)
        groups[len(shape) == 1]["params"].append(one)
    optimizer = rule(list(groups), **options)
    optimizer.copies = copies
    return optimizer


@every_rule
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_an_update_of_a_recipe_is_at_most_twelve_launches_and_the_host_reads_nothing(rule, precision, fake):
    """In the third step, the rate being another in each; a read by the host would raise."""
    optimizer = recipe(rule)
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (step + 1)
        if precision == "fp16":
            optimizer.grad_scale, optimizer.found_inf = torch.empty((), device=ZERO), None
        fake.launched.clear()
        fake.num_copies = 0
        with Launches() as launches:
            optimizer.step()
    kernels = [name for name, _ in fake.launched]
    wanted = [name for name in KERNELS_OF[rule] for _ in range(2)]  # for what has a copy, and for what has none
    if rule is LAMB and precision == "bf16":
        wanted = wanted[2:]  # nothing checks for inf, and nothing bounds the norm
    assert sorted(kernels) == sorted(wanted)
    assert fake.num_copies == 1  # of all options
    assert len(launches.names) == (precision == "fp16"), launches.names  # 1 / scale, and the 0 of found_inf
    assert len(kernels) + fake.num_copies + len(launches.names) <= 12


@every_rule
def test_an_update_whose_rate_is_as_before_copies_nothing(rule, fake):
    optimizer = recipe(rule)
    optimizer.step()
    before = fake.num_copies
    optimizer.step()
    assert fake.num_copies == before > 0


@every_rule
def test_a_rate_that_changes_inside_a_captured_graph_is_refused(rule, fake, monkeypatch):
    optimizer = recipe(rule)
    optimizer.step()
    monkeypatch.setattr(option_table, "is_capturing", lambda: True)
    optimizer.step()
    optimizer.param_groups[0]["lr"] *= 0.5
    with pytest.raises(RuntimeError, match="changed inside a CUDA-graph capture"):
        optimizer.step()


@every_rule
@pytest.mark.parametrize("fused", [None, False], ids="fused={}".format)
def test_parts_are_added_over_ranks_on_their_device_and_the_host_reads_nothing(rule, fused, fake):
    """A read by the host would raise; kernels are as many as of whole tensors."""
    params = [parameter(2 * BLOCK, grad_dtype=torch.float16), parameter(8, 4, grad_dtype=torch.float16)]
    optimizer = rule(params, lr=0.1, fused=fused)
    optimizer.copies = {one: torch.empty_like(one, dtype=torch.float16) for one in params}
    optimizer.parts = {params[0]: Part(numel=5 * BLOCK, begin=2 * BLOCK, end=4 * BLOCK)}
    tables = []
    optimizer.add_up_ = tables.append
    for _ in range(2):
        optimizer.grad_scale, optimizer.found_inf = torch.empty((), device=ZERO), None
        fake.launched.clear()
        tables.clear()
        optimizer.step()
        assert [(table.device, table.dtype) for table in tables] == [(ZERO, torch.float64)] * (1 if rule is LARS else 2)
        assert optimizer.last_found_inf.device == ZERO
        assert [name for name, _ in fake.launched] == list(KERNELS_OF[rule] if fused is None else ())


@every_rule
@pytest.mark.parametrize(
    ("options", "is_fused", "is_declared"),
    [
        ({}, True, False),
        ({"fused": True}, True, True),
        ({"fused": False}, False, False),
        ({"foreach": True}, False, False),
        ({"foreach": False}, False, False),
        ({"capturable": True}, False, False),
    ],
    ids=str,
)
def test_kernels_are_the_default_and_only_who_asks_for_them_must_clip_elsewhere(
    rule, options, is_fused, is_declared, fake
):
    """Lightning's `16-mixed` refuses to clip where an optimizer declares that it unscales by itself."""
    weight = parameter(8, 4)
    optimizer = rule([weight], lr=0.1, **options)
    optimizer.grad_scale, optimizer.found_inf = torch.empty((), device=ZERO), None
    optimizer.step()
    assert bool(fake.launched) is is_fused
    assert optimizer._step_supports_amp_scaling is is_declared
    assert optimizer.last_found_inf.device == ZERO


@every_rule
def test_with_a_parameter_on_the_cpu_nobody_gets_kernels_unasked(rule, fake):
    optimizer = rule([parameter(8, 4), parameter(4, device=torch.device("cpu"))], lr=0.1)
    assert not optimizer._asks_for_fused()


@pytest.mark.parametrize("devices", [(ONE,), (ZERO, ONE), (ONE, ZERO, ONE)], ids=str)
@pytest.mark.parametrize(
    ("rule", "more"),
    [(LARS, "a rate on a device"), (LAMB, "a rate on a device"), (LAMB, "a bound on the norm")],
    ids=["lars-rate", "lamb-rate", "lamb-norm"],
)
def test_kernels_are_launched_on_the_device_of_their_tensors(rule, devices, more, fake):
    """The current device is 0, and stays so; the scale is on 0."""
    options = {"max_grad_norm": 1.0} if "norm" in more else {}
    optimizer = rule([parameter(8, 4, device=device) for device in devices], lr=0.1, **options)
    if "rate" in more:
        optimizer.param_groups[0]["lr"] = torch.empty((), device=ZERO)
    for _ in range(2):
        optimizer.grad_scale, optimizer.found_inf = torch.empty((), device=ZERO), None
        fake.launched.clear()
        optimizer.step()
        assert optimizer.last_found_inf.device in (ZERO, ONE)
    assert {device for _, device in fake.launched} == set(devices)
    assert fake.current == ZERO


@every_rule
@pytest.mark.parametrize("given", [False, True], ids="given={}".format)
def test_lists_over_two_devices_mix_nothing(rule, given, fake):
    for more in ({}, {"weight_decay": 0.01}, *([{"max_grad_norm": 1.0}] if rule is LAMB else [{"nesterov": True}])):
        params = [parameter(8, 4, device=device, grad_dtype=torch.float16) for device in (ZERO, ONE, ZERO)]
        optimizer = rule([{"params": params[:2]}, {"params": params[2:], "trust_ratio": False}], lr=0.1, fused=False)
        for group in optimizer.param_groups:
            group.update(more)
        optimizer.copies = {one: torch.empty_like(one, dtype=torch.float16) for one in params}
        for _ in range(2):
            optimizer.grad_scale = torch.empty((), device=ZERO)
            optimizer.found_inf = torch.empty((), device=ONE) if given else None
            optimizer.step()
        ratios = trust_ratios(optimizer, grad_scale=torch.empty((), device=ZERO))
        assert {param.device: ratio.device for param, ratio in ratios[0].items()} == {ZERO: ZERO, ONE: ONE}
        assert not fake.launched


@every_rule
@pytest.mark.parametrize("fused", [None, False], ids="fused={}".format)
def test_state_of_a_checkpoint_on_the_cpu_goes_to_the_parameters(rule, fused, fake):
    """Of half precision, whose state stays float32, and of one that the CPU's native passes wrote, counts included."""
    params = [nn.Parameter(torch.empty(8, 4, device=device, dtype=torch.float16)) for device in (ZERO, ONE)]
    for param in params:
        param.grad = torch.empty_like(param)
    optimizer = rule(params, lr=0.1, fused=fused)
    optimizer.step()
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        entry.update({key: torch.empty(value.shape, dtype=value.dtype) for key, value in entry.items()})
    optimizer.load_state_dict(saved)
    optimizer.grad_scale, optimizer.found_inf = torch.empty((), device=ZERO), None
    for _ in range(2):
        optimizer.step()
    for param in params:
        entry = optimizer.state[param]
        assert {value.device for key, value in entry.items() if key != "step"} == {param.device}
        assert {value.dtype for value in entry.values()} == {torch.float32}


@pytest.mark.parametrize(("hysteresis", "most"), [(1, 8), (2, 20)])
def test_following_a_step_is_few_operations_of_one_element(hysteresis, most, fake):
    record = OptimizerStepState(loss_scale=DynamicLossScale(hysteresis=hysteresis))
    record.to(ZERO)
    with Launches() as launches:
        record.count(torch.empty((), device=ZERO))
    assert 0 < len(launches.names) <= most, launches.names


class Largest(TorchDispatchMode):
    """The most elements that an int64 tensor was made of."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype is torch.int64:
            self.most = max(self.most, made.numel())
        return made


def test_a_fingerprint_on_cuda_makes_no_product_of_the_whole_tensor(fake):
    fingerprint = Fingerprint(ZERO)
    fingerprint._weights_of = lambda level, device: torch.empty(_ROW, dtype=torch.int64, device=device)
    tensors = [torch.empty(10 * _BLOCK_ROWS_ON_CUDA * _ROW + 7, device=device) for device in (ZERO, ONE)]
    with Largest() as largest:
        found = [fingerprint.of(one) for one in tensors]
    assert largest.most == _BLOCK_ROWS_ON_CUDA * _ROW
    assert [one.device for one in found] == [ZERO, ONE]
    assert fingerprint.combine(found).device == ZERO
