"""Behavior that LARS and LAMB have in common."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_hybrid.optim import LAMB, LARS
from lightning_hybrid.optim.trust_ratio import tensor_norms
from tests.optim.makers import assert_same_bits, copies_of, parameters, run, set_grads
from tests.scenes import same

RULES = {
    "lars-inside": partial(LARS, lr=2.0, weight_decay=0.01),
    "lars-outside": partial(LARS, lr=2.0, momentum_form="lr_outside", nesterov=True),
    "lars-joint": partial(
        LARS, lr=2.0, weight_decay=0.01, momentum_form="ratio_outside", denominator="joint"
    ),
    "lamb": partial(LAMB, lr=0.1, weight_decay=0.01),
    "lamb-early": partial(LAMB, lr=0.1, weight_decay=0.01, bias_correction=False),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


@every_rule
@pytest.mark.parametrize("foreach", [False, True], ids="foreach={}".format)
def test_parameters_of_mixed_dtypes_step_as_each_alone(rule, foreach):
    mixed = [
        *parameters((4,), dtype=torch.float16),
        *parameters((5,), (6,)),
        *parameters((3,), dtype=torch.float64),
    ]
    alone = copies_of(mixed)
    together = rule(mixed, foreach=foreach)
    optimizers_of_one = [rule([param]) for param in alone]
    for step in range(3):
        set_grads(mixed, step)
        together.step()
        set_grads(alone, step)
        for optimizer in optimizers_of_one:
            optimizer.step()
    assert_same_bits(mixed, alone)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_float32_but_for_one_rounding_at_the_end(rule, dtype):
    """A float32 parameter that is rounded to `dtype` after each step ends with the same bits."""
    halves = parameters((40, 30), (7,), (600_011,), dtype=dtype)
    floats = [nn.Parameter(param.detach().float()) for param in halves]
    optimizer_of_halves = rule(halves)
    optimizer_of_floats = rule(floats)
    for step in range(4):
        set_grads(halves, step)
        for half, single in zip(halves, floats, strict=True):
            single.grad = half.grad.float()
        optimizer_of_halves.step()
        optimizer_of_floats.step()
        for single in floats:
            single.data.copy_(single.to(dtype))
    for half, single in zip(halves, floats, strict=True):
        torch.testing.assert_close(half.float(), single.detach(), rtol=2e-2, atol=1e-4)
        if half.numel() < 2**15:  # larger half-precision norms are added in other units
            assert_same_bits([half], [single.to(dtype)])
            assert same(optimizer_of_halves.state[half], optimizer_of_floats.state[single])


def test_a_checkpoint_from_before_an_option_existed_gets_its_default():
    (param,) = parameters((4,))
    optimizer = LARS([param], lr=1.0, nesterov=True)
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["nesterov"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["nesterov"] is True


def test_a_checkpoint_of_sgd_leaves_the_options_that_it_does_not_have():
    layer = nn.Linear(3, 2)
    sgd = torch.optim.SGD([{"params": [layer.weight]}, {"params": [layer.bias]}], lr=0.1)
    excluded = {"trust_ratio": False, "excluded_lr_mult": 0.01}
    groups = [{"params": [layer.weight], "eps": 1e-8}, {"params": [layer.bias], **excluded}]
    optimizer = LARS(groups, lr=10.0, direction="orthogonal")
    optimizer.load_state_dict(sgd.state_dict())

    adapted, biases = optimizer.param_groups
    assert (adapted["lr"], adapted["eps"], adapted["direction"]) == (0.1, 1e-8, "orthogonal")
    assert biases.items() >= {**excluded, "lr": 0.1, "direction": "momentum"}.items()


def test_named_parameters_and_the_keys_of_schedulers_are_welcome():
    model = nn.Linear(3, 2)
    optimizer = LARS(model.named_parameters(), lr=1.0)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    params = list(model.parameters())
    LARS([{"params": params, "name": "all", "initial_lr": 1.0, "swa_lr": 0.1}], lr=1.0)


COMMON = {
    "lr": [-1.0, math.nan, math.inf, "fast", True, *map(torch.tensor, ([0.1], -0.1, 1, 1j))],
    "weight_decay": [-1e-4],
    "eps": [-1e-8],
    "excluded_lr_mult": [-1.0],
    "trust_clip": [0.0],
    "foreach": [1],
    "fused": [1],
    "maximize": [None],
}
OF_LARS = {
    "momentum": [1.0],
    "trust_coefficient": [0.0],
    "nesterov": [1],
    "momentum_form": ["B"],
    "denominator": ["both"],
    "direction": ["muon"],
}
OF_LAMB = {
    "betas": [(1.0, 0.999), (0.9, -0.1), 0.9],
    "bias_correction": ["no"],
    "max_grad_norm": [0.0],
    "weight_norm_bounds": [(2.0, 1.0), (-1.0, 1.0), (0.0, 0.0)],
}
BAD = {LARS: COMMON | OF_LARS, LAMB: COMMON | OF_LAMB}


@pytest.mark.parametrize(
    ("rule", "name"), [(rule, name) for rule, rows in BAD.items() for name in rows]
)
def test_every_bad_argument_is_refused_for_the_optimizer_and_for_a_group(rule, name):
    for value in BAD[rule][name]:
        for params, options in (
            (parameters((2,)), {"lr": 0.1, name: value}),
            ([{"params": parameters((2,)), name: value}], {"lr": 0.1}),
        ):
            with pytest.raises(ValueError, match=rf"^`{name}[^`]*` \(="):
                rule(params, **options)


@pytest.mark.parametrize(
    ("rule", "group", "options", "words"),
    [
        # A typo.
        (
            LARS,
            {"trust_ration": False},
            {},
            r"^`trust_ration` \(=False\) is not an option of LARS",
        ),
        (LAMB, {"trust_ratio": 0}, {}, r"^`trust_ratio` \(=0\)"),
        (
            LAMB,
            {"max_grad_norm": 2.0},
            {"max_grad_norm": 1.0},
            r"\(=2.0\) must equal the optimizer's value \(=1.0\)",
        ),
        (
            LARS,
            {},
            {"momentum": 0.0, "nesterov": True},
            r"`momentum` \(=0\) must be above 0 if `nesterov` is True",
        ),
        (
            LARS,
            {},
            {"fused": True, "foreach": True},
            r"`fused` \(=True\) and `foreach` \(=True\) cannot be combined",
        ),
        (
            LAMB,
            {"fused": True},
            {},
            r"`fused` \(=True\) must equal the optimizer's value \(=None\).* to LAMB",
        ),
        (LARS, {}, {"direction": "orthogonal", "fused": True}, "`fused` .* cannot be combined"),
        (
            LARS,
            {},
            {"direction": "orthogonal", "trust_clip": 1.0},
            "`trust_clip` .* cannot be combined",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(rule, group, options, words):
    with pytest.raises(ValueError, match=words):
        rule([{"params": parameters((2,)), **group}], **{"lr": 0.1, **options})


@every_rule
@pytest.mark.parametrize(
    "keys",
    [
        {"lr_scale": 0.5},  # layer decay of BEiT and ConvNeXt
        {"layer_id": 3},
        # A group that another torch optimizer has filled in.
        {"dampening": 0.0, "amsgrad": False},
        {"weight_decay_scale": 0.1, "lr_mult": 2.0, "no_weight_decay": True},
    ],
)
def test_a_group_keeps_the_keys_that_a_schedule_of_the_user_reads(rule, keys):
    first = parameters((2,))
    second = parameters((3,))
    optimizer = rule([{"params": first, **keys}])
    optimizer.add_param_group({"params": second, **keys})
    for group in optimizer.param_groups:
        assert keys.items() <= group.items()
        group["lr"] = 0.1 * group.get("lr_scale", 1.0)  # as such a schedule does
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert keys.items() <= optimizer.param_groups[1].items()


@pytest.mark.parametrize(
    "key", ["weigth_decay", "trust_ration", "excluded_lr_mul", "trust_coeficient", "momentun"]
)
def test_a_misspelt_option_of_a_group_is_refused_with_the_option_that_was_meant(key):
    with pytest.raises(
        ValueError,
        match=rf"^`{key}` \(=0.5\) is not an option of LARS and would be ignored. Did you mean `\w+`\?",
    ):
        LARS([{"params": parameters((2,)), key: 0.5}], lr=0.1)


@every_rule
def test_complex_parameters_and_what_is_no_group_are_refused_and_leave_no_group_behind(rule):
    optimizer = rule(parameters((2,)))
    group = {"params": parameters((3,))}
    optimizer.add_param_group(group)
    assert group.keys() == {"params"}, "the caller's dict"
    complex_param = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(
        ValueError, match=r"`params\[1\].dtype` \(=torch.complex64\) must be float16"
    ):
        optimizer.add_param_group({"params": [*parameters((2,)), complex_param]})
    with pytest.raises(TypeError, match="`param_group` "):
        LARS(parameters((2,)), lr=0.1).add_param_group(parameters((2,)))
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("rule", [RULES["lars-joint"], RULES["lamb"]])
def test_a_large_layer_is_stepped_in_blocks_to_the_same_end(rule):
    """On the CPU a single layer is processed in blocks, and a list as a whole, with squares added in another order."""
    in_blocks = parameters((1100, 1000), (3,))
    whole = parameters((1100, 1000), (3,))
    for params, foreach in ((in_blocks, False), (whole, True)):
        run(rule(params, foreach=foreach), params, 2)
    torch.testing.assert_close(in_blocks, whole, rtol=1e-6, atol=1e-7)


FC6 = 4096 * 9216  # elements of AlexNet's largest layer


def exact_norm(tensor: Tensor) -> float:
    sums = [part.double().square().sum().item() for part in tensor.split(1 << 16)]
    return math.sqrt(math.fsum(sums))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_norm_of_a_large_constant_layer_is_right_to_1e_6(dtype):
    """Equal addends are the worst case, because each rounds the same way. The norm of n times c is c * sqrt(n)."""
    layer = torch.full((FC6,), 0.01, dtype=dtype)
    assert tensor_norms([layer]).item() == pytest.approx(layer[0].item() * math.sqrt(FC6), rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    num=st.sampled_from([0, 1, 255, 256, 32768, 32769, 65_537, (1 << 20) + 1, (1 << 20) + 300]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_norms_of_any_size_and_dtype_are_right(num, dtype, seed):
    tensor = torch.randn(num, generator=torch.Generator().manual_seed(seed)).to(dtype)
    (result,) = tensor_norms([tensor])
    assert result.dtype == torch.float64
    assert result.item() == pytest.approx(exact_norm(tensor), rel=1e-6)


def test_norm_does_not_depend_on_the_layout():
    x = torch.randn(51_200, generator=torch.Generator().manual_seed(1))
    channels_last = x.view(64, 32, 5, 5).to(memory_format=torch.channels_last)
    for tensor in (channels_last, x.view(640, 80).T, x[::2], x[:1].expand(40_000)):
        expected = exact_norm(tensor.flatten())
        assert tensor_norms([tensor]).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("grad_format", [torch.channels_last, torch.contiguous_format], ids=str)
def test_channels_last_weights_take_the_same_steps(grad_format):
    """Blocks follow the memory order, which is only right if weight, gradient and buffer share their layout."""
    plain = parameters((160, 128, 6, 6))
    last = [nn.Parameter(plain[0].detach().to(memory_format=torch.channels_last))]
    for params in (plain, last):
        optimizer = LARS(params, lr=4.0, weight_decay=0.01)
        for step in range(2):
            set_grads(params, step + 1)
            if params is last:
                params[0].grad = params[0].grad.to(memory_format=grad_format)
            optimizer.step()
    torch.testing.assert_close(last, plain, rtol=1e-6, atol=1e-7)
    assert optimizer.state[last[0]]["momentum_buffer"].stride() == last[0].stride()


def test_a_group_of_lamb_with_a_bound_of_its_own_is_refused():
    """One bound applies to the gradients of all groups together."""
    for bound, bound_of_group in ((None, 2.0), (1.0, 2.0), (1.0, None)):
        group = {"params": parameters((2,)), "max_grad_norm": bound_of_group}
        words = (
            rf"^`max_grad_norm` \(={bound_of_group}\) must equal the optimizer's value \(={bound}\)"
        )
        with pytest.raises(ValueError, match=words):
            LAMB([group], lr=0.1, max_grad_norm=bound)
