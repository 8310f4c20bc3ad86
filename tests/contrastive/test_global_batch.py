"""Many chunks of pairs are one batch: gradients, random numbers, statistics, and fits as users write them."""

import copy
from functools import partial
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Comm, HybridPipelineStrategy
from lightning_hybrid.contrastive import GlobalBatch, InfoNCE
from lightning_hybrid.optim import LARS, param_groups
from tests.scenes import fit, same, this_rank
from tests.test_readme import ROOT, python_blocks
from tests.toy import Toy

PAIRS, CHUNK = 32, 4


def data():
    return torch.randn(2 * PAIRS, 16, generator=torch.Generator().manual_seed(1))


class Embedder(nn.Module):
    def __init__(self, *more):
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(8, 16), *more, nn.ReLU(), nn.Linear(16, 6))
        self.unused, self.num_calls = nn.Linear(2, 2), 0

    def forward(self, batch):
        self.num_calls += 1
        return tuple(self.net(view) for view in batch["views"])


def gradients(module, batch, chunk):
    module.zero_grad()
    GlobalBatch(InfoNCE(0.1, block=CHUNK), chunk=chunk)(module, batch).backward()
    return {name: one.grad.clone() for name, one in module.named_parameters() if one.grad is not None}


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
    """As where all activations are kept; what is drawn afterwards is what would be drawn after one pass."""
    batch = {"views": list(data()[:PAIRS].split(8, dim=1))}
    module, kept = Embedder(nn.BatchNorm1d(16), nn.Dropout()), Embedder(nn.BatchNorm1d(16), nn.Dropout())
    torch.manual_seed(3)
    chunks = [kept({"views": parts}) for parts in zip(*(view.split(CHUNK) for view in batch["views"]), strict=True)]
    InfoNCE(0.1, block=CHUNK)(*map(torch.cat, zip(*chunks, strict=True))).backward()
    drawn = torch.rand(1)
    torch.manual_seed(3)
    found = gradients(module, batch, CHUNK)
    assert torch.equal(torch.rand(1), drawn)
    for name, one in kept.named_parameters():
        assert one.grad is None or torch.allclose(found[name], one.grad, rtol=1e-5, atol=1e-7), name
    assert same(dict(module.named_buffers()), dict(kept.named_buffers()))


class Contrastive(Toy):
    def __init__(self, optimizer=torch.optim.SGD, is_chunked=True):
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
        self.optimizer = optimizer
        loss = InfoNCE(0.1, block=CHUNK)
        self.contrastive = GlobalBatch(loss, chunk=CHUNK) if is_chunked else loss

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


def shares(world):
    """A loader whose step has the same pairs in the same order, whatever the ranks: two steps."""
    share = PAIRS // world
    order = [step * PAIRS + this_rank() * share + i for step in range(2) for i in range(share)]
    return DataLoader(TensorDataset(data()), batch_size=share, sampler=order)


shares_of_1, shares_of_2, shares_of_4 = (partial(shares, world) for world in (1, 2, 4))


SCENE = {"max_epochs": 1, "use_distributed_sampler": False}


def test_a_fit_of_one_two_and_four_ranks_has_the_same_bits(two_ranks, four_ranks):
    one = fit(None, Contrastive, train=shares_of_1, **SCENE)
    two = fit(two_ranks, Contrastive, train=shares_of_2, **SCENE)
    four = fit(
        four_ranks, Contrastive, train=shares_of_4, ranks_per_node=2, comm=Comm(algorithm="hierarchical"), **SCENE
    )
    assert one.global_step == 2
    for seen in [*two, *four]:
        assert same(seen.parameters, one.parameters)


def test_half_precision_and_lars_train_on_fp32_masters(two_ranks):
    """The band: a change of weights by half a unit of the dtype moves a step by some 1e-2 of its length."""
    scene = {"module": partial(Contrastive, optimizer=LARS), "train": shares_of_2, **SCENE}
    wide, half = fit(two_ranks, **scene), fit(two_ranks, precision="16-true", loss_scale=256, **scene)
    assert half[0].num_skipped == 0
    assert same(half[0].parameters, half[1].parameters)
    start = copy.deepcopy(Contrastive().state_dict())
    for name, end in wide[0].parameters.items():
        moved, other = end - start[name], half[0].parameters[name] - start[name]
        assert (moved - other).norm() <= 0.1 * moved.norm() + 1e-6, name


def test_accumulation_of_a_loss_that_couples_the_batch_is_warned_of():
    scene = {"train": shares_of_4, "warns": True, "accumulate_grad_batches": 2, **SCENE}
    for is_chunked in (True, False):
        said = fit(None, Contrastive(is_chunked=is_chunked), **scene).warnings
        assert any("`accumulate_grad_batches` (=2)" in one for one in said) is not is_chunked


def test_a_pipeline_refuses_a_loss_over_the_global_batch(two_ranks):
    scene = {"kind": HybridPipelineStrategy, "num_stages": 2, "num_microbatches": 2, "raises": True}
    for seen in fit(two_ranks, Contrastive, train=shares_of_2, **scene, **SCENE):
        assert "`GlobalBatch` and a pipeline exclude each other" in seen.error


def test_a_function_without_parameters_and_a_batch_without_rows_are_refused():
    with pytest.raises(ValueError, match=r"`embed` .* must be a module, or a method of one"):
        GlobalBatch(InfoNCE())(lambda batch: batch, torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"the tensors of `batch` \(of \[2, 3\] rows\)"):
        GlobalBatch(InfoNCE())(Embedder(), [torch.ones(2, 2), torch.ones(3, 2)])
    with pytest.raises(ValueError, match=r"`chunk` \(=0\)"):
        GlobalBatch(InfoNCE(), chunk=0)


def run_page(source):
    with mock.patch.object(pl, "Trainer", partial(pl.Trainer, max_steps=1, logger=False, enable_checkpointing=False)):
        exec(compile(source, "README.md", "exec"), {})


def test_the_example_of_the_page_runs(two_ranks):
    two_ranks.run(run_page, python_blocks(ROOT / "lightning_hybrid" / "contrastive" / "README.md")[0])
