"""User code with `GlobalBatch`: in fits, between forward and backward, and errors that name unsupported code."""

import weakref
from functools import partial

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import SumMetric

from lightning_hybrid import HybridElasticStrategy
from lightning_hybrid.contrastive import GlobalBatch, InfoNCE
from tests.contrastive.networks import (
    CHUNK,
    FEATURES,
    LOSS,
    NETWORKS,
    PAIRS,
    Network,
    assert_same_step,
    data,
    seed,
    seeded,
    state_after,
    with_activations_kept,
    with_global_batch,
)
from tests.scenes import fit

# ---- batches ---------------------------------------------------------------------------------------------------------


class Texts(Dataset):
    """Data set of questions and answers, as in a public bug report."""

    def __len__(self):
        return 20

    def __getitem__(self, i):
        return {"query": f"a{i} b{i % 3}", "answer": f"c{i} d{i % 5}", "index": i}


class TextTowers(pl.LightningModule):
    def __init__(self, chunk):
        super().__init__()
        torch.manual_seed(0)
        self.word = nn.EmbeddingBag(64, 8)
        self.gb = GlobalBatch(InfoNCE(temperature=0.1), chunk=chunk)
        self.losses = []

    def encode(self, texts):
        tokens = [[sum(map(ord, word)) % 64 for word in text.split()] for text in texts]
        return self.word(torch.tensor(tokens))

    def embed(self, batch):
        return self.encode(batch["query"]), self.encode(batch["answer"])

    def training_step(self, batch, i):
        loss = self.gb(self.embed, batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def as_arrays(samples):
    return {key: np.array([sample[key] for sample in samples]) for key in ("query", "answer")}


def as_pairs(samples):
    return [(sample["query"], sample["answer"]) for sample in samples]


class PairTowers(TextTowers):
    def embed(self, batch):
        queries, answers = zip(*batch, strict=True)
        return self.encode(queries), self.encode(answers)


@pytest.mark.parametrize("collate", [None, as_arrays, as_pairs], ids=["default", "arrays", "pairs"])
def test_losses_over_texts_do_not_depend_on_the_chunk(collate):
    if collate is as_pairs:
        towers = PairTowers
    else:
        towers = TextTowers
    scene = {"train": DataLoader(Texts(), 10, collate_fn=collate), "max_epochs": 1}
    whole = fit(None, partial(towers, chunk=10), **scene)
    assert len(whole.losses) == 2
    for chunk in (5, 4, 2):
        seen = fit(None, partial(towers, chunk=chunk), **scene)
        assert seen.losses == pytest.approx(whole.losses, rel=1e-6)
        for name, value in whole.weights.items():
            assert (seen.weights[name] - value).norm() <= 1e-6 * value.norm()


class NamedRows(Network):
    """Network that changes its rows by their names, and by values in a nested batch."""

    def embed(self, batch):
        x, (names, extra) = batch
        signs = torch.tensor([-1.0 if name.endswith("1") else 1.0 for name in names])[:, None]
        shifts = (
            torch.from_numpy(extra["shift"])[:, None]
            * torch.tensor(extra["sign"])[:, None]
            * extra["scale"]
        )
        return self.net(signs * x), self.net(signs * x + shifts)


def test_names_and_arrays_are_split_with_their_rows():
    def step(chunk):
        network = seeded(NamedRows)
        names = tuple(f"image {i % 3}" for i in range(PAIRS))
        extra = {
            "shift": np.linspace(0, 1, PAIRS, dtype=np.float32),
            "sign": [1.0, -1.0] * (PAIRS // 2),
            "scale": 0.5,
        }
        GlobalBatch(LOSS, chunk=chunk)(network.embed, [data(), (names, extra)]).backward()
        return state_after(network)

    for chunk in (CHUNK, 5):
        assert_same_step(step(chunk), step(PAIRS))


# ---- what changes between forward and backward -----------------------------------------------------------------------


class WithTeacher(Network):
    def __init__(self):
        super().__init__(nn.Dropout(0.5))
        self.teacher = nn.Linear(FEATURES, 6).requires_grad_(False)

    def noisy(self, x):
        return x * torch.ones(FEATURES)  # of the default dtype

    def embed(self, x):
        return self.net(x), self.teacher(x)


def assign(network):
    network.teacher.weight.data = network.teacher.weight.data * 0.5


@pytest.mark.parametrize(
    "between",
    [
        assign,
        nn.Module.eval,
        lambda network: network.requires_grad_(False),
        lambda network: torch.set_default_dtype(torch.float64),
    ],
    ids=["weights assigned", "eval", "frozen", "default dtype"],
)
def test_changes_after_the_forward_do_not_affect_backward(between):
    try:
        result = with_global_batch(WithTeacher, data(), between=between)
        torch.set_default_dtype(torch.float32)
        assert_same_step(result, with_activations_kept(WithTeacher, data(), between=between))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "change",
    [
        lambda teacher: teacher.weight.mul_(0.99),
        lambda teacher: teacher.weight.data.mul_(0.99),
        lambda teacher: torch.optim.SGD(teacher.parameters(), 0.1, weight_decay=0.1).step(),
        lambda teacher: setattr(teacher, "weight", nn.Parameter(teacher.weight * 0.99)),
    ],
    ids=["in place", "by data", "by an optimizer", "replaced"],
)
def test_weights_that_are_lost_before_backward_are_refused(change):
    def between(network):
        for parameter in network.teacher.parameters():
            parameter.grad = torch.ones_like(parameter)
        with torch.no_grad():
            change(network.teacher)

    with pytest.raises(
        RuntimeError,
        match=r"`teacher.weight`.* must not change between the forward of `GlobalBatch`",
    ):
        with_global_batch(WithTeacher, data(), between=between)


def in_place(teacher):
    teacher.weight.mul_(0.99)


def by_data(teacher):
    teacher.weight.data.mul_(0.99)


def assigned(teacher):
    teacher.weight.data = teacher.weight.data * 0.99


class MomentumEncoder(WithTeacher):
    def __init__(self, update):
        super().__init__()
        self.update = update

    def embed(self, x):
        with torch.no_grad():
            self.update(self.teacher)
        return super().embed(x)


@pytest.mark.parametrize("update", [in_place, by_data, assigned])
def test_a_momentum_encoder_that_moves_in_forward_is_refused(update):
    message = r"`embed` \(=MomentumEncoder.embed\) changed `teacher.weight`, but must not change parameters"
    with pytest.raises(ValueError, match=message):
        with_global_batch(partial(MomentumEncoder, update), data())


# ---- networks that cannot run twice ----------------------------------------------------------------------------------


class Counts(Network):
    def __init__(self):
        super().__init__()
        self.num_calls = 0

    def noisy(self, x):
        self.num_calls += 1
        return x * self.num_calls


GENERATOR = torch.Generator().manual_seed(0)


class GlobalGenerator(Network):
    def noisy(self, x):
        return x + 1e-3 * torch.randn(x.shape, generator=GENERATOR)


class OtherShapes(Counts):
    def embed(self, x):
        self.num_calls += 1
        z = self.net(x)[:, : 4 if self.num_calls > 3 else None]
        return z, z


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Counts, r"must compute the same embeddings in both passes, .* but they differ by"),
        (
            GlobalGenerator,
            r"must compute the same embeddings in both passes, .* but they differ by",
        ),
        (
            OtherShapes,
            "must return embeddings of the same shape, dtype and requires_grad in both passes",
        ),
    ],
)
def test_a_network_that_returns_something_else_in_its_second_pass_is_refused(make, message):
    with pytest.raises(RuntimeError, match=message):
        with_global_batch(make, data())


