import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_hybrid.optim import LARS, ParamGroups, param_groups


class HomeMadeNorm(nn.Module):
    """Normalization as in many language models. It is no subclass of torch's layers, so only its shape reveals it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.ones(6, 6))
        self.bias = nn.Parameter(torch.zeros(2, 3))
        self.gate_bias = nn.Parameter(torch.zeros(2, 3))
        self.biased_kernel = nn.Parameter(torch.ones(2, 3))
        self.temperature = nn.Parameter(torch.tensor(1.0))


def model():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.GroupNorm(2, 6),
        nn.LayerNorm((6, 4, 4)),
        nn.InstanceNorm2d(6, affine=True),
        nn.SyncBatchNorm(6),
        nn.RMSNorm((6, 4, 4)),
        nn.LocalResponseNorm(2),
        nn.Sequential(Gate(), HomeMadeNorm()),
        nn.LSTM(6, 6),
        nn.MultiheadAttention(6, 2, add_bias_kv=True),
        nn.Embedding(10, 6),
    )


ADAPTED = ["0.weight", "8.0.kernel", "8.0.biased_kernel", "9.weight_ih_l0", "9.weight_hh_l0"]
ADAPTED += ["10.in_proj_weight", "10.out_proj.weight", "11.weight"]


def names_of(groups, model):
    names = {param: name for name, param in model.named_parameters()}
    return [[names[param] for param in group["params"]] for group in groups]


def test_only_weights_that_are_no_normalization_are_adapted_and_decay_in_the_models_order():
    net = model()
    # The groups may be copied.
    groups = copy.deepcopy(param_groups(net, 0.1), {id(param): param for param in net.parameters()})
    assert "adapted" in groups.report()
    adapted, excluded = names_of(groups, net)
    assert adapted == ADAPTED
    assert excluded == [name for name, _ in net.named_parameters() if name not in ADAPTED]
    assert [(group["weight_decay"], group["trust_ratio"]) for group in groups] == [
        (0.1, True),
        (0.0, False),
    ]


def test_each_rule_can_be_had_alone_and_normalization_is_known_by_type():
    linear = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    rows = {(): [], ("bias",): ["0.bias", "1.bias"], ("vector",): ["0.bias", "1.weight", "1.bias"]}
    for rules, excluded in rows.items():
        assert names_of(param_groups(linear, 0.1, rules=rules), linear)[1] == excluded
    net = model()
    _, excluded = names_of(param_groups(net, 0.1, rules=("normalization",)), net)
    assert excluded == [
        f"{index}.{name}" for index in range(1, 6) for name in ("weight", "bias")
    ] + ["6.weight"]


def head_or_small(name, param, module):
    return name.startswith("11.") or param.numel() < 7


@pytest.mark.parametrize(
    ("exclude", "gone"),
    [
        (nn.Embedding, {"11.weight"}),
        ([nn.MultiheadAttention], {"10.in_proj_weight", "10.out_proj.weight"}),
        ("9.*", {"9.weight_ih_l0", "9.weight_hh_l0"}),
        (["11.weight", "*.kernel"], {"11.weight", "8.0.kernel"}),
        (head_or_small, {"11.weight", "8.0.biased_kernel"}),
    ],
    ids=["type", "type-with-children", "pattern", "patterns", "predicate"],
)
def test_more_can_be_excluded_by_type_pattern_or_predicate(exclude, gone):
    net = model()
    adapted, excluded = names_of(param_groups(net, 0.1, exclude), net)
    assert adapted == [name for name in ADAPTED if name not in gone]
    assert gone <= set(excluded)


def test_a_shared_parameter_comes_once_and_is_excluded_if_any_of_its_places_is():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    net[1].weight = net[0].weight
    assert names_of(param_groups(net, 0.1), net) == [["0.weight"], []]
    assert names_of(param_groups(net, 0.1, nn.Linear), net) == [[], ["0.weight"]]
    assert names_of(param_groups(net, 0.1, "1.weight"), net) == [[], ["0.weight"]]


def test_frozen_parameters_are_left_out_unless_asked_for():
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    net[0].requires_grad_(False)
    assert names_of(param_groups(net, 0.1), net) == [["1.weight"], ["1.bias"]]
    both = param_groups(net, 0.1, include_frozen=True)
    assert names_of(both, net) == [["0.weight", "1.weight"], ["0.bias", "1.bias"]]
    # The pattern matches, although the parameter is frozen.
    assert names_of(param_groups(net, 0.1, "0.weight"), net) == [
        ["1.weight"],
        ["1.bias"],
    ]


def test_parametrized_biases_and_normalizations_are_recognized():
    net = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm((2, 2)))
    nn.utils.parametrize.register_parametrization(net[0], "bias", nn.Identity())
    nn.utils.parametrize.register_parametrization(net[1], "weight", nn.Identity())
    parametrizations.weight_norm(net[0])
    adapted, excluded = names_of(param_groups(net, 0.1, rules=("bias", "normalization")), net)
    assert adapted == ["0.parametrizations.weight.original0", "0.parametrizations.weight.original1"]
    assert len(excluded) == 3


@pytest.mark.parametrize("optimizer_type", [LARS, torch.optim.AdamW])
@pytest.mark.parametrize("named", [False, True])
def test_any_optimizer_takes_the_groups_even_if_one_is_empty(optimizer_type, named):
    for net in (nn.Linear(3, 2), nn.Linear(3, 2, bias=False), nn.BatchNorm1d(3)):
        optimizer = optimizer_type(param_groups(net, 0.1, named=named), lr=0.1)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert ("param_names" in optimizer.param_groups[0]) == named
        if not named:
            optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})


def test_the_report_counts_every_parameter_once_under_its_reason():
    net = model()
    groups = param_groups(net, 0.1, [nn.Embedding, "9.weight_hh*", head_or_small])
    assert isinstance(groups, ParamGroups)
    rows = [re.split(r"  +", line.strip()) for line in groups.report().splitlines()[1:]]
    labels = {label for label, *_ in rows}
    reasons = ("bias", "vector", "BatchNorm2d", "RMSNorm", "in Embedding", "pattern '9.weight_hh*'")
    assert labels >= {"adapted", *(f"excluded: {reason}" for reason in reasons)}
    assert any("predicate head_or_small" in label for label in labels)
    num_tensors = 0
    num_elements = 0
    for _, tensors, elements, *_ in rows:
        num_tensors += int(tensors.replace(",", ""))
        num_elements += int(elements.replace(",", ""))
    assert num_tensors == len(list(net.parameters()))
    assert num_elements == sum(param.numel() for param in net.parameters())


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (
            nn.ReLU,
            {},
            r"`model` \(=ReLU\) has no trainable parameters, because it has no parameters at all",
        ),
        (lambda: nn.Linear(2, 2).requires_grad_(False), {}, "all 2 parameters are frozen"),
        (lambda: nn.LazyLinear(2), {}, r"`weight` \(=UninitializedParameter\) has no shape yet"),
        (lambda: nn.Linear(2, 2), {"weight_decay": -1.0}, r"`weight_decay` \(=-1.0\) must be"),
        (
            lambda: nn.Linear(2, 2),
            {"exclude": "WEIGHT"},
            r"`exclude` \(='WEIGHT'\) matches none .* weight",
        ),
        (lambda: nn.Linear(2, 2), {"exclude": [3]}, r"`exclude` \(=3\) must be a module type"),
        (
            lambda: nn.Linear(2, 2),
            {"rules": ("norm",)},
            r"`rules` \(=\('norm',\)\) contains 'norm', which is not a rule",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_what_cannot_be_meant_is_refused(build, arguments, message):
    with pytest.raises(ValueError, match=message):
        param_groups(build(), **{"weight_decay": 0.1, **arguments})


def test_parameters_in_place_of_the_module_are_answered_with_the_call_to_write():
    net = nn.Linear(2, 2)
    for params in (net.parameters(), list(net.parameters()), net.named_parameters()):
        with pytest.raises(
            TypeError,
            match=r"^`model` must be a module, but it is of type \w+\. .* Call param_groups\(net, \.\.\.\)",
        ):
            param_groups(params, weight_decay=0.1)
