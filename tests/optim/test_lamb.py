import copy

import pytest
import torch
from torch import nn

from lightning_hybrid.optim import LAMB, WarmupPolynomialDecay
from tests.optim.test_lars import assert_same_bits, copies_of, parameters, run, set_grads
from tests.reference.lamb import lamb as lamb_in_float64


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias_correction": False},
        {"trust_clip": 0.5},
        {"max_grad_norm": 3.0},
        {"bias_correction": False, "trust_clip": 0.5, "max_grad_norm": 3.0},
    ],
    ids=["paper", "uncorrected", "trust_clip", "max_grad_norm", "all"],
)
def test_lamb_agrees_with_the_paper_in_float64(options):
    """50 steps of warm-up and poly-2; all arithmetic is float64, so 1e-12 leaves some 4000 roundings."""
    layers = parameters((7,), (5, 3), (2, 2, 2), dtype=torch.float64)
    start = [layer.detach().flatten().tolist() for layer in layers]
    optimizer = LAMB(layers, lr=0.5, betas=(0.9, 0.99), weight_decay=0.1, **options)
    schedule = WarmupPolynomialDecay(optimizer, total_steps=50, warmup_steps=10)
    gradients, lrs = [], []
    for step in range(50):
        # Norms of about 6 and 1.2: `max_grad_norm=3` clips some steps and not others.
        set_grads(layers, step + 1, scale=1.0 if step % 3 else 0.2)
        gradients.append([layer.grad.flatten().tolist() for layer in layers])
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    ends = lamb_in_float64(start, gradients, lrs, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1, **options)
    for layer, end in zip(layers, ends, strict=True):
        expected = torch.tensor(end, dtype=torch.float64)
        assert torch.linalg.vector_norm(layer.flatten() - expected) <= 1e-12 * torch.linalg.vector_norm(expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("foreach", [False, True], ids="foreach={}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"weight_decay": 0.1}, {"weight_decay": 0.0, "maximize": True}],
    ids=["decay", "maximize"],
)
def test_lamb_without_trust_is_adamw_bit_for_bit(options, dtype, foreach):
    ours = parameters((33, 17), (5,), (), (600_011,), dtype=dtype)
    theirs = copies_of(ours)
    optimizers = (
        LAMB([{"params": ours, "trust_ratio": False}], lr=0.03, eps=1e-6, foreach=foreach, **options),
        torch.optim.AdamW(theirs, lr=0.03, eps=1e-6, foreach=foreach, **options),
    )
    for optimizer, params in zip(optimizers, (ours, theirs), strict=True):
        schedule = WarmupPolynomialDecay(optimizer, total_steps=10)
        for step in range(9):
            run(optimizer, params, 1, first=step)
            schedule.step()
    assert_same_bits(ours, theirs)


def test_adamw_state_continues_in_lamb_without_trust():
    ours, theirs = parameters((6, 5)), parameters((6, 5))
    adamw = torch.optim.AdamW(theirs, lr=0.03, weight_decay=0.1)
    run(adamw, theirs, 3)
    lamb = LAMB([{"params": ours, "trust_ratio": False}], lr=0.03, eps=1e-8, weight_decay=0.1)
    state = copy.deepcopy(adamw.state_dict()["state"])  # torch shares the tensors that it is given
    lamb.load_state_dict({"state": state, "param_groups": lamb.state_dict()["param_groups"]})
    ours[0].data.copy_(theirs[0])
    run(lamb, ours, 2, first=3)
    run(adamw, theirs, 2, first=3)
    assert_same_bits(ours, theirs)


def test_excluded_groups_use_a_multiplied_rate():
    (weight,), (same,) = parameters((6,)), parameters((6,))
    group = {"params": [weight], "trust_ratio": False, "excluded_lr_mult": 0.25}
    run(LAMB([group], lr=0.5), [weight], 3)
    run(torch.optim.AdamW([same], lr=0.125, eps=1e-6, weight_decay=0.0), [same], 3)
    assert_same_bits([weight], [same])


@pytest.mark.parametrize("lr", [0.0, 0.01])
def test_the_first_step_is_lr_of_the_weight(lr):
    layers = parameters((40, 9), (3,), dtype=torch.float64)
    before = copies_of(layers)
    set_grads(layers, 1, scale=1e3)
    LAMB(layers, lr=lr, weight_decay=0.1).step()
    for layer, old in zip(layers, before, strict=True):
        assert ((layer - old).norm() / old.norm()).item() == pytest.approx(lr, rel=1e-9)


def test_a_layer_of_zeros_moves_as_adamw_does():
    ours, theirs = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    for param, optimizer in (
        (ours, LAMB([ours], lr=0.1)),
        (theirs, torch.optim.AdamW([theirs], lr=0.1, eps=1e-6, weight_decay=0.0)),
    ):
        param.grad = torch.tensor([1.0, -2.0, 0.0])
        optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_gradients_are_clipped_together_over_groups_and_only_if_asked():
    """Two gradients of norm 3 and 4: together 5. Adam forgets their common scale at once, so look at the moments."""
    for bound, factor in ((None, 1.0), (10.0, 1.0), (2.5, 0.5)):
        first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, dtype=torch.float64))
        first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64)
        optimizer = LAMB([{"params": [first]}, {"params": [second]}], lr=0.1, max_grad_norm=bound)
        optimizer.step()
        assert optimizer.state[first]["exp_avg"].item() == pytest.approx(0.1 * 3.0 * factor)
        assert optimizer.state[second]["exp_avg"].item() == pytest.approx(0.1 * 4.0 * factor)
        assert (first.grad.item(), second.grad.item()) == (3.0, 4.0)
        optimizer.zero_grad()
        optimizer.step()  # no gradient, no norm, no error


def test_max_grad_norm_is_no_option_of_a_group():
    with pytest.raises(ValueError, match=r"`max_grad_norm` \(=2.0\) must be the optimizer's \(=1.0\)"):
        LAMB([{"params": parameters((2,)), "max_grad_norm": 2.0}], lr=0.1, max_grad_norm=1.0)


@pytest.mark.parametrize("bias_correction", [False, True])
def test_a_large_layer_is_stepped_in_blocks_to_the_same_end(bias_correction):
    """Alone on the CPU it is worked on in blocks, in a list as a whole; |u| is then summed in another order."""
    in_blocks, whole = parameters((1100, 1000), (3,)), parameters((1100, 1000), (3,))
    for params, foreach in ((in_blocks, False), (whole, True)):
        optimizer = LAMB(params, lr=0.1, weight_decay=0.01, bias_correction=bias_correction, foreach=foreach)
        run(optimizer, params, 2)
    torch.testing.assert_close(in_blocks, whole, rtol=1e-6, atol=1e-7)
