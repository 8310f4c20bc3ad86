"""Losses over the pairs of all ranks, compared with their definition, and chunks of pairs compared with one batch."""

import copy
import math
from contextlib import nullcontext
from functools import partial
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Comm, HybridPipelineStrategy
from lightning_hybrid.contrastive import BarlowTwins, GlobalBatch, InfoNCE, SigLIP
from lightning_hybrid.optim import LARS, param_groups
from tests.rank_pool import GROUP_TIMEOUT
from tests.scenes import fit, same, this_rank
from tests.test_readme import ROOT, python_blocks
from tests.toy import Toy, error_of

PAIRS = 32
FEATURES = 8
BLOCK = 4


def clip(loss, a, b):
    a = F.normalize(a, dim=1)
    b = F.normalize(b, dim=1)
    if loss.temperature is None:
        scale = loss.logit_scale.exp()
    else:
        scale = 1 / loss.temperature
    target = torch.arange(len(a))
    a_to_b = F.cross_entropy(scale * a @ b.T, target)
    b_to_a = F.cross_entropy(scale * b @ a.T, target)
    return (a_to_b + b_to_a) / 2


def simclr(loss, a, b):
    z = F.normalize(torch.cat([a, b]), dim=1)
    if loss.temperature is None:
        scale = loss.logit_scale.exp()
    else:
        scale = 1 / loss.temperature
    logits = (scale * z @ z.T).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(a)))


def siglip(loss, a, b):
    similarities = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    logits = loss.logit_scale.exp() * similarities + loss.logit_bias
    return -F.logsigmoid(logits * (2 * torch.eye(len(a)) - 1)).sum() / len(a)


def barlow_twins(loss, a, b):
    norm = nn.BatchNorm1d(a.shape[1], affine=False, dtype=a.dtype)
    c = norm(a).T @ norm(b) / len(a)
    off_diagonal = (c**2).sum() - (c.diagonal() ** 2).sum()
    return ((1 - c.diagonal()) ** 2).sum() + loss.off_diagonal * off_diagonal


LOSSES = {
    "CLIP": (lambda: InfoNCE(0.1, block=BLOCK), clip),
    "CLIP, its temperature is learned": (lambda: InfoNCE(None, block=BLOCK), clip),
    "SimCLR": (lambda: InfoNCE(0.1, both_views=True, block=BLOCK), simclr),
    "SimCLR, its temperature is learned": (
        lambda: InfoNCE(None, both_views=True, block=BLOCK),
        simclr,
    ),
    "SigLIP": (lambda: SigLIP(block=BLOCK), siglip),
    "Barlow Twins": (lambda: BarlowTwins(block=BLOCK), barlow_twins),
}


def views(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(PAIRS, FEATURES, generator=generator, dtype=dtype) for _ in range(2)]


def of_share(rank, world, name, dtype=torch.float32):
    """Return the loss, the gradients of a rank's views, and the rank's share of the parameters' gradients.

    DDP averages the parameters' gradients over ranks, so they are divided by the number of ranks here.
    """
    loss = LOSSES[name][0]().to(dtype)
    a, b = (view.chunk(world)[rank].clone().requires_grad_() for view in views(dtype))
    value = loss(a, b)
    grads = torch.autograd.grad(value, [a, b, *loss.parameters()])
    return value.detach(), *(grad / world for grad in grads)


def on_rank(name, dtype=torch.float32):
    return of_share(dist.get_rank(), dist.get_world_size(), name, dtype)


def joined(shares):
    """Combine the results of all ranks: the loss, concatenated gradients of views, and tree sums for parameters."""
    values, a, b, *parameters = zip(*shares, strict=True)
    for rank, value in enumerate(values):
        assert torch.equal(value, values[0]), f"rank {rank}"
    return [values[0], torch.cat(a), torch.cat(b), *map(sum_as_a_tree, parameters)]