class WithoutAutograd(Network):
    def embed(self, x):
        with torch.no_grad():
            return super().embed(x)


class CheckpointsItsInput(Network):
    def embed(self, x):
        return tuple(checkpoint(self.net, view, use_reentrant=True) for view in (x, x.flip(1)))


OUTSIDE = nn.Linear(FEATURES, FEATURES)


class OtherModule(Network):
    def noisy(self, x):
        return OUTSIDE(x)


class Sums(Network):
    def embed(self, x):
        return self.net(x), self.net(x).sum()


class TwoRowsEach(Network):
    def embed(self, x):
        return torch.cat(super().embed(x))


class Named(Network):
    def embed(self, x):
        return dict(zip("ab", super().embed(x), strict=True))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            WithoutAutograd,
            "must return embeddings that depend on trained parameters of `WithoutAutograd`",
        ),
        (CheckpointsItsInput, "With activation checkpointing, set use_reentrant=False"),
        (OtherModule, r"depends on another tensor of shape \(8, 8\), which requires a gradient"),
        (Sums, r"returned a tensor of shape \(\) for 4 rows"),
        (TwoRowsEach, r"returned a tensor of shape \(8, 6\) for 4 rows"),
        (Named, r"returned a dict, but must return a tensor or a tuple of tensors"),
    ],
)
def test_a_network_that_would_get_no_gradient_or_returns_no_rows_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        with_global_batch(make, data())


