"""What holds for both LARS and LAMB."""

import copy
import math

import pytest
import torch
import torch._dynamo
from torch import nn

from lightning_hybrid.optim import LAMB, LARS
from tests.optim.test_lars import assert_same_bits, copies_of, parameters, run, set_grads

RULES = {
    "lars-inside": lambda params, **more: LARS(params, lr=2.0, weight_decay=0.01, **more),
    "lars-outside": lambda params, **more: LARS(params, lr=2.0, momentum_form="lr_outside", nesterov=True, **more),
    "lars-joint": lambda params, **more: LARS(
        params, lr=2.0, weight_decay=0.01, momentum_form="ratio_outside", denominator="joint", **more
    ),
    "lamb": lambda params, **more: LAMB(params, lr=0.1, weight_decay=0.01, **more),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
HALF = [torch.float16, torch.bfloat16]


@every_rule
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_lists_and_loop_give_the_same_bits(rule, dtype):
    loop, lists = (parameters((33, 17), (5,), (), (70_001,), dtype=dtype) for _ in range(2))
    run(rule([{"params": loop[:2]}, {"params": loop[2:], "trust_ratio": False}], foreach=False), loop, 5)
    run(rule([{"params": lists[:2]}, {"params": lists[2:], "trust_ratio": False}], foreach=True), lists, 5)
    assert_same_bits(loop, lists)


@every_rule
@pytest.mark.parametrize("foreach", [False, True], ids="foreach={}".format)
def test_parameters_of_mixed_dtypes_and_without_gradients_are_stepped_or_left(rule, foreach):
    mixed = [*parameters((4,), dtype=torch.float16), *parameters((5,), (6,)), *parameters((3,), dtype=torch.float64)]
    alone = copies_of(mixed)
    together, before = rule(mixed, foreach=foreach), mixed[2].detach().clone()
    each = [rule([param]) for param in alone]
    for step in range(3):
        set_grads(mixed, step)
        set_grads(alone, step)
        mixed[2].grad = None
        for optimizer in (together, *each):
            optimizer.step()
    assert_same_bits([mixed[0], mixed[1], mixed[3]], [alone[0], alone[1], alone[3]])
    assert torch.equal(mixed[2], before)
    assert mixed[2] not in together.state


@every_rule
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_is_float32_but_for_one_rounding_at_the_end(rule, dtype):
    """Beside it runs a float32 parameter that is rounded to `dtype` after each step: same bits."""
    halves = parameters((40, 30), (7,), (600_011,), dtype=dtype)
    floats = [nn.Parameter(param.detach().float()) for param in halves]
    optimizers = rule(halves), rule(floats)
    for step in range(4):
        set_grads(halves, step)
        for half, single in zip(halves, floats, strict=True):
            single.grad = half.grad.float()
        for optimizer in optimizers:
            optimizer.step()
        for single in floats:
            single.data.copy_(single.to(dtype))
    for half, single in zip(halves, floats, strict=True):
        for key, value in optimizers[0].state[half].items():
            assert value.dtype == torch.float32
            if half.numel() < 2**15:  # above, the norm of half precision is summed in other units
                assert torch.equal(value, optimizers[1].state[single][key])
        if half.numel() < 2**15:
            assert torch.equal(half, single.to(dtype))
        torch.testing.assert_close(half.float(), single.detach(), rtol=2e-2, atol=1e-4)


@every_rule
def test_a_float16_layer_does_not_freeze_when_its_gradient_norm_passes_65504(rule):
    weight = nn.Parameter(torch.full((100, 100), 2.0, dtype=torch.float16))
    weight.grad = torch.full((100, 100), 6e4, dtype=torch.float16)
    before = weight.detach().clone()
    optimizer = rule([weight])
    for _ in range(3):
        optimizer.step()
    assert weight.isfinite().all()
    assert (weight < before).all()


def test_float32_state_survives_hooks_that_replace_the_state_dict():
    (param,) = parameters((4,), dtype=torch.float16)
    optimizer = LARS([param], lr=1.0)
    run(optimizer, [param], 2)
    before = optimizer.state[param]["momentum_buffer"].clone()
    saved, seen = optimizer.state_dict(), []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: copy.deepcopy(saved))
    optimizer.register_load_state_dict_post_hook(lambda self: seen.append(self.state[param]["momentum_buffer"].clone()))
    optimizer.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})
    assert torch.equal(optimizer.state[param]["momentum_buffer"], before)
    assert torch.equal(seen[0], before)
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == 1


