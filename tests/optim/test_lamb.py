import copy

import pytest
import torch
from torch import nn

from lightning_hybrid.optim import LAMB
from tests.optim.test_lars import assert_same_bits, parameters, run


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
