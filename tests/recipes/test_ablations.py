"""What is taken out is out, and nothing else."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lightning_hybrid.models import AlexNetBN
from lightning_hybrid.optim import LARS, param_groups
from recipes import ablations


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


def trained(make, weight_decay=0.01, num_steps=4):
    model = network()
    optimizer = make(param_groups(model, weight_decay=weight_decay))
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_lars_without_trust_ratio_is_sgd_bit_for_bit():
    form = {"momentum_form": "lr_outside", "weight_decay": 0.01, "excluded_lr_mult": 1.0}
    lars = trained(lambda groups: ablations.lars_without_trust_ratio(groups, lr=0.1, momentum=0.9, **form))
    sgd = trained(lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    assert all(torch.equal(one, other) for one, other in zip(lars, sgd, strict=True))


def test_decay_everywhere_reaches_biases_and_normalisation_and_changes_no_weight_at_first():
    decayed = trained(
        lambda groups: ablations.lars_with_decay_everywhere(groups, lr=1.0, weight_decay=0.01), num_steps=1
    )
    usual = trained(lambda groups: LARS(groups, lr=1.0, weight_decay=0.01), num_steps=1)
    for one, other, start in zip(decayed, usual, network().parameters(), strict=True):
        assert torch.equal(one, other) == (one.dim() > 1 or not start.any())


def test_both_take_bare_parameters_as_the_recipe_tries_them_out():
    for make in (ablations.lars_without_trust_ratio, ablations.lars_with_decay_everywhere):
        assert len(make([nn.Parameter(torch.zeros(1))], lr=1.0, weight_decay=0.0).param_groups) == 1


def test_the_network_without_the_last_normalisation_is_else_the_same():
    settings = {"num_classes": 10, "in_channels": 1, "image_size": 16, "width": 0.05}
    torch.manual_seed(0)
    usual = AlexNetBN(**settings).eval()
    torch.manual_seed(0)
    less = ablations.alexnet_without_pool5_norm(**settings).eval()
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in less.modules()) == 5
    missing, unexpected = less.load_state_dict(usual.state_dict(), strict=False)
    assert missing == []
    assert {name.rpartition(".")[0] for name in unexpected} == {"features.18"}
    images = torch.randn(2, 1, 16, 16)
    eps = usual.features[-1].eps  # running statistics are still mean 0, variance 1
    assert torch.allclose(less.features(images), usual.features(images) * (1 + eps) ** 0.5, rtol=1e-5)


def test_all_of_them_are_reached_from_a_study():
    text = (Path(__file__).resolve().parents[2] / "conf" / "study" / "digits.yaml").read_text()
    for name in ("lars_without_trust_ratio", "lars_with_decay_everywhere", "alexnet_without_pool5_norm"):
        assert f"_target_=recipes.ablations.{name}" in text
        assert callable(getattr(ablations, name))