def test_a_checkpoint_from_before_an_option_existed_gets_its_default():
    (param,) = parameters((4,))
    optimizer = LARS([param], lr=1.0, nesterov=True)
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["nesterov"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["nesterov"] is True


@every_rule
@pytest.mark.parametrize("trust_ratio", [True, False])
def test_a_learning_rate_that_cannot_be_read_gives_the_same_step(rule, trust_ratio, monkeypatch):
    """As one on an accelerator: it enters as a tensor, one rounding apart from a number."""
    plain, tensor = parameters((9, 8)), parameters((9, 8))
    run(rule([{"params": plain, "trust_ratio": trust_ratio}]), plain, 3)
    optimizer = rule([{"params": tensor, "trust_ratio": trust_ratio}])
    lr = torch.tensor(optimizer.param_groups[0]["lr"])
    for module in ("lars", "lamb"):
        monkeypatch.setattr(f"lightning_hybrid.optim.{module}.lr_of", lambda group, device: lr)
    run(optimizer, tensor, 3)
    torch.testing.assert_close(tensor, plain, rtol=1e-6, atol=1e-6)


def test_named_parameters_and_the_keys_of_schedulers_are_welcome():
    model = nn.Linear(3, 2)
    optimizer = LARS(model.named_parameters(), lr=1.0)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    LARS([{"params": list(model.parameters()), "name": "all", "initial_lr": 1.0, "swa_lr": 0.1}], lr=1.0)


@pytest.mark.parametrize("optimizer_type", [LARS, LAMB])
def test_an_unknown_group_key_is_an_error(optimizer_type):
    """A typo would otherwise adapt what was meant to be excluded."""
    with pytest.raises(ValueError, match=r"`trust_ration` \(=False\) is no option of LA"):
        optimizer_type([{"params": parameters((2,)), "trust_ration": False}], lr=0.1)


COMMON = [
    ("lr", -1.0),
    ("lr", math.nan),
    ("lr", math.inf),
    ("lr", "0.1"),
    ("lr", True),
    ("lr", torch.tensor([0.1])),
    ("lr", torch.tensor(-0.1)),
    ("lr", torch.tensor(1)),
    ("lr", torch.tensor(1j)),
    ("weight_decay", -1e-4),
    ("weight_decay", None),
    ("eps", -1e-8),
    ("excluded_lr_mult", -1.0),
    ("trust_clip", 0.0),
    ("trust_clip", True),
    ("foreach", 1),
    ("maximize", None),
]
BAD = [(LARS, *case) for case in COMMON] + [(LAMB, *case) for case in COMMON]
BAD += [
    (LARS, "momentum", 1.0),
    (LARS, "momentum", -0.1),
    (LARS, "trust_coefficient", 0.0),
    (LARS, "nesterov", 1),
    (LARS, "momentum_form", "B"),
    (LARS, "denominator", "both"),
    (LAMB, "betas", (1.0, 0.999)),
    (LAMB, "betas", (0.9, -0.1)),
    (LAMB, "betas", 0.9),
    (LAMB, "betas", (0.9, 0.99, 0.999)),
    (LAMB, "bias_correction", "no"),
    (LAMB, "max_grad_norm", 0.0),
]


@pytest.mark.parametrize(("optimizer_type", "name", "value"), BAD)
def test_every_bad_argument_is_refused_for_the_optimizer_and_for_a_group(optimizer_type, name, value):
    good = {"lr": 0.1}
    with pytest.raises(ValueError, match=rf"^`{name}[^`]*` \(="):
        optimizer_type(parameters((2,)), **{**good, name: value})
    with pytest.raises(ValueError, match=rf"^`{name}[^`]*` \(="):
        optimizer_type([{"params": parameters((2,)), name: value}], **good)
    with pytest.raises(ValueError, match=r"^`trust_ratio` \(=0\)"):
        optimizer_type([{"params": parameters((2,)), "trust_ratio": 0}], **good)


def test_nesterov_without_momentum_is_refused():
    with pytest.raises(ValueError, match=r"`nesterov` \(=True\) needs `momentum` \(=0\)"):
        LARS(parameters((2,)), lr=0.1, momentum=0.0, nesterov=True)


@every_rule
def test_complex_parameters_are_refused_and_leave_no_group_behind(rule):
    optimizer = rule(parameters((2,)))
    with pytest.raises(ValueError, match=r"`params\[1\].dtype` \(=torch.complex64\) must be float16"):
        optimizer.add_param_group({"params": [*parameters((2,)), nn.Parameter(torch.zeros(2, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1


def test_a_group_that_is_no_dict_is_refused():
    with pytest.raises(TypeError, match="`param_group` "):
        LARS(parameters((2,)), lr=0.1).add_param_group(parameters((2,)))


@every_rule
def test_a_non_finite_gradient_spoils_its_own_layer_only(rule):
    sick, well, same = parameters((3,), (4,), (4,))
    same.data.copy_(well)
    optimizer, alone = rule([sick, well]), rule([same])
    for _ in range(2):
        well.grad = same.grad = torch.ones(4)
        sick.grad = torch.tensor([1.0, math.inf, 1.0])
        optimizer.step()
        alone.step()
    assert not sick.isfinite().all()
    assert torch.equal(well, same)
