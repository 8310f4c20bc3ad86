"""Steps along the orthogonalized momentum, compared with the SVD, with torch's Muon and with a plain loop."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_hybrid.optim import LARS, param_groups
from lightning_hybrid.optim.diagnostics import trust_ratios
from lightning_hybrid.optim.orthogonal import orthogonalized, orthogonalized_all, owners_by_flops
from tests import toy
from tests.optim.makers import (
    LISTS,
    LOOP,
    assert_same_bits,
    copies_of,
    distance,
    normals,
    parameters,
    run,
    set_grads,
)
from tests.scenes import at, fit, same

SHAPES = [(6, 5), (8, 3, 3, 3), (4, 40), (7,), (), (1, 9), (0, 3)]
every_path = pytest.mark.parametrize("path", [LOOP, LISTS, {}], ids=str)


def iterate(matrix):
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix / matrix.norm()
    if is_tall:
        x = x.T
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    if is_tall:
        return x.T
    return x


def reference(start, gradients, lrs, *, momentum, weight_decay, nesterov, coefficient):
    """Return the weights of one layer after the steps in float64. If `coefficient` is None, use Muon's size."""
    w = start.clone()
    v = torch.zeros_like(start)
    for g, lr in zip(gradients, lrs, strict=True):
        d = g + weight_decay * w
        v = momentum * v + d
        if nesterov:
            u = momentum * v + d
        else:
            u = v
        is_matrix = w.dim() > 1 and w.shape[0] > 1 and w[0].numel() > 1
        if is_matrix:
            o = iterate(u.flatten(1)).reshape(u.shape)
        else:
            o = u
        if coefficient is None and is_matrix:
            w = w - lr * max(1, w.shape[0] / w[0].numel()) ** 0.5 * o
        elif coefficient is None:
            w = w - lr * o
        elif w.norm() == 0 or u.norm() == 0:
            w = w - lr * u
        else:
            w = w - lr * coefficient * w.norm() * o / o.norm()
    return w


