"""Transformers sliced across the ranks of a node: attention by heads, feed-forward by features, both ends by tokens."""

from functools import partial
from importlib.util import find_spec

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lightning_hybrid.optim import LAMB, LARS, param_groups
from lightning_hybrid.strategy.node_slices.vocabulary import token_losses
from tests import scenes
from tests.scenes import Saves, same, this_rank
from tests.strategy.node_slices.sliced import adamw, sgd

LONG = pytest.mark.long
OF_TRANSFORMERS = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)
# Relative errors. Over 20 steps, sums are added in a different order. Half precision rounds each gradient by 5e-4.
BOUNDS = {"64-true": 1e-10, "32-true": 1e-5, "16-true": 1e-3}
# This number is not divisible by four ranks, like BERT's 30,522 tokens.
NUM_TOKENS = 31
LENGTH = 6
WIDTH = 16
NUM_HEADS = 4
PADDING = 0
NUM_MASKED = 2
NUM_SEQUENCES = 8  # over all ranks
NUM_STEPS = 20  # in a fit


class Encoder(nn.Module):
    """Encoder of torch's layers, with position embeddings at the start and a tied head at the end."""

    def __init__(self, batch_first=True):
        super().__init__()
        self.word_embeddings = nn.Embedding(NUM_TOKENS, WIDTH, padding_idx=PADDING)
        self.positions = nn.Parameter(0.5 * torch.randn(LENGTH, WIDTH))
        layer = partial(
            nn.TransformerEncoderLayer, WIDTH, NUM_HEADS, 2 * WIDTH, 0.0, "gelu", norm_first=True
        )
        self.encoder = nn.Sequential(*(layer(batch_first=batch_first) for _ in range(2)))
        self.norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.Linear(WIDTH, NUM_TOKENS)
        self.batch_first = batch_first
        self.decoder.weight = self.word_embeddings.weight

    def tensor_plan(self):
        return (("word_embeddings",), ("encoder",), ("decoder",))

    def features(self, tokens):
        x = self.word_embeddings(tokens) + self.positions
        padding = tokens == PADDING
        causal = torch.ones(LENGTH, LENGTH).triu(LENGTH - 2).bool()
        if not self.batch_first:
            x = x.transpose(0, 1)
        for layer in self.encoder:
            x = layer(x, src_mask=causal, src_key_padding_mask=padding)
        if not self.batch_first:
            x = x.transpose(0, 1)
        return self.norm(x)


SEQUENCE_FIRST = partial(Encoder, batch_first=False)


class Bert(nn.Module):
    """BERT of `transformers` with a bias in the head. Activations are recomputed in backward."""

    def __init__(self):
        super().__init__()
        import transformers

        config = transformers.BertConfig(
            vocab_size=NUM_TOKENS,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_attention_heads=NUM_HEADS,
            num_hidden_layers=2,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.1,
        )
        self.bert = transformers.BertForMaskedLM(config)
        self.bert.activation_checkpointing_enable()

    @property
    def decoder(self):
        return self.bert.cls.predictions.decoder

    def features(self, tokens):
        mask = (tokens != PADDING)[:, None, None]
        hidden = self.bert.bert(tokens, attention_mask=mask).last_hidden_state
        return self.bert.cls.predictions.transform(hidden)


class Module(pl.LightningModule):
    def __init__(self, make_optimizer, is_cut=True, make_net=Encoder):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = make_net()
        self.make_optimizer = make_optimizer
        self.losses = []
        self.node_slices = (("net",),) if is_cut else ()

    def loss(self, batch):
        tokens, targets = batch
        losses = token_losses(self.net.decoder, self.net.features(tokens), targets)
        return losses.sum() / (len(tokens) * NUM_MASKED)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return self.make_optimizer(self)


def lamb(module, fused=True):
    return LAMB(param_groups(module, weight_decay=1e-2), lr=0.01, fused=fused, max_grad_norm=0.5)


def lars(module):
    return LARS(param_groups(module, weight_decay=1e-3), lr=0.1, trust_coefficient=0.1)


