"""First training step of a sliced network, compared with the whole network. Some user code cannot be sliced."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import scenes
from tests.scenes import at, same, this_rank
from tests.strategy.node_slices.sliced import sgd

WIDTH = 8
LENGTH = 5
NUM_HEADS = 4
NUM_SEQUENCES = 3
HEAD_WIDTH = WIDTH // NUM_HEADS


class SelfAttention(nn.Module):
    """Attention as users write it. A `view` computes either the number of heads or their width."""

    def __init__(self, heads, width):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.num_heads = NUM_HEADS
        self.heads = heads
        self.width = width

    def split(self, features):
        batch, length, _ = features.shape
        return features.view(batch, length, self.heads, self.width).transpose(1, 2)

    def forward(self, x):
        queries = self.split(self.query(x))
        keys = self.split(self.key(x))
        values = self.split(self.value(x))
        attended = F.scaled_dot_product_attention(
            queries, keys, values, dropout_p=0.1 if self.training else 0.0
        )
        return attended.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.core = SelfAttention(heads, width)
        self.out = nn.Linear(WIDTH, WIDTH)

    def tensor_plan(self):
        return (("core", "out"),)

    def forward(self, x):
        return self.out(self.core(x))


by_number_of_heads = partial(Attention, NUM_HEADS, -1)
by_width_of_heads = partial(Attention, -1, HEAD_WIDTH)


class Between(nn.Module):
    """Pair of layers with a user's operation in between. The second layer may start at zero."""

    def __init__(self, operation, starts_at_zero=False):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.operation = operation
        if starts_at_zero:
            nn.init.zeros_(self.down.weight)

    def tensor_plan(self):
        return (("up", "down"),)

    def forward(self, x):
        return self.down(self.operation(self.up(x)))


def softmax(x):
    return x.softmax(-1)


def normalized(x):
    return F.layer_norm(x, x.shape[-1:])


def of_unit_length(x):
    return F.normalize(x, dim=-1)


def noisy(x):
    return x + torch.randn_like(x)


def dropped(x):
    return F.dropout(x.relu(), 0.5)


class Gated(Between):
    """Pair with a gate that the plan omits, so that the gate stays whole."""

    def __init__(self):
        super().__init__(F.silu)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        return self.down(self.operation(self.gate(x)) * self.up(x))


class TiedByHand(nn.Module):
    """Head that multiplies by the weight of the embedding without a separate layer."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(WIDTH, WIDTH)
        self.node_slices = (("tokens",),)

    def forward(self, x):
        numbers = x[..., 0].detach().abs().long() % WIDTH
        return F.linear(self.tokens(numbers) + x, self.tokens.weight)


def three_pairs():
    return nn.Sequential(Between(F.relu), Between(softmax), Between(softmax))


class Module(pl.LightningModule):
    """Normalized trunk with dropout, the block under test, and values that each step changes."""

    def __init__(self, make_body):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.trunk = nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH), nn.Dropout(0.2)
            )
            self.body = make_body()
        if not isinstance(self.body, TiedByHand):
            self.node_slices = (("body",),)
        self.num_steps = 0

    def on_fit_start(self):
        torch.manual_seed(5 + this_rank())

    def training_step(self, batch, batch_idx):
        (x,) = batch
        x.mul_(2)
        x = x + 0.1 * torch.randn_like(x)
        self.num_steps += 1
        loss = self.body(self.trunk(x)).float().square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return sgd(self)


def loader():
    generator = torch.Generator().manual_seed(this_rank())
    rows = torch.randn(2 * NUM_SEQUENCES, LENGTH, WIDTH, generator=generator)
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(rows), batch_size=NUM_SEQUENCES
    )


def counts(trainer, module, *args):
    return module.num_steps, int(module.trunk[1].num_batches_tracked)


def fit(ranks, make_body, precision="32-true", **scene):
    scene = {"module": partial(Module, make_body), "raises": True, **scene}
    if precision == "16-true":
        scene["loss_scale"] = 1024
    return scenes.fit(
        ranks,
        train=loader,
        precision=precision,
        max_epochs=1,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        callbacks=[at(on_train_batch_end=counts)],
        **scene,
    )


PRECISIONS = ("32-true", "16-true", "bf16-true")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_attention_that_counts_its_heads_by_a_fixed_number_is_refused_by_name(
    two_ranks, precision
):
    for seen in fit(two_ranks, by_number_of_heads, precision):
        assert seen.error.startswith("ValueError: The input of `body.out` (relative difference"), (
            seen.error
        )
        assert "`body.core`" in seen.error
        assert "head_dim" in seen.error


@pytest.mark.parametrize("operation", [softmax, normalized, of_unit_length])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_operation_over_all_features_of_a_pair_is_refused_by_name(
    two_ranks, operation, precision
):
    for seen in fit(two_ranks, partial(Between, operation, starts_at_zero=True), precision):
        assert seen.error.startswith("ValueError: The input of `body.down` (relative difference"), (
            seen.error
        )


def test_the_first_of_two_pairs_that_differs_is_named(two_ranks):
    for seen in fit(two_ranks, three_pairs):
        assert "`body.1.up`" in seen.error, seen.error


def test_a_weight_that_code_reads_outside_of_its_layer_is_refused_by_the_name_of_the_module(
    two_ranks,
):
    for seen in fit(two_ranks, TiedByHand):
        assert seen.error.startswith("ValueError: The output of `body` (of shape"), seen.error


def test_an_error_between_two_layers_that_are_cut_names_the_pair(two_ranks):
    for seen in fit(two_ranks, Gated):
        assert seen.error.startswith("RuntimeError: The size of tensor a"), seen.error
        assert "`body.up` and `body.down`" in seen.error


RIGHT = [
    by_width_of_heads,
    partial(Between, F.relu),
    partial(Between, dropped),
    partial(Between, noisy),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make_body", RIGHT)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_network_that_can_be_cut_trains_and_the_comparison_counts_no_step(
    two_ranks, make_body, precision
):
    for seen in fit(two_ranks, make_body, precision):
        assert not seen.error
        assert seen.looks["on_train_batch_end"] == [(1, 1), (2, 2)]


def test_the_comparison_changes_no_bit_of_a_run(two_ranks):
    for make_body in RIGHT:
        compared = fit(two_ranks, make_body, raises=False)
        alone = two_ranks.run(without_comparison, make_body)
        for seen, expected in zip(compared, alone, strict=True):
            assert same(seen.weights, expected.weights), f"rank {seen.rank}"
            assert same(seen.rows, expected.rows), f"rank {seen.rank}"


def without_comparison(make_body):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lightning_hybrid.strategy.node_slices.extension.NodeSlicesExtension.before_training_step",
            lambda *args: None,
        )
        return fit(None, make_body)