@every_path
@pytest.mark.parametrize("nesterov", [False, True], ids="nesterov={}".format)
@pytest.mark.parametrize("excluded", [False, True], ids="muon_size={}".format)
def test_twenty_steps_are_the_rule_in_float64(path, nesterov, excluded):
    """In float64, each of five iterations multiplies a rounding error by up to 3.4, over 20 steps."""
    layers = parameters(*SHAPES[:6], dtype=torch.float64)
    with torch.no_grad():
        layers[2].zero_()  # its first step is a momentum step
    starts = [layer.detach().clone() for layer in layers]
    rule = {"momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
    group = {"params": layers}
    if excluded:
        group |= {"trust_ratio": False, "direction": "orthogonal"}
    options = {"lr": 1.0, "trust_coefficient": 0.05, "direction": "orthogonal", **rule, **path}
    optimizer = LARS([group], **options)
    history = [[] for _ in layers]
    lrs = [0.2 * step for step in range(20)]
    for step, lr in enumerate(lrs):
        optimizer.param_groups[0]["lr"] = lr
        set_grads(layers, step)
        for gradients, layer in zip(history, layers, strict=True):
            gradients.append(layer.grad.clone())
        optimizer.step()
    if excluded:
        size = None
    else:
        size = 0.05
    expected = []
    for start, gradients in zip(starts, history, strict=True):
        expected.append(reference(start, gradients, lrs, coefficient=size, **rule))
    assert distance(layers, expected) < 1e-9


@pytest.mark.parametrize(
    ("shape", "scale"),
    [((64, 96), 1.0), ((16, 4, 3, 3), 1e-30), ((48, 7), 1e4), ((5, 200), 1e18)],
    ids=str,
)
def test_the_result_has_the_singular_vectors_and_singular_values_near_one(shape, scale):
    matrix = normals(*shape, dtype=torch.float32)
    (result,) = orthogonalized(matrix * scale)
    assert result.dtype == torch.float16
    assert result.shape == matrix.shape
    left, _, right = torch.linalg.svd(matrix.flatten(1).double(), full_matrices=False)
    inner = left.T @ result.flatten(1).double() @ right.T
    values = inner.diag()
    assert values.min() > 0.6
    assert values.max() < 1.25
    assert (inner - values.diag()).abs().max() < 0.01  # float16 has eleven bits


def test_a_channels_last_kernel_and_one_in_a_batch_give_the_same():
    kernels = [normals(8, 4, 3, 3, seed=seed, dtype=torch.float32) for seed in range(3)]
    plain = [orthogonalized(kernel)[0] for kernel in kernels]
    last = [orthogonalized(kernel.to(memory_format=torch.channels_last))[0] for kernel in kernels]
    assert_same_bits(plain, last)
    for first, second in zip(plain, orthogonalized(*kernels), strict=True):
        assert (first - second).abs().max() < 2e-3


def test_a_step_inside_of_autocast_has_the_same_bits():
    """With 16-mixed and bf16-mixed, a manual loop steps inside of autocast in its `training_step`."""
    moment = normals(16, 24, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = orthogonalized(moment)[0]
    assert torch.equal(inside, orthogonalized(moment)[0])


def test_excluded_groups_stay_momentum_sgd_to_the_bit():
    ours = parameters((6, 5), (7,))
    theirs = copies_of(ours)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}
    group = {"params": ours, "trust_ratio": False}
    run(LARS([group], direction="orthogonal", momentum_form="lr_outside", **options), ours, 10)
    run(torch.optim.SGD(theirs, **options), theirs, 10)
    assert_same_bits(ours, theirs)


def test_no_ratios_are_reported_for_steps_that_do_not_use_them():
    orthogonal = parameters((6, 5), (7,))
    plain = parameters((6, 5))
    groups = [{"params": orthogonal}, {"params": plain, "direction": "momentum"}]
    optimizer = LARS(groups, lr=1.0, direction="orthogonal")
    set_grads([*orthogonal, *plain], 0)
    assert [len(ratios) for ratios in trust_ratios(optimizer)] == [0, 1]


def _share():
    everybody = dist.group.WORLD
    ends = []
    for work_group in (None, everybody):
        params = parameters((6, 5), (6, 5), (8, 3, 3, 3), (40, 12), (7,), (33, 20))
        optimizer = LARS(params, lr=2.0, weight_decay=0.01, nesterov=True, direction="orthogonal")
        optimizer.work_group = work_group
        run(optimizer, params, 3)
        ends.append(params)
    assert_same_bits(*ends)
    matrices = [param.detach() for param in ends[0][:4]]
    asked = []
    shapes = [matrix.shape for matrix in matrices]

    def tensor_of(index):
        asked.append(index)
        return matrices[index]

    how = {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "together": False,
        "group": everybody,
    }
    results = orthogonalized_all(shapes, tensor_of, **how)
    owners = owners_by_flops(shapes, dist.get_world_size())
    assert asked == [index for index, owner in enumerate(owners) if owner == dist.get_rank()]
    assert len(asked) < len(shapes)
    assert_same_bits(results, [orthogonalized(matrix)[0] for matrix in matrices])
    return [param.detach().clone() for param in ends[1]]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_share_the_work_have_the_bits_of_those_that_do_not(rank_pool, num_ranks):
    ends = rank_pool.ranks(num_ranks).run(_share)
    for end in ends[1:]:
        assert_same_bits(ends[0], end)


def test_a_group_that_is_set_is_in_no_pickle():
    (param,) = parameters((2, 3))
    optimizer = LARS([nn.Parameter(param.detach())], lr=1.0, direction="orthogonal")
    optimizer.work_group = object()
    assert copy.deepcopy(optimizer).work_group is None


class Shares(toy.Toy):
    def configure_optimizers(self):
        groups = param_groups(self, weight_decay=1e-3)
        self.optimizer = LARS(groups, lr=2.0, direction="orthogonal", excluded_lr_mult=0.01)
        return self.optimizer


def take_away(trainer, *_):
    trainer.optimizers[0].work_group = None


def has_group(trainer, *_):
    return trainer.optimizers[0].work_group is not None


@pytest.mark.parametrize("precision", ["32-true", "16-true"])
def test_in_a_fit_the_ranks_of_a_node_share_the_work_and_the_group_is_taken_back(
    two_ranks, precision
):
    """The first step of the second fit is shared again. Shared and separate work give equal bits."""
    scene = {"precision": precision, "max_steps": 5}
    looks = at(on_train_batch_end=has_group)
    rank_0, rank_1 = two_ranks.run(group_left, {"callbacks": [looks], **scene})
    callbacks = [at(on_train_batch_end=take_away), looks]
    alone, _ = fit(two_ranks, Shares, callbacks=callbacks, **scene)
    assert rank_0.looks["on_train_batch_end"] == [True] * 5
    assert alone.looks["on_train_batch_end"] == [False] * 5
    assert same(rank_0.parameters, rank_1.parameters)
    assert same(rank_0.parameters, alone.parameters)


def group_left(scene):
    module = Shares()
    seen = fit(None, module, **scene)
    assert module.optimizer.work_group is None
    return seen