def loader(num_steps=NUM_STEPS):
    """Return a loader of this rank's share of batches. The batches do not depend on the number of ranks."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, NUM_TOKENS, (num_steps, NUM_SEQUENCES, LENGTH), generator=generator)
    tokens[:, ::3, -1:] = PADDING
    targets = torch.full_like(tokens, -100)
    targets[..., :NUM_MASKED] = tokens[..., :NUM_MASKED]
    tokens[..., :NUM_MASKED] = NUM_TOKENS - 1  # in the last rank's slice
    num_ranks = torch.distributed.get_world_size()
    tokens = tokens.chunk(num_ranks, dim=1)[this_rank()].flatten(0, 1)
    targets = targets.chunk(num_ranks, dim=1)[this_rank()].flatten(0, 1)
    pairs = list(zip(tokens, targets, strict=True))
    return torch.utils.data.DataLoader(pairs, batch_size=NUM_SEQUENCES // num_ranks)


def fit(ranks, make_optimizer, is_cut=True, *, make_net=Encoder, num_steps=NUM_STEPS, **scene):
    """Fit one epoch and return the observations of each rank."""
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    options |= {"train": partial(loader, num_steps), "val": partial(loader, 1)}
    options |= {"module": partial(Module, make_optimizer, is_cut, make_net)}
    return scenes.fit(ranks, **options | scene)


def mean_losses(results):
    """Return the mean loss of all ranks by step."""
    losses_of_ranks = [seen.losses for seen in results]
    return [sum(losses) / len(losses) for losses in zip(*losses_of_ranks, strict=True)]


MORE_FITS = [
    (lamb, "32-true", 2, {}),
    (lamb, "32-true", 4, {"ranks_per_node": 2}),
    (lamb, "16-true", 4, {"ranks_per_node": 2}),
    (lamb, "64-true", 4, {}),
    (sgd, "32-true", 4, {}),
    (partial(lamb, fused=False), "32-true", 2, {}),
    (adamw, "32-true", 2, {"gradient_clip_val": 0.1}),
    (adamw, "32-true", 2, {"make_net": SEQUENCE_FIRST}),
]


@pytest.mark.parametrize(
    ("optimizer", "precision", "num_ranks", "scene"),
    [
        (sgd, "64-true", 4, {"ranks_per_node": 2}),
        (lars, "16-true", 2, {"make_net": SEQUENCE_FIRST}),
        pytest.param(
            lamb,
            "32-true",
            4,
            {"ranks_per_node": 2, "make_net": Bert},
            marks=[LONG, OF_TRANSFORMERS],
        ),
        *(pytest.param(*values, marks=LONG) for values in MORE_FITS),
    ],
)
def test_twenty_losses_are_those_of_the_whole_network_on_one_rank(
    one_rank, rank_pool, optimizer, precision, num_ranks, scene
):
    scene = {"precision": precision, **scene}
    if precision == "16-true":
        scene["loss_scale"] = 1024
    on_one_rank = fit(one_rank, optimizer, False, **scene | {"ranks_per_node": None})
    cut = fit(rank_pool.ranks(num_ranks), optimizer, **scene)
    expected = mean_losses(on_one_rank)
    assert mean_losses(cut) == pytest.approx(expected, rel=BOUNDS[precision])
    val = on_one_rank[0].metrics["val"]
    assert cut[0].metrics["val"] == pytest.approx(val, rel=BOUNDS[precision])
    assert expected[-1] < 0.99 * expected[0]


@pytest.mark.parametrize(
    ("make_net", "optimizer", "precision"),
    [
        (Encoder, lamb, "16-true"),
        pytest.param(Bert, lamb, "32-true", marks=[LONG, OF_TRANSFORMERS]),
    ],
)
def test_a_checkpoint_resumes_whole_and_cut_over_other_numbers_of_ranks(
    two_ranks, four_ranks, tmp_path, make_net, optimizer, precision
):
    scene = {"make_net": make_net, "precision": precision, "num_steps": 6, "max_epochs": 2}
    if precision == "16-true":
        scene["loss_scale"] = 1024
    file_of_whole = tmp_path / "whole.ckpt"
    file_of_cut = tmp_path / "cut.ckpt"
    whole = fit(two_ranks, optimizer, False, callbacks=[Saves(file_of_whole, epoch=0)], **scene)
    cut = fit(two_ranks, optimizer, True, callbacks=[Saves(file_of_cut, epoch=0)], **scene)
    assert shapes_in(file_of_whole) == shapes_in(file_of_cut)

    resumed = fit(two_ranks, optimizer, ckpt_path=file_of_cut, **scene)
    assert same(resumed[0].weights, cut[0].weights)
    assert same(resumed[0].states, cut[0].states)

    expected = pytest.approx(mean_losses(whole)[-6:], rel=BOUNDS[precision])
    cut_to_whole = fit(two_ranks, optimizer, False, ckpt_path=file_of_cut, **scene)
    assert mean_losses(cut_to_whole)[-6:] == expected
    whole_to_cut = fit(four_ranks, optimizer, True, ckpt_path=file_of_whole, **scene)
    assert mean_losses(whole_to_cut)[-6:] == expected


def shapes_in(path):
    """Return weights and optimizer state of a checkpoint, with shapes in place of tensors."""
    checkpoint = torch.load(path, weights_only=True)
    tensors = [checkpoint["state_dict"], checkpoint["optimizer_states"]]
    return tree_map_only(torch.Tensor, torch.Tensor.size, tensors)