class Scripted(Network):
    def __init__(self):
        super().__init__()
        self.net = torch.jit.trace(self.net, data())


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_parameters_that_cannot_be_shown_as_leaves_are_refused():
    with pytest.raises(
        ValueError, match=r"`net.0.weight` \(a TorchScript parameter\) must be a plain parameter"
    ):
        with_global_batch(Scripted, data())


def test_a_batch_that_requires_gradients_is_refused():
    with pytest.raises(ValueError, match="`batch` must not contain tensors that require gradients"):
        with_global_batch(Network, data().requires_grad_())


def test_an_error_of_the_network_names_the_chunk():
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
        with_global_batch(partial(Network, nn.BatchNorm1d(16)), data(PAIRS + 1))
    assert "was called with 1 rows, because `GlobalBatch`" in caught.value.__notes__[0]
    assert "`chunk` (=4)" in caught.value.__notes__[0]


def test_second_derivatives_are_refused():
    network = seeded(Network)
    loss = GlobalBatch(LOSS, chunk=CHUNK)(network.embed, data())
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(loss, network.net[0].weight, create_graph=True)


# ---- networks that can run twice -------------------------------------------------------------------------------------


class Supervised(nn.Module):
    """Loss of a user over one rank's pairs, with labels that `embed` returns and its own temperature."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, z, labels, unused):
        return nn.functional.cross_entropy(self.scale * z, labels)


class Labeled(Network):
    def embed(self, batch):
        x, labels = batch
        return self.net(x), labels, self.net(x + 1)


def test_a_loss_of_the_users_own_takes_labels_and_leaves_an_embedding_out():
    batch = (data(), torch.arange(PAIRS) % 6)
    network = seeded(Labeled)
    kept = seeded(Labeled)
    loss = Supervised()
    loss_of_kept = Supervised()
    GlobalBatch(loss, chunk=5)(network.embed, batch).backward()
    loss_of_kept(*kept.embed(batch)).backward()
    for parameter, expected in zip(network.parameters(), kept.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(loss.scale.grad, loss_of_kept.scale.grad)


def test_a_frozen_network_trains_the_temperature_alone():
    network = seeded(Network).requires_grad_(False)
    loss = InfoNCE(None)
    GlobalBatch(loss, chunk=CHUNK)(network.embed, data()).backward()
    assert loss.logit_scale.grad != 0


def test_backward_under_autocast_and_a_second_backward_add_the_same_gradients():
    network = seeded(Network)
    expected = seeded(Network)
    with torch.autocast("cpu", torch.bfloat16):
        GlobalBatch(LOSS, chunk=CHUNK)(expected.embed, data()).backward()
        loss = GlobalBatch(LOSS, chunk=CHUNK)(network.embed, data())
    loss.backward(retain_graph=True)
    loss.backward()
    for parameter, half in zip(network.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.grad, 2 * half.grad)


def test_a_second_backward_begins_with_the_buffers_of_the_first():
    network = seeded(NETWORKS["moving center"])
    expected = seeded(NETWORKS["moving center"])
    GlobalBatch(LOSS, chunk=CHUNK)(expected.embed, data()).backward()
    loss = GlobalBatch(LOSS, chunk=CHUNK)(network.embed, data())
    loss.backward(retain_graph=True)
    loss.backward()
    for parameter, half in zip(network.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.grad, 2 * half.grad)


class Token:
    """Hook that lives as long as the graph that holds it."""

    def __call__(self, grad):
        pass


class Watched(Network):
    """Network that counts the earlier calls whose activations are still alive."""

    def __init__(self):
        super().__init__()
        self.tokens = []
        self.num_alive = []

    def embed(self, x):
        self.num_alive.append(sum(token() is not None for token in self.tokens))
        h = self.net[0](x)
        token = Token()
        h.register_hook(token)
        self.tokens.append(weakref.ref(token))
        z = self.net[1:](h)
        return z, z.flip(0)


def test_only_one_chunks_activations_are_alive_at_a_time():
    network = seeded(Watched)
    GlobalBatch(LOSS, chunk=2)(network.embed, data()).backward()
    assert network.num_alive == [0] * PAIRS


# ---- fits ------------------------------------------------------------------------------------------------------------


class Fitted(pl.LightningModule):
    """Module that trains a network with `GlobalBatch`, or with all activations kept."""

    def __init__(self, make, is_kept=False):
        super().__init__()
        self.network = seeded(make)
        self.global_batch = GlobalBatch(LOSS, chunk=CHUNK)
        self.is_kept = is_kept
        self.total = SumMetric()
        self.losses = []

    def embed(self, x):
        self.log(
            "rows", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True
        )
        self.total.update(x.sum())
        return self.network.embed(x)

    def on_train_start(self):
        seed()

    def training_step(self, batch, batch_idx):
        (x,) = batch
        if self.is_kept:
            parts = [self.embed(part) for part in x.split(CHUNK)]
            loss = LOSS(*map(torch.cat, zip(*parts, strict=True)))
        else:
            loss = self.global_batch(self.embed, x)
        self.losses.append(loss.item())
        return loss

    def on_train_epoch_end(self):
        self.log("total", self.total.compute(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def loader():
    return DataLoader(TensorDataset(data(8 * PAIRS)), batch_size=PAIRS)


@pytest.mark.parametrize(
    "network",
    [
        "Python's random",
        "a generator of its own",
        "checkpoint",
        "spectral norm, old",
        "gradient hooks",
        "hidden teacher and queue",
        "moving center",
    ],
)
def test_a_fit_has_the_losses_and_weights_of_one_with_activations_kept(network):
    """Values that `embed` logs or counts are logged and counted once."""
    scene = {"train": loader, "max_epochs": 1, "limit_train_batches": 3}
    kept = fit(None, partial(Fitted, NETWORKS[network], is_kept=True), **scene)
    seen = fit(None, partial(Fitted, NETWORKS[network]), **scene)
    assert seen.losses == pytest.approx(kept.losses, rel=1e-5)
    for name, value in kept.weights.items():
        error = (seen.weights[name] - value).float().norm()
        assert error <= 1e-5 * value.float().norm() + 1e-7, name
    assert seen.metrics == pytest.approx(kept.metrics, rel=1e-6)
    assert seen.metrics["rows"] == 3 * PAIRS


@pytest.mark.parametrize("precision", ["32-true", "16-true", "bf16-mixed", "64-true"])
def test_two_ranks_have_the_losses_and_weights_of_a_fit_with_activations_kept(precision, two_ranks):
    """In half precision, the gradients of chunks are rounded, so the results agree within some units of the dtype."""
    bound = {"32-true": 1e-5, "64-true": 1e-7, "16-true": 2e-3, "bf16-mixed": 2e-2}[precision]
    scene = {"train": loader, "max_epochs": 1, "limit_train_batches": 2, "precision": precision}
    if precision == "16-true":
        scene["loss_scale"] = 256
    make = NETWORKS["dropout"]
    result = fit(two_ranks, partial(Fitted, make), **scene)
    expected = fit(two_ranks, partial(Fitted, make, is_kept=True), **scene)
    for seen, kept in zip(result, expected, strict=True):
        assert seen.losses == pytest.approx(kept.losses, rel=10 * bound), f"rank {seen.rank}"
        for name, value in kept.parameters.items():
            error = (seen.weights[name] - value).float().norm()
            assert error <= bound * value.float().norm() + 1e-7, f"{name} on rank {seen.rank}"


def test_elastic_refuses_a_loss_over_all_ranks():
    options = {"kind": HybridElasticStrategy, "max_hosts": 2, "meet": "127.0.0.1:29400"}
    seen = fit(None, partial(Fitted, Network), train=loader, raises=True, **options)
    assert "`global_batch.loss` (=InfoNCE) and `strategy` (='hybrid_elastic')" in seen.error
    assert "cannot be combined" in seen.error
