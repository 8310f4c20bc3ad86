"""Named variants, each of which equals the rule of its family on every path."""

import copy
import inspect
from functools import partial

import pytest
import torch
from torch import nn

from lightning_hybrid.optim import LAMB, LARS, WarmupPolynomialDecay
from tests.optim.makers import (
    PATHS,
    assert_same_bits,
    copies_of,
    distance,
    normals,
    parameters,
    run,
    set_grads,
)
from tests.reference.families import FAMILIES
from tests.reference.families import lamb as lamb_in_float64

every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
lists_or_loop = pytest.mark.parametrize(
    "path", [PATHS["loop"], PATHS["lists"]], ids=["loop", "lists"]
)
SHAPES = [(7,), (20, 410), ()]  # small; one piece with a remainder; a scalar
COMMON = {"momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.01}


def distance_from(family, *, maximize=False, **path):
    """Return the largest ``|w - w_family| / |w_family|`` over layers, after a warm-up and a poly-2 decay."""
    rule, named = FAMILIES[family]
    # A ceiling close to the ratio, so that both sides occur.
    if "trust_clip" in named:
        peak = 0.02
    else:
        peak = 6.0
    layers = [nn.Parameter(normals(*shape, seed=i)) for i, shape in enumerate(SHAPES)]
    starts = [layer.detach().clone() for layer in layers]
    optimizer = LARS(layers, lr=peak, maximize=maximize, **COMMON, **named, **path)
    schedule = WarmupPolynomialDecay(
        optimizer, total_steps=50, warmup_steps=10, warmup_start_lr=0.1 * peak
    )
    gradients = [[] for _ in layers]
    lrs = []
    for step in range(50):
        for index, (history, layer) in enumerate(zip(gradients, layers, strict=True)):
            layer.grad = normals(*layer.shape, seed=1000 * (step + 1) + index)
            history.append((-1 if maximize else 1) * layer.grad)
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    takes = inspect.signature(rule).parameters
    options = COMMON | {"eps": 0.0, "nesterov": False} | named
    options = {name: value for name, value in options.items() if name in takes}
    if "trust_clip" in named:
        options["clip"] = True
    return distance(layers, list(map(partial(rule, lrs=lrs, **options), starts, gradients)))


@pytest.mark.sampled(2)
@every_path
@pytest.mark.parametrize("family", FAMILIES)
def test_fifty_steps_are_the_familys_rule(family, path):
    """All arithmetic is float64, so 1e-12 allows some 4000 roundings."""
    assert distance_from(family, **path) <= 1e-12


@every_path
def test_climbing_is_the_rule_with_gradients_negated(path):
    assert distance_from("optax-nesterov", maximize=True, **path) <= 1e-12


@every_path
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("denominator", ["sum", "joint"])
def test_zero_norms_and_a_rate_of_zero(path, clip, denominator):
    """The ratio is 1 for zero weights, and for a zero gradient with "sum". With lr = 0 nothing moves at any ratio."""
    for lr in (0.5, 0.0):
        layers = parameters((600,), (600,), (600,), dtype=torch.float64)
        set_grads(layers, 1)
        with torch.no_grad():
            layers[0].zero_()
            layers[1].grad.zero_()
        before = copies_of(layers)
        rule = {"weight_decay": 0.25, "trust_coefficient": 0.01, "denominator": denominator}
        LARS(layers, lr=lr, trust_clip=clip, **rule, **path).step()
        if lr == 0:
            assert_same_bits(layers, before)
            continue
        if denominator == "sum":
            decay = 1.0
        else:
            decay = 0.01 / 0.25
        decay = decay if clip is None else min(decay / lr, clip)
        torch.testing.assert_close(layers[0], -lr * layers[0].grad, rtol=1e-12, atol=0)
        torch.testing.assert_close(
            layers[1], before[1] * (1 - lr * decay * 0.25), rtol=1e-12, atol=0
        )


def assert_excluded_is(theirs, ours, num_steps=20):
    params = parameters((33, 17), (20, 410), (5,), ())
    plain = copies_of(params)
    run(ours([{"params": params, "trust_ratio": False}]), params, num_steps)
    run(theirs(plain), plain, num_steps)
    assert_same_bits(params, plain)


@every_path
@pytest.mark.parametrize("nesterov", [False, True], ids="nesterov={}".format)
@pytest.mark.parametrize("momentum_form", ["lr_inside", "lr_outside", "ratio_outside"])
def test_all_excluded_is_sgd_bit_for_bit(path, momentum_form, nesterov):
    """The test uses powers of two for rate, decay and momentum, with which products are exact.

    With other numbers there are rounding differences: "lr_inside" multiplies in another order, and the fused step
    rounds a product before adding it where SGD does not.
    """
    options = {"lr": 0.125, "weight_decay": 2.0**-10, "momentum": 0.5, "nesterov": nesterov}
    assert_excluded_is(
        partial(torch.optim.SGD, **options),
        partial(LARS, momentum_form=momentum_form, **options, **path),
    )


@lists_or_loop
@pytest.mark.parametrize("foreach", [False, True], ids="theirs={}".format)
def test_all_excluded_is_sgd_and_adamw_bit_for_bit_at_any_numbers(path, foreach):
    sgd = {"lr": 0.1, "weight_decay": 1e-3, "momentum": 0.9, "nesterov": True}
    adamw = {"lr": 0.03, "weight_decay": 0.1, "eps": 1e-6, "betas": (0.85, 0.97)}
    ours = partial(LARS, momentum_form="lr_outside", **sgd, **path)
    assert_excluded_is(partial(torch.optim.SGD, foreach=foreach, **sgd), ours)
    assert_excluded_is(
        partial(torch.optim.AdamW, foreach=foreach, **adamw),
        partial(LAMB, **adamw | {"lr": 0.12}, excluded_lr_mult=0.25, **path),
    )


LAMB_FORMS = {
    "published": {},  # bias correction, as in the published paper's Algorithm 2
    "early": {"bias_correction": False},  # arXiv v1 to v3, and most ports
    "published-clip": {"trust_clip": 0.5},
    "early-clip": {"bias_correction": False, "trust_clip": 0.05},
    # at first, one of three layers is below and one above
    "bounded": {"weight_norm_bounds": (2.2, 3.0)},
    "nvlamb": {"max_grad_norm": 3.0},  # NVIDIA's, with all gradients clipped together
    "all": {"bias_correction": False, "trust_clip": 0.5, "max_grad_norm": 3.0},
}


@pytest.mark.sampled(4)
@every_path
@pytest.mark.parametrize("capturable", [False, True], ids="capturable={}".format)
@pytest.mark.parametrize("form", LAMB_FORMS)
def test_fifty_steps_of_lamb_are_its_rule(form, path, capturable):
    """In float64, 1e-12 allows some 4000 roundings. `maximize` with negated gradients negates the signs twice."""
    layers = parameters((7,), (5, 3), (2, 2, 2), dtype=torch.float64)
    layers[2].data.zero_()  # its first ratio is 1
    starts = [layer.detach().clone() for layer in layers]
    common = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, **LAMB_FORMS[form]}
    groups = [{"params": layers[:1]}, {"params": layers[1:]}]  # clipped together
    optimizer = LAMB(groups, lr=0.5, maximize=True, capturable=capturable, **common, **path)
    schedule = WarmupPolynomialDecay(optimizer, total_steps=50, warmup_steps=10)
    gradients = []
    lrs = []
    for step in range(50):
        # The norms are about 6 and 1.2, so `max_grad_norm=3` clips some steps and not others.
        set_grads(layers, step + 1, scale=1.0 if step % 3 else 0.2)
        gradients.append([layer.grad for layer in layers])
        for layer in layers:
            layer.grad = -layer.grad
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    for layer, end in zip(layers, lamb_in_float64(starts, gradients, lrs, **common), strict=True):
        assert (layer - end).norm() <= 1e-12 * end.norm()


@pytest.mark.parametrize("counts", ["tensors", "numbers"])
def test_adamw_state_continues_in_lamb_without_trust(counts):
    """Step counts are numbers in files of torch before 1.12."""
    ours = parameters((6, 5))
    theirs = parameters((6, 5))
    adamw = torch.optim.AdamW(theirs, lr=0.03, weight_decay=0.1)
    run(adamw, theirs, 3)
    lamb = LAMB([{"params": ours, "trust_ratio": False}], lr=0.03, eps=1e-8, weight_decay=0.1)
    state = copy.deepcopy(adamw.state_dict()["state"])  # torch shares the tensors that it receives
    if counts == "numbers":
        state[0]["step"] = int(state[0]["step"])
    lamb.load_state_dict({"state": state, "param_groups": lamb.state_dict()["param_groups"]})
    ours[0].data.copy_(theirs[0])
    run(lamb, ours, 2, first=3)
    run(adamw, theirs, 2, first=3)
    assert_same_bits(ours, theirs)