def sum_as_a_tree(tensors):
    while len(tensors) > 1:
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        tensors = [first + second for first, second in pairs]
    return tensors[0]


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_all_pairs_at_once(name):
    make, definition = LOSSES[name]
    loss = make().double()
    inputs = [view.requires_grad_() for view in views(torch.float64)]
    expected = definition(loss, *inputs)
    value, *grads = of_share(0, 1, name, torch.float64)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
    expected_grads = list(torch.autograd.grad(expected, [*inputs, *loss.parameters()]))
    torch.testing.assert_close(grads, expected_grads, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_two_and_four_ranks_have_the_bits_of_one(name, two_ranks, four_ranks):
    on_one_rank = list(of_share(0, 1, name))
    assert same(joined(two_ranks.run(on_rank, name)), on_one_rank)
    assert same(joined(four_ranks.run(on_rank, name)), on_one_rank)


def test_the_loss_of_three_ranks_is_that_of_all_pairs(three_ranks):
    """PAIRS is not divisible by three, so each rank takes 8 of the first 24."""
    rank_0, rank_1, rank_2 = three_ranks.run(first_24)
    a, b = (view[:24] for view in views())
    torch.testing.assert_close(rank_0, clip(InfoNCE(0.1), a, b), rtol=1e-6, atol=0)
    assert torch.equal(rank_0, rank_1)
    assert torch.equal(rank_0, rank_2)


def first_24():
    a, b = (view[:24].chunk(3)[dist.get_rank()] for view in views())
    return InfoNCE(0.1, block=3)(a, b)


def time_limit():
    group = InfoNCE().peers()._group
    return group._get_backend(torch.device("cpu")).options._timeout


def test_ranks_wait_for_each_other_as_long_as_in_the_default_group(two_ranks):
    """Once, ranks waited 30 minutes for a rank that hung, whatever the `timeout` of the strategy was."""
    assert two_ranks.run(time_limit) == [GROUP_TIMEOUT] * 2


def short_on_the_last(missing):
    rows = PAIRS // 2 - missing * dist.get_rank()
    a, b = (view[:rows] for view in views())
    return error_of(InfoNCE(), a, b)


@pytest.mark.parametrize(("missing", "shapes"), [(1, "16x8, 15x8"), (PAIRS // 2, "16x8, 0x0")])
def test_other_numbers_of_pairs_or_none_are_refused_on_every_rank(missing, shapes, two_ranks):
    expected = (
        "ValueError: The embeddings of all ranks must have the same shape, because every rank contributes the same "
        f"number of pairs to the global batch, but their shapes are {shapes}."
    )
    for rank, message in enumerate(two_ranks.run(short_on_the_last, missing, timeout_s=30)):
        assert message.startswith(expected), f"rank {rank}"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: InfoNCE(0.0), r"`temperature` \(=0.0\) must be a positive number"),
        (lambda: SigLIP(block=0), r"`block` \(=0\) must be an integer, 1 or more"),
        (
            lambda: InfoNCE()(torch.ones(3, 2), torch.ones(2, 2)),
            "`a` and `b` .* must be two matrices of the same shape",
        ),
        (
            lambda: InfoNCE()(torch.ones(0, 2), torch.ones(0, 2)),
            "`a` and `b` .* must be two matrices of the same shape",
        ),
    ],
)
def test_options_and_embeddings_that_cannot_be_compared_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_similarities_beyond_what_exponentials_hold_are_finite():
    a = torch.eye(4)
    loss = InfoNCE(1e-3, block=2)(a, a.roll(1, 0))  # each row's partner is the least similar row
    assert math.isclose(loss.item(), 1000, rel_tol=1e-6)


@pytest.mark.parametrize(("value", "scale"), [(math.log(100) - 0.01, 99.0), (10.0, 100.0)])
def test_a_learnt_scale_is_held_at_100(value, scale):
    learnt = InfoNCE(None, block=BLOCK)
    fixed = InfoNCE(1 / scale, block=BLOCK)
    nn.init.constant_(learnt.logit_scale, value)
    rtol = 1e-3 if scale < 100 else 0
    torch.testing.assert_close(learnt(*views()).detach(), fixed(*views()), rtol=rtol, atol=0)


@pytest.mark.parametrize("value", [math.log(100) - 0.01, math.log(100) + 0.01])
def test_a_learnt_scale_above_100_can_only_decrease(value):
    """With a plain `clamp`, a scale above the limit once stayed there for the rest of the training."""
    learnt = InfoNCE(None, block=2)
    nn.init.constant_(learnt.logit_scale, value)
    rows = torch.eye(4)
    learnt(rows, rows.roll(1, 0)).backward()  # each partner is the least similar row
    assert learnt.logit_scale.grad > 0

    learnt.logit_scale.grad = None
    ahead = rows + 4  # the partners are the most similar rows, but not by far
    learnt(ahead, ahead).backward()
    gradient = learnt.logit_scale.grad.item()
    assert (gradient == 0) if value > math.log(100) else (gradient < 0)


def of_views(name, inputs, autocast, is_backward_inside):
    """Return loss and gradients, with autocast around the loss only or also around backward."""
    loss = LOSSES[name][0]()
    inputs = [view.clone().requires_grad_() for view in inputs]
    with autocast:
        value = loss(*inputs)
        if is_backward_inside:
            value.backward()
    if not is_backward_inside:
        value.backward()
    return [value.detach(), *(tensor.grad for tensor in [*inputs, *loss.parameters()])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOSSES)
def test_autocast_changes_no_bit_of_a_loss(name, dtype):
    """The views are in fp32, or in half precision as networks return them under autocast."""
    for inputs in (views(), [view.to(dtype) for view in views()]):
        expected = of_views(name, inputs, nullcontext(), False)
        assert expected[0].dtype is torch.float32
        for is_backward_inside in (False, True):
            result = of_views(name, inputs, torch.autocast("cpu", dtype), is_backward_inside)
            assert same(result, expected)


class OfEmbeddings(Toy):
    """Module that compares its loss with that of the same embeddings and parameters outside of a step."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Linear(12, 6)
        self.contrastive = LOSSES[name][0]()
        self.name = name

    def training_step(self, batch, batch_idx):
        z = self.net(batch[0])
        loss = self.contrastive(z[:, :6], z.flip(1))
        parameters = {name: p.detach().clone() for name, p in self.contrastive.named_parameters()}
        self.kept = [z.detach(), loss.detach(), parameters]
        return loss

    def on_train_batch_end(self, *args):
        z, loss, parameters = self.kept
        outside = LOSSES[self.name][0]()
        for name, value in parameters.items():
            outside.get_parameter(name).data = value
        assert z.dtype in (torch.float16, torch.bfloat16)
        assert torch.equal(outside(z[:, :6], z.flip(1)), loss)


@pytest.mark.parametrize("precision", ["16-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["CLIP, its temperature is learned", "SigLIP", "Barlow Twins"])
def test_a_loss_in_half_precision_is_that_of_the_same_embeddings_in_fp32(name, precision):
    seen = fit(None, partial(OfEmbeddings, name), precision=precision, max_epochs=1)
    assert seen.global_step == 8, "a comparison in each step"


def test_second_derivatives_of_losses_are_refused():
    for make, _ in LOSSES.values():
        a, b = (view.requires_grad_() for view in views())
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            torch.autograd.grad(make()(a, b), a, create_graph=True)


CHUNK = BLOCK


def data():
    return torch.randn(2 * PAIRS, 16, generator=torch.Generator().manual_seed(1))


class Embedder(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(8, 16), *layers, nn.ReLU(), nn.Linear(16, 6))
        self.unused = nn.Linear(2, 2)
        self.num_calls = 0

    def forward(self, batch):
        self.num_calls += 1
        return tuple(self.net(view) for view in batch["views"])


def gradients(module, batch, chunk):
    module.zero_grad()
    GlobalBatch(InfoNCE(0.1, block=CHUNK), chunk=chunk)(module, batch).backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def test_gradients_of_chunks_are_those_of_the_whole_batch():
    batch = {"views": list(data()[:PAIRS].split(8, dim=1)), "name": "a"}
    module = Embedder().double()
    batch["views"] = [view.double() for view in batch["views"]]
    whole = gradients(module, batch, PAIRS)
    assert set(whole) == {"net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}
    for chunk in (CHUNK, 5):
        torch.testing.assert_close(gradients(module, batch, chunk), whole, rtol=1e-9, atol=1e-12)
    module.num_calls = 0
    gradients(module, batch, 8)
    assert module.num_calls == 2 * PAIRS // 8


def test_the_second_pass_draws_what_the_first_drew_and_moves_no_statistics():
    """The result, and the random numbers drawn afterwards, equal those with all activations kept."""
    batch = {"views": list(data()[:PAIRS].split(8, dim=1))}
    module = Embedder(nn.BatchNorm1d(16), nn.Dropout())
    kept = Embedder(nn.BatchNorm1d(16), nn.Dropout())
    torch.manual_seed(3)
    chunks = [
        kept({"views": parts})
        for parts in zip(*(view.split(CHUNK) for view in batch["views"]), strict=True)
    ]
    InfoNCE(0.1, block=CHUNK)(*map(torch.cat, zip(*chunks, strict=True))).backward()
    drawn = torch.rand(1)
    torch.manual_seed(3)
    result = gradients(module, batch, CHUNK)
    assert result.keys() == {
        name for name, parameter in kept.named_parameters() if parameter.grad is not None
    }
    assert torch.equal(torch.rand(1), drawn)
    for name, parameter in kept.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(result[name], parameter.grad, rtol=1e-5, atol=1e-7), name
    assert same(dict(module.named_buffers()), dict(kept.named_buffers()))


class Contrastive(Toy):
    def __init__(self, optimizer=torch.optim.SGD, is_chunked=True):
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
        self.optimizer = optimizer
        self.contrastive = InfoNCE(0.1, block=CHUNK)
        if is_chunked:
            self.contrastive = GlobalBatch(self.contrastive, chunk=CHUNK)

    def embed(self, batch):
        return self.net(batch[0][:, :8]), self.net(batch[0][:, 8:])

    def training_step(self, batch, batch_idx):
        if not isinstance(self.contrastive, GlobalBatch):
            return self.contrastive(*self.embed(batch))
        return self.contrastive(self.embed, batch)

    def configure_optimizers(self):
        if self.optimizer is LARS:
            return LARS(param_groups(self, weight_decay=1e-4), lr=1.0, momentum=0.9)
        return self.optimizer(self.parameters(), lr=0.5)


def shares():
    """Return a loader of two steps, whose pairs and their order do not depend on the number of ranks."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    share = PAIRS // world_size
    order = []
    for step in range(2):
        first = step * PAIRS + this_rank() * share
        order += range(first, first + share)
    return DataLoader(TensorDataset(data()), batch_size=share, sampler=order)


SCENE = {"train": shares, "max_epochs": 1, "use_distributed_sampler": False}


def test_a_fit_of_one_two_and_four_ranks_has_the_same_bits(two_ranks, four_ranks):
    whole = fit(None, Contrastive, **SCENE)
    on_two = fit(two_ranks, Contrastive, **SCENE)
    options = {"ranks_per_node": 2, "comm": Comm(algorithm="hierarchical")}
    on_four = fit(four_ranks, Contrastive, **options, **SCENE)
    assert whole.global_step == 2
    for seen in [*on_two, *on_four]:
        assert same(seen.parameters, whole.parameters), f"rank {seen.rank}"


def test_half_precision_and_lars_train_on_fp32_masters(two_ranks):
    """The bound is that a change of weights by half a unit of the dtype changes a step by about 1e-2 of its length."""
    scene = {"module": partial(Contrastive, optimizer=LARS), **SCENE}
    wide = fit(two_ranks, **scene)
    half = fit(two_ranks, precision="16-true", loss_scale=256, **scene)
    assert half[0].num_skipped == 0
    assert same(half[0].parameters, half[1].parameters)
    start = copy.deepcopy(Contrastive().state_dict())
    for name, end in wide[0].parameters.items():
        wide_update = end - start[name]
        half_update = half[0].parameters[name] - start[name]
        error = (wide_update - half_update).norm()
        assert error <= 0.1 * wide_update.norm() + 1e-6, name


def test_accumulation_of_a_loss_that_couples_the_batch_is_warned_of():
    scene = {"warns": True, "accumulate_grad_batches": 2, **SCENE}
    for is_chunked in (True, False):
        seen = fit(None, Contrastive(is_chunked=is_chunked), **scene)
        is_warned = any("`accumulate_grad_batches` (=2)" in text for text in seen.warnings)
        assert is_warned is not is_chunked


def test_a_pipeline_refuses_a_loss_over_the_global_batch(two_ranks):
    scene = {"kind": HybridPipelineStrategy, "num_stages": 2, "num_microbatches": 2, "raises": True}
    for seen in fit(two_ranks, Contrastive, **scene, **SCENE):
        assert "`GlobalBatch` and a pipeline cannot be combined" in seen.error


def test_a_function_without_parameters_and_a_batch_without_rows_are_refused():
    with pytest.raises(ValueError, match=r"`embed` .* must be a module or a method of a module"):
        GlobalBatch(InfoNCE())(lambda batch: batch, torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"The tensors in `batch` \(with \[2, 3\] rows\)"):
        GlobalBatch(InfoNCE())(Embedder(), [torch.ones(2, 2), torch.ones(3, 2)])
    with pytest.raises(ValueError, match=r"`chunk` \(=0\)"):
        GlobalBatch(InfoNCE(), chunk=0)


def run_page(source):
    with mock.patch.object(
        pl, "Trainer", partial(pl.Trainer, max_steps=1, logger=False, enable_checkpointing=False)
    ):
        exec(compile(source, "README.md", "exec"), {})


def test_the_example_of_the_page_runs(two_ranks):
    two_ranks.run(
        run_page, python_blocks(ROOT / "lightning_hybrid" / "contrastive" / "README.md")[0]
    )
