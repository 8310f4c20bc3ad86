"""Every variant by name is its family's own rule, on every path."""

from functools import partial

import pytest
import torch

from lightning_hybrid.optim import LAMB, LARS, WarmupPolynomialDecay
from tests.optim.families import distance_from
from tests.optim.makers import PATHS
from tests.optim.test_lars import assert_same_bits, copies_of, parameters, run, set_grads
from tests.reference.families import FAMILIES
from tests.reference.lamb import lamb as lamb_in_float64

every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
lists_or_loop = pytest.mark.parametrize("path", [PATHS["loop"], PATHS["lists"]], ids=["loop", "lists"])
# Small; in one piece, with a rest; of no dimension; the last is excluded.
SHAPES = [(7,), (20, 410), (), (5, 3)]


@pytest.mark.sampled(2)
@every_path
@pytest.mark.parametrize("family", FAMILIES)
def test_fifty_steps_are_the_familys_rule(family, path):
    """All arithmetic is float64, so 1e-12 leaves some 4000 roundings."""
    assert distance_from(family, SHAPES, **path) <= 1e-12


@every_path
def test_climbing_is_the_rule_with_gradients_negated(path):
    assert distance_from("optax-nesterov", SHAPES, maximize=True, **path) <= 1e-12


@every_path
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"trust_clip": 1.0}], ids=str)
@pytest.mark.parametrize("denominator", ["sum", "joint"])
def test_zero_norms_and_a_rate_of_zero(path, options, denominator):
    """Weights of zero: ratio 1. A gradient of zero: "sum" ratio 1. At lr = 0 nothing moves, whatever the ratio."""
    for lr in (0.5, 0.0):
        layers = parameters((600,), (600,), (600,), dtype=torch.float64)
        set_grads(layers, 1)
        with torch.no_grad():
            layers[0].zero_()
            layers[1].grad.zero_()
        before = copies_of(layers)
        rule = {"weight_decay": 0.25, "trust_coefficient": 0.01, "denominator": denominator}
        LARS(layers, lr=lr, **rule, **options, **path).step()
        if lr == 0:
            assert_same_bits(layers, before)
            continue
        factor = lr * (1.9 if "nesterov" in options else 1.0)
        decay = 1.0 if denominator == "sum" else 0.01 / 0.25
        if "trust_clip" in options:
            decay = min(decay / lr, 1.0)
        torch.testing.assert_close(layers[0], -factor * layers[0].grad, rtol=1e-12, atol=0)
        torch.testing.assert_close(layers[1], before[1] * (1 - factor * decay * 0.25), rtol=1e-12, atol=0)


def assert_excluded_is(theirs, ours, num_steps=20):
    """Torch's optimizer and ours, all of it excluded, hold the same bits after the same steps."""
    params = parameters((33, 17), (20, 410), (5,), ())
    plain = copies_of(params)
    run(ours([{"params": params, "trust_ratio": False}]), params, num_steps)
    run(theirs(plain), plain, num_steps)
    assert_same_bits(params, plain)


@every_path
@pytest.mark.parametrize("nesterov", [False, True], ids="nesterov={}".format)
@pytest.mark.parametrize("momentum_form", ["lr_inside", "lr_outside", "ratio_outside"])
def test_all_excluded_is_sgd_bit_for_bit(path, momentum_form, nesterov):
    """At powers of two for rate, decay and momentum, which round no product.

    Else "lr_inside", which multiplies in another order, and the fused step, which rounds a product before it is added
    where SGD does not, differ by rounding.
    """
    options = {"lr": 0.125, "weight_decay": 2.0**-10, "momentum": 0.5, "nesterov": nesterov}
    assert_excluded_is(
        partial(torch.optim.SGD, **options), partial(LARS, momentum_form=momentum_form, **options, **path)
    )


@lists_or_loop
@pytest.mark.parametrize("foreach", [False, True], ids="theirs={}".format)
def test_all_excluded_is_sgd_and_adamw_bit_for_bit_at_any_numbers(path, foreach):
    sgd = {"lr": 0.1, "weight_decay": 1e-3, "momentum": 0.9, "nesterov": True}
    adamw = {"lr": 0.03, "weight_decay": 0.1, "eps": 1e-6, "betas": (0.85, 0.97)}
    ours = partial(LARS, momentum_form="lr_outside", **sgd, **path)
    assert_excluded_is(partial(torch.optim.SGD, foreach=foreach, **sgd), ours)
    assert_excluded_is(partial(torch.optim.AdamW, foreach=foreach, **adamw), partial(LAMB, **adamw, **path))


LAMB_FORMS = {
    "published": {},  # bias correction: the published paper's Algorithm 2
    "early": {"bias_correction": False},  # arXiv v1 to v3, and most ports
    "published-clip": {"trust_clip": 0.5},
    "early-clip": {"bias_correction": False, "trust_clip": 0.05},
    "bounded": {"weight_norm_bounds": (2.2, 3.0)},  # at first one of three layers below, one above
    "nvlamb": {"max_grad_norm": 3.0},  # NVIDIA's: all gradients clipped together
    "all": {"bias_correction": False, "trust_clip": 0.5, "max_grad_norm": 3.0},
}


@every_path
@pytest.mark.parametrize("capturable", [False, True], ids="capturable={}".format)
@pytest.mark.parametrize("form", LAMB_FORMS)
def test_fifty_steps_of_lamb_are_its_rule(form, path, capturable):
    """All arithmetic is float64, so 1e-12 leaves some 4000 roundings. `maximize` and back: signs negated twice."""
    layers = parameters((7,), (5, 3), (2, 2, 2), dtype=torch.float64)
    start = [layer.detach().flatten().tolist() for layer in layers]
    common = {"weight_decay": 0.1, **LAMB_FORMS[form]}
    optimizer = LAMB(layers, lr=0.5, betas=(0.9, 0.99), maximize=True, capturable=capturable, **common, **path)
    schedule = WarmupPolynomialDecay(optimizer, total_steps=50, warmup_steps=10)
    gradients, lrs = [], []
    for step in range(50):
        # Norms of about 6 and 1.2: `max_grad_norm=3` clips some steps and not others.
        set_grads(layers, step + 1, scale=1.0 if step % 3 else 0.2)
        gradients.append([layer.grad.flatten().tolist() for layer in layers])
        for layer in layers:
            layer.grad = -layer.grad
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    ends = lamb_in_float64(start, gradients, lrs, beta1=0.9, beta2=0.99, eps=1e-6, **common)
    for layer, end in zip(layers, ends, strict=True):
        expected = torch.tensor(end, dtype=torch.float64)
        assert torch.linalg.vector_norm(layer.flatten() - expected) <= 1e-12 * torch.linalg.vector_norm(expected)


@every_path
def test_lamb_at_zero_norms_and_a_rate_of_zero(path):
    for lr in (0.5, 0.0):
        layers = parameters((6,), (6,), dtype=torch.float64)
        with torch.no_grad():
            layers[0].zero_()
        before = copies_of(layers)
        layers[0].grad, layers[1].grad = torch.ones_like(layers[0]), torch.zeros_like(layers[1])
        LAMB(layers, lr=lr, eps=0.5, **path).step()
        # |w| = 0 and |u| = 0: ratio 1, so AdamW's step lr / (1 + eps) and none.
        torch.testing.assert_close(layers[0], torch.full_like(layers[0], -lr / 1.5), rtol=1e-12, atol=0)
        assert_same_bits(layers[1:], before[1:])
