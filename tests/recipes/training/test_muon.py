"""The arm of torch's Muon: kernels as matrices, SGD for the rest, and a state that resumes."""

import copy

import torch
from torch import nn

from lightning_hybrid.optim import param_groups
from recipes.training.muon import MuonWithSGD


def trained(model, optimizer, seeds):
    for seed in seeds:
        for index, param in enumerate(model.parameters()):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * seed + index))
        optimizer.step()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(6, 4))


def test_kernels_move_as_matrices_of_torchs_muon_and_the_rest_by_sgd():
    model, plain = network(), network()
    optimizer = MuonWithSGD(param_groups(model, weight_decay=0.1), lr=0.02, momentum=0.9, excluded_lr_mult=0.5)
    matrices = [nn.Parameter(param.detach().flatten(1)) for param in (plain[0].weight, plain[3].weight)]
    muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.9, weight_decay=0.1)
    rest = [plain[0].bias, plain[1].weight, plain[1].bias, plain[3].bias]
    sgd = torch.optim.SGD(rest, lr=0.01, momentum=0.9)
    for seed in range(3):
        trained(model, optimizer, [seed])
        own = dict(zip(plain.parameters(), model.parameters(), strict=True))
        matrices[0].grad, matrices[1].grad = (own[w].grad.flatten(1) for w in (plain[0].weight, plain[3].weight))
        for param in rest:
            param.grad = own[param].grad
        muon.step(), sgd.step()
    assert torch.equal(model[0].weight.flatten(1), matrices[0])
    assert torch.equal(model[3].weight, matrices[1])
    assert all(torch.equal(own[param], param) for param in rest)


def test_it_resumes_to_the_bit_and_follows_the_schedule():
    model = network()
    optimizer = MuonWithSGD(param_groups(model, weight_decay=0.1), lr=0.02)
    trained(model, optimizer, range(2))
    other = copy.deepcopy(model)
    resumed = MuonWithSGD(param_groups(other, weight_decay=0.1), lr=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, mine in ((optimizer, model), (resumed, other)):
        one.param_groups[0]["lr"] = 0.003
        trained(mine, one, range(2, 4))
    assert all(map(torch.equal, model.parameters(), other.parameters()))
